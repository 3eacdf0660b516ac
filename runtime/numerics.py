"""Settles how a process computes: the precision of a config, TF32, and what is said of both at the start."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .comm.collectives import Comm
from .config import Config
from .log import say
from .precision.policy import Precision, choose_precision


def settle_precision(config: Config, comm: Comm) -> Precision:
    """Return the precision that a validated config asks for, and set TF32 for this process where it has
    ``tf32``. Rank 0 says what runs in the place of apex, and where ``tf32`` can do nothing.
    """
    precision, said = choose_precision(config), []
    if config.amp.enabled:
        what = "plain fp32" if precision.autocast is None else "torch.autocast to float16 (torch_autocast)"
        scale = "without loss scaling"
        if precision.scaler.used:
            scale = f"with a {'dynamic' if precision.scaler.dynamic else 'fixed'} loss scale"
        said.append(f"amp: zlaunch does not use apex; {config.amp.opt_level} becomes {what} {scale}")
    if config.tf32 is not None:
        if comm.device.type == "cuda" and torch.cuda.get_device_capability(comm.device) >= (8, 0):
            set_tf32(config.tf32)
        else:
            said.append("tf32 has no effect: it needs a GPU of compute capability 8.0 or higher")
    for line in said if comm.rank == 0 else ():
        say(line)
    return precision


def set_tf32(enabled: bool) -> None:
    """Let fp32 products and convolutions on GPUs round their inputs to TF32, or not.

    Newer versions of torch have a flag for each operation beside the old ones, and refuse to read either kind
    where the two differ: all are set. The one for all operations at once stays, as these go before it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions call the old flags deprecated
        torch.set_float32_matmul_precision("high" if enabled else "highest")
        torch.backends.cudnn.allow_tf32 = enabled
    for operation in ("conv", "rnn"):
        # where it is off, the old flag leaves these to the one for all
        flag: Any = getattr(torch.backends.cudnn, operation, None)
        if hasattr(flag, "fp32_precision"):  # older versions have a module called rnn
            flag.fp32_precision = "tf32" if enabled else "ieee"
