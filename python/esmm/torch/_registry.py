"""What was prepared, found again by the parameter that it was prepared from.

Operators take ordinary tensors and nothing else, so that compiling, exporting, copying and pickling need no rules of
their own. The first product with a weight prepares it, and later ones find that again as long as the tensor has the
same address, shape, strides, dtype and version counter. To be sure that the address still means the same tensor, an
entry holds its memory; it goes when the nn.Parameter dies, or when another one is prepared and nobody else has the
memory any more, or with clear_cache().

Only an nn.Parameter is remembered, and the bytes of a sparse tensor: compiled code writes one result after another to
the same memory without raising a version counter, so what it computed cannot be told apart by that.

Writing through ``weight.data`` does not raise the version counter either: call clear_cache() after that.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from .. import _core
from .._core import Weights
from ._formats import DTYPES, TORCH_DTYPES, decode, device_name, raw_or_none

BIAS = -1  # as a format: a vector as float32
TURNED = 1 << 40  # in a format: B is the weight as it is, for products with its transpose

Key = Tuple[Any, ...]


class Entry:
    """What was made of one tensor."""

    __slots__ = ("alias", "version", "made", "finalizer")

    def __init__(
        self, alias: torch.Tensor, version: int, made: Union[Weights, torch.Tensor, None], finalizer: Any
    ) -> None:
        self.alias = alias  # holds the memory, so that no other tensor can get its address
        self.version = version
        self.made = made  # None: the C++ operators own the weights
        self.finalizer = finalizer


_entries: Dict[Key, Entry] = {}
_lock = threading.RLock()
_contexts = threading.local()
extension: Optional[ctypes.CDLL] = None  # the C++ operators, once they are loaded


def context(device: torch.device) -> _core.Context:
    """The calling thread's context, with as many threads as torch uses, on torch's current stream."""
    name = device_name(device)
    threads = 0
    if name == "cpu":
        threads = _core.local.threads or (0 if "ESMM_THREADS" in os.environ else torch.get_num_threads())
    mine: Optional[Dict[Tuple[str, int], _core.Context]] = getattr(_contexts, "all", None)
    if mine is None:
        mine = _contexts.all = {}
    ctx = mine.get((name, threads))
    if ctx is None:
        ctx = mine[(name, threads)] = _core.Context(name, threads)
    if name != "cpu":
        ctx.stream = torch.cuda.current_stream(device).cuda_stream
    return ctx


def version_of(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def key_of(t: torch.Tensor, format: int, target: int) -> Key:
    return (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, format, target)


def find(t: torch.Tensor, format: int, target: int) -> Any:
    """Weights of t in that format and dtype, or t as float32 where format is BIAS; made now unless they are there."""
    entry = _entries.get(key_of(t, format, target))
    if entry is not None and entry.made is not None and entry.version == version_of(t):
        return entry.made
    made = _prepare(t, format, target)
    if lasts(t):
        _remember(t, format, target, made)
    return made


def give(t: torch.Tensor, format: int, target: int) -> int:
    """The same for the C++ operators: the address of weights, which they own from then on, or 0 for a bias, which they
    make themselves; plus 1 where it may be used again for the same tensor."""
    address = 0
    if format != BIAS:
        handle = _prepare(t, format, target)._live()
        handle._free = lambda _: None
        address = handle.value
    if lasts(t):
        _remember(t, format, target, None)
        address += 1
    return address


_warned = False


def lasts(t: torch.Tensor) -> bool:
    """May what is made of t be used again?"""
    global _warned
    if isinstance(t, torch.nn.Parameter) or t.dtype == torch.uint8:
        return True
    if t.dim() == 2 and not _warned:
        _warned = True
        warnings.warn(
            "esmm.torch: a weight that is not an nn.Parameter is prepared anew in every call. Pass the parameter"
            " itself, not a view of it, or make it one: nn.Parameter(w, requires_grad=False)",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def _remember(t: torch.Tensor, format: int, target: int, made: Union[Weights, torch.Tensor, None]) -> None:
    key = key_of(t, format, target)
    with _lock:
        old = _entries.get(key)
        if old is None:
            sweep()
        elif old.finalizer is not None:
            old.finalizer.detach()
        finalizer = None
        if isinstance(t, torch.nn.Parameter):
            finalizer = weakref.finalize(t, forget, t.data_ptr())
            finalizer.atexit = False
        _entries[key] = Entry(t.detach(), version_of(t), made, finalizer)


def float_copy(t: torch.Tensor) -> torch.Tensor:
    """t as float32, in memory that may be kept.

    While torch.compile(mode="reduce-overhead") runs a function for the first time, all that is allocated comes from the
    pool of the graph to be, and nothing of that but results may live on. Such a pool is for one thread, or its stream:
    another thread allocates outside of it.

    It is no inference tensor, also where the first call comes in inference mode: a later one, which writes to it, may
    be outside of that.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _float_copy(t.detach())


