"""Compiles csrc/ops.cpp at first use and loads it.

ESMM_TORCH_BUILD=0 leaves it out, and the operators run in Python: the same results, some ten microseconds a call more.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Optional

import torch

from .. import _lib
from .._build import BuildError, build

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc", "ops.cpp")
STABLE = (2, 10)  # the first torch with all of the stable ABI that ops.cpp uses
KNOWN = (2, 13)  # the last whose own C++ types ops.cpp was tried with
STREAM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32)


@STREAM
def _stream(device: int) -> int:
    """A device's current stream, for a torch whose C interface does not tell."""
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
        raise BuildError(f"torch {torch.__version__} is older than 2.10, the first with a stable ABI for operators")
    root = os.path.dirname(os.path.abspath(torch.__file__))
    more = [
        "-fvisibility-inlines-hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *cxx_runtime(),
        f"-L{os.path.join(root, 'lib')}", "-ltorch_cpu", "-lc10", "-pthread",
    ]  # fmt: skip
    return build(SOURCE, "torch", [os.path.join(root, "include")], torch.__version__, more)


def load() -> Optional[ctypes.CDLL]:
    """The C++ operators, or None with one warning that says why not."""
    if os.environ.get("ESMM_TORCH_BUILD") == "0":
        return None
    try:
        path = compile_operators()
        library = ctypes.CDLL(path)
        library.esmm_torch_bind.restype = ctypes.c_char_p
        library.esmm_torch_bind.argtypes = [ctypes.c_char_p, STREAM, ctypes.c_int]
        library.esmm_torch_failed.restype = None
        library.esmm_torch_failed.argtypes = [ctypes.c_char_p]
        library.esmm_torch_forget.restype = None
        library.esmm_torch_forget.argtypes = [ctypes.c_void_p]
        wrong = library.esmm_torch_bind(os.fsencode(_lib.library_path()), _stream, int(torch_version() <= KNOWN))
        if wrong:
            raise RuntimeError(f"{path} cannot use libesmm: {wrong.decode()}")
    except (BuildError, OSError) as e:
        warnings.warn(
            f"esmm.torch: the operators run in Python, which costs some 10 us a call: {e}. ESMM_TORCH_BUILD=0 stops "
            "this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return library
