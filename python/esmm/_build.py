"""Builds a C++ file of this package at first use, if there is a compiler, and keeps the result for the next time.

The result lies in the user's cache directory ($XDG_CACHE_HOME or ~/.cache, then esmm/). Its name has a hash of all
inputs: another version of any is another file. If several processes come at once, one of them compiles, under a lock,
into a temporary file that is then renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from typing import List, Sequence


class BuildError(RuntimeError):
    """There is no compiler, or it refused, or there is no place for the result; the text says which."""


def header_directory() -> str:
    """Where esmm.h is: in the package (a wheel), or in the source tree."""
    here = os.path.dirname(os.path.abspath(__file__))
    for directory in (os.path.join(here, "include"), os.path.join(os.path.dirname(os.path.dirname(here)), "include")):
        if os.path.exists(os.path.join(directory, "esmm.h")):
            return directory
    raise BuildError(f"esmm.h is neither in {here}/include nor in a source tree around it")


def cache_directory() -> str:
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if not os.path.isabs(cache):
        if not os.path.isabs(home):
            raise BuildError("neither XDG_CACHE_HOME nor HOME is set: there is nowhere to keep the compiled file")
        cache = os.path.join(home, ".cache")
    return os.path.join(cache, "esmm")


def compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    missing = f"{named} (from CXX) is not there" if named else "no C++ compiler (c++, g++ or clang++) is there"
    raise BuildError(
        f"{missing}. Install one (apt install g++, dnf install gcc-c++, conda install cxx-compiler), or name one:"
        " CXX=/path/to/g++"
    )


def build(source: str, stem: str, includes: Sequence[str], version: str, more: Sequence[str] = ()) -> str:
    """The path of the shared object made of `source`; `version` stands for the files in `includes`, `more` are the
    compiler's words after the source."""
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC"]
    headers = header_directory()
    key = hashlib.sha256(repr((version, flags, list(more), platform.machine(), os.environ.get("CXX"))).encode())
    beside = os.path.dirname(source)
    own = sorted(os.path.join(beside, name) for name in os.listdir(beside) if name.endswith(".h"))
    for path in (source, *own, os.path.join(headers, "esmm.h")):
        with open(path, "rb") as file:
            key.update(file.read())
    directory = cache_directory()
    target = os.path.join(directory, f"{stem}-{key.hexdigest()[:16]}.so")
    if os.path.exists(target):
        return target
    system = [word for path in includes for word in ("-isystem", path)]
    command = [compiler(), *flags, "-I" + headers, *system, source, *more, "-ldl"]
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with open(os.path.join(directory, stem + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(target):
                _compile(command, target)
    except OSError as e:
        raise BuildError(f"{directory} cannot be written: {e.strerror}") from e
    return target


def _compile(command: List[str], target: str) -> None:
    number, temporary = tempfile.mkstemp(suffix=".tmp", dir=os.path.dirname(target))
    os.close(number)
    try:
        try:
            done = subprocess.run(
                [*command, "-o", temporary], capture_output=True, text=True, errors="replace", timeout=600, check=False
            )
        except (OSError, subprocess.SubprocessError) as e:
            raise BuildError(f"{command[0]} cannot be run: {e}") from e
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
