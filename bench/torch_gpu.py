#!/usr/bin/env python3
"""esmm.torch on a GPU: a check of every operator against torch, what a call costs the host, and decoding under graphs.

    PYTHONPATH=python python3 bench/torch_gpu.py

Parts fail by themselves: the last lines say how many did. Takes a minute or two.
"""

import copy
import ctypes
import statistics
import sys
import time
import traceback

import torch
import torch.nn.functional as F
from torch import nn

failed = []


def part(name):
    """Runs a function at once, and goes on where it raises."""

    def run(function):
        start = time.perf_counter()
        try:
            note = function()
            torch.cuda.synchronize()
            print(f"ok    {name}{': ' + note if note else ''} ({time.perf_counter() - start:.1f} s)", flush=True)
        except Exception as e:  # noqa: BLE001
            failed.append(name)
            where = traceback.extract_tb(e.__traceback__)[-1]
            print(f"FAIL  {name}: {type(e).__name__}: {str(e)[:400]} ({where.filename}:{where.lineno})", flush=True)

    return run


if not torch.cuda.is_available():
    raise SystemExit("torch sees no CUDA device")
import esmm.torch  # noqa: E402
from esmm import _lib  # noqa: E402
from esmm.torch import SparseFFN, SparseLinear, to_sparse  # noqa: E402

DEV = torch.device("cuda:0")
BF16 = torch.bfloat16
ROUNDING = {torch.float32: 1e-5, BF16: 2e-2, torch.float16: 4e-3}
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
print(f"torch {torch.__version__}, {torch.cuda.get_device_name(DEV)}")


def sparse(*shape, density=0.1, dtype=BF16):
    return (torch.randn(*shape, device=DEV) * (torch.rand(*shape, device=DEV) < density)).to(dtype)


def weight(n, k, dtype=BF16):
    return nn.Parameter((torch.randn(n, k, device=DEV) * k**-0.5).to(dtype), requires_grad=False)


def near(got, want, tolerance, what=""):
    error = ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1)).item()
    if not error <= tolerance:
        raise AssertionError(f"{what} differs by {error:.1e}, and {tolerance:.0e} is allowed")
    return error


# ---- every operator ----

for dtype, tolerance in ROUNDING.items():

    @part(f"linear and its epilogue in {dtype}")
    def _():
        worst = 0.0
        for m, k, n in ((1, 512, 256), (7, 100, 33), (64, 1024, 512), (300, 512, 1024)):
            x, w, g, b, gb = (
                sparse(m, k, dtype=dtype),
                weight(n, k, dtype),
                weight(n, k, dtype),
                weight(1, n, dtype)[0],
                weight(1, n, dtype)[0],
            )
            r = torch.randn(m, n, device=DEV).to(dtype)
            up, gate = F.linear(x.double(), w.double(), b.double()), F.linear(x.double(), g.double(), gb.double())
            worst = max(
                worst, near(esmm.torch.linear(x, w), F.linear(x.double(), w.double()), tolerance, f"{m} x {k} x {n}")
            )
            y, counts = esmm.torch.linear(x, w, b, activation="relu2", residual=r, stats=True)
            near(y, F.relu(up).square() + r.double(), tolerance, "relu2")
            if not torch.equal(counts.long(), (y != 0).sum(0)):
                raise AssertionError("the nonzeros of columns are wrong")
            near(
                esmm.torch.linear(x, w, b, activation="silu", gate=g, gate_bias=gb),
                F.silu(gate) * up,
                tolerance,
                "gated",
            )
            near(torch.ops.esmm._linear_turned(r, w), r.double() @ w.double(), tolerance, "turned")
        return f"worst {worst:.1e}"


@part("sparse formats")
def _():
    for format in ("2:4", "bsr:64"):
        layer = nn.Linear(512, 384, device=DEV, dtype=BF16)
        made = SparseLinear.from_linear(layer, format=format, prune=True, density=0.5)
        s = to_sparse(made.weight, format)
        for m in (1, 16, 200):
            x = torch.randn(m, 512, device=DEV).to(BF16)
            want = F.linear(x.double(), made.weight.double(), made.bias.double())
            near(made(x), want, 2e-2, format)
            near(F.linear(x, s, made.bias.detach()), want, 2e-2, f"to_sparse {format}")
        if not torch.equal(s.to_dense(), made.weight):
            raise AssertionError(f"{format} does not give its matrix back")


