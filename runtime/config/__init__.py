"""Reading DeepSpeed's config files: load, check, settle. Imports no torch."""

from .load import ConfigError, Loaded, load
from .resolve import Effective, resolve
from .schema import Config, json_schema

__all__ = ["Config", "ConfigError", "Effective", "Loaded", "json_schema", "load", "resolve"]
