"""Shards off the device: stores in host memory and on disk, and the step there.

Read ``stores``, ``transfer`` (copies on separate streams), ``disk`` (direct reads and writes),
``manager`` (which unit is kept where) and ``step``. ``states`` moves an engine's states to the host for a
while; ``benchmark`` measures disks.
"""
