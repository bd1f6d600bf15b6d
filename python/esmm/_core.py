"""Contexts, weights and patterns on raw memory: the base of the numpy and the torch layers.

A matrix here is a plain tuple, ``Raw = (data, rows, cols, ld, dtype, order, place, device)``, the fields of esmm_matrix
with the enums as numbers; ``raw()`` makes one from a pointer, a shape and strides. This module does not use numpy.

Handles of C objects are freed when the last reference to them goes, and a call in flight holds one: closing an object
while another thread works with it is safe. A context serves one thread at a time, so each has a lock; the default
contexts are one per thread and never wait for it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _lib
from ._errors import ArgumentError, DtypeError, Error, error
from ._lib import lib

F32, BF16, F16 = 0, 1, 2
ROW_MAJOR, COL_MAJOR = 0, 1
HOST = -1  # as a device's index; 0 and up are GPUs
DTYPE_NAMES = ("float32", "bfloat16", "float16")
DTYPE_SIZES = (4, 2, 2)
DTYPE_CODES = {"float32": F32, "f32": F32, "bfloat16": BF16, "bf16": BF16, "float16": F16, "f16": F16}
ACTIVATIONS = {name[len("ESMM_ACT_") :].lower(): value for name, value in _lib.ACTIVATIONS.items()}
USES = {name[len("ESMM_USE_") :].lower(): value for name, value in _lib.USES.items()}

Raw = Tuple[int, int, int, int, int, int, int, int]


def raw(
    data: int, rows: int, cols: int, row_stride: int, col_stride: int, dtype: int, device: int = HOST
) -> Optional[Raw]:
    """The matrix at `data`, strides counted in elements; None where its strides are not those of a row- or column-major
    matrix, so that it has to be copied."""
    if col_stride == 1 or cols <= 1:
        if rows <= 1 or row_stride >= cols:
            ld = row_stride if rows > 1 and row_stride > cols else cols
            return (data, rows, cols, ld or 1, dtype, ROW_MAJOR, int(device >= 0), device if device > 0 else 0)
    if row_stride == 1 or rows <= 1:
        if cols <= 1 or col_stride >= rows:
            ld = col_stride if cols > 1 and col_stride > rows else rows
            return (data, rows, cols, ld or 1, dtype, COL_MAJOR, int(device >= 0), device if device > 0 else 0)
    return None


def choice(table: Dict[str, int], value: Union[str, int, None], what: str) -> int:
    """A named option as its number."""
    if value is None:
        return 0
    number = table.get(value) if isinstance(value, str) else None
    if number is None:
        raise ArgumentError(f"{what} is {value!r}: it is one of {', '.join(map(repr, table))}")
    return number


def dtype_code(dtype: Any, what: str = "dtype") -> int:
    """The number of a dtype, given as its name or as a dtype of numpy, torch or JAX."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if name is None:
        name = str(dtype).rsplit(".", 1)[-1]  # torch.float32
    code = DTYPE_CODES.get(name)
    if code is None:
        raise DtypeError(f"{what} is {dtype!r}: it is one of 'float32', 'bfloat16', 'float16'")
    return code


class Stats(NamedTuple):
    """What one product did; the fields of esmm_stats."""

    kernel: str
    reason: str
    threads: int
    strip_rows: int
    strip_cols: int
    density_a: float
    strip_density_a: float
    strip_density_b: float
    joint_density: float
    skipped_share: float
    flop_useful: float
    flop_dense: float
    seconds_plan: float
    seconds_extract: float
    seconds_multiply: float
    seconds_total: float
    weights_bytes: int
    staged_bytes: int


class Verdict(NamedTuple):
    """The plan's verdict on one kernel for one product."""

    kernel: str
    can_run: bool
    competes: bool
    chosen: bool
    seconds: float
    text: str


