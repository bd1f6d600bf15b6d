"""Products as functions of tensors."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from torch.autograd import forward_ad

from . import _ops, _reference  # noqa: F401  (registers the operators)
from ._formats import ACTIVATIONS, choice, encode

_linear, _linear_trained = torch.ops.esmm._linear.default, torch.ops.esmm.linear.default
_linear_plain = torch.ops.esmm._linear_plain.default
_linear_now = getattr(_linear_plain, "_op", _linear_plain)  # called directly: a Python frame less


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activation: Optional[str] = None,
    residual: Optional[Tensor] = None,
    gate: Optional[Tensor] = None,
    gate_bias: Optional[Tensor] = None,
    format: str = "dense",
    stats: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """act(x weight' + bias) + residual; with a gate act(x gate' + gate_bias) * (x weight' + bias) + residual.

    weight and gate are [out, in], as in nn.Linear. They are prepared in the first call, so they should be
    nn.Parameters: others are prepared anew in every call. Zeros of x are skipped where that pays, whatever made them.
    With stats the second result counts the nonzeros of each column of the first (int32 [out]).
    """
    check_tensor(weight, "weight")
    for name, t in (("bias", bias), ("residual", residual), ("gate", gate), ("gate_bias", gate_bias)):
        if t is not None:
            check_tensor(t, name)
    return call(
        x, weight, bias, residual, gate, gate_bias, choice(ACTIVATIONS, activation, "activation"), encode(format), stats
    )


def transformed() -> bool:
    """Whether forward-mode derivatives are being taken, or a transform of torch.func (grad, jvp, vmap) is under way.

    The operators are opaque to these, which would take a product for a constant: torch's own products run then.
    """
    # A function that is being compiled cannot ask whether there are transforms.
    return forward_ad._current_level >= 0 or (
        not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    )


def check_tensor(t: Any, what: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{what} is a {type(t).__name__}: it has to be a torch.Tensor")


def weight_and_bias(linear: nn.Module) -> Tuple[Tensor, Optional[Tensor]]:
    """Of a Linear: linear.weight and linear.bias, which nn.Module takes half a microsecond each to find. They are no
    entries of this dictionary where they are computed (torch.nn.utils.parametrize)."""
    mine = linear._parameters
    weight: Any = mine.get("weight")
    bias: Any = mine["bias"] if "bias" in mine else linear.bias
    return linear.weight if weight is None else weight, bias  # type: ignore[return-value]


def call(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Optional[Tensor], gate: Optional[Tensor],
    gate_bias: Optional[Tensor], activation: int, format: int, stats: bool = False,
) -> Any:  # fmt: skip
    """linear() with numbers for names. Where nothing needs a gradient it takes the operator without autograd."""
    check_tensor(x, "x")
    if transformed():
        y = _reference.product(x, weight, bias, residual, gate, gate_bias, activation)
        return (y, (y != 0).reshape(-1, y.shape[-1]).sum(0, dtype=torch.int32)) if stats else y
    if stats:
        return torch.ops.esmm.linear_stats.default(x, weight, bias, residual, gate, gate_bias, activation, format)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (gate is not None and gate.requires_grad)
        or (gate_bias is not None and gate_bias.requires_grad)
    ):
        if x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "esmm: a captured graph would go on with the weights as they are now: capture under torch.no_grad(), or"
                " call requires_grad_(False) on them"
            )
        return _linear_trained(x, weight, bias, residual, gate, gate_bias, activation, format)
    if format or residual is not None or gate is not None or gate_bias is not None:
        return _linear(x, weight, bias, activation, format, residual, gate, gate_bias)
    run = _linear_plain if torch.compiler.is_compiling() else _linear_now
    if activation:
        return run(x, weight, bias, activation)
    return run(x, weight) if bias is None else run(x, weight, bias)
