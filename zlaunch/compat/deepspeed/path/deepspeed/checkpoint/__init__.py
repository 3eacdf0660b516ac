"""Helpers for checkpoints."""

from zlaunch.compat.deepspeed.missing import absent as _absent

from . import constants as constants
from . import utils as utils
from .constants import *  # noqa: F403
from .utils import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

__getattr__ = _absent("deepspeed.checkpoint")
