"""Who runs the local steps of a rank's clients."""
