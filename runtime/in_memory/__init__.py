"""Keeps the newest state of a run in its nodes' memory, for a restart that needs no disk."""
