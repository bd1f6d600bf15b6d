#!/bin/sh
# gpu_record.sh: the benchmark of record of this machine's GPU, in about three minutes on an H200. `make gpu-check` runs
# it after the tests; `make readme-table` puts the result into the README.
#
# Every line is one that `esmm bench --device cuda --json` wrote (checked against float64, timed beside cuBLAS in fp32 on
# the same data and on random dense data), with what was asked for, the driver and the date in front of it. OUT/gpu.jsonl
# is replaced only when every measurement succeeded and every result was right.
#
# From the environment: ESMM (build/esmm), RUNS (7), OUT (bench/results/<gpu>), DEVICE (cuda), TUNE=1 to measure the
# plan's constants first instead of using the shipped ones.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
unset ESMM_FORCE ESMM_THREADS

ESMM=${ESMM:-build/esmm}
RUNS=${RUNS:-7}
DEVICE=${DEVICE:-cuda}

die() {
  echo "gpu_record.sh: $*" >&2
  exit 1
}
[ -x "$ESMM" ] || die "there is no $ESMM; build it with make"
began=$(date +%s)
work=$(mktemp -d) || die "cannot make a temporary directory"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$ESMM" info --device "$DEVICE" --json >"$work/info" || die "esmm info --device $DEVICE failed"
info() { sed -n "s/^ *\"$1\": \"\(.*\)\",\{0,1\}\$/\1/p" "$work/info"; }
gpu=$(info gpu)
[ -n "$gpu" ] || die "esmm info does not name a GPU"
libraries=$(sed -n 's/^ *"dense_libraries": \[\(.*\)\].*/\1/p' "$work/info" | sed 's/", "/ and /g; s/"//g')
[ -n "$libraries" ] || die "cuBLAS was not found: a record needs a dense library to compare with (ESMM_CUBLAS may name it)"
slug=$(printf '%s' "$gpu" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^nvidia-//; s/^-//; s/-$//')
OUT=${OUT:-bench/results/$slug}
stamp=$(printf '"date":"%s","features":"%s","libraries":"%s","driver":"%s","host":"%s"' "$(date -u +%Y-%m-%d)" \
  "$(info features)" "$libraries" "$(info gpu_driver)" "$(info cpu)")

# Names of the kernels that run here, with their numbers on the ladder.
"$ESMM" list --device "$DEVICE" >"$work/list" || die "esmm list failed"
awk '$3 == "cuda" && $4 == "yes" { print $1, $2 + 0 }' "$work/list" >"$work/numbers"
[ -s "$work/numbers" ] || die "esmm list names no kernel for $gpu"
have() { grep -q "^$1 " "$work/numbers"; }
name_of() { awk -v n="$1" '$2 == n { print $1; exit }' "$work/numbers"; } # of a number of the ladder

# Constants of its own: whatever an old cache holds must not decide.
export XDG_CACHE_HOME="$work/cache"
echo "$gpu, driver $(info gpu_driver); dense: $libraries"
if [ "${TUNE:-0}" = 1 ]; then
  "$ESMM" tune --device "$DEVICE" >"$work/tune" 2>&1 || { cat "$work/tune" >&2; die "esmm tune failed"; }
  echo "constants measured in $(($(date +%s) - began)) s"
fi

row() { printf '%-10s %-20s %8s  %-18s %9s %9s %9s %8s %7s\n' "$@"; }
row suite product nonzeros kernel ms extract 'dense ms' speedup 'err x'

# measure SUITE ASKED KERNELS PRODUCT OPTIONS...: one call of esmm bench; ASKED is the density.
measure() {
  suite=$1 asked=$2 kernels=$3 product=$4
  shift 4
  "$ESMM" bench "$kernels" "$RUNS" --device "$DEVICE" --no-tune "$@" --json "$work/lines" >"$work/table" 2>&1 ||
    { cat "$work/table" >&2; die "esmm bench $kernels $* failed; the record stays as it was"; }
  [ -s "$work/lines" ] || die "esmm bench $kernels $* wrote no line"
  awk -v numbers="$work/numbers" -v head="{\"suite\":\"$suite\",\"asked\":\"$asked\",$stamp," '
    function text(key) { return match($0, "\"" key "\":\"[^\"]*\"") ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 5) : "" }
    BEGIN { while ((getline line < numbers) > 0) { split(line, part, " "); number[part[1]] = part[2] } }
    { sub(/^{/, ""); print head "\"number\":" (number[text("kernel")] + 0) "," $0 }' "$work/lines" >>"$work/record" ||
    die "awk failed"
  ! grep -v '"outcome":"ok"' "$work/lines" || die "a result was not right; the record stays as it was"
  awk '
    function value(key,   rest) {
      if (!match($0, "\"" key "\":"))
        return "-"
      rest = substr($0, RSTART + RLENGTH)
      sub(/^"/, "", rest)
      sub(/[",}].*/, "", rest)
      return rest
    }
    { e = value("rel_err_baseline") + 0
      printf "%s %.4f %.4f %.4f %.2f %.2f\n", value("kernel"), value("ms"), value("ms_extract"), value("ms_baseline"), \
        value("speedup"), (e > 0 ? value("rel_err") / e : 0) }' "$work/lines" >"$work/rows" || die "awk failed"
  while read -r kernel ms extract dense_ms speedup error; do
    row "$suite" "$product" "$asked" "$kernel" "$ms" "$extract" "$dense_ms" "$speedup" "$error"
  done <"$work/rows"
}

# The kernels of this GPU's own instructions, where there are any.
first_of() { for name; do ! have "$name" || { echo "$name"; return; }; done; die "none of $* runs here"; }
dense=$(first_of dense_f32 dense_f32_sm90a dense_f32_mma) || exit 1
joint=$(first_of joint_f32 joint_f32_sm90a joint_f32_mma) || exit 1
for density in 1 .75 .5 .25 .125; do
  measure blockwise $density "auto,$joint,$dense" 4096^3 --size 4096 --blockwise --density $density
done
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
  measure long-k $density "auto,$joint,$dense" '1024 x 16384 x 1024' \
    --dims 1024 16384 1024 --blockwise --density $density
done
ladder=
for number in 10 15 17 20 21 25 28 29 30; do
  name=$(name_of $number)
  [ -n "$name" ] || die "there is no kernel with the number $number"
  ladder=$ladder${ladder:+,}$name
done
! have joint_f32_simt || ladder=$ladder,joint_f32_simt
measure ladder .5 "$ladder" 4096^3 --size 4096 --blockwise --density .5
for density in .9 .8 .7 .6; do # with those of the first suite: where dense wins
  measure over $density "auto,$joint,$dense" 4096^3 --size 4096 --blockwise --density $density
done

mkdir -p "$OUT" && temporary=$(mktemp "$OUT/.gpu.XXXXXX") || die "cannot write in $OUT"
cat "$work/record" >"$temporary" && chmod 644 "$temporary" && sync "$temporary" && mv "$temporary" "$OUT/gpu.jsonl" ||
  { rm -f "$temporary"; die "cannot write $OUT/gpu.jsonl"; }
echo "written: $OUT/gpu.jsonl, $(wc -l <"$OUT/gpu.jsonl") lines, in $(($(date +%s) - began)) s"
