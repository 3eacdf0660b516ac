"""Check every kernel as ptxas makes it for every generation: in registers, without any local memory."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT_S
from zlaunch.cuda_ops import loader

from .test_kernels_compile import compiled, nvrtc
from .test_kernels_shim import COMBINATIONS, kernels_of, some_of

__all__ = ["nvrtc"]  # a fixture
MOST_REGISTERS = 64
"""65536 of a multiprocessor then hold four blocks of 256 threads: half of the threads that it can have."""
MOST_OF_NARROW = 80
"""For three blocks: a lane of the narrow step has eight elements of each tensor, and spills with fewer."""
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)


@pytest.fixture(scope="module")
def ptxas() -> Path:
    spec = find_spec("nvidia.cuda_nvcc") if find_spec("nvidia") else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    programs = [folder / "bin" / "ptxas" for folder in folders if (folder / "bin" / "ptxas").exists()]
    if not programs:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc-cu12")
    return programs[0]


def resources(ptxas: Path, text: bytes, arch: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes of local memory and registers of each kernel."""
    (folder / "kernel.ptx").write_bytes(text)
    command = [str(ptxas), "-v", f"-arch=sm_{arch}", "kernel.ptx", "-o", "/dev/null"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr
    found = _ENTRY.findall(run.stderr)
    return {name: (int(a) + int(b) + int(c), int(registers)) for name, a, b, c, registers in found}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arch",
    [80, 90, *(pytest.param(arch, marks=pytest.mark.exhaustive) for arch in (70, 75, 86, 89, 100, 120))],
)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_kernels_live_in_registers(ptxas: Path, nvrtc: Any, tmp_path: Path, name: str, arch: int) -> None:
    for defines in some_of(name, arch // 10):
        text = compiled(nvrtc, loader.source(name), defines, f"compute_{arch}").rstrip(b"\0")
        found = resources(ptxas, text, arch, tmp_path)
        assert found.keys() == kernels_of(name).keys()
        most = MOST_OF_NARROW if name == "narrow" else MOST_REGISTERS
        wrong = {kernel: r for kernel, r in found.items() if r[0] or r[1] > most}
        assert not wrong, f"{defines}: (bytes of local memory, registers) {wrong}"


def test_local_memory_is_seen(ptxas: Path, nvrtc: Any, tmp_path: Path) -> None:
    text = loader.source("scalars") + (
        'extern "C" __global__ void spilt(float* p, int at) {\n'
        "  float many[200];\n  for (int i = 0; i < 200; ++i) many[i] = p[i];\n"
        "  p[0] = many[at] + many[p[7] > 0];\n}\n"
    )
    ptx = compiled(nvrtc, text, (), "compute_80").rstrip(b"\0")
    assert resources(ptxas, ptx, 80, tmp_path)["spilt"][0] >= 800
