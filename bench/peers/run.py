#!/usr/bin/env python3
"""run.py: other libraries and kernels beside ours, on a GPU, in one process and on the same data; and what only Python
can measure for the record: sizes up to 64K, how fast the memory is, how dense strips of real activations are.

    PYTHONPATH=python ESMM_LIBRARY=build/libesmm.so python3 bench/peers/run.py [--suites layers,peers16,ceilings,sizes16]
        [--json FILE] [--seconds 115] [--largest 65536] [--activations DIR] [--self-check]

  peers16   weights in blocks, 2:4 weights, one row with zeros, A with dead strips: ours through the C interface, cuBLAS,
            torch.compile, PyTorch's semi-structured (cuSPARSELt and CUTLASS), its BSR and CSR products (Triton, cuSPARSE)
            and Triton kernels of triton_kernels.py
  sizes16   bf16, m = n = k from 1024 to 65536, beside cuBLAS with the weights as [n, k]: strips of 128 in A and blocks of
            128 in B at 50, 78, 90 and 95 % zeros, and 2:4. Each is timed a few times, at 65536 once ("runs")
  ceilings  bytes a second, copied and read                     layers    shares alive in strips of 1 to 128 rows

Every contestant is captured in a CUDA graph where it can be, and called as it is where not ("timed": eager). They take
turns; before each turn a buffer larger than the second-level cache is written, and the GPU is kept busy until the host
has everything queued. A time is the median between two events around one call. The dense baseline is the faster of
cuBLAS with the weights as [n, k] and as [k, n], but for sizes16. What a format needs is made beforehand, for all.

Every result is checked against float64 on the GPU, NaN fails. A peer that cannot run, or is wrong, is reported as such,
and the rest run. Lines are those of the record, without its stamp; each is in FILE as soon as its product was measured,
so that what is cut off leaves what came before. --seconds are shared out: peers16 starts nothing after 56 % of them.
What compiles slowly, and what has several peers already, comes last.

The exit status is 1 if ours is wrong, which is also said at once in a line that begins with "ours is wrong"; otherwise
3 if something was left out for want of time, or stopped, which the last line says after "cut off:"; otherwise 0.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
SUITES = ("layers", "peers16", "ceilings", "sizes16")
PEERS_SHARE = 0.56  # of the time
NO_TIME = "there was no time left"
HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)
lines: List[Dict[str, Any]] = []
wrong_ours: List[str] = []
late: Dict[str, int] = collections.Counter()  # what there was no time left for, and how many of them
stopped: List[str] = []  # what ended before its end for another reason
began = time.monotonic()  # importing torch counts


class Out:
    """The file of --json, or none."""

    file: Any = None


def record(line: Dict[str, Any]) -> None:
    lines.append(line)
    if Out.file:
        Out.file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        Out.file.flush()


def stop(what: str) -> None:
    stopped.append(what)
    print(f"  {what}", flush=True)


def left_out() -> str:
    """All that is missing, in one line; empty where nothing is."""
    missing = [f"{NO_TIME} for " + ", ".join(f"{n} {what}" for what, n in late.items())] if late else []
    return "; ".join(missing + stopped)


class Rig:
    """The GPU, our context on it and the clock. torch is imported here: the rest works without it."""

    def __init__(self, seconds: float) -> None:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("run.py: torch sees no CUDA device; --suites layers and --self-check need none")
        import esmm
        from esmm import _core

        self.torch, self.core = torch, _core
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)
        torch.manual_seed(1)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.ctx = esmm.Context("cuda:0")
        about = esmm.info(context=self.ctx)
        self.common = {"requested": "", "device": "cuda:0", "device_name": about.device_name, "gpu": about.device_name,
                       "threads": about.threads, "line": None, "dtype": "bf16", "version": about.version,
                       "source_id": about.source_id}  # fmt: skip
        self.cache = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        self.last = began + seconds
        self.ends = self.last  # of the suite at hand
        self.graphs = True

    def raw(self, x: Any) -> Any:
        """A tensor of two dimensions as the C interface takes it."""
        code = {self.torch.bfloat16: self.core.BF16, self.torch.float32: self.core.F32}[x.dtype]
        made = self.core.raw(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), x.stride(1), code, 0)
        if made is None:
            raise ValueError("strides of no matrix")
        return made

    def on_stream(self) -> None:
        self.ctx.stream = self.torch.cuda.current_stream().cuda_stream

    def ours(self, x: Any, weight: Any, y: Any, format: Optional[str]) -> Callable[[], None]:
        """Our product of x [m, k] and weight [n, k]."""
        self.on_stream()
        prepared = self.ctx.prepare(self.raw(weight.t()), "any", format)
        a, c = self.raw(x), self.raw(y)

        def call() -> None:
            self.on_stream()
            self.ctx.matmul(a, prepared, c)

        call.stats = lambda: (self.on_stream(), self.ctx.matmul(a, prepared, c, want_stats=True)[0])[1]  # type: ignore
        return call

    def late(self) -> bool:
        return time.monotonic() > self.ends


class Contestant:
    def __init__(
        self, name: str, call: Callable[[], Any], result: Callable[[], Any], extra: Optional[Dict[str, Any]] = None
    ):
        self.name, self.call, self.result, self.extra = name, call, result, dict(extra or {})
        self.times: List[float] = []
        self.failed = ""
        self.replay: Callable[[], Any] = call
        self.error = float("nan")

    @property
    def ms(self) -> float:
        return statistics.median(self.times)


def one_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def ready(rig: Rig, c: Contestant, warm: int) -> None:
    """Runs it until it has learnt what it learns, then captures it."""
    torch = rig.torch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side), torch.no_grad():
            for i in range(warm):
                c.call()
                if i % 4 == 3:
                    side.synchronize()  # what ours learns from is read when it is there
            side.synchronize()
        torch.cuda.current_stream().wait_stream(side)
    except Exception as e:  # noqa: BLE001
        c.failed = one_line(e)
        torch.cuda.synchronize()
        return
    c.extra["timed"] = "eager"
    if not rig.graphs or c.extra.get("eager"):
        return
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            c.call()
        c.replay, c.graph = graph.replay, graph  # type: ignore[attr-defined]
        c.extra["timed"] = "graph"
    except Exception as e:  # noqa: BLE001
        print(f"  {c.name}: not captured: {one_line(e)}", flush=True)
        torch.cuda.synchronize()


def race(rig: Rig, contestants: List[Contestant], rounds: int, unseen: int = 1) -> None:
    """Times all of them in turns; the first `unseen` rounds only warm up."""
    torch = rig.torch
    for turn in range(rounds + unseen):
        for c in contestants:
            if c.failed:
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            try:
                with torch.no_grad():
                    rig.cache.fill_(turn & 1)
                    torch.cuda._sleep(400_000)  # a fifth of a millisecond, in which the host queues what follows
                    begin.record()
                    c.replay()
                    end.record()
                    end.synchronize()
            except Exception as e:  # noqa: BLE001
                c.failed = one_line(e)
                continue
            if turn >= unseen:
                c.times.append(begin.elapsed_time(end))


def relative_error(rig: Rig, got: Any, x: Any, weight: Any) -> float:
    """The largest error over the largest value, of at most 64 rows, in float64; infinite where one is not finite."""
    torch = rig.torch
    m, n = got.shape
    rows = torch.arange(0, m, max(1, m // 64), device=rig.device)[:64]
    a = x[rows].double()
    worst = largest = 0.0
    for first in range(0, n, 4096):  # the whole weight in float64 may be more than there is
        want = a @ weight[first : first + 4096].double().t()
        part = got[rows, first : first + 4096].double()
        if not torch.isfinite(part).all():
            return float("inf")
        worst = max(worst, (part - want).abs().max().item())
        largest = max(largest, want.abs().max().item())
    return worst / largest if largest > 0 else worst


def judge(
    rig: Rig, suite: str, what: Dict[str, Any], contestants: List[Contestant], x: Any, weight: Any, apart: bool = False
) -> None:
    """
    Checks each, and makes its line; the baselines are those whose name starts with cublas. apart: each has a result of
    its own, which is still that of the race; and only ours has a line, where it worked.
    """
    for c in contestants:
        if c.failed or not c.times:
            c.failed = c.failed or NO_TIME
            if c.failed == NO_TIME:
                late[f"contestants of {suite}"] += 1
            continue
        try:
            with rig.torch.no_grad():
                if not apart:
                    c.replay()
                c.error = relative_error(rig, c.result(), x, weight)
        except Exception as e:  # noqa: BLE001
            c.failed = one_line(e)
    dense = [c for c in contestants if c.name.startswith("cublas") and not c.failed]
    if not dense:
        stop(f"{what['job']}, {what['m']} x {what['n']}, k {what['k']}: no dense baseline: {contestants[0].failed}")
        return
    best = min(dense, key=lambda c: c.ms)
    m, n, k = what["m"], what["n"], what["k"]
    for c in contestants:
        line = {
            "kernel": c.name,
            **rig.common,
            "requested": c.name,
            **what,
            **{k: v for k, v in c.extra.items() if k != "eager"},
        }
        line["requested"] = "auto" if c.name == "esmm" else c.name
        if c.name == "esmm":
            line["kernel"] = c.extra.get("kernel", "esmm")
        # A result in bf16 is off by half a unit of its last place, 2^-9, at least.
        if not c.failed and not c.error <= 2 * max(best.error, 2.0**-9):
            c.failed = f"wrong: off by {c.error:.1e} of the largest value, cuBLAS by {best.error:.1e}"
            if c.name == "esmm":
                wrong_ours.append(f"{m} x {n}, k {k}: {c.failed}")
                print(f"ours is wrong: {wrong_ours[-1]}", flush=True)  # now: what is killed later says nothing more
        if c.failed:
            line.update(outcome="failed", reason=c.failed, ms=None, ms_baseline=best.ms, speedup=None)
        else:
            line.update(outcome="ok", reason="", runs=len(c.times), ms=c.ms, ms_min=min(c.times), ms_extract=0.0,
                        baseline=best.name, ms_baseline=best.ms, speedup=best.ms / c.ms, rel_err=c.error,
                        rel_err_baseline=best.error, checked_rows=min(64, m),
                        gflops=2e-6 * m * n * k / c.ms)  # fmt: skip
        if apart and c.name == "esmm" and c.failed not in ("", NO_TIME):
            stopped.append(f"{suite}, {m}, {what['job']}, ours: {c.failed}")
        if not apart or (c.name == "esmm" and not c.failed):
            record({"suite": suite, "asked": f"{what['asked_density']:g}", **line})
        name = line["kernel"] if c.name == "esmm" else c.name
        text = f"{c.ms:9.4f} ms {best.ms / c.ms:6.2f} x" if not c.failed else c.failed
        print(f"  {m} x {n}, k {k} {what['job']:12} {what['asked_density']:6.3g} {name:28} {text}", flush=True)


# ---- the contestants of a product x [m, k] by weight [n, k] ----


def dense_ones(rig: Rig, x: Any, weight: Any, turned: Any, compiled: bool) -> List[Contestant]:
    torch = rig.torch
    m, n = x.shape[0], weight.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=rig.device)
    z = torch.empty_like(y)
    made = [Contestant("cublas_nk", lambda: torch.mm(x, weight.t(), out=y), lambda: y),
            Contestant("cublas_kn", lambda: torch.mm(x, turned, out=z), lambda: z)]  # fmt: skip
    if compiled:
        box: Dict[str, Any] = {}
        function = torch.compile(lambda a, b: torch.nn.functional.linear(a, b), dynamic=False)

        def call() -> None:
            box["y"] = function(x, weight)

        made.append(Contestant("torch_compile_dense", call, lambda: box["y"]))
    return made


def ours_one(rig: Rig, x: Any, weight: Any, format: Optional[str]) -> Contestant:
    y = rig.torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=rig.device)
    return guarded("esmm", lambda: Contestant("esmm", rig.ours(x, weight, y, format), lambda: y))


def fastest(
    rig: Rig, name: str, configs: List[Any], make: Callable[[Any], Callable[[], Any]], result: Any
) -> Contestant:
    """Of a kernel's configurations, the fastest in a short race."""
    tried = [Contestant(name, make(config), result, {"config": str(config)}) for config in configs]
    for c in tried:
        if rig.late():
            c.failed = NO_TIME
        else:
            ready(rig, c, 2)
    race(rig, tried, 3)
    good = [c for c in tried if not c.failed and c.times]
    best = min(good, key=lambda c: c.ms) if good else tried[0]
    best.times = []
    return best


