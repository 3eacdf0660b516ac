"""Makes the optimizers and learning-rate schedules that a config names."""
