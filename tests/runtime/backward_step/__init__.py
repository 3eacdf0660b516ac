"""Test steps inside the backward pass."""
