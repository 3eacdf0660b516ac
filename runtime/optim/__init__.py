"""The optimizer step on flat shards, the optimizers that torch lacks, and learning-rate schedules.

Read ``slices`` (what an optimizer sees of a shard), ``update_rule`` (its rule for a slice, in any memory)
and ``step`` (a step of all units; ``StepMethod`` is the base of the ways to step). Ways to step:
``collective`` (optimizers that need whole parameters: ``lamb``, ``muon``, ``adafactor``, ``one_bit`` with
``sign_exchange`` and ``local_steps``), ``in_backward``, and ``offload/step``. ``registry`` builds
optimizers by name and chooses the way, as the rows of ``runtime/optimizer_specs`` say. ``lion``,
``uncorrected_adam``, ``schedules``.
"""
