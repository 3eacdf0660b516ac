"""Test `--debug RANK` with a client that attaches as VS Code does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.dap_client import DapClient
from tests.e2e.helpers import Launch, alive, run
from tests.limits import wait_until

pytest.importorskip("debugpy")
ENV = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def connect(launch: Launch, rank: int) -> tuple[DapClient, dict[str, Any]]:
    """Connect to what the launcher has printed; return what the block for launch.json says of that."""
    said = wait_until(lambda: launch.events("debugger"), launch_says(launch))[0]
    assert said["rank"] == rank and said["attached"] is False
    lines = wait_until(lambda: lines_of_advice(launch), launch_says(launch))
    address = said["address"]
    port = said["port"]
    assert address == "127.0.0.1" and f"rank {rank} on localhost waits for a debugger at" in lines[0]
    block = json.loads(lines[2])
    assert (block["type"], block["request"]) == ("debugpy", "attach")
    assert block["connect"] == {"host": address, "port": port} and lines[0].endswith(f" {address}:{port}")
    return DapClient(address, port), block["connect"]


def lines_of_advice(launch: Launch) -> list[str]:
    lines = launch.err.splitlines()
    at = next((i for i, line in enumerate(lines) if "waits for a debugger" in line), len(lines))
    return lines[at : at + 3] if len(lines) >= at + 3 else []


def launch_says(launch: Launch) -> Any:
    return lambda: f"a debugger waited for: {launch.err}"


@pytest.mark.rotated
def test_a_client_attaches_before_the_script_runs_and_stops_in_it(tmp_path: Path) -> None:
    script = """
        import os
        value = 40 + int(os.environ["RANK"])
        print("value", value, "ZLAUNCH_DEBUG" in os.environ, flush=True)
    """
    launch = Launch(tmp_path, "--num_gpus=2", "--log_ranks=all", "--debug=1", "-q", script=script, env=ENV)
    client, where = connect(launch, 1)
    wait_until(lambda: "value 40 False" in launch.out, "only rank 1 waits")
    assert launch.log(1) == ""
    client.attach(where, {str(tmp_path / "worker.py"): [4]})
    thread = client.wait_for("stopped")["threadId"]
    (frame, *_) = client.ask("stackTrace", threadId=thread)["stackFrames"]
    assert (Path(frame["source"]["path"]).name, frame["line"]) == ("worker.py", 4)
    assert launch.log(1) == ""
    assert client.ask("evaluate", expression="value", frameId=frame["id"])["result"] == "41"
    client.ask("continue", threadId=thread)
    client.wait_for("terminated")
    client.close()
    assert launch.wait() == 0, launch.err
    assert launch.log(1) == "value 41 False\n" and not alive(launch.run_id)


def test_a_signal_ends_a_run_that_waits_for_a_debugger(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--debug=0", script="print('ran')", env=ENV)
    client, _ = connect(launch, 0)
    client.close()
    launch.process.terminate()
    assert launch.wait() == 143 and launch.out == ""
    wait_until(lambda: not alive(launch.run_id), "the debugger's processes end")


@pytest.mark.exhaustive
def test_no_rank_gives_up_on_one_that_is_debugged(tmp_path: Path) -> None:
    """The timeouts are 2 s, and rank 1 makes each last 3 s; without --debug this script fails."""
    script = """
        import time
        from datetime import timedelta
        import torch, zlaunch
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        rank = dist.get_rank()
        time.sleep(3 * rank)
        dist.all_reduce(torch.ones(1), group=group)
        optimizer = {"type": "Adam", "params": {}}
        config = {"train_batch_size": 2, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
        engine, *_ = zlaunch.initialize(model=torch.nn.Linear(4, 1), config=config)
        time.sleep(3 * rank)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        print("done", rank)
    """
    options = ("--num_gpus=2", "--no_local_rank", "--hang_timeout=2")
    failed = run(tmp_path, *options, script=script, env=ENV)
    assert failed.process.returncode != 0
    launch = Launch(tmp_path, *options, "--debug=1", script=script, env=ENV)
    wait_until(lambda: "waits for a debugger" in launch.err, launch_says(launch))
    client, where = connect(launch, 1)
    client.attach(where, {})
    client.wait_for("terminated")
    client.close()
    assert launch.wait() == 0, launch.err
    assert [launch.log(rank).splitlines()[-1] for rank in (0, 1)] == ["done 0", "done 1"]
    assert "no timeout ends the run: --hang_timeout" in launch.err
