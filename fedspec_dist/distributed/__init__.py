"""Who computes what, and how vectors move between ranks. The only folder that imports torch.distributed.

May import `parameters`, `seeding` and `server.cohort` (the interface that it implements); knows no method, no data
set and no model.
"""
