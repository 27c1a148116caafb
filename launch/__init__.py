"""Starting runs on a cluster, and many of them.

    commands           submit, follow, status, cancel, sweep, templates; __main__: all of them as `fedspec NAME`
    where a run goes   submission -> start -> submitit; cluster: the text for sbatch; record: the files beside the run
    --cluster local    local: a controller that starts the ranks, instead of SLURM
    inside the job     job (every rank; cause, overdue: what a signal means), aftermath (the batch script's end);
                       attempts: the account of starts and ends that they share
    what there is      queue: squeue, sacct, processes; outcomes: what runs say of themselves (their events.jsonl);
                       logs: what jobs printed, for those that died before they could say anything
    sweeps             axes: the file and its runs; tune: the search, a pure function; study: which are wanted now;
                       drive: getting them done (pool: here); collect: tables

What runs on a login node imports the config's schema and no torch; inside a job torch comes with the run itself.
"""
