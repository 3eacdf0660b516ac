"""Lets a model of a script's own compute on parts of sequences: ``zlaunch.sequence``.

Where the config has ``parallel.sequence``, the ranks that share sequences have different tokens of each. A
script divides what it gives to its model by :func:`split` and calls :func:`attention` in place of torch's
scaled_dot_product_attention; all else works on each token by itself.
"""

from zlaunch.runtime.sequence_parallel.attention import attention, mean, split, total

__all__ = ["attention", "mean", "split", "total"]
