"""Set up Hypothesis without deadlines: the first example may pay for an import."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
