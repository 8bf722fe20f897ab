"""Reads the GPUs of this machine without a toolkit: `python -P gpu_reader.py DRIVER [LOADER]` prints JSON.

It asks NVIDIA's driver library and the Vulkan loader, from a separate process: a broken driver may end it.
Nothing but the standard library is imported.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_CAPABILITY = (75, 76)
"""Attributes of a CUDA device: compute capability, its major and its minor number."""
_SOFTWARE = 4
"""The type of a Vulkan device that is the CPU."""


def cuda(name: str) -> dict[str, Any]:
    """The CUDA version that a driver library knows (13.0 as [13, 0]), and its cards."""
    try:
        lib = ctypes.CDLL(name)
    except OSError:
        return {}
    version, count = ctypes.c_int(), ctypes.c_int()
    if lib.cuInit(0) or lib.cuDriverGetVersion(ctypes.byref(version)):
        return {}
    lib.cuDeviceGetCount(ctypes.byref(count))
    cards = []
    for index in range(count.value):
        device, number, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        text = ctypes.create_string_buffer(256)
        lib.cuDeviceGet(ctypes.byref(device), index)
        lib.cuDeviceGetName(text, len(text), device)
        lib.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        capability = []
        for attribute in _CAPABILITY:
            lib.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(number.value)
        cards.append([text.value.decode("utf-8", "replace"), capability, memory.value])
    return {"cuda": [version.value // 1000, version.value % 1000 // 10], "cards": cards}


def runtimes(majors: range) -> list[int]:
    """The CUDA releases whose runtime the system's loader finds."""
    loadable = []
    for major in majors:
        try:
            ctypes.CDLL(f"libcudart.so.{major}")
            ctypes.CDLL(f"libcublas.so.{major}")
        except OSError:
            continue
        loadable.append(major)
    return loadable


def vulkan(name: str) -> list[str] | None:
    """The devices that the Vulkan loader names, without those in software; None where there is no loader."""
    try:
        lib = ctypes.CDLL(name)
    except OSError:
        return None
    # VkInstanceCreateInfo: its type is 1, everything else is zero.
    info = (ctypes.c_uint64 * 8)(1)
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    if lib.vkCreateInstance(info, None, ctypes.byref(instance)):
        return []
    lib.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (ctypes.c_void_p * max(count.value, 1))()
    lib.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    names = []
    for device in devices[: count.value]:
        # VkPhysicalDeviceProperties: five numbers, the fifth is the type, then the name.
        properties = ctypes.create_string_buffer(4096)
        lib.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), properties)
        kind = int.from_bytes(properties.raw[16:20], sys.byteorder)
        if kind != _SOFTWARE:
            names.append(properties.raw[20:276].split(b"\0")[0].decode("utf-8", "replace"))
    return names


if __name__ == "__main__":
    # A line each: what came before a driver ends the process counts.
    print(json.dumps(cuda(sys.argv[1])), flush=True)
    for loader in sys.argv[2:]:
        print(json.dumps({"runtimes": runtimes(range(11, 16))}), flush=True)
        print(json.dumps({"vulkan": vulkan(loader)}), flush=True)
