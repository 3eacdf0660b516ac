"""List mutations of the axes' rooms: what an engine owns, gradients of whole parameters, equal batches."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_ENGINES = "tests/runtime/sequence_parallel/test_several_engines.py"
_AXIS = "tests/runtime/comm/test_axis.py"
_WHOLE = "tests/runtime/tensor_parallel/test_whole_uses.py"
_BATCHES = "tests/runtime/test_same_batch.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/comm/collectives.py",
        "            axis.close()\n",
        "            pass\n",
        "a destroyed engine's axes keep their groups",
        ("tests/runtime/test_destroyed_engines.py",),
    ),
    Mutation(
        "runtime/comm/process_group.py",
        "return max(running, key=lambda comm: since[comm], default=None)",
        "return max(open_comms, key=lambda comm: int(comm.number), default=None)",
        "the newest engine counts as the one that computes",
        (_ENGINES,),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "return self._since if placeholder.in_backward() else 0",
        "return 0",
        "a recomputation in the backward pass belongs to no engine",
        (_ENGINES,),
    ),
    Mutation(
        "runtime/activation/checkpointing.py",
        "comm.activations = own = replace(_settings, place=replace(_settings.place))",
        "comm.activations = own = _settings",
        "an engine's settings of activation checkpointing stay for the next",
        (
            "tests/runtime/activation/test_checkpointing.py::"
            "test_settings_of_a_config_are_those_of_its_engine",
        ),
    ),
    Mutation(
        "runtime/parallel/collectives.py",
        "        return gradient * ctx.size, None, None",
        "        return gradient, None, None",
        "the gradient of a loss over shared sequences is divided once too often",
        (f"{_AXIS}::test_each_function_has_the_gradient_of_the_note",),
    ),
    Mutation(
        "runtime/parallel/collectives.py",
        "        return RowExchange(self.received, self.sent)",
        "        return self",
        "gradients of tokens go back as their tokens came",
        ("tests/runtime/expert_parallel/test_by_hand.py",),
    ),
    Mutation(
        "runtime/parallel/uses.py",
        "parameter.register_hook(GradientSum(self._axis, self._channel))",
        "parameter.register_hook(lambda gradient: gradient)",
        "a parameter used with parts has one rank's share of its gradient",
        (f"{_WHOLE}::test_their_gradients_are_those_of_one_process",),
    ),
    Mutation(
        "runtime/parallel/uses.py",
        "if each.requires_grad and not self._is_known(each):",
        "if False:",
        "whole activations meet parts without a sum",
        (f"{_WHOLE}::test_other_uses_are_refused_in_the_first_pass",),
    ),
    Mutation(
        "runtime/parallel/checks.py",
        "            self._all = self._all * FACTOR + found\n",
        "",
        "a step does not see the batches of its passes",
        (f"{_BATCHES}::test_another_batch_is_found_before_the_step_in_any_pass",),
    ),
    Mutation(
        "runtime/fingerprint.py",
        "        total = total * FACTOR + (chunk * weights[: chunk.numel()]).sum()\n",
        "        total = total * FACTOR + chunk.sum()\n",
        "a batch in another order has the same fingerprint",
        (f"{_BATCHES}::test_a_fingerprint_is_of_every_bit",),
    ),
    Mutation(
        "runtime/parallel/schedule.py",
        "        if differs:\n",
        "        if False:\n",
        "stages train on different batches",
        (f"{_BATCHES}::test_another_batch_is_found_before_the_step_in_any_pass",),
    ),
)
