"""`make engine` compiles with flags that are safe for the compiler (the SIGILL of AMX under gcc 12)."""

from __future__ import annotations

import shutil

import pytest
from tools.compile_engine import flags, gcc_version

OLDER = frozenset({"sse4_2", "avx", "avx2", "bmi2", "fma", "f16c"})
AVX512 = frozenset(f"avx512{name}" for name in ("f", "cd", "vl", "dq", "bw", "vbmi", "_vnni", "_bf16"))
XEON = OLDER | AVX512 | {"amx_tile", "amx_int8", "amx_bf16"}
ARM = frozenset({"asimd", "asimddp"})


def test_amx_is_left_out_under_gcc_12_and_all_else_is_kept() -> None:
    chosen = flags(XEON, 12)
    assert "-DGGML_NATIVE=OFF" in chosen
    assert {"-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF"} <= set(chosen)
    assert {"-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_BF16=ON"} <= set(chosen)


def test_a_part_of_avx512_is_not_all_of_it() -> None:
    assert "-DGGML_AVX512=OFF" in flags(XEON - {"avx512bw"}, 12)


@pytest.mark.parametrize(
    ("cpu", "gcc"), [(XEON, 13), (XEON, None), (OLDER, 12), (ARM, 12), (frozenset(), None)]
)
def test_elsewhere_the_compiler_takes_what_the_processor_has(cpu: frozenset[str], gcc: int | None) -> None:
    chosen = flags(cpu, gcc)
    assert "-DGGML_NATIVE=ON" in chosen
    assert not any("AMX" in flag for flag in chosen)


@pytest.mark.parametrize("gcc", [12, 13])
def test_a_server_is_compiled_only_where_it_is_asked_for(gcc: int) -> None:
    for server in (False, True):
        chosen = flags(XEON, gcc, server=server)
        last = dict(flag.rsplit("=", 1) for flag in chosen)
        assert last["-DLLAMA_BUILD_SERVER"] == ("ON" if server else "OFF")
        assert last["-DGGML_OPENMP"] == "OFF"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_version_of_gcc_is_read() -> None:
    found = gcc_version("gcc")
    assert found is not None
    assert 5 <= found < 100
