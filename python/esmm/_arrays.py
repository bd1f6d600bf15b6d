"""Foreign arrays as matrices of ESMM, and esmm.Array, the result of a product of foreign tensors.

numpy arrays are read where they lie if their rows or columns are contiguous, else copied. Everything with __dlpack__
(torch, JAX, CuPy) or __cuda_array_interface__ is read where it lies, on the host or a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from . import _core, _dlpack
from ._core import BF16, DTYPE_NAMES, DTYPE_SIZES, F16, F32, HOST, Context, Raw
from ._errors import ArgumentError, DeviceError, DtypeError, ShapeError

ndarray = np.ndarray
_CODES: Dict[Any, int] = {np.dtype(np.float32): F32, np.dtype(np.float16): F16}
_UINT16 = np.dtype(np.uint16)


_from_buffer, _addressof = ctypes.c_char.from_buffer, ctypes.addressof


def address(x: Any) -> int:
    """Where a numpy array's data is. Its buffer says so in a fourth of the time, but only if it is contiguous and can be
    written."""
    try:
        return _addressof(_from_buffer(x))
    except (TypeError, ValueError, BufferError):
        return int(x.__array_interface__["data"][0])


def numpy_dtype(code: int) -> Any:
    """numpy's dtype; bf16 is that of ml_dtypes where it is installed, else uint16."""
    if code == BF16:
        try:
            import ml_dtypes
        except ImportError:
            return _UINT16
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(DTYPE_NAMES[code])


def numpy_code(x: Any, what: str, bits: Optional[int]) -> int:
    """The number of a numpy array's dtype. bits: BF16 where uint16 stands for it."""
    dtype = x.dtype
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        _CODES[dtype] = BF16
        return BF16
    if dtype == _UINT16:
        if bits == BF16:
            return BF16
        raise DtypeError(f"{what} is of uint16: if these are the bits of bf16, say dtype='bf16'")
    if not dtype.isnative:
        raise DtypeError(f"{what} is of {dtype.str}, the other byte order: convert it with .astype({dtype.name!r})")
    raise DtypeError(f"{what} is of {dtype}: it has to be float32, float16 or bfloat16; convert it with .astype()")


class Operand(NamedTuple):
    raw: Raw
    shape: Tuple[int, ...]  # as the caller sees it
    keep: Any  # holds the memory
    like: Any  # numpy's dtype if the caller's array is one of numpy, else None


