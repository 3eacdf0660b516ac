"""Launching under SLURM: node lists, the SLURM_* environment, and sbatch scripts made from flags. Not there
yet.
"""
