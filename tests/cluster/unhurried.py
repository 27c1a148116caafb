"""Plugin for the config: FedAvg whose clients take their time, so that a run can be stopped on its way on any machine.

The class is elsewhere: what is submitted from a login node imports no torch.
"""

from fedspec_dist.config.methods import register

register("local.algorithm", "unhurried", "tests.cluster.unhurried_method:Unhurried")
