"""Implements the runtime that each worker runs, ``zlaunch.runtime``: ZeRO, mixed precision, optimizers.

Works alike under zlaunch, torchrun, srun or a notebook; never imports the launcher.
"""
