"""The runtime of each worker, ``zlaunch.runtime``: ZeRO, mixed precision, offload, parallelism, checkpoints.

It works alike under zlaunch, torchrun, srun or in a notebook, and never imports the launcher. Read
``api`` (``zlaunch.initialize``), ``build`` (the parts of an engine, in the order in which they are made)
and ``engine`` (forward, backward, step, save), then the folders ``comm``, ``zero`` and ``optim``.
``config`` imports no torch.
"""
