"""List mutations by which input of the user's is accepted and not used, without a word."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_ARGUMENTS = "tests/runtime/test_arguments.py"
_FOLDERS = "tests/runtime/checkpoint/test_missing_folders.py"
_WISHES = "tests/unit/config/test_wishes_of_other_tools.py"
_ADAM = "tests/unit/registry/test_uncorrected_adam.py"
_UNMANAGED = "tests/runtime/test_unmanaged_accumulation.py"
_CONSTRUCTION = "tests/runtime/construction/test_refused_arguments.py"
_ACCELERATE = "tests/unit/node/test_accelerate_state.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/arguments.py",
        "            _expect(name, value, expected, fits)\n",
        "            pass\n",
        "an optimizer that is neither a torch optimizer nor callable is replaced by the config's",
        (_ARGUMENTS,),
    ),
    Mutation(
        "runtime/arguments.py",
        "        model = args\n        args = None\n",
        "        pass\n",
        "a model as the first argument is taken for the script's arguments",
        (_ARGUMENTS,),
    ),
    Mutation(
        "runtime/arguments.py",
        "    if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:\n",
        "    if False:\n",
        "a wrapper that is a torch optimizer itself is stepped in the place of the optimizer inside",
        (_ARGUMENTS,),
    ),
    Mutation(
        "runtime/build.py",
        "            if not any(id(group) in own for group in scheduled.param_groups):\n",
        "            if False:\n",
        "a scheduler of another optimizer is stepped and changes no rate",
        (_ARGUMENTS,),
    ),
    Mutation(
        "runtime/build.py",
        "        scheduler = _make_scheduler(lr_scheduler, effective, client)\n        undo.pop_all()\n",
        "        undo.pop_all()\n        scheduler = _make_scheduler(lr_scheduler, effective, client)\n",
        "a refused scheduler leaves the model with half an engine",
        (_ARGUMENTS,),
    ),
    Mutation(
        "runtime/checkpoint/load.py",
        "    if not folder.exists() and not missing_ok:\n",
        "    if False:\n",
        "a mistyped folder is a fresh start",
        (_FOLDERS,),
    ),
    Mutation(
        "runtime/checkpoint/checkpointer.py",
        "            if self._comm.rank == 0 and not missing_ok:\n",
        "            if False:\n",
        "a folder without a checkpoint is a fresh start without a warning",
        (_FOLDERS,),
    ),
    Mutation(
        "runtime/checkpoint/export/full_weights.py",
        "    if state and len(result.unexpected_keys) == len(state):\n",
        "    if False:\n",
        "weights of another model are loaded as nothing at all",
        (_FOLDERS,),
    ),
    Mutation(
        "runtime/config/foreign_keys.py",
        "            return Advice(_say(foreign, written, section), foreign.is_wish)\n",
        "            return Advice(_say(foreign, written, section), False)\n",
        "a setting's name in another tool is ignored with a warning",
        (_WISHES,),
    ),
    Mutation(
        "runtime/config/foreign_keys.py",
        '        if as_switch(value.get("enabled")):\n',
        "        if False:\n",
        "an unknown section that is enabled is ignored with a warning",
        (_WISHES,),
    ),
    Mutation(
        "cuda_ops/arguments.py",
        "betas = (self.beta1, self.beta2) if self.corrected else (0.0, 0.0)",
        "betas = (self.beta1, self.beta2)",
        "the CUDA kernels correct the moments of Adam without bias correction",
        (_ADAM,),
    ),
    Mutation(
        "cuda_ops/arguments.py",
        "return (1 - self.beta1**step, 1 - self.beta2**step) if self.corrected else (1.0, 1.0)",
        "return (1 - self.beta1**step, 1 - self.beta2**step)",
        "the CPU's kernels correct the moments of Adam without bias correction",
        (_ADAM,),
    ),
    Mutation(
        "cuda_ops/twins.py",
        "[as_tensor(step if args.corrected else math.inf, master)]",
        "[as_tensor(step, master)]",
        "torch's fused operation corrects the moments of Adam without bias correction",
        (_ADAM,),
    ),
    Mutation(
        "runtime/engine.py",
        "        if not self._is_managed:\n            return True\n",
        "",
        "the engine counts the passes of a step that the script counts",
        (_UNMANAGED,),
    ),
    Mutation(
        "runtime/script/construct.py",
        "        if not isinstance(entry, Tensor):\n",
        "        if False:\n",
        "pairs of names and parameters gather nothing",
        (_CONSTRUCTION,),
    ),
    Mutation(
        "runtime/script/construct.py",
        "        if unknown := sorted(ignored.keys() - _IGNORED):\n",
        "        if unknown := []:\n",
        "a mistyped keyword of zero.Init is ignored",
        (_CONSTRUCTION,),
    ),
    Mutation(
        "zlaunch/node/accelerate_state.py",
        "                cpu = True\n",
        "                pass\n",
        "every CPU worker is a run of its own for accelerate",
        (_ACCELERATE,),
    ),
    Mutation(
        "zlaunch/node/accelerate_state.py",
        "        if is_first and self.num_processes == 1:\n",
        "        if False:\n",
        "a worker that accelerate takes for a run of its own trains all the same",
        (_ACCELERATE,),
    ),
)
