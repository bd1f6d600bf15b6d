"""What the torch tests share: the device they run on, the activations by plain torch, a comparison."""

import os

import torch
import torch.nn.functional as F

DEVICE = torch.device(os.environ.get("ESMM_TEST_DEVICE", "cpu"))
# A GPU has sparse formats of 16-bit weights only: what tests of them use, and what rounding they allow.
SPARSE_DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
SPARSE_ROUNDING = 2e-6 if DEVICE.type == "cpu" else 2e-2
ACTIVATIONS = {
    None: lambda v: v,
    "relu": F.relu,
    "relu2": lambda v: F.relu(v).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}


def zeros(*shape, density=0.3, dtype=torch.float32):
    """Random numbers, most of them zero."""
    return (torch.randn(*shape) * (torch.rand(*shape) < density)).to(DEVICE, dtype)


def near(got, want, tolerance=2e-6):
    """Equal up to the rounding of sums, relative to the largest of them. NaN is not near anything."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    error = (got - want).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0), error


def gradients(y, dy, of):
    return torch.autograd.grad(y, of, dy, allow_unused=True)