class Format(NamedTuple):
    """A format of B: 'dense', 'bsr' with its blocks, or 'nm' with its groups."""

    kind: str
    block_rows: int = 0
    block_cols: int = 0
    keep: int = 0
    group: int = 0
    group_cols: int = 0

    def __str__(self) -> str:
        if self.kind == "bsr":
            return f"bsr:{self.block_rows}x{self.block_cols}"
        if self.kind == "nm":
            return f"nm:{self.keep}:{self.group}" + (f":{self.group_cols}" if self.group_cols > 1 else "")
        return self.kind


def path_bytes(path: Union[str, bytes, "os.PathLike[str]"]) -> bytes:
    """A path for the library, whose strings end at a NUL: one in it would name another file."""
    made = os.fsencode(path)
    if b"\0" in made:
        raise ArgumentError(f"path is {os.fspath(path)!r}: it must not have a NUL character in it")
    return made


class WeightsInfo(NamedTuple):
    """What prepared weights are; the fields of esmm_weights_info."""

    rows: int
    cols: int
    dtype: str
    use: str
    strict: bool
    strip_cols: int
    element_density: float
    strip_density: float
    bytes: int
    format: Format
    blocks: int
    block_density: float


_KINDS = ("dense", "bsr", "nm")
_USE_NAMES = tuple(USES)


def parse_format(text: Union[str, Format, None]) -> Format:
    """'dense', 'bsr', 'bsr:64', 'bsr:32x64', '2:4', 'nm:2:4', 'nm:2:4:8' (groups chosen for 8 columns together)."""
    if text is None:
        return Format("dense")
    if isinstance(text, Format):
        return text
    if isinstance(text, str):
        kind, _, rest = text.partition(":")
        if kind.isdigit():
            kind, rest = "nm", text
        try:
            if kind == "dense" and not rest:
                return Format("dense")
            if kind == "bsr":
                size = [int(part) for part in rest.split("x")] if rest else [0]
                if len(size) <= 2 and (not rest or min(size) > 0):
                    return Format("bsr", size[0], size[-1])
            if kind == "nm":
                numbers = [int(part) for part in rest.split(":")] if rest else [2, 4]
                if 2 <= len(numbers) <= 3 and min(numbers) > 0:
                    return Format("nm", 0, 0, *numbers)
        except ValueError:
            pass
    raise ArgumentError(f"format is {text!r}: it is 'dense', 'bsr:ROWSxCOLS' as in 'bsr:32', or 'nm:N:M' as in '2:4'")


def format_struct(text: Union[str, Format, None]) -> _lib.Format:
    f = parse_format(text)
    return _lib.Format(choice({k: i for i, k in enumerate(_KINDS)}, f.kind, "format"), *f[1:])


class Handle:
    """A C object: freed when the last reference goes."""

    __slots__ = ("value", "_free", "__weakref__")

    def __init__(self, value: int, free: Callable[[int], None]) -> None:
        self.value = value
        self._free = free

    def __del__(self) -> None:
        self._free(self.value)


class ContextHandle(Handle):
    """A C context. Its memory can only be freed with it, and Python finalizes objects in any order: so the last of them
    frees the context."""

    __slots__ = ("users", "_over")

    def __init__(self, value: int, free: Callable[[int], None]) -> None:
        super().__init__(value, free)
        self.users = 0  # allocations; changed under the context's lock
        self._over = False

    def __del__(self) -> None:
        self._over = True
        if self.users == 0:
            self._free(self.value)

    def release(self) -> None:
        self.users -= 1
        if self._over and self.users == 0:
            self._free(self.value)


