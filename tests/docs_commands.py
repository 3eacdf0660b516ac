"""Run the commands that README.md and docs show, and compare what they print with what the pages say.

Note [What a page says]
A block fenced as ``console`` holds commands behind ``$ `` and their output; a line ``...`` stands for any
lines. A command continues below a backslash or up to the end of its here-document. A block with a title, as
in ``python title="train.py"``, is a file. An HTML comment above a console block says where it runs and how
it ends:

    <!-- run: cluster -->        on three hosts reached over ssh, which the file ``hosts`` lists
    <!-- run: slurm -->          where SLURM's commands find three nodes
    <!-- run: gpu -->            on a machine with a GPU
    <!-- run: never, REASON -->  nowhere

Behind a place, ``fails`` says that the last command exits with another code than 0, and ``any order`` that
several processes print at once, or one to stdout and stderr: <!-- run: slurm, any order, fails -->. Without a
comment a block runs on CPU workers of this machine, and each command has to exit with 0.

The steps of a page share a folder and a shell, and run from top to bottom as a reader would run them; a block
of another place is left out. Outputs are compared in shape: `_STEPS` lists what may differ, `_PASSING` what
may come and go.

    python -m tests.docs_commands docs/guides/trainer.md   # run these pages, or all, as far as they run here
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.leftovers import ended_afterwards
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("here", "cluster", "slurm", "gpu", "never")
GENERATED = ("docs/config.md", "docs/numerics.md", "docs/status.md")
"""Pages that a program writes; they show no commands to run."""
REFERENCE = ("docs/cli.md",)
"""Pages that may show command lines without running them."""
ANY = "..."

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>.*)$")
_COMMENT = re.compile(r"^\s*<!--\s*run:\s*(?P<rule>.*?)\s*-->\s*$")
_TITLE = re.compile(r"\btitle=\"(?P<name>[^\"]*)\"")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<word>\w+)\1")
_VARIABLE = re.compile(r"\w+=")
_COMMAND = re.compile(r"^\s*(?:[A-Z_]+=\S* +)*zlaunch +\S")


class PageError(Exception):
    """A page breaks a rule of Note [What a page says]; the message names the page and the line."""


@dataclass(frozen=True)
class File:
    """A file that a page shows with its name."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a page, the lines that it prints there, and where it runs."""

    line: int
    text: str
    output: tuple[str, ...]
    place: str
    fails: bool
    any_order: bool = False


@dataclass(frozen=True)
class Page:
    """Hold the files and commands of a page, from top to bottom."""

    name: str
    steps: tuple[File | Command, ...]

    @property
    def commands(self) -> list[Command]:
        """All commands, also those that run nowhere."""
        return [step for step in self.steps if isinstance(step, Command)]

    def runs(self, *places: str) -> bool:
        """Return whether a command of the page runs in one of the places."""
        return any(command.place in places for command in self.commands)

    def beginning(self, *places: str) -> Page:
        """Return the page up to the first command that runs in one of the places."""
        first = next(command for command in self.commands if command.place in places)
        return replace(self, steps=self.steps[: self.steps.index(first) + 1])


@dataclass(frozen=True)
class _Fence:
    line: int
    info: str
    lines: tuple[str, ...]
    rule: str | None
    """The text of the comment above the block: where it runs."""


