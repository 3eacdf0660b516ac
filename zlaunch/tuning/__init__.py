"""Find the config with which a script trains fastest, by short real runs."""
