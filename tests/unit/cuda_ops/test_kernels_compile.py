"""Check that every CUDA source compiles for every generation of GPUs from Volta to Blackwell, without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zlaunch.cuda_ops import loader

from .test_kernels_shim import COMBINATIONS, some_of


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return cupy.cuda.nvrtc


def compiled(nvrtc: Any, text: str, defines: tuple[str, ...], arch: str) -> bytes:
    """The binary for ``sm_NN``, the PTX for ``compute_NN``."""
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*loader.OPTIONS, *defines, f"-arch={arch}"))
        log = [line for line in nvrtc.getProgramLog(program).splitlines() if "deprecated" not in line]
        if any("warning" in line for line in log):
            raise RuntimeError("\n".join(log))
        result = nvrtc.getPTX(program) if "compute" in arch else nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return result if isinstance(result, bytes) else result.encode()


ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)


@pytest.mark.rotated
@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_compiles(nvrtc: Any, name: str, arch: int) -> None:
    if arch not in nvrtc.getSupportedArchs():
        pytest.skip(f"this NVRTC has no sm_{arch}")
    for defines in some_of(name, ARCHS.index(arch)):
        assert compiled(nvrtc, loader.source(name), defines, f"sm_{arch}").startswith(b"\x7fELF")


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_narrow_steps_compile(nvrtc: Any, arch: int) -> None:
    if arch not in nvrtc.getSupportedArchs():
        pytest.skip(f"this NVRTC has no sm_{arch}")
    for defines in COMBINATIONS["narrow"]:
        assert compiled(nvrtc, loader.source("narrow"), defines, f"sm_{arch}").startswith(b"\x7fELF")


def test_the_trial_compiles(nvrtc: Any) -> None:
    assert compiled(nvrtc, loader._TRIAL, (), "sm_80").startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("w = w * decay", "w = w * decoy", "decoy"),
        ("int64 numel) {", "int64 numel) { float idle;", "never referenced"),
        ("cvt.f32.f16", "cvt.f32.f61", "error"),
    ],
)
def test_a_broken_source_does_not(nvrtc: Any, old: str, new: str, words: str) -> None:
    text = loader.source("step")
    assert old in text
    defines = ("-DGRAD=FLOAT16", "-DOUT=FLOAT16")
    with pytest.raises(RuntimeError, match=words):
        compiled(nvrtc, text.replace(old, new, 1), defines, "sm_80")


def ptx(nvrtc: Any, name: str, kernel: str, *defines: str) -> str:
    """The body of a kernel."""
    text = compiled(nvrtc, loader.source(name), defines, "compute_80").decode()
    entry = re.search(rf"\.entry {kernel}\((.*?)\n}}", text, re.S)
    assert entry is not None
    return entry.group(1)


def test_the_norm_moves_sixteen_bytes_at_a_time(nvrtc: Any) -> None:
    assert "ld.global.v4.u32" in ptx(nvrtc, "norm", "square_sums", "-DSRC=BFLOAT16")
    assert "ld.global.v4.f32" in ptx(nvrtc, "norm", "square_sums", "-DSRC=FLOAT32")


def test_the_step_moves_whole_vectors(nvrtc: Any) -> None:
    code = ptx(nvrtc, "step", "adam", "-DGRAD=BFLOAT16", "-DOUT=BFLOAT16")
    assert code.count("ld.global.v4.f32") == code.count("st.global.v4.f32") == 3
    assert code.count("ld.global.v4.u16") == code.count("st.global.v4.u16") == 1
    assert ".local" not in code, "arrays are in registers"


def test_quantisation_moves_whole_vectors_and_rounds_each_product(nvrtc: Any) -> None:
    defines = ("-DVALUES=BFLOAT16", "-DERROR=BFLOAT16")
    code = ptx(nvrtc, "quantize", "quantize", *defines)
    assert "ld.global.v4.u32" in code and "st.global.v4.u32" in code, "eight of 16 bits"
    assert "st.global.v2.u32" in code, "eight codes of 8 bits"
    other = ptx(nvrtc, "quantize", "dequantize", *defines)
    assert "st.global.v4.u32" in other and "ld.global.v2.u32" in other
    for text in (code, other):
        assert "mul.rn.f32" in text and "mul.f32" not in text and "fma" not in text and ".local" not in text
