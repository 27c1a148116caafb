"""Data sets, their partition over clients, and batches as tensors that stay on the device.

May import `core` and its own modules, nothing else of the package. A data set is one file with a class like
`images.digits.Digits`, built as `Source(root, download, seed, **its own parameters)`, and one line in
`methods.DATASETS`; a partition is a function in `partitions` and one line in `methods.PARTITIONS`.
"""
