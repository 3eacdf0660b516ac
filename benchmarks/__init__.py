"""Measurements beside the peers, always in the same run. Nothing here is a test."""
