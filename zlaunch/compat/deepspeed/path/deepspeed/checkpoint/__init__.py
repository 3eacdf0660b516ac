"""Helpers for checkpoints."""

from . import constants as constants
from . import utils as utils
