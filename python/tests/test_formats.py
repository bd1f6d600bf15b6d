"""Formats of B, pruning, patterns, files: what goes with the product."""

import copy
import math
import pickle

import esmm
import numpy as np
import pytest


def blocks(rng, rows, cols, size, density):
    alive = rng.random((-(-rows // size), -(-cols // size))) < density
    alive[0, 0] = True
    mask = alive.repeat(size, 0).repeat(size, 1)[:rows, :cols]
    return (rng.integers(1, 5, (rows, cols)) * mask).astype(np.float32)


@pytest.mark.parametrize("kind", ["bsr", "csr", "csc"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("format", [None, "dense", "bsr", "bsr:8"])
def test_sparse_arrays_of_scipy(rng, kind, index, format):
    scipy = pytest.importorskip("scipy.sparse")
    dense = blocks(rng, 48, 64, 16, 0.4)
    b = scipy.bsr_array(dense, blocksize=(16, 16)) if kind == "bsr" else getattr(scipy, kind + "_array")(dense)
    b.indptr, b.indices = b.indptr.astype(index), b.indices.astype(index)
    w = esmm.prepare(b, format=format)
    assert w.format.kind == ("bsr" if format and format.startswith("bsr") else "dense")
    if format == "bsr" and kind == "bsr":
        assert str(w.format) == "bsr:16x16"
    np.testing.assert_array_equal(esmm.to_dense(w), dense)
    a = rng.integers(-3, 4, (10, 48)).astype(np.float32)
    np.testing.assert_array_equal(esmm.matmul(a, w), a @ dense)


def test_a_sparse_a(rng):
    scipy = pytest.importorskip("scipy.sparse")
    dense, b = blocks(rng, 64, 48, 16, 0.3), rng.integers(-3, 4, (48, 32)).astype(np.float32)
    w = esmm.prepare(b)
    for a in (scipy.bsr_array(dense, blocksize=(16, 16)), scipy.csr_array(dense)):
        c = esmm.matmul(a, w, bias=np.ones(32, np.float32))
        np.testing.assert_array_equal(c, dense @ b + 1)


def test_sparse_arrays_that_are_refused_or_mended(rng):
    scipy = pytest.importorskip("scipy.sparse")
    dense = blocks(rng, 32, 32, 8, 0.5)
    with pytest.raises(TypeError, match="b is of float64"):
        esmm.prepare(scipy.csr_array(dense.astype(np.float64)))
    lil = scipy.csr_array(dense)
    lil = type("Odd", (), {"format": "xyz", "indptr": lil.indptr, "indices": lil.indices, "data": lil.data})()
    with pytest.raises(TypeError, match="'xyz'"):
        esmm.prepare(lil)
    twice = scipy.csr_array((np.array([1, 2, 3], np.float32), np.array([1, 1, 0]), np.array([0, 3, 3])), shape=(2, 2))
    np.testing.assert_array_equal(esmm.to_dense(esmm.prepare(twice)), [[3, 3], [0, 0]])
    assert len(twice.data) == 3, "the caller's own array is left as it was"
    bad = scipy.csr_array(dense)
    bad.indices[0] = 99
    with pytest.raises(ValueError, match="99"):
        esmm.prepare(bad)


@pytest.mark.parametrize("format", ["2:4", "nm:2:4", "nm:1:8", "nm:2:4:4", "bsr:16", "bsr:8x32", "bsr", "nm"])
def test_prune_prepare_and_back(rng, format):
    b = rng.standard_normal((64, 48)).astype(np.float32)
    before = b.copy()
    density = 0.5 if format.startswith("bsr") else None
    pruned, report = esmm.prune(b, format, density=density)
    np.testing.assert_array_equal(b, before)
    assert report.kept == (pruned != 0).sum() and report.kept + report.dropped == b.size
    assert math.isclose(report.norm, np.linalg.norm(b), rel_tol=1e-5)
    assert ((pruned == b) | (pruned == 0)).all()
    w = esmm.prepare(pruned, format=format)
    np.testing.assert_array_equal(esmm.to_dense(w), pruned)
    a = rng.standard_normal((7, 64)).astype(np.float32)
    np.testing.assert_allclose(esmm.matmul(a, w), a @ pruned, atol=1e-4)
    assert esmm.prune(b, format, density=density, out=b)[0] is b
    np.testing.assert_array_equal(b, pruned)
    if not format.startswith("bsr"):
        assert esmm.fits(pruned, format) is None and esmm.fits(before, format) == (0, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_prune_top(rng, dtype):
    b = rng.standard_normal((300, 40)).astype(dtype)
    pruned, report = esmm.prune(b, top=7)
    for was, column in zip(b.T, pruned.T):
        best = np.sort(np.argsort(-abs(was), kind="stable")[:7])
        np.testing.assert_array_equal(np.nonzero(column)[0], best)
        np.testing.assert_array_equal(column[best], was[best])
    assert report.kept == 7 * 40 and report.dropped == b.size - report.kept
    share = esmm.prune(b, density=0.25, scope="matrix")[0]
    assert (share != 0).sum() == b.size // 4 and abs(b[share == 0]).max() <= abs(share[share != 0]).min()
    norms = np.zeros(300, np.float32)
    norms[5:8] = 1
    np.testing.assert_array_equal(np.nonzero(esmm.prune(b, "dense", top=3, input_norms=norms)[0].any(1))[0], [5, 6, 7])


def test_prune_soft(rng):
    b = rng.standard_normal((64, 48)).astype(np.float32)
    hard, soft = esmm.prune(b, "2:4")[0], esmm.prune(b, "2:4", soft=True)
    assert esmm.fits(soft[0], "2:4") is None
    size = abs(b).reshape(16, 4, 48)
    left = np.sign(b) * np.maximum(size - np.sort(size, 1)[:, 1:2], 0).reshape(64, 48)
    factor = (b * left).sum() / (left * left).sum()
    np.testing.assert_allclose(soft[0], factor * left, rtol=1e-5)
    assert ((soft[0] != 0) == (hard != 0)).all() and factor > 1
    assert math.isclose(soft[1].norm_dropped, np.linalg.norm(b - soft[0]), rel_tol=1e-5)


def test_prune_refusals(rng):
    b = np.ones((8, 8), np.float32)
    for wrong, match in (
        ({"top": -1}, "top is -1"),
        ({"top": 1.5}, "top is 1.5"),
        ({"top": 2, "density": 0.5}, "^top is 2"),
        ({"top": 2, "scope": "row"}, "scope"),
        ({"format": "2:4", "top": 2}, "^top is 2"),
        ({"format": "bsr:4", "density": 0.5, "soft": True}, "soft"),
        ({}, "top or density"),
    ):
        with pytest.raises(esmm.Error, match=match):
            esmm.prune(b, **wrong)
    with pytest.raises(ValueError, match="density is missing"):
        esmm.prune(b, "bsr:4")
    with pytest.raises(ValueError, match="1.5"):
        esmm.prune(b, "bsr:4", density=1.5)
    with pytest.raises(ValueError, match="out is another array"):
        esmm.prune(b, "2:4", out=b.copy())
    with pytest.raises(ValueError, match=r"input_norms is of shape \(3,\)"):
        esmm.prune(b, "2:4", input_norms=np.ones(3))
    with pytest.raises(ValueError, match="dense|prune"):
        esmm.prune(b, "dense")
    with pytest.raises(esmm.Error, match="[0-9]"):
        esmm.prepare(b, format="2:4")
    assert (b == 1).all()
    norms = np.array([1, 2, 3, 4] * 2, np.float32)
    np.testing.assert_array_equal(esmm.prune(b, "2:4", input_norms=norms)[0][:, 0], [0, 0, 1, 1] * 2)


def test_patterns(rng):
    a = (rng.random((50, 100)) < 0.05).astype(np.float32)
    p = esmm.pattern(a, 8)
    assert (p.rows, p.k, p.strip_rows, p.strips, p.words) == (50, 100, 8, 7, 2)
    bits = np.unpackbits(esmm.pattern_bits(p).view(np.uint8), axis=1, bitorder="little")[:, :100]
    want = np.array([a[i : i + 8].any(0) for i in range(0, 50, 8)])
    np.testing.assert_array_equal(bits, want)
    assert math.isclose(p.density, want.mean())
    np.testing.assert_array_equal(esmm.pattern_bits(p.coarsen(16)), esmm.pattern_bits(esmm.pattern(a, 16)))
    np.testing.assert_array_equal(
        esmm.pattern_bits(esmm.pattern(a, 8, columns=True)), esmm.pattern_bits(esmm.pattern(a.T, 8))
    )
    order, better = esmm.reorder(esmm.pattern(a, 1), 8)
    assert sorted(order) == list(range(50)) and better.density <= p.density
    np.testing.assert_array_equal(esmm.pattern_bits(esmm.pattern(a[order], 8)), esmm.pattern_bits(better))
    skipped = esmm.skip_stats(p, esmm.pattern(np.ones((100, 40), np.float32), 8, columns=True))
    assert math.isclose(skipped.joint_density, p.density) and math.isclose(skipped.dot_skipped, 1 - p.density)
    with pytest.raises(ValueError, match="12"):
        p.coarsen(12)
    with pytest.raises(ValueError, match="strip_rows is 0"):
        esmm.pattern(a, 0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(p)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(esmm.default_context())


def test_empty_patterns():
    for shape in ((0, 5), (5, 0), (0, 0)):
        p = esmm.pattern(np.zeros(shape, np.float32), 4)
        assert esmm.pattern_bits(p).shape == (p.strips, p.words) and p.density == 0
        assert esmm.inspect(np.zeros(shape, np.float32)).element_density == 0


def test_inspect(rng):
    x = (rng.random((70, 90)) < 0.1).astype(np.float32)
    x[5] = x[:, 7] = x[:, 8] = 0
    s = esmm.inspect(x)
    assert (s.rows, s.cols, s.dtype) == (70, 90, "float32") and math.isclose(s.element_density, (x != 0).mean())
    assert s.empty_rows == (~x.any(1)).sum() and s.empty_cols == (~x.any(0)).sum()
    for size, density in s.row_strips.items():
        want = np.mean([x[i : i + size].any(0) for i in range(0, 70, size)])
        assert math.isclose(density, want)


def test_files(rng, tmp_path):
    b = blocks(rng, 64, 64, 16, 0.3)
    for format in ("dense", "bsr:16"):
        w = esmm.prepare(b, format=format, use="large_m")
        path = tmp_path / "w.esmm"
        w.save(path)
        esmm.save(w, str(path))
        again = esmm.load(path)
        assert again.info == w.info
        np.testing.assert_array_equal(esmm.to_dense(again), b)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(esmm.FileFormatError) as e:
        esmm.load(path)
    assert e.value.status == esmm.Status.CHECKSUM
    path.write_bytes(bytes(data)[:100])
    with pytest.raises(ValueError):
        esmm.load(path)
    with pytest.raises(OSError, match="nowhere"):
        esmm.load(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        w.save(tmp_path / "nowhere" / "w")
    with pytest.raises(TypeError, match="weights is a ndarray"):
        esmm.save(b, path)


def test_paths_with_a_nul(rng, tmp_path):
    w = esmm.prepare(np.eye(8, dtype=np.float32))
    for call in (w.save, lambda path: esmm.save(w, path), esmm.load):
        with pytest.raises(ValueError, match="NUL"):
            call(str(tmp_path / "w.esmm\0.bak"))
    assert not list(tmp_path.iterdir())


def test_skip_stats_takes_patterns():
    with pytest.raises(TypeError, match="a is a ndarray.*esmm.pattern"):
        esmm.skip_stats(np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32))


def test_copies_and_pickles(rng):
    b = blocks(rng, 64, 64, 16, 0.3)
    w = esmm.prepare(b, format="bsr:16")
    assert copy.copy(w) is w and copy.deepcopy({"w": w})["w"] is w
    again = pickle.loads(pickle.dumps(w))
    assert again is not w and again.info == w.info and again.device == w.device
    np.testing.assert_array_equal(esmm.to_dense(again), b)
    w.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(w)
    e = pickle.loads(pickle.dumps(esmm.ShapeError("text")))
    assert type(e) is esmm.ShapeError and e.status == esmm.Status.SHAPE and str(e) == "text"


def test_generators():
    a = esmm.generate("random", 200, 300, density=0.2, seed=3, integers=True)
    np.testing.assert_array_equal(a, esmm.generate("random", 200, 300, density=0.2, seed=3, integers=True))
    assert 0.15 < (a != 0).mean() < 0.25 and (a == np.round(a)).all()
    assert (esmm.generate("dense", 20, 30) != 0).all()
    assert (esmm.generate("pattern", 8, 16, pattern="10000000") != 0).mean() == 1 / 8
    assert esmm.generate("early", 64, 256).shape == (64, 256)
    assert esmm.generate("dense", 8, 8, dtype="float16").dtype == np.float16
    with pytest.raises(ValueError, match="kind is 'gauss'"):
        esmm.generate("gauss", 2, 2)
    with pytest.raises(ValueError, match="1.5"):
        esmm.generate("random", 2, 2, density=1.5)
    with pytest.raises(ValueError, match="rows is -1"):
        esmm.generate("random", -1, 2)


def test_what_is_remembered(rng):
    w = esmm.prepare(rng.standard_normal((256, 256)).astype(np.float32))
    esmm.expect(w, 64, 0.25, density=0.1)
    r = esmm.recall(w, 64)
    assert r.known and r.strip_density_a == 0.25 and r.density_a == 0.1
    with pytest.raises(ValueError, match="2"):
        esmm.expect(w, 64, 2)
    with pytest.raises(ValueError, match="nan"):
        esmm.expect(w, 64, float("nan"))


def test_info_and_kernels():
    info = esmm.info()
    assert info.version == esmm.__version__ and len(info.source_id) == 16 and info.threads >= 1
    assert str(info).startswith("version")
    names = [k.name for k in esmm.kernels()]
    assert names == sorted(names) and "bsr" in {f for k in esmm.kernels() for f in k.formats}


def test_tune(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ctx = esmm.Context("cpu", threads=1, tuning_cache=False)
    assert not esmm.info(context=ctx).tuned

    class Stop(Exception):
        pass

    def progress(done, total):
        assert 0 <= done <= total
        raise Stop

    with pytest.raises(Stop):  # the measurement goes to its end, then the exception is raised
        esmm.tune(save=False, progress=progress, context=ctx)
    assert esmm.info(context=ctx).tuned
