"""The config with which a script trains fastest, found by short real runs.

Read ``variants``, ``search`` and ``trial``.
"""
