"""Lets ranks have different layers, and pass activations on (pipeline parallelism)."""
