"""Test that a script that only reports does not wait for torch."""

from __future__ import annotations

import subprocess
import sys


def test_reporting_imports_no_torch() -> None:
    script = "import sys, zlaunch; zlaunch.report(loss=1.0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
