"""Other projects' names over this runtime."""