def operand(x: Any, what: str, ctx: Context, bits: Optional[int] = None, write: bool = False) -> Operand:
    """x [.., cols] as a matrix. One row may come as a vector; more dimensions than two are rows. write: it is a result,
    so that a copy would not do."""
    if isinstance(x, ndarray):
        shape = x.shape
        code = _CODES.get(x.dtype)
        if code is None:
            code = numpy_code(x, what, bits)
        if len(shape) != 2:
            y = _two_dimensions(x, what)
            if write and not np.shares_memory(x, y) and x.size:
                raise ShapeError(f"{what} of shape {shape} has strides {x.strides}: its rows do not follow one another")
        else:
            y = x
        size = DTYPE_SIZES[code]
        rows, cols = y.shape
        row_step, col_step = y.strides
        data = address(y)
        if col_step == size and row_step == cols * size and not data % size:
            raw: Optional[Raw] = (data, rows, cols, cols or 1, code, 0, 0, 0)
        elif row_step % size or col_step % size or data % size:
            raw = None
        else:
            raw = _core.raw(data, rows, cols, row_step // size, col_step // size, code)
        if write:
            if not x.flags.writeable:
                raise ArgumentError(f"{what} is read-only")
            if raw is None:
                raise ShapeError(
                    f"{what} of shape {shape} has strides {x.strides}: a result needs aligned rows, or columns, "
                    "without gaps inside them"
                )
        elif raw is None:
            y = np.array(y, order="C", copy=True)
            raw = (address(y), rows, cols, cols or 1, code, 0, 0, 0)
        return Operand(raw, shape, y, x.dtype)
    tensor = foreign(x, what, ctx)
    if write and tensor.read_only:
        raise ArgumentError(f"{what} is read-only")
    flat = _flatten(tensor.shape, tensor.strides)
    made = None
    if flat is not None and tensor.data % DTYPE_SIZES[tensor.dtype] == 0:
        made = _core.raw(tensor.data, *flat, tensor.dtype, tensor.device)
    if made is None:
        if not tensor.shape:
            raise ShapeError(f"{what} has no dimensions: a matrix has two")
        raise ShapeError(
            f"{what} of shape {tensor.shape} has strides {tensor.strides}, neither those of rows nor of columns "
            "without gaps inside them: make it contiguous first"
        )
    return Operand(made, tensor.shape, tensor.keep, None)


def _two_dimensions(x: Any, what: str) -> Any:
    if x.ndim == 0:
        raise ShapeError(f"{what} has no dimensions: a matrix has two")
    if x.ndim == 1:
        return x.reshape(1, -1)
    rows = 1
    for extent in x.shape[:-1]:
        rows *= extent
    return x.reshape(rows, x.shape[-1])


def _flatten(shape: Tuple[int, ...], strides: Tuple[int, ...]) -> Optional[Tuple[int, int, int, int]]:
    """Rows, columns and their strides of an array of any number of dimensions; None where rows have no one stride."""
    if len(shape) == 2:
        return shape[0], shape[1], strides[0], strides[1]
    if not shape:
        return None
    rows, step = 1, 0
    for extent, stride in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if extent == 1:
            continue
        if rows > 1 and stride != rows * step:
            return None if 0 not in shape else (0, shape[-1], shape[-1], 1)
        step = step if rows > 1 else stride
        rows *= extent
    return rows, shape[-1], step, strides[-1]


def foreign(x: Any, what: str, ctx: Context) -> _dlpack.Tensor:
    """A tensor that is not one of numpy."""
    if isinstance(x, Array):
        if x.device_index != HOST and x.stream != ctx.stream:
            x.synchronize()
        code = _core.dtype_code(x.dtype, f"the dtype of {what}")
        return _dlpack.Tensor(x.data, x.shape, x.strides, code, x.device_index, False, x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack.consume(x, what, ctx.stream)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda_array_interface(x, what, ctx)
    raise DtypeError(
        f"{what} is a {type(x).__name__}: it has to be a numpy array, or something with __dlpack__ or "
        "__cuda_array_interface__"
    )


def _from_cuda_array_interface(x: Any, what: str, ctx: Context) -> _dlpack.Tensor:
    interface = x.__cuda_array_interface__
    code = {"<f4": F32, "<f2": F16}.get(interface["typestr"])
    if code is None:
        raise DtypeError(
            f"{what} is of {interface['typestr']!r}: it has to be float32 or float16 here, bf16 needs DLPack"
        )
    size = DTYPE_SIZES[code]
    shape = tuple(interface["shape"])
    steps = interface.get("strides")
    strides = tuple(s // size for s in steps) if steps else _dlpack.packed(shape)
    theirs = interface.get("stream")
    if theirs is not None and (theirs if theirs > 2 else 0) != ctx.stream:
        raise ArgumentError(
            f"{what} is in order on stream {theirs}, and the context works on {ctx.stream}: set the same"
        )
    data, read_only = interface["data"]
    device = getattr(getattr(x, "device", None), "id", None)
    return _dlpack.Tensor(
        data or 0, shape, strides, code, max(ctx.device_index, 0) if device is None else int(device), bool(read_only), x
    )


def vector(x: Any, what: str, length: int, ctx: Context, device: int) -> Tuple[int, Any]:
    """A bias: `length` float32 values where C lies (device -1: the host). Its address, and what holds it."""
    if device == HOST:
        if not isinstance(x, ndarray) and (hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")):
            t = foreign(x, what, ctx)
            if t.device != HOST:
                raise DeviceError(f"{what} is on GPU {t.device}, and the result is in host memory")
            if t.dtype != F32 or len(t.shape) != 1 or (t.strides[0] != 1 and t.shape[0] > 1):
                raise DtypeError(f"{what} of shape {t.shape} is not a contiguous vector of float32")
            if t.shape[0] != length:
                raise ShapeError(f"{what} has {t.shape[0]} elements, and the result {length} columns")
            return t.data, t.keep
        y = np.asarray(x)
        if y.dtype != np.float32:
            if isinstance(x, ndarray) and (y.dtype.kind not in "fV" or y.dtype.itemsize > 4):
                raise DtypeError(f"{what} is of {y.dtype}: it has to be float32")
            y = y.astype(np.float32)
        if y.shape != (length,):
            raise ShapeError(f"{what} is of shape {y.shape}: it has to be ({length},), one value for each column")
        y = np.ascontiguousarray(y)
        return address(y), y
    if isinstance(x, (ndarray, list, tuple)):
        raise DeviceError(f"{what} is in host memory, and the result on GPU {device}: put both in one place")
    t = foreign(x, what, ctx)
    if t.device != device:
        raise DeviceError(
            f"{what} is on {'the host' if t.device == HOST else f'GPU {t.device}'}, the result on GPU {device}"
        )
    if t.dtype != F32 or len(t.shape) != 1 or (t.strides[0] != 1 and t.shape[0] > 1):
        raise DtypeError(f"{what} of shape {t.shape} is not a contiguous vector of float32")
    if t.shape[0] != length:
        raise ShapeError(f"{what} has {t.shape[0]} elements, and the result {length} columns")
    return t.data, t.keep


class Array:
    """A result in memory that ESMM made, on the host or on a GPU.

    torch.from_dlpack(c), jax.dlpack.from_dlpack(c), cupy.from_dlpack(c) and numpy.from_dlpack(c) take it without a
    copy; c.numpy() gives a numpy array, copied from a GPU if it is there.
    """

    def __init__(self, shape: Tuple[int, ...], dtype: str, ctx: Context, device: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.strides = _dlpack.packed(shape)
        self.device_index = device
        self.device = "cpu" if device == HOST else f"cuda:{device}"
        self.stream = 0 if device == HOST else ctx.stream
        count = 1
        for extent in shape:
            count *= extent
        self.nbytes = count * (2 if dtype in ("bfloat16", "float16") else 4)
        self._context = ctx
        self._owner: Any
        if device == HOST:
            self._owner = np.empty(count, np.uint16 if self.nbytes == 2 * count else np.uint32)
            self.data: int = address(self._owner)
        else:
            self._owner = ctx.alloc(max(self.nbytes, 1))
            self.data = self._owner.value

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def synchronize(self) -> None:
        """Waits until the array is there."""
        if self.device_index != HOST:
            self._context.synchronize()

    def numpy(self) -> Any:
        """A numpy array: of the same memory on the host, a copy of a GPU's. bf16 is ml_dtypes' if installed, else
        uint16."""
        if self.dtype == "int32":
            target: Any = np.dtype(np.int32)
        else:
            target = numpy_dtype(_core.DTYPE_CODES[self.dtype])
        if self.device_index == HOST:
            return self._owner.view(target).reshape(self.shape)
        flat = self.shape if len(self.shape) == 2 else (1, self.nbytes // target.itemsize)
        out = np.empty(flat, target)
        # The copy moves bits: counts go as fp32, which nothing touches on the way.
        code = F32 if self.dtype == "int32" else _core.DTYPE_CODES[self.dtype]
        source = _core.raw(self.data, flat[0], flat[1], flat[1], 1, code, self.device_index)
        result = _core.raw(address(out), flat[0], flat[1], flat[1], 1, code)
        assert source is not None and result is not None
        self._context.copy(source, result)
        return out.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        x = self.numpy()
        if dtype is not None and x.dtype != dtype:
            return x.astype(dtype)
        return x.copy() if copy and self.device_index == HOST else x

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (_dlpack.CPU, 0) if self.device_index == HOST else (_dlpack.CUDA, self.device_index)

    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"this array is on {self.device}: it is not copied to DLPack's device {dl_device}")
        if copy:
            raise BufferError("this array is not copied: ask for copy=False or leave it out")
        # -1: the consumer takes care. For another stream than its own the host waits, for an event would
        # have to be made in the driver.
        if self.device_index != HOST and stream != -1 and (stream if stream and stream > 2 else 0) != self.stream:
            self.synchronize()
        return _dlpack.produce(
            self,
            self.data,
            self.shape,
            self.strides,
            self.dtype,
            self.device_index,
            max_version is not None and max_version[0] >= 1,
        )

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        typestr = {"float32": "<f4", "float16": "<f2", "int32": "<i4"}.get(self.dtype)
        if self.device_index == HOST or typestr is None:
            raise AttributeError("__cuda_array_interface__")
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.data, False),
            "strides": None,
            "stream": self.stream or 1,
            "version": 3,
        }

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<esmm.Array {' x '.join(map(str, self.shape))} {self.dtype} on {self.device}>"
