"""Federated-learning research on GPU clusters: a launcher and runtime over torch.distributed."""

from fedspec_dist.moved import install

install()
del install
