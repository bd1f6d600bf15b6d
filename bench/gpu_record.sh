#!/bin/sh
# gpu_record.sh: the benchmark of record of this machine's GPU, in about nine minutes on an H200. `make gpu-check` runs
# it after the tests; `make tables` puts the result into README.md and docs/PERFORMANCE.md.
#
# Every line is one that `esmm bench --device cuda --json` wrote (checked against float64, timed beside cuBLAS in the
# same dtype on the same data and on random dense data; the suites switch, host and prepare16 are not checked), with what
# was asked for, the driver and the date in front of it. auto is measured once it has learnt from its calls.
# OUT/gpu.jsonl is replaced only when every measurement succeeded and every result was right; where one did not, or the
# run was cut off, what came before it is left in OUT/gpu.partial.jsonl.
#
#   fp32       strips of 32: densities, sizes, one operand sparse, long k, the ladder (build/ladder)
#   dense16    bf16 without zeros, and fp16      strips16   A sparse by strips of 128
#   joint16    A and B sparse by strips of 128   error16    bf16 and fp16 with C in fp32, where errors show
#   sweep16    147 products, auto and all that   random16   auto where zeros are anywhere
#              it could have taken
#   decode16   1, 4 and 16 rows                  real16     activations of a trained net, from files
#   storm      200 random products (python3)     switch     auto where A turns from dense to sparse and back
#   host       what a call costs the host        prepare16  pruning and preparing weights
#   bsr16      B in blocks                       nm24       B of 2:4, from 1 row to 8192
#   epilogue16 bias, activation, statistics and gate beside the plain product; what cuBLAS would need for them is not
#              in its time
#   ffn16      the feed-forward layer, forward and whole steps, every mode beside dense mode (ffn_speed_gpu, which lies
#              beside ESMM or in its examples/)
#
#   peers      other libraries and kernels beside ours (peers16), bf16 from 1K to 64K (sizes16), how fast the memory is
#              (ceilings), how dense strips of ACTIVATIONS are (layers): bench/peers/run.py, with torch, in 115 s. Where
#              time or memory ran out, or it was cut off, it is the record without the rest of it, and a line of the
#              suite "cut" says so. It runs first where LIMIT leaves all others REST seconds, else last, in what is left;
#              its lines are the record's last in any case
#
# cuSPARSELt and cuSPARSE are measured beside some of bsr16 and nm24 where they can be opened.
#
# From the environment: ESMM (build/esmm), LADDER (the file ladder beside ESMM), RUNS (7), OUT (bench/results/<gpu>),
# DEVICE (cuda), TUNE=1 to measure the plan's constants first instead of using the shipped ones, SUITES (all of the
# above; some of them make a record only where OUT says so), ACTIVATIONS (bench/activations): a directory with
# relu2_layer1.npy and relu2_layer4.npy, 2048 x 3072, or the same with .gz; LIMIT (no limit): seconds in which all of it must end, at the cost of the peers;
# REST (340): seconds of these that all suites but the peers may take (265 to 314 were seen).
# `gpu_record.sh --help` prints this text.
set -uf # words of SUITES are names, not files
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
unset ESMM_FORCE ESMM_THREADS

