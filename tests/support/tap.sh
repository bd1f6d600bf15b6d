# tap.sh: what the shell tests share; sourced, with the repository as working directory.
#
# Results are printed as TAP lines, which run_tests.sh counts: 'ok - name', 'not ok - name', 'ok - name # SKIP why'.
# TREE is the build that is tested, WORK an empty directory of the test's own.

failures=0
ok() { echo "ok - $1"; }
skip() { echo "ok - $1 # SKIP $2"; }
not_ok() { # NAME, with the reason on stdin
  echo "not ok - $1"
  sed 's/^/# /'
  failures=$((failures + 1))
}
# check NAME COMMAND...: the command succeeds; what it says is shown only if it does not.
check() {
  check_name=$1
  shift
  if "$@" >"$WORK/check.out" 2>&1; then ok "$check_name"; else not_ok "$check_name" <"$WORK/check.out"; fi
}
have() { command -v "$1" >/dev/null 2>&1; }
finish() { [ "$failures" = 0 ]; }