def documents() -> list[Path]:
    """Return README.md and the pages of docs that people write."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if _name(page) not in GENERATED and page.parent.name != "decisions"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def read_page(path: Path) -> Page:
    """Return what a page asks its reader to do.

    Raises:
        PageError: where the page breaks a rule, or shows commands of zlaunch that nothing would run.
    """
    name = _name(path)
    return parse_page(name, path.read_text(), strict=name not in REFERENCE)


def pages_for(kind: str) -> list[Any]:
    """Return the pages, as pytest's parameters, that a test of this kind runs: here, cluster or gpu.

    A page is run as a whole in one place, since its commands build on each other: on the cluster where any of
    them needs one, else here. Those for a GPU are run again there. A page that breaks a rule is in no list:
    tests/unit/project/test_docs_commands.py names it.
    """
    found = []
    for path in documents():
        try:
            page = read_page(path)
        except PageError:
            continue
        on_cluster = page.runs("cluster", "slurm")
        wanted = {
            "here": page.runs("here") and not on_cluster,
            "cluster": on_cluster,
            "gpu": page.runs("gpu"),
        }
        if wanted[kind]:
            found.append(pytest.param(path, id=page.name))
    return found


def command_lines() -> list[tuple[str, list[str]]]:
    """Return the words of every `zlaunch` command in console blocks that is to succeed, with its place.

    These include what no test runs: the options of a command for a cluster that is not here can be checked.
    """
    found = []
    for path in documents():
        try:
            page = read_page(path)
        except PageError:
            continue  # as in pages_for
        for command in page.commands:
            if not command.fails:
                place = f"{page.name}:{command.line}"
                found += [(place, words) for words in split(command.text) if words[0] == "zlaunch"]
    return found


def split(text: str) -> list[list[str]]:
    """Return the words of each simple command in a line of shell, without variables set and redirections.

    >>> split("A=1 zlaunch train.py 2>&1 | head -n 3 > out && zlaunch watch 'last one' &  # text")
    [['zlaunch', 'train.py'], ['head', '-n', '3'], ['zlaunch', 'watch', 'last one']]
    """
    if _HEREDOC.search(text):
        text = text.partition("\n")[0]
    text = re.sub(r"(?<=\s)\d+(?=[<>])", "", text.replace("\\\n", " "))  # the 2 of `2>&1`
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    target = False  # the word behind a redirection
    for word in lexer:
        if word and set(word) <= set("<>&") and set(word) & set("<>"):
            target = True
        elif word and set(word) <= set(";&|()"):
            found.append([])
        elif target:
            target = False
        elif found[-1] or not _VARIABLE.match(word):
            found[-1].append(word)
    return [words for words in found if words]


def parse_page(name: str, text: str, *, strict: bool = True) -> Page:
    """Return what a page of this text asks its reader to do; `strict` refuses commands that no test runs."""
    steps: list[File | Command] = []
    fenced: set[int] = set()
    for fence in _fences(name, text):
        fenced.update(range(fence.line, fence.line + len(fence.lines) + 2))
        language = (fence.info.split() or [""])[0]
        title = _TITLE.search(fence.info)
        if language == "console":
            steps += _commands(name, fence)
            continue
        if fence.rule is not None:
            raise PageError(f"{name}:{fence.line}: a comment `run:` stands above a block that is not console")
        if title is not None and language != "diff":
            steps.append(File(fence.line, _inside(name, fence.line, title["name"]), _text(fence.lines)))
        elif strict:
            _refuse_commands(name, fence.line + 1, fence.lines)
    if strict:
        for number, line in enumerate(text.splitlines(), 1):
            if number not in fenced and line.startswith("    "):
                _refuse_commands(name, number, [line])
    return Page(name, tuple(steps))


def _fences(name: str, text: str) -> Iterator[_Fence]:
    rule: str | None = None
    rule_line = 0
    opened: re.Match[str] | None = None
    start = 0
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if fence and fence["marks"].startswith(opened["marks"]) and not fence["info"].strip():
                yield _Fence(start, opened["info"].strip(), tuple(inside), rule)
                opened, rule = None, None
            else:
                inside.append(line.removeprefix(opened["indent"]))
        elif fence is not None:
            opened = fence
            start = number
            inside = []
        elif comment := _COMMENT.match(line):
            rule, rule_line = comment["rule"], number
        elif rule is not None and line.strip():
            break
    if opened is not None:
        raise PageError(f"{name}:{start}: the block does not end")
    if rule is not None:
        raise PageError(f"{name}:{rule_line}: a comment `run:` stands right above a console block")


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _inside(name: str, line: int, file: str) -> str:
    if not file or os.path.isabs(file) or ".." in Path(file).parts:
        raise PageError(f"{name}:{line}: {file!r} is no path inside of the page's folder")
    return file


def _refuse_commands(name: str, first: int, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines, first):
        if _COMMAND.match(line.strip().removeprefix("$ ")):
            raise PageError(
                f"{name}:{number}: `{line.strip()}` stands outside of a console block, where no test runs "
                "it. Fence it as ```console, with `$ ` before the command"
            )


_FLAGS = {"fails", "any order"}


def _rule(name: str, fence: _Fence) -> tuple[str, set[str]]:
    """Return where a console block runs, and which of `_FLAGS` it has."""
    if fence.rule is None:
        return "here", set()
    words = fence.rule.split(",", 1)
    place = words[0].strip()
    rest = words[1].strip() if len(words) > 1 else ""
    if place not in PLACES:
        raise PageError(f"{name}:{fence.line}: `run: {place}` is none of {', '.join(PLACES)}")
    if place == "never":
        if not rest:
            raise PageError(f"{name}:{fence.line}: `run: never` needs a reason: <!-- run: never, REASON -->")
        return place, set()
    flags = {flag.strip() for flag in rest.split(",") if flag.strip()}
    if unknown := flags - _FLAGS:
        raise PageError(
            f"{name}:{fence.line}: `{unknown.pop()}` after `run: {place}`; only `fails` and `any order` may "
            "stand there"
        )
    return place, flags


def _commands(name: str, fence: _Fence) -> list[Command]:
    place, flags = _rule(name, fence)
    found: list[Command] = []
    number = 0
    while number < len(fence.lines):
        start = number
        line = fence.lines[number]
        number += 1
        if not line.startswith("$ "):
            if not found and line.strip():
                raise PageError(f"{name}:{fence.line + 1}: a console block begins with `$ ` and a command")
            if found:
                found[-1] = replace(found[-1], output=(*found[-1].output, line))
            continue
        text = [line.removeprefix("$ ")]
        here = _HEREDOC.search(text[0])
        while number < len(fence.lines) and (
            text[-1] != here["word"] if here is not None else text[-1].endswith("\\")
        ):
            text.append(fence.lines[number].removeprefix("> "))
            number += 1
        found.append(Command(fence.line + 1 + start, "\n".join(text), (), place, False, "any order" in flags))
    if not found:
        raise PageError(f"{name}:{fence.line}: a console block without a command")
    found[-1] = replace(found[-1], fails="fails" in flags)
    return found


# -- shapes

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        (r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07", ""),
        (r"\r+$", ""),
        (r"^.*\r", ""),
        (r"\s+", " "),
        (r"\b\d{8}-\d{6}-[0-9a-f]{6}\b", "RUN"),
        (r"\b0x[0-9a-f]+\b", "N"),
        (r"(?<![\w.])(?:[0-9a-f]{6}|(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40})\b(?!\.\d)", "N"),
        (r"(?<![\w./~-])~?/(?:[\w.@+-]+/)*[\w.@+-]+/?", "PATH"),
        (r"[\u2581-\u2593\u2800-\u28ff]+", "BAR"),
        (r"[\u2500-\u2501\u2550=-]{3,}", "---"),
        (r"\b\d+(?:\.\d+){2,}\b", "N"),
        (r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\d])|\b(?:nan|inf)\b", "N"),
        (r"N(?::N)+|(?:\bN ?(?:ns|us|µs|ms|s|sec|min|m|h|d)\b ?)+(?![/\w])", "TIME "),
        (r"\bN ?(?:[KMGTkmgt]i?)?B\b", "SIZE"),
        (r"\bN(?: ?[KMBkmb])?\b", "N"),
        (r"\b(N(?: \w+)? \w{2,}?)(?<!s)s\b", r"\1"),
    )
)


def shape(line: str) -> str:
    """Return a line without what differs between two runs: numbers, times, sizes, run names, paths, widths.

    >>> shape("zlaunch: run 20261127-081513-a1b2c3 in /tmp/x: 2 workers after 1m 4.5 s")
    'zlaunch: run RUN in PATH: N worker after TIME'
    >>> shape("step 10  loss 5.12 | 3.4 GiB") == shape("step 20 loss 4.99e-1 | 512 MB")
    True
    """
    for pattern, put in _STEPS:
        line = pattern.sub(put, line)
    return " ".join(line.split())


_PASSING = re.compile(
    r"^zlaunch: waiting for "
    r"|\bbounds the step\b"
    r"|\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|^salloc: Job allocation N has? been revoked"
    r"|^zlaunch: job N is pending: "
    r"|^zlaunch: warning: .*SLURM gave N GPU"
)
"""Lines that depend on the machine: what took longest in a step, a missing DNS, what a busy machine or SLURM
waits for, and salloc's word of the end, where the controller's arrives before salloc leaves."""


def shapes(lines: Sequence[str]) -> list[str]:
    """Return the shapes of the lines, without empty ones and those that a busy machine adds or changes."""
    return [found for line in lines if (found := shape(line)) and not _PASSING.search(found)]


def _same(shown: str, got: str) -> bool:
    """Whether two shapes agree; the name of this machine stands for that of the page's."""
    if shown == got:
        return True
    host = socket.gethostname()
    if not host or host not in got:
        return False
    return re.fullmatch(re.escape(got).replace(re.escape(host), r"[\w.-]+"), shown) is not None


