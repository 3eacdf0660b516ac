"""Decide everything about a launch before anything is started: options, environment and the plan as data."""
