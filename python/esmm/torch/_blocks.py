"""The modules that esmm.torch.convert puts in place of a Linear or of a feed-forward block.

A replacement shares the dictionaries of parameters, buffers and children with the module that it replaces, which it
keeps. So names in a state_dict stay as they were, both change together when either is loaded, moved or exchanged,
and undoing means putting the old module back.

It also has several ways to the same result, and takes the one that was fastest on the sample for the nearest number of
rows. The old module's way is among them: a block may be sparse enough for one token but not for the strips of a long
prompt, and then runs as before for the prompt.
"""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ._formats import RELU, RELU2
from ._profile import features, hooked, is_conv1d
from ._functional import call, weight_and_bias

Ways = Sequence[Tuple[int, str]]  # rows of a call, and the way that was fastest


def product(x: Tensor, linear: nn.Module, gate: Optional[nn.Module] = None, activation: int = 0) -> Tensor:
    """The Linear (with a gate: both) by the library."""
    weight, bias = _weight(linear)
    other, shift = _weight(gate) if gate is not None else (None, None)
    made: Tensor = call(x, weight, bias, None, other, shift, activation, 0)
    return made


def _weight(linear: nn.Module) -> Tuple[Tensor, Optional[Tensor]]:
    """The weight [out, in], and the bias."""
    weight, bias = weight_and_bias(linear)
    return weight.t() if is_conv1d(linear) else weight, bias


def activate(x: Tensor, activation: int) -> Tensor:
    x = torch.relu(x)
    return x * x if activation == RELU2 else x


class Converted(nn.Module):
    """What both kinds share."""

    trains = True  # in training, too, by its ways; False: by the old module's

    def __init__(self, original: nn.Module, ways: Ways) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple: it is not a child
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self.training = original.training
        self.set_ways(ways)

    @property
    def original(self) -> nn.Module:
        return self._original[0]

    def set_ways(self, ways: Ways) -> None:
        """ways: (rows, way) pairs. A call takes the pair whose number of rows is nearest, by ratio."""
        ways = sorted(ways)
        self.ways = ways
        self._first = ways[0][1]
        # From that many rows on, the next way.
        self._steps: List[Tuple[int, str]] = []
        last = self._first
        for (rows, _), (more, way) in zip(ways, ways[1:]):
            if way != last:
                self._steps.append((math.isqrt(rows * more) + 1, way))
                last = way

    def way(self, x: Tensor) -> str:
        return self.way_of(x.numel() // x.shape[-1] if x.shape[-1] else 0) if self._steps else self._first

    def way_of(self, rows: int) -> str:
        made = self._first
        for start, way in self._steps:
            if rows >= start:
                made = way
        return made

    def train(self, mode: bool = True) -> "Converted":
        super().train(mode)
        self.original.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_original":
                raise
            return getattr(self.original, name)

    def extra_repr(self) -> str:
        return ", ".join(f"{way} at {rows} rows" for rows, way in self.ways)


class ConvertedLinear(Converted):
    """A Linear or Conv1D that skips the zeros of its input. Ways: 'dense', 'down'."""

    def forward(self, input: Optional[Tensor] = None, **named: Any) -> Tensor:
        """input: under the name that the old module has for it, too: input of a Linear, x of a Conv1D."""
        x = named.get("x") if input is None and len(named) == 1 and is_conv1d(self.original) else input
        if x is None or (named and x is input):  # the old one raises its error
            return self.original.forward(*([] if input is None else [input]), **named)  # type: ignore[no-any-return]
        if self.way(x) == "dense" or (self.training and not self.trains):
            return self.original.forward(x)  # type: ignore[no-any-return]
        return product(x, self.original)

    def extra_repr(self) -> str:
        k, n = features(self.original)
        return f"{k} -> {n}, " + super().extra_repr()


class ConvertedBlock(Converted):
    """A feed-forward block: down(act(up(x))) or down(act(gate(x)) * up(x)).

    Ways: 'dense', the old one; 'down', torch's as far as h, then a product that skips its zeros; 'fused', both by the
    library, with the activation in the first one's epilogue. Where the block drops values out in training, or a step of
    it was not faster, it trains the old way.
    """

    def __init__(
        self, original: nn.Module, up: str, down: str, gate: Optional[str], activation: int, ways: Ways, trains: bool
    ) -> None:
        super().__init__(original, ways)
        self.names = (up, down, gate)
        self.activation = activation
        self.trains = trains
        self._types = self._kinds()

    def _child(self, name: str) -> Any:
        module: Any = self
        for part in name.split("."):
            module = None if module is None else module._modules.get(part)
        return module  # None: it has been taken away since

    def hidden(self, x: Tensor, way: str) -> Tensor:
        up, _, gate = self.names
        first = self._child(up)
        second = self._child(gate) if gate is not None else None
        if way == "fused":
            return product(x, first, second, self.activation)
        made: Tensor = activate(first(x) if second is None else second(x), self.activation)
        return made if second is None else made * first(x)

    def _linears(self) -> List[nn.Module]:
        return [self._child(name) for name in self.names if name is not None]

    def _kinds(self) -> List[type]:
        """Of the children, the activation among them, and of the Linears, which may lie deeper."""
        return [type(child) for child in (*self._modules.values(), *self._linears())]

    def _unchanged(self) -> bool:
        """Whether the children are as they were. A child that an adapter has exchanged, or that has got hooks, must run
        as it is."""
        return self._kinds() == self._types and not any(map(hooked, self._linears()))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        way = self.way(x)
        if (
            way == "dense"
            or args
            or kwargs
            or (self.training and not self.trains)
            or not self._unchanged()
        ):
            return self.original.forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        return product(self.hidden(x, way), self._child(self.names[1]))

    def extra_repr(self) -> str:
        kind = {RELU: "relu", RELU2: "relu2"}[self.activation] + (", gated" if self.names[2] else "")
        return f"{kind}, " + super().extra_repr()


class ConvertedSequential(ConvertedBlock, nn.Sequential):  # type: ignore[misc]
    """A block that was an nn.Sequential, and still is one: its children can be counted, taken and exchanged."""

    def __getitem__(self, index: Any) -> Any:
        # A part of it is a plain nn.Sequential, which the old module makes.
        return self.original[index]  # type: ignore[index]

    def __delitem__(self, index: Any) -> None:
        # It numbers the others anew, in another dictionary.
        old: Any = self.original
        del old[index]
        self._modules = old._modules
