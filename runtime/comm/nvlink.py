"""Finds out which NVLink domain a GPU is in, where its links reach further than its machine.

The switches of a rack, such as NVL72, join the GPUs of several machines. NVML names such a domain by a
cluster and a clique, and NCCL sends through NVLink between ranks for which both are equal (mnnvl.cc).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from importlib import import_module

import torch


def find_nvlink_domain(device: torch.device) -> str | None:
    """Return the cluster and clique of a GPU whose NVLink reaches other machines, as text.

    None for other GPUs, for a CPU, and where nvidia-ml-py is not installed or NVML cannot tell.
    """
    if device.type != "cuda":
        return None
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        # By UUID: CUDA_VISIBLE_DEVICES does not renumber the GPUs that NVML counts.
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        found = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(found))
    except (AttributeError, nvml.NVMLError):  # an older nvidia-ml-py, an older driver, or a MIG instance
        return None
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    cluster = bytes(found.clusterUuid)
    # The switches of a single machine have no cluster.
    if found.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}/{found.cliqueId}"