@part("gradients of SparseLinear")
def _():
    for dtype in (torch.float32, BF16):
        layer = SparseLinear(256, 512, activation="relu2", device=DEV, dtype=dtype)
        x = torch.randn(40, 256, device=DEV).to(dtype).requires_grad_()
        got = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
        want = torch.autograd.grad(
            F.relu(F.linear(x, layer.weight, layer.bias)).square().sum(), [x, *layer.parameters()]
        )
        for a, b in zip(got, want):
            near(a, b, 5e-2 if dtype == BF16 else 1e-4, str(dtype))


@part("SparseFFN: forward, backward, inference, autocast")
def _():
    for dtype in (torch.float32, BF16):
        for gated in (False, True):
            for mode in ("exact", "dense", "sparse", "split"):
                ffn = SparseFFN(256, 512, activation="relu", gated=gated, mode=mode, device=DEV, dtype=dtype)
                x = torch.randn(64, 256, device=DEV).to(dtype).requires_grad_()
                y = ffn(x)
                grads = torch.autograd.grad(y.sum(), [x, *ffn.parameters()])
                h = F.relu(ffn.gate(x)) * ffn.up(x) if gated else F.relu(ffn.up(x))
                want = ffn.down(h)
                if mode in ("exact", "dense"):
                    tolerance = 5e-2 if dtype == BF16 else 1e-4
                    near(y, want, tolerance, "y")
                    for a, b in zip(grads, torch.autograd.grad(want.sum(), [x, *ffn.parameters()])):
                        near(a, b, tolerance, "a gradient")
                    with torch.no_grad():
                        near(ffn(x), want, tolerance, "inference")
                elif not all(torch.isfinite(g).all() for g in (y, *grads)):
                    raise AssertionError(f"{mode}: not finite")
    ffn, x = SparseFFN(256, 512, device=DEV), torch.randn(64, 256, device=DEV)
    with torch.autocast("cuda", dtype=BF16):
        y = ffn(x)
    near(y, ffn(x), 3e-2, "autocast")


@part("another stream, and threads")
def _():
    w, x = weight(1024, 2048), sparse(32, 2048)
    want = F.linear(x.double(), w.double())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        y = (x * 1).contiguous()
        y = esmm.torch.linear(y, w)
    torch.cuda.current_stream().wait_stream(side)
    near(y, want, 2e-2)
    import threading

    wrong = []

    def work():
        try:
            for _ in range(50):
                near(esmm.torch.linear(x, w), want, 2e-2)
        except Exception as e:  # noqa: BLE001
            wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if wrong:
        raise wrong[0]


@part("torch.compile, full graph")
def _():
    model = nn.Sequential(nn.LayerNorm(256), SparseFFN(256, 512), SparseLinear(256, 128)).to(DEV)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(16, 256, device=DEV, requires_grad=True)
    near(compiled(x), model(x), 1e-4)
    for a, b in zip(
        torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()]),
        torch.autograd.grad(model(x).sum(), [x, *model.parameters()]),
    ):
        near(a, b, 1e-3, "a gradient")


@part("torch.compile, reduce-overhead")
def _():
    model = nn.Sequential(nn.LayerNorm(256), SparseFFN(256, 512)).to(DEV, BF16).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(6):
        x = torch.randn(4, 256, device=DEV, dtype=BF16)
        with torch.no_grad():
            near(compiled(x).clone(), model(x), 3e-2)


