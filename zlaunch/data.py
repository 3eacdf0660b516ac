"""Batches of samples of different lengths: ``zlaunch.data``.

:class:`PackingCollator` packs samples into rows without padding between them, :class:`TokenBatchSampler`
forms batches by their number of tokens. Both go into a DataLoader for ``engine.dataloader``.
"""

from zlaunch.runtime.data.packing import PackingCollator, TokenBatchSampler

__all__ = ["PackingCollator", "TokenBatchSampler"]
