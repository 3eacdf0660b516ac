"""Sequence parallelism in your own model: ``zlaunch.sequence``.

With ``parallel.sequence`` in the config, each rank of a group holds different tokens of each sequence. Split
the model's inputs with :func:`split`, and call :func:`attention` instead of torch's
scaled_dot_product_attention. All other layers compute each token independently.
"""

from zlaunch.runtime.parallel.attention import attention, mean, split, total

__all__ = ["attention", "mean", "split", "total"]
