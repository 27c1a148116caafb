"""Image data sets, and what is done to their pixels."""
