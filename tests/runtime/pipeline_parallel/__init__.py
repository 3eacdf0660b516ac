"""Tests of ranks that have different layers."""
