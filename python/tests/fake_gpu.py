"""Run by test_fake_gpu.py in a process whose libcuda.so.1 is the tests' own: device memory is the host's, kernels do
nothing, and calls that no correct program makes are counted. Shows where operands, results and work go."""

import ctypes
import gc
import sys
import threading

import esmm
import numpy as np
from esmm import _dlpack


class State(ctypes.Structure):
    """fake_cuda_state of tests/support/fake_cuda.h"""

    _fields_ = (
        [(n, ctypes.c_int) for n in ("version", "devices", "sm", "pools", "first_sm", "cublas")]
        + [("memory", ctypes.c_size_t), ("fail_at", ctypes.c_int64), ("fail_call", ctypes.c_char_p)]
        + [("result", ctypes.c_int), ("sticky", ctypes.c_int), ("failed", ctypes.c_char_p)]
        + [("captured", ctypes.c_void_p), ("blocking", ctypes.c_int), ("running", ctypes.c_int)]
        + [("kernel", ctypes.c_void_p)]
        + [(n, ctypes.c_int64) for n in ("blocks", "bytes", "events", "modules", "retained", "handles", "pinned")]
        + [(n, ctypes.c_int64) for n in ("calls", "allocations", "launches", "waits", "records", "sgemms", "gemms")]
        + [("synchronizations", ctypes.c_int64), ("mistakes", ctypes.c_int64), ("mistake", ctypes.c_char * 128)]
    )


fake = State.in_dll(ctypes.CDLL("libcuda.so.1"), "fake_cuda")
assert fake.sm == 90 and fake.mistakes == 0


class Interface:
    """A tensor of a library that has __cuda_array_interface__ alone."""

    def __init__(self, array, **more):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **more}


class Capsules:
    """A tensor of a library that has DLPack alone; remembers which streams it was asked for."""

    def __init__(self, array):
        self.array, self.streams = array, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.streams.append(options.get("stream"))
        return self.array.__dlpack__(**options)


def refused(call, kind, *words):
    try:
        call()
    except kind as e:
        assert isinstance(e, esmm.Error) and all(word in str(e) for word in words), str(e)
        return
    raise AssertionError("it was not refused")


assert esmm.device() == "cpu"
ctx = esmm.default_context("cuda:0")
assert ctx.device == "cuda:0" and ctx.device_index == 0 and "Fake" in ctx.device_name
with esmm.device("cuda"):
    assert esmm.device() == "cuda:0" and esmm.default_context() is ctx
    w = esmm.prepare(np.ones((64, 48), np.float32))
assert w.device == "cuda:0" and w.device_index == 0

# numpy operands are staged, and the result is numpy's.
c = esmm.matmul(np.ones((4, 64), np.float32), w)
assert isinstance(c, np.ndarray) and c.shape == (4, 48)
c, stats = esmm.matmul(np.ones((4, 64), np.float32), w, stats=True)
assert stats.staged_bytes == 4 * (4 * 64 + 4 * 48), stats

# Operands of the GPU's: the result is there too, nothing is staged, every way round.
a = esmm.Array((4, 64), "float32", ctx, 0)
for x in (a, Interface(a), Capsules(a)):
    before = fake.synchronizations
    c = esmm.matmul(x, w)
    assert fake.synchronizations == before, "it waited"
    assert isinstance(c, esmm.Array) and c.device == "cuda:0" and c.shape == (4, 48)
    assert c.__dlpack_device__() == (2, 0) and c.__cuda_array_interface__["data"] == (c.data, False)
assert esmm.matmul(a, w, stats=True)[1].staged_bytes == 0
assert esmm.matmul(Capsules(a), w, out_dtype="bfloat16").dtype == "bfloat16"
assert not hasattr(esmm.matmul(a, w, out_dtype="bfloat16"), "__cuda_array_interface__")
x = Capsules(a)
esmm.matmul(x, w)
assert x.streams == [1], x.streams  # DLPack's name of the default stream

# B on the GPU decides where weights go.
b = esmm.Array((64, 48), "float32", ctx, 0)
for y in (b, Interface(b), Capsules(b)):
    assert esmm.prepare(y).device == "cuda:0"

