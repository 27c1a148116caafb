"""The words that all folders share: parameters as one vector, a round's cohort, keyed draws, kinds of failure."""
