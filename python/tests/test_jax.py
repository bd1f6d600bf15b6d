"""esmm.jax: products, gradients, jit, vmap, dtypes, weights that live and die, and the way without a compiler."""

from __future__ import annotations

import doctest
import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import esmm.jax  # noqa: E402
from esmm._errors import ArgumentError, DtypeError, ShapeError  # noqa: E402

M, K, N = 37, 96, 53


def sparse(seed: int, shape, density: float = 0.2, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * (rng.random(shape) < density), dtype)


def dense_product(a, w, bias=None, activation=None, residual=None, dtype=None):
    """The same in plain JAX, in float32 between the operands and the result."""
    x = jnp.matmul(a.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    x = x if bias is None else x + bias.astype(jnp.float32)
    functions = {
        None: lambda x: x,
        "relu": jax.nn.relu,
        "relu2": lambda x: jax.nn.relu(x) ** 2,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "silu": jax.nn.silu,
    }
    y = functions[activation](x)
    y = y if residual is None else y + residual.astype(jnp.float32)
    return y.astype(dtype or a.dtype)


def close(got, want, tolerance=1e-5):
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max(initial=0))))


@pytest.fixture(scope="module", autouse=True)
def through_the_ffi():
    assert esmm.jax._open(), "the foreign function was not built: these tests would only see the way without it"


@pytest.mark.parametrize("activation", [None, "relu", "relu2", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values_and_gradients(activation, with_residual):
    a, w = sparse(1, (M, K)), sparse(2, (K, N), 1.0)
    bias, residual = sparse(3, (N,), 1.0), sparse(4, (M, N), 1.0) if with_residual else None
    weigh = sparse(5, (M, N), 1.0)

    def loss(product, a, w, bias, residual):
        return (product(a, w, bias=bias, activation=activation, residual=residual) * weigh).sum()

    close(
        esmm.jax.matmul(a, w, bias=bias, activation=activation, residual=residual),
        dense_product(a, w, bias, activation, residual),
    )
    arguments = (0, 1, 2, 3) if with_residual else (0, 1, 2)
    got = jax.grad(lambda *x: loss(esmm.jax.matmul, *x), arguments)(a, w, bias, residual)
    want = jax.grad(lambda *x: loss(dense_product, *x), arguments)(a, w, bias, residual)
    for g, v in zip(got, want):
        close(g, v, 3e-5)
    # The value under a gradient is the value without one.
    value, _ = jax.value_and_grad(lambda *x: loss(esmm.jax.matmul, *x))(a, w, bias, residual)
    np.testing.assert_allclose(value, loss(esmm.jax.matmul, a, w, bias, residual), rtol=1e-5)


def test_prepared_weights_under_jit():
    a, b = sparse(1, (M, K)), sparse(2, (K, N), 1.0)
    w = esmm.jax.prepare(b)
    assert w.shape == (K, N) and w.dtype == "float32" and w.device == "cpu"
    around = jax.jit(lambda a: esmm.jax.matmul(a, w, activation="relu2"))
    argument = jax.jit(lambda a, w: esmm.jax.matmul(a, w, activation="relu2"))
    want = dense_product(a, b, activation="relu2")
    close(around(a), want)
    close(argument(a, w), want)
    other = sparse(6, (K, N), 1.0)  # the same shape: the compiled program of w must not be taken for it
    close(argument(a, esmm.jax.prepare(other)), dense_product(a, other, activation="relu2"))
    close(argument(a, w), want)
    got = jax.jit(jax.grad(lambda a: argument(a, w).sum()))(a)
    close(got, jax.grad(lambda a: dense_product(a, b, activation="relu2").sum())(a), 3e-5)


def test_weights_of_the_numpy_layer_are_taken():
    a, b = sparse(1, (M, K)), sparse(2, (K, N), 1.0)
    w = esmm.jax.prepare(b).prepared
    close(esmm.jax.matmul(a, w), dense_product(a, b))
    assert esmm.jax.matmul(a, w).shape == (M, N)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    a, b = sparse(1, (M, K), dtype=dtype), sparse(2, (K, N), 1.0, dtype=dtype)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for w in (b, esmm.jax.prepare(b)):
        got = esmm.jax.matmul(a, w, activation="relu2")
        assert got.dtype == jnp.dtype(dtype)
        close(got, dense_product(a, b, activation="relu2"), unit)
        close(esmm.jax.matmul(a, w, dtype=jnp.float32), dense_product(a, b, dtype=jnp.float32))
    da, db = jax.grad(lambda a, b: esmm.jax.matmul(a, b).astype(jnp.float32).sum(), (0, 1))(a, b)
    assert da.dtype == a.dtype and db.dtype == b.dtype
    close(da, jax.grad(lambda a: dense_product(a, b).astype(jnp.float32).sum())(a), 2 * unit)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (0, K), (2, 0, K)])
