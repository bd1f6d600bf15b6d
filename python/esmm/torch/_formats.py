"""Formats, activations and tensors as numbers: operators take them instead of strings and objects."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .. import _core
from .._core import Format

DTYPES = {torch.float32: _core.F32, torch.bfloat16: _core.BF16, torch.float16: _core.F16}
ACTIVATIONS = _core.ACTIVATIONS  # "none", "relu", "relu2", "gelu", "gelu_tanh", "silu"
NONE, RELU, RELU2, GELU, GELU_TANH, SILU = (
    ACTIVATIONS[name] for name in ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu")
)
MODES = {"exact": 0, "split": 1, "sparse": 2, "dense": 3}
SPARSIFIERS = {"top_n": 0, "soft": 1, "mvue": 2}


def choice(table: "dict[str, int]", value: Optional[str], what: str) -> int:
    """A named option as its number; None is the first."""
    if value is None:
        return 0
    if value not in table:
        raise ValueError(f"{what} is {value!r}: it is one of {', '.join(map(repr, table))}")
    return table[value]


def encode(format: Union[str, Format, None]) -> int:
    """A format as one number, which format_of in csrc/ops.cpp reads: 0 is dense."""
    f = _core.parse_format(format)
    if f.kind == "bsr":
        return 1 | (f.block_rows or 32) << 8 | (f.block_cols or 32) << 20
    if f.kind == "nm":
        return 2 | (f.keep or 2) << 8 | (f.group or 4) << 16 | (f.group_cols or 1) << 24
    return 0


def device_name(device: torch.device) -> str:
    """The library's name of it."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    raise RuntimeError(f"esmm: {device} is neither a CPU nor a CUDA device")


def raw_or_none(t: torch.Tensor) -> Optional[_core.Raw]:
    device = t.device.index if t.device.type == "cuda" else _core.HOST
    return _core.raw(
        t.data_ptr(),
        t.shape[0],
        t.shape[1],
        t.stride(0),
        t.stride(1),
        DTYPES[t.dtype],
        _core.HOST if device is None else device,
    )
