"""Test how the commands of the documentation are found, run and compared: tests/docs_commands.py."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import docs_commands
from tests.docs_commands import (
    Command,
    File,
    Page,
    PageError,
    Result,
    parse_page,
    read_page,
    shape,
    split,
    unlike,
)
from tests.limits import LIMIT_S


def page_of(text: str, *, strict: bool = True) -> Page:
    """The page of an indented text."""
    return parse_page("page.md", textwrap.dedent(text), strict=strict)


DOCUMENTS = docs_commands.documents()


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(p.relative_to(docs_commands.ROOT)) for p in DOCUMENTS])
def test_every_page_keeps_the_rules(path: Path) -> None:
    read_page(path)


def test_commands_files_and_places_are_found() -> None:
    page = page_of(
        """
        # Title

        ```python title="conf/train.py"
        print(1)
            # indented
        ```

        1. A list:

           ```console
           $ zlaunch train.py
           hello
           ...

           end
           $ true
           ```

        <!-- run: cluster, fails -->

        ```console
        $ zlaunch --hostfile hosts \\
              train.py
        ```

        <!-- run: never, it installs packages -->
        ```console
        $ cat > a <<'END'
        > $ text
        END
        printed
        ```
        """
    )
    assert page.steps == (
        File(4, "conf/train.py", "print(1)\n    # indented\n"),
        Command(12, "zlaunch train.py", ("hello", "...", "", "end"), "here", False),
        Command(17, "true", (), "here", False),
        Command(23, "zlaunch --hostfile hosts \\\n      train.py", (), "cluster", True),
        Command(29, "cat > a <<'END'\n$ text\nEND", ("printed",), "never", False),
    )
    assert page.runs("cluster") and page.runs("slurm", "here") and not page.runs("gpu")
    assert page.beginning("here").steps == page.steps[:2]
    assert page.beginning("cluster", "gpu").steps == page.steps[:4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "```bash\nzlaunch train.py\n```",
            r"page.md:2: `zlaunch train.py` stands outside of a console block",
        ),
        ("```\n$ zlaunch train.py\n```", "outside of a console block"),
        ("```bash\nCUDA_VISIBLE_DEVICES=0 zlaunch train.py\n```", "outside of a console block"),
        ("text\n\n    zlaunch watch last\n", "page.md:3: .*outside of a console block"),
        ("<!-- run: never -->\n```console\n$ a\n```", "page.md:2: `run: never` needs a reason"),
        ("<!-- run: nowhere -->\n```console\n$ a\n```", "`run: nowhere` is none of here, cluster"),
        (
            "<!-- run: gpu, soon -->\n```console\n$ a\n```",
            "`soon` after `run: gpu`; only `fails` and `any order`",
        ),
        ("<!-- run: gpu -->\n```python\na = 1\n```", "above a block that is not console"),
        ("<!-- run: gpu -->\ntext\n```console\n$ a\n```", "page.md:1: .*right above a console block"),
        ("<!-- run: gpu -->\n", "right above a console block"),
        ("```console\noutput\n```", "page.md:2: a console block begins with"),
        ("```console\n```", "a console block without a command"),
        ("```console\n$ a\n", "page.md:1: the block does not end"),
        ('```python title="../train.py"\n```', "no path inside of the page's folder"),
        ('```python title="/tmp/train.py"\n```', "no path inside of the page's folder"),
    ],
)
def test_a_page_that_breaks_a_rule_is_named(text: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        parse_page("page.md", text)


def test_the_reference_may_show_command_lines() -> None:
    assert page_of("    zlaunch train.py\n", strict=False).steps == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss 5.12  step 10/150", "loss -4.9e-3 step 150/150"),
        ("run 20261127-081513-a1b2c3", "run 20270101-000000-000000"),
        ("zlaunch attach a1b2c3", "zlaunch attach 123456"),
        ("in /tmp/x/page/runs", "in /home/me/runs"),
        ("1 worker after 350 ms", "2 workers after 1m 2.5 s"),
        ("elapsed 0:00:04", "elapsed 12:01"),
        ("memory 3.4 GiB", "memory 512 MB"),
        ("1,234 tokens/s", "98.5 tokens/s"),
        ("\x1b[1mstep\x1b[0m  1", "step 2"),
        ("bar 1\rbar 2\rdone", "done"),
        ("step,loss\r", "step,loss"),
        ("loss 0.001234 of 123456.5", "loss 0.1 of 1"),
        ("// a comment 1", "// a comment 2"),
        ("zlaunch 0.2.0 on 10.79.0.11", "zlaunch 1.10.2 on 127.0.0.1"),
        ("▁▂▃█ 1", "▅ 2"),
        ("pid 12 on port 29500", "pid 31337 on port 1024"),
    ],
)
def test_lines_of_one_shape(one: str, other: str) -> None:
    assert shape(one) == shape(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss 5.12", "loss five"),
        ("ds_stage2.json", "ds_stage3.json"),
        ("rank0: ready", "rank1: ready"),
        ("checkpoint global_step20", "checkpoint global_step5"),
        ("out/a.txt", "out/b.txt"),
        ("1 // a comment", "1 /tmp/x a comment"),
        ("memory 3 GiB", "memory 3 s"),
    ],
)
def test_lines_of_different_shapes(one: str, other: str) -> None:
    assert shape(one) != shape(other)


@pytest.mark.parametrize(
    ("shown", "printed", "problem"),
    [
        (["a 1", "b"], ["a 2", "", "b"], None),
        ([], [], None),
        (["..."], [], None),
        (["...", "b", "...", "d"], ["a", "b", "b", "c", "d"], None),
        (["a", "..."], ["a", "x", "y"], None),
        (["a"], ["a", "x"], "the end, but 'x' is printed"),
        ([], ["x"], "the end, but 'x' is printed"),
        (["a", "b"], ["a"], "'b' is not printed"),
        (["a", "b"], ["a", "c"], "'b', but 'c' is printed"),
        (["...", "b"], ["a", "b", "c"], "the end, but 'c' is printed"),
        (["...", "c"], ["a", "b"], "'c', but 'a' is printed"),
        (["a", "zlaunch: the disk bounds the step: 3 ms"], ["zlaunch: waiting for torch (5 s)", "a"], None),
        (["a"], ["a", "salloc: Job allocation 2 has been revoked."], None),
    ],
)
def test_outputs_are_compared(shown: list[str], printed: list[str], problem: str | None) -> None:
    assert unlike(shown, printed) == problem


@pytest.mark.parametrize(
    ("shown", "printed", "problem"),
    [
        (["a", "b 1"], ["b 2", "a"], None),
        (["a", "...", "b"], ["x", "b", "a"], None),
        (["a", "a"], ["a", "b"], "'a' is not printed"),
        (["a"], ["b", "a"], "nothing like 'b', which is printed"),
    ],
)
def test_outputs_of_processes_that_print_at_once(
    shown: list[str], printed: list[str], problem: str | None
) -> None:
    assert unlike(shown, printed, any_order=True) == problem


def test_flags_of_a_block_are_found() -> None:
    page = page_of("<!-- run: slurm, any order, fails -->\n```console\n$ srun a\n$ srun b\n```\n")
    found = [(each.place, each.fails, each.any_order) for each in page.commands]
    assert found == [("slurm", False, True), ("slurm", True, True)]


def test_the_name_of_the_machine_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here.lan")
    assert unlike(["on node1: 3 workers"], ["on here.lan: 2 workers"]) is None
    assert unlike(["on node1: ready"], ["on elsewhere: ready"]) is not None


def test_the_commands_of_a_line_are_told_apart() -> None:
    line = "A=1 zlaunch train.py 2>&1 | head -n 3 > out && (zlaunch watch 'last one' &) # text"
    assert split(line) == [["zlaunch", "train.py"], ["head", "-n", "3"], ["zlaunch", "watch", "last one"]]
    assert split("zlaunch estimate m.py:build --input 8,3") == [
        ["zlaunch", "estimate", "m.py:build", "--input", "8,3"]
    ]
    assert split("zlaunch \\\n  train.py") == [["zlaunch", "train.py"]]
    assert split("cat > a <<END\nzlaunch\nEND") == [["cat"]]


def run(page: Page, folder: Path, *places: str, limit_s: float = LIMIT_S) -> list[Result]:
    """What the commands of a page did."""
    env = docs_commands.environment(folder / "home")
    return docs_commands.run_page(page, folder / "page", places or ("here",), env, limit_s)


def test_a_page_is_one_shell_from_top_to_bottom(tmp_path: Path) -> None:
    page = page_of(
        """
        ```python title="sub/a.py"
        print("first")
        ```
        ```console
        $ cd sub; export WORD=kept
        $ python a.py; echo $WORD >&2
        first
        kept
        ```
        ```python title="sub/a.py"
        print("second")
        ```
        <!-- run: cluster -->
        ```console
        $ echo elsewhere
        ```
        ```console
        $ python a.py && echo $HOME | grep -o /home && ls ../examples/gpt.py
        second
        /home
        ../examples/gpt.py
        ```
        """
    )
    results = run(page, tmp_path)
    assert [result.command.line for result in results] == [6, 7, 19]
    assert docs_commands.complaints(page, results) == []


def test_what_is_not_as_the_page_says_is_shown(tmp_path: Path) -> None:
    page = page_of(
        """
        ```console
        $ echo one
        two
        $ false
        ```
        <!-- run: here, fails -->
        ```console
        $ echo wrong; false
        wrong
        ```
        <!-- run: here, fails -->
        ```console
        $ true
        ```
        ```console
        $ exit 3
        $ echo never
        ```
        """
    )
    first, second, third, *shell = docs_commands.complaints(page, run(page, tmp_path))
    assert first == (
        "page.md:3: $ echo one\nthe page shows 'two', but 'one' is printed\n"
        "  expected:\n    two\n  got:\n    one"
    )
    assert second.startswith("page.md:5: $ false\nexits with 1; if that is what the page is about, write")
    assert third.startswith("page.md:14: $ true\nexits with 0; the block is marked with `fails`")
    assert len(shell) == 2 and all("the shell ended before" in each for each in shell)


def test_a_page_that_does_not_end_is_ended(tmp_path: Path) -> None:
    page = page_of("```console\n$ echo begun; sleep 600\nbegun\n```\n")
    [result] = run(page, tmp_path, limit_s=0.5)
    assert result.printed == ("begun",) and result.problem() == "the shell ended before this command did"
