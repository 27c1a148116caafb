"""Aggregators: from a round's matrix to the server's direction. One file per paper, see `server.protocols`."""
