"""Moves an engine's states to host memory for a while, as ``engine.offload_states`` asks."""
