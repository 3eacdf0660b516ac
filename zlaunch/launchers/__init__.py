"""The ways to start agents: on this machine, over ssh, inside a scheduler's job. One file for each.

Read ``base``, ``cluster`` and ``this_node`` (the two kinds of launcher), ``ssh`` and ``slurm``, and
``registry``, which chooses one. ``arrival`` and ``reception`` number nodes that somebody else starts;
``found`` reads what pods, MPI and batch systems say.
"""