# What goes with C lies where C does.
bias, residual = esmm.Array((48,), "float32", ctx, 0), esmm.Array((4, 48), "float32", ctx, 0)
out = esmm.Array((4, 48), "float32", ctx, 0)
assert esmm.matmul(a, w, bias=bias, residual=residual, out=out, activation="relu") is out
c, counts, pattern = esmm.matmul(a, w, column_nonzeros=True, c_pattern=8)
assert counts.dtype == "int32" and counts.shape == (48,) and counts.numpy().dtype == np.int32 and pattern.strips == 1
assert counts.__cuda_array_interface__["typestr"] == "<i4"
refused(lambda: esmm.matmul(a, w, bias=np.zeros(48, np.float32)), RuntimeError, "bias", "host")
refused(lambda: esmm.matmul(np.ones((4, 64), np.float32), w, bias=bias), RuntimeError, "bias", "GPU 0")
refused(lambda: esmm.matmul(counts, w), TypeError, "int32")
refused(lambda: esmm.matmul(a, w, bias=esmm.Array((47,), "float32", ctx, 0)), ValueError, "47")
refused(lambda: esmm.matmul(a, esmm.prepare(np.ones((64, 48), np.float32), device="cpu")), esmm.Error)
refused(lambda: esmm.matmul(np.ones((4, 64), np.float32), w, context=esmm.Context("cpu")), esmm.Error)
refused(lambda: esmm.prepare(np.ones((64, 48), np.float32), device="cuda:5"), RuntimeError, "5")

# Copies to the host, of every shape and dtype.
data = np.arange(12, dtype=np.float32).reshape(3, 4)
g = esmm.Array((3, 4), "float32", ctx, 0)
ctypes.memmove(g.data, data.ctypes.data, data.nbytes)
assert (g.numpy() == data).all() and (np.asarray(g) == data).all()
assert (esmm.astype(g, "float16") == data).all()
assert esmm.to_dense(w).shape == (64, 48)

# Streams: theirs and ours.
ctx.stream = 0x1000
refused(lambda: esmm.matmul(Interface(a, stream=1), w), ValueError, "stream 1", "4096")
x = Capsules(a)
c = esmm.matmul(x, w)
assert x.streams == [0x1000] and c.stream == 0x1000 and c.__cuda_array_interface__["stream"] == 0x1000
before = fake.synchronizations
c.__dlpack__(stream=0x1000), c.__dlpack__(stream=-1)
assert fake.synchronizations == before
c.__dlpack__(stream=1)
c.synchronize()
ctx.stream = 0
assert (esmm.default_context("cpu").stream, ctx.stream) == (0, 0)
refused(lambda: setattr(esmm.default_context("cpu"), "stream", 5), ValueError, "stream")

# Memory that runs out is a MemoryError, and nothing is lost by it.
refused(lambda: esmm.Array((1 << 20, 1 << 12), "float32", ctx, 0), MemoryError)

# Arrays may die in another thread, also while the context is at work, and their memory comes back.
gc.collect()
blocks = fake.blocks
arrays = [esmm.Array((16, 16), "float32", ctx, 0) for _ in range(50)]
assert fake.blocks == blocks + 50
capsules = [x.__dlpack__() for x in arrays[:10]]
thread = threading.Thread(target=arrays.clear)
with ctx._lock:
    thread.start()
    thread.join()
assert fake.blocks == blocks + 50, "no thread may free while the lock is held"
ctx.synchronize()  # its holder frees them, at its next call at the latest
assert fake.blocks == blocks + 10, (fake.blocks, blocks)
del capsules
gc.collect()
assert fake.blocks == blocks and not _dlpack._given

# A context of its own goes with everything it had.
own = esmm.Context("cuda:0")
v = esmm.prepare(np.ones((64, 48), np.float32), context=own)
y = esmm.Array((4, 64), "float32", own, 0)
z = esmm.matmul(y, v, context=own)
own.close()
del own, v, y, z
gc.collect()
assert fake.blocks == blocks, (fake.blocks, blocks)
assert fake.mistakes == 0, fake.mistake
print("fake GPU: all as it should be")
sys.exit(0)
