"""Aggregators: from a round's matrix to the server's direction. See `server.protocols`."""
