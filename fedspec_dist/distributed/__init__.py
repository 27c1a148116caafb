"""Who computes what, and how vectors move between ranks. The only folder that imports torch.distributed.

May import `parameters`, `seeding` and `cohort` (whose interfaces it implements); knows no method, no data set and no
model.
"""
