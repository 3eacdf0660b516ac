"""Take a rank's place from mpirun or mpiexec where nobody has set torch's variables."""

from __future__ import annotations

import os

import torch.distributed as dist

from zlaunch.errors import ZlaunchError

_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def discover(port: int) -> None:
    """Set RANK and its like, MASTER_ADDR and MASTER_PORT from the variables of Open MPI or MPICH.

    They do not say where rank 0 is: with several nodes MASTER_ADDR has to be set. Raises ZlaunchError.
    """
    if dist.is_initialized() or "RANK" in os.environ:
        return
    for names in (_OPEN_MPI, _MPICH):
        found = dict(zip(_TORCH, (os.environ.get(name, "") for name in names), strict=True))
        if not all(found.values()) or found["WORLD_SIZE"] == "1":
            continue
        if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if not os.environ.get("MASTER_ADDR"):
            raise ZlaunchError(
                f"MPI gives no address of rank 0 (this is rank {found['RANK']} of {found['WORLD_SIZE']}): "
                "set MASTER_ADDR to the name or address of its node on every rank"
            )
        os.environ.setdefault("MASTER_PORT", str(port))
        os.environ.update(found)
        return