def test_leading_dimensions(shape):
    a, b = sparse(1, shape), sparse(2, (K, N), 1.0)
    close(esmm.jax.matmul(a, b), dense_product(a, b))
    close(esmm.jax.matmul(a, esmm.jax.prepare(b)), dense_product(a, b))


def test_no_columns():
    assert not np.asarray(esmm.jax.matmul(jnp.zeros((3, 0)), jnp.zeros((0, N)))).any()
    assert esmm.jax.matmul(jnp.zeros((3, K)), jnp.zeros((K, 0))).shape == (3, 0)


def test_vmap_and_scan():
    a, b = sparse(1, (5, M, K)), sparse(2, (K, N), 1.0)
    w = esmm.jax.prepare(b)
    close(jax.vmap(lambda a: esmm.jax.matmul(a, w))(a), dense_product(a, b))
    ws = sparse(3, (5, K, N), 1.0)
    close(jax.vmap(esmm.jax.matmul)(a, ws), jnp.stack([dense_product(x, y) for x, y in zip(a, ws)]))
    _, ys = jax.lax.scan(lambda carry, x: (carry, esmm.jax.matmul(x, w)), 0, a)
    close(ys, dense_product(a, b))


def test_a_layer_learns_under_jit():
    x = sparse(1, (64, 24), 1.0)
    target = jnp.sin(x @ sparse(2, (24, 8), 1.0))
    parameters = [sparse(3, (24, 96), 1.0) / 5, jnp.zeros(96), sparse(4, (96, 8), 1.0) / 20]

    def loss(p):
        h = esmm.jax.matmul(x, p[0], bias=p[1], activation="relu2")
        return ((esmm.jax.matmul(h, p[2]) - target) ** 2).mean()

    @jax.jit
    def step(p):
        value, grads = jax.value_and_grad(loss)(p)
        return value, [q - 0.05 * g for q, g in zip(p, grads)]

    first, parameters = step(parameters)
    for _ in range(150):
        last, parameters = step(parameters)
    assert float(last) < 0.35 * float(first)


def test_many_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    b = sparse(2, (K, N), 1.0)
    w = esmm.jax.prepare(b)
    run = jax.jit(lambda a: esmm.jax.matmul(a, w))
    inputs = [sparse(i, (M, K)) for i in range(24)]
    with ThreadPoolExecutor(4) as threads:
        for a, got in zip(inputs, threads.map(run, inputs)):
            close(got, dense_product(a, b))


def test_a_program_whose_weights_are_gone_says_so():
    a, b = sparse(1, (M, K)), sparse(2, (K, N), 1.0)
    w = esmm.jax.prepare(b)
    program = jax.jit(lambda a, w: esmm.jax.matmul(a, w)).lower(a, w).compile()
    close(program(a, w), dense_product(a, b))
    esmm.jax._handlers.esmm_jax_drop(w._entry())  # what its finalizer does
    with pytest.raises(Exception, match="have been freed"):
        jax.block_until_ready(program(a, w))


