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
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # it is there, but not exported
        return record_function(f"zlaunch::{name}")
    return nullcontext()
