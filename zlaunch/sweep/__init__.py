"""Many values of a script's parameters: which trials, which of them go on, and what came of them.

Read ``search`` (the sweep), ``space``, ``trials`` and ``queues`` (who runs the trials). ``job_array`` runs
them in SLURM.
"""
