"""Products on a GPU, with tensors of torch; skipped where there is none. What can be shown without one is in
test_fake_gpu.py."""

import gc
import pickle

import esmm
import numpy as np
import pytest

torch = pytest.importorskip("torch")
try:
    CTX = esmm.default_context("cuda:0")
except esmm.DeviceError as e:
    pytest.skip(f"no GPU here: {e}", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

DTYPES = ["float32", "float16", "bfloat16"]
GPU = torch.device("cuda:0")


def operands(dtype, m=96, k=512, n=256, density=0.2):
    torch.manual_seed(3)
    a = torch.randn(m, k, device=GPU) * (torch.rand(m, k, device=GPU) < density)
    return a.to(getattr(torch, dtype)), torch.randn(k, n, device=GPU).to(getattr(torch, dtype))


def close(c, want, dtype):
    eps = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    torch.testing.assert_close(c.double(), want, rtol=eps, atol=eps * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 96])
def test_product(dtype, m):
    a, b = operands(dtype, m)
    w = esmm.prepare(b)
    assert w.device == "cuda:0"
    for _ in range(3):  # the plan may change once it has seen A
        c = esmm.matmul(a, w)
        t = torch.from_dlpack(c)
        assert t.data_ptr() == c.data and t.dtype == a.dtype and t.device == GPU
        close(t, a.double() @ b.double(), dtype)
    out = torch.empty(m, 256, dtype=a.dtype, device=GPU)
    assert esmm.matmul(a, w, out=out) is out
    close(out, a.double() @ b.double(), dtype)
    np.testing.assert_array_equal(np.asarray(c.numpy(), np.float64), t.double().cpu().numpy())
    close(torch.from_dlpack(esmm.matmul(a, esmm.prepare(b.T.contiguous().T))), a.double() @ b.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(dtype):
    a, b = operands(dtype)
    bias, gate = torch.randn(256, device=GPU), torch.randn_like(b)
    residual = torch.randn(96, 256, device=GPU).to(a.dtype)
    w, g = esmm.prepare(b), esmm.prepare(gate)
    x = a.double() @ b.double()
    c = torch.from_dlpack(esmm.matmul(a, w, bias=bias, activation="relu2", residual=residual))
    close(c, (x + bias).relu() ** 2 + residual.double(), dtype)
    c = torch.from_dlpack(esmm.matmul(a, w, gate=g, activation="relu"))
    close(c, (a.double() @ gate.double()).relu() * x, dtype)
    c, stats, counts, pattern = esmm.matmul(a, w, activation="relu", stats=True, column_nonzeros=True, c_pattern=8)
    t = torch.from_dlpack(c)
    np.testing.assert_array_equal(counts.numpy(), (t != 0).sum(0).cpu().numpy())
    assert torch.equal(torch.from_dlpack(counts).long(), (t != 0).sum(0))
    assert stats.staged_bytes == 0 and stats.seconds_total > 0
    want = esmm.pattern(t.float().cpu().numpy(), 8, context=esmm.default_context("cpu"))
    np.testing.assert_array_equal(esmm.pattern_bits(pattern), esmm.pattern_bits(want))


def test_host_operands():
    a, b = (x.cpu().numpy() for x in operands("float32"))
    w = esmm.prepare(b, device="cuda:0")
    c, stats = esmm.matmul(a, w, stats=True, bias=np.ones(256, np.float32))
    assert isinstance(c, np.ndarray) and stats.staged_bytes > 0
    np.testing.assert_allclose(c, a.astype(np.float64) @ b + 1, rtol=1e-4, atol=1e-3)
    again = pickle.loads(pickle.dumps(w))
    assert again.device == "cuda:0"
    np.testing.assert_array_equal(esmm.to_dense(again), b)
    np.testing.assert_array_equal(esmm.to_dense(w), b)


def test_streams():
    a, b = operands("bfloat16", 512, 2048, 2048)
    w = esmm.prepare(b)
    want = a.double() @ b.double()
    stream = torch.cuda.Stream()
    CTX.stream = stream.cuda_stream
    try:
        for _ in range(20):
            x = a * 1  # made on the default stream: __dlpack__ puts the two in order
            c = esmm.matmul(x, w)
            t = torch.from_dlpack(c)  # wanted on the default stream
            close(t, want, "bfloat16")
    finally:
        CTX.synchronize()
        CTX.stream = 0


def test_cuda_array_interface():
    a, b = operands("float32")

    class Old:
        def __init__(self, t):
            self.__cuda_array_interface__ = t.__cuda_array_interface__
            self.keep = t

    c = esmm.matmul(Old(a), esmm.prepare(Old(b)))
    close(torch.as_tensor(c, device=GPU), a.double() @ b.double(), "float32")


def test_places_that_do_not_go_together():
    a, b = operands("float32")
    w = esmm.prepare(b)
    with pytest.raises(RuntimeError, match="bias is in host memory"):
        esmm.matmul(a, w, bias=np.ones(256, np.float32))
    with pytest.raises(RuntimeError, match="bias is on the host"):
        esmm.matmul(a, w, bias=torch.ones(256))
    with pytest.raises(esmm.Error):
        esmm.matmul(a, esmm.prepare(b.cpu().numpy(), device="cpu"))
    with pytest.raises(ValueError, match="strides"):
        esmm.matmul(a[:, ::2], esmm.prepare(b[:256]))


def test_memory_is_given_back():
    a, b = operands("bfloat16", 2048, 4096, 4096)

    def rounds(n):
        for _ in range(n):
            torch.from_dlpack(esmm.matmul(a, esmm.prepare(b)))
        gc.collect()
        CTX.synchronize()

    rounds(3)
    before = torch.cuda.mem_get_info()[0]
    rounds(20)
    assert before - torch.cuda.mem_get_info()[0] < 100 << 20
