"""Where DeepSpeed's scripts look for most things."""

from zlaunch.compat.deepspeed.optimizers import DeepSpeedOptimizer, ZeROOptimizer

from . import activation_checkpointing as activation_checkpointing
from . import base_optimizer as base_optimizer
from . import config as config
from . import config_utils as config_utils
from . import dataloader as dataloader
from . import engine as engine
from . import fp16 as fp16
from . import lr_schedules as lr_schedules
from . import pipe as pipe
from . import state_dict_factory as state_dict_factory
from . import utils as utils
from . import zero as zero
