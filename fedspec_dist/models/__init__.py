"""Models: plain modules without buffers, usable with `torch.func`, sized from the data set's image shape.

May import its own modules, nothing else of the package. A model is one file with a callable
`(input_shape, num_classes, *, own parameters) -> network.Network` and one line in `methods.MODELS`.
"""
