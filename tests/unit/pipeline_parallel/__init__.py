"""Tests of the room of this name."""
