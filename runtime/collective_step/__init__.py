"""Steps optimizers whose update of an element needs more than that element: norms, matrices, other ranks."""
