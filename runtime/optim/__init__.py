"""Steps optimizers over flat shards."""
