"""Says what changed for perdure in another llama.cpp: `python -m tools.next_engine HEADERS [VERSION]`.

HEADERS is a folder with llama.h, ggml.h, ggml-backend.h and ggml-cpu.h, somewhere below it. Structs,
functions and constants that perdure uses are held against the declarations for VERSION (the newest, unless it
is named).
The exit code is 1 if something differs. docs/internals/next_engine.md says what to do then.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.engine.llama.native import declarations
from perdure.engine.llama.native.declarations import CACHE_TYPES, NEXT, StructLayout, layout_of

_FILES = ("llama.h", "ggml.h", "ggml-backend.h", "ggml-cpu.h")
_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "llama_batch": declarations.LlamaBatch,
    "llama_model_params": declarations.ModelParams,
    "ggml_threadpool_params": declarations.ThreadpoolParams,
    "ggml_backend_feature": declarations.Feature,
}
_PLAIN = {
    "bool": "bool",
    "float": "float",
    "int": "i32",
    "int32_t": "i32",
    "uint32_t": "u32",
    "int64_t": "i64",
    "uint64_t": "u64",
    "size_t": "u64",
    "uint8_t": "u8",
    "int8_t": "i8",
    "llama_token": "i32",
    "llama_pos": "i32",
    "llama_seq_id": "i32",
    "llama_state_seq_flags": "u32",
    "void": "void",
}
_HANDLES = re.compile(r"(callback|_t)$")
"""Types that are pointers under a name: callbacks, and handles such as ggml_backend_dev_t."""


def read(folder: Path) -> str:
    """The headers without comments, in one text."""
    found = [next(iter(sorted(folder.rglob(name))), None) for name in _FILES]
    missing = [name for name, path in zip(_FILES, found, strict=True) if path is None]
    if missing:
        raise SystemExit(f"{folder} has no {', '.join(missing)}")
    text = "\n".join(path.read_text(encoding="utf-8") for path in found if path)
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def kind_of(written: str) -> str:
    """A C type in short: i32, u64, float, pointer, or a struct's name."""
    words = written.replace("const", " ").strip()
    if "*" in words or "[" in words:
        return "pointer"
    if words.startswith("enum "):
        return "i32"
    words = words.removeprefix("struct ").strip()
    if words in _PLAIN:
        return _PLAIN[words]
    return "pointer" if _HANDLES.search(words) else words


def our_kind(kind: Any) -> str:
    """The same for a type of the declarations."""
    if kind is None:
        return "void"
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
        name = kind.__name__
        return next((c for c, ours in _STRUCTS.items() if ours.__name__ == name), "llama_context_params")
    plain = {ctypes.c_bool: "bool", ctypes.c_float: "float", ctypes.c_int8: "i8", ctypes.c_uint8: "u8"}
    if kind in plain:
        return plain[kind]
    if issubclass(kind, ctypes._SimpleCData) and kind not in (ctypes.c_void_p, ctypes.c_char_p):
        sign = "u" if kind(-1).value > 0 else "i"
        return f"{sign}{8 * ctypes.sizeof(kind)}"
    return "pointer"


def fields(text: str, struct: str) -> list[tuple[str, str]]:
    """The fields of a struct in the headers, each with its type in short."""
    body = re.search(rf"struct {struct}\s*\{{(.*?)\n\s*\}}", text, re.DOTALL)
    if body is None:
        return []
    found = []
    for line in body[1].split(";"):
        if match := re.fullmatch(r"\s*(?P<type>.+?[\s*])(?P<name>\w+)\s*(?:\[\w+\])?\s*", line, re.DOTALL):
            kind = "array" if "[" in line else kind_of(match["type"])
            found.append((match["name"], kind))
    return found


def our_fields(layout: type[ctypes.Structure]) -> list[tuple[str, str]]:
    return [
        (name, "array" if issubclass(kind, ctypes.Array) else our_kind(kind))
        for name, kind, *_ in layout._fields_
    ]


def function(text: str, name: str) -> tuple[str, list[str]] | None:
    """A function's result and arguments in short, as the headers declare it."""
    match = re.search(rf"API\s+([\w\s*]+?[\s*]){name}\s*\((.*?)\)\s*[;,]", text, re.DOTALL)
    if match is None:
        return None
    arguments = [each.strip() for each in match[2].split(",") if each.strip() not in ("", "void")]
    return kind_of(match[1]), [kind_of(re.sub(r"\w+$", "", each)) for each in arguments]


def constants(text: str) -> Mapping[str, int]:
    """The members of enums and the whole numbers of #define, by name."""
    found = {
        name: int(value, 0) for name, value in re.findall(r"#define\s+(\w+)\s+\(?(\d+)\)?\s*$", text, re.M)
    }
    for body in re.findall(r"enum\s+\w*\s*\{(.*?)\}", text, re.DOTALL):
        at = -1
        for name, value in re.findall(r"(\w+)\s*(?:=\s*(-?\d+))?\s*(?:,|$)", body.strip()):
            at = int(value) if value else at + 1
            found[name] = at
    return found


_CONSTANTS = {
    "GGML_MAX_N_THREADS": declarations.MAX_THREADS,
    "LLAMA_POOLING_TYPE_NONE": 0,
    "LLAMA_FLASH_ATTN_TYPE_DISABLED": 0,
    "LLAMA_FLASH_ATTN_TYPE_ENABLED": 1,
    **{f"GGML_TYPE_{name.upper()}": number for name, number in CACHE_TYPES.items()},
}


def differences(text: str, layout: StructLayout) -> Iterator[str]:
    """What of the headers is not as declared, a line each."""
    for struct, ours in {**_STRUCTS, "llama_context_params": layout.context_params}.items():
        theirs, declared = fields(text, struct), our_fields(ours)
        if not theirs:
            yield f"struct {struct} is gone"
        for name, kind in theirs:
            if (name, kind) not in declared:
                yield f"struct {struct} has {name} ({kind}), which is not declared so"
        for name, kind in declared:
            if (name, kind) not in theirs:
                yield f"struct {struct} lacks {name} ({kind})"
        if sorted(theirs) == sorted(declared) and theirs != declared:
            yield f"struct {struct} has its fields in another order"
    for name, (result, arguments) in layout.functions.items():
        theirs_function = function(text, name)
        declared_function = (our_kind(result), [our_kind(each) for each in arguments])
        if theirs_function is None:
            yield f"{name} is gone"
        elif theirs_function != declared_function:
            yield f"{name} is {theirs_function}, declared as {declared_function}"
    known = constants(text)
    for name, number in _CONSTANTS.items():
        if known.get(name) != number:
            yield f"{name} is {known.get(name)}, perdure has {number}"


def main(arguments: list[str]) -> int:
    if not arguments:
        raise SystemExit(__doc__)
    newest = (NEXT[0], NEXT[1] - 1)
    version = tuple(map(int, arguments[1].split("."))) if arguments[1:] else newest
    lines = list(differences(read(Path(arguments[0])), layout_of(version[:2])))
    print(
        "\n".join(lines) if lines else f"nothing differs from the declarations for {version[0]}.{version[1]}"
    )
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
