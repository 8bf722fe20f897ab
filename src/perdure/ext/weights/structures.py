"""Structures of llama.cpp that only quantising uses."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_size_t


class ImportanceRow(Structure):
    """`llama_model_imatrix_data`: what one tensor's columns count. An empty name ends an array of them."""

    _fields_ = (("name", c_char_p), ("data", POINTER(c_float)), ("size", c_size_t))


class Override(Structure):
    """`llama_model_kv_override` whose value is a text. An empty key ends an array of them."""

    # Its value is a union with 8-byte members, and aligned as they are.
    _fields_ = (
        ("tag", c_int),
        ("key", ctypes.c_char * 128),
        ("gap", c_int32),
        ("text", ctypes.c_char * 128),
    )

    TEXT = 3
