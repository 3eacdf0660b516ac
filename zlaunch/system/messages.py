"""Define what launcher, agents and workers send each other: one type for each kind of message.

`events.py` cuts streams into dicts. Here dicts become messages, and messages dicts. `COMMAND_TYPES`,
`AGENT_EVENT_TYPES` and `WORKER_EVENT_TYPES` list the kinds. The dict of an event has its fields and "type",
the dict of a command its fields and "cmd". Fields with their default value are left out. Unknown fields are
ignored.

An agent has the version of its launcher, so a missing field is an error. A script can write anything into its
pipe, so the fields of worker events are optional, and readers check their values.

The types are NamedTuples because frozen dataclasses take six times as long to define: 30 ms more for each
start of an agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from zlaunch.system.events import Event, Output

# -- commands ---------------------------------------------------------------------------------------
#
# What the launcher sends to an agent.


class Hello(NamedTuple):
    """Ask who the node is; the answer is HelloAnswer."""

    idle_s: float | None = None
    """Seconds that the agent waits for its plan."""


class CheckUp(NamedTuple):
    """Ask for the health of the node; the answer is CheckUpAnswer."""

    workdir: str
    gpus: Sequence[str]
    """Tokens of the GPUs to examine."""
    nccl_setting: str | None


class Listen(NamedTuple):
    """Ask node 0 to take the rendezvous port (0: any) and to send the token to who connects: Listening."""

    port: int
    token: str


class Reach(NamedTuple):
    """Ask for the first of node 0's addresses that sends the token: Reached."""

    addresses: Sequence[str]
    port: int
    token: str


class Sweep(NamedTuple):
    """Ask to end what is left of a run whose agent here has died: Swept."""

    run_id: str
    sessions: Sequence[tuple[int, int]]
    """Process id and start of its agent and workers, as far as they are known."""
    pid_namespace: int
    """Where these process ids hold; 0: unknown."""
    idle_s: float | None = None


class Start(NamedTuple):
    """Give the agent its plan. On the wire these are the fields of the plan, with `lease` and no `cmd`."""

    plan: dict[str, Any]
    lease: float | None
    """When the first lease ends, on the agent's clock (Note [Lease] in `zlaunch/node/lease.py`)."""


class Ping(NamedTuple):
    """Show life, and extend the lease: Pong."""

    lease: float | None = None
    pauses: int = 0
    """Number of times that the launcher was suspended in its terminal."""
    idle_s: float | None = None


class Pause(NamedTuple):
    """Grant a long lease: the launcher stands still."""

    lease: float | None


class Stop(NamedTuple):
    """Stop the workers."""

    grace_s: float | None = None
    """Seconds until they are killed; None: as the plan says."""


class Kill(NamedTuple):
    """Kill the workers, and end."""


class Signal(NamedTuple):
    """Send a signal to every worker."""

    signum: int


class ListPackages(NamedTuple):
    """Ask for the packages of the workers' Python: Packages."""


class Preload(NamedTuple):
    """Have a spare node import what its workers would."""

    modules: Sequence[str]
    cwd: str
    worker: dict[str, Any]


Command = (
    Hello
    | CheckUp
    | Listen
    | Reach
    | Sweep
    | Start
    | Ping
    | Pause
    | Stop
    | Kill
    | Signal
    | ListPackages
    | Preload
)

COMMAND_TYPES: Mapping[str, type[Any]] = {
    "hello": Hello,
    "checkup": CheckUp,
    "listen": Listen,
    "reach": Reach,
    "sweep": Sweep,
    "ping": Ping,
    "pause": Pause,
    "stop": Stop,
    "kill": Kill,
    "signal": Signal,
    "packages": ListPackages,
    "preload": Preload,
}

# -- agent events -----------------------------------------------------------------------------------
#
# What an agent sends to the launcher, answers first. `host` is the node's name in the plan, `time` is in
# seconds since the epoch, by the agent's clock. Output has its own form: Note [Output] in `events.py`.


class HelloAnswer(NamedTuple):
    """Say who the node is, in the form of `system.machine.Facts`."""

    content: Event


class CheckUpAnswer(NamedTuple):
    """Report the health of the node, in the form of `system.checkup.Checkup`."""

    content: Event


class Listening(NamedTuple):
    """Name the rendezvous port that is taken."""

    port: int
    error: str
    """Reason if no port could be taken; else empty."""


class Reached(NamedTuple):
    """Name the address of node 0 that answers, and the interface that leads there; empty without one."""

    address: str
    interface: str


