"""List mutations of how workers' output and reports reach the launcher."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_EVENTS = ("tests/unit/system/test_events.py",)
_AGENT = ("tests/unit/node/test_agent.py",)
_CONTROLLER = ("tests/unit/supervisor/test_controller.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "zlaunch/system/events.py",
        'why = "" if data[end] == _NEWLINE else',
        'why = "" if data else',
        "bytes that are lost on the way make events of a rank's output",
        _EVENTS,
    ),
    Mutation(
        "zlaunch/system/events.py",
        'is no event" if self._has_output else ""',
        'is no event" if False else ""',
        "words between an agent's events are passed over after output has come",
        _EVENTS,
    ),
    Mutation(
        "zlaunch/system/events.py",
        '"event": _tame(event, _LEVELS)}',
        '"event": event}',
        "half a character in a script's report ends the run",
        _CONTROLLER,
    ),
    Mutation(
        "zlaunch/system/events.py",
        "        return value if -_HUGE < value < _HUGE else math.inf if value > 0 else -math.inf\n",
        "        return value\n",
        "an integer with 400 digits in a script's report ends the run",
        _CONTROLLER,
    ),
    Mutation(
        "zlaunch/node/agent.py",
        "self.outbox.put(in_envelope(worker.plan.rank, event))",
        'self.outbox.put({**event, "rank": worker.plan.rank})',
        "a script's report is taken for the agent's words",
        _AGENT,
    ),
    Mutation(
        "zlaunch/node/agent.py",
        "            if worker.event_fd not in worker.finished_fds:\n",
        "            if False:\n",
        "reports fill the agent's memory while the launcher takes nothing",
        _AGENT,
    ),
    Mutation(
        "zlaunch/supervisor/controller.py",
        "event.rank not in own:",
        "event.rank not in self.hosts:",
        "a node may send output of another node's ranks",
        _CONTROLLER,
    ),
    Mutation(
        "zlaunch/system/messages.py",
        "name not in defaults or value != defaults[name]",
        "name not in defaults",
        "commands lose the fields that may be left out, such as a lease",
        ("tests/unit/system/test_messages.py",),
    ),
    Mutation(
        "zlaunch/supervisor/nodes.py",
        "decoded = Damaged(str(error))",
        "continue",
        "an agent's event without a field is passed over",
        _CONTROLLER,
    ),
    Mutation(
        "zlaunch/supervisor/run_files.py",
        "        if log.is_cut:",
        "        if False:",
        "the first line of an attempt sticks to the last line of a killed one",
        ("tests/unit/supervisor/test_rank_logs.py",),
    ),
    Mutation(
        "zlaunch/supervisor/run_files.py",
        "                rest = rest[written:]\n",
        "                break\n",
        "a disk that takes a part of a rank's output is not noticed",
        ("tests/unit/supervisor/test_rank_logs.py",),
    ),
    Mutation(
        "zlaunch/view/console.py",
        "cut = len(rest) - unfinished_bytes(rest)",
        "cut = len(rest)",
        "a long line of one of several ranks is cut within a character",
        ("tests/unit/view/test_console.py",),
    ),
    Mutation(
        "zlaunch/node/pacing.py",
        "self._rounds > _ROUNDS and ",
        "",
        "each line of a script waits at the agent",
        ("tests/unit/node/test_pacing.py",),
    ),
    Mutation(
        "zlaunch/node/long_traceback.py",
        "    frames[_FRAMES - 1].tb_next = frames[-_FRAMES]\n",
        "",
        "a traceback of a million frames is formatted whole",
        ("tests/unit/node/test_long_traceback.py",),
    ),
)
