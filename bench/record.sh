#!/bin/sh
# record.sh: the benchmark of record of this machine's CPU, in about eight minutes. `make bench-record` runs it;
# `make tables` puts the result into README.md and docs/PERFORMANCE.md.
#
# Every line is one that `esmm bench --json` wrote (checked against float64, timed beside the dense libraries), with
# what was asked for, the machine's features and the date in front of it. The file bench/results/<cpu>/cpu.jsonl is
# replaced only when every measurement succeeded and every result was right.
#
#   blockwise    strips of 32 in A and B        unstructured  zeros anywhere in A
#   decode       1, 4 and 16 rows               activations   as of a trained net, by presets
#   over         where dense wins               calls         what a call of a small product costs (not checked)
#   strips16     strips of 32 in A, bf16
#   bf16         products of all these kinds in bf16, by auto and by our dense kernel, against oneDNN
#
# From the environment: ESMM (build/esmm), THREADS (the CPUs there are, 8 at most), RUNS (7), RESULTS (bench/results),
# SUITES (all of the above; some of them make a record only where RESULTS says so).
set -uf # words of SUITES are names, not files
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
unset ESMM_FORCE ESMM_THREADS ESMM_DEVICE

ESMM=${ESMM:-build/esmm}
RUNS=${RUNS:-7}
all='blockwise unstructured decode activations over strips16 calls bf16'
SUITES=${SUITES:-$all}
cpus=$(nproc 2>/dev/null || echo 1)
THREADS=${THREADS:-$((cpus < 8 ? cpus : 8))}

. bench/measuring.sh
[ -x "$ESMM" ] || die "there is no $ESMM; build it with make"
check_suites RESULTS "${RESULTS:-}"
RESULTS=${RESULTS:-bench/results}
mkdir -p "$RESULTS" || die "cannot make $RESULTS"
work=$(mktemp -d "$RESULTS/.record.XXXXXX") || die "cannot write in $RESULTS"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$ESMM" info --device cpu --json >"$work/info" || die "esmm info failed"
cpu=$(info cpu)
libraries=$(dense_libraries)
slug=$(slug "$cpu")
[ -n "$slug" ] || die "esmm info does not name the CPU"
[ -n "$libraries" ] || die "none of OpenBLAS, BLIS and oneDNN was found: a record needs a dense library to compare with"
stamp=$(printf '"date":"%s","features":"%s","libraries":"%s"' "$(date -u +%Y-%m-%d)" "$(info features)" "$libraries")

# The crossover compares the skipping kernels of the machine's best instruction set.
"$ESMM" list --device cpu --names >"$work/names" || die "esmm list failed"
for isa in avx512 avx2 portable; do
  ! grep -q "_$isa\$" "$work/names" || break
done
skipping=joint_f32_$isa,rows_f32_$isa

# Constants of its own, measured now: an old cache may have been filled while the machine was busy.
export XDG_CACHE_HOME="$work/cache"
echo "$cpu, $THREADS threads; dense: $libraries"
load=$(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo 0)
case $load in 0.[0-4]*) ;; *) echo "The load is $load: on a busy machine the figures are worth little." ;; esac
for threads in $(printf '%s\n' 1 "$THREADS" | sort -u); do
  "$ESMM" tune --device cpu --threads "$threads" >"$work/tune" 2>&1 || { cat "$work/tune" >&2; die "esmm tune failed"; }
  sed -n 's/^esmm: tune: \(others took .*CPUs\) .*/constants: \1 while they were measured/p' "$work/tune"
done

row() { printf '%-12s %-18s %8s  %-22s %10s %10s %8s\n' "$@"; }
row suite product nonzeros kernel ms 'dense ms' speedup

# bench SUITE ASKED KERNELS THREADS OPTIONS...: one call of esmm bench, its lines in $work/lines, and stamped in the
# record; ASKED is a density or a preset, or s for what a line of --suite says itself.
bench() {
  suite=$1 asked=$2 kernels=$3 threads=$4
  shift 4
  "$ESMM" bench "$kernels" "$RUNS" --device cpu --threads "$threads" --no-tune "$@" --json "$work/lines" \
    >"$work/table" 2>&1 ||
    { cat "$work/table" >&2; die "esmm bench $kernels $* failed; the record stays as it was"; }
  if [ "$asked" = s ]; then
    sed -i "s/^\({\"suite\":\"[^\"]*\",\"asked\":\"[^\"]*\",\)\"date\":\"[^\"]*\",/\1$stamp,/" "$work/lines"
    cat "$work/lines" >>"$work/record"
  else
    sed "s/^{/{\"suite\":\"$suite\",\"asked\":\"$asked\",$stamp,/" "$work/lines" >>"$work/record"
  fi
}

