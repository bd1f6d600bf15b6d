"""Builds a C++ file of this package at first use, where a compiler is there, and keeps the result for the next time.

What is built lies in the user's cache directory ($XDG_CACHE_HOME or ~/.cache, then esmm/), under a name that holds a
hash of all it was made from: another version of anything is another file. It is written under a temporary name and
renamed, so that processes that start together do not see half of it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from typing import List, Sequence


class BuildError(RuntimeError):
    """There is no compiler, or it refused; the text says which."""


def header_directory() -> str:
    """Where esmm.h is: in the package (a wheel), or in the source tree."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for directory in (os.path.join(here, "include"), os.path.join(os.path.dirname(os.path.dirname(here)), "include")):
        if os.path.exists(os.path.join(directory, "esmm.h")):
            return directory
    raise BuildError(f"esmm.h is neither in {here}/include nor in a source tree around it")


def cache_directory() -> str:
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if not os.path.isabs(cache):
        if not os.path.isabs(home):
            raise BuildError("neither XDG_CACHE_HOME nor HOME is set: there is nowhere to keep what is built")
        cache = os.path.join(home, ".cache")
    return os.path.join(cache, "esmm")


def compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"{named} (from CXX) is not there" if named else "no C++ compiler (c++, g++ or clang++) is there")


def build(source: str, stem: str, includes: Sequence[str], version: str) -> str:
    """The path of the shared object made of `source`; `version` stands for what `includes` hold."""
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    headers = header_directory()
    key = hashlib.sha256(repr((version, flags, platform.machine(), os.environ.get("CXX"))).encode())
    for path in (source, os.path.join(headers, "esmm.h")):
        with open(path, "rb") as file:
            key.update(file.read())
    directory = cache_directory()
    target = os.path.join(directory, f"{stem}-{key.hexdigest()[:16]}.so")
    if os.path.exists(target):
        return target
    command: List[str] = [
        compiler(),
        *flags,
        "-I" + headers,
        *(word for path in includes for word in ("-isystem", path)),
        source,
    ]
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        number, temporary = tempfile.mkstemp(prefix=stem, suffix=".tmp", dir=directory)
    except OSError as e:
        raise BuildError(f"nothing can be written to {directory}: {e.strerror}") from e
    os.close(number)
    try:
        done = subprocess.run([*command, "-o", temporary, "-ldl"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except OSError as e:
        raise BuildError(f"{command[0]} cannot be run: {e}") from e
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return target
