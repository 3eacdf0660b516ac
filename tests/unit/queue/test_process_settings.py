"""Test that a process gets the settings of another one, and says what it cannot get."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT_S
from zlaunch.queue.process_settings import ProcessSettings

ROOT = Path(__file__).resolve().parents[3]
RESTORE = """
import json, os, sys
from zlaunch.queue.process_settings import ProcessSettings
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))
missed = ProcessSettings.from_json(json.loads(sys.argv[1])).restore()
print(json.dumps([ProcessSettings.of_this_process().as_json(), missed]))
"""


def restored(settings: ProcessSettings, *more: str) -> tuple[ProcessSettings, list[str]]:
    """Return what a new process has after it has taken settings, and what it says it has not."""
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, json.dumps(settings.as_json()), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    now, missed = json.loads(done.stdout)
    return ProcessSettings.from_json(now), missed


def settings(**more: object) -> ProcessSettings:
    own = ProcessSettings.of_this_process()
    known = {"nice": own.nice, "affinity": own.affinity, "limits": dict(own.limits)}
    return ProcessSettings(**{**known, **more})  # type: ignore[arg-type]  # keywords of tests


def test_a_process_gets_the_settings_of_another_one() -> None:
    own = ProcessSettings.of_this_process()
    _, hard = own.limits["RLIMIT_NOFILE"]
    limits = {**own.limits, "RLIMIT_NOFILE": (200, hard), "RLIMIT_CORE": (0, 0)}
    wanted = settings(nice=own.nice + 1, affinity=own.affinity[-1:], limits=limits)
    assert restored(wanted) == (wanted, [])


def test_cpus_and_limits_that_are_not_there_are_named() -> None:
    own = ProcessSettings.of_this_process()
    wanted = settings(affinity=(*own.affinity, 8000, 8001), limits={"RLIMIT_ODD": (1, 2)})
    now, missed = restored(wanted)
    assert now.affinity == own.affinity
    assert [text.partition(" (")[0] for text in missed] == ["RLIMIT_ODD 1", "CPUs 8000-8001"]
    now, missed = restored(settings(affinity=(8000,)))
    assert now.affinity == own.affinity and "CPUs 8000 (runs on" in missed[0]


@pytest.mark.needs("root")
def test_what_only_root_can_restore_is_named_with_its_values() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = ProcessSettings.of_this_process()
    assert hard != resource.RLIM_INFINITY
    limits = {"RLIMIT_NOFILE": (soft, hard + 1), "RLIMIT_FSIZE": own.limits["RLIMIT_FSIZE"]}
    now, missed = restored(settings(nice=own.nice - 1, limits=limits), "65533")
    assert (now.nice, now.limits["RLIMIT_NOFILE"]) == (own.nice, (soft, hard))
    assert missed[0] == f"hard RLIMIT_NOFILE {hard + 1} (stays {hard})"
    assert missed[1].startswith(f"nice value {own.nice - 1} (stays {own.nice}: ")
    _, missed = restored(settings(limits={"RLIMIT_NOFILE": (hard + 1, hard + 1)}), "65533")
    assert missed == [f"RLIMIT_NOFILE {hard + 1} (is {hard})"]
