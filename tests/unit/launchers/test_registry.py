"""Test what every launcher is, and which hosts and slots are chosen."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.cli.run import run
from zlaunch.errors import LaunchError
from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.launchers import registry
from zlaunch.launchers.base import HostSelection
from zlaunch.launchers.this_node import ThisNodeLauncher
from zlaunch.slurm.environment import read

NAMES = [*registry.NAMED, *registry._IMPLIED]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_listed_under_its_own_name(name: str) -> None:
    assert registry.load(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_are_options_of_the_command_with_a_reason(name: str) -> None:
    options = {parameter.name for parameter in run.params}
    for option, why in registry.load(name).refuses.items():
        assert option in options and why


@pytest.mark.parametrize("name", NAMES)
def test_each_starts_agents_elsewhere_or_runs_on_this_node(name: str) -> None:
    kind = registry.load(name)
    assert kind.spans_nodes != issubclass(kind, ThisNodeLauncher)


def chosen(*entries: HostEntry, found: dict[str, int] | None = None, **given: Any) -> Any:
    usual = dict.fromkeys(("include", "exclude", "num_nodes", "num_gpus"))
    options: Any = SimpleNamespace(**{**usual, **given})
    selection = HostSelection(options, entries)
    if found is not None:
        selection.apply_filters(found)
    return selection.chosen


def test_slots_are_those_of_the_hostfile_less_what_is_left_out() -> None:
    a, b = HostEntry("a", slots=2), HostEntry("b", slots=3)
    assert chosen(a, b) == {"a": (0, 1), "b": (0, 1, 2)}
    assert chosen(a, b, include="b:1-2") == {"b": (1, 2)}
    assert chosen(a, b, exclude="a@b:0") == {"b": (1, 2)}
    assert chosen(a, b, num_nodes=1) == {"a": (0, 1)}
    assert chosen(a, b, num_gpus=1) == {"a": (0,), "b": (0,)}


def test_slots_that_are_not_written_down_are_asked_for() -> None:
    a, b = HostEntry("a"), HostEntry("b", slots=1)
    assert chosen(a, b) is None
    assert chosen(a, b, found={"a": 2}) == {"a": (0, 1), "b": (0,)}
    assert chosen(a, b, exclude="a") == {"b": (0,)}, "it need not be asked"
    assert chosen(a, num_gpus=2) == {"a": (0, 1)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"include": "c"}, "--include 'c'"),
        ({"exclude": "a:9"}, "--exclude 'a:9'"),
        ({"num_nodes": 3}, "are 2 hosts"),
    ],
)
def test_a_choice_that_cannot_be_made_names_the_option(given: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        chosen(HostEntry("a", slots=1), HostEntry("b", slots=1), **given)


@pytest.mark.parametrize(
    ("requeue", "srun", "name"),
    [(False, "srun", registry.LOCAL), (True, "srun", registry.SLURM), (True, "none", registry.LOCAL)],
)
def test_a_requeued_job_of_one_node_has_its_workers_in_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requeue: bool, srun: str, name: str
) -> None:
    """SLURM sends SIGTERM to steps at the start of a grace time, not to the batch shell."""
    (tmp_path / srun).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    allocation = read({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": socket.gethostname()})
    options: Any = SimpleNamespace(node_rank=None, launcher=None, hostfile=None, requeue=requeue)
    assert registry.choose(options, allocation)[0] == name


def test_an_option_is_needed_where_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = SimpleNamespace(node_rank=None, launcher=None, hostfile=None)
    monkeypatch.setattr(os.path, "isfile", lambda path: False)
    assert registry.choose(options, None)[0] == registry.LOCAL
    options.hostfile = "hosts"
    assert registry.choose(options, None) == (registry.SSH, "--hostfile hosts")
    options.launcher = "openmpi"
    assert registry.choose(options, None) == ("openmpi", "--launcher openmpi")
    options.launcher = registry.SLURM
    with pytest.raises(LaunchError, match="not inside a SLURM job"):
        registry.choose(options, None)
