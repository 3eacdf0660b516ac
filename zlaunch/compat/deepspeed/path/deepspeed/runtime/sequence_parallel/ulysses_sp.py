"""Attention and loaders of divided sequences."""

from zlaunch.compat.deepspeed.missing import SEQUENCES, absent, missing_function
from zlaunch.compat.deepspeed.ulysses import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)

__all__ = [
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]
_NAME = "runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute"
sequence_tiled_compute = missing_function(_NAME, SEQUENCES)

__getattr__ = absent("deepspeed.runtime.sequence_parallel.ulysses_sp")
