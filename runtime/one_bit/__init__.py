"""Step optimizers whose ranks exchange one bit an element: 1-bit Adam, 1-bit LAMB, 0/1 Adam."""
