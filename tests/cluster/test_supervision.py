"""Test runs that go on: restarts, fewer nodes, hangs, saving before the end, and training across nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.helpers import await_ready, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT
from tests.limits import wait_until

TRAIN = """
    import json, os, sys, torch, zlaunch
    from examples.gpt import GPT, Size

    torch.manual_seed(0)
    device = zlaunch.init_distributed()
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model = GPT(Size(layers=2, width=32, heads=2, context=16)).double()
    stage = int(sys.argv[1])
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 12 // world, "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    })
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(8):
        batch = torch.randint(0, 8, (12, 17), generator=generator).chunk(world)[rank]
        logits = engine(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    if rank == 0:
        print(json.dumps(losses))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["ssh", pytest.param("slurm", marks=pytest.mark.exhaustive)])
def test_training_over_three_nodes_equals_one_process(cluster: Testbed, tmp_path: Path, by: str) -> None:
    results = []
    for folder, launcher, stage in (("one", None, 0), ("many", by, 3 if by == "ssh" else 2)):
        (tmp_path / folder).mkdir()
        env = {"PYTHONPATH": str(ROOT)}
        if launcher is None:
            from tests.e2e.helpers import Launch

            launch = Launch(
                tmp_path / folder, "--num_gpus=1", "--no_local_rank", script=TRAIN, args=(str(stage),)
            )
        else:
            more = {} if by == "slurm" else {"env": env}
            launch = start(cluster, tmp_path / folder, by=by, script=TRAIN, args=(str(stage),), **more)
        assert launch.wait() == 0, launch.err
        results.append(json.loads(launch.log(0).splitlines()[-1]))
    one, many = results
    assert len(one) == 8 and one[-1] < one[0]
    assert many == pytest.approx(one, rel=1e-9)


