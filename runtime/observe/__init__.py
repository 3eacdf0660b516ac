"""What is measured and reported of a training."""
