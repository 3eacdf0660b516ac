"""Optimizers over flat shards, and learning-rate schedules."""
