"""The device, behind one object."""

from zlaunch.compat.deepspeed.accelerator import Accelerator as DeepSpeedAccelerator

from .real_accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator
