"""Batch sizes are written into the config."""

from collections.abc import Mapping
from typing import Any

from zlaunch.compat.deepspeed.missing import ELASTICITY, absent, missing_class, missing_function

compute_elastic_config = missing_function("elasticity.compute_elastic_config", ELASTICITY)
ensure_immutable_elastic_config = missing_function("elasticity.ensure_immutable_elastic_config", ELASTICITY)
DSElasticAgent = missing_class("elasticity.DSElasticAgent", ELASTICITY)


class ElasticityError(Exception):
    """What DeepSpeed raises for a section ``elasticity``; never raised here."""


class ElasticityConfigError(ElasticityError):
    """A bad section."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A number of ranks that does not fit."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether a config asks for elastic batch sizes, which ``initialize`` refuses."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


__getattr__ = absent("deepspeed.elasticity")
__all__ = [
    "DSElasticAgent",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
