"""Compiles csrc/ops.cpp at first use and loads it.

The result lies in the user's cache folder under a name that says what it was made of: the source, the library's header,
torch's version, the compiler. Several processes may come here at once: one of them compiles, under a lock, into a
temporary file that is then renamed.

ESMM_TORCH_BUILD=0 leaves it out, and the operators run in Python: the same results, some ten microseconds a call more.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from typing import List, Optional

import torch

from .. import _lib

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "csrc", "ops.cpp")
STABLE = (2, 10)  # the first torch with all of the stable ABI that ops.cpp uses


def torch_version() -> "tuple[int, int]":
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "esmm")


def include_folder() -> Optional[str]:
    """Where esmm.h is: in the package (a wheel) or in the source tree."""
    package = os.path.dirname(HERE)
    for folder in (
        os.path.join(package, "include"),
        os.path.join(os.path.dirname(os.path.dirname(package)), "include"),
    ):
        if os.path.exists(os.path.join(folder, "esmm.h")):
            return folder
    return None


def command(compiler: str, include: str, output: str) -> List[str]:
    root = os.path.dirname(os.path.abspath(torch.__file__))
    return [
        compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility-inlines-hidden",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{include}", f"-isystem{os.path.join(root, 'include')}", SOURCE, "-o", output,
        f"-L{os.path.join(root, 'lib')}", "-ltorch_cpu", "-lc10", "-ldl", "-pthread",
    ]  # fmt: skip


def name_of(compiler: str, include: str) -> str:
    h = hashlib.sha256()
    for path in (SOURCE, os.path.join(include, "esmm.h")):
        with open(path, "rb") as f:
            h.update(f.read())
    h.update(torch.__version__.encode())
    h.update(" ".join(command(compiler, "", "")).encode())
    return f"torch-{h.hexdigest()[:16]}.so"


STREAM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32)


@STREAM
def _stream(device: int) -> int:
    """A device's current stream, for a torch whose C interface does not tell."""
    return torch.cuda.current_stream(device).cuda_stream


class CannotBuild(Exception):
    """Why the operators run in Python."""


def compile_operators() -> str:
    """The compiled file's path; compiles where it is not there yet."""
    if torch_version() < STABLE:
        raise CannotBuild(f"torch {torch.__version__} is older than 2.10, the first with a stable ABI for operators")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        raise CannotBuild("no C++ compiler was found (g++, c++, clang++, or $CXX)")
    include = include_folder()
    if include is None:
        raise CannotBuild("esmm.h is not there, neither in the package nor in a source tree")
    folder = cache_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, name_of(compiler, include))
        if os.path.exists(path):
            return path
        with open(os.path.join(folder, "torch.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):
                _compile(compiler, include, path)
    except OSError as e:
        raise CannotBuild(f"{folder} cannot be written: {e}") from e
    return path


def _compile(compiler: str, include: str, path: str) -> None:
    handle, part = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".part")
    os.close(handle)
    try:
        run = subprocess.run(command(compiler, include, part), capture_output=True, text=True, timeout=600)
        if run.returncode:
            raise CannotBuild(f"{compiler} failed:\n{run.stderr[-2000:]}")
        os.rename(part, path)
    except (OSError, subprocess.SubprocessError) as e:
        raise CannotBuild(f"{compiler} cannot be run: {e}") from e
    finally:
        if os.path.exists(part):
            os.unlink(part)


def load() -> Optional[ctypes.CDLL]:
    """The C++ operators, or None with one warning that says why not."""
    if os.environ.get("ESMM_TORCH_BUILD") == "0":
        return None
    try:
        path = compile_operators()
        library = ctypes.CDLL(path)
        library.esmm_torch_bind.restype = ctypes.c_char_p
        library.esmm_torch_bind.argtypes = [ctypes.c_char_p, STREAM]
        library.esmm_torch_failed.restype = None
        library.esmm_torch_failed.argtypes = [ctypes.c_char_p]
        library.esmm_torch_forget.restype = None
        library.esmm_torch_forget.argtypes = [ctypes.c_void_p]
        wrong = library.esmm_torch_bind(os.fsencode(_lib.library_path()), _stream)
        if wrong:
            raise RuntimeError(f"{path} cannot use libesmm: {wrong.decode()}")
    except (CannotBuild, OSError) as e:
        warnings.warn(
            f"esmm.torch: the operators run in Python, which costs some 10 us a call: {e}. ESMM_TORCH_BUILD=0 stops "
            "this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return library
