"""The library's errors as exceptions.

Each carries the status and the library's text, which names the argument, as Python does, and its value. Each is also a
subclass of the Python exception that a caller would expect (ValueError, MemoryError, OSError, ...), so that code
without this package can catch it.
"""

from __future__ import annotations

import enum
import re
from typing import Dict, Type


class Status(enum.IntEnum):
    """The values of esmm_status; they never change."""

    OK = 0
    ARGUMENT = 10
    SHAPE = 11
    LD = 12
    DTYPE = 13
    OVERFLOW = 14
    OVERLAP = 15
    MEMORY = 20
    DEVICE_MEMORY = 21
    UNSUPPORTED = 30
    UNKNOWN_KERNEL = 31
    DEVICE = 40
    DRIVER = 41
    DEVICE_LOST = 42
    DRIVER_CALL = 43
    IO = 50
    FORMAT = 51
    TRUNCATED = 52
    CHECKSUM = 53
    VERSION = 54


class Error(Exception):
    """Any failure of ESMM: ``status`` says of which kind, ``text`` what was wrong."""

    default = Status.ARGUMENT

    def __init__(self, text: str, status: "int | None" = None) -> None:
        super().__init__(text)
        self.text = text
        self.status = Status(self.default if status is None else status)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return type(self), (self.text, int(self.status))


class ArgumentError(Error, ValueError):
    """An argument that has no such value."""


class ShapeError(ArgumentError):
    """Dimensions or strides that do not fit."""

    default = Status.SHAPE


class OverlapError(ArgumentError):
    """Operands that must not share memory and do."""

    default = Status.OVERLAP


class UnknownKernelError(ArgumentError):
    """A kernel's name that is not in the list."""

    default = Status.UNKNOWN_KERNEL


class DtypeError(Error, TypeError):
    """A dtype, or a type of object, that is not accepted."""

    default = Status.DTYPE


class SizeError(Error, OverflowError):
    """A size beyond what can be addressed or counted."""

    default = Status.OVERFLOW


class OutOfMemoryError(Error, MemoryError):
    """An allocation that failed, on the host or on a GPU."""

    default = Status.MEMORY


class UnsupportedError(Error, NotImplementedError):
    """No kernel can do this; the text says why."""

    default = Status.UNSUPPORTED


class DeviceError(Error, RuntimeError):
    """A device that is not there, or failed."""

    default = Status.DEVICE


class FileError(Error, OSError):
    """The operating system refused to read or write a file."""

    default = Status.IO


class FileFormatError(Error, ValueError):
    """A weights file that is damaged, cut short, or of another version."""

    default = Status.FORMAT


BY_STATUS: Dict[int, Type[Error]] = {
    Status.ARGUMENT: ArgumentError,
    Status.SHAPE: ShapeError,
    Status.LD: ShapeError,
    Status.DTYPE: DtypeError,
    Status.OVERFLOW: SizeError,
    Status.OVERLAP: OverlapError,
    Status.MEMORY: OutOfMemoryError,
    Status.DEVICE_MEMORY: OutOfMemoryError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.UNKNOWN_KERNEL: UnknownKernelError,
    Status.DEVICE: DeviceError,
    Status.DRIVER: DeviceError,
    Status.DEVICE_LOST: DeviceError,
    Status.DRIVER_CALL: DeviceError,
    Status.IO: FileError,
    Status.FORMAT: FileFormatError,
    Status.TRUNCATED: FileFormatError,
    Status.CHECKSUM: FileFormatError,
    Status.VERSION: FileFormatError,
}


# C's names and Python's. Fields of options are arguments here, and a matrix's are properties of an array.
_NAMES = (
    (re.compile(r"\b(?:opts|prepare)->format\.kind\b|\bformat->kind\b"), "format"),
    (re.compile(r"\b(?:opts|prepare)->format\.|\bformat->"), "format's "),
    (re.compile(r"\bin->(strip_density|density)_a\b"), r"\1"),
    (re.compile(r"\b(?:opts|generator|in|prepare|weights)->"), ""),
    (re.compile(r"\bgrads->"), "the gradient of "),
    (re.compile(r"\bplace is ESMM_DEVICE\b"), "memory is a GPU's"),
    (re.compile(r"^c(?=->| \(| is | has )|(?<=shares memory with )c\b"), "out"),
    (re.compile(r"(?<=\w)->"), "'s "),
    (re.compile(r"\besmm_(prune|prepare|matmul|explain|expect|tune)\b(?!_)"), r"esmm.\1"),
    (re.compile(r"\besmm_pattern_coarsen\b"), "Pattern.coarsen"),
)


def in_python(text: str) -> str:
    """A text of the library with the names that its arguments have here.

    >>> in_python("opts->density is 2, must be 0 to 1")
    'density is 2, must be 0 to 1'
    """
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def error(status: int, text: str) -> Error:
    """The exception of a status. Texts about files hold their paths, and are left as they are."""
    return BY_STATUS[status](text if status >= Status.IO else in_python(text), status)
