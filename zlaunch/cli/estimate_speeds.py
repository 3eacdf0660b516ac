"""Read the speeds for `zlaunch estimate --simulate` from its options and from files of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from zlaunch.runtime.step_time.simulate import Speeds, StepTime


def _speed(name: str, metavar: str, text: str) -> Callable[..., Any]:
    kind = click.FloatRange(min=0, min_open=True)
    return click.option(name, type=kind, metavar=metavar, help=f"{text}, for --simulate.")


SPEEDS = (
    click.option(
        "--simulate", is_flag=True, help="Add a lower bound of the step time, from measured speeds."
    ),
    _speed("--tflops", "TFLOPS", "Matrix-product speed of a GPU"),
    _speed("--link", "GB/S", "Bus bandwidth of collectives, from `zlaunch bench net`"),
    _speed("--host_link", "GB/S", "Bandwidth between a GPU and host memory, per direction"),
    _speed("--host_bandwidth", "GB/S", "Host memory bandwidth of a node"),
    _speed("--nvme_read", "GB/S", "Read bandwidth of a node's drives, from `zlaunch bench io`"),
    _speed("--nvme_write", "GB/S", "Write bandwidth of a node's drives"),
    click.option(
        "--measured",
        multiple=True,
        metavar="FILE",
        help="Output of `zlaunch bench net --json` or `bench io --json`; repeatable.",
    ),
)
"""Options of the command, in the order of its help."""
_FIELDS = {
    "tflops": ("compute", 1e12),
    "link": ("link", 1e9),
    "host_link": ("host_link", 1e9),
    "host_bandwidth": ("host_memory", 1e9),
    "nvme_read": ("nvme_read", 1e9),
    "nvme_write": ("nvme_write", 1e9),
}
"""Maps an option to the field of Speeds, and to its unit."""


def given_speeds(simulate: bool, files: Sequence[str], options: Mapping[str, float | None]) -> Speeds:
    """Return the speeds of files and options, of which the options count. Raises click.UsageError."""
    given = {name: value for name, value in options.items() if value is not None}
    if not simulate and (given or files):
        name = next(iter(given), "measured")
        raise click.UsageError(f"--{name} goes with --simulate")
    from dataclasses import replace

    from zlaunch.runtime.errors import MemoryPlanError
    from zlaunch.runtime.step_time.simulate import speeds_of_reports

    try:
        read = speeds_of_reports({file: _report(file) for file in files})
    except MemoryPlanError as error:
        raise click.UsageError(f"--measured: {error}") from None
    return replace(read, **{_FIELDS[name][0]: value * _FIELDS[name][1] for name, value in given.items()})


def _report(file: str) -> Any:
    try:
        with open(file, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as error:
        raise click.UsageError(f"--measured {file}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--measured {file} is not JSON: {error}") from None


def missing_text(times: Sequence[StepTime]) -> str:
    """Return which options the rows without a time need, empty where none does."""
    lacking = {name for time in times for name in time.missing}
    names = [f"--{option}" for option, (field, _) in _FIELDS.items() if field in lacking]
    return f"?: not known without {', '.join(names)}" if names else ""
