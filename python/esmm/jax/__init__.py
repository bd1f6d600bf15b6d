"""ESMM for JAX: a matrix product that skips the zeros of its first operand, under jit, with its gradient.

    >>> import jax, jax.numpy as jnp, esmm.jax
    >>> w = esmm.jax.prepare(jnp.ones((4, 2)))                          # once
    >>> h = jnp.array([[0.0, 2.0, 0.0, 1.0]])
    >>> jax.jit(lambda h: esmm.jax.matmul(h, w, activation="relu"))(h)  # as often as you like
    Array([[3., 3.]], dtype=float32)

The product is a call of XLA's foreign function interface, on CPUs and on NVIDIA GPUs, on XLA's own stream. The small
C++ file behind it is built at first use, which takes a few seconds once; where there is no compiler the product goes
through jax.pure_callback and the host's memory, and a warning says so. ESMM_JAX_FFI=0 chooses that way, silently.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
import weakref
from typing import Any, NamedTuple, Optional, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._build import BuildError, build
from .._core import ACTIVATIONS
from .._errors import ArgumentError, DtypeError, ShapeError
from .._lib import library_path

__all__ = ["Weights", "matmul", "prepare"]

_DTYPES = {"float32": _core.F32, "bfloat16": _core.BF16, "float16": _core.F16}
_RELU, _RELU2 = ACTIVATIONS["relu"], ACTIVATIONS["relu2"]
_TARGET = "esmm_product"

# ---- the foreign function ----

_lock = threading.Lock()
_ready: Optional[bool] = None  # not asked yet, there, not there
_handlers: Optional[ctypes.CDLL] = None


def _open() -> bool:
    """Builds and registers the foreign function, once; False where that fails."""
    global _ready, _handlers
    with _lock:
        if _ready is not None:
            return _ready
        _ready = False
        if os.environ.get("ESMM_JAX_FFI") == "0":
            return False
        try:
            from importlib.metadata import version

            source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ffi.cpp")
            hidden = ["-fvisibility=hidden"]
            handlers = ctypes.CDLL(build(source, "jax", [jax.ffi.include_dir()], version("jaxlib"), hidden))
            handlers.esmm_jax_open.restype = ctypes.c_char_p
            handlers.esmm_jax_open.argtypes = [ctypes.c_char_p]
            handlers.esmm_jax_put.restype = ctypes.c_int64
            handlers.esmm_jax_put.argtypes = [ctypes.c_void_p, ctypes.c_int]
            handlers.esmm_jax_drop.restype = None
            handlers.esmm_jax_drop.argtypes = [ctypes.c_int64]
            refused = handlers.esmm_jax_open(os.fsencode(library_path()))
            if refused:
                raise BuildError(refused.decode(errors="replace"))
            jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handlers.esmm_jax_cpu), platform="cpu")
            jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handlers.esmm_jax_cuda), platform="CUDA")
        except (BuildError, OSError, AttributeError) as e:
            warnings.warn(
                f"esmm.jax goes through Python in every call, which is slow: {e}", RuntimeWarning, stacklevel=4
            )
            return False
        _handlers = handlers
        _ready = True
        return True


# ---- weights ----


class Weights:
    """Prepared B [k, n] for `matmul`. Immutable.

    Functions under jit take it as an argument or from around them, as they like: to JAX it is a constant without
    arrays, identified by the object.
    """

    def __init__(self, prepared: _core.Weights) -> None:
        self.prepared = prepared
        self._turned: Optional[Weights] = None
        self._number = 0
        self._lock = threading.Lock()

    @property
    def shape(self) -> Tuple[int, int]:
        return self.prepared.shape

    @property
    def dtype(self) -> str:
        return self.prepared.dtype

    @property
    def device(self) -> str:
        return self.prepared.device

    def _entry(self) -> int:
        """Its number in the table of the foreign function; it leaves the table with this object."""
        with self._lock:
            if not self._number:
                assert _handlers is not None
                handle = self.prepared._live()
                self._number = _handlers.esmm_jax_put(handle.value, self.prepared.device_index)
                weakref.finalize(self, _drop, self._number, handle)
            return self._number

    def _transposed(self) -> "Weights":
        """B transposed, prepared when a gradient first needs it."""
        with self._lock:
            if self._turned is None:
                k, n = self.shape
                dense = np.empty((k, n), _numpy_dtype(self.dtype))
                context = _core.context(self.device)
                context.to_dense(self.prepared, _raw(dense, "B"))
                self._turned = Weights(context.prepare(_raw(dense.T, "B")))
            return self._turned

    def __repr__(self) -> str:
        return f"<esmm.jax.Weights of {self.prepared!r}>"


def _drop(number: int, handle: _core.Handle) -> None:
    """The table drops its entry before the memory, which `handle` holds until here, goes."""
    if _handlers is not None:
        _handlers.esmm_jax_drop(number)


jax.tree_util.register_pytree_node(Weights, lambda w: ((), w), lambda w, _: w)


def _numpy_dtype(name: str) -> Any:
    return np.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name)


def _raw(a: np.ndarray, what: str) -> _core.Raw:
    if a.ndim != 2:
        raise ShapeError(f"{what} has {a.ndim} dimensions: it must have 2")
    size = a.itemsize
    code = _core.dtype_code(a.dtype, f"the dtype of {what}")
    found = _core.raw(a.ctypes.data, a.shape[0], a.shape[1], a.strides[0] // size, a.strides[1] // size, code)
    return found if found is not None else _raw(np.ascontiguousarray(a), what)


def prepare(b: Any, use: str = "any", format: Optional[str] = None, device: Optional[str] = None) -> Weights:
    """Prepares B [k, n], an array of JAX or numpy, for any number of products.

    They run on b's device, those of a numpy array on JAX's default device; device ('cpu', 'cuda:0') names another one.
    use and format are those of esmm.prepare: 'any', 'decode' or 'large_m', and 'dense', 'bsr:64' or '2:4'.
    """
    if isinstance(b, jax.core.Tracer):
        raise DtypeError("b is being traced: prepare weights outside of jit, or give matmul the array itself")
    if device is None and not isinstance(b, jax.Array):
        b = jnp.asarray(b)
    if isinstance(b, jax.Array):
        where = next(iter(b.devices()))
        on_gpu = where.platform == "gpu"
        if device is None:
            device = f"cuda:{where.local_hardware_id or 0}" if on_gpu else "cpu"
        if on_gpu and device != "cpu" and b.ndim == 2 and len(b.devices()) == 1:
            b.block_until_ready()
            code = _core.dtype_code(b.dtype, "the dtype of b")
            k, n = b.shape
            index = where.local_hardware_id or 0
            matrix = _core.raw(b.unsafe_buffer_pointer(), k, n, n, 1, code, index)
            assert matrix is not None
            return Weights(_core.context(device).prepare(matrix, use=use, format=format))
    array = np.asarray(b)
    return Weights(_core.context(device or "cpu").prepare(_raw(array, "b"), use=use, format=format))


# ---- the product ----


class _Call(NamedTuple):
    """All of a product that is not an array."""

    weights: Optional[Weights]
    activation: int
    dtype: str
    transpose_a: bool = False
    transpose_b: bool = False


def _product(call: _Call, a: Any, b: Any, bias: Any, residual: Any) -> Any:
    """activation(a w + bias) + residual of matrices; w is call.weights or b."""
    m = a.shape[1] if call.transpose_a else a.shape[0]
    n = call.weights.shape[1] if call.weights is not None else b.shape[0] if call.transpose_b else b.shape[1]
    result = jax.ShapeDtypeStruct((m, n), _numpy_dtype(call.dtype))
    operands = [x for x in (a, b, bias, residual) if x is not None]
    if _open():
        return jax.ffi.ffi_call(_TARGET, result, vmap_method="sequential")(
            *operands,
            weights=np.int64(0 if call.weights is None else call.weights._entry()),
            transpose_a=np.bool_(call.transpose_a),
            transpose_b=np.bool_(call.transpose_b),
            activation=np.int32(call.activation),
            has_bias=np.bool_(bias is not None),
            has_residual=np.bool_(residual is not None),
            threads=np.int32(_core.local.threads),
        )
    given = (b is not None, bias is not None, residual is not None)
    run = functools.partial(_on_host, call, given, result.dtype)
    return jax.pure_callback(run, result, *operands, vmap_method="sequential")


def _on_host(call: _Call, given: Tuple[bool, bool, bool], dtype: Any, a: Any, *rest: Any) -> np.ndarray:
    """The same through Python: what pure_callback calls."""
    left = [np.asarray(x) for x in rest]
    b, bias, residual = (left.pop(0) if there else None for there in given)
    a = np.asarray(a)
    a = a.T if call.transpose_a else a
    context = _core.context(call.weights.device if call.weights is not None else "cpu")
    if call.weights is not None:
        weights = call.weights.prepared
    else:
        assert b is not None
        use = "decode" if a.shape[0] <= 16 else "large_m"
        weights = context.prepare(_raw(b.T if call.transpose_b else b, "w"), use=use)
    c = np.empty((a.shape[0], weights.shape[1]), dtype)
    if bias is not None:
        bias = np.ascontiguousarray(bias, np.float32)
    context.matmul(
        _raw(a, "a"),
        weights,
        _raw(c, "c"),
        activation=call.activation,
        bias=0 if bias is None else bias.ctypes.data,
        residual=None if residual is None else _raw(residual, "residual"),
    )
    return c


# ---- its gradient ----


def _activate(activation: int, x: Any) -> Any:
    if activation == _RELU:
        return jax.nn.relu(x)
    if activation == _RELU2:
        return jnp.square(jax.nn.relu(x))
    if activation == ACTIVATIONS["silu"]:
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=activation == ACTIVATIONS["gelu_tanh"])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: _Call, a: Any, b: Any, bias: Any, residual: Any) -> Any:
    return _product(call, a, b, bias, residual)


def _forward(call: _Call, a: Any, b: Any, bias: Any, residual: Any) -> Tuple[Any, Any]:
    # For the derivative: the result of ReLU and its square, the argument of smooth activations.
    if residual is None and call.activation in (0, _RELU, _RELU2):
        c = _product(call, a, b, bias, None)
        kept = c if call.activation else None
    else:
        kept = _product(call._replace(activation=0, dtype="float32"), a, b, bias, None)
        c = _activate(call.activation, kept) if call.activation else kept
        if residual is not None:
            c = c + residual.astype(jnp.float32)
        c = c.astype(_numpy_dtype(call.dtype))
        if call.activation in (_RELU, _RELU2):
            kept = _activate(call.activation, kept)
        elif not call.activation:
            kept = None
    # Of the bias and the residual only their dtypes are needed.
    empty = [None if x is None else jnp.zeros((0,), x.dtype) for x in (bias, residual)]
    return c, (a, b, kept, *empty)


def _backward(call: _Call, saved: Any, dc: Any) -> Tuple[Any, Any, Any, Any]:
    a, b, kept, bias, residual = saved
    if not call.activation:
        dx = dc
    else:
        slope = dc.astype(jnp.float32)
        if call.activation == _RELU:
            slope = jnp.where(kept > 0, slope, 0)
        elif call.activation == _RELU2:
            slope = slope * 2 * jnp.sqrt(kept.astype(jnp.float32))
        else:
            _, pull = jax.vjp(functools.partial(_activate, call.activation), kept)
            slope = pull(slope)[0]
        dx = slope.astype(dc.dtype)
    # dx has the activation's zeros, a has those of the layer before: both products skip.
    to_a = _Call(call.weights._transposed() if call.weights is not None else None, 0, a.dtype.name, transpose_b=True)
    da = _matmul(to_a, dx, b, None, None)
    db = None
    if b is not None:
        db = _matmul(_Call(None, 0, b.dtype.name, transpose_a=True), a, dx, None, None)
    dbias = None if bias is None else dx.astype(jnp.float32).sum(0).astype(bias.dtype)
    return da, db, dbias, None if residual is None else dc.astype(residual.dtype)


_matmul.defvjp(_forward, _backward)


def matmul(
    a: Any,
    w: Union[Weights, _core.Weights, Any],
    *,
    bias: Any = None,
    activation: Optional[str] = None,
    residual: Any = None,
    dtype: Any = None,
) -> Any:
    """activation(a @ w + bias) + residual, skipping the zeros of a. The result is of `dtype`, by default a's.

    a [..., k] is float32, bfloat16 or float16. w is what `prepare` gave, or an array [k, n], which is then prepared in
    every call: that is for weights that change, as in training. Gradients flow to a, bias, residual and to w where it
    is an array. activation: 'relu', 'relu2', 'gelu', 'gelu_tanh', 'silu'. Sums are of float32.
    """
    a = jnp.asarray(a)
    if a.ndim == 0:
        raise ShapeError("a has no dimensions: it must have at least 1")
    prepared: Optional[Weights] = None
    b: Any = None
    if isinstance(w, Weights):
        prepared = w
    elif isinstance(w, _core.Weights):
        prepared = w.__dict__.setdefault("_jax", Weights(w))  # one object, so that jit knows it again
    else:
        b = jnp.asarray(w)
        if b.ndim != 2:
            raise ShapeError(f"w has {b.ndim} dimensions: it must have 2")
    k, n = prepared.shape if prepared is not None else b.shape
    if a.shape[-1] != k:
        raise ShapeError(f"a has {a.shape[-1]} columns and w {k} rows: they must agree")
    shape = (*a.shape[:-1], n)
    for what, x in (("a", a), ("w", b), ("residual", residual)):
        if x is not None and jnp.asarray(x).dtype.name not in _DTYPES:
            raise DtypeError(f"{what} is of {jnp.asarray(x).dtype}: it is one of float32, bfloat16, float16")
    name = a.dtype.name if dtype is None else jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise DtypeError(f"dtype is {name}: it is one of float32, bfloat16, float16")
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (n,):
            raise ShapeError(f"bias has the shape {bias.shape}: it must have {(n,)}")
        bias = bias.astype(jnp.float32)
    if residual is not None:
        residual = jnp.asarray(residual)
        if residual.shape != shape:
            raise ShapeError(f"residual has the shape {residual.shape}: it must have {shape}, that of the result")
        residual = residual.reshape(-1, n)
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is {activation!r}: it is one of {', '.join(map(repr, ACTIVATIONS))}")
    call = _Call(prepared, ACTIVATIONS[activation] if activation else 0, name)
    rows = a.reshape(-1, k) if k else a.reshape(int(np.prod(a.shape[:-1])), 0)
    return _matmul(call, rows, b, bias, residual).reshape(shape)
