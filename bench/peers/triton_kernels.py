"""triton_kernels.py: what a user would write in Triton for the same products; run.py times it beside ours.

Written here from the papers' descriptions, not from their code:

  block_sparse   x [m, k] by weights [n, k] of which only some blocks are kept (BSR), as block-sparse kernels have done
                 since Gray, Radford and Kingma (2017): a program makes one tile of the result and walks the kept blocks.
  threshold      TEAL (Liu and others, 2024): one row; a program takes a piece of k and a piece of n, loads the rows of
                 the weights whose activation is above a threshold, and adds its part to the result with atomics.
  gather         one row, and a list of the k's that are alive, as kernels with a predictor have it (Deja Vu, Liu and
                 others, 2023; PowerInfer; Polar Sparsity): only those rows of the weights are touched.
  compact        makes that list from the row itself, for who has no predictor.
  read           adds up an array: how fast the memory can be read.

Weights of the one-row kernels are [k, n], a k's row in one piece. Configurations are few and all tried by run.py; the
fastest counts.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Tuple

import torch
import triton
import triton.language as tl


@triton.jit
def _block_sparse(x, values, first_of, column_of, y, m, n, k,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    band = tl.program_id(1)
    across = tl.arange(0, BLOCK)
    along = tl.arange(0, STEP)
    inside = (rows < m)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * k
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    steps = BLOCK // STEP
    for i in range(tl.load(first_of + band) * steps, tl.load(first_of + band + 1) * steps):
        block = i // steps
        start = (i % steps) * STEP
        at = tl.load(column_of + block) * BLOCK + start
        part = tl.load(x_rows + (at + along)[None, :], mask=inside, other=0.0)
        kept = tl.load(
            values + block.to(tl.int64) * (BLOCK * BLOCK) + across[:, None] * BLOCK + (start + along)[None, :]
        )
        total = tl.dot(part, tl.trans(kept), total)
    out = y + rows.to(tl.int64)[:, None] * n + (band * BLOCK + across)[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _threshold(x, weights, y, k, n, limit, DEEP: tl.constexpr, WIDE: tl.constexpr):
    columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    ks = tl.program_id(1) * DEEP + tl.arange(0, DEEP)
    values = tl.load(x + ks, mask=ks < k, other=0.0).to(tl.float32)
    alive = tl.abs(values) > limit
    loaded = tl.load(weights + ks.to(tl.int64)[:, None] * n + columns[None, :],
                     mask=alive[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
    part = tl.sum(loaded.to(tl.float32) * values[:, None], axis=0)
    tl.atomic_add(y + columns, part, mask=columns < n, sem="relaxed")


@triton.jit
def _gather(x, weights, ks_alive, count, y, n, splits, DEEP: tl.constexpr, WIDE: tl.constexpr):
    columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    number = tl.load(count)
    each = tl.cdiv(tl.cdiv(number, splits), DEEP) * DEEP
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, number)
    part = tl.zeros((WIDE,), dtype=tl.float32)
    for at in range(first, last, DEEP):
        places = at + tl.arange(0, DEEP)
        ks = tl.load(ks_alive + places, mask=places < last, other=0)
        values = tl.load(x + ks, mask=places < last, other=0.0).to(tl.float32)
        loaded = tl.load(weights + ks.to(tl.int64)[:, None] * n + columns[None, :],
                         mask=(places < last)[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
        part += tl.sum(loaded.to(tl.float32) * values[:, None], axis=0)
    if first < last:
        tl.atomic_add(y + columns, part, mask=columns < n, sem="relaxed")


@triton.jit
def _compact(x, ks_alive, count, k, ALL: tl.constexpr):
    ks = tl.arange(0, ALL)
    alive = (tl.load(x + ks, mask=ks < k, other=0.0).to(tl.float32) != 0.0).to(tl.int32)
    places = tl.cumsum(alive, axis=0) - 1
    tl.store(ks_alive + places, ks, mask=alive != 0)
    tl.store(count, tl.sum(alive, axis=0))


@triton.jit
def _read(x, sums, each, STEP: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((STEP,), dtype=tl.float32)
    for at in range(0, each, STEP):
        total += tl.load(x + start + at + tl.arange(0, STEP))
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


class Blocks(NamedTuple):
    """Weights [n, k] of which some blocks are kept: band i of n has the blocks first_of[i] to first_of[i + 1]."""

    values: torch.Tensor  # [kept, block, block]
    first_of: torch.Tensor
    column_of: torch.Tensor
    block: int


def blocks_of(weight: torch.Tensor, block: int) -> Blocks:
    """The blocks of a weight [n, k] that are not all zero."""
    n, k = weight.shape
    tiles = weight.view(n // block, block, k // block, block).transpose(1, 2)
    kept = (tiles != 0).flatten(2).any(2)
    first_of = torch.zeros(n // block + 1, dtype=torch.int32, device=weight.device)
    first_of[1:] = kept.sum(1).cumsum(0)
    return Blocks(tiles[kept].contiguous(), first_of, kept.nonzero()[:, 1].to(torch.int32).contiguous(), block)


BLOCK_CONFIGS = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 4), (128, 32, 8, 4)]  # rows, step, warps, stages


def block_sparse(x: torch.Tensor, weights: Blocks, y: torch.Tensor, config: Tuple[int, int, int, int]) -> None:
    (m, k), n = x.shape, y.shape[1]
    rows, step, warps, stages = config
    _block_sparse[(triton.cdiv(m, rows), n // weights.block)](
        x, weights.values, weights.first_of, weights.column_of, y, m, n, k, ROWS=rows, BLOCK=weights.block,
        STEP=min(step, weights.block), num_warps=warps, num_stages=stages)  # fmt: skip


ROW_CONFIGS = [(16, 128, 4), (16, 256, 4), (32, 256, 8), (64, 64, 4), (8, 512, 4)]  # k's, columns, warps


def threshold(
    x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, limit: float, config: Tuple[int, int, int]
) -> None:
    """x [k] by weights [k, n] into y [n] of float32."""
    k, n = weights.shape
    deep, wide, warps = config
    y.zero_()
    _threshold[(triton.cdiv(n, wide), triton.cdiv(k, deep))](x, weights, y, k, n, limit, DEEP=deep, WIDE=wide,
                                                            num_warps=warps)  # fmt: skip


def gather(x: torch.Tensor, weights: torch.Tensor, ks_alive: torch.Tensor, count: torch.Tensor, y: torch.Tensor,
           config: Tuple[int, int, int], splits: int = 32) -> None:  # fmt: skip
    """The same, of the first count[0] k's of the list."""
    n = weights.shape[1]
    deep, wide, warps = config
    y.zero_()
    _gather[(triton.cdiv(n, wide), splits)](x, weights, ks_alive, count, y, n, splits, DEEP=deep, WIDE=wide,
                                           num_warps=warps)  # fmt: skip


