"""A run's folder: its files, its events, its trackers, and what makes it the same run. No torch."""
