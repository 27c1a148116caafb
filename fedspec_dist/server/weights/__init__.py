"""Weightings: how much each client of a round counts. One file per paper, see `server.protocols.Weighting`."""
