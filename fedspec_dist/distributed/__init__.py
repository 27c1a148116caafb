"""Who computes what, and how vectors move between ranks. With `processes` the only folder that
imports torch.distributed.

May import `core`, whose interfaces it implements; knows no method, no data set and no model.
"""
