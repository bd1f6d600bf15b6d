#!/bin/sh
# run_tests.sh: all of `make test`. Sets up what is missing, builds with gcc and clang (warnings are errors) and with
# sanitizers, runs the test programs of each build and the shell tests; closes with one line
# 'N passed, N failed, N skipped' over all of them. Exit status 0 only if nothing failed.
#
#   run_tests.sh         make test
#   run_tests.sh long    make test-long: the same with long tables, every program in every build, and clang-tidy
#
# Builds and tests run beside each other, as many as there are cores; results are printed in one order. Logs stay in
# $BUILD/test/log. What cannot run here (no clang, ...) is skipped by name, never silently.
set -u
cd "$(dirname "$0")/.." || exit 1

LONG=${1:-}
BUILD=${BUILD:-build}
MAKE=${MAKE:-make}
mkdir -p "$BUILD/test" || exit 1
OUT=$(cd "$BUILD/test" && pwd)
rm -rf "$OUT/log" "$OUT/work"
mkdir -p "$OUT/log" "$OUT/work"
JOBS=$(nproc 2>/dev/null || echo 2)
export LOG="$OUT/log" FATBIN_DIR="${OUT%/*}/fatbin" # GPU kernels do not depend on the host's compiler: one set for all builds

# The caller's settings must not change what is tested.
unset MAKEFLAGS MFLAGS MAKELEVEL ESMM_FORCE ESMM_THREADS ESMM_DEVICE ESMM_DETERMINISTIC ESMM_TEST_CASE ESMM_TEST_CASES ESMM_TEST_DEVICE
export MAKE CMOCKA_MESSAGE_OUTPUT=TAP LC_ALL=C
# Crashes are the sanitizer's to report, not cmocka's to catch.
export ASAN_OPTIONS=allocator_may_return_null=1:handle_segv=2:handle_sigbus=2:handle_sigfpe=2:handle_sigill=2:handle_abort=2
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=0:exitcode=66

passed=0 failed=0 skipped=0 began=$(date +%s)
failed_names=

# ---- the plan: a makefile of what is to run, and the order in which it is reported ----

PLAN=$OUT/work/plan.mk REPORT=$OUT/work/report.sh
: >"$PLAN"
: >"$REPORT"
# What measures time or load, or needs both cores, runs after all else and alone.
ALONE='test_tune test_pool'
beside= alone=

section() { echo "show_section '$1'" >>"$REPORT"; }
skip() { echo "show_skip '$1' '$2'" >>"$REPORT"; }
file_of() { echo "$1" | tr ' /' '__'; }

unit() { # NAME BUILD COMMAND: as unit.sh has it
  printf '%s:' "$LOG/$1.done"
  [ "$2" = - ] || printf " $LOG/build_%s.done" "$2"
  printf '\n\t@sh tests/support/unit.sh %s\n' "$*"
} >>"$PLAN"

# build NAME BUILD TARGETS AND VARIABLES: one configuration in a directory of its own, after another that compiles the
# GPU kernels; a test.
build() {
  build_name=$1 build_after=$2
  shift 2
  unit "build_$build_name" "$build_after" "\$(MAKE) --no-print-directory BUILD=$OUT/$build_name WERROR=1 $*"
  beside="$beside $LOG/build_$build_name.done"
  echo "show_build $build_name" >>"$REPORT"
}

# tap NAME BUILD COMMAND: something that prints TAP.
tap() {
  tap_file=$(file_of "$1")
  case " $ALONE " in
  *" ${1##* } "*) alone="$alone $LOG/$tap_file.done" ;;
  *) beside="$beside $LOG/$tap_file.done" ;;
  esac
  unit "$tap_file" "$2" "$3"
  echo "show_tap '$1'" >>"$REPORT"
}

