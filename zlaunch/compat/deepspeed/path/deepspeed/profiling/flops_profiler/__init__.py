"""Counting operations is torch's."""

from .profiler import FlopsProfiler, get_model_profile
