"""Implements ZeRO by one mechanism: parameters lie in flat units, and a stage says which states are sharded.

Read ``layout`` (integers), ``unit`` (storage), ``unit_policy`` (which parameters share a unit), ``reduce``
(gradients), ``hooks`` (which drive all of it), in that order.
"""
