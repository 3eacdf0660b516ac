"""Describe this machine and its Python: versions, system, memory, GPUs. Imports none of the packages."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from zlaunch import __version__
from zlaunch.system.checkup import driver_version, gpu_models
from zlaunch.system.machine import discover

_PACKAGES = (
    *("torch", "triton", "numpy", "numba", "safetensors", "pydantic", "PyYAML", "cloudpickle"),
    *("click", "rich", "paramiko", "psutil"),
    *("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "mpi4py"),
    *("deepspeed", "transformers", "accelerate", "peft", "lightning", "pytorch-lightning", "bitsandbytes"),
    *("flash-attn", "tensorboard", "wandb", "comet-ml"),
)
_SLURM = ("JOB_ID", "JOBID", "JOB_NUM_NODES", "JOB_PARTITION", "STEP_ID", "STEPID", "ARRAY_JOB_ID")
_SLURM_VARIABLES = tuple(f"SLURM_{name}" for name in (*_SLURM, "ARRAY_TASK_ID", "NODEID", "RESTART_COUNT"))


def describe_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a report about this machine should say, as plain data; None for what cannot be known."""
    devices = discover(environ)
    return {
        "zlaunch": __version__,
        "zlaunch_folder": str(Path(__file__).resolve().parents[1]),
        "python": sys.version,
        "executable": sys.executable,
        "packages": {name: _version(name) for name in _PACKAGES},
        "hostname": platform.node(),
        "system": _system(),
        "kernel": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _first_of("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpus_for_this_process": len(os.sched_getaffinity(0)),
        "memory": _first_of("/proc/meminfo", "MemTotal"),
        "memory_available": _first_of("/proc/meminfo", "MemAvailable"),
        "gpus": list(devices.tokens),
        "gpu_models": list(gpu_models()),
        "gpu_driver": driver_version(),
        "cuda_visible_devices": devices.visible,
        "slurm": {name: environ[name] for name in _SLURM_VARIABLES if name in environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _first_of(path: str, name: str) -> str | None:
    """Return the first value of a name in one of the kernel's lists of `name : value`."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), None)