class Swept(NamedTuple):
    """Say how many processes of a dead agent's run were ended."""

    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    clean: bool
    """Whether no process of the run can be left."""


class Pong(NamedTuple):
    """Answer a ping."""

    host: str
    beat: float
    """The agent's CLOCK_BOOTTIME."""
    pauses: int
    time: float


class AgentStarted(NamedTuple):
    """Report that the agent has its plan."""

    host: str
    pid: int
    start_ticks: int
    pid_namespace: int
    time: float


class Spawned(NamedTuple):
    """Report that a worker runs."""

    host: str
    rank: int
    local_rank: int
    pid: int
    start_ticks: int
    time: float


class FromScript(NamedTuple):
    """Pass on what a script has written to its pipe: an event of WORKER_EVENT_TYPES."""

    rank: int
    event: Event


class Exited(NamedTuple):
    """Report the end of a worker."""

    host: str
    rank: int
    pid: int
    returncode: int
    """Exit code, or minus the signal's number, as in `subprocess.Popen.returncode`."""
    reason: str
    """Usual cause of such an end; may be empty."""
    after_stop: bool
    """Whether the agent was stopping the workers by then."""
    time: float


class Packages(NamedTuple):
    """List the packages of the workers' Python, or say why there is no list."""

    host: str
    time: float
    executable: str | None = None
    python: str | None = None
    lines: object = None
    why: str | None = None

    @staticmethod
    def of(host: str, time: float, about: Mapping[str, Any]) -> Packages:
        """Take what the process that lists them has printed."""
        return Packages(
            host, time, about.get("executable"), about.get("python"), about.get("lines"), about.get("why")
        )


class Notice(NamedTuple):
    """Carry a message for the user."""

    message: str
    host: str | None = None
    time: float | None = None


class Failed(NamedTuple):
    """Report what the agent could not do."""

    host: str
    message: str
    refused: bool
    """Whether another host might do better."""
    time: float


class Signalled(NamedTuple):
    """Report that SLURM has sent the agent a signal that ends the run."""

    host: str
    signum: int
    time: float


class Stopping(NamedTuple):
    """Report that the agent stops the workers."""

    host: str
    why: str
    grace_s: float
    time: float


class Done(NamedTuple):
    """Report that no process of the attempt is left on the node."""

    host: str
    swept: int
    """Processes that the workers had left running."""
    stays: bool
    """Whether the agent waits for another plan."""
    time: float


class Damaged(NamedTuple):
    """End a stream that is damaged. The launcher's end of the stream makes this."""

    why: str


class Other(NamedTuple):
    """Hold an event of a kind that has no type."""

    content: Event


AgentEvent = (
    HelloAnswer
    | CheckUpAnswer
    | Listening
    | Reached
    | Swept
    | Pong
    | AgentStarted
    | Spawned
    | Output
    | FromScript
    | Exited
    | Packages
    | Notice
    | Failed
    | Signalled
    | Stopping
    | Done
    | Damaged
    | Other
)

ANSWERS = (HelloAnswer, CheckUpAnswer, Listening, Reached, Swept)
"""Events that answer a command before there is a plan."""
_WHOLE: Mapping[str, type[HelloAnswer] | type[CheckUpAnswer]] = {
    "hello": HelloAnswer,
    "checkup": CheckUpAnswer,
}
"""Events that are kept as they are: `Facts` and `Checkup` read them."""

AGENT_EVENT_TYPES: Mapping[str, type[Any]] = {
    "listening": Listening,
    "reached": Reached,
    "swept": Swept,
    "pong": Pong,
    "agent": AgentStarted,
    "spawn": Spawned,
    "script": FromScript,
    "exit": Exited,
    "packages": Packages,
    "notice": Notice,
    "error": Failed,
    "signalled": Signalled,
    "stopping": Stopping,
    "done": Done,
    "damaged": Damaged,
}

# -- worker events ----------------------------------------------------------------------------------
#
# What scripts and the runtime in them report. The controller adds rank and host.


class Raised(NamedTuple):
    """Report an uncaught exception."""

    rank: int
    host: str
    exception: object = ""
    traceback: object = ""
    talk: object = ""
    chose_devices: object = False


class Metrics(NamedTuple):
    """Report numbers of a step."""

    rank: int
    host: str
    values: object = None
    printed: object = True
    """Whether the console shows them as a line."""


class Saved(NamedTuple):
    """Report a checkpoint."""

    rank: int
    host: str
    tag: object = None
    folder: object = None
    step: object = None
    time: object = None


