"""Estimate the least time of a step from a model's operations and the speeds of machines."""
