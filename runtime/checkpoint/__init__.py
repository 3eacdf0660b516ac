"""Saves and loads the state of a run, whole or not at all; imports and exports other formats."""
