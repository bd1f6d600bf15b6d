"""DLPack in and out, by ctypes: how tensors of torch, JAX and CuPy come in, and results go out, without a copy.

Coming in, a capsule is read and held, never consumed: after the call it is dropped, and its own destructor gives the
memory back to its owner. Going out, the tensor's description lives in a table here until the consumer calls the
deleter.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, PYFUNCTYPE, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p, py_object, pythonapi
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple

from ._core import BF16, F16, F32, HOST
from ._errors import ArgumentError, DeviceError, DtypeError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(Structure):
    _fields_ = [("tensor", DLTensor), ("manager", c_void_p), ("deleter", c_void_p)]


class DLManagedTensorVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    ]


_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"  # capsules point at these: they must stay
# This module's own prototypes: those on pythonapi are shared.
_new = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))
_is_valid = PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", pythonapi))
_pointer = PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", pythonapi))

# (code, bits) of DLPack -> ours, and back
_CODES = {(2, 32): F32, (4, 16): BF16, (2, 16): F16}
_TYPES = {"float32": (2, 32), "bfloat16": (4, 16), "float16": (2, 16), "int32": (0, 32)}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class Tensor(NamedTuple):
    """A foreign tensor: strides in elements, device -1 for the host. `keep` holds its memory."""

    data: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: int
    device: int
    read_only: bool
    keep: Any


_unversioned: Set[type] = set()  # types whose __dlpack__ takes no max_version


def _capsule(x: Any, stream: Optional[int]) -> Any:
    options: Dict[str, Any] = {} if stream is None else {"stream": stream}
    kind = type(x)
    if kind not in _unversioned:
        try:
            return x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:
            _unversioned.add(kind)
    return x.__dlpack__(**options)


def consume(x: Any, what: str, stream: int) -> Tensor:
    """Reads a tensor through __dlpack__; its data is then in order for `stream` (0: the default one)."""
    try:
        device_type, device = x.__dlpack_device__()
        device_type, device = int(device_type), int(device)
        if device_type in (CPU, CUDA_HOST):
            device = HOST
        elif device_type not in (CUDA, CUDA_MANAGED):
            raise DeviceError(
                f"{what} is on a device of DLPack's type {device_type}: only CPUs and NVIDIA GPUs are known"
            )
        # In DLPack 1 stands for the legacy default stream.
        capsule = _capsule(x, None if device == HOST else stream or 1)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as e:
        if isinstance(e, DeviceError):
            raise
        raise ArgumentError(f"{what} is a {type(x).__name__} that does not give its memory: {e}") from e
    address = id(capsule)
    if _is_valid(address, _NAME):
        t = DLManagedTensor.from_address(_pointer(address, _NAME)).tensor
        read_only = False
    elif _is_valid(address, _NAME_VERSIONED):
        managed = DLManagedTensorVersioned.from_address(_pointer(address, _NAME_VERSIONED))
        if managed.major != 1:
            raise ArgumentError(f"{what} comes as DLPack {managed.major}.{managed.minor}: version 1 is known")
        t, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        raise ArgumentError(f"{what} is a {type(x).__name__} whose __dlpack__ gives no capsule")
    dtype = _CODES.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        name = f"{_KINDS.get(t.code, 'type ' + str(t.code))}{t.bits}" + (f"x{t.lanes}" if t.lanes != 1 else "")
        raise DtypeError(f"{what} is of {name}: it has to be float32, float16 or bfloat16")
    shape = tuple((c_int64 * t.ndim).from_address(t.shape)) if t.ndim else ()
    if t.strides and t.ndim:
        strides = tuple((c_int64 * t.ndim).from_address(t.strides))
    else:
        strides = packed(shape)
    return Tensor((t.data or 0) + t.byte_offset, shape, strides, dtype, device, read_only, capsule)


def packed(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# ---- going out ----

_given: Dict[int, Any] = {}  # address of a managed tensor -> all that must live as long


def _delete(address: Any) -> None:
    _given.pop(address, None)


def _destroy(capsule: Any) -> None:
    # A consumer renames the capsule and calls the deleter itself; one that was not taken still has its name.
    for name in (_NAME, _NAME_VERSIONED):
        if _is_valid(capsule, name):
            _given.pop(_pointer(capsule, name), None)


_deleter = CFUNCTYPE(None, c_void_p)(_delete)
_destructor = CFUNCTYPE(None, c_void_p)(_destroy)


def produce(
    owner: Any, data: int, shape: Tuple[int, ...], strides: Tuple[int, ...], dtype: str, device: int, versioned: bool
) -> Any:
    """A capsule for a tensor at `data`; `owner` lives until the consumer is done."""
    count = len(shape)
    numbers = (c_int64 * (2 * count))(*shape, *strides)
    at = ctypes.addressof(numbers)
    code, bits = _TYPES[dtype]
    tensor = DLTensor(
        data, CPU if device == HOST else CUDA, max(device, 0), count, code, bits, 1, at, at + 8 * count, 0
    )
    deleter = ctypes.cast(_deleter, c_void_p).value
    managed: Any
    if versioned:
        managed = DLManagedTensorVersioned(1, 0, None, deleter, 0, tensor)
    else:
        managed = DLManagedTensor(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _given[address] = (managed, numbers, owner)
    return _new(address, _NAME_VERSIONED if versioned else _NAME, ctypes.cast(_destructor, c_void_p).value)
