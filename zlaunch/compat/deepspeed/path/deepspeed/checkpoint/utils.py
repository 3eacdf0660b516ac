"""``clone_tensors_for_torch_save``, and the names of DeepSpeed's files."""

from zlaunch.compat.deepspeed.checkpoint_files import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from zlaunch.compat.deepspeed.tools import clone_tensors_for_torch_save
