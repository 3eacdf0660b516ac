"""Test how what torch's `@record` has written gets to the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zlaunch.node import bootstrap


def handed_over(path: Path) -> dict[str, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # a pipe takes less than a long one
        os.close(reader)
        bootstrap.hand_over(str(path), writer)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        content = file.read()
    os.waitpid(pid, 0)
    return json.loads(content) if content else {}


@pytest.mark.parametrize("length", [10, 200_000, 3_000_000])
def test_what_comes_is_json_however_long(tmp_path: Path, length: int) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "x" * length}}))
    event = handed_over(path)
    assert event["type"] == "error_file" and "x" * 10 in str(json.loads(event["text"])["message"])
    assert not handed_over(tmp_path / "none.json")


def test_a_file_is_offered_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("ZLAUNCH_MEMORY_DIR", raising=False)
    assert bootstrap.offer() is None
    monkeypatch.setenv("ZLAUNCH_MEMORY_DIR", str(tmp_path / "memory"))
    assert bootstrap.offer() == os.environ["TORCHELASTIC_ERROR_FILE"] == f"{tmp_path}/memory/error_3.json"
    assert bootstrap.offer() is None, "there is one"
