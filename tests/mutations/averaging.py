"""List mutations of what losses and gradients are divided by."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = ("tests/runtime/test_averaging.py",)
BATCHES = ("tests/runtime/test_batch_watch.py",)
TOKENS = ("tests/runtime/test_token_loss.py",)
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/averaging.py",
        "whole: float | Tensor = float(self.sequence * (self.samples if self.is_mean else 1))",
        "whole: float | Tensor = float(self.sequence * self.samples if self.is_mean else 1)",
        'gradients are too large by the size of the sequence axis with "sum"',
        TESTS,
    ),
    Mutation(
        "runtime/averaging.py",
        "return whole / self.predivide if is_predivided else whole",
        "return whole",
        "gradients are divided twice with prescale_gradients",
        TESTS,
    ),
    Mutation(
        "runtime/zero/reduce.py",
        "return self.options.predivide != 1.0 and not self._gradients_are_local",
        "return self.options.predivide != 1.0",
        "a 1-bit optimizer's gradient of two passes is divided for each of them",
        TESTS,
    ),
    Mutation(
        "runtime/step_losses.py",
        "        value = loss.detach().reshape(()).double()\n",
        "        value, self._weight = loss.detach().reshape(()).double(), 0.0\n        self._sum = None\n",
        "monitors show the loss of the last micro-batch",
        TESTS,
    ),
    Mutation(
        "runtime/batch_watch.py",
        "        self._equal = {places: self._equal.get(places, 0) + 1 for places in same}\n",
        "        for places in same:\n            self._equal[places] = self._equal.get(places, 0) + 1\n",
        "ranks with equal batches now and then are warned of",
        BATCHES,
    ),
    Mutation(
        "runtime/batch_watch.py",
        "if number and (not self._last_shown or number != self._last_shown[place]):",
        "if number:",
        "ranks whose input never changes are warned of",
        BATCHES,
    ),
    Mutation(
        "runtime/batch_watch.py",
        "return self._places > 1 and is_due",
        "return self._places > 1 and is_due and not self._has_warned_of_ranks",
        "ranks send other numbers by what has arrived on their hosts",
        BATCHES,
    ),
    Mutation(
        "runtime/batch_watch.py",
        "            if several in self._before:",
        "            if False:",
        "epochs in one order count as data that restarted",
        BATCHES,
    ),
    Mutation(
        "runtime/batch_watch.py",
        "            if all(several):\n",
        "            if True:\n",
        "steps of unknown batches count as data that restarted",
        BATCHES,
    ),
    Mutation(
        "runtime/data/packing.py",
        "                labels[row, begin] = IGNORED\n",
        "",
        "the last token of a packed sample predicts the first of the next",
        ("tests/runtime/test_packing.py",),
    ),
    Mutation(
        "runtime/data/packing.py",
        "            sample_of[row, begin:] = len(members)\n",
        "",
        "what fills up a packed row attends to its first sample",
        ("tests/runtime/test_packing.py",),
    ),
    Mutation(
        "runtime/data/loader.py",
        "            begin, batches = self._ended_at\n",
        "            begin, batches = self._ended_at[0] + (self._ended_at[1] - 1) * self._step_units, 1\n",
        "metrics of a loader that was read ahead lose rows",
        ("tests/runtime/test_prepare.py",),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            return zero_without(self.tokens, grad)\n",
        "            return None\n",
        "a script's mean of no tokens makes NaN of all weights",
        TOKENS,
    ),
    Mutation(
        "runtime/averaging.py",
        "sharers=mesh.tensor * mesh.sequence * mesh.pipeline",
        "sharers=mesh.tensor * mesh.sequence",
        "tokens of a pipeline count once for each stage",
        (f"{TOKENS[0]}::test_every_token_counts_the_same_on_all_axes[pipeline]",),
    ),
    Mutation(
        "runtime/averaging.py",
        "least * (self.sequence / (self.sharers",
        "least * (1 / (self.sharers",
        "with tokens, gradients are too large by the size of the sequence axis",
        (f"{TOKENS[0]}::test_every_token_counts_the_same_on_all_axes[sequence]",),
    ),
    Mutation(
        "runtime/engine.py",
        "            if tokens is not None:\n                loss = without_empty(loss, tokens)\n",
        "",
        "a micro-batch without tokens makes NaN of the loss of the step",
        TOKENS,
    ),
    Mutation(
        "runtime/engine.py",
        "        if not passes:\n            self._losses.clear()\n",
        "",
        "the mean loss has micro-batches that were dropped",
        TESTS,
    ),
    Mutation(
        "runtime/engine.py",
        "        if new > 1 and not self._has_warned_of_count:\n",
        "        if new > 2 and not self._has_warned_of_count:\n",
        "a script that counts micro-batches beside the engine is not told",
        ("tests/runtime/test_unmanaged_accumulation.py",),
    ),
    Mutation(
        "runtime/missing_step.py",
        "        if is_first:\n            self._passes = 0\n",
        "",
        "a script that drops the gradients of each pass is told that step() is missing",
        ("tests/runtime/test_unmanaged_accumulation.py",),
    ),
)
