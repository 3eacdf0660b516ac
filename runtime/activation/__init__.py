"""Less of the forward pass in device memory: checkpointed activations, offloaded inputs, tiles of tokens.

Read ``checkpointing``, ``offload`` (the inputs of checkpointed calls) and ``tiles``.
"""
