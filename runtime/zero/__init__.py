"""ZeRO by one mechanism: parameters live in flat units, and a stage says which of their states are sharded.

Read ``layout`` (integers), ``unit`` (storage), ``partition`` (which parameters share a unit), ``grads``
(gradients), ``model`` (hooks that drive all of it), in that order.
"""
