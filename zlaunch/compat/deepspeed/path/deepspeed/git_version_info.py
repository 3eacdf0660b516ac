"""What DeepSpeed says of its build; nothing is built here."""

from typing import Any

from zlaunch.compat.deepspeed import VERSION as version

git_hash = "zlaunch"
git_branch = "zlaunch"
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info: dict[str, Any] = {
    "version": "0.0",
    "bf16_support": False,
    "cuda_version": "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}
