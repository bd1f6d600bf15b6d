"""Tests of the Python package. What does not name a device runs on the CPU.

With ESMM_TAP=file the results are also written there in TAP, which tests/run_tests.sh counts.
"""

import os

os.environ["ESMM_DEVICE"] = "cpu"
for name in ("ESMM_FORCE", "ESMM_THREADS", "ESMM_REMEMBER"):
    os.environ.pop(name, None)
os.environ["ESMM_DETERMINISTIC"] = "1"  # tests repeat a call and want the same bits

import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def rng():
    return np.random.default_rng(7)


_lines = []


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return  # set-up and tear-down count where they fail or skip
    number = len(_lines) + 1
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
        _lines.append(f"ok {number} - {report.nodeid} # SKIP {reason.replace('Skipped: ', '')}")
    elif report.outcome == "passed":
        _lines.append(f"ok {number} - {report.nodeid}")
    else:
        text = "\n".join("#   " + line for line in report.longreprtext.splitlines()[-40:])
        _lines.append(f"not ok {number} - {report.nodeid}\n{text}")


def pytest_collectreport(report):
    if report.outcome == "skipped":  # importorskip at the top of a file
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "not collected"
        _lines.append(f"ok {len(_lines) + 1} - {report.nodeid} # SKIP {reason.replace('Skipped: ', '')}")
    elif report.outcome == "failed":
        text = "\n".join("#   " + line for line in str(report.longrepr).splitlines()[-40:])
        _lines.append(f"not ok {len(_lines) + 1} - {report.nodeid} cannot be collected\n{text}")


def pytest_sessionfinish(session):
    path = os.environ.get("ESMM_TAP")
    if path:
        with open(path, "w") as f:
            f.write("\n".join(_lines) + f"\n1..{len(_lines)}\n")
