"""Keeps the script's model and optimizer consistent with the engine, or says what cannot be."""
