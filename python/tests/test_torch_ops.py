"""The operators under torch.ops.esmm: results, gradients, what the compiler and autocast see, errors."""

import copy
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from need_torch import torch

import esmm.torch
from esmm.torch import _build, _ops, _registry
from torch import nn
from torch_help import ACTIVATIONS, DEVICE, SPARSE_DTYPE, SPARSE_ROUNDING, gradients, near, zeros

F = torch.nn.functional
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def parameter(*shape, dtype=torch.float32, requires_grad=True):
    return nn.Parameter((torch.randn(*shape) * shape[-1] ** -0.5).to(DEVICE, dtype), requires_grad)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gated", (False, True))
def test_epilogue(dtype, activation, gated):
    x, w, b = zeros(3, 7, 40, dtype=dtype), parameter(24, 40, dtype=dtype), parameter(24, dtype=dtype)
    residual = torch.randn(3, 7, 24).to(DEVICE, dtype)
    gate, gate_bias = (parameter(24, 40, dtype=dtype), parameter(24, dtype=dtype)) if gated else (None, None)
    act = ACTIVATIONS[activation]
    with torch.no_grad():
        y = esmm.torch.linear(x, w, b, activation=activation, residual=residual, gate=gate, gate_bias=gate_bias)
    up = F.linear(x.double(), w.double(), b.double())
    want = act(up) if gate is None else act(F.linear(x.double(), gate.double(), gate_bias.double())) * up
    assert y.dtype == dtype and y.device == x.device
    near(y, want + residual.double(), ROUNDING[dtype])


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (16,), (2, 0, 16), (1, 1, 1, 16)])
def test_shapes(shape):
    x, w = zeros(*shape), parameter(5, 16)
    near(esmm.torch.linear(x, w), F.linear(x, w))


def test_inputs_that_are_not_contiguous():
    w = parameter(12, 20)
    wide = zeros(9, 50)
    for x in (
        wide[:, 3:23],
        wide.t()[:20].t(),
        zeros(20, 9).t(),
        zeros(4, 20, 3).transpose(1, 2),
        wide[:, ::2][:, :20],
    ):
        near(esmm.torch.linear(x, w), F.linear(x, w))
    turned = nn.Parameter(torch.randn(20, 12).to(DEVICE).t())
    sliced = nn.Parameter(torch.randn(24, 40).to(DEVICE)[::2, ::2])
    x = zeros(9, 20)
    for weight in (turned, sliced):
        assert not weight.is_contiguous()
        near(esmm.torch.linear(x, weight), F.linear(x, weight))


def test_statistics():
    x, w = zeros(50, 30), parameter(20, 30)
    y, nonzeros = esmm.torch.linear(x, w, activation="relu", stats=True)
    assert nonzeros.dtype == torch.int32
    assert torch.equal(nonzeros.long(), (y != 0).sum(0))


def test_prepared_again_when_the_weight_changes():
    x, w = zeros(4, 16), parameter(8, 16, requires_grad=False)
    near(esmm.torch.linear(x, w), F.linear(x, w))
    w.mul_(3)
    near(esmm.torch.linear(x, w), F.linear(x, w))
    w.data = torch.randn(8, 16).to(DEVICE)
    near(esmm.torch.linear(x, w), F.linear(x, w))
    w.data.mul_(2)  # which torch does not count
    esmm.torch.clear_cache()
    near(esmm.torch.linear(x, w), F.linear(x, w))


def test_prepared_once(monkeypatch):
    made = []
    inner = _registry.lasts  # which is asked for whatever is prepared
    monkeypatch.setattr(_registry, "lasts", lambda t: made.append(1) or inner(t))
    x, w = zeros(4, 16), parameter(8, 16)
    for _ in range(3):
        esmm.torch.linear(x, w)
    with torch.no_grad():
        esmm.torch.linear(x, w)
    assert len(made) == 1
    with pytest.warns(RuntimeWarning, match="not an nn.Parameter"):
        monkeypatch.setattr(_registry, "_warned", False)
        esmm.torch.linear(x, w.detach().clone())
        near(esmm.torch.linear(x, w.detach() * 2), F.linear(x, w * 2))
    assert len(made) == 3


