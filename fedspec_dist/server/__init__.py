"""The server's arithmetic: transforms, aggregators, weightings and server optimizers.

A weighting maps a `Cohort` (a round's updates and what is known beside them) to `Weights`, an aggregator maps it to a
`Direction`, an optimizer takes a step along that. They see long vectors only as matrices and slices, through the
protocols of `fedspec_dist.core.cohort`, so the same formula runs on one dense tensor and on columns spread over ranks.
Imported from here: `torch`, `numpy` and the folders below; never `torch.distributed`. A new method is one class and one
line in `fedspec_dist.config.methods`.
"""
