"""Measures the links between ranks, and finds the slow ones."""
