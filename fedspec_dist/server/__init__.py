"""The server's arithmetic: aggregators (one file per paper), client weights and server optimizers.

An aggregator maps a `Cohort` (the round's updates, weights and sketches) to a `Direction`. It sees matrices only
through the `RowMatrix` protocol, so the same formula runs on one dense tensor and on columns spread over ranks.
Imported from here: `torch`, `numpy` and the folders below; never `torch.distributed`. A new aggregator is one file and
one line in `methods.AGGREGATORS`.
"""
