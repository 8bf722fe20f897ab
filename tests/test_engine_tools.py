"""The tools that read llama.cpp's packages and headers say what is in them."""

from __future__ import annotations

import ctypes
import struct

from tools import engine_contents, next_engine

from perdure.engine.llama.native.declarations import layout_of

HEADER = """
struct llama_thing {
    int32_t n;            // how many
    enum llama_kind kind;
    const float * split;
    bool mask[GGML_MAX_N_THREADS];
};
#define GGML_MAX_N_THREADS 512
enum llama_kind { LLAMA_KIND_A, LLAMA_KIND_B = 5, LLAMA_KIND_C };
LLAMA_API bool llama_memory_can_shift(llama_memory_t mem);
LLAMA_API int32_t llama_decode(
        struct llama_context * ctx,
          struct llama_batch   batch);
"""


def test_headers_are_read_field_by_field() -> None:
    fields = next_engine.fields(HEADER.replace("// how many", ""), "llama_thing")
    assert fields == [("n", "i32"), ("kind", "i32"), ("split", "pointer"), ("mask", "array")]
    assert next_engine.function(HEADER, "llama_memory_can_shift") == ("bool", ["pointer"])
    assert next_engine.function(HEADER, "llama_decode") == ("i32", ["pointer", "llama_batch"])
    assert next_engine.function(HEADER, "llama_gone") is None
    known = next_engine.constants(HEADER)
    assert (known["GGML_MAX_N_THREADS"], known["LLAMA_KIND_B"], known["LLAMA_KIND_C"]) == (512, 5, 6)


def test_what_changed_is_told_in_a_line_each() -> None:
    lines = list(next_engine.differences(HEADER, layout_of((0, 6))))
    assert "struct llama_batch is gone" in lines
    assert "llama_model_free is gone" in lines
    assert not any(line.startswith(("llama_decode ", "GGML_MAX_N_THREADS ")) for line in lines)


def test_versions_differ_by_the_fields_that_their_headers_have() -> None:
    old, new = (layout_of(version).context_params for version in ((0, 5), (0, 6)))
    assert layout_of((0, 4)).context_params is old
    assert ctypes.sizeof(new) == ctypes.sizeof(old) + 8
    assert {name for name, *_ in new._fields_} - {name for name, *_ in old._fields_} == {"moe_cache_size"}
    assert new.embeddings.offset == old.embeddings.offset + 8


def test_a_cuda_backend_tells_its_machine_code_and_ptx() -> None:
    def entry(kind: int, version: tuple[int, int], arch: int) -> bytes:
        return struct.pack("<HHIQIIHHI", kind, 0x101, 40, 8, 0, 0, version[1], version[0], arch) + bytes(16)

    entries = entry(2, (0, 0), 86) + entry(1, (8, 4), 80) + entry(1, (8, 3), 50)
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    contents = engine_contents.read(b"before" + container + b"between" + container)
    assert (contents.code, contents.ptx, contents.toolkit) == ({86}, {80, 50}, (8, 4))