def guarded(name: str, make: Callable[[], Contestant]) -> Contestant:
    """A peer, or the reason why there is none."""
    try:
        return make()
    except Exception as e:  # noqa: BLE001
        made = Contestant(name, lambda: None, lambda: None)
        made.failed = one_line(e)
        return made


def compete(
    rig: Rig, suite: str, what: Dict[str, Any], all_of: List[Contestant], x: Any, weight: Any, rounds: int = 9
) -> None:
    for c in all_of:
        if c.failed or "timed" in c.extra:
            continue
        if rig.late() and not c.name.startswith(("cublas", "esmm")):
            c.failed = NO_TIME
            continue
        ready(rig, c, 24 if c.name == "esmm" else 3)
        if c.name == "esmm" and not c.failed:
            c.extra["kernel"] = c.call.stats().kernel  # type: ignore[attr-defined]
    race(rig, all_of, rounds)
    judge(rig, suite, what, all_of, x, weight)


def dense_weight(rig: Rig, n: int, k: int) -> Any:
    return rig.torch.randn(n, k, dtype=rig.torch.bfloat16, device=rig.device).div_(k**0.5)


def keep_blocks(rig: Rig, weight: Any, block: int, density: float) -> Any:
    """Zeros in all but a share of its blocks, in place; their number is that share's, and one at least."""
    n, k = weight.shape
    total = n // block * (k // block)
    kept = rig.torch.zeros(total, dtype=weight.dtype, device=rig.device)
    kept[rig.torch.randperm(total, device=rig.device)[: max(1, round(density * total))]] = 1
    weight.view(n // block, block, k // block, block).mul_(kept.view(n // block, 1, k // block, 1))
    return weight


def shares(rig: Rig, x: Any, rows: int) -> Any:
    """The shares of nonzero elements of x, and of (strip of so many rows, column) pairs with a nonzero."""
    alive = pairs = 0
    for first in range(0, x.shape[0], 4096):  # a band at a time, for want of memory
        band = x[first : first + 4096] != 0
        alive += int(band.sum())
        pairs += int(band.view(-1, rows, x.shape[1]).any(1).sum())
    return alive / x.numel(), pairs * rows / x.numel()


def keep_two_of_four(rig: Rig, weight: Any) -> Any:
    """Zeros in two of each four k's, in place; a band at a time, for the places take more memory than the weight."""
    torch = rig.torch
    n, k = weight.shape
    for first in range(0, n, 2048):
        groups = weight[first : first + 2048].view(-1, k // 4, 4)
        order = torch.rand(groups.shape, device=rig.device).argsort(-1)
        groups.scatter_(-1, order[..., :2], 0)
    return weight


def blocks_job(rig: Rig, size: int, density: float, slow: bool) -> None:
    torch = rig.torch
    block = 128
    x = torch.randn(size, size, dtype=torch.bfloat16, device=rig.device)
    weight = keep_blocks(rig, dense_weight(rig, size, size), block, density)
    turned = weight.t().contiguous()
    y = torch.empty(size, size, dtype=x.dtype, device=rig.device)
    every = dense_ones(rig, x, weight, turned, compiled=False) + [ours_one(rig, x, weight, f"bsr:{block}")]

    def triton_one() -> Contestant:
        import triton_kernels as kernels

        blocks = kernels.blocks_of(weight, block)
        return fastest(rig, "triton_block_sparse", kernels.BLOCK_CONFIGS,
                       lambda config: lambda: kernels.block_sparse(x, blocks, y, config), lambda: y)  # fmt: skip

    def torch_bsr() -> Contestant:
        from torch.sparse._triton_ops import bsr_dense_addmm

        bsr = weight.to_sparse_bsr((block, block))
        out, turned_x = torch.empty(size, size, dtype=x.dtype, device=rig.device), x.t()
        return Contestant(
            "torch_bsr_triton", lambda: bsr_dense_addmm(out, bsr, turned_x, beta=0, out=out), lambda: out.t()
        )

    def torch_csr() -> Contestant:
        csr, turned_x, box = weight.to_sparse_csr(), x.t().contiguous(), {}

        def call() -> None:
            box["y"] = torch.mm(csr, turned_x)

        return Contestant("cusparse_csr", call, lambda: box["y"].t(), {"eager": True})

    every += [guarded("triton_block_sparse", triton_one), guarded("torch_bsr_triton", torch_bsr)]
    if slow:
        every.append(guarded("cusparse_csr", torch_csr))
    what = {"job": "blocks", "m": size, "n": size, "k": size, "generator": "blocks", "asked_density": density,
            "density_a": 1.0, "density_b": shares(rig, weight, block)[0], "strip128_density_a": 1.0,
            "format": f"bsr:{block}"}  # fmt: skip
    compete(rig, "peers16", what, every, x, weight, rounds=5 if slow else 9)


def semi_structured_job(rig: Rig, m: int, n: int, k: int) -> None:
    torch = rig.torch
    x = torch.randn(m, k, dtype=torch.bfloat16, device=rig.device)
    weight = keep_two_of_four(rig, dense_weight(rig, n, k))
    turned = weight.t().contiguous()
    every = dense_ones(rig, x, weight, turned, False) + [ours_one(rig, x, weight, "2:4")]

    def through(backend: str) -> Contestant:
        from torch.sparse import semi_structured

        kind = getattr(semi_structured, f"SparseSemiStructuredTensor{backend}")
        sparse, box = kind.from_dense(weight), {}

        def call() -> None:
            box["y"] = torch.nn.functional.linear(x, sparse)

        return Contestant(f"torch_24_{backend.lower()}", call, lambda: box["y"])

    def searched() -> Contestant:
        from torch.sparse import semi_structured

        sparse, box, columns = semi_structured.SparseSemiStructuredTensorCUSPARSELT.from_dense(weight), {}, x.t()
        number = torch._cslt_sparse_mm_search(sparse.packed, columns)

        def call() -> None:
            box["y"] = torch._cslt_sparse_mm(sparse.packed, columns, alg_id=number)

        return Contestant("torch_24_cusparselt_searched", call, lambda: box["y"].t())

    every += [guarded("torch_24_cusparselt", lambda: through("CUSPARSELT")),
              guarded("torch_24_cutlass", lambda: through("CUTLASS"))]  # fmt: skip
    if m >= 16:
        every.append(guarded("torch_24_cusparselt_searched", searched))
    what = {"job": "2:4", "m": m, "n": n, "k": k, "generator": "2:4", "asked_density": 0.5, "density_a": 1.0,
            "density_b": 0.5, "strip128_density_a": 1.0, "format": "nm:2:4"}  # fmt: skip
    compete(rig, "peers16", what, every, x, weight)


def row_job(rig: Rig, n: int, k: int, density: float, weight: Any, turned: Any, configs: Dict[str, Any]) -> None:
    torch = rig.torch
    x = torch.randn(1, k, dtype=torch.bfloat16, device=rig.device)
    x *= torch.rand(1, k, device=rig.device) < density
    every = dense_ones(rig, x, weight, turned, False) + [ours_one(rig, x, weight, None)]

    def with_triton(name: str) -> Contestant:
        import triton_kernels as kernels

        y = torch.zeros(n, dtype=torch.float32, device=rig.device)
        row = x[0]
        ks_alive = torch.zeros(k, dtype=torch.int32, device=rig.device)
        count = torch.zeros(1, dtype=torch.int32, device=rig.device)
        kernels.compact(row, ks_alive, count)

        def make(config: Any) -> Callable[[], None]:
            def call() -> None:
                if name == "teal_style":
                    kernels.threshold(row, turned, y, 0.0, config)
                    return
                if name == "gather_style":
                    kernels.compact(row, ks_alive, count)
                kernels.gather(row, turned, ks_alive, count, y, config)

            return call

        known = configs.get(name)
        made = fastest(rig, name, [known] if known else kernels.ROW_CONFIGS, make, lambda: y[None, :])
        if density <= 0.25 and not made.failed:
            configs[name] = next(c for c in kernels.ROW_CONFIGS if str(c) == made.extra["config"])
        return made

    for name in ("teal_style", "gather_style", "gather_style_list_known"):
        every.append(guarded(name, lambda name=name: with_triton(name)))  # type: ignore[misc]
    what = {"job": "one row", "m": 1, "n": n, "k": k, "generator": "random", "asked_density": density,
            "density_a": (x != 0).double().mean().item(), "density_b": 1.0, "format": "dense"}  # fmt: skip
    what["strip128_density_a"] = what["density_a"]
    compete(rig, "peers16", what, every, x, weight, rounds=15)


def strips(rig: Rig, m: int, k: int, density: float) -> Any:
    """A [m, k] of which in 128 rows a k is zero or not; as many are not in every strip, and one at least."""
    torch = rig.torch
    x = torch.randn(m, k, dtype=torch.bfloat16, device=rig.device)
    order = torch.rand(m // 128, k, device=rig.device).argsort(1)
    kept = torch.zeros(m // 128, k, dtype=x.dtype, device=rig.device)
    kept.scatter_(1, order[:, : max(1, round(density * k))], 1)
    x.view(m // 128, 128, k).mul_(kept[:, None, :])
    return x


def strips_job(rig: Rig, m: int, n: int, k: int, density: float) -> None:
    torch = rig.torch
    x = strips(rig, m, k, density)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=rig.device) / k**0.5
    turned = weight.t().contiguous()
    every = dense_ones(rig, x, weight, turned, False) + [ours_one(rig, x, weight, None)]

    def csr_a() -> Contestant:
        csr, box = x.to_sparse_csr(), {}

        def call() -> None:
            box["y"] = torch.mm(csr, turned)

        return Contestant("cusparse_csr", call, lambda: box["y"], {"eager": True})

    every.append(guarded("cusparse_csr", csr_a))
    elements, alive = shares(rig, x, 128)
    what = {"job": "strips", "m": m, "n": n, "k": k, "generator": "blockwise", "asked_density": density,
            "density_a": elements, "density_b": 1.0, "strip128_density_a": alive, "format": "dense"}  # fmt: skip
    compete(rig, "peers16", what, every, x, weight, rounds=5)


def dense_job(rig: Rig, m: int, n: int, k: int) -> None:
    """No zeros at all: what torch.compile makes of a dense product."""
    torch = rig.torch
    x = torch.randn(m, k, dtype=torch.bfloat16, device=rig.device)
    weight = dense_weight(rig, n, k)
    turned = weight.t().contiguous()
    every = dense_ones(rig, x, weight, turned, True) + [ours_one(rig, x, weight, None)]
    what = {"job": "dense", "m": m, "n": n, "k": k, "generator": "dense", "asked_density": 1.0, "density_a": 1.0,
            "density_b": 1.0, "strip128_density_a": 1.0, "format": "dense"}  # fmt: skip
    compete(rig, "peers16", what, every, x, weight)


# ---- the suites ----


def suite_peers16(rig: Rig) -> None:
    """Those with most peers first: six of them are in the first three jobs."""
    n, k = 4096, 14336
    configs: Dict[str, Any] = {}
    weight = dense_weight(rig, n, k)
    turned = weight.t().contiguous()

    def row(density: float) -> None:
        row_job(rig, n, k, density, weight, turned, configs)

    jobs: List[Callable[[], None]] = [  # the last two wait for a compiler
        lambda: semi_structured_job(rig, 4096, 4096, 4096),
        lambda: row(0.1),
        lambda: blocks_job(rig, 4096, 0.22, False),
        lambda: strips_job(rig, 4096, 4096, 14336, 0.125),
        lambda: row(0.05),
        lambda: row(0.25),
        lambda: row(0.5),
        lambda: semi_structured_job(rig, 8192, 8192, 8192),
        lambda: semi_structured_job(rig, 16, 14336, 4096),
        lambda: blocks_job(rig, 8192, 0.22, False),
        lambda: blocks_job(rig, 4096, 0.05, True),
        lambda: dense_job(rig, 4096, 4096, 4096),
        lambda: dense_job(rig, 1, n, k),
    ]
    rig.ends = began + PEERS_SHARE * (rig.last - began)
    for number, job in enumerate(jobs):
        if rig.late() or (number >= len(jobs) - 2 and time.monotonic() > rig.ends - 20):
            late["jobs of peers16"] += len(jobs) - number
            print(f"  {len(jobs) - number} of {len(jobs)} jobs left out: {NO_TIME}", flush=True)
            break
        try:
            job()
        except Exception as e:  # noqa: BLE001
            stop(f"job {number + 1} of peers16 stopped: {one_line(e)}")
    rig.ends = rig.last


def size_product(rig: Rig, size: int, form: str, density: float, y: Any, z: Any) -> None:
    """One product of sizes16; y and z are for the results."""
    torch = rig.torch
    generator, format = {"strips": ("blockwise", None), "blocks": ("blocks", "bsr:128"), "2:4": ("2:4", "2:4")}[form]
    weight = dense_weight(rig, size, size)
    x = strips(rig, size, size, density) if form == "strips" else torch.randn_like(weight)
    if form != "strips":
        weight = keep_blocks(rig, weight, 128, density) if form == "blocks" else keep_two_of_four(rig, weight)
    huge = size > 32768
    dense = Contestant("cublas_nk", lambda: torch.mm(x, weight.t(), out=y), lambda: y)
    try:
        call = rig.ours(x, weight, z, format)
    except Exception as e:  # noqa: BLE001
        stop(f"sizes16, {size}, {form}, {density}: ours cannot: {one_line(e)}")
        return
    mine = Contestant("esmm", call, lambda: z)
    ready(rig, dense, 0 if huge else 1)
    # auto learns where zeros are in A; weights in a format leave it little to choose.
    learns = form == "strips"
    ready(rig, mine, (3 if learns else 2) if huge else 6 if size > 8192 else 20 if learns else 4)
    if not mine.failed:
        mine.extra["kernel"] = call.stats().kernel  # type: ignore[attr-defined]
    race(rig, [dense, mine], 1 if huge else 3 if size > 8192 else 7, 0 if huge else 1)
    elements, alive = shares(rig, x if form == "strips" else weight, 128)
    sparse_a = form == "strips"
    what = {"job": "size", "m": size, "n": size, "k": size, "generator": generator, "asked_density": density,
            "density_a": elements if sparse_a else 1.0, "density_b": 1.0 if sparse_a else elements,
            "strip128_density_a": alive if sparse_a else 1.0,
            "format": {None: "dense", "2:4": "nm:2:4"}.get(format, format)}  # fmt: skip
    judge(rig, "sizes16", what, [dense, mine], x, weight, apart=True)


def suite_sizes16(rig: Rig, largest: int) -> None:
    torch = rig.torch
    products = [(form, density) for form in ("strips", "blocks") for density in (0.5, 0.22, 0.1, 0.05)] + [("2:4", 0.5)]
    size = 1024
    while size <= largest:
        torch.cuda.empty_cache()
        y, z = (torch.empty(size, size, dtype=torch.bfloat16, device=rig.device) for _ in range(2))
        for form, density in products:
            if rig.late():
                late["products of sizes16"] += 1
                print(f"  {size}, {form}, {density}: left out: {NO_TIME}", flush=True)
                continue
            size_product(rig, size, form, density, y, z)
            if size > 8192:
                torch.cuda.empty_cache()  # what our library then allocates is none of torch's
        del y, z
        size *= 2


def suite_ceilings(rig: Rig) -> None:
    torch = rig.torch
    words = 1 << 30  # 4 GiB
    x = torch.ones(words, dtype=torch.float32, device=rig.device)
    y = torch.empty_like(x)

    def rate(call: Callable[[], Any], traffic: int) -> float:
        c = Contestant("rate", call, lambda: None)
        ready(rig, c, 2)
        race(rig, [c], 7)
        if c.failed:
            raise RuntimeError(c.failed)
        return 1e-6 * traffic / c.ms

    def triton_read() -> None:
        import triton_kernels as kernels

        kernels.read(x, sums)

    sums = torch.zeros(132 * 8 if words % (132 * 8) == 0 else 1024, dtype=torch.float32, device=rig.device)
    found = {"copy": [rate(lambda: y.copy_(x), 8 * words)], "read": []}
    for name, call in (("torch.sum", lambda: x.sum()), ("triton", triton_read)):
        try:
            found["read"].append(rate(call, 4 * words))
        except Exception as e:  # noqa: BLE001
            print(f"  read by {name}: {one_line(e)}", flush=True)
    for asked, rates in found.items():
        if not rates:
            stop(f"ceilings: nothing could {asked}")
        else:
            record({"suite": "ceilings", "asked": asked, "kernel": asked, **rig.common, "requested": asked,
                          "bytes": 4 * words, "gb_per_s": max(rates), "outcome": "ok"})  # fmt: skip
            print(f"  {asked}: {max(rates):.0f} GB/s", flush=True)


def suite_layers(common: Dict[str, Any], place: str) -> None:
    """Shares of (strip, feature) pairs with a nonzero."""
    import numpy as np

    for name in sorted(os.listdir(place)) if os.path.isdir(place) else []:
        if not name.endswith((".npy", ".npy.gz")):
            continue
        path = os.path.join(place, name)
        with gzip.open(path) if name.endswith(".gz") else open(path, "rb") as file:
            alive = np.load(file, allow_pickle=False) != 0
        layer = name.split(".")[0]
        for rows in HEIGHTS:
            whole = alive[: len(alive) // rows * rows]
            share = float(whole.reshape(-1, rows, whole.shape[1]).any(1).mean())
            record({"suite": "layers", "asked": layer, "kernel": "none", **common, "requested": "none",
                          "m": len(alive), "k": alive.shape[1], "strip_rows": rows, "density": share,
                          "outcome": "ok"})  # fmt: skip
        print(f"  {layer}: {alive.mean():.4f} of elements, {share:.4f} in strips of {HEIGHTS[-1]}", flush=True)
    if not any(line["suite"] == "layers" for line in lines):
        print(f"  left out: {place} has no .npy or .npy.gz", flush=True)


def about_library() -> Dict[str, Any]:
    import esmm

    about = esmm.info()
    return {"device": about.device, "dtype": "bf16", "device_name": about.device_name, "version": about.version,
            "source_id": about.source_id}  # fmt: skip


class Words(NamedTuple):
    suites: List[str]
    json: Optional[str]
    seconds: float
    largest: int
    activations: str
    self_check: bool


def parse(argv: List[str]) -> Words:
    p = argparse.ArgumentParser(description="Peers beside ours on a GPU; the docstring says more.")
    p.add_argument("--suites", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    p.add_argument("--json", help="where the lines go")
    p.add_argument("--seconds", type=float, default=115.0, help="after which nothing more is started")
    p.add_argument("--largest", type=int, default=65536, help="side of the largest product of sizes16")
    p.add_argument("--activations", default=os.path.join(os.path.dirname(HERE), "activations"))
    p.add_argument("--self-check", action="store_true", help="only the Triton kernels on small products; TRITON_INTERPRET=1 "
                   "does it without a GPU")  # fmt: skip
    words = p.parse_args(argv)
    suites = [word for word in words.suites.split(",") if word]
    for word in suites:
        if word not in SUITES:
            p.error(f"there is no suite {word}; there are {', '.join(SUITES)}")
    if not words.seconds > 0:
        p.error(f"--seconds {words.seconds}: it is a positive number")
    return Words(suites, words.json, words.seconds, words.largest, words.activations, words.self_check)


def main(argv: List[str]) -> int:
    words = parse(argv)
    sys.path.insert(0, HERE)
    if words.self_check:
        import triton_kernels as kernels

        problems = kernels.self_check("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda:0")
        print("\n".join(problems) or "the Triton kernels are right")
        return 1 if problems else 0
    Out.file = open(words.json, "w", encoding="utf-8") if words.json else None
    rig: Optional[Rig] = None
    if set(words.suites) - {"layers"}:
        rig = Rig(words.seconds)
    common = rig.common if rig else about_library()
    for suite in words.suites:
        print(f"{suite}: {time.monotonic() - began:.0f} s", flush=True)
        try:
            if suite == "layers":
                suite_layers(common, words.activations)
            elif suite == "sizes16":
                assert rig is not None
                suite_sizes16(rig, words.largest)
            else:
                globals()[f"suite_{suite}"](rig)
        except Exception as e:  # noqa: BLE001
            stop(f"{suite} stopped: {one_line(e)}")
            import traceback

            traceback.print_exc()
    if Out.file:
        Out.file.close()
    print(f"{len(lines)} lines in {time.monotonic() - began:.0f} s")
    if left_out():
        print(f"cut off: {left_out()}")
    return 1 if wrong_ours else 3 if left_out() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
