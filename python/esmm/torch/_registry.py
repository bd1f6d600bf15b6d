"""The Python part of the operators' table of prepared weights: it holds memory and lends contexts.

Operators take ordinary tensors alone, so that compiling, exporting, copying and pickling need no special rules. The
first product with a weight prepares it, and later ones find the result in csrc/ops.cpp, as long as the tensor has the
same address, shape, strides, dtype and version counter. To be sure that the address still means the same tensor, its
memory is held here. Prepared weights go when the nn.Parameter dies, or when another one is prepared and nothing else
holds the memory, or with clear_cache().

Only an nn.Parameter is remembered, and the bytes of a sparse tensor: compiled code writes one result after another to
the same memory without raising a version counter, so the counter cannot distinguish its results.

Writing through ``weight.data`` does not raise the version counter either: call clear_cache() after that.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple

import torch

from .. import _core
from . import _build
from ._formats import device_name

operators = _build.load()
atexit.register(operators.esmm_torch_save)  # no context of theirs is freed


class Held(NamedTuple):
    """The memory at one address that something was prepared from."""

    alias: torch.Tensor  # while it lives no other tensor can get the address
    finalizers: List[Any]  # of each nn.Parameter that was there


_held: Dict[int, Held] = {}
_lock = threading.RLock()
_around = functools.lru_cache(maxsize=None)(_core.Context.around)  # the operators never free a context


@contextmanager
def context(device: torch.device) -> Iterator[_core.Context]:
    """One of the operators' contexts, for the calling thread alone, with torch's number of threads, on torch's current
    stream."""
    name = device_name(device)
    index = -1 if name == "cpu" else device.index or 0
    pointer, text = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
    threads = _core.local.threads if index < 0 else 0
    taken = operators.esmm_torch_take(index, threads, ctypes.byref(pointer), text)
    if pointer.value is None:
        raise RuntimeError(text.value.decode(errors="replace"))
    try:
        yield _around(pointer.value)
    finally:
        operators.esmm_torch_give(taken)


def version_of(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


_warned = False


def lasts(t: torch.Tensor) -> bool:
    """May weights prepared from t be used again?"""
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


def hold(t: torch.Tensor) -> int:
    """Holds t's memory, so that the operators may remember weights prepared from it. Returns how often entries were
    forgotten so far, which the operators compare before they remember; -1 where the weights may not be used again."""
    if not lasts(t):
        return -1
    address = t.data_ptr()
    with _lock:
        held = _held.get(address)
        if held is None:
            sweep()
            held = _held[address] = Held(t.detach(), [])
        known = (finalizer.peek() for finalizer in held.finalizers)
        if isinstance(t, torch.nn.Parameter) and not any(of is not None and of[0] is t for of in known):
            finalizer = weakref.finalize(t, forget, address)
            finalizer.atexit = False
            held.finalizers.append(finalizer)
        count: int = operators.esmm_torch_forgotten()
        return count


def float_copy(t: torch.Tensor) -> torch.Tensor:
    """t as float32, in memory that may be kept.

    While torch.compile(mode="reduce-overhead") runs a function for the first time, all memory comes from the future
    graph's pool, where only results may live on. Such a pool is for one thread, or its stream:
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
        torch.cuda.current_stream(t.device).synchronize()  # the memory's last user is done with it
        return made

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(allocate).result()
    made.record_stream(torch.cuda.current_stream(t.device))
    return made.copy_(t)


def sweep() -> None:
    """Lets go of memory that nothing else holds."""
    with _lock:
        holders: Dict[int, int] = {}
        for held in list(_held.values()):  # a finalizer may take one out
            cdata = held.alias.untyped_storage()._cdata
            holders[cdata] = holders.get(cdata, 0) + 1
        dead: List[int] = []
        for address, held in list(_held.items()):
            storage = held.alias.untyped_storage()
            # Our aliases, and the storage object that asks.
            if torch._C._storage_Use_Count(storage._cdata) <= holders[storage._cdata] + 1:
                dead.append(address)
        for address in dead:
            forget(address)


def forget(address: int) -> None:
    """Drops what was prepared from a tensor at this address."""
    with _lock:
        operators.esmm_torch_forget(address)  # before its memory may become another tensor's
        held = _held.pop(address, None)
    if held is not None:
        for finalizer in held.finalizers:
            finalizer.detach()


def clear_cache() -> None:
    """Drops everything that was prepared; the next products prepare again.

    Not while a CUDA graph that was captured with these weights is still to run.
    """
    with _lock:
        for address in list(_held):
            forget(address)
