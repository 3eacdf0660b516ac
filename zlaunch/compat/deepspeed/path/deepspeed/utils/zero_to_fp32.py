"""Whole fp32 weights from a checkpoint."""

from zlaunch.compat.deepspeed.missing import missing_function as _missing
from zlaunch.runtime.checkpoint.export.full_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

_INSTEAD = "checkpoints are safetensors files and a manifest: use get_fp32_state_dict_from_zero_checkpoint"
get_model_state_file = _missing("utils.zero_to_fp32.get_model_state_file", _INSTEAD)
get_optim_files = _missing("utils.zero_to_fp32.get_optim_files", _INSTEAD)
parse_optim_states = _missing("utils.zero_to_fp32.parse_optim_states", _INSTEAD)
get_model_state_files = _missing("utils.zero_to_fp32.get_model_state_files", _INSTEAD)


if __name__ == "__main__":
    from zlaunch.runtime.checkpoint.export.full_weights import main

    main()
