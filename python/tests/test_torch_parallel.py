"""esmm.torch.parallel with ranks of gloo on the CPU, against one process: values, gradients, DDP."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest

from need_torch import torch
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from esmm.torch.parallel import ParallelFFN, share  # noqa: E402

D, HIDDEN, TOKENS = 48, 203, 24  # an odd number of features: parts of different sizes


def linears(gated: bool, bias: bool):
    torch.manual_seed(7)
    up, down = nn.Linear(D, HIDDEN, bias), nn.Linear(HIDDEN, D, bias)
    gate = nn.Linear(D, HIDDEN, bias) if gated else None
    if bias:  # most of h is zero
        with torch.no_grad():
            (gate or up).bias -= 0.6
    return up, down, gate


def reference(x, up, down, gate, activation):
    def act(v):
        return torch.relu(v) if activation == "relu" else torch.relu(v) ** 2

    h = act(up(x)) if gate is None else act(gate(x)) * up(x)
    return h, down(h)


def same(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, float(want.detach().abs().max())))


def check_split(rank: int, ranks: int) -> None:
    """Runs in each rank: the split layer against the whole one, both here."""
    for gated, bias, activation in ((False, True, "relu2"), (True, True, "relu"), (False, False, "relu2")):
        up, down, gate = linears(gated, bias)
        layer = ParallelFFN.from_linears(up, down, gate, activation)
        assert (layer.rank, layer.ranks) == (rank, ranks)
        torch.manual_seed(1)
        x = torch.randn(2, TOKENS, D, requires_grad=True)
        weigh = torch.randn(2, TOKENS, D)
        h, want = reference(x, up, down, gate, activation)
        (want * weigh).sum().backward()
        dx, x.grad = x.grad, None
        first, last = share(HIDDEN, rank, ranks)
        part = layer.hidden(x.detach())
        same(part, h.detach()[..., first:last])
        assert torch.equal(part == 0, h.detach()[..., first:last] == 0)
        got = layer(x)
        same(got, want)
        (got * weigh).sum().backward()
        same(x.grad, dx)
        same(layer.up.grad, up.weight.grad[first:last])
        same(layer.down.grad, down.weight.grad[:, first:last])
        if gate is not None:
            same(layer.gate.grad, gate.weight.grad[first:last])
        if bias:
            same(layer.up_bias.grad, up.bias.grad[first:last])
            same(layer.down_bias.grad, down.bias.grad)
        everywhere = [torch.empty_like(got) for _ in range(ranks)]
        dist.all_gather(everywhere, got.detach())
        assert all(torch.equal(other, everywhere[0]) for other in everywhere)
        whole = layer.whole()
        assert torch.equal(whole["up"], up.weight) and torch.equal(whole["down"], down.weight)
    # Up is exact: with small integers every sum is, and the part has to be the columns of the whole, bit for bit.
    up, down, _ = linears(False, False)
    with torch.no_grad():
        up.weight.copy_((up.weight * 20).round())
    layer = ParallelFFN.from_linears(up, down)
    x = torch.randint(-3, 4, (TOKENS, D)).float()
    assert torch.equal(layer.hidden(x), (torch.relu(up(x)) ** 2)[:, first:last])
    # The same seed makes the same layer on any number of ranks.
    torch.manual_seed(3)
    made = ParallelFFN(D, HIDDEN)
    torch.manual_seed(3)
    assert torch.equal(made.whole()["up"], nn.Linear(D, HIDDEN).weight)
    assert torch.equal(copy.deepcopy(made.state_dict())["up"], made.up)
    try:
        ParallelFFN(D, ranks - 1)
    except ValueError as e:
        assert "at least the number of ranks" in str(e)
    else:
        raise AssertionError("too few features for the ranks were accepted")


def check_ddp(rank: int, ranks: int) -> None:
    """Parts over neighbours, data over the others: with four ranks two by two, with two ranks data alone."""
    width = 2 if ranks == 4 else 1
    for first in range(0, ranks, width):
        group = dist.new_group(list(range(first, first + width)))
        if first <= rank < first + width:
            mine = group
    for first in range(width):
        group = dist.new_group(list(range(first, ranks, width)))
        if rank % width == first:
            others = group
    up, down, _ = linears(False, True)
    model = nn.parallel.DistributedDataParallel(
        ParallelFFN.from_linears(up, down, activation="relu2", group=mine), process_group=others
    )
    step = torch.optim.SGD(model.parameters(), 0.05)
    whole = [*up.parameters(), *down.parameters()]
    step_whole = torch.optim.SGD(whole, 0.05)
    torch.manual_seed(5)
    slices = ranks // width
    for _ in range(3):
        x, target = torch.randn(slices, TOKENS, D), torch.randn(slices, TOKENS, D)
        here = rank // width
        step.zero_grad()
        ((model(x[here]) - target[here]) ** 2).mean().backward()
        step.step()
        step_whole.zero_grad()
        ((reference(x, up, down, None, "relu2")[1] - target) ** 2).mean().backward()
        step_whole.step()
    got = model.module.whole()
    same(got["up"], up.weight.detach(), 1e-4)
    same(got["down"], down.weight.detach(), 1e-4)
    same(got["down_bias"], down.bias.detach(), 1e-4)


def run_ranks(ranks: int, check: str, tmp_path) -> None:
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    settings.update(ESMM_THREADS="1", OMP_NUM_THREADS="1", ESMM_RANKS=str(ranks), ESMM_CHECK=check)
    settings["ESMM_MEETING"] = str(tmp_path / "meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__], env={**settings, "ESMM_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, errors):
        assert process.returncode == 0, text


def test_two_ranks(tmp_path):
    run_ranks(2, "check_split check_ddp", tmp_path)


def test_parts_and_ddp_together(tmp_path):
    run_ranks(4, "check_ddp", tmp_path)


def test_alone():
    up, down, _ = linears(False, True)
    layer = ParallelFFN.from_linears(up, down)
    x = torch.randn(TOKENS, D)
    same(layer(x), reference(x, up, down, None, "relu2")[1])
    assert "rank 0 of 1" in repr(layer)
    with pytest.raises(ValueError, match=r"down has the shape \(203, 48\)"):
        ParallelFFN.from_linears(up, up)
    with pytest.raises(ValueError, match="banana"):
        ParallelFFN(8, 8, activation="banana")


def test_shares_cover_everything_once():
    for size in (1, 7, 8, 203):
        for ranks in (1, 2, 3, 7):
            parts = [share(size, rank, ranks) for rank in range(ranks)]
            assert parts[0][0] == 0 and parts[-1][1] == size
            assert all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
            assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1
    with pytest.raises(ValueError, match="rank is 2"):
        share(5, 2, 2)


if __name__ == "__main__":
    rank, ranks = int(os.environ["ESMM_RANK"]), int(os.environ["ESMM_RANKS"])
    dist.init_process_group("gloo", init_method="file://" + os.environ["ESMM_MEETING"], rank=rank, world_size=ranks)
    for name in os.environ["ESMM_CHECK"].split():
        {"check_split": check_split, "check_ddp": check_ddp}[name](rank, ranks)
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # now and then one of torch's threads is not joined when the interpreter ends, which ends the process
