"""Communicate between ranks: collectives and process groups."""
