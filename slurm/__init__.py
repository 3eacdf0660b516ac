"""Launching under SLURM: the SLURM_* environment, sbatch scripts made from flags, submitting them."""
