"""Export the weights of a checkpoint for other programs."""
