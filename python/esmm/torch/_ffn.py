"""torch.ops.esmm.ffn: the feed-forward layer of esmm_ffn.h with its backward pass.

    ffn(x, w1, w2, gate?, b1?, b2?, b_gate?, activation, mode, sparsifier, share, permute, seed, keep) -> (y, ticket)
    ffn_backward(dy, ticket, x, w1, .., seed, need) -> gradients of x, w1, w2, gate, b1, b2, b_gate

A layer of the library is found again by the addresses of its parameters, and set to their values again when a version
counter has changed. A forward pass leaves a cache of the library for its backward pass. Tensors cannot hold it, so the
backward pass gets a ticket, a tensor of one number: when its memory is freed, the cache goes back to the layer.
A ticket whose cache is gone, or that is a copy, costs a second forward pass and nothing else.

These kernels are in Python: a pass over a layer takes long beside their cost. Where one or a few tokens go through the
layer and nothing is trained, modules call two products instead, whose operators are in C++.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor

from .. import _core, _lib
from .._core import Handle
from .._errors import Error, Status
from .._lib import lib
from . import _reference
from ._formats import DTYPES, raw_or_none
from ._ops import _autocast, _same_device, _unsafe, library
from ._reference import Options, Weights
from ._registry import context, version_of

_PARAMETERS = "Tensor w1, Tensor w2, Tensor? gate, Tensor? b1, Tensor? b2, Tensor? b_gate"
_OPTIONS = "int activation, int mode, int sparsifier, float share, bool permute, int seed"
library.define(f"ffn(Tensor x, {_PARAMETERS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor)", tags=_unsafe)
library.define(
    f"ffn_backward(Tensor dy, Tensor ticket, Tensor x, {_PARAMETERS}, {_OPTIONS}, bool[] need)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_unsafe,
)


def _matrix(t: Tensor) -> Tuple[Tensor, _lib.Matrix]:
    """The library's view of t, and the tensor that has to live as long."""
    raw = raw_or_none(t)
    if raw is None:
        t = t.contiguous()
        raw = raw_or_none(t)
    assert raw is not None
    return t, _lib.Matrix(*raw)


class Layer:
    """One esmm_ffn: its handle, the values it was last set to, and caches that wait for the next pass."""

    def __init__(self, ctx: _core.Context, d_model: int, d_hidden: int, gated: bool, dtype: int, o: Options) -> None:
        opts = _lib.FfnOpts(
            size=ctypes.sizeof(_lib.FfnOpts), d_model=d_model, d_hidden=d_hidden, activation=o.activation,
            gated=int(gated), dtype=dtype, mode=o.mode, sparsifier=o.sparsifier, sparse_share=o.share,
            permute_tokens=int(o.permute), seed=o.seed,
        )  # fmt: skip
        out = ctypes.c_void_p()
        ctx.call(lib.esmm_ffn_create, ctypes.byref(opts), ctypes.byref(out))
        assert out.value is not None
        self.handle = Handle(out.value, lib.esmm_ffn_free)
        self.lock = threading.RLock()  # setting weights must not meet a pass
        self.versions: Tuple[int, ...] = ()
        self.generation = 0
        self.held: List[Any] = []  # backward passes read the weights' memory
        self.idle: List[Handle] = []
        self.dtype = dtype

    def update(self, ctx: _core.Context, w: Weights, x_dtype: torch.dtype) -> None:
        """Sets the library's layer to the parameters, if they have changed."""
        versions = tuple(-1 if t is None else version_of(t) for t in w)
        if self.generation and versions == self.versions and all(v >= 0 or t is None for v, t in zip(versions, w)):
            return
        held: List[Any] = []

        def matrix(t: Optional[Tensor]) -> Any:
            if t is None:
                return None
            t, m = _matrix(t.detach().to(x_dtype).t())
            held.extend((t, m))
            return ctypes.pointer(m)

        def bias(t: Optional[Tensor]) -> Optional[int]:
            if t is None:
                return None
            t = t.detach().to(torch.float32).contiguous()
            held.append(t)
            return t.data_ptr()

        given = _lib.FfnWeights(
            size=ctypes.sizeof(_lib.FfnWeights), w1=matrix(w.w1), gate=matrix(w.gate), w2=matrix(w.w2), b1=bias(w.b1),
            b_gate=bias(w.b_gate), b2=bias(w.b2),
        )  # fmt: skip
        ctx.call(lib.esmm_ffn_set_weights, self.handle.value, ctypes.byref(given), None)
        self.held, self.versions = held, versions
        self.generation += 1

    def take_cache(self, ctx: _core.Context) -> Handle:
        if self.idle:
            return self.idle.pop()
        out = ctypes.c_void_p()
        ctx.call(lib.esmm_ffn_cache_create, self.handle.value, ctypes.byref(out))
        assert out.value is not None
        layer = self.handle
        lock = self.lock

        def free(cache: int, layer: Optional[Handle] = layer) -> None:
            with lock:
                lib.esmm_ffn_cache_free(cache)

        return Handle(out.value, free)


