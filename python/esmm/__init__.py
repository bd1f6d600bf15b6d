"""ESMM: matrix products that skip the zeros they find at run time, on CPUs and NVIDIA GPUs.

>>> import numpy as np, esmm
>>> w = esmm.prepare(np.ones((256, 128), np.float32))                  # B: once
>>> a = esmm.generate("random", 64, 256, density=0.1, integers=True)   # A: mostly zeros, in ordinary storage
>>> c, stats = esmm.matmul(a, w, stats=True)                           # as often as you like
>>> bool((c == a.sum(1, keepdims=True)).all())
True
"""

from ._arrays import Array
from ._core import Context, Format, Pattern, Stats, Verdict, Weights, WeightsInfo
from ._errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    Error,
    FileError,
    FileFormatError,
    OutOfMemoryError,
    OverlapError,
    ShapeError,
    SizeError,
    Status,
    UnknownKernelError,
    UnsupportedError,
)
from ._files import load, save
from ._lib import lib as _library
from ._product import astype, explain, matmul, prepare, to_dense, tune_weights
from ._settings import default_context, device, threads
from ._tools import (
    Info,
    KernelInfo,
    PruneReport,
    Recollection,
    SkipStats,
    Summary,
    expect,
    fits,
    generate,
    info,
    inspect,
    kernels,
    pattern,
    pattern_bits,
    prune,
    recall,
    reorder,
    skip_stats,
    tune,
)

__version__: str = _library.esmm_version_str().decode()

__all__ = [
    "ArgumentError",
    "Array",
    "Context",
    "DeviceError",
    "DtypeError",
    "Error",
    "FileError",
    "FileFormatError",
    "Format",
    "Info",
    "KernelInfo",
    "OutOfMemoryError",
    "OverlapError",
    "Pattern",
    "PruneReport",
    "Recollection",
    "ShapeError",
    "SizeError",
    "SkipStats",
    "Stats",
    "Status",
    "Summary",
    "UnknownKernelError",
    "UnsupportedError",
    "Verdict",
    "Weights",
    "WeightsInfo",
    "astype",
    "default_context",
    "device",
    "expect",
    "explain",
    "fits",
    "generate",
    "info",
    "inspect",
    "kernels",
    "load",
    "matmul",
    "pattern",
    "pattern_bits",
    "prepare",
    "prune",
    "recall",
    "reorder",
    "save",
    "skip_stats",
    "threads",
    "to_dense",
    "tune",
    "tune_weights",
]
