"""Launch under SLURM: read the SLURM_* environment, make sbatch scripts from flags, submit them."""
