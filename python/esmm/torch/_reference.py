"""Products and the feed-forward layer by plain torch: the fallback for devices without the library's layer, second
derivatives and torch.func.

The same computation in the same modes (docs/ffn.md). MVUE and the order of tokens draw other random numbers than the
library's, with the same distribution.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import torch
from torch import Tensor

from ._ops import activate, derivative

EXACT, SPLIT, SPARSE, DENSE = 0, 1, 2, 3
TOP_N, SOFT, MVUE = 0, 1, 2


class Options(NamedTuple):
    """The layer's options, as the operators pass them."""

    activation: int
    mode: int
    sparsifier: int
    share: float
    permute: bool
    seed: int


class Weights(NamedTuple):
    """The layer's parameters: w1 and gate [hidden, model], w2 [model, hidden], as in nn.Linear."""

    w1: Tensor
    w2: Tensor
    gate: Optional[Tensor]
    b1: Optional[Tensor]
    b2: Optional[Tensor]
    b_gate: Optional[Tensor]


def check_smooth(o: Options, what: str) -> None:
    """Refuses calls without a meaning in the lossy modes: their gradients are estimates."""
    if o.mode in (SPLIT, SPARSE):
        name = "split" if o.mode == SPLIT else "sparse"
        raise RuntimeError(
            f"esmm: torch.ops.esmm.ffn has no {what} in mode {name!r}, whose gradients are estimates: make the"
            " SparseFFN with mode='exact'"
        )


def sparsify_groups(groups: Tensor, sparsifier: int) -> Tensor:
    """groups [.., 4] with at most two nonzeros left in each."""
    size = groups.abs()
    if sparsifier == TOP_N:
        kept = torch.argsort(size, dim=-1, descending=True, stable=True)[..., :2]
        return torch.zeros_like(groups).scatter(-1, kept, groups.gather(-1, kept))
    if sparsifier == SOFT:
        third = size.sort(dim=-1, descending=True).values[..., 2:3]
        made = groups.sign() * torch.relu(size - third)
        norm = (made * made).sum()
        return made * torch.where(norm > 0, (groups * made).sum() / norm, 1.0)
    total = size.sum(-1, keepdim=True)
    p = torch.where(total > 0, 2 * size / total, 0)
    largest = p > 1  # it always stays, and the others share the rest; where two are nonzero both stay
    rest = torch.where(largest, 0, size)
    left = rest.sum(-1, keepdim=True)
    p = torch.where(largest.any(-1, keepdim=True), torch.where(largest, 1.0, torch.where(left > 0, rest / left, 0)), p)
    p = torch.where((size > 0).sum(-1, keepdim=True) <= 2, (size > 0).to(p.dtype), p)
    # Systematic sampling: as many as the p's sum up to, each with its p.
    ends = p.cumsum(-1)
    u = torch.rand_like(ends[..., :1])
    before = torch.cat((torch.zeros_like(u), ends[..., :-1]), -1)
    chosen = torch.floor(ends - u + 1e-6) > torch.floor(before - u + 1e-6)
    return torch.where(chosen, groups / p.clamp_min(1e-30), 0)


def sparsify(m: Tensor, columns: Tensor, along_tokens: bool, o: Options) -> Tensor:
    """m [tokens, hidden] with its `columns` made 2:4 along an axis."""
    part = m[:, columns].float()
    order = None
    if along_tokens:
        if o.permute:
            order = torch.randperm(part.shape[0], generator=torch.Generator().manual_seed(o.seed & (2**63 - 1)))
            order = order.to(m.device)
            part = part[order]
        part = part.t()
    else:  # features 4g to 4g + 3, of which those that go sparse share two places
        part = torch.zeros_like(m, dtype=torch.float32).index_copy_(1, columns, part)
    n = part.shape[1]
    padded = torch.nn.functional.pad(part, (0, -n % 4))
    made = sparsify_groups(padded.reshape(part.shape[0], -1, 4), o.sparsifier).reshape(part.shape[0], -1)[:, :n]
    if along_tokens:
        made = made.t()
        if order is not None:
            made = torch.empty_like(made).index_copy_(0, order, made)
    else:
        made = made[:, columns]
    out = m.clone()
    out[:, columns] = made.to(m.dtype)
    return out


def sparse_columns(h: Tensor, o: Options) -> Optional[Tensor]:
    """The columns of h that go sparse, by index; None where none do."""
    if o.mode not in (SPLIT, SPARSE):
        return None
    hidden = h.shape[1]
    if o.mode == SPARSE:
        return torch.arange(hidden, device=h.device)
    count = int(o.share * hidden + 0.5)
    ranked = torch.argsort((h != 0).sum(0), stable=True)
    return ranked[:count].sort().values


def linear(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    return torch.nn.functional.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype))


def product(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Optional[Tensor], gate: Optional[Tensor],
    gate_bias: Optional[Tensor], activation: int,
) -> Tensor:  # fmt: skip
    """torch.ops.esmm.linear by plain torch."""
    y = linear(x, weight, bias)
    y = activate(y, activation) if gate is None else activate(linear(x, gate, gate_bias), activation) * y
    return y if residual is None else y + residual.to(y.dtype)


def hidden(x: Tensor, w: Weights, o: Options) -> "tuple[Tensor, Tensor, Optional[Tensor]]":
    """h; the up branch, before the activation or the product with the gate; the gate before its activation."""
    up = linear(x, w.w1, w.b1)
    if w.gate is None:
        return activate(up, o.activation), up, None
    g = linear(x, w.gate, w.b_gate)
    return activate(g, o.activation) * up, up, g


def forward(x: Tensor, w: Weights, o: Options) -> Tensor:
    """y of x [tokens, model]."""
    h, _, _ = hidden(x, w, o)
    columns = sparse_columns(h, o)
    return linear(h if columns is None else sparsify(h, columns, False, o), w.w2, w.b2)


def backward(dy: Tensor, x: Tensor, w: Weights, o: Options, need: "List[bool]") -> List[Optional[Tensor]]:
    """Gradients of x, w1, w2, gate, b1, b2, b_gate; None where not needed."""
    h, up, g = hidden(x, w, o)
    columns = sparse_columns(h, o)
    dh = dy @ w.w2.to(dy.dtype)
    d_gate = None
    if g is None:
        d = dh * derivative(up.float(), o.activation).to(dh.dtype)
    else:
        d = dh * activate(g, o.activation)
        d_gate = dh * up * derivative(g.float(), o.activation).to(dh.dtype)

    def thin(m: Tensor, along_tokens: bool) -> Tensor:
        return m if columns is None else sparsify(m, columns, along_tokens, o)

    made: List[Optional[Tensor]] = [None] * 7
    if need[0]:
        dx = thin(d, False) @ w.w1.to(d.dtype)
        if d_gate is not None and w.gate is not None:
            dx = dx + thin(d_gate, False) @ w.gate.to(d.dtype)
        made[0] = dx
    if need[1]:
        made[1] = thin(d, True).t() @ x
    if need[2]:
        made[2] = dy.t() @ thin(h, True)
    if need[3] and d_gate is not None:
        made[3] = thin(d_gate, True).t() @ x
    if need[4]:
        made[4] = d.sum(0, dtype=torch.float32)
    if need[5]:
        made[5] = dy.sum(0, dtype=torch.float32)
    if need[6] and d_gate is not None:
        made[6] = d_gate.sum(0, dtype=torch.float32)
    return made
