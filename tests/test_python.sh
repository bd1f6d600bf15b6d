#!/bin/sh
# test_python.sh: the Python package. A wheel is built with the build's own objects, installed in a fresh environment,
# used, installed again and removed; then pytest runs python/tests on the build's library, and its results are counted
# one by one. $PYTHON names the Python, python3 unless set. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

python=${PYTHON:-python3}
if ! have "$python" || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
  skip 'the Python package' "$python is not Python 3.9 or later"
  exit 0
fi

# ---- the wheel ----

# What the build is made with, so that nothing is compiled again. pip must find its build requirements where it is: none
# from Python 3.11 on, before that tomli.
pip_builds() { env CC=gcc WERROR=1 BUILD="$TREE" "$python" -m pip "$@"; }
make_wheel() {
  pip_builds wheel --no-deps $isolation --wheel-dir "$WORK/wheel" . && ls -l "$WORK/wheel" &&
    [ -f "$WORK/wheel/esmm-$version-py3-none-linux_$(uname -m).whl" ]
}
small() { [ "$(wc -c <"$wheel")" -lt 15000000 ] || { ls -l "$wheel"; return 1; }; }
same_bytes() { cp "$wheel" "$WORK/first.whl" && make_wheel && cmp "$wheel" "$WORK/first.whl"; }
clean_tree() { # pip leaves nothing in the source tree but the build
  ! git status --porcelain --ignored 2>/dev/null | grep -E 'egg-info|\.whl|dist/'
}
make_venv() { # a fresh one that sees numpy, and nothing else, of this Python
  "$python" -m venv "$WORK/venv" && mkdir "$WORK/numpy" || return 1
  packages=$("$WORK/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') || return 1
  from=$("$python" -c 'import numpy, os; print(os.path.dirname(os.path.dirname(numpy.__file__)))') || return 1
  for part in "$from/numpy" "$from/numpy.libs"; do
    [ ! -e "$part" ] || ln -s "$part" "$WORK/numpy/" || return 1
  done
  echo "$WORK/numpy" >"$packages/numpy.pth"
}
files() { find "$WORK/venv" -not -path '*/pip/*' -not -path '*/numpy/*' | sort; }
install_wheel() { "$WORK/venv/bin/python" -m pip install --no-deps --no-index --force-reinstall "$wheel"; }
five_lines() { # the first of the README, by the installed package alone
  awk '/^```python/ { inside = !seen++; next } /^```/ { inside = 0 } inside' README.md >"$WORK/five.py"
  [ -s "$WORK/five.py" ] && (cd "$WORK" && env -u PYTHONPATH -u ESMM_LIBRARY ESMM_DEVICE=cpu venv/bin/python five.py) |
    tee "$WORK/five.out" && grep -q 'skipped [0-9]*%' "$WORK/five.out"
}
own_library() {
  (cd "$WORK" && env -u PYTHONPATH -u ESMM_LIBRARY venv/bin/python -c '
import esmm, os, sys
assert esmm.info().library.startswith(os.path.dirname(esmm.__file__)) and esmm.__file__.startswith(sys.prefix)
assert os.path.exists(os.path.join(os.path.dirname(esmm.__file__), "include", "esmm.h"))')
}
command_runs() { (cd "$WORK" && env -u PYTHONPATH venv/bin/esmm --version) | grep -q -F "$version"; }
removed() {
  install_wheel && "$WORK/venv/bin/python" -m pip uninstall --yes esmm && files >"$WORK/after" &&
    diff "$WORK/before" "$WORK/after"
}

version=$(sed -n 's/^.define ESMM_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/esmm.h | paste -sd.)
wheel=$WORK/wheel/esmm-$version-py3-none-linux_$(uname -m).whl
isolation=
if ! "$python" -c 'import tomllib' 2>/dev/null; then isolation=--no-build-isolation; fi
if ! "$python" -m pip --version >/dev/null 2>&1; then
  skip 'a wheel' 'pip is not installed'
elif [ -n "$isolation" ] && ! "$python" -c 'import tomli' 2>/dev/null; then
  skip 'a wheel' 'Python below 3.11 needs tomli to build one'
else
  check 'pip wheel builds one wheel for this platform' make_wheel
  check 'the wheel has less than 15 MB' small
  check 'the same sources give the same wheel' same_bytes
  check 'pip leaves nothing in the source tree' clean_tree
  if ! "$python" -c 'import numpy, ensurepip, venv' 2>/dev/null; then
    skip 'the wheel in a fresh environment' 'numpy or the venv module is not installed'
  else
    check 'a fresh environment' make_venv
    files >"$WORK/before"
    check 'the wheel can be installed' install_wheel
    check "the README's lines run" five_lines
    check 'it uses the library that it brings' own_library
    check 'esmm is on the PATH' command_runs
    check 'installed twice and removed, nothing is left' removed
  fi
fi

# ---- pytest ----

if ! "$python" -c 'import numpy, pytest' 2>/dev/null; then
  skip 'python/tests' 'numpy or pytest is not installed (pip install numpy pytest)'
else
  ESMM_TAP=$WORK/tap ESMM_LIBRARY=$TREE/libesmm.so PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest -q -p no:cacheprovider python/tests >"$WORK/pytest.log" 2>&1
  status=$?
  if [ "$status" -gt 1 ] || ! grep -q '^1\.\.' "$WORK/tap" 2>/dev/null; then
    tail -n 40 "$WORK/pytest.log" | not_ok "pytest ends with status $status"
  fi
  if [ -f "$WORK/tap" ]; then
    cat "$WORK/tap"
    failures=$((failures + $(grep -c '^not ok' "$WORK/tap")))
  fi
fi
finish
