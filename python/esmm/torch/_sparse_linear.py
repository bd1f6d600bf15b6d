"""SparseLinear: nn.Linear that skips the zeros of its input, and those of its weight where that has a sparse format."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .._core import Format
from . import _functional, _registry
from ._formats import ACTIVATIONS, choice, encode, raw_or_none
from ._profile import check_plain


def prune_(weight: Tensor, format: Union[str, Format, None], density: Optional[float]) -> None:
    """Sets elements of weight [out, in] to zero so that weight' fits the format."""
    import ctypes

    from .. import _core, _lib

    f = _core.parse_format(format)
    if f.kind == "bsr" and density is None:
        return  # every matrix fits it: blocks of zeros are left out, the others stay
    opts = _lib.PruneOpts(ctypes.sizeof(_lib.PruneOpts), _core.format_struct(f), density or 0.0, None)
    with torch.no_grad():
        work = weight.detach().t()
        raw = raw_or_none(work)
        copy = raw is None
        if copy:
            work = work.contiguous()
            raw = raw_or_none(work)
        assert raw is not None
        matrix = _lib.Matrix(*raw)
        with _registry.context(weight.device) as ctx:
            ctx.call(_lib.lib.esmm_prune, ctypes.byref(matrix), ctypes.byref(opts), None)
        if copy:
            weight.copy_(work.t())
        elif not weight.is_inference():
            torch.autograd.graph.increment_version(weight)


class SparseLinear(nn.Module):
    """y = act(x weight' + bias) + residual.

    format      'dense': zeros of x are skipped. '2:4' (any N:M) and 'bsr:64': those of weight too; weight has to fit
                (see from_linear) and is for inference: it has no gradient.
    activation  None, 'relu', 'relu2', 'gelu', 'gelu_tanh', 'silu': applied before y is stored

    weight [out, in] and bias are ordinary parameters, and all that a state_dict has. The first call
    prepares them, and later ones again when they have changed.
    """

    weight: nn.Parameter
    bias: Optional[nn.Parameter]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "dense",
        activation: Optional[str] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self._set_options(in_features, out_features, format, activation)
        made = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = made.weight  # type: ignore[assignment]
        self.register_parameter("bias", made.bias)
        if self._format:
            prune_(self.weight, format, None)
            self.weight.requires_grad_(False)

    def _set_options(self, in_features: int, out_features: int, format: str, activation: Optional[str]) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.format, self.activation = format, activation
        self._format = encode(format)
        self._activation = choice(ACTIVATIONS, activation, "activation")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: str = "dense",
        activation: Optional[str] = None,
        prune: bool = False,
        density: Optional[float] = None,
    ) -> "SparseLinear":
        """The same layer with linear's own parameters; with a sparse format the weight is a parameter without gradient
        of the same memory, and linear's own stays as it is. prune: where the weight does not fit the format, it is
        pruned, in place, for 'bsr' to that density of blocks; without it such a weight is refused in the first call."""
        check_plain(linear, "linear")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set_options(linear.in_features, linear.out_features, format, activation)
        made.weight = linear.weight  # type: ignore[assignment]
        made.register_parameter("bias", linear.bias)
        if made._format:
            if prune:
                prune_(linear.weight, format, density)
            if linear.weight.requires_grad:
                made.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        made.train(linear.training)
        return made

    def to_linear(self) -> nn.Linear:
        """An nn.Linear with the same parameters; an activation is left out."""
        made = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        made.weight = self.weight
        if self.bias is not None:
            made.bias = self.bias
        return made.train(self.training)

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tensor:
        weight, bias = _functional.weight_and_bias(self)
        made: Tensor = _functional.call(x, weight, bias, residual, None, None, self._activation, self._format)
        return made

    def refresh(self) -> None:
        """To be called after a write that torch does not count, as one to weight.data."""
        _registry.forget(self.weight.data_ptr())
        if self.bias is not None:
            _registry.forget(self.bias.data_ptr())

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        if self._format:
            text += f", format={self.format!r}"
        return text + (f", activation={self.activation!r}" if self.activation else "")
