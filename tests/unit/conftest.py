"""Set up Hypothesis without limits of time: a first example may pay for an import, a machine be busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
