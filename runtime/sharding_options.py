"""From the config to how a model is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .zero.store import TILE_NUMEL
from .zero.unit_policy import UNIT_NUMEL, UNIT_NUMEL_CPU, ShardingOptions

if TYPE_CHECKING:
    from .config.schema import Config


def sharding_options(config: Config, *, cpu: bool, poison: bool) -> ShardingOptions:
    """Return what the config asks for; ``cpu``: of CPU ranks, whose caches are small."""
    zero = config.zero_optimization
    # a unit is reduced as a whole and gathered as a whole, at stage 0 only reduced
    bucket = int(zero.reduce_bucket_size)
    if zero.stage >= 1:
        bucket = min(bucket, int(zero.allgather_bucket_size))
    return ShardingOptions(
        shard_optimizer=zero.stage >= 1,
        shard_grads=zero.stage >= 2,
        shard_params=zero.stage >= 3,
        bucket_numel=max(1, min(bucket, UNIT_NUMEL_CPU if cpu else UNIT_NUMEL)),
        minimum_numel=max(4096, int(zero.stage3_module_granularity_threshold)),
        persistence_numel=int(zero.stage3_param_persistence_threshold),
        all_persistent_numel=int(zero.stage3_model_persistence_threshold),
        tile_numel=min(int(zero.sub_group_size), TILE_NUMEL),
        poison=poison,
    )
