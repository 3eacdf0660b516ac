"""The config as an object, and the names of optimizers in it."""

from zlaunch.compat.deepspeed.config import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
    DeepSpeedConfig,
    get_gradient_clipping,
)
from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.runtime.config import ConfigError as DeepSpeedConfigError

__getattr__ = _absent("deepspeed.runtime.config")