def compact(x: torch.Tensor, ks_alive: torch.Tensor, count: torch.Tensor) -> None:
    """The k's at which x [k] is not zero, in order, and their number."""
    k = x.shape[0]
    _compact[(1,)](x, ks_alive, count, k, ALL=triton.next_power_of_2(k), num_warps=16)


def read(x: torch.Tensor, sums: torch.Tensor) -> None:
    """x of float32, as many pieces as sums has elements; a piece is a multiple of 4096."""
    _read[(sums.numel(),)](x, sums, x.numel() // sums.numel(), STEP=4096, num_warps=8)


def self_check(device: Any) -> List[str]:
    """What is wrong with these kernels on small products; nothing, it is hoped."""
    wrong = []
    torch.manual_seed(1)
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16

    def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        error = ((got.double() - want).abs().max() / want.abs().max()).item()
        if not error <= (1e-5 if dtype == torch.float32 or got.dtype == torch.float32 else 1e-2):
            wrong.append(f"{name} is off by {error:.1e}")

    m, n, k = 70, 96, 160
    x = torch.randn(m, k, device=device).to(dtype)
    weight = torch.randn(n, k, device=device).to(dtype)
    keep = torch.rand(n // 32, k // 32, device=device) < 0.5
    keep[1] = False  # a band with no block
    weight = weight * keep.repeat_interleave(32, 0).repeat_interleave(32, 1)
    y = torch.full((m, n), float("nan"), device=device, dtype=dtype)
    block_sparse(x, blocks_of(weight, 32), y, (64, 32, 4, 2))
    compare("block_sparse", y, x.double() @ weight.double().T)
    row = (torch.randn(k, device=device) * (torch.rand(k, device=device) < 0.3)).to(dtype)
    turned = torch.randn(k, 100, device=device).to(dtype)
    want = row.double() @ turned.double()
    out = torch.full((100,), float("nan"), device=device)
    threshold(row, turned, out, 0.0, (16, 64, 4))
    compare("threshold", out, want)
    ks_alive = torch.full((k,), -1, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    compact(row, ks_alive, count)
    alive = row.nonzero()[:, 0].to(torch.int32)
    if count.item() != alive.numel() or not torch.equal(ks_alive[: alive.numel()], alive):
        wrong.append("compact gives another list")
    for splits in (1, 4):
        gather(row, turned, ks_alive, count, out, (16, 64, 4), splits)
        compare(f"gather in {splits}", out, want)
    numbers = torch.randn(3 * 8192, device=device)
    sums = torch.zeros(3, device=device)
    read(numbers, sums)
    compare("read", sums, numbers.double().view(3, -1).sum(1))
    return wrong
