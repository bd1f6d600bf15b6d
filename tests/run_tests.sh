#!/bin/sh
# run_tests.sh: all of `make test`. Sets up what is missing, builds with gcc and clang (warnings are errors) and with
# sanitizers, runs every test program in each build, then the shell tests; closes with one line
# 'N passed, N failed, N skipped' over all of them. Exit status 0 only if nothing failed.
#
# Logs stay in $BUILD/test/log. What cannot run here (no clang, ...) is skipped by name, never silently.
set -u
cd "$(dirname "$0")/.." || exit 1

BUILD=${BUILD:-build}
MAKE=${MAKE:-make}
mkdir -p "$BUILD/test" || exit 1
OUT=$(cd "$BUILD/test" && pwd)
rm -rf "$OUT/log" "$OUT/work"
mkdir -p "$OUT/log" "$OUT/work" "$OUT/cache"
JOBS=$(nproc 2>/dev/null || echo 2)
export FATBIN_DIR="${OUT%/*}/fatbin" # GPU kernels do not depend on the host's compiler: one set for all builds

# The caller's settings must not change what is tested.
unset MAKEFLAGS MFLAGS MAKELEVEL ESMM_FORCE ESMM_THREADS ESMM_DEVICE ESMM_TEST_CASE ESMM_TEST_CASES ESMM_TEST_DEVICE
export MAKE XDG_CACHE_HOME="$OUT/cache" CMOCKA_MESSAGE_OUTPUT=TAP LC_ALL=C
# Crashes are the sanitizer's to report, not cmocka's to catch.
export ASAN_OPTIONS=allocator_may_return_null=1:handle_segv=2:handle_sigbus=2:handle_sigfpe=2:handle_sigill=2:handle_abort=2
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=0:exitcode=66

passed=0 failed=0 skipped=0 began=$(date +%s)
failed_names=

section() { printf '\n== %s (%d s)\n' "$1" "$(($(date +%s) - began))"; }
skip() {
  skipped=$((skipped + 1))
  printf '  %-34s skipped: %s\n' "$1" "$2"
}

# tap NAME COMMAND...: runs something that prints TAP, counts its tests, and shows what failed. A program that stops
# early, or fails without saying in which test, counts as one more failure.
tap() {
  tap_name=$1
  shift
  tap_log=$OUT/log/$(echo "$tap_name" | tr ' /' '__').log
  tap_began=$(date +%s)
  timeout 600 "$@" >"$tap_log" 2>&1 </dev/null
  tap_status=$?
  set -- $(awk '/^(not )?ok/ { if (/# *SKIP/) s++; else if (/^not/) f++; else p++ }
                /^1\.\.[0-9]+$/ { plan += substr($0, 4) }
                END { printf "%d %d %d %d", p, f, s, plan }' "$tap_log")
  tap_extra=0 tap_why=
  if [ $(($1 + $2 + $3)) -lt "$4" ]; then
    tap_extra=1 tap_why="stopped after $(($1 + $2 + $3)) of $4 tests, status $tap_status"
  elif [ "$tap_status" != 0 ] && [ "$2" = 0 ]; then
    tap_extra=1 tap_why="exit status $tap_status"
  elif [ $(($1 + $2 + $3)) = 0 ]; then
    tap_extra=1 tap_why='ran no test'
  fi
  passed=$((passed + $1)) failed=$((failed + $2 + tap_extra)) skipped=$((skipped + $3))
  printf '  %-34s %3d passed' "$tap_name" "$1"
  [ $(($2 + tap_extra)) = 0 ] || printf ', %d FAILED' $(($2 + tap_extra))
  [ "$3" = 0 ] || printf ', %d skipped' "$3"
  printf ' (%d s)\n' "$(($(date +%s) - tap_began))"
  grep '# *SKIP' "$tap_log" | sed 's/^[a-z ]*[0-9]* *-* */      skipped: /'
  if [ $(($2 + tap_extra)) != 0 ]; then
    [ -z "$tap_why" ] || echo "      $tap_why"
    grep -A 12 -E '^(not ok|ERROR: )' "$tap_log" | grep -v '^ok' | cut -c1-400 | head -n 60 | sed 's/^/      /'
    [ -z "$tap_why" ] || tail -n 30 "$tap_log" | cut -c1-400 | sed 's/^/      | /'
    echo "      all of it: $tap_log"
    failed_names="$failed_names '$tap_name'"
  fi
}

# build NAME VARIABLE=VALUE...: one configuration in a directory of its own; counts as a test.
build() {
  build_name=$1
  shift
  build_log=$OUT/log/build_$build_name.log
  build_began=$(date +%s)
  if "$MAKE" --no-print-directory -j"$JOBS" BUILD="$OUT/$build_name" WERROR=1 "$@" >"$build_log" 2>&1; then
    passed=$((passed + 1))
    printf '  %-34s built (%d s)\n' "$build_name" "$(($(date +%s) - build_began))"
    return 0
  fi
  failed=$((failed + 1))
  failed_names="$failed_names 'build $build_name'"
  printf '  %-34s FAILED to build\n' "$build_name"
  grep -E 'error|warning|undefined|\*\*\*' "$build_log" | head -n 20 | sed 's/^/      /'
  echo "      all of it: $build_log"
  return 1
}

# programs NAME [PATTERN]: every test program of a build but those of $without, then the fuzz corpora.
without=
programs() {
  for program in "$OUT/$1"/tests/test_${2:-*} "$OUT/$1"/tests/replay_${2:-*}; do
    [ -x "$program" ] || continue
    short=${program##*/}
    case " $without " in *" $short "*) continue ;; esac
    case $short in
    replay_*) tap "$1 $short" "$program" "tests/fuzz/corpus/${short#replay_}" ;;
    *) tap "$1 $short" env ESMM_DEVICE=cpu "$program" ;; # on a GPU: make gpu-check
    esac
  done
}

