"""Recomputing activations."""

from . import checkpointing as checkpointing
