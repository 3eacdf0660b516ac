"""Reads DeepSpeed's config files: loads, checks and completes them. Imports no torch.

The sections are in ``zero``, ``other_sections`` and ``optimizers``, what stands at the top in ``schema``.
"""

from .load import ConfigError, ConfigFileError, Loaded, load
from .parallel import MeshShape, expert_size, mesh_shape, tensor_size
from .resolve import Effective, check_batch, open_values, refuse_open, resolve
from .schema import Config, json_schema

__all__ = [
    "Config",
    "ConfigError",
    "ConfigFileError",
    "Effective",
    "Loaded",
    "MeshShape",
    "check_batch",
    "expert_size",
    "json_schema",
    "load",
    "mesh_shape",
    "open_values",
    "refuse_open",
    "resolve",
    "tensor_size",
]
