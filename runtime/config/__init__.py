"""Reads DeepSpeed's config files: loads, checks and completes them. Imports no torch.

The sections are in ``zero``, ``other_sections`` and ``optimizers``, what stands at the top in ``schema``.
"""

from .load import ConfigError, ConfigFileError, Loaded, load
from .resolve import Effective, check_batch, open_values, refuse_open, resolve
from .schema import Config, json_schema

__all__ = [
    "Config",
    "ConfigError",
    "ConfigFileError",
    "Effective",
    "Loaded",
    "check_batch",
    "json_schema",
    "load",
    "open_values",
    "refuse_open",
    "resolve",
]
