"""Starting runs on a cluster: submit, follow, status, cancel, sweeps.

What runs on a login node imports the config's schema and no torch; `job.py` and `aftermath.py` run inside the job.
"""
