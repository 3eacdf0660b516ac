"""Implements ZeRO by one mechanism: parameters lie in flat units, and a stage says which states are sharded.

Read ``layout`` (integers), ``ownership`` and ``unit`` (storage), ``store`` (what a rank keeps),
``unit_policy`` (which parameters share a unit), ``reduce`` and ``bucket`` (gradients), ``hooks`` (which drive
all of it).
"""
