"""Represent the plan of a launch: every decision as plain data, before anything is started.

Transports and agents only carry it out; `--dry_run` prints it; tests compare it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

_PLAIN_KEYS = (
    "MON",
    "TUR",
    "DON",
    "HOC",
    "JOC",
    "WHIS",
    "SORT[._-]",
    "DATASET[._-]TEXT[._-]",
    "LABEL[._-]",
    "PROMPT[._-]",
    "CHOSEN[._-]",
    "REJECTED[._-]",
)
"""Prefixes that turn KEY into another word (MONKEY) or into a column of a data set (SORT_KEY)."""
_NOT_PLAIN = "".join(rf"(?<!(?<![A-Z]){before}KEY)" for before in _PLAIN_KEYS)
SECRET_WORDS = (
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH(?!OR(?!IZATION))|"
    rf"KEY(?![A-Z]){_NOT_PLAIN}|"
    r"(?<![A-Z])PAT(?![A-Z])|(?<![A-Z])(?:PG)?PASS(?![A-Z])|"
    r"(?<![A-Z])PW(?![A-Z])|WEBHOOK"
)
"""Words in the names of variables and options whose values are secret."""
# No [\w.-]* in front: searching for it would take the square of the length of a long argument.
ASSIGNED = rf"(?:{SECRET_WORDS})[\w.-]*="
IN_ADDRESS = r"://[^/@\s]+@"
NOT_SHOWN = "(not shown)"
LOCAL_HOST = "localhost"
"""In ZLAUNCH_DEBUG: the launcher is on the worker's node."""


def secret_word(name: str) -> str:
    """Return the word in the name of a variable or option that makes its value secret; empty without one."""
    found = re.search(SECRET_WORDS, name, re.IGNORECASE)
    return found[0] if found else ""


def is_secret(name: str) -> bool:
    """Tell by the name of a variable or option whether its value is secret."""
    return bool(secret_word(name))


def without_secrets(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line to be shown: `--env=HF_TOKEN=VALUE`, `--api_key VALUE`, without their values."""
    shown: list[str] = []
    secret_follows = False
    for argument in arguments:
        if secret_follows and not argument.startswith("-"):
            shown.append(NOT_SHOWN)
        elif found := re.search(ASSIGNED, argument, re.IGNORECASE):
            shown.append(argument[: found.end()] + NOT_SHOWN)
        else:
            shown.append(re.sub(IN_ADDRESS, f"://{NOT_SHOWN}@", argument))
        secret_follows = argument.startswith("-") and "=" not in argument and is_secret(argument)
    return tuple(shown)


@dataclass(frozen=True, slots=True)
class Program:
    """Says what every worker runs."""

    mode: Literal["script", "module", "exec"]
    name: str
    args: tuple[str, ...] = ()
    pass_local_rank: bool = True
    """Put `--local_rank=N` before the script's own arguments, as DeepSpeed does."""
    preload: tuple[str, ...] = ()
    """What its workers will import anyway and may share."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Describes one process of the job."""

    rank: int
    local_rank: int
    env: dict[str, str]
    """What is added to the node's own environment."""
    argv: tuple[str, ...]
    slot: int | None = None
    """The number of its GPU among those of the node; None for a CPU worker."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Holds one node and its workers, in order of rank."""

    host: str
    workers: tuple[WorkerPlan, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Says where the nodes of a plan stand in a run whose other nodes are started by other launchers."""

    first_rank: int
    world_size: int
    first_node: int
    node_count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the whole launch. An agent gets a plan with its own node alone."""

    run_id: str
    run_dir: str
    master_addr: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    cwd: str
    grace_s: float
    heartbeat_s: float = 0.0
    """An agent that hears nothing from the launcher for so long ends the run; 0 for a launcher on its node.
    """
    preload: tuple[str, ...] = ()
    """Modules that one process on each node imports before it forks the workers; none: each by itself."""
    restarts: bool = False
    """There may be another attempt: the nodes keep what makes its start short."""
    in_step: bool = False
    """Other launchers of the SLURM step run the other nodes, and are told when this one is gone."""
    python: bool = True
    """The workers are Python programs under our bootstrap, which knows what SIGUSR1 and SIGUSR2 mean."""
    part: Part | None = None
    """Its place in the run; None: these nodes are the whole run."""

    @property
    def world_size(self) -> int:
        """Return how many workers this launcher starts."""
        return sum(len(node.workers) for node in self.nodes)

    @property
    def run_world_size(self) -> int:
        """Return how many workers the run has, with those of other launchers."""
        return self.world_size if self.part is None else self.part.world_size

    def for_node(self, index: int) -> Plan:
        """Return the part that one agent carries out."""
        return replace(self, nodes=(self.nodes[index],))

    def shown(self) -> str:
        """Return the plan as JSON to be read, without the values of variables that hold secrets."""
        data = asdict(self)
        for node in data["nodes"]:
            for worker in node["workers"]:
                worker["argv"] = without_secrets(worker["argv"])
                worker["env"] = {
                    key: NOT_SHOWN if is_secret(key) else re.sub(IN_ADDRESS, f"://{NOT_SHOWN}@", value)
                    for key, value in worker["env"].items()
                }
        return json.dumps(data, indent=2)

    def write(self, path: Path) -> None:
        """Write what :meth:`shown` returns to a file that only this user can read."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self.shown() + "\n")

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        """Make a plan from parsed JSON: what `asdict` gave where it was sent."""
        nodes = tuple(
            NodePlan(
                host=node["host"],
                workers=tuple(WorkerPlan(**{**w, "argv": tuple(w["argv"])}) for w in node["workers"]),
            )
            for node in data["nodes"]
        )
        part = None if data["part"] is None else Part(**data["part"])
        return Plan(**{**data, "nodes": nodes, "preload": tuple(data["preload"]), "part": part})
