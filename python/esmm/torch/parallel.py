"""A feed-forward layer over several processes: the Megatron split, on torch.distributed.

Each rank of a group holds some rows of the up projection's weight [hidden, model] (and of the gate's), and the same
columns of the down projection's [model, hidden]. It computes its part of h alone, skips the zeros of that part, and has
a share of y; one all_reduce makes y whole. Backwards dy is the same on every rank, and one all_reduce makes dx whole.
Nothing else is sent. Each rank chooses its kernels by the zeros that it sees.

    group = dist.new_group([0, 1])
    layer = ParallelFFN(4096, 14336, activation="relu2", group=group)
    y = layer(x)                                   # x and y are the same on both ranks

Beside it, DistributedDataParallel averages over the ranks that hold the same part: give it that group as its
process_group. With a group of one rank the layer is an ordinary one.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ._formats import ACTIVATIONS, choice
from ._functional import call

__all__ = ["ParallelFFN", "share"]


def share(size: int, rank: int, ranks: int) -> Tuple[int, int]:
    """The part [first, last) of `size` things that is this rank's; parts differ by one at most."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: it is from 0 to {ranks - 1}")
    return size * rank // ranks, size * (rank + 1) // ranks


def _there(group: Any) -> bool:
    return group is not None and dist.get_world_size(group) > 1


class _Spread(torch.autograd.Function):
    """x, the same on every rank; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> Tuple[Tensor, None]:
        dx = grads[0].contiguous().clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' y; its gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        y = y.contiguous().clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> Tuple[Tensor, None]:
        return grads[0], None


class ParallelFFN(nn.Module):
    """y = h down' + down_bias, h = act(x up' + up_bias), or act(x gate' + gate_bias) * (x up' + up_bias) if gated.

    up, gate [part, d_model] and down [d_model, part] are this rank's part of the d_hidden features. The same seed makes
    the same layer, however many ranks share it. group: the ranks that do; None: all of them, or this process alone
    where torch.distributed is not initialized.
    """

    up: nn.Parameter
    down: nn.Parameter
    gate: Optional[nn.Parameter]
    up_bias: Optional[nn.Parameter]
    gate_bias: Optional[nn.Parameter]
    down_bias: Optional[nn.Parameter]

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: str = "relu2",
        gated: bool = False,
        bias: bool = True,
        group: Any = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        made = [nn.Linear(d_model, d_hidden, bias, dtype=dtype) for _ in range(2 if gated else 1)]
        last = nn.Linear(d_hidden, d_model, bias, dtype=dtype)
        self._take(made[0], last, made[1] if gated else None, activation, group, device)

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        gate: Optional[nn.Linear] = None,
        activation: str = "relu2",
        group: Any = None,
        device: Any = None,
    ) -> "ParallelFFN":
        """This rank's part, copied out of whole layers, which every rank has."""
        layer = cls.__new__(cls)
        layer._take(up, down, gate, activation, group, device)
        return layer

    def _take(
        self, up: nn.Linear, down: nn.Linear, gate: Optional[nn.Linear], activation: str, group: Any, device: Any
    ) -> None:
        nn.Module.__init__(self)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        if self.rank < 0:
            raise ValueError("this process is not part of the group")
        hidden, model = up.weight.shape
        for what, layer, shape in (("gate", gate, (hidden, model)), ("down", down, (model, hidden))):
            if layer is not None and tuple(layer.weight.shape) != shape:
                raise ValueError(f"{what} has the shape {tuple(layer.weight.shape)}: beside up it must have {shape}")
        if hidden < self.ranks:
            raise ValueError(f"d_hidden is {hidden}: it must be at least the number of ranks, {self.ranks}")
        self.d_model, self.d_hidden, self.activation = model, hidden, activation
        self._activation = choice(ACTIVATIONS, activation, "activation")
        first, last = share(hidden, self.rank, self.ranks)

        def part(name: str, whole: Optional[Tensor], rows: bool = False, columns: bool = False) -> None:
            made = None
            if whole is not None:
                cut = (
                    whole.detach()[first:last] if rows else whole.detach()[:, first:last] if columns else whole.detach()
                )
                made = nn.Parameter(cut.to(device).clone(memory_format=torch.contiguous_format))
            self.register_parameter(name, made)

        part("up", up.weight, rows=True)
        part("gate", None if gate is None else gate.weight, rows=True)
        part("down", down.weight, columns=True)
        part("up_bias", up.bias, rows=True)
        part("gate_bias", None if gate is None else gate.bias, rows=True)
        part("down_bias", down.bias)

    def hidden(self, x: Tensor) -> Tensor:
        """This rank's part of h."""
        made: Tensor = call(x, self.up, self.up_bias, None, self.gate, self.gate_bias, self._activation, 0)
        return made

    def forward(self, x: Tensor) -> Tensor:
        if not _there(self.group):
            alone: Tensor = call(self.hidden(x), self.down, self.down_bias, None, None, None, 0, 0)
            return alone
        h = self.hidden(_Spread.apply(x, self.group))  # type: ignore[no-untyped-call]
        part = call(h, self.down, None, None, None, None, 0, 0)
        y: Tensor = _Sum.apply(part, self.group)  # type: ignore[no-untyped-call]
        return y if self.down_bias is None else y + self.down_bias  # once, not once for each rank

    def whole(self) -> Dict[str, Tensor]:
        """The weights of all ranks put together, on each of them: up, gate, down and the biases. A collective call."""
        made: Dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            mine = parameter.detach()
            if name == "down_bias" or not _there(self.group):
                made[name] = mine.clone()
                continue
            axis = 1 if name == "down" else 0
            parts = []
            for rank in range(self.ranks):
                first, last = share(self.d_hidden, rank, self.ranks)
                shape = list(mine.shape)
                shape[axis] = last - first
                piece = mine.contiguous().clone() if rank == self.rank else mine.new_empty(shape)
                dist.broadcast(piece, dist.get_global_rank(self.group, rank), group=self.group)
                parts.append(piece)
            made[name] = torch.cat(parts, axis)
        return made

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, activation={self.activation!r}, "
            f"gated={self.gate is not None}, rank {self.rank} of {self.ranks}"
        )
