"""Run a function of a notebook on several workers: ``zlaunch.notebook(function, num_gpus=2)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zlaunch.jobs import launch


def notebook(
    function: Callable[..., Any],
    *args: Any,
    num_gpus: int | None = None,
    options: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in fresh workers of this machine and return their results, by rank.

    It is ``zlaunch.launch(...).result()``, but what rank 0 prints appears here, and interrupting the cell
    stops the workers. Raises what ``result`` raises; TypeError for something that cannot be sent.
    """
    job = launch(function, *args, num_gpus=num_gpus, options=options, **kwargs)
    try:
        job.follow()
    except BaseException:
        job.cancel()
        raise
    return job.result()
