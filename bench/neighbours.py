#!/usr/bin/env python3
"""neighbours.py: products on a CPU that others use, too: torch in the same process, or busy loops beside it.

usage: neighbours.py [LIBRARY] [--threads N] [--calls N] [--busy N] [--rounds N]

Multiplies 512 x 512 x 512 with A at 50 % of blocks, and 1 x 4096 x 4096 dense, through build/libesmm.so or the LIBRARY
named. Prints the median time of a call alone, in turn with torch's own product of the same shape (where torch is
installed: two pools of threads in one process), and beside as many busy loops as CPUs; and what torch takes with us.
Times alone and not alone are taken in turn, a few rounds of each, because machines change from minute to minute.
"""
import argparse
import array
import ctypes
import multiprocessing
import os
import random
import statistics
import sys
import time

try:
    import torch
except ImportError:
    torch = None

HERE = os.path.dirname(os.path.abspath(__file__))


class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("ld", ctypes.c_int64),
                ("dtype", ctypes.c_int), ("order", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int),
                ("scales", ctypes.c_void_p), ("scaling", ctypes.c_int), ("reserved", ctypes.c_int)]


class CtxOpts(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device", ctypes.c_char_p), ("threads", ctypes.c_int),
                ("force", ctypes.c_char_p), ("allocator", ctypes.c_void_p), ("no_tuning_cache", ctypes.c_int),
                ("error", ctypes.c_char_p), ("error_size", ctypes.c_size_t), ("remember", ctypes.c_int)]


def check(status, what):
    if status != 0:
        sys.exit(f"neighbours.py: {what} gave status {status}")


class Product:
    """C = A x B in fp32 with random values; density: share of A's blocks of 32 x 32 that are not zero."""

    def __init__(self, library, ctx, m, k, n, density):
        self.library, self.ctx, self.shape = library, ctx, (m, k, n)
        rng = random.Random(7)
        self.values = [array.array("f", [0.0] * count) for count in (m * k, k * n, m * n)]
        a, b, _ = self.values
        alive = {(i, j): rng.random() < density for i in range(0, m, 32) for j in range(0, k, 32)}
        for i in range(m):
            for j in range(0, k, 32):
                if alive[i - i % 32, j]:
                    a[i * k + j:i * k + j + min(32, k - j)] = array.array("f", [rng.uniform(-1, 1)] * min(32, k - j))
        for i in range(0, k * n, 1024):
            b[i:i + 1024] = array.array("f", [rng.uniform(-1, 1)] * min(1024, k * n - i))
        self.a, plain, self.c = (Matrix(data=v.buffer_info()[0], rows=r, cols=c)
                                 for v, r, c in zip(self.values, (m, k, m), (k, n, n)))
        self.weights = ctypes.c_void_p()
        check(library.esmm_prepare(ctx, ctypes.byref(plain), None, ctypes.byref(self.weights)), "esmm_prepare")
        if torch:
            self.torch_a, self.torch_b = (torch.frombuffer(v, dtype=torch.float32).reshape(s)
                                          for v, s in zip(self.values, ((m, k), (k, n))))
            self.torch_c = torch.empty(m, n)

    def ours(self):
        check(self.library.esmm_matmul(self.ctx, ctypes.byref(self.a), self.weights, ctypes.byref(self.c), None, None),
              "esmm_matmul")

    def torchs(self):
        torch.mm(self.torch_a, self.torch_b, out=self.torch_c)


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alone(call, calls):
    for _ in range(10):
        call()
    return [timed(call) for _ in range(calls)]


def in_turn(first, second, calls):
    pairs = [(timed(first), timed(second)) for _ in range(calls)]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def spin(stop):
    while not stop.is_set():
        for _ in range(100000):
            pass


def with_busy_loops(count, call, calls):
    """So many processes that do nothing but count, while `call` is timed."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    loops = [context.Process(target=spin, args=(stop,)) for _ in range(count)]
    for loop in loops:
        loop.start()
    time.sleep(0.5)
    times = alone(call, calls)
    stop.set()
    for loop in loops:
        loop.join()
    return times


def ratio(seconds, first, second):
    return f"{seconds[first] / seconds[second]:.2f}" if seconds[first] and seconds[second] else "-"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("library", nargs="?", default=os.path.join(HERE, "..", "build", "libesmm.so"))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--calls", type=int, default=200)
    p.add_argument("--busy", type=int, default=os.cpu_count(), help="busy loops; 0: none")
    p.add_argument("--rounds", type=int, default=3)
    o = p.parse_args()
    if o.threads < 1 or o.calls < 1 or o.busy < 0 or o.rounds < 1:
        p.error("--threads, --calls and --rounds must be positive, --busy not negative")
    try:
        library = ctypes.CDLL(os.path.abspath(o.library))
    except OSError as e:
        sys.exit(f"neighbours.py: {e}; build it with make, or name another")
    ctx = ctypes.c_void_p()
    opts = CtxOpts(size=ctypes.sizeof(CtxOpts), device=b"cpu", threads=o.threads)
    check(library.esmm_ctx_create(ctypes.byref(ctx), ctypes.byref(opts)), "esmm_ctx_create")
    if torch:
        torch.set_num_threads(o.threads)
    print(f"{'product':16} {'alone ms':>9} {'with torch':>11} {'busy':>6}   {'torch alone ms':>14} {'with us':>8}")
    for m, k, n, density in ((512, 512, 512, 0.5), (1, 4096, 4096, 1)):
        x = Product(library, ctx, m, k, n, density)
        times = {"ours": [], "torch": [], "ours_turn": [], "torch_turn": [], "busy": []}
        for _ in range(o.rounds):
            times["ours"] += alone(x.ours, o.calls)
            if torch:
                times["torch"] += alone(x.torchs, o.calls)
                ours, torchs = in_turn(x.ours, x.torchs, o.calls)
                times["ours_turn"] += ours
                times["torch_turn"] += torchs
            if o.busy:
                times["busy"] += with_busy_loops(o.busy, x.ours, o.calls)
        t = {name: statistics.median(seconds) if seconds else None for name, seconds in times.items()}
        alone_torch = f"{1e3 * t['torch']:.3f}" if t["torch"] else "-"
        print(f"{f'{m} x {k} x {n}':16} {1e3 * t['ours']:9.3f} {ratio(t, 'ours_turn', 'ours'):>11} "
              f"{ratio(t, 'busy', 'ours'):>6}   {alone_torch:>14} "
              f"{ratio(t, 'torch_turn', 'torch'):>8}")
        library.esmm_weights_free(x.weights)
    library.esmm_ctx_free(ctx)


if __name__ == "__main__":
    main()
