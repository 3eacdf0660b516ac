"""Test DeepSpeed's functions about logged collectives, and that a script's own are among them."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.test_engine import _deepspeed
from tests.runtime.models import config, net
from tests.runtime.workers import join, run_workers

OPERATION = re.compile(r"^  (\w+) +([\d.]+ \w+) +(\d) +(\d+) +([\d.]+) ", re.M)


def _operations(printed: str) -> dict[tuple[str, str], int]:
    """Count the operations of a table by kind and size; each has taken some time."""
    rows = OPERATION.findall(printed)
    assert all(ranks == "2" and float(total) > 0 for _, _, ranks, _, total in rows)
    return {(kind, size): int(count) for kind, size, _, count, _ in rows}


def _script(section: dict[str, Any]) -> tuple[str, int]:
    deepspeed = _deepspeed()
    rank, comm = join(), deepspeed.comm
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, *_ = deepspeed.initialize(
            model=net(), config=config(1, 1, comms_logger={"enabled": True, **section})
        )
        comm.reset_log()
        assert comm.get_comm_operation_count() == 0
        one, both = torch.ones(1000), torch.empty(2000)
        parts = list(both.chunk(2))
        comm.all_reduce(one, comm.ReduceOp.MAX, None, False, True, "name")
        handles = [comm.all_reduce(one, async_op=True), comm.all_reduce_coalesced([one, one], async_op=True)]
        handles.append(comm.all_gather_into_tensor(both, one, async_op=True))
        handles.append(comm.reduce_scatter_tensor(one, both, async_op=True))  # gloo cannot say when it ends
        handles.append(comm.all_gather(parts, one, async_op=True))
        for handle in handles:
            handle.wait()
            handle.wait()
        assert handles[0].is_completed() and callable(handles[3].is_completed)
        comm.broadcast(one, src=0)
        comm.gather(one, parts if rank == 0 else None)
        comm.scatter(one, parts if rank == 0 else None)
        comm.all_to_all_single(torch.empty(2000), both)
        (comm.isend(one, 1) if rank == 0 else comm.irecv(one, 0)).wait()
        comm.barrier(prof=True)
        alone = dist.new_group([rank], use_local_synchronization=True)
        comm.all_reduce(one, group=alone)
        comm.broadcast_object_list([None])
        count = comm.get_comm_operation_count()
        comm.log_summary(show_straggler=True)
        summary = printed.getvalue()
        engine.destroy()
        comm.all_reduce(one)
        comm.log_summary()
    assert ("warning: log_summary: nothing is logged" in printed.getvalue()) == (rank == 0)
    with pytest.raises(NotImplementedError, match="comms_logger of the config"):
        comm.configure(enabled=True)
    return summary[summary.find("zlaunch: collectives") :] if rank == 0 else "", count


def test_a_scripts_operations_are_logged() -> None:
    (said, count), (other, _) = run_workers(_script, 2, {})
    assert "wait ms" in said and not other
    one, both = "3.91 KiB", "7.81 KiB"
    expected = {
        **{("all_reduce", one): 4, ("all_gather", both): 2, ("reduce_scatter", both): 1},
        **{("broadcast", one): 1, ("gather", both): 1, ("scatter", both): 1, ("all_to_all", both): 1},
        **{("send", one): 1, ("barrier", "0 B"): 1},
    }
    assert _operations(said) == expected and count == sum(expected.values())


def test_what_has_prof_is_logged_in_any_case() -> None:
    said = run_workers(_script, 2, {"prof_all": False, "prof_ops": ["broadcast"]})[0][0]
    assert _operations(said) == {("broadcast", "3.91 KiB"): 1, ("barrier", "0 B"): 1}
