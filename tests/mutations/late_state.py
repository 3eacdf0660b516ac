"""List mutations of joint decisions about a step, initial and replaced state, and norms out of range."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/optim/sign_exchange.py",
        "        clear_without_variance(first, second)\n",
        "        if self.averaged is not None:\n            clear_without_variance(first, second)\n",
        "a dense step by a frozen variance divides by none",
        ("tests/runtime/one_bit/test_first_gradients.py",),
    ),
    Mutation(
        "runtime/optim/one_bit.py",
        "found = iter(counts.tolist())",
        "found = iter(flag for unit in new for flag in own[unit])",
        "a rank knows only of its own parts whether they have been trained",
        ("tests/runtime/one_bit/test_first_gradients.py",),
    ),
    Mutation(
        "runtime/optim/one_bit.py",
        "        self._trained.clear()\n",
        "",
        "what has been trained is not looked up again after a load",
        ("tests/runtime/one_bit/test_first_gradients.py",),
    ),
    Mutation(
        "runtime/optim/one_bit.py",
        "learns = not is_frozen and (",
        "learns = not self._reducer.skips_reduction or (",
        "a dense step by a frozen variance trains a parameter without one",
        ("tests/runtime/one_bit/test_first_gradients.py",),
    ),
    Mutation(
        "runtime/optim/local_steps.py",
        'found_on = self._comm.all_reduce_scalars(counts, "checks for weights that the script changed")',
        "found_on = counts",
        "one rank alone refuses a write amid local steps",
        ("tests/runtime/collective_step/test_refusals.py",),
    ),
    Mutation(
        "runtime/optim/step.py",
        "            self._forget_replaced(changed)\n",
        "            self._forget_replaced(float(self._state_changed))\n",
        "one rank alone forgets what belongs to a replaced state",
        (
            "tests/runtime/collective_step/test_refusals.py::test_state_that_one_rank_replaces_is_known_to_all",
        ),
    ),
    Mutation(
        "runtime/optim/muon.py",
        "if slot.group in in_muon and len(shape) < 2:",
        "if slot.group in in_muon and len(shape) < 2 and unit.start <= slot.offset < unit.stop:",
        "ranks without a part of a vector do not refuse it",
        ("tests/runtime/collective_step/test_refusals.py::test_every_rank_refuses_a_vector_of_muon",),
    ),
    Mutation(
        "runtime/optim/step.py",
        'sorted(group["params"], key=_shows_little)',
        'group["params"]',
        "a parameter without elements hides the value with which the others begin",
        ("tests/unit/optim/test_initial_state.py",),
    ),
    Mutation(
        "runtime/optim/step.py",
        "                elif not value.numel():\n                    entries.setdefault(key, None)\n",
        "                elif not value.numel():\n                    entries.setdefault(key, value)\n",
        "an empty parameter's state is one number of its group",
        ("tests/unit/optim/test_initial_state.py",),
    ),
    Mutation(
        "cuda_ops/norm.py",
        "    if not (low > _LOW and high < _HIGH):\n",
        "    if not high < _HIGH:\n",
        "gradients below 1e-19 vanish from the norm",
        ("tests/unit/cuda_ops/test_kernels_twins.py::test_sums_of_squares_that_fp32_does_not_hold",),
    ),
    Mutation(
        "cuda_ops/norm.py",
        "    if not (low > _LOW and high < _HIGH):\n",
        "    if not low > _LOW:\n",
        "the norm overflows from 1e19 on",
        (
            "tests/runtime/optim/test_gradient_norm.py::test_clipping_by_a_norm_whose_square_fp32_does_not_hold",
        ),
    ),
    Mutation(
        "cuda_ops/kernels/norm.cu",
        "    if (squares > 0x1p-80f && squares < 0x1p120f) sum += squares;\n",
        "    if (squares > 0x1p-80f) sum += squares;\n",
        "the kernel's norm overflows from 1e19 on",
        ("tests/unit/cuda_ops/test_kernels_math.py::test_sum_of_squares",),
    ),
    Mutation(
        "runtime/engine.py",
        "            if sys.exc_info()[0] is None:\n                self._sync_replicas(",
        "            if self._destroyed:\n                self._sync_replicas(",
        "destroyed among local steps, the ranks keep other weights",
        (
            "tests/runtime/one_bit/test_local_steps.py::test_ranks_are_equal_to_the_bit_after_an_exchange_and_at_the_end",
        ),
    ),
    Mutation(
        "runtime/optim/step.py",
        "full_shape(parameter, parameter.shape)}",
        "tuple(parameter.shape)}",
        "the state of a whole parameter is taken for a number of its group",
        ("tests/unit/optim/test_initial_state.py",),
    ),
    Mutation(
        "runtime/checkpoint/save.py",
        'entries = {"time": self._taken_at, **_entries(',
        "entries = {**_entries(",
        "a snapshot that is complete late counts as newer than the disk's later state",
        ("tests/runtime/in_memory/test_snapshots.py",),
    ),
    Mutation(
        "zlaunch/supervisor/run_folder.py",
        "        if time.monotonic() >= until:\n",
        "        if True:\n",
        "the queue's next attempt is refused while the former launcher closes its files",
        ("tests/unit/supervisor/test_run_folder.py",),
    ),
    Mutation(
        "runtime/memory/fake_step.py",
        "            if not parameter.requires_grad:\n",
        "            if False:\n",
        "the activations of a model with frozen layers cannot be estimated",
        ("tests/unit/cli/test_estimate.py",),
    ),
)