class SnapshotTaken(NamedTuple):
    """Report a checkpoint in memory."""

    rank: int
    host: str


class MadeEngine(NamedTuple):
    """Report that the script has made an engine."""

    rank: int
    host: str
    train_batch_size: object = None
    micro_batch_size: object = None


class StandsStill(NamedTuple):
    """Report where a rank waits for long, or that it goes on."""

    rank: int
    host: str
    what: object = None
    unfinished: object = None
    begun: object = None


NOTHING_SAVES = (
    "nothing saves on it. Set checkpoint.on_signal or use engine.should_stop; with the Hugging Face Trainer, "
    'add the callback of "Save at a time limit" in docs/guides/trainer.md'
)
"""Ends a message about a signal that asks to save, where the script does not act on it."""


class SaveAsked(NamedTuple):
    """Say whether anything acts on a signal that asks to save."""

    rank: int
    host: str
    acts: object = False


class Debugger(NamedTuple):
    """Say where a rank waits for a debugger, or that one has come."""

    rank: int
    host: str
    address: object = None
    port: object = None
    attached: object = False


class OnlyRecorded(NamedTuple):
    """Hold an event that the launcher only writes down: files or commands read it there."""

    rank: int
    host: str


WorkerEvent = (
    Raised | Metrics | Saved | SnapshotTaken | MadeEngine | StandsStill | SaveAsked | Debugger | OnlyRecorded
)

WORKER_EVENT_TYPES: Mapping[str, type[Any]] = {
    "exception": Raised,
    "metrics": Metrics,
    "checkpoint": Saved,
    "snapshot": SnapshotTaken,
    "environment": MadeEngine,
    "standing": StandsStill,
    "save_asked": SaveAsked,
    "debugger": Debugger,
    "error_file": OnlyRecorded,
    "result": OnlyRecorded,
}

# -- dicts ------------------------------------------------------------------------------------------


class MissingField(Exception):
    """Names what a message lacks, such as `reach without 'port'`."""


_M = TypeVar("_M")


def encode_command(command: Command) -> Event:
    """Return the dict of a command."""
    if isinstance(command, Start):
        return {**command.plan, "lease": command.lease}
    return {"cmd": _COMMAND_KINDS[type(command)], **_fields(command)}


def decode_command(message: Event) -> Command | None:
    """Return the command of a dict; None for an unknown one. Raises MissingField."""
    kind = message.get("cmd")
    if kind is None:
        return Start(
            {name: value for name, value in message.items() if name != "lease"}, message.get("lease")
        )
    found = COMMAND_TYPES.get(kind) if isinstance(kind, str) else None
    command: Command | None = None if found is None else read(found, kind, message)
    return command


def encode_event(event: AgentEvent) -> Event:
    """Return the dict of an agent's event."""
    if isinstance(event, (HelloAnswer, CheckUpAnswer, Other)):
        return event.content
    return {"type": _EVENT_KINDS[type(event)], **_fields(event)}


def decode_event(message: Event) -> AgentEvent:
    """Return the event of an agent's dict, whose type is text. Raises MissingField."""
    kind = message["type"]
    found = AGENT_EVENT_TYPES.get(kind)
    if found is None:
        return _WHOLE.get(kind, Other)(message)
    event: AgentEvent = read(found, kind, message)
    return event


def decode_worker_event(message: Event) -> WorkerEvent:
    """Return the event of a script's dict, to which rank and host have been added."""
    kind = message["type"]
    event: WorkerEvent = read(WORKER_EVENT_TYPES[kind], kind, message)
    return event


def read(message_type: type[_M], kind: str, message: Event) -> _M:
    """Return a message of a type with the fields of a dict. Raises MissingField."""
    fields: tuple[str, ...] = message_type._fields  # type: ignore[attr-defined]
    try:
        return message_type(**{name: message[name] for name in fields if name in message})
    except TypeError:
        required = fields[: len(fields) - len(message_type._field_defaults)]  # type: ignore[attr-defined]
        missing = next(name for name in required if name not in message)
        raise MissingField(f"{kind} without {missing!r}") from None


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message that do not have their default."""
    defaults = message._field_defaults
    named = zip(message._fields, message, strict=True)
    return {name: value for name, value in named if name not in defaults or value != defaults[name]}


_COMMAND_KINDS = {found: kind for kind, found in COMMAND_TYPES.items()}
_EVENT_KINDS = {found: kind for kind, found in AGENT_EVENT_TYPES.items()}
