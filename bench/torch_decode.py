#!/usr/bin/env python3
"""torch_decode.py: a GPT with ReLU2 at batch 1 on a CPU, one token at a time, before and after esmm.torch.convert,
beside what the densities of its layers predict.

    PYTHONPATH=python python3 bench/torch_decode.py [--threads 2] [--width 1024] [--layers 4] [--hidden 4096]

Weights are random; biases are moved so that the share of h that is named is not zero. On an idle machine: two busy
threads more spoil all times. --cpu-time counts the process' own time instead, which a busy machine disturbs less; it is
for one thread. Ends with 1 where a prediction is off by more than 15 per cent.
"""

import argparse
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "examples")]

import torch  # noqa: E402
from relu2_gpt import GPT  # noqa: E402

import esmm.torch  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--density", type=float, action="append", help="nonzero share of h (default 0.1, 0.3, 0.5)")
parser.add_argument("--cpu-time", action="store_true")
words = parser.parse_args()
torch.set_num_threads(words.threads)
clock = time.process_time if words.cpu_time else time.perf_counter


def milliseconds(step, calls=40):
    begin = clock()
    for _ in range(calls):
        step()
    return 1e3 * (clock() - begin) / calls


wrong = 0
print(f"{'nonzero':>8}{'before, ms':>12}{'after, ms':>12}{'times':>8}{'predicted':>11}")
for density in words.density or (0.1, 0.3, 0.5):
    torch.manual_seed(0)
    model = GPT(words.width, words.layers, words.width // 32, 128, words.hidden).eval().requires_grad_(False)
    for block in model.blocks:
        block.mlp.up.weight.normal_(std=words.width**-0.5)
        block.mlp.down.weight.normal_(std=words.hidden**-0.5)
        block.mlp.up.bias.fill_(-statistics.NormalDist().inv_cdf(1 - density))
    ids, caches = torch.randint(0, 256, (1, 65)), model.caches(1)
    with torch.no_grad():
        model(ids[:, :64], caches)
        sample = (ids[:, 64:], caches, 64)
        done = esmm.torch.convert(model, sample)
        taken = {False: [], True: []}
        for _ in range(7):
            for new in taken:
                done.switch(new)
                model(*sample)
                taken[new].append(milliseconds(lambda: model(*sample)))
    before, after = (statistics.median(taken[new]) for new in (False, True))
    off = done.predicted / (before / after)
    wrong += not 1 / 1.15 <= off <= 1.15
    print(f"{density:8.0%}{before:12.3f}{after:12.3f}{before / after:8.2f}{done.predicted:11.2f}", flush=True)
sys.exit(1 if wrong else 0)
