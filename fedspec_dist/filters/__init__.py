"""Gradient filters: linear operators that change a client's gradient before its local step.

A filter is built from the layers it acts on, `Filter(segments, **parameters)`, and called with the flat gradient
`[..., P]`, which it changes in place. Nothing here knows a model, a device or a rank; only `torch` and
`fedspec_dist.parameters` are imported. A new one is one file and one line in `methods.FILTERS`.
"""
