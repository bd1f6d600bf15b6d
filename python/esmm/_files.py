"""Weights files, and weights as bytes for pickle: the same format, checksums and all."""

from __future__ import annotations

import os
import tempfile
from typing import Optional, Union

from . import _core
from ._core import Context, Weights
from ._errors import DtypeError, FileError, Status


def load(
    path: Union[str, "os.PathLike[str]"], *, device: Optional[str] = None, context: Optional[Context] = None
) -> Weights:
    """Weights from a file that Weights.save() or the C library wrote.

    >>> import numpy as np, esmm, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     esmm.prepare(np.eye(8, dtype=np.float32)).save(os.path.join(folder, "w.esmm"))
    ...     esmm.load(os.path.join(folder, "w.esmm"), device="cpu")
    <esmm.Weights 8 x 8 float32 dense on cpu, 12.5% nonzero>
    """
    ctx = context if context is not None else _core.context(device)
    return ctx.load(os.fspath(path))


def save(weights: Weights, path: Union[str, "os.PathLike[str]"]) -> None:
    """The same as weights.save(path)."""
    if not isinstance(weights, Weights):
        raise DtypeError(f"weights is a {type(weights).__name__}: it has to be what esmm.prepare() returned")
    weights.save(path)


def dumps(weights: Weights) -> bytes:
    """The bytes of a weights file."""
    weights._live()
    with _folder() as folder:
        path = os.path.join(folder, "weights.esmm")
        weights.save(path)
        with open(path, "rb") as f:
            return f.read()


def loads(data: bytes, device: Optional[str] = None) -> Weights:
    """Weights from the bytes of a weights file."""
    with _folder() as folder:
        path = os.path.join(folder, "weights.esmm")
        with open(path, "wb") as f:
            f.write(data)
        return load(path, device=device)


def _folder() -> "tempfile.TemporaryDirectory[str]":
    # In memory where there is room for such things.
    try:
        return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    except OSError as e:
        raise FileError(f"no temporary folder for the weights' bytes: {e}", Status.IO) from e
