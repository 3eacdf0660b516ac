"""Loaders."""

from zlaunch.compat.deepspeed.tools import RepeatingLoader
from zlaunch.runtime.data import EngineLoader as DeepSpeedDataLoader
