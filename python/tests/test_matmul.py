"""Products of numpy arrays: what they give, for every way an array can lie in memory, and what they refuse."""

import gc
import sys
import threading

import esmm
import numpy as np
import pytest


def close(c, want, k, dtype="float32"):
    eps = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    scale = np.abs(want).max() + 1
    np.testing.assert_allclose(np.asarray(c, np.float64), want, rtol=4 * eps, atol=4 * eps * scale + k * 1e-7 * scale)


def sparse(rng, m, k, density=0.3):
    return (rng.standard_normal((m, k)) * (rng.random((m, k)) < density)).astype(np.float32)


def integers(rng, *shape):
    return rng.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize(
    "m,k,n", [(1, 64, 64), (5, 33, 17), (64, 256, 128), (0, 8, 4), (3, 0, 5), (3, 4, 0), (1, 1, 1)]
)
def test_product(rng, m, k, n):
    a, b = integers(rng, m, k), integers(rng, k, n)
    c = esmm.matmul(a, esmm.prepare(b))
    assert c.dtype == np.float32 and c.shape == (m, n)
    np.testing.assert_array_equal(c, a @ b)


def lay_out(x, how):
    if how == "rows":
        return np.ascontiguousarray(x)
    if how == "columns":
        return np.asfortranarray(x)
    if how == "rows with a gap":
        wide = np.full((x.shape[0], x.shape[1] + 3), np.nan, x.dtype)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]
    if how == "columns with a gap":
        return lay_out(np.ascontiguousarray(x.T), "rows with a gap").T
    if how == "every second":
        wide = np.full((x.shape[0], 2 * x.shape[1]), np.nan, x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    if how == "backwards":
        return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    if how == "unaligned":
        raw = np.zeros(x.nbytes + 1, np.uint8)
        y = raw[1:].view(x.dtype).reshape(x.shape)
        y[...] = x
        return y
    if how == "one row again and again":
        wide = np.full(x.shape, np.nan, x.dtype)
        wide[0] = x[0]
        return np.broadcast_to(wide[:1], x.shape)
    if how == "read-only":
        y = x.copy()
        y.flags.writeable = False
        return y
    raise AssertionError(how)


LAYOUTS = ["rows", "columns", "rows with a gap", "columns with a gap", "every second", "backwards", "unaligned"]


@pytest.mark.parametrize("how", LAYOUTS + ["read-only", "one row again and again"])
def test_layouts_of_a_and_b(rng, how):
    a, b = integers(rng, 9, 40), integers(rng, 40, 21)
    if how == "one row again and again":
        a[:], b[:] = a[0], b[0]
    np.testing.assert_array_equal(esmm.matmul(lay_out(a, how), esmm.prepare(lay_out(b, how))), a @ b)


@pytest.mark.parametrize("how", LAYOUTS[:4])
def test_layouts_of_out(rng, how):
    a, b = integers(rng, 9, 40), integers(rng, 40, 21)
    out = lay_out(np.ones((9, 21), np.float32), how)
    assert esmm.matmul(a, esmm.prepare(b), out=out) is out
    np.testing.assert_array_equal(out, a @ b)
    esmm.matmul(a, esmm.prepare(b), out=out, alpha=2, beta=-1)
    np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("how", LAYOUTS[4:] + ["read-only"])
def test_layouts_of_out_that_would_need_a_copy(rng, how):
    a, b = integers(rng, 9, 40), integers(rng, 40, 21)
    out = lay_out(np.full((9, 21), 5, np.float32), how)
    with pytest.raises(ValueError, match="strides|read-only"):
        esmm.matmul(a, esmm.prepare(b), out=out)
    assert (out == 5).all()


def test_nothing_is_copied_that_need_not_be(rng):
    from esmm._arrays import operand

    ctx = esmm.default_context()
    x = integers(rng, 9, 40)
    for how in LAYOUTS[:4]:
        y = lay_out(x, how)
        assert operand(y, "y", ctx).raw[0] == y.ctypes.data, how
    for how in LAYOUTS[4:]:
        y = lay_out(x, how)
        assert operand(y, "y", ctx).raw[0] != y.ctypes.data, how


def test_vectors_and_batches(rng):
    b = integers(rng, 12, 7)
    w = esmm.prepare(b)
    for shape in ((12,), (2, 3, 12), (2, 0, 12), (1, 1, 1, 12)):
        a = integers(rng, *shape)
        c = esmm.matmul(a, w)
        assert c.shape == shape[:-1] + (7,)
        np.testing.assert_array_equal(c, a @ b)
    a = integers(rng, 3, 2, 12).transpose(1, 0, 2)
    np.testing.assert_array_equal(esmm.matmul(a, w), a @ b)
    out = np.zeros((2, 3, 7), np.float32)
    esmm.matmul(a, w, out=out)
    np.testing.assert_array_equal(out, a @ b)
    with pytest.raises(esmm.ShapeError, match="rows do not follow"):
        esmm.matmul(a, w, out=np.zeros((3, 2, 7), np.float32).transpose(1, 0, 2))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("out_dtype", [None, "float32", "float16", np.float16, np.dtype("float32")])
def test_dtypes(rng, dtype, out_dtype):
    a, b = sparse(rng, 17, 64).astype(dtype), rng.standard_normal((64, 40)).astype(dtype)
    c = esmm.matmul(a, esmm.prepare(b), out_dtype=out_dtype)
    assert c.dtype == np.dtype(dtype if out_dtype is None else out_dtype)
    close(c, a.astype(np.float64) @ b.astype(np.float64), 64, c.dtype.name)


def bits(x):
    """float32 whose lower half is zero, as bf16's bits"""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def test_bf16_as_uint16(rng):
    a, b = integers(rng, 9, 32), integers(rng, 32, 16)
    w = esmm.prepare(bits(b), dtype="bf16")
    assert w.dtype == "bfloat16"
    c = esmm.matmul(bits(a), w, dtype="bf16")
    assert c.dtype == np.uint16
    close(floats(c), a @ b, 32, "bfloat16")
    np.testing.assert_array_equal(esmm.matmul(bits(a), w, dtype="bf16", out_dtype="float32"), a @ b)
    np.testing.assert_array_equal(esmm.matmul(a, w), a @ b)
    with pytest.raises(TypeError, match="uint16.*dtype='bf16'"):
        esmm.matmul(bits(a), w)
    with pytest.raises(TypeError, match="dtype is 'float32'"):
        esmm.matmul(a, w, dtype="float32")


def test_bf16_of_ml_dtypes(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a, b = integers(rng, 9, 32), integers(rng, 32, 16)
    w = esmm.prepare(b.astype(ml_dtypes.bfloat16))
    c = esmm.matmul(a.astype(ml_dtypes.bfloat16), w)
    assert c.dtype == ml_dtypes.bfloat16
    close(c, a @ b, 32, "bfloat16")
    assert esmm.to_dense(w).dtype == ml_dtypes.bfloat16
    assert esmm.astype(a, "bf16").dtype == ml_dtypes.bfloat16


def test_epilogue(rng):
    a, b, g = sparse(rng, 13, 48), rng.standard_normal((48, 24)).astype(np.float32), sparse(rng, 48, 24)
    bias, gate_bias = rng.standard_normal((2, 24)).astype(np.float32)
    residual = np.asfortranarray(rng.standard_normal((13, 24)).astype(np.float32))
    w, gate = esmm.prepare(b), esmm.prepare(g)
    x = a.astype(np.float64) @ b
    close(esmm.matmul(a, w, alpha=0.5, bias=bias), 0.5 * x + bias, 48)
    close(esmm.matmul(a, w, activation="relu"), np.maximum(x, 0), 48)
    close(
        esmm.matmul(a, w, bias=bias, activation="relu2", residual=residual), np.maximum(x + bias, 0) ** 2 + residual, 48
    )
    close(esmm.matmul(a, w, activation="silu"), x / (1 + np.exp(-x)), 48)
    gated = np.maximum(a.astype(np.float64) @ g + gate_bias, 0) * (x + bias)
    close(esmm.matmul(a, w, gate=gate, gate_bias=gate_bias, bias=bias, activation="relu"), gated, 48)
    close(esmm.matmul(a, w, bias=list(map(float, bias))), x + bias, 48)
    c = residual.copy(order="K")
    close(esmm.matmul(a, w, out=c, residual=c), x + residual, 48)


def test_statistics(rng):
    a, b = sparse(rng, 64, 256, 0.1), rng.standard_normal((256, 64)).astype(np.float32)
    w = esmm.prepare(b)
    c, stats = esmm.matmul(a, w, stats=True)
    assert stats.kernel in [k.name for k in esmm.kernels()] and stats.reason
    assert stats.flop_dense == 2 * 64 * 256 * 64 and 0 <= stats.skipped_share <= 1
    assert 0.05 < stats.density_a < 0.2 and stats.seconds_total > 0
    c, counts = esmm.matmul(a, w, activation="relu", column_nonzeros=True)
    np.testing.assert_array_equal(counts, (c != 0).sum(0))
    c, stats, counts, p = esmm.matmul(a, w, activation="relu", stats=True, column_nonzeros=True, c_pattern=16)
    assert (p.rows, p.k, p.strip_rows, p.strips) == (64, 64, 16, 4)
    np.testing.assert_array_equal(esmm.pattern_bits(p), esmm.pattern_bits(esmm.pattern(c, 16)))
    np.testing.assert_array_equal(counts, (c != 0).sum(0))
    w2 = esmm.prepare(rng.standard_normal((64, 32)).astype(np.float32))
    np.testing.assert_array_equal(esmm.matmul(c, w2, a_pattern=p, force="joint"), esmm.matmul(c, w2, force="joint"))


def test_force_and_strict(rng):
    a, b = sparse(rng, 40, 64), rng.standard_normal((64, 32)).astype(np.float32)
    w = esmm.prepare(b)
    for idea in ("joint", "dense"):
        c, stats = esmm.matmul(a, w, force=idea, stats=True)
        assert stats.kernel.startswith(idea)
    a[0, 0] = 0
    b[0, 0] = np.inf
    w = esmm.prepare(b, strict=True)
    assert w.info.strict and np.isnan(esmm.matmul(a, w, strict=True)[0, 0])
    with pytest.raises(esmm.UnknownKernelError, match="nonesuch") as e:
        esmm.matmul(a, w, force="nonesuch")
    assert e.value.status == esmm.Status.UNKNOWN_KERNEL and isinstance(e.value, ValueError)


def test_explain(rng):
    a, w = sparse(rng, 64, 128), esmm.prepare(rng.standard_normal((128, 64)).astype(np.float32))
    verdicts = esmm.explain(a, w, activation="relu")
    chosen = [v for v in verdicts if v.chosen]
    assert len(chosen) == 1 and chosen[0].competes and chosen[0].seconds > 0
    assert esmm.matmul(a, w, activation="relu", stats=True)[1].kernel == chosen[0].kernel
    assert [v.seconds for v in verdicts if v.competes] == sorted(v.seconds for v in verdicts if v.competes)


ONE = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    "error,match,call",
    [
        (TypeError, "a is of float64", lambda w: esmm.matmul(np.ones((4, 4)), w)),
        (TypeError, "a is of int32", lambda w: esmm.matmul(np.ones((4, 4), np.int32), w)),
        (TypeError, "a is of >f4", lambda w: esmm.matmul(np.ones((4, 4), ">f4"), w)),
        (TypeError, "a is a list", lambda w: esmm.matmul([[1.0]], w)),
        (TypeError, "a is of object", lambda w: esmm.matmul(np.array([[None]]), w)),
        (TypeError, "b is of complex64", lambda w: esmm.prepare(np.ones((4, 4), np.complex64))),
        (TypeError, "b is prepared already", lambda w: esmm.prepare(w)),
        (TypeError, "weights is a ndarray", lambda w: esmm.matmul(ONE, ONE)),
        (TypeError, "gate is a ndarray", lambda w: esmm.matmul(ONE, w, gate=ONE)),
        (TypeError, "a_pattern is a ndarray", lambda w: esmm.matmul(ONE, w, a_pattern=ONE)),
        (TypeError, "out_dtype is 'float64'", lambda w: esmm.matmul(ONE, w, out_dtype="float64")),
        (TypeError, "bias is of float64", lambda w: esmm.matmul(ONE, w, bias=np.ones(4))),
        (ValueError, "3", lambda w: esmm.matmul(np.ones((4, 3), np.float32), w)),
        (ValueError, r"out is of shape \(4, 3\)", lambda w: esmm.matmul(ONE, w, out=np.ones((4, 3), np.float32))),
        (ValueError, "a has no dimensions", lambda w: esmm.matmul(np.array(1, np.float32), w)),
        (ValueError, r"b is of shape \(4,\)", lambda w: esmm.prepare(ONE[0])),
        (ValueError, r"bias is of shape \(3,\)", lambda w: esmm.matmul(ONE, w, bias=np.ones(3, np.float32))),
        (ValueError, r"residual is of shape \(3, 4\)", lambda w: esmm.matmul(ONE, w, residual=ONE[:3])),
        (ValueError, "beta is 0.5", lambda w: esmm.matmul(ONE, w, beta=0.5)),
        (ValueError, "alpha is 'x'", lambda w: esmm.matmul(ONE, w, alpha="x")),
        (ValueError, "activation is 'tanh'.*'relu'", lambda w: esmm.matmul(ONE, w, activation="tanh")),
        (ValueError, "force is 3", lambda w: esmm.matmul(ONE, w, force=3)),
        (ValueError, "c_pattern is -1", lambda w: esmm.matmul(ONE, w, c_pattern=-1)),
        (ValueError, "c_pattern is 1.5", lambda w: esmm.matmul(ONE, w, c_pattern=1.5)),
        (ValueError, "out and out_dtype", lambda w: esmm.matmul(ONE, w, out=ONE.copy(), out_dtype="float32")),
        (ValueError, "use is 'often'.*'decode'", lambda w: esmm.prepare(ONE, use="often")),
        (ValueError, "format is '4:2:x'", lambda w: esmm.prepare(ONE, format="4:2:x")),
        (ValueError, "format is 'csr'", lambda w: esmm.prepare(ONE, format="csr")),
        (ValueError, "format is 'bsr:-1'", lambda w: esmm.prepare(ONE, format="bsr:-1")),
        (ValueError, "^format's block_rows is 300", lambda w: esmm.prepare(ONE, format="bsr:300")),
        (ValueError, "^b does not fit 2:4.*esmm.prune makes it fit", lambda w: esmm.prepare(ONE, format="2:4")),
        (ValueError, "^density is 2, must be 0 to 1", lambda w: esmm.prune(ONE, "bsr:2", density=2)),
        (ValueError, "^max_bytes_ratio is -1", lambda w: esmm.prepare(ONE, max_bytes_ratio=-1)),
        (NotImplementedError, "^strict keeps the zeros", lambda w: esmm.prepare(ONE, format="bsr:2", strict=True)),
        (ValueError, "^strip_density is 2", lambda w: esmm.expect(w, 1, 2.0)),
        (ValueError, "^density is 2", lambda w: esmm.expect(w, 1, 1.0, density=2.0)),
        (TypeError, "^rows is a ndarray", lambda w: esmm.reorder(ONE, 2)),
        (TypeError, "^pattern is a ndarray", lambda w: esmm.pattern_bits(ONE)),
        (TypeError, "^weights is a ndarray", lambda w: esmm.to_dense(ONE)),
        (ValueError, "^density is 3", lambda w: esmm.generate("random", 4, 4, density=3)),
        (ValueError, "max_bytes_ratio is 'x'", lambda w: esmm.prepare(ONE, max_bytes_ratio="x")),
        (ValueError, "threads is -1", lambda w: esmm.Context(threads=-1)),
        (ValueError, "threads is 2.5", lambda w: esmm.threads(2.5)),
        (RuntimeError, "tpu", lambda w: esmm.Context("tpu")),
        (ValueError, "device is 3", lambda w: esmm.Context(3)),
    ],
)
def test_refusals(error, match, call):
    with pytest.raises(error, match=match) as e:
        call(esmm.prepare(ONE))
    assert isinstance(e.value, esmm.Error) and e.value.status in esmm.Status and e.value.text == str(e.value)
    assert "->" not in e.value.text and "esmm_" not in e.value.text  # C's names


def test_overlap(rng):
    x = integers(rng, 8, 8)
    with pytest.raises(esmm.OverlapError, match="^out .* shares memory with a ") as e:
        esmm.matmul(x, esmm.prepare(ONE.repeat(2, 0).repeat(2, 1)), out=x)
    assert e.value.status == esmm.Status.OVERLAP


def test_closed(rng):
    w = esmm.prepare(ONE)
    with w:
        esmm.matmul(ONE, w)
    w.close()
    assert w.closed and "closed" in repr(w)
    for call in (
        lambda: esmm.matmul(ONE, w),
        lambda: w.save("/nonexistent/x"),
        lambda: esmm.to_dense(w),
        lambda: w.handle,
        lambda: esmm.matmul(ONE, esmm.prepare(ONE), gate=w),
        lambda: esmm.explain(ONE, w),
        lambda: w.__enter__(),
    ):
        with pytest.raises(ValueError, match="Weights object is closed"):
            call()
    ctx = esmm.Context("cpu")
    p = esmm.pattern(ONE, 2, context=ctx)
    ctx.close()
    with pytest.raises(ValueError, match="Context object is closed"):
        esmm.prepare(ONE, context=ctx)
    p.close()
    with pytest.raises(ValueError, match="Pattern object is closed"):
        p.coarsen(4)
    esmm.default_context().close()  # another one takes its place
    np.testing.assert_array_equal(esmm.matmul(ONE, esmm.prepare(ONE)), ONE @ ONE)


def test_closing_waits_for_calls_in_flight(rng):
    a, b = rng.standard_normal((512, 512)).astype(np.float32), rng.standard_normal((512, 512)).astype(np.float32)
    want = esmm.matmul(a, esmm.prepare(b))
    wrong = []
    for _ in range(20):
        w = esmm.prepare(b)

        def work(w=w):
            try:
                if not np.array_equal(esmm.matmul(a, w), want):
                    wrong.append("another result")
            except Exception as e:
                if "closed" not in str(e):
                    wrong.append(e)

        t = threading.Thread(target=work)
        t.start()
        w.close()
        t.join()
    assert not wrong


def test_threads_share_weights_and_a_context(rng):
    a = [integers(rng, 3 + 17 * i, 64) for i in range(8)]
    b = integers(rng, 64, 48)
    w, shared = esmm.prepare(b), esmm.Context("cpu", threads=2)
    contexts, wrong, right = [], [], []

    def work(i):
        contexts.append(esmm.default_context())
        for ctx in [None] + [shared] * 300:
            if not np.array_equal(esmm.matmul(a[i], w, context=ctx), a[i] @ b):
                wrong.append(i)
        right.append(i)

    started = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
    try:
        for t in started:
            t.start()
        for t in started:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and len(right) == 8 and len(set(map(id, contexts))) == 8


def test_settings():
    before = esmm.threads()
    with esmm.threads(1):
        assert esmm.threads() == 1 and esmm.matmul(ONE, esmm.prepare(ONE), stats=True)[1].threads == 1
        with esmm.device("cpu"):
            assert esmm.device() == "cpu" and esmm.threads() == 1
    assert esmm.threads() == before
    setting = esmm.threads(1)
    assert esmm.threads() == 1
    setting.__exit__()
    with pytest.raises(esmm.DeviceError, match="quantum"):
        esmm.device("quantum")
    assert esmm.device() == esmm.default_context().device


def test_memory_is_given_back(rng):
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    b = rng.standard_normal((1024, 1024)).astype(np.float32)
    a = rng.standard_normal((8, 1024)).astype(np.float32)

    def rounds(n):
        for _ in range(n):
            w = esmm.prepare(b)
            esmm.matmul(a, w, stats=True, c_pattern=8)
            esmm.pattern(a, 4)
        gc.collect()

    rounds(5)
    before = resident()
    rounds(60)
    assert resident() - before < 40 * b.nbytes / 4, "60 sets of weights of 8 MB are still there"


def test_tune_weights(rng):
    a = rng.standard_normal((64, 512)).astype(np.float32)
    b = rng.standard_normal((512, 512)).astype(np.float32)
    ctx = esmm.Context("cpu", deterministic=False, tuning_cache=False)
    w = esmm.prepare(b, context=ctx)
    assert not any("measured" in v.text for v in esmm.explain(a, w, context=ctx))
    esmm.tune_weights(a, w, activation="relu", context=ctx)
    assert not any("measured" in v.text for v in esmm.explain(a[:3], w, activation="relu", context=ctx))  # another number of rows
    assert any("measured" in v.text for v in esmm.explain(a, w, activation="relu", context=ctx))
    with pytest.raises(esmm.UnsupportedError, match="does not learn"):
        esmm.tune_weights(a, w, context=esmm.Context("cpu", deterministic=True))
    with pytest.raises(esmm.DtypeError, match="weights is a ndarray"):
        esmm.tune_weights(a, b, context=ctx)
