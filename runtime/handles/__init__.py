"""Keeps the model and the optimizer that the script holds in step with the engine, or says what cannot be."""
