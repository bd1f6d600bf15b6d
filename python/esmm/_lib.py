"""The C interface as ctypes sees it: every struct, enum and function of include/esmm*.h, and nothing else.

No code is compiled against Python: ctypes opens libesmm.so, and releases the GIL during each call. The
declarations repeat the headers; tests/test_headers.py compiles the headers and compares every size, offset, value and
signature, so the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any, Dict, List, Tuple, Type

# ---- enums: name in C -> value ----

DTYPES: Dict[str, int] = {"ESMM_F32": 0, "ESMM_BF16": 1, "ESMM_F16": 2}
ORDERS: Dict[str, int] = {"ESMM_ROW_MAJOR": 0, "ESMM_COL_MAJOR": 1}
PLACES: Dict[str, int] = {"ESMM_HOST": 0, "ESMM_DEVICE": 1}
FORMAT_KINDS: Dict[str, int] = {"ESMM_FORMAT_DENSE": 0, "ESMM_FORMAT_BSR": 1, "ESMM_FORMAT_NM": 2}
USES: Dict[str, int] = {"ESMM_USE_ANY": 0, "ESMM_USE_DECODE": 1, "ESMM_USE_LARGE_M": 2}
ACTIVATIONS: Dict[str, int] = {
    "ESMM_ACT_NONE": 0,
    "ESMM_ACT_RELU": 1,
    "ESMM_ACT_RELU2": 2,
    "ESMM_ACT_GELU": 3,
    "ESMM_ACT_GELU_TANH": 4,
    "ESMM_ACT_SILU": 5,
}
KERNEL_FLAGS: Dict[str, int] = {
    "ESMM_KERNEL_DETERMINISTIC": 1,
    "ESMM_KERNEL_SKIPS": 2,
    "ESMM_KERNEL_REFERENCE": 4,
    "ESMM_KERNEL_ABLATION": 8,
}
GENERATORS: Dict[str, int] = {
    "ESMM_GEN_DENSE": 0,
    "ESMM_GEN_RANDOM": 1,
    "ESMM_GEN_BLOCKWISE": 2,
    "ESMM_GEN_PATTERN": 3,
    "ESMM_GEN_ACTIVATIONS": 4,
}
PRUNE_SCOPES: Dict[str, int] = {"ESMM_PRUNE_COLUMN": 0, "ESMM_PRUNE_MATRIX": 1}
OPERANDS: Dict[str, int] = {"ESMM_OPERAND_A": 0, "ESMM_OPERAND_B": 1}
FFN_MODES: Dict[str, int] = {"ESMM_FFN_EXACT": 0, "ESMM_FFN_SPLIT": 1, "ESMM_FFN_SPARSE": 2, "ESMM_FFN_DENSE": 3}
SPARSIFIERS: Dict[str, int] = {"ESMM_SPARSIFY_TOP_N": 0, "ESMM_SPARSIFY_SOFT": 1, "ESMM_SPARSIFY_MVUE": 2}

# ---- structs ----
# Pointers are c_void_p, which takes and gives plain integers: faster than typed ones, and GPU pointers need no type.


class Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("ld", c_int64),
        ("dtype", c_int),
        ("order", c_int),
        ("place", c_int),
        ("device", c_int),
        ("scales", c_void_p),
        ("scaling", c_int),
        ("reserved", c_int),
    ]


class Allocator(Structure):
    _fields_ = [("alloc", c_void_p), ("free", c_void_p), ("user", c_void_p)]


class CtxOpts(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("device", c_char_p),
        ("threads", c_int),
        ("force", c_char_p),
        ("allocator", c_void_p),
        ("no_tuning_cache", c_int),
        ("error", c_void_p),
        ("error_size", c_size_t),
        ("remember", c_int),
        ("deterministic", c_int),
    ]


class Format(Structure):
    _fields_ = [
        ("kind", c_int),
        ("block_rows", c_int),
        ("block_cols", c_int),
        ("keep", c_int),
        ("group", c_int),
        ("group_cols", c_int),
        ("reserved", c_int * 2),
    ]


class PrepareOpts(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("use", c_int),
        ("strict", c_int),
        ("max_bytes_ratio", c_double),
        ("format", Format),
        ("unchecked", c_int),
        ("reserved", c_int),
    ]


class WeightsInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_int64),
        ("cols", c_int64),
        ("dtype", c_int),
        ("use", c_int),
        ("strict", c_int),
        ("strip_cols", c_int64),
        ("element_density", c_double),
        ("strip_density", c_double),
        ("bytes", c_size_t),
        ("format", Format),
        ("blocks", c_int64),
        ("block_density", c_double),
    ]


class Bsr(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_int64),
        ("cols", c_int64),
        ("block_rows", c_int),
        ("block_cols", c_int),
        ("index_bits", c_int),
        ("dtype", c_int),
        ("order", c_int),
        ("blocks", c_int64),
        ("row_pointers", c_void_p),
        ("column_indices", c_void_p),
        ("values", c_void_p),
        ("place", c_int),
        ("device", c_int),
    ]


class PatternInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_int64),
        ("k", c_int64),
        ("strip_rows", c_int64),
        ("strips", c_int64),
        ("words", c_int64),
        ("density", c_double),
    ]


class MatmulOpts(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("alpha", c_void_p),
        ("beta", c_void_p),
        ("bias", c_void_p),
        ("activation", c_int),
        ("strict", c_int),
        ("force", c_char_p),
        ("a_pattern", c_void_p),
        ("residual", c_void_p),
        ("gate", c_void_p),
        ("gate_bias", c_void_p),
        ("column_nonzeros", c_void_p),
        ("c_strip_rows", c_int64),
        ("c_pattern", c_void_p),
        ("reserved", c_int),
    ]


class Stats(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("kernel", c_char * 32),
        ("reason", c_char * 160),
        ("threads", c_int),
        ("strip_rows", c_int64),
        ("strip_cols", c_int64),
        ("density_a", c_double),
        ("strip_density_a", c_double),
        ("strip_density_b", c_double),
        ("joint_density", c_double),
        ("skipped_share", c_double),
        ("flop_useful", c_double),
        ("flop_dense", c_double),
        ("seconds_plan", c_double),
        ("seconds_extract", c_double),
        ("seconds_multiply", c_double),
        ("seconds_total", c_double),
        ("weights_bytes", c_size_t),
        ("staged_bytes", c_size_t),
    ]


class KernelInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("doc", c_char_p),
        ("backend", c_char_p),
        ("number", c_int),
        ("flags", c_uint),
        ("available", c_int),
        ("formats", c_uint),
    ]


class Verdict(Structure):
    _fields_ = [
        ("kernel", c_char_p),
        ("flags", c_uint),
        ("can_run", c_int),
        ("competes", c_int),
        ("chosen", c_int),
        ("seconds", c_double),
        ("text", c_char * 160),
    ]


class Recollection(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("known", c_int),
        ("density_a", c_double),
        ("strip_density_a", c_double),
        ("joint_density", c_double),
        ("strip_rows", c_int64),
        ("calls", c_int64),
        ("reports", c_int64),
    ]


class PruneOpts(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("format", Format),
        ("density", c_double),
        ("input_norms", c_void_p),
        ("top", c_int64),
        ("scope", c_int),
        ("soft", c_int),
    ]


class PruneReport(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("kept", c_int64),
        ("dropped", c_int64),
        ("norm", c_double),
        ("norm_dropped", c_double),
    ]


class SkipStats(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("block_k", c_int64),
        ("warp_k", c_int64),
        ("block_skipped", c_double),
        ("warp_skipped", c_double),
        ("dot_skipped", c_double),
        ("joint_density", c_double),
    ]


class Generator(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("kind", c_int),
        ("operand", c_int),
        ("seed", c_uint64),
        ("density", c_double),
        ("strip", c_int64),
        ("pattern", c_char_p),
        ("dead", c_double),
        ("activation", c_int),
        ("integers", c_int),
    ]


class FfnOpts(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("d_model", c_int64),
        ("d_hidden", c_int64),
        ("rank1", c_int64),
        ("rank2", c_int64),
        ("activation", c_int),
        ("gated", c_int),
        ("dtype", c_int),
        ("mode", c_int),
        ("sparsifier", c_int),
        ("sparse_share", c_double),
        ("permute_tokens", c_int),
        ("seed", c_uint64),
    ]


class FfnWeights(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("w1", POINTER(Matrix)),
        ("w1_v", POINTER(Matrix)),
        ("gate", POINTER(Matrix)),
        ("gate_v", POINTER(Matrix)),
        ("w2", POINTER(Matrix)),
        ("w2_v", POINTER(Matrix)),
        ("b1", c_void_p),
        ("b_gate", c_void_p),
        ("b2", c_void_p),
    ]


class FfnDrop(Structure):
    _fields_ = [("kept", c_int64), ("dropped", c_int64), ("norm", c_double), ("norm_dropped", c_double)]


class FfnReport(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("tokens", c_int64),
        ("alive_columns", c_int64),
        ("sparse_columns", c_int64),
        ("sparse_share", c_double),
        ("strip_rows", c_int64),
        ("element_density", c_double),
        ("strip_density", c_double),
        ("y", FfnDrop),
        ("dx", FfnDrop),
        ("dw1", FfnDrop),
        ("dgate", FfnDrop),
        ("dw2", FfnDrop),
    ]


class FfnGrads(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(Matrix)),
        ("w1", POINTER(Matrix)),
        ("w1_v", POINTER(Matrix)),
        ("gate", POINTER(Matrix)),
        ("gate_v", POINTER(Matrix)),
        ("w2", POINTER(Matrix)),
        ("w2_v", POINTER(Matrix)),
        ("b1", c_void_p),
        ("b_gate", c_void_p),
        ("b2", c_void_p),
        ("accumulate", c_int),
    ]


STRUCTS: Dict[str, Type[Structure]] = {
    "esmm_allocator": Allocator,
    "esmm_ctx_opts": CtxOpts,
    "esmm_matrix": Matrix,
    "esmm_format": Format,
    "esmm_prepare_opts": PrepareOpts,
    "esmm_weights_info": WeightsInfo,
    "esmm_bsr": Bsr,
    "esmm_pattern_info": PatternInfo,
    "esmm_matmul_opts": MatmulOpts,
    "esmm_stats": Stats,
    "esmm_kernel_info": KernelInfo,
    "esmm_verdict": Verdict,
    "esmm_recollection": Recollection,
    "esmm_prune_opts": PruneOpts,
    "esmm_prune_report": PruneReport,
    "esmm_skip_stats": SkipStats,
    "esmm_generator": Generator,
    "esmm_ffn_opts": FfnOpts,
    "esmm_ffn_weights": FfnWeights,
    "esmm_ffn_drop": FfnDrop,
    "esmm_ffn_report": FfnReport,
    "esmm_ffn_grads": FfnGrads,
}

# ---- functions: name -> (result, arguments) ----

PROGRESS = CFUNCTYPE(None, c_void_p, c_int, c_int)
_P = c_void_p
FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "esmm_status_str": (c_char_p, [c_int]),
    "esmm_version": (c_int, []),
    "esmm_version_str": (c_char_p, []),
    "esmm_source_id": (c_char_p, []),
    "esmm_ctx_create": (c_int, [_P, _P]),
    "esmm_ctx_free": (None, [_P]),
    "esmm_ctx_error": (c_char_p, [_P]),
    "esmm_ctx_threads": (c_int, [_P]),
    "esmm_ctx_device": (c_char_p, [_P]),
    "esmm_ctx_device_name": (c_char_p, [_P]),
    "esmm_ctx_features": (c_char_p, [_P]),
    "esmm_ctx_device_reason": (c_char_p, [_P]),
    "esmm_ctx_set_stream": (c_int, [_P, _P]),
    "esmm_ctx_stream": (c_void_p, [_P]),
    "esmm_ctx_synchronize": (c_int, [_P]),
    "esmm_memory_alloc": (c_int, [_P, c_size_t, _P]),
    "esmm_memory_free": (None, [_P, _P]),
    "esmm_dtype_size": (c_size_t, [c_int]),
    "esmm_dtype_str": (c_char_p, [c_int]),
    "esmm_matrix_copy": (c_int, [_P, _P, _P]),
    "esmm_format_str": (c_char_p, [c_int]),
    "esmm_prepare": (c_int, [_P, _P, _P, _P]),
    "esmm_weights_free": (None, [_P]),
    "esmm_weights_get_info": (c_int, [_P, _P]),
    "esmm_weights_save": (c_int, [_P, _P, c_char_p]),
    "esmm_weights_load": (c_int, [_P, c_char_p, _P]),
    "esmm_weights_to_dense": (c_int, [_P, _P, _P]),
    "esmm_prepare_bsr": (c_int, [_P, _P, _P, _P]),
    "esmm_pattern_extract": (c_int, [_P, _P, c_int64, _P]),
    "esmm_pattern_extract_b": (c_int, [_P, _P, c_int64, _P]),
    "esmm_pattern_coarsen": (c_int, [_P, _P, c_int64, _P]),
    "esmm_pattern_free": (None, [_P]),
    "esmm_pattern_get_info": (c_int, [_P, _P, _P]),
    "esmm_pattern_bits": (c_int, [_P, _P, c_int64, c_int64, _P]),
    "esmm_matmul": (c_int, [_P, _P, _P, _P, _P, _P]),
    "esmm_matmul_bsr": (c_int, [_P, _P, _P, _P, _P, _P]),
    "esmm_kernel_count": (c_int, []),
    "esmm_kernel_get": (c_int, [_P, c_int, _P]),
    "esmm_explain": (c_int, [_P, _P, _P, _P, _P, _P, c_size_t, _P]),
    "esmm_recall": (c_int, [_P, _P, c_int64, _P]),
    "esmm_expect": (c_int, [_P, _P, c_int64, _P]),
    "esmm_forget": (c_int, [_P]),
    "esmm_format_check": (c_int, [_P, _P, _P, _P, _P]),
    "esmm_prune": (c_int, [_P, _P, _P, _P]),
    "esmm_pattern_reorder": (c_int, [_P, _P, c_int64, _P, _P]),
    "esmm_pattern_skip_stats": (c_int, [_P, _P, _P, _P]),
    "esmm_tune": (c_int, [_P, c_int, PROGRESS, _P]),
    "esmm_tune_weights": (c_int, [_P, _P, _P, _P, _P]),
    "esmm_tune_save": (c_int, [_P]),
    "esmm_tune_path": (c_char_p, [_P]),
    "esmm_is_tuned": (c_int, [_P]),
    "esmm_tune_load": (c_int, [_P]),
    "esmm_load": (c_int, [_P]),
    "esmm_timer_create": (c_int, [_P, _P]),
    "esmm_timer_free": (None, [_P]),
    "esmm_timer_start": (c_int, [_P]),
    "esmm_timer_stop": (c_int, [_P]),
    "esmm_timer_seconds": (c_int, [_P, _P]),
    "esmm_generate": (c_int, [_P, _P, _P]),
    "esmm_generator_preset": (c_int, [_P, c_char_p, _P]),
    "esmm_ffn_create": (c_int, [_P, _P, _P]),
    "esmm_ffn_free": (None, [_P]),
    "esmm_ffn_set_weights": (c_int, [_P, _P, _P, _P]),
    "esmm_ffn_cache_create": (c_int, [_P, _P, _P]),
    "esmm_ffn_cache_free": (None, [_P]),
    "esmm_ffn_forward": (c_int, [_P, _P, _P, _P, _P, _P]),
    "esmm_ffn_backward": (c_int, [_P, _P, _P, _P, _P, _P]),
}

# The interface that these declarations are of. Until 1.0 a minor version may change it, and with it the soname.
INTERFACE = (0, 2)


def packer(kind: Type[Structure]) -> struct.Struct:
    """A struct.Struct of the same layout: it fills all fields in one call, where ctypes takes one call for each."""
    codes = {
        c_void_p: "P",
        c_char_p: "P",
        c_int64: "q",
        c_uint64: "Q",
        c_size_t: "N",
        c_int: "i",
        c_uint: "I",
        c_double: "d",
    }
    text = {field: f"{ctypes.sizeof(field)}s" for field in (c_char * 32, c_char * 160)}
    layout = struct.Struct("@" + "".join(codes.get(f[1]) or text[f[1]] for f in kind._fields_) + "0P")  # type: ignore[index]
    assert layout.size == ctypes.sizeof(kind), kind
    return layout


def library_path() -> str:
    """Where libesmm.so is: $ESMM_LIBRARY, else beside this file (a wheel), else in the source tree's build/."""
    named = os.environ.get("ESMM_LIBRARY")
    if named:
        return named
    here = os.path.dirname(os.path.abspath(__file__))
    bundled = os.path.join(here, "libesmm.so." + ".".join(map(str, INTERFACE)))
    if os.path.exists(bundled):
        return bundled
    tree = os.path.dirname(os.path.dirname(here))
    built = os.path.join(tree, "build", "libesmm.so")
    if os.path.exists(os.path.join(tree, "include", "esmm.h")) and os.path.exists(built):
        return built
    raise ImportError(
        f"libesmm.so is not there: neither {bundled} nor {built} exists. Install the package with 'pip install .', "
        "or run 'make', or name the library in ESMM_LIBRARY"
    )


def _open() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(path)
        library.esmm_version.restype = c_int
        number = library.esmm_version()
    except (OSError, AttributeError) as e:
        raise ImportError(f"{path} cannot be used: {e}") from e
    if (number // 10000, number // 100 % 100) != INTERFACE:
        raise ImportError(
            f"{path} is libesmm {number // 10000}.{number // 100 % 100}, and this package needs {INTERFACE[0]}."
            f"{INTERFACE[1]}: install both from one source tree"
        )
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise ImportError(f"{path} has no {name}: it is older than this package, install both from one source tree")
        function.restype = result
        function.argtypes = arguments
    return library


lib: ctypes.CDLL = _open()