def test_what_was_prepared_goes_with_the_parameter():
    esmm.torch.clear_cache()
    w = parameter(8, 16)
    esmm.torch.linear(zeros(4, 16), w)
    assert len(_registry._held) == 1
    del w
    assert not _registry._held
    w = parameter(8, 16)
    esmm.torch.linear(zeros(4, 16), w)
    w.data = torch.randn(8, 16).to(DEVICE)  # the old memory has no owner now
    esmm.torch.linear(zeros(4, 16), w)
    assert len(_registry._held) == 1


def test_forgotten_while_it_is_prepared():
    """Nothing stays in the table without its memory: another weight may get that, with the same version."""
    wrong = []
    stop = threading.Event()

    def work():
        x = zeros(2, 16)
        while not stop.is_set() and not wrong:
            w = parameter(8, 16, requires_grad=False)
            try:
                near(esmm.torch.linear(x, w), F.linear(x, w))
            except BaseException as e:  # noqa: BLE001
                wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for _ in range(200):
        esmm.torch.clear_cache()
        time.sleep(0.002)
    stop.set()
    for t in threads:
        t.join()
    assert not wrong


def test_two_parameters_with_the_same_memory():
    esmm.torch.clear_cache()
    x, w = zeros(4, 16), parameter(8, 16, requires_grad=False)
    same = nn.Parameter(w.detach(), requires_grad=False)
    for weight in (w, same):
        near(esmm.torch.linear(x, weight), F.linear(x, w))
    assert len(_registry._held) == 1
    del same, weight
    near(esmm.torch.linear(x, w), F.linear(x, w))
    del w
    assert not _registry._held


def test_weights_of_every_layout():
    x = zeros(3, 16)
    for w in (
        torch.randn(1, 16), torch.randn(16, 1).t(), torch.randn(16, 8).t(), torch.randn(8, 32)[:, :16],
        torch.randn(8, 1).expand(8, 16), torch.randn(1, 16).expand(8, 16), torch.randn(8, 16)[:0],
        torch.randn(32, 9).t()[:8, ::2], torch.randn(16, 9).t()[:8],
    ):  # fmt: skip
        w = nn.Parameter(w.to(DEVICE), requires_grad=False)
        near(esmm.torch.linear(x, w), F.linear(x, w))
        d = zeros(3, w.shape[0])
        near(torch.ops.esmm._linear_turned(d, w), d @ w)
        narrow = x.to(torch.bfloat16)
        near(esmm.torch.linear(narrow, w), F.linear(narrow.double(), w.double()), 2e-2)


def test_contexts_are_those_of_the_operators():
    """One pool: a context is lent to one user at a time, and taken again by the next, product or not."""
    with _registry.context(DEVICE) as first, _registry.context(DEVICE) as second:
        assert first.handle != second.handle
        with pytest.raises(RuntimeError, match="neither a CPU nor a CUDA device"), _registry.context(
            torch.device("meta")
        ):
            pass
        esmm.torch.linear(zeros(1, 16), parameter(8, 16))
    with _registry.context(DEVICE) as again:
        assert again.handle == first.handle
        if DEVICE.type == "cpu":
            assert again.threads == torch.get_num_threads()
    if DEVICE.type == "cpu":
        with esmm.threads(3), _registry.context(DEVICE) as wide:
            assert wide.threads == 3


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("with_residual", (False, True))
def test_gradients_against_float64(activation, gated, with_residual):
    x = zeros(6, 33).requires_grad_()
    given = [x, parameter(21, 33), parameter(21)]
    given.append(torch.randn(6, 21).to(DEVICE).requires_grad_() if with_residual else None)
    given += [parameter(21, 33), parameter(21)] if gated else [None, None]
    y = esmm.torch.linear(
        x, given[1], given[2], activation=activation, residual=given[3], gate=given[4], gate_bias=given[5]
    )
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    act = ACTIVATIONS[activation]
    up = F.linear(*wide[:3])
    want = act(up) if not gated else act(F.linear(wide[0], wide[4], wide[5])) * up
    want = want + wide[3] if with_residual else want
    dy = torch.randn_like(y)
    got = gradients(y, dy, [t for t in given if t is not None])
    for a, b in zip(got, gradients(want, dy.double(), [t for t in wide if t is not None])):
        near(a, b, 1e-5)


