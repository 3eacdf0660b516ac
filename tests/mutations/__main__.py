"""Run the tests nearest to each mutation on a mutated copy of the source, and list those that none notices.

    python -m tests.mutations [--only TEXT] [--jobs N] [--list]      # make mutate

Note [How a mutation is run]
The parent imports the third-party packages that tests use, which takes most of a test process's start, and
nothing of zlaunch or of the tests. Each job slot has a copy of the files that git would commit. For a
mutation, the changed text is written into a free copy, and the parent forks a keeper, which forks pytest
with the copy in front of every search path. The keeper adopts all orphans below it (a "child subreaper"),
so it can kill what the tests leave behind, detached or not, when pytest ends or exceeds its limit. Where
the parent is killed, the kernel ends the keepers, and these kill their trees.

The tests are run once without a mutation first. One that fails then proves nothing about the source.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest

import tests.mutations
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
PREIMPORTED = (
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "pydantic", "xdist", "hypothesis.strategies"),
    *("click", "rich.console", "rich.table", "paramiko", "psutil", "yaml", "safetensors", "cloudpickle"),
)
LIMIT_S = 300.0
"""Seconds for the tests of a mutation. One that exceeds them counts as noticed: it makes the tests hang."""
HUNG = 124
PROFILE = "mutations"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OK, _FAILED, _INTERRUPTED, _WRONG_USAGE = 0, 1, 2, 4
_NOT_IMPORTED = "found no collectors for"
"""Part of pytest's message, with exit code 4, for a single test in a file that cannot be imported."""


def mutations(only: str = "") -> list[Mutation]:
    """Return the mutations of every list of this package: those of the list called ``only``, or those with
    that text in their file or words.
    """
    lists: dict[str, Sequence[Mutation]] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(tests.mutations.__path__)):
        if name != "__main__":
            lists[name] = getattr(importlib.import_module(f"tests.mutations.{name}"), "MUTATIONS", ())
    if only in lists:
        return list(lists[only])
    return [m for own in lists.values() for m in own if only in m.file or only in m.breaks]


def room_of(mutation: Mutation) -> str:
    """Return the folder of the mutated file."""
    return str(Path(mutation.file).parent)


def mutated(mutation: Mutation, text: str) -> str:
    """Return the text of the file with the mutation in it.

    Raises:
        ValueError: The text to replace doesn't occur exactly once.
    """
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file}: the text to replace occurs {count} times: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def copy_source(folder: Path) -> None:
    """Copy the files that git has or would add, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    for name in listed.stdout.decode().split("\0"):
        if not name or name.endswith("/"):  # another repository inside of this one
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, and git does not know yet
            shutil.copy2(ROOT / name, target, follow_symlinks=False)


# -- in the keeper and below


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """Return the living processes below this one."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children[int(fields[1])].append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children[waiting.pop()]
        found += below
        waiting += below
    return found


def _kill_descendants() -> None:
    while below := _descendants():
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _kill_all(signum: int, frame: object) -> None:
    _kill_descendants()
    os._exit(128 + signum)


