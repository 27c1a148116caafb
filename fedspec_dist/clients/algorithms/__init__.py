"""Local methods, a file for each kind: the client's formula and, where the paper has one, the server's beside it.

A method knows no rank, no device and no data set: its client half works on vectors `[..., P]` (`clients.vectors`), its
server half on a round's matrix (`fedspec_dist.core.cohort`).
"""
