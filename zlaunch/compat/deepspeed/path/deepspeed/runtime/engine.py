"""The engine."""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from zlaunch.compat.deepspeed.engine import DeepSpeedEngine

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
DeepSpeedOptimizerCallable = _Callable[[_Any], _Any]
DeepSpeedSchedulerCallable = _Callable[[_Any], _Any]
