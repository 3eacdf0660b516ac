"""Other projects' own training scripts, unmodified, on two CPU workers: ``python -m tests.compat.projects``.

Read ``rows`` (which projects, and their commands), ``inputs`` (tiny models and texts in place of downloads),
``__main__`` (runs them under zlaunch, and beside it under what they were written for) and ``stand_ins``.
``survey`` reads the configs, commands and names of many projects, without running them.
``deepspeed_tests`` runs DeepSpeed's own unit tests with the real package and with zlaunch.
Their code is not in this tree: ``__main__`` says which clones and packages it needs.
"""
