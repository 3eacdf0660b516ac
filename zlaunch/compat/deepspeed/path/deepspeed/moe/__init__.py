"""Mixtures of experts."""

from . import layer as layer
from . import sharded_moe as sharded_moe
from . import utils as utils
