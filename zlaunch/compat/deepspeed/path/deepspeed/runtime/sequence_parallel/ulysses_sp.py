"""Attention and loaders of divided sequences."""

from zlaunch.compat.deepspeed.ulysses import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
