"""Profiles are torch's."""

from . import flops_profiler as flops_profiler
