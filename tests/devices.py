"""Hide the GPUs of a machine from all tests except those that are to use them.

Note [Hidden GPUs]
An empty CUDA_VISIBLE_DEVICES hides the GPUs from the launcher, and from torch in every process that a test
starts. The process that runs the tests needs more: CUDA reads the variable once, and tests/gpu use the GPUs
there. So this process asks CUDA while the GPUs are visible, and torch.cuda says during all other tests that
there is none.

Tests marked ``multi_gpu`` train on CPU workers, and with ``--devices cuda`` on GPUs: the same test then runs
over NCCL, each rank with a GPU of its own. Tests with more ranks than GPUs are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from zlaunch.system.machine import Devices, discover

VISIBLE = "CUDA_VISIBLE_DEVICES"
_INPUT = "cuda_visible_devices"
_shown: tuple[str, ...] = ()


def add_options(parser: pytest.Parser) -> None:
    """Add the option that lets tests marked `multi_gpu` use the GPUs."""
    parser.addoption(
        "--devices",
        choices=("cpu", "cuda"),
        default="cpu",
        help="Where tests marked multi_gpu train. All others outside tests/gpu use the CPU. [default: cpu]",
    )


def shown_gpus() -> tuple[str, ...]:
    """Return the GPUs that the running test may use, as values of CUDA_VISIBLE_DEVICES; empty: none."""
    return _shown


def _uses_gpus(item: pytest.Item) -> bool:
    """Tell whether a test is to see the GPUs of this machine."""
    if item.nodeid.startswith("tests/gpu/"):
        return True
    return item.config.getoption("--devices") == "cuda" and item.get_closest_marker("multi_gpu") is not None


class HiddenGpus:
    """The plugin that hides the GPUs. See Note [Hidden GPUs]."""

    def __init__(
        self, config: pytest.Config, find: Callable[[Mapping[str, str]], Devices] = discover
    ) -> None:
        # a process of pytest-xdist has been started with the variable that hides them
        given = getattr(config, "workerinput", {}).get(_INPUT, dict(os.environ))
        self.visible: str | None = given.get(VISIBLE)
        self.gpus = find(given).tokens
        if self.gpus:
            import torch

            _set(self.visible)
            torch.cuda.is_available()
        _set("")

    def pytest_unconfigure(self) -> None:
        _set(self.visible)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_INPUT] = {} if self.visible is None else {VISIBLE: self.visible}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self.shown() if _uses_gpus(item) else self.hidden():
            return (yield)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let this process and those that it starts see the GPUs."""
        global _shown
        _shown = self.gpus
        _set(self.visible)
        try:
            yield
        finally:
            _shown = ()
            _set("")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let torch find no GPU in this process."""
        with pytest.MonkeyPatch.context() as patch:
            if self.gpus:
                patch.setattr("torch.cuda.is_available", lambda: False)
                patch.setattr("torch.cuda.device_count", lambda: 0)
            yield


def _set(visible: str | None) -> None:
    if visible is None:
        os.environ.pop(VISIBLE, None)
    else:
        os.environ[VISIBLE] = visible
