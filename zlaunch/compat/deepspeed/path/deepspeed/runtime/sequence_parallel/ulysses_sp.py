"""Attention and loaders of divided sequences."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.ulysses import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)

__all__ = ["TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]

__getattr__ = absent("deepspeed.runtime.sequence_parallel.ulysses_sp")
