"""torch.ops.esmm: the operators, for autograd, autocast and the compiler.

    linear(x, weight, bias?, residual?, gate?, gate_bias?, activation, format) -> y        differentiable
    _linear(x, weight, bias?, activation, format, residual?, gate?, gate_bias?) -> y       the same without autograd
    _linear_plain(x, weight, bias?, activation) -> y                                       enough for most calls
    linear_stats(...) -> (y, nonzeros of each column)
    _linear_turned(x, weight)      x @ weight: for gradients
    linear_packed(x, packed, n, bias?, residual?, activation) -> y                         of a SparseTensor's bytes
    unpack(packed, out, k, dtype) -> weight [out, k]                                       the same bytes as a matrix
    _hold(t) -> int, _float_copy(bias) -> bias             the others' work in Python, see _registry.py

x [.., in], weight and gate [out, in] as in nn.Linear; y = act(x W' + bias) + residual, with a gate
act(x G' + gate_bias) * (x W' + bias) + residual. All arguments are tensors and numbers; prepared weights are found
again. csrc/ops.cpp has the operators.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from . import _registry
from ._formats import DTYPES, GELU, GELU_TANH, NONE, RELU, RELU2, SILU

# No defaults: the dispatcher leaves out arguments that equal them, and with them their place in needs_input_grad.
_EPILOGUE = "Tensor? bias, Tensor? residual, Tensor? gate, Tensor? gate_bias, int activation, int format"
library = torch.library.Library("esmm", "DEF")
_unsafe = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
# A recorded graph would keep the weights of its recording: wrong where they are trained.
library.define(f"linear(Tensor x, Tensor weight, {_EPILOGUE}) -> Tensor", tags=_unsafe)
# This one has no gradients, and each argument costs the caller an eighth of a microsecond.
library.define(
    "_linear(Tensor x, Tensor weight, Tensor? bias=None, int activation=0, int format=0, Tensor? residual=None,"
    " Tensor? gate=None, Tensor? gate_bias=None) -> Tensor"
)
library.define("_linear_plain(Tensor x, Tensor weight, Tensor? bias=None, int activation=0) -> Tensor")
library.define(f"linear_stats(Tensor x, Tensor weight, {_EPILOGUE}) -> (Tensor, Tensor)")
library.define("_linear_turned(Tensor x, Tensor weight) -> Tensor", tags=_unsafe)
library.define(
    "linear_packed(Tensor x, Tensor packed, int n, Tensor? bias, Tensor? residual, int activation) -> Tensor"
)
library.define("unpack(Tensor packed, int out, int k, ScalarType dtype) -> Tensor")
library.define("_hold(Tensor t) -> int")
library.define("_float_copy(Tensor bias) -> Tensor")

library.impl("_hold", _registry.hold, "CompositeExplicitAutograd")
library.impl("_float_copy", _registry.float_copy, "CompositeExplicitAutograd")

# ---- shapes, for the compiler ----


def _same_device(weight: Tensor, x: Tensor) -> None:
    torch._check(weight.device == x.device, lambda: f"esmm: weight is on {weight.device}, and x is on {x.device}")


def _linear_fake(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    _same_device(weight, x)
    torch._check(weight.dim() == 2, lambda: f"esmm: weight has {weight.dim()} dimensions and needs 2")
    torch._check(
        x.shape[-1] == weight.shape[1], lambda: f"esmm: x has rows of {x.shape[-1]}, and weight is {list(weight.shape)}"
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _stats_fake(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tuple[Tensor, Tensor]:
    return _linear_fake(x, weight), x.new_empty(weight.shape[0], dtype=torch.int32)


def _turned_fake(x: Tensor, weight: Tensor) -> Tensor:
    _same_device(weight, x)
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def _packed_fake(x: Tensor, packed: Tensor, n: int, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _unpack_fake(packed: Tensor, out: int, k: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((out, k), dtype=dtype)


torch.library.register_fake("esmm::unpack", _unpack_fake, lib=library)
torch.library.register_fake("esmm::linear", _linear_fake, lib=library)
torch.library.register_fake("esmm::_linear", _linear_fake, lib=library)
torch.library.register_fake("esmm::_linear_plain", _linear_fake, lib=library)
torch.library.register_fake("esmm::linear_stats", _stats_fake, lib=library)
torch.library.register_fake("esmm::_linear_turned", _turned_fake, lib=library)
torch.library.register_fake("esmm::linear_packed", _packed_fake, lib=library)

# ---- gradients ----


def activate(x: Tensor, activation: int) -> Tensor:
    """The activation, by torch."""
    if activation == RELU:
        return torch.relu(x)
    if activation == RELU2:
        return torch.relu(x).square()
    if activation == GELU:
        return torch.nn.functional.gelu(x)
    if activation == GELU_TANH:
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == SILU:
        return torch.nn.functional.silu(x)
    return x


def derivative(x: Tensor, activation: int) -> Tensor:
    """The activation's derivative where its argument is x."""
    if activation == RELU:
        return (x > 0).to(x.dtype)
    if activation == RELU2:
        return 2 * torch.relu(x)
    if activation == GELU:
        return 0.5 * torch.erfc(x * -(0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    if activation == GELU_TANH:
        t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
    if activation == SILU:
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    return torch.ones_like(x)


def _setup(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    x, weight, bias, residual, gate, gate_bias, activation, format = inputs
    if format and (ctx.needs_input_grad[1] or ctx.needs_input_grad[4]):
        raise RuntimeError(
            "esmm: a weight that is prepared in a sparse format has no gradient, as what the format dropped could never"
            " come back. Train it with format='dense', or call weight.requires_grad_(False)"
        )
    y = output[0] if isinstance(output, tuple) else output
    # The derivatives of ReLU and ReLU2 follow from y; the others' arguments are computed again.
    ctx.from_y = activation in (RELU, RELU2) and gate is None and residual is None
    ctx.activation, ctx.format = activation, format
    ctx.residual_dtype = residual.dtype if residual is not None else None
    ctx.save_for_backward(x, weight, bias, gate, gate_bias, y if ctx.from_y else None)


def _times(d: Tensor, weight: Tensor, activation: int, format: int) -> Tensor:
    """d times weight: by the operator where the activation made zeros of d, unless it is to be differentiated again."""
    if activation in (RELU, RELU2) and not format and not torch.is_grad_enabled():
        return torch.ops.esmm._linear_turned(d, weight)
    return d @ weight.to(d.dtype)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> Tuple[Optional[Tensor], ...]:
    # With create_graph autograd is on in here: all of it has to be differentiable then, and sqrt(y) is not at zero.
    x, weight, bias, gate, gate_bias, y = ctx.saved_tensors
    act, format = ctx.activation, ctx.format
    need = ctx.needs_input_grad
    d_gate = None
    if act == NONE and gate is None:
        d = dy
    elif ctx.from_y and (act == RELU or not torch.is_grad_enabled()):
        d = torch.where(y > 0, dy, 0) if act == RELU else dy * (2 * torch.sqrt(y))
    else:
        pre = torch.ops.esmm.linear(x, weight, bias, None, None, None, NONE, format)
        if gate is None:
            d = dy * derivative(pre.float(), act).to(dy.dtype)
        else:
            g = torch.ops.esmm.linear(x, gate, gate_bias, None, None, None, NONE, format).float()
            d = dy * activate(g, act).to(dy.dtype)
            d_gate = (dy * pre * derivative(g, act)).to(dy.dtype)
    dx = None
    if need[0]:
        dx = _times(d, weight, act, format)
        if d_gate is not None:
            dx = dx + _times(d_gate, gate, act, format)
    rows = x.reshape(-1, x.shape[-1])

    def weights(needed: bool, of: Optional[Tensor], weight: Optional[Tensor]) -> Optional[Tensor]:
        if not needed or of is None or weight is None:
            return None
        return (of.reshape(-1, of.shape[-1]).t() @ rows).to(weight.dtype)

    def biases(needed: bool, of: Optional[Tensor], bias: Optional[Tensor]) -> Optional[Tensor]:
        if not needed or of is None or bias is None:
            return None
        return of.reshape(-1, of.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)

    return (
        dx, weights(need[1], d, weight), biases(need[2], d, bias), dy.to(ctx.residual_dtype) if need[3] else None,
        weights(need[4], d_gate, gate), biases(need[5], d_gate, gate_bias), None, None,
    )  # fmt: skip


def _setup_packed(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    raise RuntimeError("esmm: products with a SparseTensor have no gradient: call them under torch.no_grad(), or keep a"
                       " dense weight in an esmm.torch.SparseLinear")  # fmt: skip


def _no_backward(ctx: Any, *_: Any) -> Any:
    raise AssertionError("unreachable: _setup_packed raises")


torch.library.register_autograd("esmm::linear", _backward, setup_context=_setup, lib=library)
torch.library.register_autograd("esmm::linear_stats", _backward, setup_context=_setup, lib=library)
torch.library.register_autograd("esmm::linear_packed", _no_backward, setup_context=_setup_packed, lib=library)

# ---- autocast ----
# x goes to autocast's dtype and the result with it; weights stay as they are, and are prepared in that dtype once.


def _autocast(name: str, device: str, key: str) -> None:
    op = getattr(torch.ops.esmm, name).default
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        if x.dtype.is_floating_point and x.dtype != torch.float64 and dtype in DTYPES:
            x = x.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(x, *args, **kwargs)

    library.impl(name, cast, key)


for _name in ("linear", "_linear", "_linear_plain", "linear_stats", "linear_packed"):
    _autocast(_name, "cpu", "AutocastCPU")
    _autocast(_name, "cuda", "AutocastCUDA")
