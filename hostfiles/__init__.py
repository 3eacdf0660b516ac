"""Parse hostfiles (`host slots=N`), and the grammar that picks hosts and slots out of them."""
