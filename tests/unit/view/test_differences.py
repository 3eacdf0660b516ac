"""Test how arguments and configs of runs are compared."""

from __future__ import annotations

import shlex

import pytest

from zlaunch.view.differences import find_differences, flat_config, named_arguments


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("--num_gpus 2 train.py --lr 1e-4", {"--num_gpus": "2", "argument 1": "train.py", "--lr": "1e-4"}),
        ("--detach train.py --tiny", {"--detach": "set", "argument 1": "train.py", "--tiny": "set"}),
        ("train.py a -x=1 b", {"argument 1": "train.py", "argument 2": "a", "-x": "1", "argument 3": "b"}),
        ("t.py --shift -1 --rate -.5 -", {"argument 1": "t.py", "--shift": "-1", "--rate": "-.5"}),
        ("t.py --tag a --tag=b", {"argument 1": "t.py", "--tag": "a b"}),
    ],
)
def test_the_arguments_of_a_command(command: str, found: dict[str, str]) -> None:
    named = named_arguments(shlex.split(command))
    assert {name: value for name, value in named.items() if value != "-"} == found


def test_config_keys_are_dotted() -> None:
    config = {"a": {"b": {"c": 1}, "d": []}, "e": "text", "f": {}, "g": None}
    assert flat_config(config) == {"a.b.c": "1", "a.d": "[]", "e": "text", "f": "{}", "g": "null"}


def test_only_what_differs_is_listed() -> None:
    sides = [{"same": "1", "other": "2"}, {"same": "1", "other": "3"}, {"same": "1", "third": "4"}]
    assert find_differences(sides) == [
        ("other", "2", "3", "not set"),
        ("third", "not set", "not set", "4"),
    ]
