"""A GPU's side of the package where there is no GPU: fake_gpu.py on the tests' own driver, in a process of its own."""

import os
import subprocess
import sys

import pytest
from esmm import _lib


def test_on_the_tests_own_driver():
    folder = os.path.join(os.path.dirname(os.path.abspath(_lib.library_path())), "tests", "fake")
    if not os.path.exists(os.path.join(folder, "libcuda.so.1")):
        pytest.skip("the tests' own driver is not built (make test-programs)")
    environment = {**os.environ, "LD_LIBRARY_PATH": folder, "ESMM_DEVICE": "cpu", "ESMM_LIBRARY": _lib.library_path()}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_gpu.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout.decode()
