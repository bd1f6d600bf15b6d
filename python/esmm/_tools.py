"""Tools beside the product: patterns, pruning, test data, tuning, and facts about this machine."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from . import _core, _lib
from ._arrays import address, numpy_dtype, operand
from ._core import Context, Format, Pattern, Weights
from ._errors import ArgumentError, DtypeError
from ._lib import lib
from ._product import bits_of, device_of, integer, number


def _context(x: Any, context: Optional[Context]) -> Context:
    return context if context is not None else _core.context(device_of(x))


# ---- patterns ----


def pattern(
    a: Any, strip_rows: int = 32, *, columns: bool = False, dtype: Any = None, context: Optional[Context] = None
) -> Pattern:
    """The pattern of a matrix for strips of that many rows; with columns=True, of columns, as for a B.

    >>> import numpy as np, esmm
    >>> a = np.zeros((4, 10), np.float32); a[0, 3] = a[3, 9] = 1
    >>> p = esmm.pattern(a, strip_rows=2)
    >>> p.density, [hex(word) for word in esmm.pattern_bits(p)[:, 0]]
    (0.1, ['0x8', '0x200'])
    """
    ctx = _context(a, context)
    x = operand(a, "a", ctx, bits_of(dtype))
    return ctx.extract(x.raw, integer(strip_rows, "strip_rows", 1), columns)


def _pattern(pattern: Any, what: str) -> Pattern:
    if not isinstance(pattern, Pattern):
        raise DtypeError(f"{what} is a {type(pattern).__name__}: it has to be what esmm.pattern() returned")
    return pattern


def pattern_bits(pattern: Pattern) -> Any:
    """The bitmaps: an array of uint64 [strips, words]; bit i of word j stands for k = 64 j + i."""
    _pattern(pattern, "pattern")
    bits = np.zeros((pattern.strips, pattern.words), np.uint64)
    if bits.size:
        pattern.read(0, pattern.strips, address(bits))
    return bits


def reorder(rows: Pattern, strip_rows: int) -> Tuple[Any, Pattern]:
    """An order of A's rows that puts similar ones into the same strip, and the pattern in that order. `rows` is a
    pattern of single rows."""
    order = np.empty(max(_pattern(rows, "rows").rows, 1), np.int64)
    made = rows._context.new_pattern(
        lib.esmm_pattern_reorder,
        rows._live().value,
        integer(strip_rows, "strip_rows", 1),
        address(order),
    )
    return order[: rows.rows], made


class SkipStats(NamedTuple):
    """The shares that a tiled kernel would skip; the fields of esmm_skip_stats."""

    block_k: int
    warp_k: int
    block_skipped: float
    warp_skipped: float
    dot_skipped: float
    joint_density: float


def skip_stats(a: Pattern, b: Pattern, *, block_k: int = 0, warp_k: int = 0) -> SkipStats:
    """The shares of A B that would be skipped, from the pattern of A's rows and that of B's columns."""
    for name, pattern in (("a", a), ("b", b)):
        _pattern(pattern, name)
    stats = _lib.SkipStats(ctypes.sizeof(_lib.SkipStats), integer(block_k, "block_k"), integer(warp_k, "warp_k"))
    a._context.call(lib.esmm_pattern_skip_stats, a._live().value, b._live().value, ctypes.byref(stats))
    return SkipStats(*(getattr(stats, field) for field in SkipStats._fields))


class Summary(NamedTuple):
    """The result of inspect()."""

    rows: int
    cols: int
    dtype: str
    element_density: float
    empty_rows: int
    empty_cols: int
    row_strips: Dict[int, float]
    col_strips: Dict[int, float]

    def __str__(self) -> str:
        lines = [f"{self.rows} x {self.cols} {self.dtype}, {self.element_density:.2%} nonzero"]
        lines += [f"{self.empty_rows} rows and {self.empty_cols} columns are zero"]
        for what, table in (("rows", self.row_strips), ("columns", self.col_strips)):
            shares = ", ".join(f"{share:.1%} in {strip}" for strip, share in table.items())
            lines += [f"alive in strips of {what}: {shares}"]
        return "\n".join(lines)


def inspect(x: Any, *, dtype: Any = None, context: Optional[Context] = None) -> Summary:
    """Where the zeros of a matrix lie: what share of its elements is nonzero, and of its strips alive. The rows' strips
    count where it is an A, the columns' where it is a B. The command `esmm inspect` does it for files.

    >>> import numpy as np, esmm
    >>> x = np.zeros((64, 64), np.float32); x[:, ::4] = 1
    >>> print(esmm.inspect(x))
    64 x 64 float32, 25.00% nonzero
    0 rows and 48 columns are zero
    alive in strips of rows: 25.0% in 8, 25.0% in 32, 25.0% in 128
    alive in strips of columns: 100.0% in 8, 100.0% in 32, 100.0% in 128
    """
    ctx = _context(x, context)
    y = operand(x, "x", ctx, bits_of(dtype))
    single, across = ctx.extract(y.raw, 1), ctx.extract(y.raw, 1, True)
    rows, cols = y.raw[1], y.raw[2]
    # A row whose pattern is empty is zero; so is a column whose pattern, B's way round, is.
    empty = [int((~pattern_bits(p).any(axis=1)).sum()) if p.words else p.strips for p in (single, across)]
    strips = (8, 32, 128)
    return Summary(
        rows,
        cols,
        _core.DTYPE_NAMES[y.raw[4]],
        single.density,
        empty[0],
        empty[1],
        {s: single.coarsen(s).density for s in strips},
        {s: across.coarsen(s).density for s in strips},
    )


# ---- pruning ----


SCOPES = {name[len("ESMM_PRUNE_") :].lower(): value for name, value in _lib.PRUNE_SCOPES.items()}


class PruneReport(NamedTuple):
    """What pruning dropped; the fields of esmm_prune_report."""

    kept: int
    dropped: int
    norm: float
    norm_dropped: float


def prune(
    b: Any,
    format: Union[str, Format] = "dense",
    *,
    density: Optional[float] = None,
    top: int = 0,
    scope: str = "column",
    soft: bool = False,
    input_norms: Any = None,
    out: Any = None,
    dtype: Any = None,
    context: Optional[Context] = None,
) -> Tuple[Any, PruneReport]:
    """b [k, n] with elements set to zero so that it fits a format ('2:4', 'bsr:32' with the density of blocks to keep),
    or, without one, so that the `top` elements of largest |b| are left, or their share `density`: those of each column,
    or with scope='matrix' of all. As a new numpy array, and what was dropped. out=b prunes in place; a tensor on a GPU
    is always pruned in place, and has to be given as out too.

    input_norms [k]: |b| counts times k's norm in the input. soft: what '2:4' or top keeps shrinks by the largest |b|
    that goes, then all is multiplied by the factor that brings it closest to b.

    >>> import numpy as np, esmm
    >>> b, report = esmm.prune(np.array([[1], [4], [-3], [2]], np.float32), "2:4")
    >>> b.ravel().tolist(), report.kept, report.dropped
    ([0.0, 4.0, -3.0, 0.0], 2, 2)
    >>> esmm.prune(np.array([[1, 5], [4, 6], [-3, 7]], np.float32), top=1)[0].tolist()
    [[0.0, 0.0], [4.0, 0.0], [0.0, 7.0]]
    """
    ctx = _context(b, context)
    bits = bits_of(dtype)
    wanted = _core.parse_format(format)
    if wanted.kind == "bsr" and density is None:
        raise ArgumentError(f"density is missing: pruning to {wanted} needs the share of blocks to keep")
    if out is None:
        out = np.array(b if isinstance(b, np.ndarray) else np.asarray(b), order="K", copy=True)
    elif out is not b:
        raise ArgumentError("out is another array than b: leave it out, or give b itself to prune in place")
    x = operand(out, "b", ctx, bits, write=True)
    opts = _lib.PruneOpts(ctypes.sizeof(_lib.PruneOpts), _core.format_struct(wanted))
    opts.density = 0.0 if density is None else number(density, "density")
    opts.top = integer(top, "top")
    opts.scope = _core.choice(SCOPES, scope, "scope")
    opts.soft = bool(soft)
    if input_norms is not None:
        norms = np.ascontiguousarray(input_norms, np.float32)
        if norms.shape != (x.raw[1],):
            raise ArgumentError(f"input_norms is of shape {norms.shape}: it has to be ({x.raw[1]},), one for each k")
        opts.input_norms = address(norms)
    report = _lib.PruneReport(ctypes.sizeof(_lib.PruneReport))
    ctx.call(lib.esmm_prune, ctypes.byref(_lib.Matrix(*x.raw)), ctypes.byref(opts), ctypes.byref(report))
    return out, PruneReport(report.kept, report.dropped, report.norm, report.norm_dropped)


def fits(
    b: Any, format: Union[str, Format] = "2:4", *, dtype: Any = None, context: Optional[Context] = None
) -> Optional[Tuple[int, int]]:
    """Does b [k, n] fit an N:M format? None if so, else (k, column) of the first group that has too many nonzeros.

    >>> import numpy as np, esmm
    >>> esmm.fits(np.ones((8, 2), np.float32), "2:4")
    (0, 0)
    """
    ctx = _context(b, context)
    x = operand(b, "b", ctx, bits_of(dtype))
    k, col = ctypes.c_int64(), ctypes.c_int64()
    wanted = _core.format_struct(format)
    ctx.call(
        lib.esmm_format_check,
        ctypes.byref(_lib.Matrix(*x.raw)),
        ctypes.byref(wanted),
        ctypes.byref(k),
        ctypes.byref(col),
    )
    return None if k.value < 0 else (k.value, col.value)


# ---- test data ----

GENERATORS = {name[len("ESMM_GEN_") :].lower(): value for name, value in _lib.GENERATORS.items()}


def generate(
    kind: str,
    rows: int,
    cols: int,
    *,
    density: float = 1.0,
    seed: int = 1,
    operand: str = "a",
    strip: int = 0,
    pattern: Optional[str] = None,
    dead: float = 0.0,
    activation: Optional[str] = None,
    integers: bool = False,
    dtype: Any = "float32",
    context: Optional[Context] = None,
) -> Any:
    """A seeded matrix with zeros in known places, the same on every machine: 'dense', 'random', 'blockwise', 'pattern'
    or 'activations', or 'early', 'middle', 'late' for those of a layer of a trained net. operand: 'a' is [m, k], 'b' is
    [k, n].

    >>> import esmm
    >>> a = esmm.generate("random", 100, 100, density=0.1)
    >>> bool(0.05 < (a != 0).mean() < 0.15)
    True
    """
    ctx = context if context is not None else _core.context("cpu")
    code = _core.dtype_code(dtype)
    g = _lib.Generator(ctypes.sizeof(_lib.Generator))
    preset = kind in ("early", "middle", "late")
    g.kind = GENERATORS["activations"] if preset else _core.choice(GENERATORS, kind, "kind")
    g.operand = _core.choice({"a": 0, "b": 1}, operand, "operand")
    g.seed = integer(seed, "seed")
    g.density, g.dead = number(density, "density"), number(dead, "dead")
    g.strip = integer(strip, "strip")
    g.pattern = None if pattern is None else pattern.encode()
    g.activation = _core.choice(_core.ACTIVATIONS, activation, "activation")
    g.integers = bool(integers)
    if preset:
        ctx.call(lib.esmm_generator_preset, kind.encode(), ctypes.byref(g))
    rows, cols = integer(rows, "rows"), integer(cols, "cols")
    out = np.empty((rows, cols), numpy_dtype(code))
    raw = (address(out), rows, cols, cols or 1, code, 0, 0, 0)
    ctx.call(lib.esmm_generate, ctypes.byref(g), ctypes.byref(_lib.Matrix(*raw)))
    return out


# ---- this machine ----


class KernelInfo(NamedTuple):
    """One kernel of the library."""

    name: str
    doc: str
    backend: str
    available: bool
    deterministic: bool
    skips: bool
    formats: Tuple[str, ...]


def kernels(*, context: Optional[Context] = None) -> List[KernelInfo]:
    """All kernels, ordered by name.

    >>> import esmm
    >>> any(k.name.startswith("joint_f32") and k.available for k in esmm.kernels(context=esmm.Context("cpu")))
    True
    """
    ctx = context if context is not None else _core.context()
    found = []
    for i in range(lib.esmm_kernel_count()):
        k = _lib.KernelInfo(ctypes.sizeof(_lib.KernelInfo))
        ctx.call(lib.esmm_kernel_get, i, ctypes.byref(k))
        formats = tuple(name for bit, name in enumerate(("dense", "bsr", "nm")) if k.formats >> bit & 1)
        found.append(
            KernelInfo(
                k.name.decode(),
                k.doc.decode(),
                k.backend.decode(),
                bool(k.available),
                bool(k.flags & 1),
                bool(k.flags & 2),
                formats,
            )
        )
    return found


class Info(NamedTuple):
    """What info() says."""

    version: str
    source_id: str
    library: str
    device: str
    device_name: str
    features: str
    device_reason: str
    threads: int
    tuned: bool
    tune_path: str

    def __str__(self) -> str:
        return "\n".join(f"{name:<14} {value}" for name, value in zip(self._fields, self))


def info(*, context: Optional[Context] = None) -> Info:
    """The library and the device that products run on by default; device_reason says why there is no GPU.

    >>> import esmm
    >>> esmm.info().version == esmm.__version__
    True
    """
    ctx = context if context is not None else _core.context()
    handle = ctx._live().value
    return Info(
        lib.esmm_version_str().decode(),
        lib.esmm_source_id().decode(),
        _lib.library_path(),
        ctx.device,
        ctx.device_name,
        ctx.features,
        ctx.device_reason,
        ctx.threads,
        bool(lib.esmm_is_tuned(handle)),
        lib.esmm_tune_path(handle).decode(),
    )


def tune(
    *, save: bool = True, progress: Optional[Callable[[int, int], None]] = None, context: Optional[Context] = None
) -> None:
    """Measures the plan's cost constants on this machine, a few seconds; with save, for later processes too. progress
    is called with done and total."""
    ctx = context if context is not None else _core.context()
    failures: List[BaseException] = []

    def report(_user: Any, done: int, total: int) -> None:
        if progress is not None and not failures:
            try:
                progress(done, total)
            except BaseException as e:  # it cannot pass through C: raised after the call
                failures.append(e)

    ctx.call(lib.esmm_tune, int(bool(save)), _lib.PROGRESS(report), None)
    if failures:
        raise failures[0]


# ---- memory of calls ----


class Recollection(NamedTuple):
    """What a context remembers of A's density; the fields of esmm_recollection."""

    known: bool
    density_a: float
    strip_density_a: float
    joint_density: float
    strip_rows: int
    calls: int
    reports: int