def unlike(shown: Sequence[str], printed: Sequence[str], *, any_order: bool = False) -> str | None:
    """Return the first shown line that the output does not have there, or None where all of them agree."""
    expected, got = shapes(shown), shapes(printed)
    if any_order:
        return _unlike_in_any_order(expected, got)
    # reached[i]: up to which printed lines the first shown lines can reach
    reached = {0}
    for line in expected:
        if line == ANY:
            reached = set(range(min(reached), len(got) + 1))
            continue
        after = {at + 1 for at in reached if at < len(got) and _same(line, got[at])}
        if not after:
            at = min(reached)
            return f"{line!r}, but {got[at]!r} is printed" if at < len(got) else f"{line!r} is not printed"
        reached = after
    if len(got) in reached:
        return None
    return f"the end, but {got[max(reached)]!r} is printed"


def _unlike_in_any_order(expected: list[str], got: list[str]) -> str | None:
    rest = list(got)
    for line in expected:
        if line != ANY:
            found = next((each for each in rest if _same(line, each)), None)
            if found is None:
                return f"{line!r} is not printed"
            rest.remove(found)
    return f"nothing like {rest[0]!r}, which is printed" if rest and ANY not in expected else None


# -- running


@dataclass(frozen=True)
class Result:
    """What a command did; `code` is None where the shell ended before."""

    command: Command
    code: int | None
    printed: tuple[str, ...]

    def problem(self) -> str | None:
        """Return why the command does not do what its page says, or None."""
        if self.code is None:
            return "the shell ended before this command did"
        if (self.code != 0) != self.command.fails:
            return f"exits with {self.code}; {_ADVICE[self.command.fails]}"
        found = unlike(self.command.output, self.printed, any_order=self.command.any_order)
        return f"the page shows {found}" if found else None


