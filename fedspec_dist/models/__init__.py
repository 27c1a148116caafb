"""Models: modules sized from a sample's shape and the number of outputs, usable with `torch.func`.

May import its own modules, nothing else of the package. A model is a callable `(input_shape, num_outputs, *, own
parameters) -> torch.nn.Module` and one line in `methods.MODELS`; one that is a `network.Network` tells its features
apart from its last layer, as some local methods need.
"""
