"""Transforms: what happens to a round's updates between their weighting and their aggregation.

Each maps a `Cohort` to a `Cohort` whose rows are combinations of those that were received, see `mixed.Mixed`. The rows
as they were received are what weights are learned from, and what the server halves of local methods work on.
"""