# programs BUILD VARIABLES [NAME...]: its test programs and its fuzz corpora, or those named; never those of $without.
without=
programs() {
  programs_of=$1 programs_with=$2
  shift 2
  [ $# != 0 ] || set -- $(ls tests/test_*.c tests/fuzz/fuzz_*.c | sed 's|.*/||; s|\.c$||; s|^fuzz_|replay_|') $tiles
  for program; do
    case " $without " in *" $program "*) continue ;; esac
    case $program in
    replay_*) tap "$programs_of $program" "$programs_of" "$OUT/$programs_of/tests/$program tests/fuzz/corpus/${program#replay_}" ;;
    *) tap "$programs_of $program" "$programs_of" "env ESMM_DEVICE=cpu $programs_with $OUT/$programs_of/tests/$program" ;; # on a GPU: make gpu-check
    esac
  done
}

shell_test() { # NAME [BUILD]: tests/test_NAME.sh, on the gcc build unless another is named
  shell_name=${2:+$2 }$1
  mkdir -p "$OUT/work/$(file_of "$shell_name")"
  shell_brief= # of another build than the first, what takes longest is make test-long's
  [ -n "$LONG" ] || shell_brief=${2:-}
  tap "$shell_name" "${2:-gcc}" "env BRIEF=$shell_brief TREE=$OUT/${2:-gcc} WORK=$OUT/work/$(file_of "$shell_name") sh tests/test_$1.sh"
}

works() { # COMPILER FLAGS...
  works_compiler=$1
  shift
  printf 'int main(void) { return 0; }\n' | "$works_compiler" -x c - -o "$OUT/work/works" "$@" >/dev/null 2>&1 &&
    "$OUT/work/works" >/dev/null 2>&1
}

# ---- the report ----

show_section() { printf '\n== %s (%d s)\n' "$1" "$(($(date +%s) - began))"; }
show_skip() {
  skipped=$((skipped + 1))
  printf '  %-34s skipped: %s\n' "$1" "$2"
}

# done_of FILE: waits for a unit; its status and seconds.
done_of() {
  until [ -e "$LOG/$1.done" ]; do
    [ ! -e "$OUT/work/ended" ] || [ -e "$LOG/$1.done" ] || { echo 'none 0' && return; }
    sleep 0.2
  done
  cat "$LOG/$1.done"
}

# show_tap NAME: counts its tests, and shows what failed. A program that stops early, or fails without saying in which
# test, counts as one more failure.
show_tap() {
  tap_name=$1 tap_log=$LOG/$(file_of "$1").log
  set -- $(done_of "$(file_of "$1")")
  [ "$1" != unbuilt ] || return 0
  : >>"$tap_log"
  tap_status=$1 tap_seconds=$2
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
  printf ' (%d s)\n' "$tap_seconds"
  grep '# *SKIP' "$tap_log" | sed 's/^[a-z ]*[0-9]* *-* */      skipped: /'
  if [ $(($2 + tap_extra)) != 0 ]; then
    [ -z "$tap_why" ] || echo "      $tap_why"
    grep -A 12 -E '^(not ok|ERROR: )' "$tap_log" | grep -v '^ok' | cut -c1-400 | head -n 60 | sed 's/^/      /'
    [ -z "$tap_why" ] || tail -n 30 "$tap_log" | cut -c1-400 | sed 's/^/      | /'
    echo "      all of it: $tap_log"
    failed_names="$failed_names '$tap_name'"
  fi
}

show_build() { # NAME
  build_name=$1 build_log=$LOG/build_$1.log
  set -- $(done_of "build_$1")
  if [ "$1" = 0 ]; then
    passed=$((passed + 1))
    printf '  %-34s built (%d s)\n' "$build_name" "$2"
    return
  fi
  failed=$((failed + 1))
  failed_names="$failed_names 'build $build_name'"
  printf '  %-34s FAILED to build\n' "$build_name"
  [ ! -e "$build_log" ] || grep -E 'error|warning|undefined|\*\*\*' "$build_log" | head -n 20 | sed 's/^/      /'
  echo "      all of it: $build_log"
}

# ---- what is tested ----

echo '== set up (0 s)'
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
tiles= # on AMX tiles in plain C, as tests.mk builds them
[ "$(gcc -dumpmachine | cut -d- -f1)" != x86_64 ] || tiles='test_tiles_kernels test_tiles_values'

