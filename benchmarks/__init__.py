"""Benchmarks of zlaunch and its peers, measured in the same run. Nothing here is a test."""