def captured(functions):
    """A CUDA graph of all of them, once each, after they have run outside it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(24):
            for f in functions:
                f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    last = None
    for mode in ("global", "thread_local", "relaxed"):
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode=mode):
                results = [f() for f in functions]
            return graph, results, mode
        except Exception as e:  # noqa: BLE001
            last = e
            torch.cuda.synchronize()
    raise last


@part("CUDA graphs")
def _():
    layer = SparseLinear(2048, 1024, device=DEV, dtype=BF16).requires_grad_(False)
    x = sparse(4, 2048)
    graph, (y,), mode = captured([lambda: layer(x)])
    for density in (0.1, 0.9):
        x.copy_(sparse(4, 2048, density=density))
        graph.replay()
        near(y, F.linear(x.double(), layer.weight.double(), layer.bias.double()), 2e-2)
    layer.weight.requires_grad_()
    try:
        side = torch.cuda.CUDAGraph()
        with torch.cuda.graph(side):
            layer(x)
    except RuntimeError as e:
        if "captured graph" not in str(e):
            raise
    else:
        raise AssertionError("a weight that is trained was captured")
    return f"capture mode {mode}"


# ---- what a call costs the host ----


def host_us(f, calls=100, rounds=30):
    for _ in range(50):
        f()
    torch.cuda.synchronize()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            f()
        taken.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


@part("host time of a call")
def _():
    print(
        f"      {'us, m x k x n, bf16':22}"
        + "".join(f" {name:>8}" for name in ("C call", "_plain", "linear", "module", "F.linear", "over C"))
    )
    for m, k, n in ((1, 64, 64), (1, 4096, 4096)):
        layer = SparseLinear(k, n, bias=False, device=DEV, dtype=BF16).requires_grad_(False)
        x, w = sparse(m, k), layer.weight
        ctx = esmm.Context("cuda:0")
        prepared = ctx.prepare((w.data_ptr(), k, n, k, 1, 1, 1, 0))
        y = torch.empty(m, n, device=DEV, dtype=BF16)
        a = ctypes.byref(_lib.Matrix(x.data_ptr(), m, k, k, 1, 0, 1, 0))
        c = ctypes.byref(_lib.Matrix(y.data_ptr(), m, n, n, 1, 0, 1, 0))
        call, handle, wh = _lib.lib.esmm_matmul, ctx.handle, prepared.handle
        op, _op = torch.ops.esmm.linear.default, torch.ops.esmm._linear_plain.default
        with torch.no_grad():
            t = [
                host_us(lambda: call(handle, a, wh, c, None, None)),
                host_us(lambda: _op(x, w)),
                host_us(lambda: op(x, w, None, None, None, None, 0, 0)),
                host_us(lambda: layer(x)),
                host_us(lambda: F.linear(x, w)),
            ]
        print(
            f"      {f'{m} x {k} x {n}':22} "
            + " ".join(f"{v:8.2f}" for v in t)
            + f" {t[1] - t[0]:8.2f}   bar: under 6",
            flush=True,
        )


# ---- decoding ----


def graph_us(functions, rounds=40):
    graph, _, _ = captured(functions)
    for _ in range(5):
        graph.replay()
    taken = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / len(functions))
    return statistics.median(taken)


@part("decoding, m = 1, bf16, under CUDA graphs")
def _():
    layers = 12  # each with weights of its own: what one leaves in the second-level cache does not help the next
    print(
        f"      {'us, k -> n, zeros':26} {'nn.Linear':>10} {'SparseLinear':>13} {'times':>7}   mean of {layers} layers"
    )
    for k, n, density in ((14336, 4096, 0.1), (4096, 14336, 0.1), (14336, 4096, 0.5), (14336, 4096, 1.0)):
        plain = [nn.Linear(k, n, bias=False, device=DEV, dtype=BF16).requires_grad_(False) for _ in range(layers)]
        ours = [SparseLinear.from_linear(p) for p in plain]
        xs = [sparse(1, k, density=density) for _ in range(layers)]
        for p, o, x in zip(plain, ours, xs):
            near(o(x), F.linear(x.double(), p.weight.double()), 2e-2)
        t = graph_us([lambda p=p, x=x: p(x) for p, x in zip(plain, xs)])
        s = graph_us([lambda o=o, x=x: o(x) for o, x in zip(ours, xs)])
        bar = "   bar: 2.5" if density == 0.1 else ""
        print(f"      {f'{k} -> {n}, {1 - density:.0%}':26} {t:10.2f} {s:13.2f} {t / s:7.2f}{bar}", flush=True)
        del plain, ours, xs
        esmm.torch.clear_cache()
        torch.cuda.empty_cache()


@part("decoding through an FFN, 4096 -> 14336 -> 4096, ReLU2, m = 1, bf16")
def _():
    layers = 6
    with torch.no_grad():
        plain = []
        for _ in range(layers):
            up, down = nn.Linear(4096, 14336, device=DEV, dtype=BF16), nn.Linear(14336, 4096, device=DEV, dtype=BF16)
            up.weight.normal_(0, 4096**-0.5)
            up.bias.fill_(-1.28)
            plain.append((up, down))
    ours = [SparseFFN.from_linears(u, d, activation="relu2").requires_grad_(False) for u, d in plain]
    x = torch.randn(1, 4096, device=DEV, dtype=BF16)
    t = graph_us([lambda u=u, d=d: d(F.relu(u(x)).square()) for u, d in plain])
    s = graph_us([lambda o=o: o(x) for o in ours])
    return f"torch {t:.1f} us, SparseFFN {s:.1f} us, {t / s:.2f} times"


@part("deepcopy and moving between devices")
def _():
    layer = SparseLinear(256, 128).requires_grad_(False)
    x = torch.randn(8, 256)
    want = layer(x)
    moved = copy.deepcopy(layer).to(DEV)
    near(moved(x.to(DEV)).cpu(), want, 1e-5)
    near(moved.cpu()(x), want, 1e-6)


print(f"{len(failed)} parts failed" + (": " + "; ".join(failed) if failed else ""))
sys.exit(1 if failed else 0)