def test_gradcheck():
    x, w, b = zeros(3, 5, density=1.0).requires_grad_(), parameter(4, 5), parameter(4)

    def product(x, w, b):
        esmm.torch.clear_cache()  # gradcheck writes to w.data, which torch does not count
        return torch.ops.esmm.linear(x, w, b, None, None, None, _ops.SILU, 0)

    with pytest.warns(UserWarning):  # of single precision, which the tolerances are for
        assert torch.autograd.gradcheck(product, (x, w, b), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0)


@pytest.mark.parametrize("op", ("linear", "linear_stats"))
@pytest.mark.parametrize("requires_grad", (False, True))
def test_opcheck(op, requires_grad):
    x, w, b = zeros(6, 16).requires_grad_(requires_grad), parameter(8, 16, requires_grad=requires_grad), parameter(8)
    r = torch.randn(6, 8).to(DEVICE)
    torch.library.opcheck(getattr(torch.ops.esmm, op).default, (x, w, b, r, None, None, _ops.RELU, 0))


def test_opcheck_of_operators_without_gradient():
    x, w = zeros(6, 16), parameter(8, 16, requires_grad=False)
    torch.library.opcheck(torch.ops.esmm._linear.default, (x, w, None, _ops.SILU, 0, None, w, None))
    torch.library.opcheck(torch.ops.esmm._linear_plain.default, (x, w, None, _ops.SILU))
    torch.library.opcheck(torch.ops.esmm._linear_turned.default, (zeros(6, 8), w))
    packed = esmm.torch.to_sparse(w.detach().to(SPARSE_DTYPE), "bsr:8").packed
    torch.library.opcheck(torch.ops.esmm.linear_packed.default, (x.to(SPARSE_DTYPE), packed, 8, None, None, 0))


def test_a_bias_as_float32():
    """One of 16 bits is used through a copy: of a Parameter it is kept, and written again when the bias has changed."""
    x, w = zeros(3, 16, dtype=torch.bfloat16), parameter(8, 16, dtype=torch.bfloat16, requires_grad=False)
    b = parameter(8, dtype=torch.bfloat16, requires_grad=False)
    for bias in (b, b.detach().clone()):
        for _ in range(3):
            near(esmm.torch.linear(x, w, bias), F.linear(x.double(), w.double(), bias.double()), 2e-2)
            bias.add_(1)
    made = torch.ops.esmm._float_copy(b)
    assert made.dtype == torch.float32 and torch.equal(made, b.float())
    same = parameter(8, requires_grad=False)
    assert torch.ops.esmm._float_copy(same).data_ptr() != same.data_ptr()


def test_a_bias_as_float32_that_inference_mode_made():
    """What is kept of it can be written again outside of that mode."""
    x, w = zeros(3, 16, dtype=torch.bfloat16), parameter(8, 16, dtype=torch.bfloat16, requires_grad=False)
    b = parameter(8, dtype=torch.bfloat16, requires_grad=False)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            near(esmm.torch.linear(x, w, b), F.linear(x.double(), w.double(), b.double()), 2e-2)
        with torch.no_grad():
            b.add_(1)
    with torch.inference_mode():
        assert not torch.ops.esmm._float_copy(b).is_inference()