section 'gcc'
build gcc - CC=gcc all $TEST_TARGETS
[ -z "$TEST_TARGETS" ] || programs gcc ''
section 'GPU kernels'
shell_test fatbins
section 'command, installation, documentation'
for name in build cli cli_files report install readme figures record ladder examples constants; do shell_test $name; done
section 'Python'
shell_test python

section 'style'
mkdir -p "$OUT/work/style"
tap style - "env LONG=$LONG WORK=$OUT/work/style sh tests/test_style.sh"

# From here on a part of the tables is enough; for make test a smaller one.
if [ -n "$LONG" ]; then cases=1500 raced_cases=100; else cases=300 raced_cases=30; fi
section 'clang'
if ! works clang; then
  skip 'clang' 'clang is not installed'
elif [ -n "$LONG" ]; then
  build clang gcc CC=clang all $TEST_TARGETS
  [ -z "$TEST_TARGETS" ] || programs clang "ESMM_TEST_CASES=$cases"
else
  # Warnings alone; what the compiler may change is run under ThreadSanitizer, which is clang's, too.
  build clang_warnings - CC=clang EXTRA_CFLAGS=-fsyntax-only objects
fi

section 'portable C, no GPU kernels, no jansson or libzip'
build portable - CC=gcc CFLAGS="'-O1 -g'" ARCH=portable CUDA=0 JANSSON=0 LIBZIP=0 all $TEST_TARGETS
tiles=
[ -z "$TEST_TARGETS" ] || programs portable "ESMM_TEST_CASES=$cases"
shell_test cli portable

section 'AddressSanitizer and UndefinedBehaviorSanitizer'
if [ -z "$TEST_TARGETS" ]; then
  skip 'asan' 'cmocka is not installed'
elif works gcc -fsanitize=address,undefined; then
  # gcc's own checks confuse its warnings: those are errors in the builds above.
  build asan gcc CC=gcc CFLAGS="'-O1 -g1'" SANITIZE=address,undefined WERROR=0 $TEST_TARGETS
  # Without test_accuracy: the table runs the same kernels. LeakSanitizer dies of threads that have called oneDNN, whose
  # products the other builds have.
  without='test_accuracy test_onednn'
  [ -n "$LONG" ] || without="$without test_hashes test_epilogue_options test_choose" # whose code others run
  programs asan "ESMM_TEST_CASES=$cases ESMM_ONEDNN=off"
  without=
else
  skip 'asan' 'gcc has no sanitizers here'
fi

section 'ThreadSanitizer'
if [ -z "$TEST_TARGETS" ]; then
  skip 'tsan' 'cmocka is not installed'
elif works clang -fsanitize=thread; then
  raced='test_pool test_threads test_kernels test_small test_ffn test_choose' # what starts threads,
  raced="$raced test_hashes" # and what another compiler may change
  [ -z "$LONG" ] || raced="$raced test_epilogue test_cuda_faults"
  build tsan gcc CC=clang CFLAGS="'-O1 -g1'" SANITIZE=thread $(printf "${OUT#"$PWD"/}/tsan/tests/%s " $raced) \
    "${OUT#"$PWD"/}/tsan/libesmm.so" "${OUT#"$PWD"/}/tsan/tests/fake/libcuda.so.1"
  # shellcheck disable=SC2086 # names without spaces
  programs tsan "ESMM_TEST_CASES=$raced_cases" $raced
else
  skip 'tsan' 'clang with ThreadSanitizer is not installed'
fi

# ---- run and report ----

printf 'beside:%s\nalone:%s\n' "$beside" "$alone" >>"$PLAN"
{
  . "$REPORT"
  printf '\n'
  [ -z "$failed_names" ] || echo "failed:$failed_names"
  echo "GPU record: $("$MAKE" -s --no-print-directory BUILD="$OUT/gcc" gpu-record-status)"
  echo "took $(($(date +%s) - began)) s"
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" = 0 ]
} &
reporter=$!
trap 'kill $reporter 2>/dev/null; exit 130' INT TERM
"$MAKE" -k -j"$JOBS" -f "$PLAN" beside >"$LOG/plan.log" 2>&1
"$MAKE" -k -j1 -f "$PLAN" alone >>"$LOG/plan.log" 2>&1
: >"$OUT/work/ended"
wait $reporter
