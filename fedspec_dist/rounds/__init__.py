"""A run, round by round: phases, sampling, the loop, evaluation, checkpoints. May import every other folder."""
