"""Saves and loads of a run's state, whole or not at all, and other programs' formats.

Read ``checkpointer`` (the engine's saves and loads), ``save``, ``agree`` (an error of one rank is one of
all), ``load`` and ``shard_io``. ``format`` has the files, ``in_memory`` snapshots for restarts,
``resume`` and ``trainer_checkpoints`` the folder to resume from, ``convert`` imports, ``export`` weights
for other programs.
"""