@pytest.mark.parametrize("enabled_dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(enabled_dtype):
    x, w, b = zeros(6, 32).requires_grad_(), parameter(8, 32), parameter(8)
    with torch.autocast(DEVICE.type, dtype=enabled_dtype):
        y, want = esmm.torch.linear(x, w, b), F.linear(x, w, b)
        with torch.no_grad():
            near(esmm.torch.linear(x, w, b), want, 2e-2)
    assert y.dtype == want.dtype == enabled_dtype
    near(y, want, 2e-2)
    dy = torch.randn_like(y)
    for a, p in zip(gradients(y, dy, (x, w, b)), (x, w, b)):
        assert a.dtype == p.dtype
    for a, c in zip(
        gradients(esmm.torch.linear(x, w, b), dy.float(), (x, w, b)),
        gradients(F.linear(x, w, b), dy.float(), (x, w, b)),
    ):
        near(a, c, 1e-5)


def test_threads():
    w = parameter(64, 128, requires_grad=False)
    inputs = [zeros(5 + i, 128) for i in range(8)]
    want = [F.linear(x, w) for x in inputs]
    wrong = []

    def work(i):
        try:
            with torch.no_grad():
                for _ in range(50):
                    near(esmm.torch.linear(inputs[i], w), want[i])
        except BaseException as e:  # noqa: BLE001
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_inference_mode():
    with torch.inference_mode():
        x, w = zeros(4, 16), nn.Parameter(torch.randn(8, 16).to(DEVICE), requires_grad=False)
        near(esmm.torch.linear(x, w), F.linear(x, w))
        near(esmm.torch.linear(x, w), F.linear(x, w))


X, W = (4, 16), (8, 16)
WRONG = [
    ("in", lambda: (torch.randn(4, 15), parameter(*W), None), "rows of 15.*\\[8, 16\\]"),
    ("weight's dimensions", lambda: (torch.randn(X), parameter(8), None), "1 dimensions"),
    ("bias", lambda: (torch.randn(X), parameter(*W), parameter(7)), "bias needs the shape \\[8\\]"),
    ("x's dtype", lambda: (torch.randn(X, dtype=torch.float64), parameter(*W), None), "x is float64"),
    ("integers", lambda: (torch.ones(X, dtype=torch.int32), parameter(*W), None), "x is int32"),
    ("weight's dtype", lambda: (torch.randn(X), parameter(*W, dtype=torch.bfloat16), None), "different dtypes"),
    ("bias' dtype", lambda: (torch.randn(X), parameter(*W), torch.zeros(8, dtype=torch.int64)), "bias is int64"),
]


@pytest.mark.parametrize("name, make, text", WRONG, ids=[w[0] for w in WRONG])
@pytest.mark.parametrize("grad", (False, True))
def test_wrong_arguments(name, make, text, grad):
    x, w, b = (t if t is None else t.to(DEVICE) for t in make())
    w = nn.Parameter(w.detach())
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=text):
        esmm.torch.linear(x, w, b)


def test_wrong_devices():
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="weight is on meta, and x is on cpu"):
            esmm.torch.linear(zeros(4, 16), parameter(8, 16).to("meta"))
    else:
        with pytest.raises(RuntimeError, match="CPU|cpu"):
            esmm.torch.linear(zeros(4, 16), nn.Parameter(torch.randn(8, 16)))


def test_wrong_names():
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        esmm.torch.linear(zeros(4, 16), parameter(8, 16), activation="tanh")
    with pytest.raises(ValueError, match="format is '3:'"):
        esmm.torch.linear(zeros(4, 16), parameter(8, 16), format="3:")
    with pytest.raises(RuntimeError, match="gate_bias is given"):
        esmm.torch.linear(zeros(4, 16), parameter(8, 16), gate_bias=parameter(8))


def test_sparse_formats_have_no_gradient():
    x, w = zeros(4, 16, dtype=SPARSE_DTYPE), parameter(8, 16, dtype=SPARSE_DTYPE)
    with pytest.raises(RuntimeError, match="requires_grad_\\(False\\)"):
        esmm.torch.linear(x, w, format="bsr:8")
    x.requires_grad_()
    y = esmm.torch.linear(x, w.requires_grad_(False), format="bsr:8")
    y.sum().backward()
    near(x.grad, w.float().sum(0).expand(4, 16), SPARSE_ROUNDING)


def test_a_weight_that_does_not_fit_its_format():
    with torch.no_grad(), pytest.raises(RuntimeError, match="2:4|group|nonzero"):
        esmm.torch.linear(zeros(4, 16, dtype=SPARSE_DTYPE), parameter(8, 16, dtype=SPARSE_DTYPE), format="2:4")


# ---- how the operators come to be ----


