"""Finds out that ranks wait for each other for ever, and says who waits for what."""
