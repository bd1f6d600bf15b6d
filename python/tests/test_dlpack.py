"""Tensors of other libraries, by DLPack and the CUDA array interface; esmm.Array on its way out."""

import gc

import esmm
import numpy as np
import pytest
from esmm import _dlpack


class Wrapped:
    """A tensor of some library: gives numpy's own capsule."""

    def __init__(self, x, device=(1, 0), versioned=True):
        self.x, self.device, self.versioned = x, device, versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versioned and "max_version" in options:
            raise TypeError("an unexpected keyword argument 'max_version'")
        options.pop("stream", None)
        try:
            return self.x.__dlpack__(**options)
        except TypeError:  # an older numpy
            options.pop("max_version", None)
            return self.x.__dlpack__(**options)


class Old(Wrapped):
    pass


numpy_gives = pytest.mark.skipif(not hasattr(np, "from_dlpack"), reason="this numpy has no DLPack")


@pytest.fixture
def operands(rng):
    return rng.integers(-4, 5, (9, 32)).astype(np.float32), rng.integers(-4, 5, (32, 20)).astype(np.float32)


@numpy_gives
@pytest.mark.parametrize("versioned", [True, False])
def test_in_and_out(operands, versioned):
    a, b = operands
    wrap = Wrapped if versioned else Old
    w = esmm.prepare(wrap(b, versioned=versioned))
    c = esmm.matmul(wrap(a, versioned=versioned), w)
    assert isinstance(c, esmm.Array) and c.shape == (9, 20) and c.dtype == "float32" and c.device == "cpu"
    np.testing.assert_array_equal(c.numpy(), a @ b)
    np.testing.assert_array_equal(np.asarray(c), a @ b)
    np.testing.assert_array_equal(np.from_dlpack(c), a @ b)
    assert np.from_dlpack(c).ctypes.data == c.data, "nothing is copied"
    np.testing.assert_array_equal(esmm.matmul(c, esmm.prepare(np.eye(20, dtype=np.float32))).numpy(), a @ b)
    out = np.zeros((9, 20), np.float32)
    y = wrap(out, versioned=versioned)
    assert esmm.matmul(a, w, out=y, bias=wrap(np.ones(20, np.float32), versioned=versioned)) is y
    np.testing.assert_array_equal(out, a @ b + 1)
    assert esmm.matmul(wrap(a[0], versioned=versioned), w).shape == (20,)
    assert esmm.matmul(wrap(a.reshape(3, 3, 32), versioned=versioned), w).shape == (3, 3, 20)
    assert len(c) == 9 and c.ndim == 2 and c.nbytes == 9 * 20 * 4


@numpy_gives
def test_memory_lives_as_long_as_it_is_used(operands):
    a, b = operands
    c = np.from_dlpack(esmm.matmul(Wrapped(a), esmm.prepare(b)))
    gc.collect()
    [np.full((9, 20), np.nan, np.float32) for _ in range(100)]
    np.testing.assert_array_equal(c, a @ b)
    assert _dlpack._given
    del c
    gc.collect()
    assert not _dlpack._given
    c = esmm.matmul(Wrapped(a), esmm.prepare(b))
    for options in ({}, {"max_version": (1, 0)}):
        capsule = c.__dlpack__(**options)  # that no consumer takes
        assert len(_dlpack._given) == 1
        del capsule
        assert not _dlpack._given


