"""Finds ranks that wait for each other forever, and says which waits for what."""
