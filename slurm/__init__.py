"""SLURM: its environment variables, batch scripts, and its commands.

Read ``environment``, ``script`` and ``commands``.
"""
