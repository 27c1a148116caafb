"""The config of a run: its schema, files and overrides, the table of methods, what does not go together. No torch."""

from fedspec_dist.config.files import ConfigError
from fedspec_dist.config.loading import load, validate
from fedspec_dist.config.overrides import split_arguments
from fedspec_dist.config.schema import DEFAULTS, Cluster, Config, Local, Phase
from fedspec_dist.config.section import Choice
from fedspec_dist.config.values import Range, expand_home, minutes

__all__ = [
    "DEFAULTS",
    "Choice",
    "Cluster",
    "Config",
    "ConfigError",
    "Local",
    "Phase",
    "Range",
    "expand_home",
    "load",
    "minutes",
    "split_arguments",
    "validate",
]
