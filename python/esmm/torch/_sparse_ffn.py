"""SparseFFN: a feed-forward layer that skips what its activation made zero, and trains."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .. import _lib
from .._lib import lib
from . import _ffn, _functional, _reference, _timing
from ._formats import ACTIVATIONS, MODES, SPARSIFIERS, choice
from ._ops import activate
from ._profile import Sample, call_model, check_plain
from ._reference import Options, Weights
from ._registry import context


class SparseFFN(nn.Module):
    """y = down(act(up(x))), or down(act(gate(x)) * up(x)) where it is gated.

    activation    'relu2', 'relu' (they make zeros), 'gelu', 'gelu_tanh', 'silu'
    mode          'exact': the same result as without skipping. 'dense': skips nothing. 'sparse', 'split': products of
                  h and of its gradient get at most two of every four values; in split mode in all columns but the
                  fullest 1 - sparse_share of them. docs/ffn.md says what each drops
    sparsifier    'top_n', 'soft', 'mvue': which two, in those modes
    permute_tokens, seed   groups of four tokens from a shuffled order; of the shuffle and of mvue

    up, gate and down are nn.Linear modules, whose parameters are all that a state_dict has. The first pass prepares
    them for the library, and later ones again when they have changed.

    Where h is too dense or the layer too small for skipping to pay in training, plain torch is faster, and
    torch.compile fuses it with its neighbours: fit() finds out, and sets `by` to "torch" then.
    """

    by = "library"  # or "torch": what trains the exact and dense modes

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: str = "relu2",
        gated: bool = False,
        bias: bool = True,
        mode: str = "exact",
        sparsifier: str = "top_n",
        sparse_share: float = 0.95,
        permute_tokens: bool = False,
        seed: int = 0,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias, device=device, dtype=dtype)
        self.gate = nn.Linear(d_model, d_hidden, bias, device=device, dtype=dtype) if gated else None
        self.down = nn.Linear(d_hidden, d_model, bias, device=device, dtype=dtype)
        self._set_options(activation, mode, sparsifier, sparse_share, permute_tokens, seed)

    def _set_options(
        self, activation: str, mode: str, sparsifier: str, sparse_share: float, permute_tokens: bool, seed: int
    ) -> None:
        if activation in (None, "none"):
            raise ValueError("activation is 'none': a feed-forward layer needs one, 'relu2' or 'relu' for instance")
        if not 0 < sparse_share <= 1:
            raise ValueError(f"sparse_share is {sparse_share}: it is above 0 and at most 1")
        self.activation, self.mode, self.sparsifier = activation, mode, sparsifier
        self.sparse_share, self.permute_tokens, self.seed = float(sparse_share), bool(permute_tokens), int(seed)
        self._activation = choice(ACTIVATIONS, activation, "activation")
        self._mode = choice(MODES, mode, "mode")
        self._sparsifier = choice(SPARSIFIERS, sparsifier, "sparsifier")

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        gate: Optional[nn.Linear] = None,
        *,
        activation: str,
        mode: str = "exact",
        sparsifier: str = "top_n",
        sparse_share: float = 0.95,
        permute_tokens: bool = False,
        seed: int = 0,
    ) -> "SparseFFN":
        """The layer that these modules make, with themselves inside: parameters are shared, not copied."""
        for name, module in (("up", up), ("down", down), ("gate", gate)):
            if module is not None or name != "gate":
                check_plain(module, name)
        hidden, model = up.weight.shape
        if down.weight.shape != (model, hidden):
            raise ValueError(f"down's weight is {list(down.weight.shape)}; with up's it has to be {[model, hidden]}")
        if gate is not None and gate.weight.shape != up.weight.shape:
            raise ValueError(f"gate's weight is {list(gate.weight.shape)}; it has to be {[hidden, model]}, as up's")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.up, made.gate, made.down = up, gate, down
        made._set_options(activation, mode, sparsifier, sparse_share, permute_tokens, seed)
        made.train(up.training)
        return made

    def _options(self) -> Options:
        return Options(
            self._activation, self._mode, self._sparsifier, self.sparse_share if self._mode == 1 else 0.0,
            self.permute_tokens, self.seed,
        )  # fmt: skip

    @property
    def gated(self) -> bool:
        return self.gate is not None

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate
        w1, b1 = _functional.weight_and_bias(self.up)
        w2, b2 = _functional.weight_and_bias(self.down)
        gate_weight, gate_bias = _functional.weight_and_bias(gate) if gate is not None else (None, None)
        _functional.check_tensor(x, "x")
        if _functional.transformed():
            w = Weights(w1, w2, gate_weight, b1, b2, gate_bias)
            _reference.check_smooth(self._options(), "forward-mode derivative and no torch.func transform")
            return _reference.forward(x, w, self._options())
        trains = torch.is_grad_enabled() and (
            x.requires_grad
            or w1.requires_grad
            or w2.requires_grad
            or (b1 is not None and b1.requires_grad)
            or (b2 is not None and b2.requires_grad)
            or (gate_weight is not None and gate_weight.requires_grad)
        )
        if not trains and self._mode == 0:
            h = _functional.call(x, w1, b1, None, gate_weight, gate_bias, self._activation, 0)
            y: Tensor = _functional.call(h, w2, b2, None, None, None, 0, 0)
            return y
        if trains and self.by == "torch" and self._mode in (_reference.EXACT, _reference.DENSE):
            if x.dtype == w1.dtype or torch.is_autocast_enabled(x.device.type):
                return self._by_torch(x)
        y, _ = torch.ops.esmm.ffn(
            x, w1, w2, gate_weight, b1, b2, gate_bias, *self._options(), trains,
        )  # fmt: skip
        return y

    def _by_torch(self, x: Tensor) -> Tensor:
        h = self.up(x) if self.gate is None else self.gate(x)
        h = activate(h, self._activation)
        y: Tensor = self.down(h if self.gate is None else h * self.up(x))
        return y

    def fit(self, x: Tensor, *, min_speedup: float = 1.1) -> float:
        """Times a forward and a backward pass of x by the library and by plain torch, and leaves training to torch
        (`by` = "torch") unless the library is min_speedup times as fast; torch.compile makes a dense layer some per
        cent faster than it is here. Returns how many times as fast the library is. Parameters and gradients stay as
        they are, and so does inference."""
        _functional.check_tensor(x, "x")
        _check_mode()
        of = [p for p in self.parameters() if p.requires_grad]
        if not of or self._mode not in (_reference.EXACT, _reference.DENSE):
            raise RuntimeError(
                "esmm: fit() is for a layer that is trained in mode 'exact' or 'dense': "
                + (f"this one's is {self.mode!r}" if of else "none of its parameters requires a gradient")
            )
        given = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
        before = self.by
        dy = torch.ones_like(given)

        def step(by: str) -> Callable[[], Any]:
            def run() -> Any:
                self.by = by
                with torch.enable_grad():
                    return torch.autograd.grad(self(given), [given, *of], dy)

            return run

        try:
            seconds = _timing.race({by: step(by) for by in ("library", "torch")}, x.device)
        except BaseException:
            self.by = before
            raise
        times = seconds["torch"] / seconds["library"]
        self.by = "library" if times >= min_speedup else "torch"
        return times

    @torch.no_grad()
    def measure(self, x: Tensor) -> Dict[str, Union[int, float]]:
        """Statistics of a forward pass of x: the density of h, by elements and by strips of tokens, the number of alive
        columns, and in the lossy modes the dropped share of h. Only where the library has the layer for x's device."""
        gate = self.gate
        w = Weights(
            self.up.weight, self.down.weight, gate.weight if gate is not None else None, self.up.bias, self.down.bias,
            gate.bias if gate is not None else None,
        )  # fmt: skip
        o = self._options()
        with context(x.device) as ctx:
            layer = _ffn._layer(ctx, x, w, o)
            if layer is None:
                raise RuntimeError(f"esmm: the library has no feed-forward layer on {x.device}")
            rows = x.detach().reshape(-1, x.shape[-1])
            x, mx = _ffn._matrix(rows)
            y, my = _ffn._matrix(torch.empty_like(x))
            report = _lib.FfnReport(size=ctypes.sizeof(_lib.FfnReport))
            with layer.lock:
                layer.update(ctx, w, x.dtype)
                cache = layer.take_cache(ctx)
                ctx.call(
                    lib.esmm_ffn_forward,
                    layer.handle.value,
                    ctypes.byref(mx),
                    ctypes.byref(my),
                    cache.value,
                    ctypes.byref(report),
                )
                layer.idle.append(cache)
        made: Dict[str, Union[int, float]] = {
            name: getattr(report, name)
            for name in (
                "tokens", "alive_columns", "sparse_columns", "sparse_share", "strip_rows", "element_density",
                "strip_density",
            )
        }  # fmt: skip
        made.update(
            kept=report.y.kept, dropped=report.y.dropped, norm=report.y.norm, norm_dropped=report.y.norm_dropped
        )
        return made

    def extra_repr(self) -> str:
        text = f"activation={self.activation!r}, mode={self.mode!r}"
        if self._mode in (1, 2):
            text += f", sparsifier={self.sparsifier!r}"
        text += f", sparse_share={self.sparse_share}" if self._mode == 1 else ""
        return text + (f", by={self.by!r}" if self.by != "library" else "")


def _check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("esmm: fit() times steps of training, and torch.inference_mode() has none: call it outside")


def fit(model: nn.Module, sample: Sample, *, min_speedup: float = 1.1) -> Dict[str, float]:
    """SparseFFN.fit for every such layer of a model that can train, with its input in a run on the sample; returns how
    many times as fast as plain torch the library trains each. Call it before torch.compile."""
    _check_mode()
    fed: Dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Tuple[Any, ...], Dict[str, Any]], None]:
        return lambda module, args, kwargs: fed.__setitem__(name, (*args, *kwargs.values())[0].detach())

    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseFFN)
        and module._mode in (_reference.EXACT, _reference.DENSE)
        and any(p.requires_grad for p in module.parameters())
    }
    handles = [module.register_forward_pre_hook(keep(name), with_kwargs=True) for name, module in layers.items()]
    try:
        with torch.no_grad():
            call_model(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    return {name: layers[name].fit(x, min_speedup=min_speedup) for name, x in fed.items()}
