"""Tensor, expert, sequence and pipeline parallelism: axes of the mesh of ranks.

Read ``axis`` (collectives of a group, and their gradients), then one axis: ``plans``, ``forwards`` and
``tensor``; ``expert``; ``attention`` and ``sequence``; ``pipeline`` and ``schedule``. ``checks`` keeps
what ranks of a group must have in common.
"""
