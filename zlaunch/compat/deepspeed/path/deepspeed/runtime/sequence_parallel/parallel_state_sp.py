"""The groups of ranks that share sequences."""

from zlaunch.compat.deepspeed.sequence_groups import *  # noqa: F403  # a module of functions
