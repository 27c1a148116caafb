"""Data sets of texts, as sequences of tokens."""