def _weights(weights: Any) -> Weights:
    if not isinstance(weights, Weights):
        raise DtypeError(f"weights is a {type(weights).__name__}: it has to be what esmm.prepare() returned")
    return weights


def recall(weights: Weights, m: int, *, context: Optional[Context] = None) -> Recollection:
    """The context's memory of products of m rows with these weights."""
    ctx = context if context is not None else _core.context(_weights(weights).device)
    r = _lib.Recollection(ctypes.sizeof(_lib.Recollection))
    ctx.call(lib.esmm_recall, _weights(weights)._live().value, integer(m, "m"), ctypes.byref(r))
    return Recollection(
        bool(r.known), r.density_a, r.strip_density_a, r.joint_density, r.strip_rows, r.calls, r.reports
    )


def expect(
    weights: Weights,
    m: int,
    strip_density: float,
    *,
    density: float = 0.0,
    joint_density: float = 0.0,
    strip_rows: int = 0,
    context: Optional[Context] = None,
) -> None:
    """Gives a context the expected density of A, for the first calls on a GPU."""
    ctx = context if context is not None else _core.context(_weights(weights).device)
    r = _lib.Recollection(ctypes.sizeof(_lib.Recollection))
    r.density_a, r.strip_density_a = number(density, "density"), number(strip_density, "strip_density")
    r.joint_density, r.strip_rows = number(joint_density, "joint_density"), integer(strip_rows, "strip_rows")
    if math.isnan(r.strip_density_a):
        raise ArgumentError("strip_density is nan: it is a share, 0 to 1")
    ctx.call(lib.esmm_expect, _weights(weights)._live().value, integer(m, "m"), ctypes.byref(r))
