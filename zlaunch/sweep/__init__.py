"""Many values of a script's parameters: which trials, which of them go on, and what came of them.

Read ``space``, ``trials`` and ``job_array`` (as a job array of SLURM's).
"""
