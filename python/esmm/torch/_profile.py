"""esmm.torch.profile: which Linears of a model are fed zeros, and how many. It changes nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ._formats import DTYPES

Sample = Any  # a tensor, a tuple of positional or a dict of named arguments


def call_model(model: nn.Module, sample: Sample) -> Any:
    """The model's forward pass on one sample."""
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, (tuple, list)):
        return model(*sample)
    return model(sample)


def is_conv1d(module: nn.Module) -> bool:
    """The Linear of GPT-2 in transformers, weight [in, out]. Known by what it has: transformers need not be there."""
    if type(module).__name__ != "Conv1D":
        return False
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.dim() == 2
        and weight.shape[1] == getattr(module, "nf", None)
    )


def is_linear(module: nn.Module) -> bool:
    """A plain nn.Linear or Conv1D. Subclasses may do anything, so they are not taken for one; nn's own do not."""
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear) or is_conv1d(module)


def hooked(module: nn.Module) -> str:
    """Parts of a module that a product with its weight alone would leave out: hooks, a replaced forward; or ""."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "backward hooks"
    return "a forward put over its own" if "forward" in vars(module) else ""


def check_plain(linear: Any, what: str) -> None:
    """Refuses a Linear that is more than its weight and bias: in another module that would be lost."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{what} is a {type(linear).__name__}: it has to be an nn.Linear")
    kind = type(linear).__name__
    if linear._parameters.get("weight") is None or (linear.bias is not None and "bias" not in linear._parameters):
        raise ValueError(
            f"{what} is a {kind} whose weight or bias is computed from others ({', '.join(linear.state_dict())}): call"
            " torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or prune.remove first"
        )
    if type(linear).forward is not nn.Linear.forward:
        raise TypeError(f"{what} is a {kind} with a forward of its own, which would be lost: it has to be an nn.Linear")
    more = hooked(linear)
    if more:
        raise ValueError(f"{what} has {more}, which would be lost: remove them, and add them to the new module")


def parameter(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found


def features(module: nn.Module) -> Tuple[int, int]:
    """in, out"""
    rows, cols = parameter(module, "weight").shape
    return (rows, cols) if is_conv1d(module) else (cols, rows)


@contextlib.contextmanager
def watching(model: nn.Module, hooks: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Forward hooks (module, args, kwargs, output), eval mode and no gradients, and all of it back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks.items()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode


@dataclass
class LayerProfile:
    """The input of one Linear."""

    name: str
    kind: str  # "Linear", "Conv1D"
    in_features: int
    out_features: int
    calls: int = 0
    rows: int = 0
    nonzeros: int = 0
    strip_rows: int = 8
    strips: int = 0
    strip_bits: int = 0  # set ones
    nan: bool = False  # was one in its input
    alive: Optional[Tensor] = field(default=None, repr=False)  # which features were ever nonzero

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        self.calls += 1
        if not x.shape[0]:
            return
        on = x != 0
        self.nan = self.nan or bool(torch.isnan(x).any())
        self.rows += x.shape[0]
        self.nonzeros += int(on.sum())
        whole = x.shape[0] // self.strip_rows * self.strip_rows
        bits = int(on[:whole].reshape(-1, self.strip_rows, x.shape[1]).any(1).sum())
        if whole < x.shape[0]:
            bits += int(on[whole:].any(0).sum())
        self.strips += -(-x.shape[0] // self.strip_rows)
        self.strip_bits += bits
        alive = on.any(0)
        self.alive = alive if self.alive is None else self.alive | alive

    @property
    def density(self) -> float:
        """Nonzero share of its input."""
        return self.nonzeros / (self.rows * self.in_features) if self.rows else 1.0

    @property
    def strip_density(self) -> float:
        """Share of (strip of rows, feature) with a nonzero: the share to multiply in a product of many rows."""
        return self.strip_bits / (self.strips * self.in_features) if self.strips else 1.0

    @property
    def dead(self) -> float:
        """Share of the features that were zero in every row."""
        return 1.0 - int(self.alive.sum()) / self.in_features if self.alive is not None else 0.0


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns under each other; the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    left = [all(not row[i][:1].isdigit() for row in lines) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if l else c.rjust(w) for c, w, l in zip(row, widths, left)).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, lines)])


@dataclass
class Profile:
    """The Linears of a model, in the order in which they were called; print it for a table."""

    layers: List[LayerProfile]
    uncalled: List[str]  # Linears that the sample did not reach
    some: float = 0.99  # inputs of at most this density count as having zeros

    def __getitem__(self, name: str) -> LayerProfile:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    @property
    def sparse(self) -> List[LayerProfile]:
        """Those whose input has zeros."""
        return [layer for layer in self.layers if layer.density <= self.some]

    def __str__(self) -> str:
        lines = [
            (
                layer.name,
                f"{layer.kind} {layer.in_features} -> {layer.out_features}",
                f"{layer.rows}",
                f"{100 * layer.density:.1f} %",
                f"{100 * layer.strip_density:.1f} %",
                f"{100 * layer.dead:.1f} %",
            )
            for layer in self.sparse
        ]
        strip = self.layers[0].strip_rows if self.layers else 8
        head = ("layer", "kind", "rows", "nonzero", f"in strips of {strip}", "dead features")
        text = [text_table(head, lines)] if lines else []
        others = len(self.layers) - len(lines)
        if others:
            text.append(f"{others} {'other ' if lines else ''}Linears have inputs without zeros")
        if self.uncalled:
            text.append(f"{len(self.uncalled)} Linears were not called as modules: {', '.join(self.uncalled[:4])}, ...")
        return "\n".join(text) if text else "no Linears"


def profile(model: nn.Module, inputs: Sample, strip_rows: Optional[int] = None) -> Profile:
    """Runs the model once on `inputs` and reports how many zeros each Linear (or Conv1D) is fed.

    inputs: a tensor, a tuple of positional or a dict of named arguments; or a list of such, for several runs. The model
    is left as it was; it runs in eval mode, without gradients. strip_rows: rows that share a bitmap in a product of
    many; by default 8 for a CPU and 64 for a GPU.
    """
    runs = inputs if isinstance(inputs, list) else [inputs]
    found: Dict[nn.Module, LayerProfile] = {}
    order: List[LayerProfile] = []
    for name, module in model.named_modules():
        if is_linear(module):
            kind = "Conv1D" if is_conv1d(module) else "Linear"
            on_gpu = parameter(module, "weight").device.type == "cuda"
            strip = strip_rows if strip_rows is not None else 64 if on_gpu else 8
            if strip < 1:
                raise ValueError(f"strip_rows is {strip}: it must be at least 1")
            found[module] = LayerProfile(name, kind, *features(module), strip_rows=strip)

    def look(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.dtype in DTYPES:
            layer = found[module]
            if not layer.calls:
                order.append(layer)
            layer.add(x)

    with watching(model, {module: look for module in found}):
        for sample in runs:
            call_model(model, sample)
    return Profile(order, [layer.name for layer in found.values() if not layer.calls])
