"""Shards models while they are built, as ``zlaunch.zero.Init``."""
