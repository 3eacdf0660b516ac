"""DeepSpeed's config files: models, loader, checks, and what "auto" becomes. Imports no torch.

Read ``fields`` (support levels, the base of all sections), ``schema`` (the sections; ``zero``,
``parallel`` and ``optimizers`` have large ones), ``load``, ``check`` (unknown keys, values,
combinations), ``resolve`` ("auto"), ``axis_sizes``, ``batch_sizes`` and ``partition_config``.
``unsupported``, ``foreign_keys``, ``other_names`` and ``forms`` serve messages; ``reference`` writes the
page of all keys.
"""

from ..mesh import MeshShape
from .axis_sizes import expert_size, mesh_shape, pipeline_size, sequence_size, tensor_size
from .batch_sizes import fits_no_world
from .load import ConfigError, ConfigFileError, Loaded, load
from .resolve import (
    Effective,
    check_batch,
    find_mesh,
    leaves_expert_size_open,
    open_lines,
    open_values,
    refuse_open,
    resolve,
    with_expert_size,
)
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
    "fits_no_world",
    "json_schema",
    "leaves_expert_size_open",
    "load",
    "mesh_shape",
    "open_lines",
    "open_values",
    "pipeline_size",
    "refuse_open",
    "resolve",
    "sequence_size",
    "tensor_size",
    "with_expert_size",
]
