#!/usr/bin/env python3
"""Times esmm.torch.SparseFFN, forward and backward, beside torch's own dense layer in float32 on the CPU.

    PYTHONPATH=python python3 bench/torch_ffn.py [tokens] [model] [hidden] [threads]

Both are given the same parameters and input; their zeros come from the bias before the activation. "with update" also
changes the parameters between passes, as an optimizer does, so that the library has to prepare them again. All three
are timed in turn, and the best of each counts; the machine should have nothing else to do.
"""

import sys
import time

import torch
from torch import nn

import esmm.torch


def setup(model, hidden, density, dead):
    """Linears whose h has that share of nonzeros: `dead` of the features have none, the others are alike."""
    torch.manual_seed(1)
    up, down = nn.Linear(model, hidden), nn.Linear(hidden, model)
    alive = density / (1 - dead)
    with torch.no_grad():
        up.weight.normal_(0, model**-0.5)
        down.weight.normal_(0, hidden**-0.5)
        up.bias.fill_(float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(alive))) if alive < 1 else 8.0)
        up.bias[torch.randperm(hidden)[: round(dead * hidden)]] = -12.0
    return up, down


class Dense(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return self.down(torch.relu(self.up(x)).square())


def once(module, x, dy, update):
    """Seconds of one forward and backward pass."""
    x.grad = None
    for p in module.parameters():
        p.grad = None
        if update:
            with torch.no_grad():
                p.mul_(1.0)
    start = time.perf_counter()
    module(x).backward(dy)
    return time.perf_counter() - start


def seconds(jobs, x, dy, rounds):
    """The best of each (module, update)."""
    taken = [[once(module, x, dy, update) for module, update in jobs] for _ in range(rounds + 1)]
    return [min(column) for column in zip(*taken[1:])]


def main():
    numbers = [int(a) for a in sys.argv[1:]]
    tokens, model, hidden, threads = numbers + [1024, 1024, 4096, 2][len(numbers) :]
    torch.set_num_threads(threads)
    x = torch.randn(tokens, model, requires_grad=True)
    dy = torch.randn(tokens, model)
    print(
        f"torch {torch.__version__}, {threads} threads, {tokens} tokens, {model} -> {hidden} -> {model}, ReLU2, float32"
    )
    print("forward and backward, ms")
    print(f"{'zeros':34} {'torch':>8} {'exact':>8} {'times':>6} {'with update':>12} {'times':>6}")
    for density, dead in ((0.1, 0.0), (0.1, 0.5), (0.1, 0.8), (0.25, 0.0), (0.5, 0.0)):
        up, down = setup(model, hidden, density, dead)
        plain, sparse = Dense(up, down), esmm.torch.SparseFFN.from_linears(up, down, activation="relu2")
        with torch.no_grad():
            worst = (plain(x) - sparse(x)).abs().max().item() / plain(x).abs().max().item()
            found = sparse.measure(x)
        if not worst < 1e-4:
            raise SystemExit(f"the results differ by {worst:.1e}")
        t, s, u = seconds(((plain, False), (sparse, False), (sparse, True)), x, dy, 9)
        name = f"{1 - found['element_density']:.0%}, {dead:.0%} of the features dead"
        print(f"{name:34} {t * 1e3:8.1f} {s * 1e3:8.1f} {t / s:6.2f} {u * 1e3:12.1f} {t / u:6.2f}", flush=True)


if __name__ == "__main__":
    main()
