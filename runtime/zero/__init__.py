"""ZeRO by one mechanism: parameters lie in flat units, and a stage says which of their states are sharded.

Read ``layout`` (positions, integers only), ``placeholder`` (what a parameter is while it is sharded),
``unit`` (one flat buffer and its states), ``store`` (what a rank keeps of a unit), ``policy`` (which
parameters share a unit), ``reduce`` (from gradients to each rank's summed shard), ``saved_tensors`` and
``tensors`` (what autograd keeps), and ``hooks``, which drives all of it.
"""
