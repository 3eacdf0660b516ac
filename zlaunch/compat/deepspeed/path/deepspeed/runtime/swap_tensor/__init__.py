"""Offload to disk is the runtime's own."""

MIN_SWAPPABLE_BYTES = 1 << 20
