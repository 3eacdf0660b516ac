"""The config section of the FLOPS profiler."""

from __future__ import annotations

from .field_types import Bool, Count, Integer, NonNegative, Section, always, ok


class FlopsProfilerSection(Section):
    """Operations of each module, counted in one micro-batch."""

    enabled: Bool = ok(False)
    """Count them on rank 0 and print them; reports then have TFLOPS."""
    profile_step: Count = ok(1)
    """Steps made before the one in which they are counted."""
    module_depth: Integer = ok(-1)
    """Depth of the printed tree; -1 is all of it."""
    top_modules: Count = ok(1)
    """Modules with the most operations that are named for each depth."""
    detailed: Bool = ok(True)
    """Print the tree, not only the top modules."""
    output_file: str | None = ok(None)
    """File to write instead of printing."""
    recompute_fwd_factor: NonNegative = always(0.0, "what is recomputed in the backward pass is counted")
    """Share of the forward pass that is recomputed."""
