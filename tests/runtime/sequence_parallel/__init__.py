"""Tests of ranks that have different parts of each sequence."""
