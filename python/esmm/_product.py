"""Preparing weights and multiplying: esmm.prepare, esmm.matmul, esmm.explain, esmm.tune_weights."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import numpy as np

from . import _core, _lib
from ._arrays import Array, Operand, address, ndarray, numpy_code, numpy_dtype, operand, vector
from ._core import ACTIVATIONS, BF16, DTYPE_NAMES, HOST, Context, Format, Pattern, Raw, Verdict, Weights
from ._errors import ArgumentError, DtypeError, ShapeError


def is_sparse(x: Any) -> bool:
    """A sparse array or matrix of SciPy, which need not be installed to ask."""
    return hasattr(x, "indptr") and hasattr(x, "indices") and hasattr(x, "format") and not isinstance(x, ndarray)


def bsr(x: Any, what: str, bits: Optional[int] = None) -> Tuple[_lib.Bsr, Any]:
    """A BSR, CSR or CSC of SciPy as esmm_bsr, its arrays as they are; and what holds them."""
    if x.format not in ("bsr", "csr", "csc"):
        raise DtypeError(f"{what} is a sparse array in format {x.format!r}: convert it with .tobsr() or .tocsr()")
    if not getattr(x, "has_canonical_format", True):
        x = x.copy()
        x.sum_duplicates()
    dtype = numpy_code(x.data, what, bits)
    blocks = x.data.shape[1:] if x.format == "bsr" else (1, 1)
    if x.indptr.dtype != x.indices.dtype or x.indptr.dtype.name not in ("int32", "int64"):
        raise DtypeError(f"{what} has indices of {x.indptr.dtype} and {x.indices.dtype}: both are int32, or both int64")
    keep = [np.ascontiguousarray(part) for part in (x.indptr, x.indices, x.data)]
    at = [address(part) for part in keep]
    order = _core.COL_MAJOR if x.format == "csc" else _core.ROW_MAJOR
    made = _lib.Bsr(
        ctypes.sizeof(_lib.Bsr),
        x.shape[0],
        x.shape[1],
        blocks[0],
        blocks[1],
        8 * x.indptr.dtype.itemsize,
        dtype,
        order,
        len(x.indices),
        *at,
    )
    return made, keep


def number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{what} is {value!r}: it is a number") from None


def integer(value: Any, what: str, least: int = 0) -> int:
    try:
        n = value.__index__()
    except (AttributeError, TypeError):
        raise ArgumentError(f"{what} is {value!r}: it is a whole number") from None
    if not least <= n < 2**63:
        raise ArgumentError(f"{what} is {n}: it is at least {least}")
    return int(n)


def bits_of(dtype: Any) -> Optional[int]:
    """dtype=: how to read uint16 arrays. It can only say that they are bf16."""
    if dtype is None:
        return None
    if _core.dtype_code(dtype) != BF16:
        raise DtypeError(f"dtype is {dtype!r}: it says how arrays of uint16 are read, and that is 'bf16' or nothing")
    return BF16


def prepare(
    b: Any,
    *,
    use: str = "any",
    format: Union[str, Format, None] = None,
    strict: bool = False,
    max_bytes_ratio: float = 0.0,
    dtype: Any = None,
    device: Optional[str] = None,
    context: Optional[Context] = None,
) -> Weights:
    """Prepares B [k, n], once, for any number of products.

    b is a numpy array, a BSR, CSR or CSC array of SciPy, or a tensor of another library on the host or a GPU, of
    float32, float16 or bfloat16. A layer's weight [out, in] is prepared as ``weight.T``, without a copy.

    use:     'any', 'decode' (1 to 16 rows of A at a time) or 'large_m': keeps fewer forms of B.
    format:  'dense'; 'bsr:32', 'bsr:32x64': blocks with a nonzero are kept; '2:4', 'nm:1:8': B must fit, see prune().
             'bsr' keeps a SciPy array's own blocks.
    strict:  keeps B's zeros, for products with strict=True.
    max_bytes_ratio: most bytes that the forms of B may hold, over B's own. 0: the default, 2 (on a GPU, and where B is
        kept for oneDNN, 3).
    dtype:   'bf16' where b is of uint16 and holds the bits of bf16.
    device:  'cpu', 'cuda', 'cuda:1', ... The default is where b lies if that is a GPU, else what esmm.device() says.

    >>> import numpy as np, esmm
    >>> w = esmm.prepare(np.eye(64, dtype=np.float32))
    >>> w.shape, w.info.element_density
    ((64, 64), 0.015625)
    """
    if isinstance(b, Weights):
        raise DtypeError("b is prepared already: it is an esmm.Weights object")
    ratio = number(max_bytes_ratio, "max_bytes_ratio")
    bits = bits_of(dtype)
    if context is None and device is None:
        device = device_of(b)
    ctx = context if context is not None else _core.context(device)
    if is_sparse(b):
        blocks, _held = bsr(b, "b", bits)
        return ctx.prepare(blocks, use, format, strict, ratio)
    x = operand(b, "b", ctx, bits)
    if len(x.shape) != 2:
        raise ShapeError(f"b is of shape {x.shape}: it has to be a matrix [k, n]")
    return ctx.prepare(x.raw, use, format, strict, ratio)


def device_of(x: Any) -> Optional[str]:
    """The GPU that a tensor is on; None for everything in host memory."""
    if isinstance(x, ndarray) or is_sparse(x):
        return None
    if isinstance(x, Array):
        return None if x.device_index == HOST else x.device
    if hasattr(x, "__dlpack_device__"):
        kind, number = x.__dlpack_device__()
        return f"cuda:{int(number)}" if int(kind) in (2, 13) else None
    if hasattr(x, "__cuda_array_interface__"):
        number = getattr(getattr(x, "device", None), "id", 0)
        return f"cuda:{number}"
    return None


def matmul(
    a: Any,
    weights: Weights,
    *,
    out: Any = None,
    out_dtype: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: Optional[str] = None,
    residual: Any = None,
    gate: Optional[Weights] = None,
    gate_bias: Any = None,
    strict: bool = False,
    force: Optional[str] = None,
    a_pattern: Optional[Pattern] = None,
    dtype: Any = None,
    stats: bool = False,
    column_nonzeros: bool = False,
    c_pattern: int = 0,
    context: Optional[Context] = None,
) -> Any:
    """C = activation(alpha * A B + beta * C + bias) + residual; with a gate, C = activation(A gate) * (A B ...) + ...

    a [m, k] (or [k], or [..., k]) is a numpy array, a BSR or CSR array of SciPy, or a tensor of another library. The
    result is a numpy array if a is one (or SciPy's), else an esmm.Array where a lies; or `out`.

    out:         where C goes: rows or columns without gaps, not overlapping a. beta times what it held is added.
    out_dtype:   of a new C; the default is a's.
    bias:        [n] of float32, added before the activation. residual: [m, n], added after it.
    activation:  'relu', 'relu2', 'gelu', 'gelu_tanh', 'silu'.
    gate:        a second B of the same shape: C = activation(A gate + gate_bias) * (A B + bias) + residual.
    strict:      no skipping, so that zeros meet Inf and NaN as IEEE says.
    force:       a kernel's name or idea ('joint'); the default is the cheapest by the plan.
    a_pattern:   A's pattern, if there is one.
    dtype:       'bf16': arrays of uint16 hold the bits of bf16.
    context:     an esmm.Context; the default is the calling thread's own for the device of the weights.

    Returns C or, if something else is asked for, a tuple of C and, in this order: with stats, what the call did (on a
    GPU: it waits); with column_nonzeros, how many elements of each column of C are nonzero; with c_pattern=ROWS, C's
    pattern for strips of that many rows, which can be the a_pattern of the next product.

    >>> import numpy as np, esmm
    >>> w = esmm.prepare(np.full((3, 2), 2, np.float32))
    >>> esmm.matmul(np.array([[1, 0, -3]], np.float32), w)
    array([[-4., -4.]], dtype=float32)
    >>> c, nonzeros = esmm.matmul(np.eye(3, dtype=np.float32), w, bias=[-2, 1], activation="relu", column_nonzeros=True)
    >>> c.tolist(), nonzeros.tolist()
    ([[0.0, 3.0], [0.0, 3.0], [0.0, 3.0]], [0, 3])
    """
    if not isinstance(weights, Weights):
        raise DtypeError(f"weights is a {type(weights).__name__}: it has to be what esmm.prepare() returned")
    ctx = context if context is not None else _core.context(weights.device)
    n = weights.info.cols
    bits = None if dtype is None else bits_of(dtype)
    source: Any
    if isinstance(a, ndarray) or not is_sparse(a):
        x = operand(a, "a", ctx, bits)
        source, raw, shape, like = x.raw, x.raw, x.shape, x.like
        keep: Any = x.keep
    else:
        source, keep = bsr(a, "a", bits)
        raw, shape, like = (0, a.shape[0], a.shape[1], 1, source.dtype, 0, 0, 0), a.shape, a.data.dtype
    m = raw[1]
    if out is None:
        if beta:
            raise ArgumentError(f"beta is {beta!r} and there is no out whose values it could multiply")
        result, c, place = _new_result(shape[:-1] + (n,), m, n, raw, like, out_dtype, ctx)
    else:
        if out_dtype is not None:
            raise ArgumentError("out and out_dtype are both given: a result has the dtype of out")
        y = operand(out, "out", ctx, bits, write=True)
        if y.shape != shape[:-1] + (n,):
            raise ShapeError(f"out is of shape {y.shape}: the product is of shape {shape[:-1] + (n,)}")
        result, c = out, y.raw
        place = c[7] if c[6] else HOST
    if (
        bias is None
        and activation is None
        and residual is None
        and gate is None
        and force is None
        and a_pattern is None
        and not stats
        and not column_nonzeros
        and not c_pattern
        and not strict
        and gate_bias is None
        and alpha == 1.0
        and not beta
    ):
        ctx.matmul(source, weights, c)
        return result
    options, held, counts = _options(
        ctx,
        bits,
        place,
        m,
        n,
        alpha,
        beta,
        bias,
        activation,
        residual,
        gate,
        gate_bias,
        strict,
        force,
        a_pattern,
        column_nonzeros,
    )
    done, pattern = ctx.matmul(
        source, weights, c, c_strip_rows=integer(c_pattern, "c_pattern"), want_stats=bool(stats), **options
    )
    more = [part for part, asked in ((done, stats), (counts, column_nonzeros), (pattern, c_pattern)) if asked]
    return (result, *more) if more else result


def _new_result(
    shape: Tuple[int, ...], m: int, n: int, raw: Raw, like: Any, out_dtype: Any, ctx: Context
) -> Tuple[Any, Raw, int]:
    code = raw[4] if out_dtype is None else _core.dtype_code(out_dtype, "out_dtype")
    if like is not None:
        result = np.empty(shape, like if out_dtype is None else numpy_dtype(code))
        return result, (address(result), m, n, n or 1, code, 0, 0, 0), HOST
    device = raw[7] if raw[6] else HOST
    if device not in (HOST, ctx.device_index):
        # The product refuses it, with its own text; there is no memory for it here.
        return None, (raw[0], m, n, n or 1, code, 0, raw[6], raw[7]), device
    array = Array(shape, DTYPE_NAMES[code], ctx, device)
    return array, (array.data, m, n, n or 1, code, 0, raw[6], raw[7]), device


def _options(
    ctx: Context,
    bits: Optional[int],
    place: int,
    m: int,
    n: int,
    alpha: float,
    beta: float,
    bias: Any,
    activation: Optional[str],
    residual: Any,
    gate: Optional[Weights],
    gate_bias: Any,
    strict: bool,
    force: Optional[str],
    a_pattern: Optional[Pattern],
    column_nonzeros: bool,
) -> Tuple[Dict[str, Any], List[Any], Any]:
    """What Context.matmul takes, what must be held for the length of the call, and where column counts go."""
    held: List[Any] = []
    options: Dict[str, Any] = {
        "alpha": number(alpha, "alpha"),
        "beta": number(beta, "beta"),
        "activation": _core.choice(ACTIVATIONS, activation, "activation"),
        "strict": bool(strict),
    }
    for name, value in (("bias", bias), ("gate_bias", gate_bias)):
        if value is not None:
            options[name], keep = vector(value, name, n, ctx, place)
            held.append(keep)
    if residual is not None:
        r: Operand = operand(residual, "residual", ctx, bits)
        if r.raw[1:3] != (m, n):
            raise ShapeError(f"residual is of shape {r.shape}: the product has {m} rows and {n} columns")
        options["residual"] = r.raw
        held.append(r.keep)
    if gate is not None:
        if not isinstance(gate, Weights):
            raise DtypeError(f"gate is a {type(gate).__name__}: it has to be what esmm.prepare() returned")
        options["gate"] = gate
    if force is not None:
        if not isinstance(force, str):
            raise ArgumentError(f"force is {force!r}: it is a kernel's name, such as 'joint'")
        options["force"] = force
    if a_pattern is not None:
        if not isinstance(a_pattern, Pattern):
            raise DtypeError(f"a_pattern is a {type(a_pattern).__name__}: it has to be an esmm.Pattern")
        options["a_pattern"] = a_pattern
    counts: Any = None
    if column_nonzeros:
        if place == HOST:
            counts = np.empty(n, np.int32)
            options["column_nonzeros"] = address(counts)
        else:
            counts = Array((n,), "int32", ctx, place)
            options["column_nonzeros"] = counts.data
    return options, held, counts


def explain(
    a: Any,
    weights: Weights,
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    residual: Any = None,
    gate: Optional[Weights] = None,
    gate_bias: Any = None,
    strict: bool = False,
    force: Optional[str] = None,
    a_pattern: Optional[Pattern] = None,
    out_dtype: Any = None,
    dtype: Any = None,
    context: Optional[Context] = None,
) -> List[Verdict]:
    """The plan's verdict on every kernel for this product: those it chooses from, cheapest first, then the others.

    >>> import numpy as np, esmm
    >>> w = esmm.prepare(np.ones((256, 256), np.float32))
    >>> verdicts = esmm.explain(np.ones((64, 256), np.float32), w)
    >>> [v.chosen for v in verdicts][:2]
    [True, False]
    """
    with _described(
        a, weights, bias, activation, residual, gate, gate_bias, strict, force, a_pattern, out_dtype, dtype, context
    ) as (ctx, x, c, options):
        return ctx.explain(x, weights, c, **options)


def tune_weights(
    a: Any,
    weights: Weights,
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    residual: Any = None,
    gate: Optional[Weights] = None,
    gate_bias: Any = None,
    strict: bool = False,
    a_pattern: Optional[Pattern] = None,
    out_dtype: Any = None,
    dtype: Any = None,
    context: Optional[Context] = None,
) -> None:
    """Times the kernels that may be the fastest for a @ weights, in turns, and keeps the times: later products of these
    weights with as many rows and about as many zeros choose by them. Makes the product some 90 times, and waits.
    Refused where the context is deterministic or does not remember.
    """
    with _described(
        a, weights, bias, activation, residual, gate, gate_bias, strict, None, a_pattern, out_dtype, dtype, context
    ) as (ctx, x, c, options):
        ctx.tune_weights(x, weights, c, **options)


@contextmanager
def _described(
    a: Any,
    weights: Weights,
    bias: Any,
    activation: Optional[str],
    residual: Any,
    gate: Optional[Weights],
    gate_bias: Any,
    strict: bool,
    force: Optional[str],
    a_pattern: Optional[Pattern],
    out_dtype: Any,
    dtype: Any,
    context: Optional[Context],
) -> Iterator[Tuple[Context, Raw, Raw, Dict[str, Any]]]:
    """The context, A, a new C and the options of Context.matmul, with all that they point to held meanwhile."""
    if not isinstance(weights, Weights):
        raise DtypeError(f"weights is a {type(weights).__name__}: it has to be what esmm.prepare() returned")
    ctx = context if context is not None else _core.context(weights.device)
    bits = bits_of(dtype)
    x = operand(a, "a", ctx, bits)
    m, n = x.raw[1], weights.info.cols
    result, c, place = _new_result(x.shape[:-1] + (n,), m, n, x.raw, x.like, out_dtype, ctx)
    options, held, _ = _options(
        ctx, bits, place, m, n, 1.0, 0.0, bias, activation, residual, gate, gate_bias, strict, force, a_pattern, False
    )
    yield ctx, x.raw, c, options
    del result, held


def to_dense(weights: Weights, *, out: Any = None, out_dtype: Any = None, dtype: Any = None) -> Any:
    """B again, from any format: a new numpy array, or into `out`."""
    if not isinstance(weights, Weights):
        raise DtypeError(f"weights is a {type(weights).__name__}: it has to be what esmm.prepare() returned")
    ctx = _core.context(weights.device)
    if out is not None:
        y = operand(out, "out", ctx, bits_of(dtype), write=True)
        ctx.to_dense(weights, y.raw)
        return out
    code = _core.dtype_code(weights.dtype if out_dtype is None else out_dtype, "out_dtype")
    made = np.empty(weights.shape, numpy_dtype(code))
    rows, cols = weights.shape
    ctx.to_dense(weights, (address(made), rows, cols, cols or 1, code, 0, 0, 0))
    return made


def astype(x: Any, dtype: Any, *, context: Optional[Context] = None) -> Any:
    """x rounded to another dtype, to nearest even, as a new numpy array; bf16 is ml_dtypes' if installed, else uint16.

    >>> import numpy as np, esmm
    >>> esmm.astype(np.array([[1.0, 0.1]], np.float32), "float16").dtype
    dtype('float16')
    """
    ctx = context if context is not None else _core.context(device_of(x))
    y = operand(x, "x", ctx, BF16)
    code = _core.dtype_code(dtype)
    out = np.empty(y.shape, numpy_dtype(code))
    ctx.copy(y.raw, (address(out), y.raw[1], y.raw[2], y.raw[2] or 1, code, 0, 0, 0))
    return out
