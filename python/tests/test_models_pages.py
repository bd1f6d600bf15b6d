"""What docs/python-models.md shows runs, and so does examples/relu2_gpt.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def blocks():
    with open(os.path.join(ROOT, "docs", "python-models.md")) as file:
        return re.findall(r"^```python\n(.*?)^```", file.read(), flags=re.S | re.M)


def run(*words, cwd):
    import esmm

    package = os.path.dirname(os.path.dirname(os.path.abspath(esmm.__file__)))
    path = [package] + ([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize("number", range(4))
def test_page(number, tmp_path):
    block = blocks()[number]
    for needed in set(re.findall(r"import (torch|jax)\b|from esmm\.(torch|jax)", block)):
        name = needed[0] or needed[1]
        pytest.importorskip(name, reason=f"{name} is not installed")
    if "esmm.torch" in block:
        import need_torch  # noqa: F401
    status, text = run("-c", block, cwd=tmp_path)
    assert status == 0, text


def test_the_page_has_as_many_examples():
    assert len(blocks()) == 4


def test_relu2_gpt(tmp_path):
    import need_torch  # noqa: F401

    program = os.path.join(ROOT, "examples", "relu2_gpt.py")
    words = ["--seconds", "1", "--device", "cpu", "--threads", "1", "--width", "64", "--layers", "2", "--context", "32"]
    status, text = run(program, *words, "--batch", "4", "--tokens", "8", "--out", "picture", cwd=tmp_path)
    assert status == 0, text
    assert re.search(r"^loss, nats per byte +\d+\.\d+ +\d+\.\d+$", text, re.M)
    before, after = map(float, re.search(r"^loss, nats per byte +(\S+) +(\S+)$", text, re.M).groups())
    assert abs(before - after) < 1e-3 and before < 6
    assert re.search(r"^decode, tokens/s +\d+ +\d+ +\d", text, re.M) and "blocks.1.mlp" in text
    if "matplotlib is not installed" not in text:
        with open(tmp_path / "picture.png", "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    status, text = run(program, "--tokens", "500", cwd=tmp_path)
    assert status == 2 and "--tokens must be at least 5" in text
