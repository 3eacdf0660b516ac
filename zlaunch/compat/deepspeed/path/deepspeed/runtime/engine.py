"""The engine."""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from zlaunch.compat.deepspeed.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = _Callable[[_Any], _Any]
DeepSpeedSchedulerCallable = _Callable[[_Any], _Any]
