"""Whole fp32 weights from a checkpoint, and the names of the files of DeepSpeed's own checkpoints."""

import re
from pathlib import Path

from zlaunch.compat.deepspeed.missing import missing_function as _missing
from zlaunch.runtime.checkpoint.export.full_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

_INSTEAD = "checkpoints are safetensors files and a manifest: use get_fp32_state_dict_from_zero_checkpoint"
parse_optim_states = _missing("utils.zero_to_fp32.parse_optim_states", _INSTEAD)


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Return the file with the model's state of rank 0 in a folder that DeepSpeed has saved.

    Raises FileNotFoundError where it is not there, as in folders that zlaunch has saved.
    """
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    return get_checkpoint_files(checkpoint_dir, name)[0]


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Return the files of a folder that match a pattern, with their numbers in order; raises
    FileNotFoundError for none.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{checkpoint_dir}: there is no such folder")
    found = sorted(map(str, folder.glob(glob_pattern)), key=_by_numbers)
    if not found:
        raise FileNotFoundError(
            f"{checkpoint_dir} has no {glob_pattern}, which are files of DeepSpeed. zlaunch's {_INSTEAD}"
        )
    return found


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Return the files with the optimizer's state in a folder that DeepSpeed has saved."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Return the files with the model's state in a folder that DeepSpeed has saved."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def _by_numbers(path: str) -> list[tuple[bool, int, str]]:
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path)
    ]


if __name__ == "__main__":
    from zlaunch.runtime.checkpoint.export.full_weights import main

    main()
