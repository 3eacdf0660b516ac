"""Write down what happens in a run: its events and its ranks' output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from zlaunch.plan.plan import Plan
from zlaunch.runtime.trust import Folder, make_folder
from zlaunch.supervisor.rank_logs import RankLogs, log_path
from zlaunch.system.events import Event, encode


class RunFiles:
    """Writes the plan, the events and the logs of an attempt. A full disk does not end the training: it is
    said once for each file that it is incomplete.

    The folder stays open: see Note [Trust by owner] in runtime/trust.py.
    """

    def __init__(
        self,
        run_dir: Path,
        hosts: Mapping[int, str],
        say: Callable[[str], None],
        *,
        goes_on: bool,
        log_bytes: int | None,
    ) -> None:
        """Open the files; `goes_on`: behind what an earlier attempt has written. `hosts` are those of the
        ranks, `log_bytes` the size of a rank's log. Raises OSError.
        """
        self._run_dir, self._say = run_dir, say
        self._unwritten: set[Path] = set()
        make_folder(run_dir)  # it may have been removed since
        with ExitStack() as stack:
            self._folder = stack.enter_context(Folder(run_dir))
            inside = self._folder.path
            (inside / "logs").mkdir(exist_ok=True)
            self._logs = RankLogs(inside, hosts, goes_on=goes_on, limit=log_bytes)
            stack.callback(self._logs.close)
            self._events = (inside / "events.jsonl").open("ab" if goes_on else "wb", buffering=0)
            stack.callback(self._events.close)
            self._open = stack.pop_all()

    def plan(self, plan: Plan) -> None:
        """Write the attempt's plan. Raises OSError."""
        plan.write(self._folder.path / "plan.json")

    def event(self, event: Event) -> None:
        """Write an event with its time; what torch's `@record` has written elsewhere is a file of its own."""
        if event["type"] == "error_file":
            self._error_file(event)
            return
        try:
            self._events.write(encode({**event, "time": event.get("time", time.time())}))
        except OSError as error:
            self._not_written(self._run_dir / "events.jsonl", error)

    def _error_file(self, event: Event) -> None:
        name = f"logs/error_{event['rank']:05d}.json"
        try:
            (self._folder.path / name).write_text(str(event.get("text")))
        except OSError as error:
            self._not_written(self._run_dir / name, error)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Write what a rank has written."""
        try:
            self._logs.write(rank, stream, data, time.time())
        except OSError as error:
            self._not_written(log_path(self._run_dir, rank), error)

    def _not_written(self, path: Path, error: OSError) -> None:
        if path not in self._unwritten:
            self._unwritten.add(path)
            self._say(f"cannot write {path}: {error.strerror}; the run goes on, the file has gaps")

    def close(self) -> None:
        """Close the files."""
        self._open.close()