class _Closable:
    """The base of contexts, weights and patterns: a handle that can be freed early."""

    _handle: Optional[Handle] = None
    _what = ""

    def _live(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise ArgumentError(f"this {self._what} is closed")
        return handle

    @property
    def handle(self) -> int:
        """The C pointer, as a number; valid while this object is open."""
        return self._live().value

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Frees the memory now, or when the calls that use it have ended. Closing twice does nothing."""
        self._handle = None

    def __enter__(self):  # type: ignore[no-untyped-def]
        self._live()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Weights(_Closable):
    """Prepared B. Immutable: any number of threads may multiply with it, and copies are the object itself."""

    _what = "Weights object"

    def __init__(self, handle: Handle, device: str) -> None:
        self._handle = handle
        info = _lib.WeightsInfo(size=ctypes.sizeof(_lib.WeightsInfo))
        status = lib.esmm_weights_get_info(handle.value, ctypes.byref(info))
        if status:
            raise error(status, "weights cannot be asked what they are")
        f = info.format
        self.info = WeightsInfo(
            info.rows,
            info.cols,
            DTYPE_NAMES[info.dtype],
            _USE_NAMES[info.use],
            bool(info.strict),
            info.strip_cols,
            info.element_density,
            info.strip_density,
            info.bytes,
            Format(_KINDS[f.kind], f.block_rows, f.block_cols, f.keep, f.group, f.group_cols),
            info.blocks,
            info.block_density,
        )
        self.device = device
        self.device_index = index_of(device)

    @property
    def shape(self) -> Tuple[int, int]:
        return self.info.rows, self.info.cols

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def format(self) -> Format:
        return self.info.format

    @property
    def nbytes(self) -> int:
        return self.info.bytes

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes a weights file; an old one stays until the new one is whole."""
        context(self.device).save(self, os.fspath(path))

    def __copy__(self) -> "Weights":
        return self

    def __deepcopy__(self, memo: Any) -> "Weights":
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        from ._files import dumps, loads

        return loads, (dumps(self), self.device)

    def __repr__(self) -> str:
        i = self.info
        if self.closed:
            return f"<esmm.Weights {i.rows} x {i.cols}, closed>"
        return (
            f"<esmm.Weights {i.rows} x {i.cols} {i.dtype} {i.format} on {self.device}, {i.element_density:.1%} nonzero>"
        )


class Pattern(_Closable):
    """The bitmaps of one matrix: a bit for each k of each strip of rows, 1 where the strip has a nonzero."""

    _what = "Pattern object"

    def __init__(self, handle: Handle, ctx: "Context") -> None:
        self._handle = handle
        self._context = ctx
        info = _lib.PatternInfo(size=ctypes.sizeof(_lib.PatternInfo))
        ctx.call(lib.esmm_pattern_get_info, handle.value, ctypes.byref(info))
        self.rows, self.k, self.strip_rows = info.rows, info.k, info.strip_rows
        self.strips, self.words = info.strips, info.words
        self.density: float = info.density  # the set share of the bits

    def coarsen(self, strip_rows: int) -> "Pattern":
        """Strips of more rows: a multiple of this pattern's."""
        return self._context.new_pattern(lib.esmm_pattern_coarsen, self._live().value, strip_rows)

    def read(self, first: int, strips: int, address: int) -> None:
        """Copies the bitmaps of `strips` strips to `address`, `words` 64-bit words each."""
        self._context.call(lib.esmm_pattern_bits, self._live().value, first, strips, address)

    def __reduce__(self) -> Any:
        raise TypeError("an esmm.Pattern cannot be pickled: it is of one matrix; extract it again")

    def __repr__(self) -> str:
        return f"<esmm.Pattern {self.rows} x {self.k}, strips of {self.strip_rows}, {self.density:.1%} set>"


def index_of(device: str) -> int:
    """-1 for 'cpu', 1 for 'cuda:1'."""
    return int(device.partition(":")[2] or 0) if device.startswith("cuda") else HOST


_pack_matrix = _lib.packer(_lib.Matrix).pack_into
_pack_opts = _lib.packer(_lib.MatmulOpts).pack_into
_pack_size = struct.Struct("@N").pack_into
_unpack_stats = _lib.packer(_lib.Stats).unpack_from
_SIZE_OPTS, _SIZE_STATS = ctypes.sizeof(_lib.MatmulOpts), ctypes.sizeof(_lib.Stats)
_MATRIX = ctypes.sizeof(_lib.Matrix)
# A context's block of memory for the arguments of a call.
_A, _C, _RESIDUAL, _OPTS = 0, _MATRIX, 2 * _MATRIX, 3 * _MATRIX
_STATS = _OPTS + _SIZE_OPTS
_SCALARS = _STATS + _SIZE_STATS
_OUT = _SCALARS + 8
_BLOCK = _OUT + 16
_pack_scalars = struct.Struct("@ff").pack_into


class _Memory:
    """Frees what a context allocated. An array may die in any thread, in the middle of anything, so this never waits
    for the context's lock: if another thread holds it, that thread frees the memory afterwards."""

    def __init__(self, handle: ContextHandle, lock: Any) -> None:
        self._handle, self._lock = handle, lock
        self._pending: List[int] = []
        self._free_now = lib.esmm_memory_free

    def free(self, pointer: int) -> None:
        self._pending.append(pointer)
        self.drain()

    def drain(self) -> None:
        if self._pending and self._lock.acquire(False):
            try:
                while self._pending:
                    self._free_now(self._handle.value, self._pending.pop())
                    self._handle.release()
            finally:
                self._lock.release()


def _choice(value: Optional[bool]) -> int:
    """An option of a context: None is its default."""
    return 0 if value is None else 1 if value else -1


class Context(_Closable):
    """A device with its threads, scratch memory and cost constants.

    Most callers need none: functions use the calling thread's context for the weights' device. One
    context may be used by several threads; its calls then follow one another.
    """

    _what = "Context object"

    def __init__(
        self,
        device: Optional[str] = None,
        threads: int = 0,
        force: Optional[str] = None,
        remember: Optional[bool] = None,
        tuning_cache: bool = True,
        deterministic: Optional[bool] = None,
    ) -> None:
        if device is not None and not isinstance(device, str):
            raise ArgumentError(f"device is {device!r}: it is a string, 'auto', 'cpu', 'cuda' or 'cuda:0'")
        if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= 1024:
            raise ArgumentError(f"threads is {threads!r}: it is a number from 1 to 1024, or 0 for the default")
        text = ctypes.create_string_buffer(512)
        opts = _lib.CtxOpts(
            size=ctypes.sizeof(_lib.CtxOpts),
            device=None if device is None else device.encode(),
            threads=threads,
            force=None if force is None else force.encode(),
            no_tuning_cache=not tuning_cache,
            error=ctypes.addressof(text),
            error_size=len(text),
            remember=_choice(remember),
            deterministic=_choice(deterministic),
        )
        out = ctypes.c_void_p()
        status = lib.esmm_ctx_create(ctypes.byref(out), ctypes.byref(opts))
        if status:
            raise error(status, text.value.decode() or lib.esmm_status_str(status).decode())
        assert out.value is not None
        self._take(out.value, lib.esmm_ctx_free)

    @classmethod
    def around(cls, pointer: int) -> "Context":
        """A context that C code made and still owns."""
        made = cls.__new__(cls)
        made._take(pointer, lambda _: None)
        return made

    def _take(self, pointer: int, free: Callable[[int], None]) -> None:
        self._handle = ContextHandle(pointer, free)
        self._lock = threading.RLock()
        self._block = ctypes.create_string_buffer(_BLOCK)
        self._at = ctypes.addressof(self._block)
        _pack_size(self._block, _STATS, _SIZE_STATS)
        self._stream = 0
        self.device: str = lib.esmm_ctx_device(pointer).decode()
        self.device_index: int = index_of(self.device)
        self.device_name: str = lib.esmm_ctx_device_name(pointer).decode()
        self.features: str = lib.esmm_ctx_features(pointer).decode()
        self.device_reason: str = lib.esmm_ctx_device_reason(pointer).decode()
        self.threads: int = lib.esmm_ctx_threads(pointer)

    # ---- calls ----

    def failed(self, status: int, handle: Handle) -> Error:
        text = lib.esmm_ctx_error(handle.value)
        return error(status, text.decode(errors="replace") if text else lib.esmm_status_str(status).decode())

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls function(ctx, *arguments) and raises its error."""
        handle = self._live()
        with self._lock:
            status = function(handle.value, *arguments)
            if status:
                raise self.failed(status, handle)
        if self._memory is not None:
            self._memory.drain()

    @property
    def stream(self) -> int:
        """The CUDA stream that this context's work goes to, as a number; 0 is the default stream."""
        return self._stream

    @stream.setter
    def stream(self, stream: int) -> None:
        if stream != self._stream:
            self.call(lib.esmm_ctx_set_stream, stream)
            self._stream = stream

    def synchronize(self) -> None:
        """Waits for all work of this context."""
        self.call(lib.esmm_ctx_synchronize)

    # ---- weights ----

    def _new_weights(self, function: Any, *arguments: Any) -> Weights:
        out = ctypes.c_void_p()
        self.call(function, *arguments, ctypes.byref(out))
        assert out.value is not None
        return Weights(Handle(out.value, lib.esmm_weights_free), self.device)

    def prepare(
        self,
        b: Union[Raw, _lib.Bsr],
        use: str = "any",
        format: Union[str, Format, None] = None,
        strict: bool = False,
        max_bytes_ratio: float = 0.0,
    ) -> Weights:
        """esmm_prepare, or esmm_prepare_bsr where b is a _lib.Bsr."""
        opts = _lib.PrepareOpts(
            ctypes.sizeof(_lib.PrepareOpts),
            choice(USES, use, "use"),
            bool(strict),
            max_bytes_ratio,
            format_struct(format),
        )
        if isinstance(b, _lib.Bsr):
            return self._new_weights(lib.esmm_prepare_bsr, ctypes.byref(b), ctypes.byref(opts))
        return self._new_weights(lib.esmm_prepare, ctypes.byref(_lib.Matrix(*b)), ctypes.byref(opts))

    def load(self, path: str) -> Weights:
        out = ctypes.c_void_p()
        self.call(lib.esmm_weights_load, path_bytes(path), ctypes.byref(out))
        assert out.value is not None
        return Weights(Handle(out.value, lib.esmm_weights_free), self.device)

    def save(self, weights: Weights, path: str) -> None:
        handle = weights._live()
        self.call(lib.esmm_weights_save, handle.value, path_bytes(path))

    def to_dense(self, weights: Weights, out: Raw) -> None:
        handle = weights._live()
        self.call(lib.esmm_weights_to_dense, handle.value, ctypes.byref(_lib.Matrix(*out)))

    def copy(self, source: Raw, target: Raw) -> None:
        """Copies a matrix, converting dtype and order, between host and GPU too."""
        self.call(lib.esmm_matrix_copy, ctypes.byref(_lib.Matrix(*source)), ctypes.byref(_lib.Matrix(*target)))

    # ---- patterns ----

    def new_pattern(self, function: Any, *arguments: Any) -> Pattern:
        out = ctypes.c_void_p()
        self.call(function, *arguments, ctypes.byref(out))
        assert out.value is not None
        return Pattern(Handle(out.value, lib.esmm_pattern_free), self)

    def extract(self, a: Raw, strip_rows: int, of_b: bool = False) -> Pattern:
        function = lib.esmm_pattern_extract_b if of_b else lib.esmm_pattern_extract
        return self.new_pattern(function, ctypes.byref(_lib.Matrix(*a)), strip_rows)

    # ---- products ----

    def matmul(
        self,
        a: Union[Raw, _lib.Bsr],
        weights: Weights,
        c: Raw,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: int = 0,
        activation: int = 0,
        strict: bool = False,
        force: Optional[str] = None,
        a_pattern: Optional[Pattern] = None,
        residual: Optional[Raw] = None,
        gate: Optional[Weights] = None,
        gate_bias: int = 0,
        column_nonzeros: int = 0,
        c_strip_rows: int = 0,
        want_stats: bool = False,
    ) -> Tuple[Optional[Stats], Optional[Pattern]]:
        """esmm_matmul on raw memory: pointers are numbers, activation is a value of ACTIVATIONS. With want_stats the
        first result is the call's statistics; with c_strip_rows the second is C's pattern."""
        if self._handle is None or weights._handle is None:
            self._live(), weights._live()
        handle, w = self._handle, weights._handle  # held for the length of the call
        assert handle is not None and w is not None
        at, block = self._at, self._block
        with self._lock:
            opts: Optional[int] = None
            if (
                bias
                or activation
                or alpha != 1.0
                or beta
                or residual
                or gate
                or force
                or strict
                or a_pattern
                or gate_bias
                or column_nonzeros
                or c_strip_rows
            ):
                opts = self._fill(
                    alpha,
                    beta,
                    bias,
                    activation,
                    strict,
                    force,
                    a_pattern,
                    residual,
                    gate,
                    gate_bias,
                    column_nonzeros,
                    c_strip_rows,
                )
                _held = (a_pattern and a_pattern._handle, gate and gate._handle)
            _pack_matrix(block, _C, *c, 0, 0, 0)
            if isinstance(a, tuple):
                _pack_matrix(block, _A, *a, 0, 0, 0)
                status = lib.esmm_matmul(handle.value, at, w.value, at + _C, opts, at + _STATS if want_stats else None)
            else:
                status = lib.esmm_matmul_bsr(
                    handle.value, ctypes.byref(a), w.value, at + _C, opts, at + _STATS if want_stats else None
                )
            if status:
                raise self.failed(status, handle)
            stats = self._read_stats() if want_stats else None
            made = ctypes.c_void_p.from_address(at + _OUT).value if c_strip_rows else None
        if self._memory is not None:
            self._memory.drain()
        pattern = Pattern(Handle(made, lib.esmm_pattern_free), self) if made else None
        return stats, pattern

    _forced: Optional[bytes] = None
    _memory: Optional[_Memory] = None

    def _fill(
        self,
        alpha: float,
        beta: float,
        bias: int,
        activation: int,
        strict: bool,
        force: Optional[str],
        a_pattern: Optional[Pattern],
        residual: Optional[Raw],
        gate: Optional[Weights],
        gate_bias: int,
        column_nonzeros: int,
        c_strip_rows: int,
    ) -> int:
        """Fills the options of a call in the context's block; their address."""
        at, block = self._at, self._block
        _pack_scalars(block, _SCALARS, alpha, beta)
        if residual is not None:
            _pack_matrix(block, _RESIDUAL, *residual, 0, 0, 0)
        text = 0
        if force is not None:
            self._forced = force.encode()
            text = ctypes.cast(ctypes.c_char_p(self._forced), ctypes.c_void_p).value or 0
        _pack_opts(
            block,
            _OPTS,
            _SIZE_OPTS,
            at + _SCALARS,
            at + _SCALARS + 4,
            bias,
            activation,
            bool(strict),
            text,
            a_pattern._live().value if a_pattern is not None else 0,
            at + _RESIDUAL if residual is not None else 0,
            gate._live().value if gate is not None else 0,
            gate_bias,
            column_nonzeros,
            c_strip_rows,
            at + _OUT if c_strip_rows else 0,
            0,
        )
        return at + _OPTS

    def _read_stats(self) -> Stats:
        fields = _unpack_stats(self._block, _STATS)
        kernel, reason = fields[1].partition(b"\0")[0].decode(), fields[2].partition(b"\0")[0].decode(errors="replace")
        return Stats(kernel, reason, *fields[3:])

    def _describe(self, a: Raw, c: Raw, options: Dict[str, Any]) -> Any:
        """A, C and the options of matmul() in the block that functions of the library read; under the lock."""
        given = dict(
            alpha=1.0,
            beta=0.0,
            bias=0,
            activation=0,
            strict=False,
            force=None,
            a_pattern=None,
            residual=None,
            gate=None,
            gate_bias=0,
            column_nonzeros=0,
            c_strip_rows=0,
        )
        given.update(options)
        opts = self._fill(**given)  # type: ignore[arg-type]
        _pack_matrix(self._block, _A, *a, 0, 0, 0)
        _pack_matrix(self._block, _C, *c, 0, 0, 0)
        return opts

    def tune_weights(self, a: Raw, weights: Weights, c: Raw, **options: Any) -> None:
        """esmm_tune_weights; options as matmul() takes them."""
        handle, w = self._live(), weights._live()
        with self._lock:
            opts = self._describe(a, c, options)
            status = lib.esmm_tune_weights(handle.value, self._at, w.value, self._at + _C, opts)
            if status:
                raise self.failed(status, handle)

    def explain(self, a: Raw, weights: Weights, c: Raw, **options: Any) -> List[Verdict]:
        """The plan's verdict on every kernel; options as matmul() takes them."""
        handle, w = self._live(), weights._live()
        room = max(1, lib.esmm_kernel_count())
        verdicts = (_lib.Verdict * room)()
        count = ctypes.c_int(room)
        with self._lock:
            opts = self._describe(a, c, options)
            status = lib.esmm_explain(
                handle.value,
                self._at,
                w.value,
                self._at + _C,
                opts,
                ctypes.byref(verdicts),
                ctypes.sizeof(_lib.Verdict),
                ctypes.byref(count),
            )
            if status:
                raise self.failed(status, handle)
        return [
            Verdict(
                v.kernel.decode(),
                bool(v.can_run),
                bool(v.competes),
                bool(v.chosen),
                v.seconds,
                v.text.decode(errors="replace"),
            )
            for v in verdicts[: min(room, count.value)]
        ]

    # ---- memory ----

    def alloc(self, nbytes: int) -> Handle:
        """Memory of the context's device, aligned to 256 bytes; it holds its context."""
        out = ctypes.c_void_p()
        handle = self._live()
        assert isinstance(handle, ContextHandle)
        with self._lock:
            if self._memory is None:
                self._memory = _Memory(handle, self._lock)
            self._memory.drain()
            self.call(lib.esmm_memory_alloc, nbytes, ctypes.byref(out))
            handle.users += 1
            return Handle(out.value or 0, self._memory.free)

    def __reduce__(self) -> Any:
        raise TypeError("an esmm.Context cannot be pickled: it is a device of this process")

    def __repr__(self) -> str:
        if self.closed:
            return "<esmm.Context, closed>"
        return f"<esmm.Context on {self.device} ({self.device_name}), {self.threads} threads>"


# ---- each thread's own contexts ----


class _Local(threading.local):
    def __init__(self) -> None:
        self.contexts: Dict[Tuple[Optional[str], int], Context] = {}
        self.device: Optional[str] = None
        self.threads = 0


local = _Local()


def context(device: Optional[str] = None) -> Context:
    """The calling thread's context for a device: 'cpu', 'cuda:0', ...; None for what esmm.device() says."""
    if device is None:
        device = local.device
    key = (device, local.threads)
    found = local.contexts.get(key)
    if found is None or found._handle is None:
        made = Context(device, local.threads)
        # "auto" and "cuda" are other names of a context that may be there already.
        found = local.contexts.get((made.device, local.threads))
        if found is None or found._handle is None:
            found = local.contexts[(made.device, local.threads)] = made
        local.contexts[key] = found
    return found
