"""Test the CUDA sources as C++ on the CPU: a thread is a fiber, a kernel a loop over fibers.

``kernels_on_cpu`` puts this under the loader, so that the public functions run their kernels on CPU tensors
with the arguments, options and grids that a device would get. An access at an address that a device would
refuse is noted. It shows nothing about speed, and of races only
those that the order of threads brings out.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.limits import LIMIT_S
from tests.once import once_per_run
from zlaunch.cuda_ops import loader

THREADS = 64  # fewer than on the device, so that grids have to stride
TYPES = ("FLOAT32", "BFLOAT16", "FLOAT16")
COMBINATIONS: dict[str, list[tuple[str, ...]]] = {
    "step": [(f"-DGRAD={g}", f"-DOUT={o}") for g in TYPES for o in ("NONE", "BFLOAT16", "FLOAT16")],
    "norm": [(f"-DSRC={s}",) for s in TYPES],
    "scalars": [()],
    "signs": [()],
    "narrow": [
        *(
            ("-DMASTER=FLOAT32", f"-DSTATE={s}", f"-DGRAD={g}", f"-DOUT={o}")
            for s in ("BFLOAT16", "CODES")
            for o in ("NONE", "BFLOAT16", "FLOAT16")
            for g in dict.fromkeys(("FLOAT32", o if o != "NONE" else "FLOAT32"))
        ),
        *(
            ("-DMASTER=BFLOAT16", f"-DSTATE={s}", f"-DGRAD={g}", "-DOUT=NONE")
            for s in ("FLOAT32", "BFLOAT16", "CODES")
            for g in ("FLOAT32", "BFLOAT16")
        ),
    ],
    "quantize": [
        (f"-DVALUES={v}", f"-DERROR={e}") for v in TYPES for e in dict.fromkeys(("NONE", "FLOAT32", v))
    ],
}
"""Every file with every set of options that the wrappers use."""


def some_of(name: str, position: int) -> list[tuple[str, ...]]:
    """A file's sets of options; where those are many every fourth, others for another ``position``."""
    found = COMBINATIONS[name]
    return found[position % 4 :: 4] if len(found) > 12 else found


_SIGNATURE = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')

SHIM = r"""
#include <math.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#define __global__
#define __device__
#define __shared__ static
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim;

#define IS_GLOBAL(pointer)
#define PRODUCT(a, b) ((a) * (b))
#define HALF_TO_FLOAT(bits, value) do { _Float16 h; memcpy(&h, &bits, 2); value = (float)h; } while (0)
#define FLOAT_TO_HALF(value, bits) do { _Float16 h = (_Float16)value; memcpy(&bits, &h, 2); } while (0)
static unsigned FLOAT_AS_BITS(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float BITS_AS_FLOAT(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }

static ucontext_t scheduler, fibers[THREADS];
static char stacks[THREADS][1 << 16];
static bool alive[THREADS];
static std::function<void()> kernel;
static unsigned lanes[THREADS];

// Every fiber that is alive goes on until its next barrier, one after the other.
static void __syncthreads() { swapcontext(&fibers[threadIdx.x], &scheduler); }

static unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
  lanes[threadIdx.x] = value;
  __syncthreads();
  unsigned other = lanes[threadIdx.x ^ mask];
  __syncthreads();
  return other;
}

// g++ -fsanitize=alignment calls this before an access whose address is no multiple of its type's alignment.
extern "C" int misaligned = 0;
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { ++misaligned; }

static void fiber() {
  kernel();
  alive[threadIdx.x] = false;
}

static void simulate(unsigned blocks, bool backwards) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (int i = 0; i < THREADS; ++i) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i];
      fibers[i].uc_stack.ss_size = sizeof stacks[i];
      fibers[i].uc_link = &scheduler;
      makecontext(&fibers[i], fiber, 0);
      alive[i] = true;
    }
    for (bool any = true; any;) {
      any = false;
      for (int k = 0; k < THREADS; ++k) {
        int i = backwards ? THREADS - 1 - k : k;
        if (!alive[i]) continue;
        threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i]);
        any = true;
      }
    }
  }
}
"""


def kernels_of(name: str) -> dict[str, list[str]]:
    """The parameters of each kernel in a file, as they are declared."""
    found = _SIGNATURE.findall(loader.source(name))
    return {kernel: [" ".join(part.split()) for part in text.split(",")] for kernel, text in found}


