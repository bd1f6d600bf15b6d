"""Timing for esmm.torch.convert: several ways in turns, parts of a model inside a run of it."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._profile import Sample, call_model

BUDGET = 0.04  # seconds for timing one way of one block at one number of rows
Emptier = Optional[Callable[[], Any]]


def cache_bytes(device: torch.device) -> int:
    """Of the last cache before the memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0) or 32 << 20
    except (ValueError, OSError):
        return 32 << 20


def emptier(model: nn.Module, device: torch.device) -> Emptier:
    """Drives a layer's weights out of the cache, as the model's other layers do between two of its calls. None if the
    cache has room for the whole model."""
    cache = cache_bytes(device)
    if sum(p.numel() * p.element_size() for p in model.parameters() if p.device == device) <= cache:
        return None
    # On a GPU it also takes long enough for the host to have the next launches ready.
    room = torch.ones(max(2 * cache, 256 << 20 if device.type == "cuda" else 0) // 4, device=device)
    return lambda: room.sum()  # reads: lines that were written would have to go back first


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def race(
    ways: Dict[str, Callable[[], Any]], device: torch.device, budget: Optional[float] = None, empty: Emptier = None
) -> Dict[str, float]:
    """Seconds of each, taken in turns so that a disturbance hits all; the lower quartile of several. empty:
    called before each."""
    budget = BUDGET if budget is None else budget
    inner: Dict[str, int] = {}
    for name, run in ways.items():
        for _ in range(8 if device.type == "cuda" else 3):  # a GPU's context remembers how dense its input was
            run()
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        once = max(time.perf_counter() - begin, 1e-7)
        inner[name] = 1 if empty else max(1, min(200, int(budget / 12 / once)))
    times: Dict[str, List[float]] = {name: [] for name in ways}
    for turn in range(12):
        for name, run in ways.items():
            if empty:
                times[name].append(_once(run, device, empty))
                continue
            _synchronize(device)
            begin = time.perf_counter()
            for _ in range(inner[name]):
                run()
            _synchronize(device)
            times[name].append((time.perf_counter() - begin) / inner[name])
        if turn >= 4 and sum(sum(t) * inner[n] for n, t in times.items()) > 3 * budget * len(ways):
            break
    return {name: statistics.quantiles(t, n=4)[0] for name, t in times.items()}


def _once(run: Callable[[], Any], device: torch.device, empty: Callable[[], Any]) -> float:
    empty()
    begun = _mark(device)
    run()
    return _seconds(begun, _mark(device))


def _mark(device: torch.device) -> Any:
    """Now: on a GPU an event in that device's stream, which need not be the current device's."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(a: Any, b: Any) -> float:
    if isinstance(a, float):
        return b - a  # type: ignore[no-any-return]
    b.synchronize()
    return 1e-3 * a.elapsed_time(b)  # type: ignore[no-any-return]


def time_inside(
    model: nn.Module, sample: Sample, modules: Sequence[nn.Module], device: torch.device
) -> Tuple[List[float], List[int]]:
    """Each module's share of a run of the model, and the rows of its last call. Shares of the fastest quarter of many
    runs, or of few if the model is slow: on a busy machine a pause may or may not fall into a module."""
    rows: Dict[nn.Module, int] = {}
    begun: Dict[nn.Module, Any] = {}
    spans: Dict[nn.Module, List[Tuple[Any, Any]]] = {}

    places = {m: next((p.device for p in m.parameters()), device) for m in modules}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()), None)
        rows[module] = given.numel() // max(1, given.shape[-1]) if given is not None else 0
        begun[module] = _mark(places[module])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        spans[module].append((begun[module], _mark(places[module])))

    runs: List[List[float]] = []
    handles = [m.register_forward_pre_hook(begin, with_kwargs=True) for m in modules]
    handles += [m.register_forward_hook(end) for m in modules]
    try:
        begun_at = time.perf_counter()
        for turn in range(42):
            if turn >= 3 and time.perf_counter() - begun_at > 0.5:
                break
            spans.update((module, []) for module in modules)
            start = _mark(device)
            call_model(model, sample)
            stop = _mark(device)
            _synchronize(device)
            runs.append([_seconds(start, stop), *(sum(_seconds(a, b) for a, b in spans[m]) for m in modules)])
    finally:
        for handle in handles:
            handle.remove()
    runs = sorted(runs[2:])
    total, *parts = (sum(times) for times in zip(*runs[: max(1, len(runs) // 4)]))
    return [part / max(total, 1e-9) for part in parts], [rows.get(m, 0) for m in modules]
