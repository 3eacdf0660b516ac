"""``get_accelerator()``: torch's device module behind DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from torch import Tensor

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.runtime.environment import read_environment

_unknown = absent("get_accelerator()")


class Accelerator:
    """The CUDA device of this process, or its CPU. What is not here is looked up in ``torch.cuda``, or in
    ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._cuda = self._name == "cuda"
        self._communication_backend_name = "nccl" if self._cuda else "gloo"

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.cuda if self.__dict__.get("_cuda") else torch.cpu, name, None)
        return found if found is not None else _unknown(name)

    def device_name(self, device_index: int | None = None) -> str:
        """Name a device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``."""
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which that device is the present one."""
        return (
            torch.device(self.device_name(device_index))
            if not self._cuda
            else torch.cuda.device(device_index)
        )

    def current_device(self) -> Any:
        """Return the index of the present GPU, or ``"cpu"``."""
        return torch.cuda.current_device() if self._cuda else "cpu"

    def current_device_name(self) -> str:
        """Name the present device: ``"cuda:0"``, ``"cpu"``."""
        return f"cuda:{torch.cuda.current_device()}" if self._cuda else "cpu"

    def set_device(self, device_index: int) -> None:
        """Make a device the present one."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Count the GPUs that this process sees; on a CPU the workers of this node, or else its cores."""
        if self._cuda:
            return torch.cuda.device_count()
        workers = read_environment().local_world_size
        return workers if workers > 1 else os.cpu_count() or 1

    def is_available(self) -> bool:
        """Tell whether there is a device: there is always a CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Tell whether there is nothing to wait for."""
        return not self._cuda

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return ``"nccl"`` or ``"gloo"``."""
        return self._communication_backend_name

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator."""
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""
        if self._cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    def random(self) -> Any:
        """Return ``torch.random``."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def empty_cache(self) -> None:
        """Give cached memory back."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Count the bytes in use: on a CPU those of this process."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes that were in use; on a CPU those in use now."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else self.memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the most bytes so far."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Count the bytes taken from the device."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else self.memory_allocated()

    def total_memory(self, device_index: int | None = None) -> int:
        """Count the bytes of the device."""
        if self._cuda:
            return int(torch.cuda.get_device_properties(device_index).total_memory)
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """Count the bytes that are free."""
        return torch.cuda.mem_get_info(device_index)[0] if self._cuda else psutil.virtual_memory().available

    def is_bf16_supported(self) -> bool:
        """Tell whether bf16 trains here."""
        return not self._cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Tell whether fp16 trains here: on a CPU too."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """List the dtypes that parameters can have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """Tell whether Triton can be used: on GPUs."""
        return self._cuda

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, **options: Any) -> Tensor:
        """Make a page-locked copy, where there is a GPU."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is page-locked."""
        return tensor.is_pinned() if self._cuda else False

    def use_host_timers(self) -> bool:
        """Tell whether the host's clock measures how long something took."""
        return not self._cuda

    resolves_data_dependency = handles_memory_backpressure = use_host_timers

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        return tensor.device.type == self._name

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin an NVTX range."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: Any = None) -> None:
        """End an NVTX range."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Any) -> Any:
        """Call the function."""
        return callback()

    def visible_devices_envs(self) -> list[str]:
        """Name the variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]


_accelerator: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """Return the one accelerator object of this process."""
    global _accelerator
    if _accelerator is None:
        _accelerator = Accelerator()
    return _accelerator


def set_accelerator(accelerator: Any) -> None:
    """Use another accelerator object."""
    global _accelerator
    _accelerator = accelerator


def is_current_accelerator_supported() -> bool:
    """Tell whether the device is supported: CUDA and CPU are."""
    return True