# measure SUITE ASKED KERNELS PRODUCT OPTIONS...: the same on all threads, and a row for each kernel.
measure() {
  suite=$1 asked=$2 kernels=$3 product=$4
  shift 4
  bench "$suite" "$asked" "$kernels" "$THREADS" "$@"
  awk -v asked="$asked" "$value"'
    { printf "%s %s %.3f %.3f %.2f %s\n", asked == "s" ? value("asked") : asked, value("kernel"), value("ms"), \
        value("ms_baseline"), value("speedup"), value("m") " x " value("k") " x " value("n") }' \
    "$work/lines" |
    while read -r nonzeros kernel ms dense speedup dims; do
      row "$suite" "${product:-$dims}" "$nonzeros" "$kernel" "$ms" "$dense" "$speedup"
    done
}

# by_name SUITE: one that the command has (`esmm bench --suite list`), where its products are listed.
by_name() { measure "$1" s auto '' --suite "$1"; }

suite_blockwise() { by_name blockwise; }
suite_unstructured() { by_name unstructured; }
suite_decode() { by_name decode; }
suite_activations() { by_name activations; }

suite_over() {
  for density in 1 .95 .9 .75; do
    measure over-strips $density $skipping 1024^3 --size 1024 --blockwise --density $density
  done
  for density in .5 .4 .3 .25 .2; do
    measure over-single $density $skipping 1024^3 --size 1024 --random --density-a $density --density-b 1
  done
}

suite_strips16() {
  for density in 1 .5 .25 .125; do
    measure strips16 $density auto 1024^3 --size 1024 --blockwise --density-a $density --density-b 1 --dtype bf16
  done
}

# call M K N DTYPE: on one thread, and on all there are.
call() {
  for threads in $(printf '%s\n' 1 "$THREADS" | sort -u); do
    bench calls 1 auto "$threads" --calls --dims "$1" "$2" "$3" --dense --dtype "$4"
    awk -v product="$1 x $2 x $3 $4" -v threads="$threads" "$value"'
      { printf "calls        %-18s %9s %-22s %7.0f ns, %.0f at least\n", product, \
          threads (threads == 1 ? " thread" : " threads"), value("kernel"), value("host_ns"), value("host_ns_min") }' \
      "$work/lines"
  done
}

suite_calls() {
  call 1 1 1 f32
  call 1 64 64 f32
  call 17 64 1 f32
  call 1 1024 1 f32
  call 64 64 64 f32
  call 1 64 64 bf16
}

suite_bf16() {
  own= # our own dense kernel beside what the plan chooses
  ! grep -qx dense_bf16_avx512bf16 "$work/names" || own=,dense_bf16_avx512bf16
  ! grep -qx dense_bf16_amx "$work/names" || own=,dense_bf16_amx
  for product in '1024 1024 1024' '2048 2048 2048' '1024 4096 4096'; do
    # shellcheck disable=SC2086 # three words
    measure bf16-dense 1 "auto$own" "$product" --dims $product --dense --dtype bf16
  done
  for density in .75 .5 .25 .125; do
    measure bf16-strips $density auto 2048^3 --size 2048 --blockwise --density $density --dtype bf16
  done
  for density in .5 .25 .1; do
    measure bf16-strips-of-a $density auto 2048^3 --size 2048 --blockwise --density-a $density --density-b 1 \
      --dtype bf16
  done
  for density in .1 .05; do
    measure bf16-single $density auto 2048^3 --size 2048 --random --density-a $density --density-b 1 --dtype bf16
  done
  for preset in early middle late; do
    measure bf16-activations $preset auto '2048 x 3072 x 768' --dims 2048 3072 768 --activations=$preset --dtype bf16
  done
  for rows in 1 16; do
    for density in 1 .1; do
      measure bf16-decode $density auto "$rows x 4096 x 4096" \
        --dims $rows 4096 4096 --random --density-a $density --density-b 1 --dtype bf16
    done
  done
}

for word in $SUITES; do
  suite_$word
done

mkdir -p "$RESULTS/$slug" && chmod 644 "$work/record" && sync "$work/record" &&
  mv "$work/record" "$RESULTS/$slug/cpu.jsonl" || die "cannot write $RESULTS/$slug/cpu.jsonl"
echo "written: $RESULTS/$slug/cpu.jsonl"