def _forget_examples() -> None:
    """Have hypothesis look for a failing example, not for the smallest, and keep none for the next run."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        PROFILE, deadline=None, phases=phases, database=None, derandomize=True, suppress_health_check=slow
    )


def _run_pytest(folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest in this process, with everything of ours imported from the folder."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    # multiprocessing's workers import the main module again: this one, from the wrong folder
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv[:] = ["pytest", *arguments]
    return int(pytest.main(list(arguments)))


def _keep(folder: Path, arguments: Sequence[str], limit_s: float, output: Path) -> int:
    """Run pytest in a child, kill what it leaves behind, and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    signal.signal(signal.SIGTERM, _kill_all)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if not child:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(os.devnull) as nothing, output.open("w") as written:
            os.dup2(nothing.fileno(), 0)
            os.dup2(written.fileno(), 1)
            os.dup2(written.fileno(), 2)
        code = 3  # pytest's own for what should not happen
        try:
            code = _run_pytest(folder, arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + limit_s
    code = HUNG
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    _kill_descendants()
    return code if code >= 0 else 128 - code


# -- in the parent


def _forget_compiled(path: Path) -> None:
    """Remove what numba keeps beside the source, and bytecode that a process with other settings wrote."""
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


@dataclass
class Slot:
    """A copy of the source, and what runs in it."""

    folder: Path
    output: Path
    keeper: int = 0
    mutation: Mutation | None = None
    original: bytes = b""
    started: float = 0.0

    def start(self, tests: Sequence[str], limit_s: float, mutation: Mutation | None = None) -> None:
        """Start the tests in the background, with the mutation written into the copy."""
        self.mutation, self.started = mutation, time.monotonic()
        if mutation:
            path = self.folder / mutation.file
            self.original = path.read_bytes()
            _forget_compiled(path)
            path.write_text(mutated(mutation, self.original.decode()))
        arguments = [
            "-q",
            "-m",
            "not exhaustive",
            "--no-rotation",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        arguments += ["--durations=0" if not mutation else "-x", f"--hypothesis-profile={PROFILE}", *tests]
        sys.stdout.flush()
        self.keeper = os.fork()
        if not self.keeper:
            os._exit(_keep(self.folder, arguments, limit_s, self.output))

    def end(self) -> None:
        """Restore the copy after the keeper has ended."""
        self.keeper = 0
        if self.mutation:
            path = self.folder / self.mutation.file
            path.write_bytes(self.original)
            _forget_compiled(path)

    def stop(self) -> None:
        if self.keeper:
            os.kill(self.keeper, signal.SIGTERM)
            os.waitpid(self.keeper, 0)
            self.end()


@dataclass
class Results:
    """What became of each mutation."""

    noticed: list[Mutation] = field(default_factory=list)
    survived: list[Mutation] = field(default_factory=list)
    broken: list[Mutation] = field(default_factory=list)

    def add(self, mutation: Mutation, code: int) -> str:
        """Count a mutation; return what became of it in a word or two."""
        if code == _OK:
            self.survived.append(mutation)
            return "SURVIVED"
        words = {_FAILED: "noticed", _INTERRUPTED: "noticed at import", HUNG: "noticed: hung"}
        if code > 128:  # a crash of the test process itself
            words[code] = f"noticed: died by signal {code - 128}"
        (self.noticed if code in words else self.broken).append(mutation)
        return words.get(code, f"BROKEN ENTRY: pytest exit code {code}")

    def print_score(self) -> None:
        noticed = Counter(map(room_of, self.noticed))
        total = noticed + Counter(map(room_of, self.survived))
        print()
        for room in sorted(total):
            print(f"{noticed[room]:4d} of {total[room]:3d} noticed  {room}")
        share = 100 * noticed.total() / max(1, total.total())
        print(f"{noticed.total():4d} of {total.total():3d} noticed, {share:.1f}%")
        for title, found in (("Survivors", self.survived), ("Broken entries", self.broken)):
            if found:
                print(f"\n{title}:")
            for mutation in found:
                print(f"  {mutation.file}: {mutation.breaks}\n    {' '.join(mutation.tests)}")


@contextlib.contextmanager
def _slots(count: int) -> Iterator[list[Slot]]:
    """Make the copies; afterwards stop what still runs and remove them."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        made = [Slot(Path(folder, str(number)), Path(folder, f"{number}.out")) for number in range(count)]
        for slot in made:
            copy_source(slot.folder)
        try:
            yield made
        finally:
            for slot in made:
                slot.stop()


def _wait(slots: list[Slot]) -> tuple[Slot, int]:
    """Wait for the next slot to end; return it with pytest's exit code."""
    pid, status = os.wait()
    slot = next(slot for slot in slots if slot.keeper == pid)
    slot.end()
    return slot, os.waitstatus_to_exitcode(status)


def check_unmutated(slots: list[Slot], found: list[Mutation], limit_s: float) -> bool:
    """Run the tests of all mutations on the source as it is; print what fails."""
    files: dict[str, set[str]] = defaultdict(set)
    for name in {test for mutation in found for test in mutation.tests}:
        files[name.partition("::")[0]].add(name)
    # where a whole file is named, its single tests are part of it
    names = [name for file in sorted(files) for name in ([file] if file in files[file] else files[file])]
    print(f"Running the tests of {len(found)} mutations without any: {len(files)} files", flush=True)
    working = [slot for number, slot in enumerate(slots) if names[number :: len(slots)]]
    for number, slot in enumerate(working):
        own = names[number :: len(slots)]
        slot.start(own, limit_s * len(own))
    passed = True
    for _ in working:
        slot, code = _wait(slots)
        if code != _OK:
            passed = False
            print(slot.output.read_text(), f"\npytest ended with {code}", sep="")
    return passed


def run_all(slots: list[Slot], found: list[Mutation], limit_s: float, results: Results, show: bool) -> None:
    """Run every mutation; print a line as each ends."""
    waiting = list(found)
    while waiting or any(slot.keeper for slot in slots):
        for slot in slots:
            if waiting and not slot.keeper:
                mutation = waiting.pop(0)
                slot.start(mutation.tests, limit_s, mutation)
        slot, code = _wait(slots)
        assert slot.mutation is not None
        if code == _WRONG_USAGE and _NOT_IMPORTED in slot.output.read_text(errors="replace"):
            code = _INTERRUPTED
        word = results.add(slot.mutation, code)
        seconds = time.monotonic() - slot.started
        print(f"{word:20} {seconds:6.1f} s  {slot.mutation.file}: {slot.mutation.breaks}", flush=True)
        if show or word.startswith("BROKEN"):
            print(slot.output.read_text(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="Run the list of this name, or what has it in file or words.",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Run this many at the same time.")
    parser.add_argument("--list", action="store_true", help="List the mutations and run nothing.")
    parser.add_argument("--show", action="store_true", help="Print pytest's output of every mutation.")
    parser.add_argument("--no-check", action="store_true", help="Don't run the unmutated tests first.")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for one mutation")
    options = parser.parse_args()
    slower = float(os.environ.get("ZLAUNCH_TEST_SLOWER") or 1)
    found = mutations(options.only)
    if options.list or not found:
        for mutation in found:
            print(f"{mutation.file}: {mutation.breaks}")
        print(f"{len(found)} mutations in {len({room_of(m) for m in found})} rooms")
        if not found:
            print(f"no list, file or description has {options.only!r}: --list shows all", file=sys.stderr)
        return 0 if found else 2
    for name in PREIMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _forget_examples()
    ours = [name for name in sys.modules if name.partition(".")[0] in ("zlaunch", "runtime", "cuda_ops")]
    assert not ours, ours
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Results()
    with _slots(max(1, options.jobs)) as slots:
        if not options.no_check and not check_unmutated(slots, found, options.limit * slower):
            print("Some tests fail without a mutation. Correct them first.")
            return 2
        run_all(slots, found, options.limit * slower, results, options.show)
    results.print_score()
    return 1 if results.survived or results.broken else 0


if __name__ == "__main__":
    sys.exit(main())
