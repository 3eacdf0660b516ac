"""Where shards will live when they are not on the compute device: pinned host memory and NVMe stores."""
