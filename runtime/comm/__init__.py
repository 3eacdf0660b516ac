"""Communicates between ranks: collectives and process groups."""
