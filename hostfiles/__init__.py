"""Hostfiles, host lists such as ``node[01-16]``, and the grammar that includes and excludes slots.

Read ``grammar``, ``hostlist`` and ``filters``.
"""
