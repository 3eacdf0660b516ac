"""Steps optimizers over flat shards, and computes learning-rate schedules."""
