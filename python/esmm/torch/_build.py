"""Compiles csrc/ops.cpp at first use and loads it: there are no other kernels of the operators."""

from __future__ import annotations

import ctypes
import os

import torch

from .. import _lib
from .._build import BuildError, build

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc", "ops.cpp")
STABLE = (2, 10)  # the first torch with all of the stable ABI that ops.cpp uses
KNOWN = (2, 13)  # the last whose own C++ types ops.cpp was tried with
STREAM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32)


@STREAM
def _stream(device: int) -> int:
    """A device's current stream, for a torch whose C interface does not have it."""
    return torch.cuda.current_stream(device).cuda_stream


def torch_version() -> "tuple[int, int]":
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cxx_runtime() -> "list[str]":
    """The libstdc++ that torch has loaded, to be linked first. A compiler that brings only a static one would put a
    second copy into the operators, and an exception thrown by one copy ends the process where the other catches it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = {line.split(None, 5)[-1].rstrip("\n") for line in maps if "/libstdc++.so" in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.isfile(path))[:1]


def compile_operators() -> str:
    """The compiled file's path; compiles where it is not there yet."""
    if torch_version() < STABLE:
        raise BuildError(f"torch {torch.__version__} is older than 2.10, the first with all of the ABI that they use")
    root = os.path.dirname(os.path.abspath(torch.__file__))
    more = [
        "-fvisibility-inlines-hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *cxx_runtime(),
        f"-L{os.path.join(root, 'lib')}", "-ltorch_cpu", "-lc10", "-pthread",
    ]  # fmt: skip
    return build(SOURCE, "torch", [os.path.join(root, "include")], torch.__version__, more)


def load() -> ctypes.CDLL:
    """The operators, registered with torch."""
    try:
        path = compile_operators()
        library = ctypes.CDLL(path)
    except (BuildError, OSError) as e:
        raise ImportError(f"esmm.torch needs its operators, which are C++ and compiled at first use: {e}") from e
    library.esmm_torch_bind.restype = ctypes.c_char_p
    library.esmm_torch_bind.argtypes = [ctypes.c_char_p, STREAM, ctypes.c_int]
    library.esmm_torch_take.restype = ctypes.c_void_p
    library.esmm_torch_take.argtypes = [ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p]
    library.esmm_torch_give.restype = None
    library.esmm_torch_give.argtypes = [ctypes.c_void_p]
    library.esmm_torch_forgotten.restype = ctypes.c_int64
    library.esmm_torch_forgotten.argtypes = []
    library.esmm_torch_forget.restype = None
    library.esmm_torch_forget.argtypes = [ctypes.c_void_p]
    wrong = library.esmm_torch_bind(os.fsencode(_lib.library_path()), _stream, int(torch_version() <= KNOWN))
    if wrong:
        raise ImportError(f"{path} cannot use libesmm: {wrong.decode()}")
    return library
