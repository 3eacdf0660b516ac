"""Data: a loader that gives each rank its own samples, and resumes where a checkpoint was written.

Read ``loader`` (what scripts iterate over, and its position), then where samples come from: ``order`` (data
sets with indices), ``stream`` (those without; with ``marks`` they resume without being read again) and
``adopt`` (the script's own DataLoader). ``same_order`` finds out whether all ranks see the same order, which
sharing it out takes for granted, and ``draws`` makes the order of what draws from global generators the same.
``packing`` is what scripts put into their loaders for samples of different lengths.
"""

from .adopt import DataSource, check_data, read_source
from .loader import EngineLoader, LoaderOptions

__all__ = ["DataSource", "EngineLoader", "LoaderOptions", "check_data", "read_source"]
