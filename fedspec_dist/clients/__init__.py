"""What a client does in a round: local algorithms (a file for each kind), the local step, executors, statistics.

May import `parameters`, `seeding` and the folders below it (data, models, tasks, filters, fisher). A local algorithm is
a formula on vectors `[..., P]`; it knows no rank, no round and no data.
"""
