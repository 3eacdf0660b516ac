"""``clone_tensors_for_torch_save``."""

from zlaunch.compat.deepspeed.tools import clone_tensors_for_torch_save
