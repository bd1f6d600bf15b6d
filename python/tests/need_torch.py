"""Imported by what needs esmm.torch: a skip where it cannot be. Where it could, and fails, tests fail."""

import pytest
from esmm._build import BuildError, compiler

torch = pytest.importorskip("torch", reason="torch is not installed")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    pytest.skip(f"torch {torch.__version__} is older than 2.10", allow_module_level=True)
try:
    compiler()
except BuildError as e:
    pytest.skip(str(e), allow_module_level=True)
