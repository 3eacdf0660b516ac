"""List mutations of bitsandbytes' 8-bit state, of statistics of routers, and of process groups on GPUs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_STATE = ("tests/unit/cuda_ops/test_narrow_state.py", "tests/runtime/checkpoint/test_bitsandbytes.py")
_ROUTER = ("tests/runtime/monitor/test_router.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "cuda_ops/narrow_state.py",
        "        scale = torch.where(high > -low, high, low / torch.where(low < 0, numbers[0], -1.0))",
        "        scale = torch.where(high > -low, high, -low)",
        "a block whose largest element is negative gets other codes when it is loaded",
        _STATE,
    ),
    Mutation(
        "cuda_ops/narrow_state.py",
        "    return names if own[names[1]].shape == (blocks,) else ()",
        "    return names",
        "blocks of another size are read as blocks of 256",
        _STATE,
    ),
    Mutation(
        "runtime/checkpoint/shard_io.py",
        "        make_narrow(optimizer, part)",
        "        pass",
        "a new process loads 8-bit state as fp32",
        _STATE,
    ),
    Mutation(
        "runtime/offload/manager.py",
        "        if on_disk:",
        "        if False:",
        "state that is not fp32 is put on NVMe",
        _STATE,
    ),
    Mutation(
        "runtime/observe/router.py",
        "        if not module.training or placeholder.in_backward():",
        "        if placeholder.in_backward():",
        "evaluations count",
        _ROUTER,
    ),
    Mutation(
        "runtime/observe/router.py",
        "            self._counts.zero_()",
        "            pass",
        "a step counts the tokens of those before",
        _ROUTER,
    ),
    Mutation(
        "runtime/observe/router.py",
        "        return _OnCopyInert, ()",
        "        return _OnCopyInert, (self._function,)",
        "a copy of the model counts",
        _ROUTER,
    ),
    Mutation(
        "runtime/comm/process_group.py",
        "    world.bound_device_id = None",
        "    pass",
        "all ranks wait for each group on GPUs",
        ("tests/runtime/comm/test_process_group.py",),
    ),
)
