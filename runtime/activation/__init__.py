"""Keep less of the forward pass in device memory: activation checkpointing and offloaded inputs."""