class Pass:
    """A forward pass that waits for its backward pass."""

    def __init__(self, layer: Layer, cache: Handle, x: Tensor) -> None:
        self.layer, self.cache, self.x = layer, cache, x
        self.generation = layer.generation


_layers: Dict[Tuple[Any, ...], Layer] = {}
_passes: Dict[int, Pass] = {}
_lock = threading.RLock()
_refused: Set[torch.device] = set()


class _Ticket(ctypes.c_int64 * 1):  # type: ignore[misc]
    """A ticket's memory: when the last tensor that holds it is gone, the cache goes back to its layer."""

    def __del__(self) -> None:
        made = _passes.pop(ctypes.addressof(self), None)
        if made is not None:
            with made.layer.lock:
                if len(made.layer.idle) < 4:
                    made.layer.idle.append(made.cache)


def _ticket(made: Optional[Pass]) -> Tensor:
    memory = _Ticket(0)
    if made is not None:
        _passes[ctypes.addressof(memory)] = made
    return torch.frombuffer(memory, dtype=torch.int64)


def _check(x: Tensor, w: Weights) -> None:
    if x.dtype not in DTYPES:
        name = str(x.dtype).replace("torch.", "")
        raise RuntimeError(f"esmm: x is {name}: it has to be float32, bfloat16 or float16")
    hidden = w.w1.shape[0]
    model = x.shape[-1]
    shapes = (
        ("w1", w.w1, (hidden, model)),
        ("w2", w.w2, (model, hidden)),
        ("gate", w.gate, (hidden, model)),
        ("b1", w.b1, (hidden,)),
        ("b2", w.b2, (model,)),
        ("b_gate", w.b_gate, (hidden,)),
    )
    for name, t, shape in shapes:
        if t is None:
            continue
        if tuple(t.shape) != shape:
            raise RuntimeError(
                f"esmm: {name} has the shape {list(t.shape)}; with x {list(x.shape)} it is {list(shape)}"
            )
        if t.device != x.device:
            raise RuntimeError(f"esmm: {name} is on {t.device}, and x is on {x.device}")
        if t.dtype != x.dtype and t.dtype != torch.float32:
            raise RuntimeError(
                f"esmm: x is {x.dtype} and {name} is {t.dtype}; only a float32 parameter may be wider than x"
            )
    if w.gate is None and w.b_gate is not None:
        raise RuntimeError("esmm: b_gate is given, and gate is not")


def _layer(ctx: _core.Context, x: Tensor, w: Weights, o: Options) -> Optional[Layer]:
    """The library's layer with these parameters; None where it has none for this device."""
    lasting = all(t is None or isinstance(t, torch.nn.Parameter) for t in w)
    key = (tuple(None if t is None else (t.data_ptr(), t.shape, t.dtype) for t in w), x.dtype, x.device, o)
    with _lock:
        layer = _layers.get(key) if lasting else None
        if layer is None:
            if x.device in _refused:
                return None
            try:
                layer = Layer(ctx, w.w1.shape[1], w.w1.shape[0], w.gate is not None, DTYPES[x.dtype], o)
            except Error as e:
                if e.status != Status.UNSUPPORTED:
                    raise
                _refused.add(x.device)
                warnings.warn(
                    f"esmm.torch: the feed-forward layer runs by plain torch on {x.device}: {e}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            if lasting:
                _layers[key] = layer
                for t in w:
                    if t is not None:
                        weakref.finalize(t, _layers.pop, key, None).atexit = False
    return layer


def _forward(layer: Layer, ctx: _core.Context, x: Tensor, w: Weights, y: Tensor, keep: bool) -> Optional[Pass]:
    x, mx = _matrix(x)
    _, my = _matrix(y)
    with layer.lock:
        layer.update(ctx, w, x.dtype)
        cache = layer.take_cache(ctx) if keep else None
        ctx.call(
            lib.esmm_ffn_forward,
            layer.handle.value,
            ctypes.byref(mx),
            ctypes.byref(my),
            cache.value if cache else None,
            None,
        )
        return Pass(layer, cache, x) if cache else None


def _ffn(
    x: Tensor, w1: Tensor, w2: Tensor, gate: Optional[Tensor], b1: Optional[Tensor], b2: Optional[Tensor],
    b_gate: Optional[Tensor], activation: int, mode: int, sparsifier: int, share: float, permute: bool, seed: int,
    keep: bool,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    w, o = Weights(w1, w2, gate, b1, b2, b_gate), Options(activation, mode, sparsifier, share, permute, seed)
    _check(x, w)
    rows = x.detach().reshape(-1, x.shape[-1])
    try:
        with context(x.device) as ctx:
            layer = _layer(ctx, x, w, o)
            if layer is None:
                return _reference.forward(rows, w, o).view(x.shape), _ticket(None)
            y = torch.empty_like(rows, memory_format=torch.contiguous_format)
            made = _forward(layer, ctx, rows, w, y, keep)
    except Error as e:
        raise RuntimeError(f"esmm: {e}") from e
    return y.view(x.shape), _ticket(made)


def _ffn_backward(
    dy: Tensor, ticket: Tensor, x: Tensor, w1: Tensor, w2: Tensor, gate: Optional[Tensor], b1: Optional[Tensor],
    b2: Optional[Tensor], b_gate: Optional[Tensor], activation: int, mode: int, sparsifier: int, share: float,
    permute: bool, seed: int, need: List[bool],
) -> Tuple[Tensor, ...]:  # fmt: skip
    w, o = Weights(w1, w2, gate, b1, b2, b_gate), Options(activation, mode, sparsifier, share, permute, seed)
    rows, d_rows = x.detach().reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1]).to(x.dtype)
    of = (x, *w)
    made = _passes.get(ticket.data_ptr())
    try:
        with context(x.device) as ctx:
            if made is None or made.generation != made.layer.generation:
                layer = _layer(ctx, x, w, o)
                if layer is None:
                    grads = _reference.backward(d_rows, rows, w, o, need)
                    return tuple(
                        x.new_empty(0) if t is None or g is None else g.to(t.dtype).view(t.shape)
                        for g, t in zip(grads, of)
                    )
                made = _forward(layer, ctx, rows, w, torch.empty_like(rows), True)
            assert made is not None
            out = [
                torch.empty(t.shape, dtype=torch.float32 if t.dim() == 1 else t.dtype, device=t.device)
                if t is not None and n
                else None
                for t, n in zip(of, need)
            ]
            held: List[Any] = []

            def matrix(t: Optional[Tensor], turned: bool) -> Any:
                if t is None:
                    return None
                t = t.view(-1, t.shape[-1])
                t, m = _matrix(t.t() if turned else t)
                held.extend((t, m))
                return ctypes.pointer(m)

            def vector(t: Optional[Tensor]) -> Optional[int]:
                return None if t is None else t.data_ptr()

            wanted = _lib.FfnGrads(
                size=ctypes.sizeof(_lib.FfnGrads), x=matrix(out[0], False), w1=matrix(out[1], True),
                w2=matrix(out[2], True), gate=matrix(out[3], True), b1=vector(out[4]), b2=vector(out[5]),
                b_gate=vector(out[6]),
            )  # fmt: skip
            d_rows, md = _matrix(d_rows)
            with made.layer.lock:
                ctx.call(
                    lib.esmm_ffn_backward,
                    made.layer.handle.value,
                    made.cache.value,
                    ctypes.byref(md),
                    ctypes.byref(wanted),
                    None,
                )
    except Error as e:
        raise RuntimeError(f"esmm: {e}") from e
    return tuple(x.new_empty(0) if t is None or g is None else g.to(t.dtype) for g, t in zip(out, of))


