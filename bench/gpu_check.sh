#!/bin/sh
# gpu_check.sh: everything that needs a GPU, in one command of a quarter of an hour on an H200: `make gpu-check`. Stages
# can be run one by one; each takes less than ten minutes.
#
#   tests      the test programs on the GPU: the whole table of kernels, accuracy, values, threads, streams, graphs; the
#              command's own checks
#   sanitizer  compute-sanitizer memcheck and racecheck on a reduced table
#   record     the benchmark of record, bench/gpu_record.sh
#
# A stage that passes leaves its result in $BUILD/gpu-check, marked with the sources it was built from. When all three
# are there for the same sources, bench/results/<gpu>/ gets gpu.jsonl (the measurements) and checks.jsonl (what passed),
# each replaced as a whole; until then the old record stays.
#
# From the environment: STAGES="tests sanitizer record" (all), BUILD (build), DEVICE (cuda), RESULTS (bench/results),
# RUNS, ACTIVATIONS and LIMIT (of bench/gpu_record.sh; LIMIT is 570 here), ESMM_ALLOW_NO_SANITIZER=1 to go on where
# compute-sanitizer is missing. A build whose programs are of these sources ($BUILD/gpu, from `make gpu-programs`) is
# used as it is, so one made elsewhere can be carried here; otherwise make builds. `gpu_check.sh --id` prints the hash
# that tells.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C CMOCKA_MESSAGE_OUTPUT=TAP
unset MAKEFLAGS MFLAGS MAKELEVEL ESMM_FORCE ESMM_THREADS ESMM_TEST_CASE ESMM_TEST_CASES ESMM_TEST_REDUCED ESMM_DEVICE SUITES

# Everything that the programs are made of.
sources_id() {
  find Makefile include src cli io tests examples bench/ladder -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name Makefile | sort |
    while read -r file; do
      echo "$file"
      cat "$file"
    done | sha256sum | cut -c1-16
}
case "$#${1:+ $1}" in
0) ;;
'1 --id')
  sources_id
  exit
  ;;
'1 --help')
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' bench/gpu_check.sh
  exit
  ;;
*)
  echo "gpu-check: unknown words: $*; it takes none but --help and --id, and the rest from the environment" >&2
  exit 1
  ;;
esac

STAGES=${STAGES:-tests sanitizer record}
BUILD=${BUILD:-build}
MAKE=${MAKE:-make}
DEVICE=${DEVICE:-cuda}
RESULTS=${RESULTS:-bench/results}
began=$(date +%s)
times=""
failures=""

die() {
  echo "gpu-check: $*" >&2
  exit 1
}
section() { printf '\n== %s (%d s)\n' "$1" "$(($(date +%s) - began))"; }
failed() { # WHAT, LOG
  failures="$failures '$1'"
  echo "  FAILED: $1"
  [ -z "${2:-}" ] || { tail -n 40 "$2" | cut -c1-400 | sed 's/^/    | /'; echo "    all of it: $2"; }
}
set -f # words of STAGES are names, not files; after this loop they are known ones
for stage in $STAGES; do
  case $stage in tests | sanitizer | record) ;; *) die "unknown stage '$stage'; there are tests, sanitizer, record" ;; esac
done
set +f

LIMIT=${LIMIT:-570}
case $LIMIT in 0* | *[!0-9]*) die "LIMIT: '$LIMIT' is not a positive whole number of seconds" ;; esac

# ---- the build ----
section build
id=$(sources_id)
if [ "$(cat "$BUILD/gpu/id" 2>/dev/null)" = "$id" ]; then
  echo "  $BUILD/gpu is up to date: $id"
else
  "$MAKE" --no-print-directory -j"$(nproc 2>/dev/null || echo 2)" BUILD="$BUILD" gpu-programs || die "the build failed"
