"""Test workers that are forks of one process which has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, alive, run
from tests.limits import wait_until

SHOW = """
    import json, os, sys
    already = "torch" in sys.modules
    import torch, random, numpy
    env = os.environ
    print(json.dumps({
        "already": already, "argv": sys.argv, "parent": os.getppid(),
        "rank": env["RANK"], "local": env["LOCAL_RANK"],
        "session": os.getsid(0) == os.getpid(), "name": __name__, "file": __file__, "path": sys.path[0],
        "random": random.random(), "numpy": float(numpy.random.rand()),
        "torch": float(torch.rand(())), "agent": env.get("ZLAUNCH_AGENT_PID"),
        "main": sys.modules["__main__"].__file__, "stdin": sys.stdin.read(),
    }))
"""


def _shown(folder: Path, *options: str) -> list[dict[str, object]]:
    launch = run(folder, "--num_gpus=2", *options, script=SHOW, args=("a b",))
    assert launch.process.returncode == 0, launch.err
    agent = launch.agent_pid()
    found = [json.loads(launch.log(rank)) for rank in range(2)]
    assert all(f["parent"] == agent for f in found)
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [(), ("--no_preload",)], ids=["preload", "no_preload"])
def test_a_forked_worker_is_like_one_started_by_itself(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = _shown(tmp_path, *options)
    for rank, f in enumerate(found):
        assert f["already"] is not bool(options)
        assert f["argv"] == ["worker.py", "a b"]
        assert (f["rank"], f["local"], f["name"]) == (str(rank), str(rank), "__main__")
        assert f["file"] == f["main"] == str(tmp_path / "worker.py") and f["path"] == str(tmp_path)
        assert f["session"] and f["agent"] is None and f["stdin"] == ""
    for numbers in ("random", "numpy", "torch"):
        assert len({f[numbers] for f in found}) == 2, numbers


SAYS = """
    import sys
    already = [name for name in ("torch", "torch._dynamo", "zlaunch.runtime.api") if name in sys.modules]
    import os
    print(*already, *(name for name in os.environ if "INDUCTOR" in name))
    {rest}
"""


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rest", "modules"),
    [
        ("import torch", "torch"),
        ("import torch, torch.optim", "torch"),
        ("import zlaunch", "torch zlaunch.runtime.api"),
        ("import zlaunch, torch.optim", "torch torch._dynamo zlaunch.runtime.api"),
        (
            "import os, zlaunch, torch.optim\n    os.environ['TORCHDYNAMO_DISABLE'] = '1'",
            "torch zlaunch.runtime.api",
        ),
    ],
    ids=["torch", "torch's optimizers", "no optimizer", "an optimizer", "the compiler's variable"],
)
def test_workers_have_what_their_script_will_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, modules: str
) -> None:
    monkeypatch.delenv(
        "TORCHINDUCTOR_CACHE_DIR", raising=False
    )  # another test may have imported the compiler
    launch = run(tmp_path, "--num_gpus=2", script=SAYS.format(rest=rest))
    assert launch.process.returncode == 0, launch.err
    assert launch.log(0) == launch.log(1) == f"{modules}\n"


def test_importing_zlaunch_leaves_the_compiler_out() -> None:
    code = "import sys, zlaunch.runtime.api; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_script_without_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=2", script="import sys\nprint('torch' in sys.modules)")
    assert launch.log(0) == launch.log(1) == "False\n"


BROKEN = """
    import os, signal, time
    if "zlaunch.node.preload" in " ".join(open("/proc/self/cmdline").read().split("\\0")):
        open("importing", "w").close()
        {act}
"""


def _broken_torch(folder: Path, act: str) -> dict[str, str]:
    """A module called torch that does something to the process that preloads it."""
    import textwrap

    (folder / "site").mkdir()
    (folder / "site" / "torch.py").write_text(textwrap.dedent(BROKEN.format(act=act)))
    from tests.e2e.helpers import ROOT

    return {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize("act", ["raise ImportError('broken')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_when_it_fails_the_workers_start_by_themselves(tmp_path: Path, act: str) -> None:
    env = _broken_torch(tmp_path, act)
    launch = run(tmp_path, "--num_gpus=2", script="import torch\nprint('fine')", env=env)
    assert (tmp_path / "importing").exists()
    assert launch.process.returncode == 0, launch.err
    assert launch.log(1) == "fine\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", ["terminate", "kill"])
def test_a_stop_while_it_imports_leaves_nothing(tmp_path: Path, stop: str) -> None:
    launch = Launch(
        tmp_path,
        "--num_gpus=2",
        script="import torch\nprint('never')",
        env=_broken_torch(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"),
    )
    wait_until(lambda: (tmp_path / "importing").exists(), "the import has begun")
    run_id = launch.run_id
    assert alive(run_id)
    getattr(launch.process, stop)()
    assert launch.wait() == (143 if stop == "terminate" else -9)
    wait_until(lambda: not alive(run_id), "nothing left")