@numpy_gives
def test_refusals(operands):
    a, b = operands
    w = esmm.prepare(b)
    with pytest.raises(TypeError, match="a is of float64"):
        esmm.matmul(Wrapped(a.astype(np.float64)), w)
    with pytest.raises(TypeError, match="a is of int16"):
        esmm.matmul(Wrapped(a.astype(np.int16)), w)
    with pytest.raises(ValueError, match="a of shape .* has strides"):
        esmm.matmul(Wrapped(np.zeros((9, 64), np.float32)[:, ::2]), w)
    with pytest.raises(RuntimeError, match="DLPack's type 10"):
        esmm.matmul(Wrapped(a, (10, 0)), w)
    with pytest.raises(ValueError, match="out is of shape"):
        esmm.matmul(a, w, out=Wrapped(np.zeros((9, 21), np.float32)))
    with pytest.raises(TypeError, match="bias of shape"):
        esmm.matmul(a, w, bias=Wrapped(np.zeros((20, 1), np.float32)))
    with pytest.raises(ValueError, match="bias has 21"):
        esmm.matmul(a, w, bias=Wrapped(np.zeros(21, np.float32)))

    class Mute(Wrapped):
        def __dlpack__(self, **options):
            raise BufferError("it requires a gradient")

    with pytest.raises(ValueError, match="requires a gradient"):
        esmm.matmul(Mute(a), w)

    class Odd(Wrapped):
        def __dlpack__(self, **options):
            return "no capsule"

    with pytest.raises(ValueError, match="gives no capsule"):
        esmm.matmul(Odd(a), w)
    c = esmm.matmul(Wrapped(a), w)
    with pytest.raises(BufferError, match="cpu"):
        c.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy"):
        c.__dlpack__(copy=True)
    assert not hasattr(c, "__cuda_array_interface__")


@numpy_gives
def test_read_only_is_not_written(operands):
    a, b = operands
    out = np.zeros((9, 20), np.float32)
    out.flags.writeable = False
    try:
        out.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError):
        pytest.skip("this numpy does not give read-only arrays by DLPack")
    with pytest.raises(ValueError, match="out is read-only"):
        esmm.matmul(a, esmm.prepare(b), out=Wrapped(out))


class OnGpu:
    """Something that says it is on a GPU. Its memory is never touched by a context of the CPU."""

    def __init__(self, shape, typestr="<f4", **more):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "version": 3,
            **more,
        }


def test_a_gpus_memory_and_weights_of_the_cpu(operands):
    a, b = operands
    w = esmm.prepare(b)
    with pytest.raises(esmm.Error, match="(?i)gpu|device|cpu"):
        esmm.matmul(OnGpu((9, 32)), w)
    with pytest.raises(esmm.Error, match="(?i)gpu|device|cpu"):
        esmm.matmul(a, w, out=OnGpu((9, 20)))
    with pytest.raises(RuntimeError, match="bias is on GPU 0"):
        esmm.matmul(a, w, bias=OnGpu((20,)))
    with pytest.raises(TypeError, match="'<f8'"):
        esmm.matmul(OnGpu((9, 32), "<f8"), w)
    with pytest.raises(ValueError, match="stream 77"):
        esmm.matmul(OnGpu((9, 32), stream=77), w)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch(operands, dtype):
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in operands)
    w = esmm.prepare(b.T.contiguous().T)
    assert w.dtype == dtype
    c = esmm.matmul(a, w, activation="relu")
    t = torch.from_dlpack(c)
    assert t.dtype == a.dtype and t.data_ptr() == c.data
    assert torch.allclose(t.float(), (a.float() @ b.float()).relu(), rtol=1e-2)
    out = torch.zeros(9, 20, dtype=a.dtype)
    esmm.matmul(a, w, out=out, activation="relu")
    assert torch.equal(out, t)
    with pytest.raises(ValueError, match="requires gradient|grad"):
        esmm.matmul(a.clone().requires_grad_(), w)
    with pytest.raises(ValueError, match="strides"):
        esmm.matmul(torch.zeros(9, 64, dtype=a.dtype)[:, ::2], w)
    with pytest.raises(TypeError, match="float64"):
        esmm.matmul(operands[0], w, out_dtype=torch.float64)
    assert esmm.matmul(operands[0], w, out_dtype=torch.float16).dtype == np.float16


def test_jax(operands):
    jax = pytest.importorskip("jax")
    a, b = (jax.numpy.asarray(x) for x in operands)
    c = esmm.matmul(a, esmm.prepare(b))
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(c)), operands[0] @ operands[1])
    half = esmm.matmul(a.astype("bfloat16"), esmm.prepare(b.astype("bfloat16")), out_dtype="float32")
    np.testing.assert_array_equal(half.numpy(), operands[0] @ operands[1])
    out = jax.numpy.zeros((9, 20), "float32")
    try:
        esmm.matmul(a, esmm.prepare(b), out=out)
    except ValueError as e:
        assert "read-only" in str(e)