fi
PROGRAMS=$(cd "$BUILD/gpu" && pwd) || die "there is no $BUILD/gpu"
STATE=${PROGRAMS%/gpu}/gpu-check
export LD_LIBRARY_PATH="$PROGRAMS/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
mkdir -p "$STATE/log" || die "cannot make $STATE"
export XDG_CACHE_HOME="$STATE/cache"
"$PROGRAMS/esmm" info --device "$DEVICE" --json >"$STATE/info" 2>"$STATE/log/info.log" ||
  { cat "$STATE/log/info.log" >&2; die "no GPU to check: esmm info --device $DEVICE failed"; }
info() { sed -n "s/^ *\"$1\": \"\(.*\)\",\{0,1\}\$/\1/p" "$STATE/info"; }
gpu=$(info gpu) source_id=$(info source_id)
slug=$(printf '%s' "$gpu" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^nvidia-//; s/^-//; s/-$//')
[ -n "$slug" ] || die "esmm info does not name the GPU"
stamp=$(printf '"gpu":"%s","driver":"%s","date":"%s","source_id":"%s"' "$gpu" "$(info gpu_driver)" \
  "$(date -u +%Y-%m-%d)" "$source_id")
echo "  $gpu, driver $(info gpu_driver), source $source_id"

# ---- stages: each writes lines of checks, and leaves them in $STATE/<stage>.jsonl if it passed ----

# count NAME LOG STATUS SECONDS: one program's TAP results to a line of checks; fails if it failed.
count() {
  counts=$(awk '/^(not )?ok/ { if (/# *SKIP/) s++; else if (/^not/) f++; else p++ }
                /^1\.\.[0-9]+$/ { plan += substr($0, 4) }
                END { printf "%d %d %d %d", p, f, s, plan }' "$2")
  set -- "$1" "$2" "$3" "$4" $counts
  printf '  %-28s %4d passed, %d failed, %d skipped (%d s)\n' "$1" "$5" "$6" "$7" "$4"
  printf '{"check":"%s","passed":%d,"failed":%d,"skipped":%d,"seconds":%d,%s}\n' \
    "$1" "$5" "$6" "$7" "$4" "$stamp" >>"$STATE/$stage.new"
  if [ "$3" != 0 ] || [ "$6" != 0 ] || [ "$5" = 0 ] || [ $(($5 + $6 + $7)) -lt "$8" ]; then
    grep -A 8 '^not ok' "$2" | cut -c1-1000 | head -n 40 | sed 's/^/    /'
    failed "$1, exit status $3" "$2"
  fi
}
program() { # NAME SECONDS [VARIABLE=VALUE...]: runs a test program on the GPU
  program_name=$1 program_limit=$2
  shift 2
  program_began=$(date +%s)
  env ESMM_TEST_DEVICE="$DEVICE" ESMM_DEVICE="$DEVICE" "$@" timeout "$program_limit" "$PROGRAMS/$program_name" \
    >"$STATE/log/$program_name.log" 2>&1 </dev/null
  program_status=$?
  echo "$program_status $(($(date +%s) - program_began))" >"$STATE/log/$program_name.status"
}
ran() { # NAME: counts what program left
  read -r ran_status ran_seconds <"$STATE/log/$1.status"
  count "$1" "$STATE/log/$1.log" "$ran_status" "$ran_seconds"
}
works() { # PROGRAM WORDS...: a line that must succeed
  works_program=$1
  shift
  if timeout 120 "$PROGRAMS/$works_program" "$@" >"$STATE/log/command.log" 2>&1 </dev/null; then
    printf 'ok - %s %s\n' "$works_program" "$*"
  else
    printf 'not ok - %s %s\n' "$works_program" "$*"
    sed 's/^/# /' "$STATE/log/command.log" | tail -n 20
  fi
}

command_works() { works esmm "$@"; }

run_tests() {
  # Most of their time is a CPU's, so they run beside each other, and beside what follows.
  long='test_kernels test_epilogue test_cuda16 test_cuda16_shapes test_cuda_formats test_cuda_blocks test_cuda_ffn test_cuda_ffn_decode test_cuda_half test_accuracy'
  for name in $long; do
    program $name 240 ESMM_TEST_SECONDS="${ESMM_TEST_SECONDS:-100}" &
  done
  for name in test_values test_threads test_overlap test_pattern test_epilogue_options test_cuda_explain test_cuda_remember; do
    program $name 200
    ran $name
  done
  command_began=$(date +%s)
  {
    command_works check --device "$DEVICE"
    command_works list --device "$DEVICE"
    command_works explain --device "$DEVICE" --size 1024 --blockwise --density .25
    command_works bench auto 3 --device "$DEVICE" --size 512 --blockwise --density .25 --skip-stats --no-tune
    for dtype in bf16 f16; do
      command_works explain --device "$DEVICE" --size 1024 --blockwise --strip 128 --density .25 --dtype $dtype
      command_works bench all 3 --device "$DEVICE" --dims 512 1024 512 --blockwise --strip 128 --density .25 --no-tune \
        --dtype $dtype
      command_works bench all 3 --device "$DEVICE" --dims 1 1000 1003 --random --density-a .25 --no-tune --dtype $dtype \
        --dtype-c f32
      command_works bench auto 3 --device "$DEVICE" --dims 200 512 384 --format bsr:64 --density-b .25 --no-tune \
        --dtype $dtype --peers
      command_works bench auto 3 --device "$DEVICE" --dims 200 512 384 --density-a 1 --no-tune --dtype $dtype \
        --epilogue bias,relu2
    done
    command_works tune --device "$DEVICE"
    works ladder --device "$DEVICE" --runs 1 --size 512 --sweep 1,.5,.125
    works ladder --device "$DEVICE" --runs 1 --dims 200 511 385
    works ladder --device "$DEVICE" --runs 1 --dims 65 1000 1003 --dtype bf16
    works ladder --device "$DEVICE" --runs 1 --dims 300 70 9 --dtype f16
  } >"$STATE/log/command_lines.log"
  count 'esmm on the GPU' "$STATE/log/command_lines.log" 0 $(($(date +%s) - command_began))
  if python3 -c 'import numpy, pytest, torch' 2>/dev/null; then
    python_began=$(date +%s)
    rm -f "$STATE/log/python.tap"
    ESMM_TAP=$STATE/log/python.tap ESMM_LIBRARY=$(echo "$PROGRAMS"/libesmm.so.*) PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 \
      timeout 200 python3 -m pytest -q -p no:cacheprovider python/tests/test_cuda.py >"$STATE/log/python.log" 2>&1 </dev/null
    python_status=$?
    [ -f "$STATE/log/python.tap" ] || cp "$STATE/log/python.log" "$STATE/log/python.tap"
    count 'python/tests/test_cuda.py' "$STATE/log/python.tap" "$python_status" $(($(date +%s) - python_began))
  else
    echo '  python/tests/test_cuda.py    skipped: numpy, pytest or torch is not installed'
  fi
  wait
  for name in $long; do
    ran $name
  done
  program test_cuda 120 # last and alone: it fills the GPU's memory
  ran test_cuda
}

sanitize() { # TOOL OPTIONS...: the reduced table under one tool, in the background
  tool=$1
  shift
  tool_began=$(date +%s)
  # Without cuBLAS: its kernels are not ours to check.
  env ESMM_TEST_DEVICE="$DEVICE" ESMM_TEST_REDUCED=1 ESMM_CUBLAS=/none timeout 200 \
    "$sanitizer" --tool "$tool" --error-exitcode 99 "$@" "$PROGRAMS/test_kernels" >"$STATE/log/$tool.log" 2>&1 </dev/null
  tool_status=$?
  echo "$tool_status $(($(date +%s) - tool_began))" >"$STATE/log/$tool.status"
}
run_sanitizer() {
  sanitizer=$(command -v compute-sanitizer || true)
  for place in /usr/local/cuda/bin/compute-sanitizer /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
    [ -n "$sanitizer" ] || [ ! -x "$place" ] || sanitizer=$place
  done
  if [ -z "$sanitizer" ]; then
    echo '  NOT CHECKED: compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin'
    printf '{"check":"sanitizer","outcome":"not_checked","reason":"compute-sanitizer is missing",%s}\n' "$stamp" \
      >>"$STATE/$stage.new"
    [ "${ESMM_ALLOW_NO_SANITIZER:-0}" = 1 ] || failed 'compute-sanitizer is missing (ESMM_ALLOW_NO_SANITIZER=1 goes on)'
    return
  fi
  sanitize memcheck --leak-check no & first=$!
  # Without its look at cp.async: it takes a copy of no bytes, which only fills with zeros, for one that never ends, and
  # says so even of a thread that has waited for all of its own copies before it writes to the same place again.
  sanitize racecheck --racecheck-report all --racecheck-memcpy-async no & second=$!
  wait $first $second
  for tool in memcheck racecheck; do
    read -r tool_status tool_seconds <"$STATE/log/$tool.status"
    summary=$(grep -E 'SUMMARY' "$STATE/log/$tool.log" | sed 's/^=* *//' | tail -n 1)
    echo "  $tool: ${summary:-no summary}"
    printf '{"check":"%s","outcome":"%s","summary":"%s",%s}\n' "$tool" \
      "$([ "$tool_status" = 0 ] && echo ok || echo wrong)" "$(printf '%s' "$summary" | tr -d '"\\')" "$stamp" \
      >>"$STATE/$stage.new"
    [ -n "$summary" ] || failed "$tool gave no summary" "$STATE/log/$tool.log"
    count "table under $tool" "$STATE/log/$tool.log" "$tool_status" "$tool_seconds"
  done
}

run_record() {
  rm -rf "$STATE/record"
  if ! ESMM="$PROGRAMS/esmm" OUT="$STATE/record" DEVICE="$DEVICE" LIMIT="$LIMIT" timeout $((LIMIT + 20)) \
    sh bench/gpu_record.sh; then
    partial=$STATE/record/gpu.partial.jsonl
    [ -f "$partial" ] && failed "the record; $partial has what came before" || failed 'the record'
    return
  fi
  printf '{"check":"record","lines":%d,%s}\n' "$(wc -l <"$STATE/record/gpu.jsonl")" "$stamp" >>"$STATE/$stage.new"
}

for stage in $STAGES; do
  section "$stage"
  stage_began=$(date +%s) failures_before=$failures
  rm -f "$STATE/$stage.jsonl" "$STATE/$stage.id"
  : >"$STATE/$stage.new"
  run_$stage
  times="$times$(printf '  %-10s %4d s' "$stage" $(($(date +%s) - stage_began)))
"
  if [ "$failures" = "$failures_before" ]; then
    mv "$STATE/$stage.new" "$STATE/$stage.jsonl" && echo "$id" >"$STATE/$stage.id"
  fi
done

# ---- the end ----
section 'time'
printf '%s  %-10s %4d s\n\n' "$times" all $(($(date +%s) - began))
[ -z "$failures" ] || { echo "gpu-check: failed:$failures; $RESULTS/$slug stays as it was"; exit 1; }
missing=
for stage in tests sanitizer record; do
  [ "$(cat "$STATE/$stage.id" 2>/dev/null)" = "$id" ] || missing="$missing $stage"
done
[ -z "$missing" ] || { echo "gpu-check: passed so far; still to run for a record:$missing"; exit 0; }
install_file() { # FROM NAME
  temporary=$(mktemp "$RESULTS/$slug/.new.XXXXXX") && cat "$1" >"$temporary" && chmod 644 "$temporary" &&
    sync "$temporary" && mv "$temporary" "$RESULTS/$slug/$2" || die "cannot write $RESULTS/$slug/$2"
}
mkdir -p "$RESULTS/$slug" || die "cannot make $RESULTS/$slug"
cat "$STATE/tests.jsonl" "$STATE/sanitizer.jsonl" "$STATE/record.jsonl" >"$STATE/checks.jsonl"
install_file "$STATE/checks.jsonl" checks.jsonl
install_file "$STATE/record/gpu.jsonl" gpu.jsonl
echo "gpu-check: passed; written: $RESULTS/$slug/gpu.jsonl and checks.jsonl"
