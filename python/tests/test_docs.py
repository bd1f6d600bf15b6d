"""What the documentation shows runs: the docstrings' examples, and each ```python block of the README and the docs."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys

import esmm
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODULES = sorted(m.name for m in pkgutil.iter_modules(esmm.__path__) if not m.ispkg and m.name not in ("__main__",))


@pytest.mark.parametrize("name", ["esmm"] + ["esmm." + m for m in MODULES if m.startswith("_")])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def code_blocks():
    for page in ("README.md", "docs/python.md"):
        with open(os.path.join(ROOT, page)) as f:
            text = f.read()
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)):
            yield pytest.param(block, id=f"{page}-{i + 1}")


@pytest.mark.parametrize("block", list(code_blocks()))
def test_pages(block, tmp_path):
    for needed in re.findall(r"import (torch|jax|scipy)", block):
        pytest.importorskip(needed)
    if "esmm.torch" in block:
        import need_torch  # noqa: F401
    package = os.path.dirname(os.path.dirname(os.path.abspath(esmm.__file__)))
    path = [package] + ([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout.decode()


def test_the_pages_have_code():
    assert len(list(code_blocks())) >= 4


def test_all_public_names_are_documented():
    for name in esmm.__all__:
        assert getattr(esmm, name).__doc__, name
    with open(os.path.join(ROOT, "docs", "python.md")) as f:
        text = f.read()
    missing = [n for n in esmm.__all__ if not re.search(rf"\b{n}\b", text) and n[0].islower()]
    assert not missing


def test_types():
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", os.path.join(ROOT, "pyproject.toml"), "--cache-dir", os.devnull]
        + [os.path.join(ROOT, "python", "esmm")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout.decode()


def command(cwd, *words):
    """`python -m esmm ...`, started."""
    from esmm import _command

    try:
        program = _command.program()
    except SystemExit:
        pytest.skip("the command is not built")
    if shutil.which(program) is None:
        pytest.skip("the command is not built")
    package = os.path.dirname(os.path.dirname(os.path.abspath(esmm.__file__)))
    return subprocess.Popen(
        [sys.executable, "-m", "esmm", *words],
        env={**os.environ, "PYTHONPATH": package},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_command_runs(tmp_path):
    running = command(tmp_path, "--version")
    output, _ = running.communicate()
    assert running.returncode == 0 and output.startswith(b"esmm ")


def test_the_command_ends_quietly_with_its_reader(tmp_path):
    running = command(tmp_path, "list")
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait() == -signal.SIGPIPE
    running.stderr.close()
