"""Gives tests the alias of DeepSpeed, and takes it away after each module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import zlaunch.compat.deepspeed
from tests.compat.test_engine import _deepspeed
from zlaunch.runtime.zero import placeholder


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    settings = placeholder.settings
    before = settings.empty_placeholders, settings.lenient
    yield _deepspeed()
    zlaunch.compat.deepspeed.uninstall()
    settings.empty_placeholders, settings.lenient = before  # or the next file of this process has them
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
