"""Test which trials a sweep's file means, and what it is told where it means none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.sweep.space import EarlyStopping, read_space


def write(folder: Path, text: str, name: str = "grid.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "parameters:\n  a.b: [1e-4, 2]\n  --flag: [true, no one]\n  --one: x\nmetric: acc\ngoal: max\n"
        "early_stopping: {min_steps: 5}\n",
    )
    space = read_space(path)
    assert [tuple(trial.values()) for trial in space.trials] == [
        (1e-4, True, "x"),
        (1e-4, "no one", "x"),
        (2, True, "x"),
        (2, "no one", "x"),
    ]
    assert (space.metric, space.goal, space.early_stopping) == ("acc", "max", EarlyStopping(5, 3))


def test_random_samples_are_the_same_for_a_seed(tmp_path: Path) -> None:
    text = (
        "method: random\nsamples: 50\nseed: {}\nparameters:\n  a: {{log_uniform: [1e-5, 1e-1]}}\n"
        "  b: {{uniform: [-1, 1.5]}}\n  c: {{int_uniform: [1, 3]}}\n  d: [x, 2]\n"
    )
    first = read_space(write(tmp_path, text.format(1)))
    assert first == read_space(write(tmp_path, text.format(1)))
    assert first != read_space(write(tmp_path, text.format(2)))
    columns = {name: [trial[name] for trial in first.trials] for name in "abcd"}
    exponents = [math.log10(float(value or 0)) for value in columns["a"]]
    assert len(first.trials) == 50 and -5 <= min(exponents) < -4 and -2 < max(exponents) <= -1
    assert all(isinstance(value, float) and -1 <= value <= 1.5 for value in columns["b"])
    assert set(columns["c"]) == {1, 2, 3} and set(columns["d"]) == {"x", 2}


def test_rows_of_a_csv(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer.params.lr,--name\n1e-4,a b\n3,true\n", "trials.csv")
    assert read_space(path).trials == (
        {"optimizer.params.lr": 1e-4, "--name": "a b"},
        {"optimizer.params.lr": 3, "--name": True},
    )


def test_a_script_gets_its_arguments_as_they_are_written(tmp_path: Path) -> None:
    text = 'parameters:\n  --a: ["007", "1.10", 12e4567, 1e-4]\n  a: ["007", 12e4567]\n'
    trials = read_space(write(tmp_path, text)).trials
    assert [trial["--a"] for trial in trials[::2]] == ["007", "1.10", "12e4567", "1e-4"]
    assert [trial["a"] for trial in trials[:2]] == [7, "12e4567"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "key `parameters`"),
        ("parameters: {}", "parameters: names and values are missing"),
        ("parameters: {a: [1]}\nmethods: grid", "methods: unknown key"),
        ("parameters: {a: [1]}\nmethod: best", "method: 'best'"),
        ("parameters: {a: []}", "parameters.a: the list is empty"),
        ("parameters: {a: [[1]]}", "parameters.a: expected a string, a number, true, false or null, got [1]"),
        ("parameters: {a: {uniform: [0, 1]}}", "needs `method: random`"),
        ("parameters: {a: {normal: [0, 1]}}", "parameters.a: expected a list, or one of"),
        ("parameters: {a b: [1]}", "parameter 'a b': write --name"),
        ("parameters: {7: [1]}", "parameter 7: write --name"),
        ("parameters: {a: [1]}\nsamples: 3", "samples: needs `method: random`"),
        ("parameters: {a: [1]}\nmethod: random", "samples: expected an integer of at least 1"),
        ("parameters: {a: [1]}\nmethod: random\nsamples: 0", "samples: expected an integer"),
        (
            "parameters: {a: {uniform: [2, 1]}}\nmethod: random\nsamples: 1",
            "parameters.a.uniform: expected [LOW",
        ),
        ("parameters: {a: {log_uniform: [0, 1]}}\nmethod: random\nsamples: 1", "numbers above 0"),
        ("parameters: {a: {int_uniform: [0, .5]}}\nmethod: random\nsamples: 1", "expected integers"),
        ("parameters: {a: [1]}\ngoal: less", "goal: 'less'"),
        ("parameters: {a: [1]}\nearly_stopping: true", "expected a section with min_steps and factor"),
        ("parameters: {a: [1]}\nearly_stopping: {factor: 2}", "early_stopping.min_steps"),
        ("parameters: {a: [1]}\nearly_stopping: {min_steps: 2, factor: 1}", "early_stopping.factor"),
        ("parameters: {a: [1], a: [2]}", "a is given twice"),
        ("parameters: [", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(LaunchError) as error:
        read_space(path)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n", "no rows"),
        ("a,b\n1\n", "line 2 does not have 2"),
        ("a\n1,2\n", "line 2"),
        ("a b\n1\n", "'a b'"),
        ("a,a\n1,2\n", "two columns"),
    ],
)
def test_what_is_wrong_with_a_csv(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match="trials") as error:
        read_space(write(tmp_path, text, "trials.csv"))
    assert said in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="No such file"):
        read_space(tmp_path / "grid.yaml")


def test_cells_of_a_csv_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    path.write_bytes('--a,--b\r\n"two\nlines",x\u2028y\r\n'.encode())
    assert read_space(path).trials == ({"--a": "two\nlines", "--b": "x\u2028y"},)


def test_what_no_reader_can_end_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="contains itself"):
        read_space(write(tmp_path, "parameters: &p {--x: [1], --y: *p}\n"))
    assert read_space(write(tmp_path, f"a\n{'9' * 5000}\n", "a.csv")).trials == ({"a": "9" * 5000},)


def test_typos_are_known(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="parameter: unknown key, did you mean parameters"):
        read_space(write(tmp_path, "parameter:\n  --x: [1]\n"))
    with pytest.raises(LaunchError, match=r"early_stopping\.factr: unknown key, did you mean factor"):
        read_space(write(tmp_path, "parameters:\n  --x: [1]\nearly_stopping: {min_steps: 1, factr: 2}\n"))


def many(values: str, count: int) -> str:
    return "parameters: {" + ", ".join(f"--p{n}: {values}" for n in range(count)) + "}"


LAUGHS = "".join(f"  --y{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(40))
"""Lists of ten times the list before: together 10**40 values."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"parameters:\n  --x: &a0 [1]\n{LAUGHS}", "expected a string, a number"),
        (
            "method: random\nsamples: 1000000000\nparameters: {a: [1]}",
            "1000000000 trials, the limit is 100000",
        ),
        (f"method: random\nsamples: 9000\n{many('[1]', 2_000)}", "9000 trials, the limit is 5000"),
        (many("[1, 2, 3]", 100), "more than 10**18 trials"),
        (many("[1]", 2_000)[:-1] + ", --p7: [2]}", "--p7 is given twice"),
    ],
)
def test_files_that_stand_for_too_much_are_refused_at_once(text: str, words: str, tmp_path: Path) -> None:
    """Without limits, the memory or the time of these has no end."""
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_space(tmp_path / "s.yaml")
    assert words in str(caught.value) and len(str(caught.value)) < 1000