def _float_copy(t: torch.Tensor) -> torch.Tensor:
    if not t.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.empty(t.shape, dtype=torch.float32, device=t.device).copy_(t)

    def allocate() -> torch.Tensor:
        made = torch.empty(t.shape, dtype=torch.float32, device=t.device)
        torch.cuda.current_stream(t.device).synchronize()  # what had the memory before is done with it
        return made

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(allocate).result()
    made.record_stream(torch.cuda.current_stream(t.device))
    return made.copy_(t)


def _prepare(t: torch.Tensor, format: int, target: int) -> Any:
    if format == BIAS:
        if not lasts(t):
            return t.detach().to(torch.float32).contiguous()
        entry = _entries.get(key_of(t, format, target))
        if entry is not None and isinstance(entry.made, torch.Tensor):
            return entry.made.copy_(t.detach())  # where graphs look for it
        return float_copy(t)
    if t.dtype == torch.uint8:
        return unpack(t, target)
    b = t.detach().to(TORCH_DTYPES[target])
    if not format & TURNED:
        b = b.t()
    raw = raw_or_none(b)
    if raw is None:
        b = b.contiguous()
        raw = raw_or_none(b)
    assert raw is not None
    return context(t.device).prepare(raw, format=decode(format))


def unpack(packed: torch.Tensor, target: int) -> Weights:
    """Weights from the bytes of a weights file."""
    from .._files import loads

    ctx = context(packed.device)
    weights = loads(packed.detach().cpu().numpy().tobytes(), ctx.device)
    if DTYPES[getattr(torch, weights.dtype)] != target:
        raise RuntimeError(f"esmm: the sparse tensor is {weights.dtype}, and x is {TORCH_DTYPES[target]}")
    return weights


def sweep() -> None:
    """Drops entries whose memory nobody else holds."""
    dead: List[int] = []
    with _lock:
        holders: Dict[int, int] = {}
        for entry in _entries.values():
            cdata = entry.alias.untyped_storage()._cdata
            holders[cdata] = holders.get(cdata, 0) + 1
        for key, entry in _entries.items():
            storage = entry.alias.untyped_storage()
            # Our aliases, and the storage object that asks.
            if torch._C._storage_Use_Count(storage._cdata) <= holders[storage._cdata] + 1:
                dead.append(key[0])
    for address in dead:
        forget(address)


def forget(address: int) -> None:
    """Drops what was prepared from a tensor at this address."""
    dropped = []
    with _lock:
        for key in [key for key in _entries if key[0] == address]:
            entry = _entries.pop(key)
            if entry.finalizer is not None:
                entry.finalizer.detach()
            dropped.append(entry)
        if extension is not None:
            extension.esmm_torch_forget(address)


def clear_cache() -> None:
    """Drops everything that was prepared; the next products prepare again.

    Not while a CUDA graph that was captured with these weights is still to run.
    """
    with _lock:
        for address in {key[0] for key in _entries}:
            forget(address)