def translation_unit() -> str:
    """All files with all options, each in a namespace of its own, and a function to start each kernel."""
    common = (Path(loader.__file__).parent / "kernels" / "common.cu").read_text()
    parts = [SHIM, common]
    for name, combinations in COMBINATIONS.items():
        text = loader.source(name).removeprefix(common)
        for defines in combinations:
            tag = tag_of(name, defines)
            macros = [define.removeprefix("-D").split("=") for define in defines]
            macros += [[kernel, f"{kernel}_{tag}"] for kernel in kernels_of(name)]
            parts += [f"#define {macro} {value}" for macro, value in macros]
            parts += [f"namespace {tag} {{", text]
            for kernel, parameters in kernels_of(name).items():
                names = [re.split(r"\W+", parameter)[-1] for parameter in parameters]
                head = f"start_{kernel}_{tag}(unsigned blocks, bool backwards, {', '.join(parameters)})"
                body = f"::kernel = [=] {{ {kernel}({', '.join(names)}); }}; simulate(blocks, backwards);"
                parts.append(f'extern "C" void {head} {{ {body} }}')
            parts += ["}", *(f"#undef {macro}" for macro, _ in macros)]
    return "\n".join(parts)


def tag_of(name: str, defines: tuple[str, ...]) -> str:
    return re.sub(r"\W", "_", name + "".join(defines))


class CpuKernels:
    """Stands in for ``loader.launch``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.backwards = False
        self.launched: list[str] = []

    def __call__(
        self,
        name: str,
        kernel: str,
        *arguments: Tensor | float | None,
        device: torch.device,
        blocks: int,
        defines: tuple[str, ...] = (),
    ) -> None:
        assert blocks >= 1 and device.type == "cpu"
        parameters = kernels_of(name)[kernel]
        assert len(parameters) == len(arguments), kernel
        values = [convert(p, a) for p, a in zip(parameters, arguments, strict=True)]
        self.launched.append(kernel)
        start = getattr(self._library, f"start_{kernel}_{tag_of(name, defines)}")
        start(ctypes.c_uint(blocks), ctypes.c_bool(self.backwards), *values)
        assert not ctypes.c_int.in_dll(self._library, "misaligned").value, kernel


def convert(parameter: str, argument: Any) -> Any:
    """The argument as the loader would pass it, if that is what the parameter wants."""
    number = loader.argument(argument)
    wanted = "uint64" if "*" in parameter else {"float": "float32", "int64": "int64"}[parameter.split()[0]]
    assert number.dtype == wanted, f"{parameter} gets {argument!r}"
    if wanted == "float32":
        return ctypes.c_float(number.item())
    return ctypes.c_longlong(number.item()) if wanted == "int64" else ctypes.c_void_p(number.item())


def build(folder: Path) -> Path:
    """Compile all kernels into a library in a folder. Tests that call this need g++."""
    (folder / "all.cpp").write_text(translation_unit())
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", f"-DTHREADS={THREADS}"]
    compiling = [*options, "-fsanitize=alignment", "-fPIC", "-c", "all.cpp", "-o", "all.o"]
    for arguments in (compiling, ["-shared", "all.o", "-o", "all.so"]):  # linked apart, without the sanitizer
        command = ["g++", *arguments]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 0, result.stderr[-4000:]
    return folder / "all.so"


def built(factory: pytest.TempPathFactory) -> Path:
    """Return the library, which is compiled once a run."""
    return once_per_run(factory, "kernels-on-cpu", build) / "all.so"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(tmp_path_factory)))


@pytest.fixture
def kernels_on_cpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuKernels]:
    """The public functions launch their kernels on CPU tensors, but for mode "torch"."""
    kernels = CpuKernels(library)
    monkeypatch.setattr(loader, "use_kernels", lambda tensor: loader.mode() != "torch")
    monkeypatch.setattr(loader, "launch", kernels)
    yield kernels
    loader.set_mode("auto")


def test_every_kernel_file_is_covered() -> None:
    folder = Path(loader.__file__).parent / "kernels"
    assert {path.stem for path in folder.glob("*.cu")} == {*COMBINATIONS, "common", "rules"}
    assert all(kernels_of(name) for name in COMBINATIONS)
    assert "#include" not in "".join(path.read_text() for path in folder.glob("*.cu"))
