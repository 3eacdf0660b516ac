"""Run tests/gpu, and the tests marked ``multi_gpu``, on pretended GPUs: each rank has one.

python -m pytest -p tests.pretend_gpu.plugin -m "gpu or multi_gpu" tests/gpu tests/runtime/test_equivalence.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.pretend_gpu import device

device.install()

from tests.pretend_gpu.clocks import findings  # noqa: E402  # torch.cuda has to be replaced before
from tests.pretend_gpu.modes import running  # noqa: E402
from tests.runtime import workers  # noqa: E402

NEEDS_A_DEVICE = {
    "tests/gpu/test_kernels.py": "CuPy compiles and launches",
    "tests/gpu/test_backward_step.py::test_gradients_take_the_memory_of_few_units": "a peak of memory",
    "tests/gpu/test_engine.py::test_tf32": "products in TF32",
    "tests/gpu/test_engine.py::test_nccl_is_aborted_after_an_error": "a process of its own",
}
"""File or test -> what of a GPU it needs that is not pretended."""
_GPUS = ("0",) * 8
"""Lists the machine's GPUs: each rank sees its own as device 0."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the machine pretended GPUs."""
    config.option.devices = "cuda"
    hidden: Any = config.pluginmanager.get_plugin("hidden-gpus")
    hidden.gpus = _GPUS
    workers.use_machine(__name__, pretended)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a pretended GPU cannot do."""
    left = [item for item in items if any(item.nodeid.startswith(name) for name in NEEDS_A_DEVICE)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Run a test of tests/gpu on it; what it finds fails the test."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with pretended():
        return (yield)


@contextmanager
def pretended() -> Iterator[None]:
    """Let this process see a GPU, and fail if the order of accesses is not right."""
    findings.clear()
    with running():
        yield
    if findings.races or findings.mixes:
        pytest.fail(f"{dict(findings.races)} {dict(findings.mixes)}")
