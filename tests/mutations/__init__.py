"""Break the source in known ways, and see that the tests notice (``python -m tests.mutations``)."""