def test_weights_are_freed():
    w = esmm.jax.prepare(sparse(2, (K, N), 1.0))
    jax.jit(lambda a, w: esmm.jax.matmul(a, w))(sparse(1, (M, K)), w)
    esmm.jax.matmul(sparse(1, (M, K)), w.prepared)
    memory = weakref.ref(w.prepared._handle)
    del w
    jax.clear_caches()
    gc.collect()
    assert memory() is None


def test_docstring():
    assert doctest.testmod(esmm.jax).failed == 0


def test_errors_name_the_argument():
    a, b = sparse(1, (M, K)), sparse(2, (K, N), 1.0)
    with pytest.raises(ShapeError, match="96 columns and w 95 rows"):
        esmm.jax.matmul(a, b[:-1])
    with pytest.raises(ShapeError, match=r"bias has the shape \(52,\)"):
        esmm.jax.matmul(a, b, bias=jnp.zeros(N - 1))
    with pytest.raises(ShapeError, match="residual"):
        esmm.jax.matmul(a, b, residual=jnp.zeros((M, N + 1)))
    with pytest.raises(ShapeError, match="w has 1 dimensions"):
        esmm.jax.matmul(a, b[0])
    with pytest.raises(DtypeError, match="a is of int32"):
        esmm.jax.matmul(a.astype(jnp.int32), b)
    with pytest.raises(DtypeError, match="dtype is int8"):
        esmm.jax.matmul(a, b, dtype=jnp.int8)
    with pytest.raises(ArgumentError, match="'banana'"):
        esmm.jax.matmul(a, b, activation="banana")
    with pytest.raises(DtypeError, match="traced"):
        jax.jit(lambda b: esmm.jax.matmul(a, esmm.jax.prepare(b)))(b)


WITHOUT = """
import warnings
import numpy as np, jax, jax.numpy as jnp, esmm.jax
a = jnp.asarray(np.random.default_rng(1).standard_normal((5, 12)), jnp.float32)
b = jnp.asarray(np.random.default_rng(2).standard_normal((12, 7)), jnp.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = jax.jit(lambda a: esmm.jax.matmul(a, b, bias=jnp.ones(7), activation="relu"))(a)
    again = esmm.jax.matmul(a, esmm.jax.prepare(b), residual=jnp.ones((5, 7)))
np.testing.assert_allclose(got, jax.nn.relu(a @ b + 1), atol=1e-5)
np.testing.assert_allclose(again, a @ b + 1, atol=1e-5)
da, db = jax.grad(lambda a, b: (esmm.jax.matmul(a, b) ** 2).sum(), (0, 1))(a, b)
np.testing.assert_allclose(da, 2 * (a @ b) @ b.T, atol=1e-4)
np.testing.assert_allclose(db, 2 * a.T @ (a @ b), atol=1e-4)
assert esmm.jax._ready is False
ours = [w for w in caught if "esmm.jax" in str(w.message)]
print(len(ours), *(w.message for w in ours))
"""


def run_without(tmp_path, **environment):
    settings = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", **environment}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_compiler_one_warning_and_the_same_results(tmp_path):
    text = run_without(tmp_path, CXX="/no/such/compiler")
    assert text.startswith("1 ") and "/no/such/compiler" in text


def test_the_way_without_it_can_be_chosen(tmp_path):
    assert run_without(tmp_path, ESMM_JAX_FFI="0").startswith("0")


def test_what_is_built_is_kept_whole(tmp_path, monkeypatch):
    import jaxlib

    from esmm import _build

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = os.path.join(os.path.dirname(esmm.jax.__file__), "ffi.cpp")
    first = _build.build(source, "jax", [jax.ffi.include_dir()], jaxlib.__version__)
    stamp, kept = os.stat(first).st_mtime_ns, [os.path.basename(first), "jax.lock"]
    assert _build.build(source, "jax", [jax.ffi.include_dir()], jaxlib.__version__) == first
    assert os.stat(first).st_mtime_ns == stamp and sorted(os.listdir(tmp_path / "esmm")) == kept
    with pytest.raises(_build.BuildError, match="failed"):
        _build.build(source, "jax", [], "no headers")
    assert sorted(os.listdir(tmp_path / "esmm")) == kept
