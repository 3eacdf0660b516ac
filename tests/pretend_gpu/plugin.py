"""Run tests/gpu on the pretended GPU.

python -m pytest -p tests.pretend_gpu.plugin tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pretend_gpu import device

device.install()

from tests.pretend_gpu.clocks import findings  # noqa: E402  # torch.cuda has to be replaced before
from tests.pretend_gpu.modes import running  # noqa: E402

NEEDS_A_DEVICE = {
    "tests/gpu/test_kernels.py": "CuPy compiles and launches",
    "tests/gpu/test_backward_step.py::test_gradients_take_the_memory_of_few_units": "a peak of memory",
    "tests/gpu/test_engine.py::test_tf32": "products in TF32",
    "tests/gpu/test_engine.py::test_nccl_is_aborted_after_an_error": "a process of its own",
}
"""File or test -> what of a GPU it needs that is not pretended."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a pretended GPU cannot do."""
    left = [item for item in items if any(item.nodeid.startswith(name) for name in NEEDS_A_DEVICE)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test on it; what it finds fails the test."""
    findings.clear()
    with running():
        outcome = yield
    outcome.get_result()  # type: ignore[attr-defined]
    if findings.races or findings.mixes:
        pytest.fail(f"{dict(findings.races)} {dict(findings.mixes)}")
