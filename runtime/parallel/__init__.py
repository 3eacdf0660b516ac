"""Parallel axes: tensor, expert, sequence and pipeline."""
