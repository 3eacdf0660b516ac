"""Reading DeepSpeed's config files: load, check, settle. Imports no torch."""

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
