"""Gradient filters: what changes a client's gradient before its local step, layer by layer.

A filter is built from the layers it acts on, `Filter(segments, **parameters)`. `filter.prepare(round_number, seed)` is
called before each client's steps of a round, and `filter(gradient)` changes the flat gradient `[..., P]` in place.
Nothing here knows a model, a device or a rank; of the package only `core` is imported. A new one is one class and one
line in `methods.FILTERS`; `layerwise.LayerFilter` and `layerwise.RatioFilter` do all but the formula.
"""
