"""List mutations of what follows a script's changes after ``zlaunch.initialize``, and of ``destroy``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TIED = ("tests/runtime/pipeline_parallel/test_tied.py",)
_DESTROYED = ("tests/runtime/handles/test_after_destroy.py",)
_STATE = ("tests/runtime/handles/test_optimizer_state.py",)
_REPLACED = ("tests/runtime/handles/test_replaced_modules.py",)
_LEAVES = ("tests/compat/test_leaf_modules.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/parallel/schedule.py",
        "self._tied = {id(parameter) for parameter in tied}",
        "self._tied = {id(parameter) for parameter in tied if parameter.requires_grad}",
        "a tied parameter that is frozen at the start is trained by each stage alone",
        _TIED,
    ),
    Mutation(
        "runtime/parallel/schedule.py",
        "        self._engine.handles.take_unfrozen()\n",
        "",
        "an evaluation takes units of unfrozen parameters for values of other stages",
        _TIED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "if self._ending() is not None:",
        "if True:",
        "a backward pass after a failed one is dropped",
        ("tests/runtime/test_recovery_from_errors.py",),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "        self.tokens = tokens\n        self._has_begun = False",
        "        self.tokens = tokens",
        "a pass after a failed one forgets that its loss is scaled",
        ("tests/runtime/test_recovery_from_errors.py",),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "self.units[:] = [unit for",
        "self.units = [unit for",
        "the explanation of exhausted memory holds units of the past",
        ("tests/runtime/handles/test_unfrozen_units.py",),
    ),
    Mutation(
        "runtime/script/optimizer.py",
        "_LostState() if state is None else defaultdict(dict, state)",
        "defaultdict(dict, state or {})",
        "an optimizer restarts without its state after destroy",
        _DESTROYED,
    ),
    Mutation(
        "runtime/script/handles.py",
        "unguard(step.outer, whole_state(step) if has_state else {})",
        "unguard(step.outer, None)",
        "an optimizer does not get its state back after destroy",
        _DESTROYED,
    ),
    Mutation(
        "runtime/script/handles.py",
        "value = value.clone()",
        "pass",
        "parameters count their steps after destroy in one tensor",
        _DESTROYED,
    ),
    Mutation(
        "runtime/script/optimizer.py",
        "        return iter(())\n",
        "        self._refuse()\n",
        "libraries cannot go through optimizer.state",
        _STATE,
    ),
    Mutation(
        "runtime/script/optimizer.py",
        '        self.__dict__["state"]._refuse()\n',
        '        self.__dict__["state"] = state\n',
        "a script that replaces optimizer.state changes nothing",
        _STATE,
    ),
    Mutation(
        "runtime/script/module_methods.py",
        "placeholder.complain_of_move(probe.device, result.device)",
        'raise RuntimeError(f"this model belongs to a zlaunch engine and stays on {probe.device}")',
        "a model cannot be told to move to the CPU under the alias",
        _STATE,
    ),
    Mutation(
        "runtime/script/handles.py",
        "    return has_tensors or any(",
        "    return True or any(",
        "an activation function cannot be replaced",
        _REPLACED,
    ),
    Mutation(
        "runtime/script/handles.py",
        "        if changed:\n            self._record()\n",
        "",
        "parameters in a module that replaced another one are not noticed",
        _REPLACED,
    ),
    Mutation(
        "runtime/zero/policy.py",
        "[] if options.shard_params and is_leaf(root) else find_modules(root)",
        "find_modules(root)",
        "a leaf mark on the model itself is ignored",
        _LEAVES,
    ),
    Mutation(
        "runtime/config/zero.py",
        "return [value] if isinstance(value, str) else value\n",
        "return value\n",
        "leaf_module.classes as a string is refused",
        _LEAVES,
    ),
    Mutation(
        "zlaunch/compat/deepspeed/parameters.py",
        "    return marked\n",
        "    return found\n",
        "modules marked by name are returned without the missing names",
        _LEAVES,
    ),
    Mutation(
        "runtime/optim/schedules.py",
        '            values += [float(group["lr"]) if rest is None else rest for group in further]\n',
        "",
        "a schedule has no rate for a param group that is added later",
        ("tests/unit/registry/test_lr_schedules.py",),
    ),
    Mutation(
        "runtime/script/optimizer.py",
        "            follow()\n",
        "            pass\n",
        "a schedule takes the rate that a load has set for that of an added group",
        ("tests/runtime/handles/test_unfrozen_units.py",),
    ),
    Mutation(
        "runtime/script/handles.py",
        "        for name, parameter in self._outside:\n",
        "        for name, parameter in self._outside[:0]:\n",
        "a complex parameter that is unfrozen is not trained",
        ("tests/runtime/handles/test_unfrozen_units.py",),
    ),
    Mutation(
        "runtime/script/construct.py",
        '            if kind.__dict__["__init__"] is construct:\n                kind',
        '            if kind.__dict__["__init__"]:\n                kind',
        "a class that was imported inside of zero.Init loses the decorator of its constructor",
        ("tests/runtime/construction/test_init.py::test_classes_made_inside_keep_their_decorators",),
    ),
    Mutation(
        "runtime/zero/placeholder.py",
        "            present.copy_(value)\n            return\n",
        "            return\n",
        "values assigned to .data while a model is built are lost",
        ("tests/runtime/construction/test_init.py::test_classes_made_inside_keep_their_decorators",),
    ),
)