def _ffn_fake(x: Tensor, w1: Tensor, *_: Any) -> Tuple[Tensor, Tensor]:
    _same_device(w1, x)
    torch._check(x.shape[-1] == w1.shape[1], lambda: f"esmm: x has rows of {x.shape[-1]}, and w1 is {list(w1.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(1, dtype=torch.int64, device="cpu")


def _backward_fake(dy: Tensor, ticket: Tensor, x: Tensor, *args: Any) -> Tuple[Tensor, ...]:
    need = args[-1]
    return tuple(
        x.new_empty(0) if t is None or not n else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, n in zip((x, *args[:6]), need)
    )


for _key in ("CPU", "CUDA"):
    library.impl("ffn", _ffn, _key)
    library.impl("ffn_backward", _ffn_backward, _key)
torch.library.register_fake("esmm::ffn", _ffn_fake, lib=library)
torch.library.register_fake("esmm::ffn_backward", _backward_fake, lib=library)


def _setup(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    x, *weights = inputs[:7]
    ctx.options = inputs[7:13]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, *weights, output[1])


def _gradients_by_torch(dy: Tensor, x: Tensor, w: Weights, o: Options, need: List[bool]) -> List[Optional[Tensor]]:
    _reference.check_smooth(o, "a second derivative (create_graph=True)")
    rows, d_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).to(x.dtype)
    grads = _reference.backward(d_rows, rows, w, o, need)
    return [None if t is None or g is None else g.to(t.dtype).view(t.shape) for g, t in zip(grads, (x, *w))]


def _gradients(ctx: Any, dy: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
    x, w1, w2, gate, b1, b2, b_gate, ticket = ctx.saved_tensors
    need = [bool(n) and t is not None for n, t in zip(ctx.needs_input_grad, (x, w1, w2, gate, b1, b2, b_gate))]
    if torch.is_grad_enabled():  # create_graph: the gradients have to be differentiable themselves
        made = _gradients_by_torch(dy, x, Weights(w1, w2, gate, b1, b2, b_gate), Options(*ctx.options), need)
        return (*made, None, None, None, None, None, None, None)
    made = torch.ops.esmm.ffn_backward(dy, ticket, x, w1, w2, gate, b1, b2, b_gate, *ctx.options, need)
    return (*(g if n else None for g, n in zip(made, need)), None, None, None, None, None, None, None)


torch.library.register_autograd("esmm::ffn", _gradients, setup_context=_setup, lib=library)
_autocast("ffn", "cpu", "AutocastCPU")
_autocast("ffn", "cuda", "AutocastCUDA")
