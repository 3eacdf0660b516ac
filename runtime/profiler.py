"""Names the parts of a step for torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def named(name: str) -> AbstractContextManager[Any]:
    """Return a context whose work torch's profiler shows as ``zlaunch::NAME``. Without a profiler it costs
    nothing.
    """
    return record_function(f"zlaunch::{name}") if is_profiled() else nullcontext()


def is_profiled() -> bool:
    """Tell whether torch's profiler is on."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]  # it is there, not exported
