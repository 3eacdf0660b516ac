"""Estimate the memory of a rank before anything is allocated."""
