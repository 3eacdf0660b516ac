"""Counting operations is torch's."""

from zlaunch.compat.deepspeed.missing import FLOPS, absent, missing_class, missing_function

FlopsProfiler = missing_class("profiling.flops_profiler.FlopsProfiler", FLOPS)
get_model_profile = missing_function("profiling.flops_profiler.get_model_profile", FLOPS)

__getattr__ = absent("deepspeed.profiling.flops_profiler")
