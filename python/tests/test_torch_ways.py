"""torch's own linear as a way for a product on a CPU: it is tried, taken where it is faster, and left alone on request.

Each check has a process to itself: the other tests ask for deterministic calls, which go by the library alone.
"""

import os
import subprocess
import sys

import pytest

from need_torch import torch

import esmm.torch
from esmm._build import compiler
from torch import nn
from torch_help import ACTIVATIONS, DEVICE, near, zeros

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU cuBLAS is a kernel of the library")
FIRST, CALLS = 90, 300  # calls that the library has to itself, at least; calls by which torch was tried


def alone(check, *given, **env):
    """Runs a function of this file in a process without ESMM_DETERMINISTIC; what it prints."""
    paths = (os.path.dirname(os.path.dirname(os.path.abspath(esmm.__file__))), os.path.dirname(os.path.abspath(__file__)))
    kept = {name: value for name, value in os.environ.items() if name != "ESMM_DETERMINISTIC"}
    run = subprocess.run(
        [sys.executable, "-c", f"import test_torch_ways as ways; ways.{check.__name__}{given!r}"],
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def by_torch(module, x, calls):
    """How many of these calls went through torch's own linear."""
    with torch.no_grad(), torch.autograd.profiler.profile() as seen:
        for _ in range(calls):
            module(x)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::linear")


def linear(rows, k, n, activation="relu2", dtype=torch.float32):
    torch.manual_seed(5)
    plain = nn.Linear(k, n, dtype=dtype).requires_grad_(False)
    return esmm.torch.SparseLinear.from_linear(plain, activation=activation), plain, zeros(rows, k, dtype=dtype)


def check_values(activation, narrow):
    dtype = torch.bfloat16 if narrow else torch.float32
    module, plain, x = linear(24, 96, 80, activation, dtype)
    up = torch.nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
    with torch.no_grad():
        for _ in range(CALLS):
            near(module(x), ACTIVATIONS[activation](up), 2e-2 if narrow else 2e-6)


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("activation", (None, "relu", "relu2"))
def test_both_ways_give_the_same(activation, narrow):
    alone(check_values, activation, narrow)


def check_trial():
    module, _, x = linear(24, 96, 80)
    assert by_torch(module, x, FIRST) == 0
    assert by_torch(module, x, CALLS) >= 3


def test_torch_is_tried_after_the_library_has_learnt():
    alone(check_trial)


def check_never(what):
    module, _, x = linear(24, 96, 80, what if what in ("gelu", "silu") else None)
    x = x.bfloat16() if what == "wider weight" else x
    torch.use_deterministic_algorithms(what == "deterministic")
    assert by_torch(module, x, CALLS) == 0


@pytest.mark.parametrize("what", ("gelu", "silu", "wider weight", "deterministic", "asked for"))
def test_what_torch_does_otherwise_is_the_librarys(what):
    alone(check_never, what, ESMM_DETERMINISTIC="1" if what == "asked for" else "0")


def check_shapes():
    module, plain, _ = linear(1, 96, 80, None)
    for shape in ((96,), (0, 96), (2, 3, 96), (1, 1, 1, 96)):
        x = zeros(*shape)
        with torch.no_grad():
            for _ in range(120):
                y = module(x)
            assert y.shape == plain(x).shape
            near(y, plain(x))
    wrong, x = torch.zeros(1), zeros(24, 96)
    for call in range(CALLS):
        try:
            esmm.torch.linear(x, module.weight, wrong)
        except RuntimeError as e:
            assert "bias needs the shape [80]" in str(e)
        else:
            raise AssertionError(call)


def test_shapes_and_a_wrong_bias():
    alone(check_shapes)


RACE = r"""
#include "race.h"
#include <cstdio>

/* Of so many calls, how many go by torch, whose call takes that many times what the library's does. */
static int by_torch(Race &race, int calls, double torch)
{
  int taken = 0;
  for (int i = 0; i < calls; i++) {
    const Turn turn = race.begin();
    taken += turn.way == BY_TORCH;
    if (turn.timed)
      race.end(turn, 1e-4 * (turn.way == BY_TORCH ? torch : 1.0) * (1 + 0.01 * (i * 7 % 10)));
  }
  return taken;
}

int main()
{
  Race race;
  std::printf("%d ", by_torch(race, 1000, 0.8));
  std::printf("%d ", by_torch(race, 2000, 5.0));
  std::printf("%d ", by_torch(race, 10000, 5.0));
  std::printf("%d\n", by_torch(race, 5000, 0.8));
}
"""


def test_the_faster_way_is_taken(tmp_path):
    """Torch is faster; then the library, as when zeros come; then torch again."""
    source, program = tmp_path / "race.cpp", str(tmp_path / "race")
    source.write_text(RACE)
    headers = os.path.join(os.path.dirname(os.path.abspath(esmm.torch.__file__)), "csrc")
    subprocess.run([compiler(), "-std=c++17", "-Wall", "-I" + headers, str(source), "-o", program], check=True)
    run = subprocess.run([program], check=True, capture_output=True, text=True)
    at_first, then, later, again = map(int, run.stdout.split())
    assert 850 < at_first <= 1000 - FIRST
    assert then < 400 and later < 100  # trials of the slower way cost little
    assert again > 3500
