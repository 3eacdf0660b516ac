"""Tensor, expert, sequence and pipeline parallelism: axes of the mesh of ranks.

To add an axis, give it a size in ``mesh.MeshShape``, ``config.parallel`` and ``config.axis_sizes``, and check
its keys in ``config.check._axes``. Say in ``comm.nodes.make_link`` over which ranks units are sharded, and in
``averaging`` what divides gradients. Write a module here that makes ``Axis(comm, name)``, with a ``Channel``
for each kind of collective, replaces forwards of the model's modules by the functions of ``collectives``, and
marks sharded parameters with a ``ShardSpec``. ``build`` calls it. ``memory.model.of_one_rank`` returns one
rank's part of a model for estimates.

Read ``collectives`` (what autograd differentiates), then one axis: ``plans``, ``columns``, ``tensor_axis``,
``token_shards``, ``forwards``, ``vocabulary_loss`` and ``tensor``; ``expert`` and ``expert_size``;
``attention`` and ``sequence``; ``pipeline``, ``stages`` and ``schedule``.
``checks`` keeps what ranks of a group must have in common; ``uses`` follows their activations.
"""