shell_test() { # NAME: tests/test_NAME.sh on the gcc build
  mkdir -p "$OUT/work/$1"
  tap "$1" env TREE="$OUT/gcc" WORK="$OUT/work/$1" sh "tests/test_$1.sh"
}

works() { # COMPILER FLAGS...
  works_compiler=$1
  shift
  printf 'int main(void) { return 0; }\n' | "$works_compiler" -x c - -o "$OUT/work/works" "$@" >/dev/null 2>&1 &&
    "$OUT/work/works" >/dev/null 2>&1
}

section 'set up'
sh scripts/setup.sh test
TEST_TARGETS=test-programs
if ! printf '#include <setjmp.h>\n#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <cmocka.h>\n' |
  gcc -fsyntax-only -x c - 2>/dev/null; then
  # Without cmocka next to nothing is tested: only who said that nothing may be installed wants to go on.
  if [ "${ESMM_SETUP:-yes}" != no ]; then
    echo 'FAILED: cmocka is not installed, so no test program can be built; ESMM_SETUP=no goes on without them'
    exit 1
  fi
  skip 'all test programs' 'cmocka is not installed'
  TEST_TARGETS=
fi

section 'gcc'
if build gcc CC=gcc all $TEST_TARGETS; then
  programs gcc
  section 'GPU kernels'
  shell_test fatbins
  section 'command, installation, documentation'
  shell_test build
  shell_test cli
  shell_test cli_files
  shell_test report
  shell_test install
  shell_test readme
  shell_test figures
  shell_test record
  shell_test ladder
  shell_test examples
  section 'Python'
  shell_test python
fi

section 'style'
shell_test style

export ESMM_TEST_CASES=1500 # from here on a part of the table is enough
section 'clang'
if ! works clang; then
  skip 'clang' 'clang is not installed'
else
  build clang CC=clang all $TEST_TARGETS && programs clang
fi

section 'portable C, no GPU kernels, no jansson or libzip'
build portable CC=gcc ARCH=portable CUDA=0 JANSSON=0 LIBZIP=0 all $TEST_TARGETS && programs portable

section 'AddressSanitizer and UndefinedBehaviorSanitizer'
if [ -z "$TEST_TARGETS" ]; then
  skip 'asan' 'cmocka is not installed'
elif works gcc -fsanitize=address,undefined; then
  # gcc's own checks confuse its warnings: those were errors in the builds above.
  # Without test_accuracy: the table runs the same kernels. LeakSanitizer dies of threads that have called oneDNN, whose
  # products the other builds have.
  export ESMM_ONEDNN=off
  build asan CC=gcc CFLAGS='-O1 -g' SANITIZE=address,undefined WERROR=0 $TEST_TARGETS &&
    without='test_accuracy test_onednn' && programs asan
  without=
  unset ESMM_ONEDNN
else
  skip 'asan' 'gcc has no sanitizers here'
fi

export ESMM_TEST_CASES=100
section 'ThreadSanitizer'
if [ -z "$TEST_TARGETS" ]; then
  skip 'tsan' 'cmocka is not installed'
elif works clang -fsanitize=thread; then
  raced="pool threads kernels small epilogue cuda_faults ffn" # what starts threads; no other program is built
  # shellcheck disable=SC2086 # names without spaces
  if build tsan CC=clang CFLAGS='-O1 -g' SANITIZE=thread $(printf "${OUT#"$PWD"/}/tsan/tests/test_%s " $raced) \
    "${OUT#"$PWD"/}"/tsan/libesmm.so "${OUT#"$PWD"/}/tsan/tests/fake/libcuda.so.1"; then
    for name in $raced; do programs tsan "$name"; done
  fi
else
  skip 'tsan' 'clang with ThreadSanitizer is not installed'
fi

printf '\n'
[ -z "$failed_names" ] || echo "failed:$failed_names"
echo "GPU record: $("$MAKE" -s --no-print-directory BUILD="$OUT/gcc" gpu-record-status)"
echo "took $(($(date +%s) - began)) s"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