_ADVICE = {
    False: "if that is what the page is about, write `<!-- run: PLACE, fails -->` above the block",
    True: "the block is marked with `fails`",
}


def environment(home: Path, more: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of a reader whose shell finds `zlaunch` and `python`, with a home of its own.

    Programs in `home`/bin come first.
    """
    home.mkdir(parents=True, exist_ok=True)
    programs = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "XDG_"))}
    return {
        **kept,
        "PATH": f"{home}/bin:{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def run_page(
    page: Page, folder: Path, places: Sequence[str], env: Mapping[str, str], limit_s: float = LIMIT_S
) -> list[Result]:
    """Run the commands of a page that belong to these places, in one shell, and return what each did.

    Args:
        folder: a new folder, in which the page's files and the repository's examples are put.
        env: as `environment` makes it.
        limit_s: for the whole page; what is running then is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored, dirs_exist_ok=True)
    outputs = folder.with_name(f"{folder.name}.outputs")
    outputs.mkdir()
    chosen: list[Command] = []
    lines: list[str] = []
    for step in page.steps:
        if isinstance(step, File):
            text = outputs / f"file{len(lines)}"
            text.write_text(step.text)
            target = folder / step.name
            lines += [f"mkdir -p '{target.parent}'", f"cp '{text}' '{target}'"]
        elif step.place in places:
            number = len(chosen)
            chosen.append(step)
            lines.append(f"{{\n{step.text}\n}} >'{outputs}/{number}' 2>&1 </dev/null")
            lines.append(f"echo $? >'{outputs}/{number}.code'")
    script = outputs / "script"
    script.write_text(_text(lines))
    with open(outputs / "shell", "wb") as shell:
        process = subprocess.Popen(
            ["bash", "--norc", str(script)],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=shell,
            stderr=shell,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = [_result(outputs, number, command) for number, command in enumerate(chosen)]
    said = (outputs / "shell").read_text(errors="replace")
    if said and results:  # bash itself complains there, about a quote that does not end
        results[-1] = replace(results[-1], printed=(*results[-1].printed, *said.splitlines()))
    return results


def _result(outputs: Path, number: int, command: Command) -> Result:
    printed = outputs / str(number)
    code = outputs / f"{number}.code"
    # not splitlines(): a progress bar goes back to the beginning of its line with "\r"
    text = printed.read_bytes().decode(errors="replace") if printed.exists() else ""
    lines = tuple(text.removesuffix("\n").split("\n")) if text else ()
    return Result(command, int(code.read_text()) if code.exists() else None, lines)


def complaints(page: Page, results: Sequence[Result]) -> list[str]:
    """Return a message for each command that does not do what the page says: its place, both outputs."""
    found = []
    for result in results:
        if problem := result.problem():
            shown = "\n".join(f"    {line}" for line in result.command.output) or "    (nothing)"
            printed = "\n".join(f"    {line}" for line in result.printed) or "    (nothing)"
            found.append(
                f"{page.name}:{result.command.line}: $ {result.command.text}\n{problem}\n"
                f"  expected:\n{shown}\n  got:\n{printed}"
            )
    return found


def check_page(page: Page, folder: Path, places: Sequence[str], more: Mapping[str, str] = {}) -> None:
    """Run a page in `folder`; raise an AssertionError that shows each command that does something else."""
    home = folder / "home"
    results = run_page(page, folder / "page", places, environment(home, more))
    found = complaints(page, results)
    assert not found, "\n\n".join(["", *found])


def main(names: Sequence[str]) -> int:
    """Run the commands of these pages that need no cluster and no GPU; return how many pages fail."""
    failed = 0
    for path in [Path(name).resolve() for name in names] or documents():
        with tempfile.TemporaryDirectory() as folder, ended_afterwards():
            try:
                page = read_page(path)
                check_page(page, Path(folder), ("here",), {"CUDA_VISIBLE_DEVICES": ""})
            except (PageError, AssertionError, FileNotFoundError) as error:
                failed += 1
                print(f"FAILED {error}\n", flush=True)
            else:
                ran = sum(command.place == "here" for command in page.commands)
                print(f"ok {page.name}: {ran} of {len(page.commands)} commands run", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
