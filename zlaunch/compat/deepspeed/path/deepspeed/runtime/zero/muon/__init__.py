"""Holds Muon."""