@pytest.mark.parametrize(
    "env, text",
    [({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler (c++, g++ or clang++) is there. Install one (apt install g++,"),
     ({"CXX": "/no/such/compiler"}, "/no/such/compiler (from CXX) is not there. Install one"),
     ({"CXX": "/bin/false"}, "/bin/false"), ({"XDG_CACHE_HOME": "/dev/null"}, "/dev/null/esmm cannot be written")],
)  # fmt: skip
def test_without_a_compiler_the_import_says_what_is_missing(env, text, tmp_path):
    """Each time; and the rest of the package needs none."""
    code = (
        "import numpy, esmm\n"
        "for _ in range(2):\n"
        "  try:\n"
        "    import esmm.torch\n"
        "  except ImportError as e:\n"
        f"    assert 'compiled at first use' in str(e) and {text!r} in str(e), e\n"
        "    assert 'Install' not in str(e) or 'CXX=/path/to/g++' in str(e), e\n"
        "  else:\n"
        "    raise AssertionError('imported')\n"
        "one = numpy.ones((2, 2), numpy.float32)\n"
        "assert esmm.matmul(one, esmm.prepare(one)).tolist() == [[2, 2], [2, 2]]\n"
    )
    full = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **env}
    run = subprocess.run([sys.executable, "-c", code], env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout.decode()


def test_a_torch_without_the_stable_abi(monkeypatch):
    monkeypatch.setattr(_build, "torch_version", lambda: (2, 9))
    with pytest.raises(ImportError, match="is older than 2.10"):
        _build.load()


def test_several_processes_compile_once(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", "import esmm.torch"], env=env) for _ in range(3)]
    assert [r.wait() for r in runs] == [0, 0, 0]
    assert sorted(os.path.splitext(n)[1] for n in os.listdir(tmp_path / "esmm")) == [".lock", ".so"]


# ---- what is refused, and how ----


def test_errors_name_what_is_wrong():
    x, layer = torch.randn(4, 8).to(DEVICE), esmm.torch.SparseLinear(8, 6).to(DEVICE)
    ffn = esmm.torch.SparseFFN(8, 16).to(DEVICE)
    for call in (layer, ffn, copy.deepcopy(layer).requires_grad_(False), copy.deepcopy(ffn).requires_grad_(False)):
        for wrong, name in ((x.double(), "float64"), (x.long(), "int64")):
            with pytest.raises(RuntimeError, match=f"esmm: x is {name}: it has to be") as caught:
                call(wrong)
            assert ".cpp" not in str(caught.value)
        for wrong, name in ((np.zeros((4, 8), np.float32), "ndarray"), (None, "NoneType"), ([1.0], "list")):
            with pytest.raises(TypeError, match=f"x is a {name}: it has to be a torch.Tensor"):
                call(wrong)
    with pytest.raises(RuntimeError, match="x has rows of 7") as caught:
        copy.deepcopy(layer).requires_grad_(False)(x[:, :7])
    assert ".cpp" not in str(caught.value)
    with pytest.raises(TypeError, match="weight is a ndarray"):
        esmm.torch.linear(x, np.zeros((3, 8), np.float32))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="of a GPU's memory torch speaks itself")
def test_errors_of_torch_are_reported():
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch keeps them to itself")
    x, w = torch.zeros(1, 16).expand(1 << 45, 16), parameter(8, 16, requires_grad=False)
    with pytest.raises(RuntimeError, match="tried to allocate"):
        esmm.torch.linear(x, w)


def test_a_sparse_tensor_that_does_not_fit():
    x, sparse = torch.randn(4, 8).to(DEVICE), esmm.torch.to_sparse(torch.randn(6, 8).to(DEVICE), "dense")
    wide = torch.ops.esmm.unpack(sparse.packed, 6, 8, torch.float32)
    assert torch.equal(wide, sparse.to_dense())
    with pytest.raises(RuntimeError, match="the sparse tensor is float32, and x is bfloat16"):
        torch.ops.esmm.linear_packed(x.bfloat16(), sparse.packed, 6, None, None, 0)
    with pytest.raises(RuntimeError, match="the sparse tensor is float32, and x is float16"):
        torch.ops.esmm.unpack(sparse.packed, 6, 8, torch.float16)
    with pytest.raises(RuntimeError, match="esmm: .*float64"):
        torch.ops.esmm.unpack(sparse.packed, 6, 8, torch.float64)
    with pytest.raises(RuntimeError, match="esmm: "):
        torch.ops.esmm.unpack(sparse.packed, 5, 8, torch.float32)
    for bytes in (sparse.packed[:-1], sparse.packed[:0], sparse.packed.flip(0)):
        with pytest.raises(RuntimeError, match="esmm: "):
            torch.ops.esmm.linear_packed(x, bytes, 6, None, None, 0)


def test_transposes_of_a_sparse_tensor():
    w = torch.randn(6, 8).to(DEVICE)
    sparse, x = esmm.torch.to_sparse(w, "dense"), torch.randn(4, 8).to(DEVICE)
    for turned in (sparse.T, sparse.mT, sparse.transpose(0, 1), sparse.transpose(-2, -1), sparse.permute(1, 0)):
        assert turned.shape == (8, 6)
        near(x @ turned, x @ w.t())
    assert torch.equal(sparse.T.T.to_dense(), w) and torch.equal(sparse.permute(0, 1).to_dense(), w)