ESMM=${ESMM:-build/esmm}
LADDER=${LADDER:-${ESMM%/*}/ladder}
RUNS=${RUNS:-7}
DEVICE=${DEVICE:-cuda}
all='fp32 dense16 strips16 joint16 error16 sweep16 random16 decode16 real16 storm switch host bsr16 nm24 epilogue16'
all="$all prepare16 ffn16 peers"
SUITES=${SUITES:-$all}

. bench/measuring.sh
case "$#${1:+ $1}" in
0) ;;
'1 --help')
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' bench/gpu_record.sh
  exit
  ;;
*) die "unknown words: $*; it takes none but --help, and the rest from the environment" ;;
esac
[ -x "$ESMM" ] || die "there is no $ESMM; build it with make"
check_suites OUT "${OUT:-}"
case " $SUITES " in *' fp32 '*) [ -x "$LADDER" ] || die "there is no $LADDER; build it with make ladder" ;; esac
LIMIT=${LIMIT:-86400}
case $LIMIT in 0* | *[!0-9]*) die "LIMIT: '$LIMIT' is not a positive whole number of seconds" ;; esac
REST=${REST:-340}
case $REST in 0* | *[!0-9]*) die "REST: '$REST' is not a positive whole number of seconds" ;; esac
case $RUNS in 0* | *[!0-9]*) die "RUNS: '$RUNS' is not a positive whole number" ;; esac
place=${ACTIVATIONS:-bench/activations}
[ -z "${ACTIVATIONS:-}" ] || [ -d "$place" ] || die "ACTIVATIONS: there is no directory $place"
for layer in relu2_layer1 relu2_layer4; do
  [ ! -d "$place" ] || [ -f "$place/$layer.npy.gz" ] || [ -f "$place/$layer.npy" ] ||
    die "ACTIVATIONS: $place has no $layer.npy and no $layer.npy.gz"
done
began=$(date +%s)
work=$(mktemp -d) || die "cannot make a temporary directory"
# The peers' lines come last, whenever they were measured. They are moved, so that this may be done twice.
add_peers() {
  [ ! -s "$work/peers" ] || { cat "$work/peers" >>"$work/record" && : >"$work/peers"; }
}
# What was measured is not lost with what failed.
leave() {
  [ -n "$written" ] || add_peers
  if [ -s "$work/record" ] && [ -z "$written" ] && mkdir -p "$OUT" && cp "$work/record" "$OUT/gpu.partial.jsonl"; then
    echo "gpu_record.sh: not a whole record: $OUT/gpu.partial.jsonl, $(wc -l <"$OUT/gpu.partial.jsonl") lines" >&2
  fi
  rm -rf "$work"
}
written=
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$ESMM" info --device "$DEVICE" --json >"$work/info" || die "esmm info --device $DEVICE failed"
gpu=$(info gpu)
[ -n "$gpu" ] || die "esmm info does not name a GPU"
libraries=$(dense_libraries)
[ -n "$libraries" ] || die "cuBLAS was not found: a record needs a dense library to compare with (ESMM_CUBLAS may name it)"
OUT=${OUT:-bench/results/$(slug "$gpu")}
stamp=$(printf '"date":"%s","features":"%s","libraries":"%s","driver":"%s","host":"%s"' "$(date -u +%Y-%m-%d)" \
  "$(info features)" "$libraries" "$(info gpu_driver)" "$(info cpu)")

# Names of the kernels that run here.
"$ESMM" list --device "$DEVICE" >"$work/list" || die "esmm list failed"
awk '$2 == "cuda" && $3 == "yes" { print $1 }' "$work/list" >"$work/kernels"
[ -s "$work/kernels" ] || die "esmm list names no kernel for $gpu"
have() { grep -q -x "$1" "$work/kernels"; }

# Constants of its own: whatever an old cache holds must not decide.
export XDG_CACHE_HOME="$work/cache"
echo "$gpu, driver $(info gpu_driver); dense: $libraries"
if [ "${TUNE:-0}" = 1 ]; then
  "$ESMM" tune --device "$DEVICE" >"$work/tune" 2>&1 || { cat "$work/tune" >&2; die "esmm tune failed"; }
  echo "constants measured in $(($(date +%s) - began)) s"
fi

row() { printf '%-10s %-20s %8s  %-18s %9s %9s %9s %8s %7s\n' "$@"; }
row suite product nonzeros kernel ms extract 'dense ms' speedup 'err x'

# bench SUITE ASKED KERNELS OPTIONS...: one call of esmm bench, its lines in $work/lines, and stamped in the record; ASKED
# is the density, or - for A's of each line, or b for B's, or s for what a line of --suite says itself.
bench() {
  suite=$1 asked=$2 kernels=$3
  shift 3
  "$ESMM" bench "$kernels" "$RUNS" --device "$DEVICE" --no-tune "$@" --json "$work/lines" >"$work/table" 2>&1 ||
    { cat "$work/table" >&2; die "esmm bench $kernels $* failed; the record stays as it was"; }
  stamp_lines
}
# stamp_lines: puts $work/lines into the record, with $suite and $asked in front.
stamp_lines() {
  if [ -n "$may_lack" ]; then # a kernel that cannot run this product is no contestant
    sed -i '/"outcome":"unsupported"/d' "$work/lines" || die "sed failed"
  fi
  [ -s "$work/lines" ] || die "$suite: no line was written"
  awk -v suite="$suite" -v asked="$asked" -v stamp="$stamp" "$value"'
    { nonzeros = asked == "-" ? value("asked_density_a") : asked == "b" ? value("asked_density_b") : asked
      if (asked == "s")
        nonzeros = value("asked")
      sub(/^{/, "")
      sub(/^"suite":"[^"]*","asked":"[^"]*","date":"[^"]*",/, "")
      print "{\"suite\":\"" suite "\",\"asked\":\"" nonzeros "\"," stamp "," $0 }' \
    "$work/lines" >>"$work/record" || die "awk failed"
}
may_lack=

# measure SUITE ASKED KERNELS PRODUCT OPTIONS...: the same, results looked at; PRODUCT - is that of each line.
measure() {
  measured=$4
  suite=$1 asked=$2 kernels=$3
  shift 4
  bench "$suite" "$asked" "$kernels" "$@"
  show
}

# show: the lines of $suite that were just stamped, looked at and told.
show() {
  ! grep '"bit_identical":false' "$work/lines" || die "a result was not the same twice; the record stays as it was"
  ! grep -v '"outcome":"ok"' "$work/lines" || die "a result was not right; the record stays as it was"
  awk -v asked="$asked" -v product="$measured" "$value"'
    { e = value("rel_err_baseline") + 0
      printf "%s %s %s %.4f %.4f %.4f %.2f %.2f\n", \
        product == "-" ? value("m") "," value("n") "," value("k") : product, \
        asked == "-" ? value("asked_density_a") : asked == "b" ? value("asked_density_b") : \
        asked == "s" ? value("asked") : asked, value("kernel"), \
        value("ms"), value("ms_extract"), value("ms_baseline"), value("speedup"), (e > 0 ? value("rel_err") / e : 0) }' \
    "$work/lines" >"$work/rows" || die "awk failed"
  while read -r product nonzeros kernel ms extract dense_ms speedup error; do
    row "$suite" "$product" "$nonzeros" "$kernel" "$ms" "$extract" "$dense_ms" "$speedup" "$error"
  done <"$work/rows"
}

# by_name SUITE KERNELS: a suite that the command has (`esmm bench --suite list`), where its products are listed.
by_name() { measure "$1" s "$2" - --suite "$1"; }

# The kernels of this GPU's own instructions, where there are any.
first_of() { for name; do ! have "$name" || { echo "$name"; return; }; done; die "none of $* runs here"; }
also() { for name; do ! have "$name" || { echo ",$name"; return; }; done; } # the same after a comma, or nothing

suite_fp32() {
  dense=$(first_of dense_f32 dense_f32_sm90a dense_f32_mma) || exit 1
  joint=$(first_of joint_f32 joint_f32_sm90a joint_f32_mma) || exit 1
  by_name blockwise "auto,$joint,$dense"
  for size in 1024 2048 8192 16384; do
    for density in .5 .25; do
      measure sizes $density auto "$size^3" --size $size --blockwise --density $density
    done
  done
  for density in .5 .25 .125; do
    measure only-a $density auto 4096^3 --size 4096 --blockwise --density-a $density --density-b 1
    measure only-b $density auto 4096^3 --size 4096 --blockwise --density-a 1 --density-b $density
  done
  for density in 1 .5; do
    measure long-k $density "auto,$joint,$dense" 1024,1024,16384 \
      --dims 1024 16384 1024 --blockwise --density $density
  done
  "$LADDER" --device "$DEVICE" --runs "$RUNS" --size 4096 --sweep .5 --json "$work/lines" >"$work/table" 2>&1 ||
    { cat "$work/table" >&2; die "$LADDER failed; the record stays as it was"; }
  suite=ladder asked=.5 measured=4096^3
  stamp_lines
  show
  for density in .9 .8 .7 .6; do # with those of the first suite: where dense wins
    measure over $density "auto,$joint,$dense" 4096^3 --size 4096 --blockwise --density $density
  done
}

# ---- 16-bit operands; products are written M,N,K ----

dims() { # M,N,K: the option of esmm bench
  rest=${1#*,}
  echo "--dims=${1%%,*}x${rest#*,}x${rest%,*}"
}
dense16=$(also dense_bf16_sm90a dense_bf16_mma dense_bf16)
joint16=$(also joint_bf16_sm90a joint_bf16_mma joint_bf16)
decode16=$(also decode_bf16)
fused16=$(also fused_bf16_sm90a)
cublas16=$(also cublas_bf16)
half16=$(also half_bf16_sm90a)
fine16=$(also fine_bf16_sm90a)

suite_dense16() {
  by_name dense16 "auto$dense16$cublas16"
  for product in 4096,4096,4096 4096,4096,14336; do
    measure dense16 1 "auto$(also dense_f16_sm90a dense_f16_mma dense_f16)$(also cublas_f16)" $product \
      --dtype f16 "$(dims $product)" --dense
  done
}

suite_strips16() {
  by_name strips16 "auto$joint16"
}

suite_joint16() {
  by_name joint16 "auto$joint16"
}

# A 16-bit C rounds away the sums' own errors.
suite_error16() {
  for dtype in bf16 f16; do
    measure error16 1 "auto$(also dense_${dtype}_sm90a dense_${dtype}_mma dense_$dtype)" 4096,4096,14336 \
      --dtype $dtype --dtype-c f32 --dims 4096 14336 4096 --dense
    measure error16 .5 "auto$(also joint_${dtype}_sm90a joint_${dtype}_mma joint_$dtype)" 4096,4096,14336 \
      --dtype $dtype --dtype-c f32 --dims 4096 14336 4096 --blockwise --strip 128 --density-a .5 --density-b 1
  done
}

# auto against everything that it could have taken: one process for each row of the table, which makes B once.
suite_sweep16() {
  may_lack=1
  for sides in 14336,4096 4096,14336 4096,4096; do
    for m in 1 4 16 64 256 1024 4096; do
      few=$fused16 # no match for many rows, and so slow there that it heats the GPU for the others
      [ $m -le 1024 ] || few=
      [ $m -gt 16 ] || few=$few$decode16
      measure sweep16 - "auto$dense16$joint16$cublas16$few" $m,$sides --dtype bf16 "$(dims "$m,$sides")" --blockwise \
        --strip 128 --sweep 1,.9,.75,.5,.25,.125,.05 --density-b 1
    done
  done
  may_lack=
}

suite_random16() {
  by_name random16 auto
  measure random16 - "auto$(also fine_bf16_sm90a)$(also half_bf16_sm90a)" 4096,4096,14336 --dtype bf16 --dims 4096 14336 4096 \
    --random --sweep .1,.05,.02,.01,.005,.0025 --density-b 1
}

suite_decode16() {
  by_name decode16 "auto$decode16"
}

suite_real16() {
  if [ ! -d "$place" ]; then
    echo 'real16     left out: no activations (ACTIVATIONS names the directory with relu2_layer1.npy.gz)'
    return
  fi
  for layer in relu2_layer1 relu2_layer4; do
    if [ -f "$place/$layer.npy.gz" ]; then
      gzip -dc "$place/$layer.npy.gz" >"$work/$layer.npy" || die "cannot unpack $place/$layer.npy.gz"
    else
      cp "$place/$layer.npy" "$work/$layer.npy" || die "cannot read $place/$layer.npy"
    fi
    may_lack=1
    for n in 768 3072; do
      measure real16 $layer "auto$joint16$fused16$cublas16$half16$fine16" 2048,$n,3072 --dtype bf16 --load-a "$work/$layer.npy" \
        --dims 2048 3072 $n
      measure real16 $layer "auto$joint16$fused16$cublas16$half16$fine16" 8192,$n,3072 --dtype bf16 \
        --load-a "$work/$layer.npy" --dims 2048 3072 $n --tile-rows 8192
    done
    may_lack=
  done
}

suite_storm() {
  if ! command -v python3 >/dev/null; then
    echo 'storm      left out: there is no python3'
    return
  fi
  python3 bench/storm.py "$ESMM" --device cuda --seed 2026 --count 200 --list "$work/storm" || die "bench/storm.py failed"
  measure storm - auto - --list "$work/storm"
}

suite_switch() {
  bench switch .05 auto --switch 50 --dims 4096 14336 4096 --dtype bf16 --blockwise --strip 128 --density-a .05 --density-b 1
  awk "$value"'
    { printf "switch     auto over the best kernel for each A: %.3f; over cuBLAS where A stays dense: %.3f\n", \
        value("switch_ratio"), value("dense_ratio") }' "$work/lines"
}

suite_host() {
  for product in 1,4096,4096 16,4096,14336 256,4096,4096; do
    bench host .05 auto --calls --dtype bf16 "$(dims $product)" --blockwise --strip 128 --density-a .05 --density-b 1
    awk -v product=$product "$value"'
      { printf "host       %-20s %8s  %-18s %6.0f ns\n", product, "", value("kernel"), value("host_ns") }' "$work/lines"
  done
}

# ---- weights in formats; --dims is M K N ----

has_kernel() { grep -q "^$2" "$work/kernels" || { echo "$1 left out: no kernel $2... runs here"; return 1; }; }

suite_bsr16() {
  has_kernel bsr16 bsr_bf16 || return
  by_name bsr16 auto
  all_runs=$RUNS
  RUNS=2
  measure bsr16 b auto - --dtype bf16 --size 32768 --format bsr:128 --density-b .22
  RUNS=$all_runs
}

suite_nm24() {
  has_kernel nm24 nm_bf16 || return
  by_name nm24 auto
}

# Where the device lacks a part of an epilogue, its line is missing.
suite_epilogue16() {
  {
    for product in '4096 4096 14336' '4096 14336 4096'; do
      echo "--dims $product"
      echo "--dims $product --epilogue bias,relu2"
      echo "--dims $product --epilogue bias,relu2,counts,bitmaps:128"
    done
    for m in 1 16 64; do
      echo "--dims $m 4096 14336"
    done
    for m in 1 16 64 4096; do
      echo "--dims $m 4096 14336 --epilogue gate,silu"
    done
  } >"$work/epilogue16"
  may_lack=1
  measure epilogue16 1 auto - --dtype bf16 --dense --list "$work/epilogue16"
  may_lack=
}

suite_prepare16() {
  for format in nm:2:4 bsr:128; do
    ! has_kernel prepare16 "${format%%:*}_bf16" || {
      bench prepare16 - auto --prepare --dtype bf16 --dims 16 4096 14336 --density-a 1 --format $format
      awk -v format=$format "$value"'
        { printf "prepare16  4096 x 14336, %s: %.3f ms to prune, %.3f ms to prepare, of which memory %.3f ms\n", \
            format, value("ms_prune"), value("ms_prepare"), value("ms_memory") }' "$work/lines"
    }
  done
}

suite_ffn16() {
  speed=${ESMM%/*}/ffn_speed_gpu
  [ -x "$speed" ] || speed=${ESMM%/*}/examples/ffn_speed_gpu
  if [ ! -x "$speed" ]; then
    echo 'ffn16      left out: there is no ffn_speed_gpu; make examples'
    return
  fi
  "$speed" 4096 4096 14336 "$DEVICE" >"$work/lines" || die "ffn_speed_gpu failed; the record stays as it was"
  awk -v stamp="$stamp" '{ sub(/^{"suite":"ffn16",/, ""); print "{\"suite\":\"ffn16\",\"asked\":\"\"," stamp "," $0 }' \
    "$work/lines" >>"$work/record" || die "awk failed"
  awk "$value"'
    value("apart_ms") != "" {
      printf "ffn16      %-36s %-8s %s %8.4f ms, %.3f x dense; one by one %8.4f ms, %.3f x dense\n", value("zeros"), \
        value("mode"), value("graph") == "true" ? "in a graph" : "one by one", value("forward_ms"), \
        value("forward_times_dense"), value("apart_ms"), value("apart_times_dense")
      next
    }
    { printf "ffn16      %-24s %-8s forward %8.4f ms, %.3f x dense; step %8.4f ms, %.3f x dense\n", value("zeros"), \
        value("mode"), value("forward_ms"), value("forward_times_dense"), value("step_ms"), value("step_times_dense") }' \
    "$work/lines"
}

# cut_off WHAT WHY: that suite, the peers, ended before its end.
cut_off() {
  why=$(printf '%s' "$2" | tr -cd ' -~' | tr -d '"\\' | cut -c1-400) # it may be another program's message
  {
    printf '{"suite":"cut","asked":"%s",%s,"kernel":"none","requested":"none","dtype":"bf16","device":"cuda",' "$1" "$stamp"
    printf '"device_name":"%s","reason":"%s","version":"%s","source_id":"%s","outcome":"ok"}\n' \
      "$gpu" "$why" "$(info version)" "$(info source_id)"
  } >>"$work/peers"
  echo "$1      cut off: $why"
}

# What it measured is left out where it could not be; a result of ours that is wrong is none. It writes each line when
# it has it: where it runs out of time, or fails, the lines so far are the record's.
# $1: seconds of LIMIT that are kept for others.
suite_peers() {
  if ! python3 -c 'import numpy, torch; torch.cuda.init()' 2>/dev/null; then
    echo 'peers      left out: python3 has no torch that sees the GPU'
    return
  fi
  library=$(find "$(cd "${ESMM%/*}" && pwd)" -maxdepth 1 -name 'libesmm.so*' | sort | head -n 1)
  [ -n "$library" ] || die "there is no libesmm.so beside $ESMM"
  : >"$work/lines"
  left=$((LIMIT - ($(date +%s) - began) - 5 - ${1:-0}))
  [ "$left" -ge 40 ] || { cut_off peers "there were $left seconds left"; return; }
  seconds=$((left - 20 < 115 ? left - 20 : 115)) # what was begun then needs a while
  ESMM_LIBRARY=$library PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR="$work/triton" \
    timeout -k 2 $((seconds + 18)) python3 bench/peers/run.py --seconds "$seconds" --activations "$place" \
    --json "$work/lines" >"$work/table" 2>&1
  peers_status=$?
  sed 's/^/peers      /' "$work/table"
  # A line that was cut in two has no end.
  awk -v stamp="$stamp" '
    /}$/ && match($0, /^{"suite":"[^"]*","asked":"[^"]*",/) {
      print substr($0, 1, RLENGTH) stamp "," substr($0, RLENGTH + 1)
    }' \
    "$work/lines" >>"$work/peers" || die "awk failed"
  # It says so when it finds it, and again in its line: what ended it afterwards changes nothing.
  if grep -q '^ours is wrong' "$work/table" || grep '"requested":"auto"' "$work/lines" | grep -q '"reason":"wrong'; then
    wrong='a result beside the peers was not right; the record stays as it was' # once the others are measured
    echo "peers      $wrong"
  fi
  case $peers_status in
  0) ;;
  3) cut_off peers "$(sed -n 's/^cut off: //p' "$work/table" | tail -n 1)" ;;
  124 | 137 | 143) cut_off peers "it was ended after $((seconds + 18)) s" ;;
  *) cut_off peers "it ended with status $peers_status" ;;
  esac
}

run_suite() { # NAME [WORDS]
  called=$1
  shift
  "suite_$called" "$@"
  echo "           $called: $(($(date +%s) - began)) s"
}

# Last, they would get what the others leave, which was too little more than once.
first='' wrong=''
case " $SUITES " in *' peers '*) [ $((LIMIT - REST - 5)) -lt 60 ] || first=peers ;; esac
[ -z "$first" ] || run_suite peers "$REST"
for word in $SUITES; do
  [ "$word" = "$first" ] || run_suite "$word"
done
add_peers
[ -z "$wrong" ] || die "$wrong"

[ -s "$work/record" ] || die "no suite measured anything; nothing is written"
mkdir -p "$OUT" && temporary=$(mktemp "$OUT/.gpu.XXXXXX") || die "cannot write in $OUT"
cat "$work/record" >"$temporary" && chmod 644 "$temporary" && sync "$temporary" && mv "$temporary" "$OUT/gpu.jsonl" ||
  { rm -f "$temporary"; die "cannot write $OUT/gpu.jsonl"; }
written=1
rm -f "$OUT/gpu.partial.jsonl"
echo "written: $OUT/gpu.jsonl, $(wc -l <"$OUT/gpu.jsonl") lines, in $(($(date +%s) - began)) s"
