"""The config sections of what measures a run: the FLOPS profiler, the log of collectives."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from .field_types import Bool, Count, Integer, NonNegative, Section, always, ok

OPERATIONS: dict[str, str] = {
    **{name: name for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather")},
    **{name: name for name in ("reduce", "reduce_scatter", "scatter", "send", "recv")},
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_coalesced", "allgather_fn"), "all_gather"),
    **dict.fromkeys(("all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_fn"), "reduce_scatter"),
    **{"all_to_all_single": "all_to_all", "monitored_barrier": "barrier", "isend": "send", "irecv": "recv"},
}
"""Maps each function of deepspeed.comm that can be logged to the name under which it is."""


def _operation(value: Any) -> str:
    if not isinstance(value, str) or value not in OPERATIONS:
        raise ValueError(f"one of {', '.join(sorted(OPERATIONS))}")
    return OPERATIONS[value]


Operation = Annotated[
    str, BeforeValidator(_operation), WithJsonSchema({"type": "string", "enum": sorted(OPERATIONS)})
]


class FlopsProfilerSection(Section):
    """FLOPs of each module, counted in one micro-batch."""

    enabled: Bool = ok(False)
    """Count FLOPs on rank 0 and print them; progress lines then show TFLOPS."""
    profile_step: Count = ok(1)
    """Steps before the counted step."""
    module_depth: Integer = ok(-1)
    """Depth of the printed module tree; -1 prints all levels."""
    top_modules: Count = ok(1)
    """Modules to list at each depth, those with the most FLOPs first."""
    detailed: Bool = ok(True)
    """Print the module tree, not only the top modules."""
    output_file: str | None = ok(None)
    """Write to this file instead of printing."""
    recompute_fwd_factor: NonNegative = always(0.0, "zlaunch counts recomputation")
    """Fraction of the forward pass that is recomputed."""


class CommsLoggerSection(Section):
    """Count, time and bandwidth of collectives, by operation and size."""

    enabled: Bool = ok(False)
    """Log collectives. Rank 0 prints a table when the engine is destroyed or the process exits."""
    prof_all: Bool = ok(True)
    """Log all operations; false logs only prof_ops."""
    prof_ops: list[Operation] = ok([])
    """Operations to log with prof_all false, named as in deepspeed.comm."""
    verbose: Bool = ok(False)
    """Print a line per operation on rank 0."""
    debug: Bool = ok(False)
    """Show the call site, with separate rows for each."""
