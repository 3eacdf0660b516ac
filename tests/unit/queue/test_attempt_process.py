"""Test that signals at any moment of a queued run's launcher leave its end written down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.limits import LIMIT_S

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from zlaunch.queue import attempt_process as queued
from zlaunch.plan.plan import Plan
from zlaunch.queue.daemon import Attempt
from zlaunch.queue.start_request import StartRequest
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.end import End

folder = Path(sys.argv[1])
begin, end = Attempt.begin, Attempt.end
queued.ensure_daemon = lambda folder: None
launcher = [None]

def send(signum):
    os.kill(os.getpid(), signum)

def run(code):
    # as run_job does: its handlers are gone when the outcome is known
    run_folder.begun(str(folder), "id", ("localhost",), 1)
    run_folder.ended(str(folder), End.of_code(code))
    return code

def as_begun(signum):
    def begun(attempt):
        begin(attempt)
        send(signum)
    Attempt.begin = begun
    launcher[0] = lambda arguments: sys.exit("it was launched")

def in_the_start(signum):
    launcher[0] = lambda arguments: send(signum) or sys.exit("it went on")

def after_the_run(signum):
    launcher[0] = lambda arguments: (run(0), send(signum))[0]

def before_the_end(signum):
    launcher[0] = lambda arguments: run(7)
    def ended(attempt, code):
        send(signum)
        end(attempt, code)
    Attempt.end = ended

def twice(signum):
    def print_and_send(*_, **__):
        send(signum)
    queued.print = print_and_send  # the launcher is about to write how it was stopped
    in_the_start(signum)

def at_once(signum):
    def run(arguments):
        held = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_BLOCK, held)
        for each in (signum, signal.SIGINT):
            send(each)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        sys.exit("it went on")
    launcher[0] = run

codes = {}
moments = (as_begun, in_the_start, after_the_run, before_the_end, twice)
cases = [(moment, signum) for moment in moments for signum in (signal.SIGTERM, signal.SIGUSR1)]
cases += [(in_the_start, signal.SIGHUP), (at_once, signal.SIGTERM)]
for number, (moment, signum) in enumerate(cases):
    pid = os.fork()
    if not pid:
        lock = os.dup(0)
        (folder / "launcher.json").unlink(missing_ok=True)
        about = {"folder": str(folder), "job": number, "attempt": 0, "run_id": "id", "lock": lock}
        request = StartRequest(**about, version="", path="", settings=None)
        moment(signum)
        line = ["--run_dir", str(folder), "x.py"]
        os._exit(queued.run_attempt(request.as_text(), line, launcher[0]))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    noted = Attempt(folder, number, 0)._read("ended").get("exit_code")
    codes[f"{moment.__name__} {signum.name}"] = status, noted
print(json.dumps(codes))
"""


def test_a_signal_outside_of_the_run_ends_the_attempt_with_its_code(tmp_path: Path) -> None:
    """The daemon may signal as soon as `begun` is there; an attempt that a signal has killed has no end."""
    (tmp_path / "attempts").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    term, saves = 128 + signal.SIGTERM, 128 + signal.SIGUSR1
    assert json.loads(done.stdout) == {
        "as_begun SIGTERM": [term, term],
        "as_begun SIGUSR1": [saves, saves],
        "in_the_start SIGTERM": [term, term],
        "in_the_start SIGUSR1": [saves, saves],
        "in_the_start SIGHUP": [128 + signal.SIGHUP] * 2,
        "after_the_run SIGTERM": [0, 0],
        "after_the_run SIGUSR1": [0, 0],
        "before_the_end SIGTERM": [7, 7],
        "before_the_end SIGUSR1": [7, 7],
        "twice SIGTERM": [term, term],
        "twice SIGUSR1": [saves, saves],
        "at_once SIGTERM": [130, 130],  # the lower number is handled first
    }
