"""Reads DeepSpeed's config files: loads, checks and completes them. Imports no torch.

The sections are in ``zero``, ``other_sections`` and ``optimizers``, what stands at the top in ``schema``.
"""

from ..mesh import MeshShape
from .load import ConfigError, ConfigFileError, Loaded, load
from .parallel import expert_size, mesh_shape, pipeline_size, sequence_size, tensor_size
from .resolve import Effective, check_batch, find_mesh, open_lines, open_values, refuse_open, resolve
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
    "find_mesh",
    "json_schema",
    "load",
    "mesh_shape",
    "open_lines",
    "open_values",
    "pipeline_size",
    "refuse_open",
    "resolve",
    "sequence_size",
    "tensor_size",
]
