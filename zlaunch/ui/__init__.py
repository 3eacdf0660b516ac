"""The web pages of ``zlaunch ui``, built on the data that ``watch`` and ``report`` read.

Read ``board`` and ``jobs`` (what is shown), ``pages`` and ``run_pages``, ``server`` and ``access``.
"""
