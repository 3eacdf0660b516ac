"""Captures and restores the random number generators that training draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, numpy's (where it is in use) and torch's generators, of the CPU and of
    ``device``: plain values and tensors.
    """
    version, words, gauss = random.getstate()
    python = (version, torch.tensor(words, dtype=torch.int64), gauss)
    found: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        keys = torch.from_numpy(keys.view("int32").copy())
        found["numpy"] = (str(kind), keys, int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`capture` has returned, as far as this process has such generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().view("uint32"), position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
