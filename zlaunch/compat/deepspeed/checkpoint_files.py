"""Files as DeepSpeed names and writes them, for scripts with checkpoints of their own.

The engine's checkpoints are other files: ``zlaunch.runtime.checkpoint``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of the model's states, such as ``mp_rank_00_model_states.pt``."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of a rank's optimizer states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of a layer's states."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


@dataclass
class CheckpointCommitInfo:
    """Names a checkpoint that is about to be written, or is."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads files of states."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> Any:
        """End a checkpoint whose files are all written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        os.makedirs(path, exist_ok=exist_ok)


class TorchCheckpointEngine(CheckpointEngine):
    """Writes with ``torch.save``, always in its zip format, and reads with ``torch.load``, which runs code of
    pickled files. ``config_params`` is not read: in DeepSpeed it chooses the older format.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: each file stands for itself."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: each file is there when `save` returns."""
        return True
