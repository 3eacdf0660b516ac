"""Keep runs waiting until there are slots for them: one queue a user and machine, or SLURM's."""