@pytest.mark.rotated
def test_restarts(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os, sys, time
        print("attempt", os.environ["ZLAUNCH_RESTART_COUNT"], os.environ["MASTER_PORT"], flush=True)
        if os.environ["ZLAUNCH_RESTART_COUNT"] != "2" and os.environ["RANK"] == "4":
            raise ValueError("not yet")
        if os.environ["ZLAUNCH_RESTART_COUNT"] != "2":
            time.sleep(600)
    """
    launch = start(cluster, tmp_path, "--max_restarts=2", script=script)
    assert launch.wait() == 0, launch.err
    lines = launch.log(4).splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("attempt")] == [
        ["attempt", str(i)] for i in range(3)
    ]
    assert "restart 2 of 2" in launch.err and len(launch.events("start")) == 3

    (tmp_path / "again").mkdir()
    launch = start(cluster, tmp_path / "again", "--max_restarts=1", script="raise SystemExit(2)")
    assert launch.wait() == 2  # an exit code like any other
    assert "restart 1 of 1" in launch.err


@pytest.mark.exhaustive
def test_going_on_without_a_dead_node(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os, time
        print("ready", os.environ["WORLD_SIZE"], flush=True)
        if os.environ["WORLD_SIZE"] == "6":
            time.sleep(600)
    """
    launch = start(cluster, tmp_path, "--heartbeat=5", "--min_nodes=2", "--connect_timeout=20", script=script)
    await_ready(launch)
    cluster.cut("n1")
    try:
        assert launch.wait() == 0, launch.err
    finally:
        cluster.heal("n1")
    assert "n1 fell silent" in launch.err and "going on with 2 of 3 nodes, without n1" in launch.err
    assert "ready 4" in launch.log(3)
    wait_until(lambda: not cluster.processes(), "nothing left")


@pytest.mark.exhaustive
def test_a_hang_shows_the_stacks_of_all_ranks(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import time
        def waits_for_ever():
            time.sleep(600)
        print("ready", flush=True)
        waits_for_ever()
    """
    launch = start(cluster, tmp_path, "--hang_timeout=10", script=script)
    assert launch.wait() == 1
    assert "hang: no rank has written anything for 10 s" in launch.err
    stacks = [line for line in launch.err.splitlines() if line.startswith("    | ")]
    assert sum("waits_for_ever" in line for line in stacks) == 6


STOPS = """
    import os, time, zlaunch, torch
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {}}})
    print("ready", flush=True)
    while not engine.should_stop:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        time.sleep(0.02)
    print("saved at", engine.global_steps, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", [pytest.param("ssh", marks=pytest.mark.exhaustive), "slurm"])
def test_save_and_stop_reaches_every_rank_at_the_same_step(cluster: Testbed, tmp_path: Path, by: str) -> None:
    launch = start(cluster, tmp_path, by=by, script=STOPS)
    await_ready(launch)
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    os.kill(record["pid"], signal.SIGUSR1)
    assert launch.wait() == 0, launch.err
    last = {launch.log(rank).splitlines()[-1] for rank in range(6)}
    assert len(last) == 1 and next(iter(last)).startswith("saved at")


GOES_ON = """
    import time, zlaunch, torch
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {}},
        "checkpoint": {"on_signal": True, "save_dir": "saved"}})
    engine.load_checkpoint(zlaunch.resume_dir())
    print("ready at", engine.global_steps, flush=True)
    while True:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        time.sleep(0.02)
"""


SAVES_AT_SIGTERM = """
import signal, sys, time

def save(*_):
    print("saved", flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_start_of_a_grace_time_ends_the_run_and_requeues_it(
    cluster: Testbed, tmp_path: Path, nodes: int
) -> None:
    """SLURM sends SIGTERM to the steps only then, and would requeue the job itself after ten minutes."""
    (tmp_path / "worker.py").write_text(SAVES_AT_SIGTERM)
    zlaunch = [sys.executable, "-m", "zlaunch", "slurm", "submit", "-p", "grace", "--requeue", "--time=30"]
    zlaunch += [f"--num_nodes={nodes}", "--num_gpus=1", "-c1", f"--output={tmp_path}/out"]
    zlaunch += [f"--python={sys.executable}", f"--zlaunch_args=--no_local_rank --run_dir={tmp_path}/run"]
    env = {**cluster.env(), "PYTHONPATH": str(ROOT)}
    more = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    job = subprocess.run([*zlaunch, "worker.py"], **more).stdout.strip()  # type: ignore[call-overload]
    logs = [tmp_path / "run" / "logs" / f"rank_{rank:05d}.log" for rank in range(nodes)]

    def all_say(word: str) -> bool:
        return all(log.exists() and word in log.read_text() for log in logs)

    def shown() -> str:
        command = ["scontrol", "show", "job", job]
        return subprocess.run(command, **more).stdout  # type: ignore[call-overload]

    wait_until(lambda: all_say("ready"), "the workers are up")
    urgent = ["sbatch", "--parsable", "-pfirst", f"-N{len(cluster.hosts)}", "--exclusive", "--wrap=sleep 600"]
    other = subprocess.run(urgent, **more).stdout.strip()  # type: ignore[call-overload]
    wait_until(lambda: "JobState=PENDING" in shown(), shown)
    assert "Restarts=1" in shown() and all_say("saved")
    text = (tmp_path / "out").read_text()
    assert "stopped by SIGTERM" in text and f"requeueing job {job}" in text
    subprocess.run(["scancel", job, other], **more)  # type: ignore[call-overload]


@pytest.mark.exhaustive
@pytest.mark.parametrize("hard", [False, True])
def test_a_job_that_loses_a_node_is_requeued(cluster: Testbed, tmp_path: Path, hard: bool) -> None:
    """SLURM does not: the node is back before SlurmdTimeout, or the run has ended by itself before that."""
    (tmp_path / "worker.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    zlaunch = [sys.executable, "-m", "zlaunch", "slurm", "submit", "--requeue", "--time=30", "-c1"]
    zlaunch += ["--num_nodes=2", "--num_gpus=1", f"--output={tmp_path}/out", f"--python={sys.executable}"]
    zlaunch += [f"--zlaunch_args=--no_local_rank --heartbeat 5 --run_dir={tmp_path}/run"]
    env = {**cluster.env(), "PYTHONPATH": str(ROOT)}
    more = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    job = subprocess.run([*zlaunch, "worker.py"], **more).stdout.strip()  # type: ignore[call-overload]

    def shown() -> str:
        command = ["scontrol", "show", "job", job]
        return subprocess.run(command, **more).stdout  # type: ignore[call-overload]

    log = tmp_path / "run" / "logs" / "rank_00001.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the workers are up")
    other = json.loads((tmp_path / "run" / "launcher.json").read_text())["hosts"][1]
    cluster.reboot(other, hard=hard)
    wait_until(lambda: "Restarts=1" in shown() and "JobState=PENDING" in shown(), shown)
    assert f"requeueing job {job}" in (tmp_path / "out").read_text()
    subprocess.run(["scancel", job], **more)  # type: ignore[call-overload]


@pytest.mark.exhaustive
def test_preemption_saves_requeues_and_goes_on(cluster: Testbed, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(__import__("textwrap").dedent(GOES_ON))
    (tmp_path / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH -N3 --gres=gpu:2 --requeue --open-mode=append --output={tmp_path}/out.%j\n"
        f"#SBATCH --signal=B:USR1@5\nexec {sys.executable} -m zlaunch --requeue --no_local_rank "
        f"--run_dir={tmp_path}/run.$SLURM_RESTART_COUNT worker.py\n"
    )
    submit = ["sbatch", "--parsable", "--chdir", str(tmp_path), str(tmp_path / "job.sbatch")]
    job = subprocess.run(submit, env=cluster.env(), capture_output=True, text=True, check=True).stdout.strip()

    def count() -> int:
        logs = [tmp_path / f"run.{i}" / "logs" / "rank_00005.log" for i in ("", "1")]
        return sum("ready" in log.read_text() for log in logs if log.exists())

    try:
        wait_until(lambda: count() == 1, "the first start")
        subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=cluster.env(), check=True)

        def pending() -> bool:
            command = ["squeue", "-h", "-j", job, "-o", "%T"]
            return (
                subprocess.run(command, env=cluster.env(), capture_output=True, text=True).stdout.strip()
                == "PENDING"
            )

        wait_until(pending, "the job in the queue again")
        # SLURM lets a requeued job wait for two minutes, of which a few seconds are needed: it does not
        # take credentials from before the requeue.
        time.sleep(5)
        command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
        subprocess.run(command, env=cluster.env(), check=True, capture_output=True)
        wait_until(lambda: count() == 2, "the start after the requeue")
        (steps,) = [path.name for path in (tmp_path / "saved").glob("global_step*")]
        for rank in range(6):
            assert "ready at 0" in (tmp_path / "run." / "logs" / f"rank_{rank:05d}.log").read_text()
        text = (tmp_path / "run.1" / "logs" / "rank_00005.log").read_text()
        assert f"ready at {steps.removeprefix('global_step')}\n" in text
        assert f"requeueing job {job}" in (tmp_path / f"out.{job}").read_text()
    finally:
        cluster.cancel_jobs()
