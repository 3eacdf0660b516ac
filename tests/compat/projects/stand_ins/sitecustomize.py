"""Stands in for downloads and for CUDA. Python imports it at its start where this folder is on PYTHONPATH.

``torchvision.datasets.CIFAR10`` and ``datasets.load_dataset("wikitext")`` make up data instead of downloading
it, and ``MNIST`` reads the images in the folder that ``STAND_IN_MNIST`` names. Scripts that import the former
begin with the seed 0, as the one that trains on CIFAR10 sets none. Lightning's strategy for DeepSpeed, which
refuses CPUs, takes them. With ``STAND_IN_CUDA=1``, what names a CUDA device or NCCL gets the CPU and gloo, so
that a script that is written for GPUs alone runs on the CPU.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _after_torchvision_datasets(module: Any) -> None:
    import torch

    torch.manual_seed(0)

    class CIFAR10(module.FakeData):  # type: ignore[misc]
        def __init__(
            self, root: str, train: bool = True, transform: Any = None, download: bool = False
        ) -> None:
            super().__init__(96 if train else 20, (3, 32, 32), 10, transform)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return super().__getitem__(index)[0], index % 10

    module.CIFAR10 = CIFAR10
    init = module.MNIST.__init__
    module.MNIST.__init__ = lambda self, root, *args, **kwargs: init(
        self, os.environ["STAND_IN_MNIST"], *args, **kwargs
    )


def _after_datasets(module: Any) -> None:
    real = module.load_dataset

    @functools.wraps(real)
    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        if path != "wikitext":
            return real(path, *args, **kwargs)
        rows = [[f"word{(7 * row + place**2) % 97}" for place in range(10 + row % 13)] for row in range(64)]
        return module.Dataset.from_dict({"text": [" ".join(words) for words in rows]})

    module.load_dataset = load_dataset


def _after_lightning_deepspeed(module: Any) -> None:
    from lightning.pytorch.accelerators import CPUAccelerator

    module.CUDAAccelerator = CPUAccelerator
    module._validate_device_index_selection = lambda parallel_devices: None  # CPUs have no index


def _after_torch(module: Any) -> None:
    if os.environ.get("STAND_IN_CUDA") != "1":
        return
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

    cpu = module.device("cpu")

    def on_cpu(value: Any) -> Any:
        is_device = isinstance(value, (str, module.device)) and str(value).partition(":")[0] == "cuda"
        return cpu if is_device else value

    def moved(args: Any) -> Any:
        """Return the arguments of ``to``; its first may be the number of a GPU."""
        return (cpu, *args[1:]) if args and type(args[0]) is int else tuple(map(on_cpu, args))

    class CpuForCuda(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function is module.device:
                return on_cpu(function(*args, **(kwargs or {})))
            if function in (module.Tensor.cuda, module.Tensor.pin_memory):
                return args[0]
            if function is module.Tensor.to:
                args = (args[0], *moved(args[1:]))
            kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
            return function(*map(on_cpu, args), **kwargs)

    CpuForCuda().__enter__()
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        setattr(module.cuda, name, lambda device=None: None)
    module.cuda.device_count = lambda: 2
    move = module.nn.Module.to
    module.nn.Module.to = lambda self, *args, **kwargs: move(self, *moved(args), **kwargs)
    accelerator = module.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 2
    accelerator.current_accelerator = lambda check_available=False: cpu
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = accelerator.device_index = lambda index: None
    init = module.distributed.init_process_group
    wrap = DistributedDataParallel.__init__

    @functools.wraps(init)
    def init_process_group(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        init("gloo", *args, **kwargs)

    @functools.wraps(wrap)
    def wrap_on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        wrap(self, module, **more)

    module.distributed.init_process_group = init_process_group
    parallel: Any = DistributedDataParallel
    parallel.__init__ = wrap_on_cpu


_AFTER: dict[str, Callable[[Any], None]] = {
    "torch": _after_torch,
    "torchvision.datasets": _after_torchvision_datasets,
    "datasets": _after_datasets,
    "lightning.pytorch.strategies.deepspeed": _after_lightning_deepspeed,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of _AFTER where they are, and calls the function of each after its own code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _AFTER.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_then_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_then_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
