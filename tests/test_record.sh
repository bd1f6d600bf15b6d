#!/bin/sh
# test_record.sh: what bench/gpu_record.sh leaves where a part of it is cut off, fails or is wrong, with stand-ins for
# the command on a GPU and for Python with torch; and how gpu_check.sh calls it. Called by run_tests.sh with TREE and
# WORK set.
set -u
. tests/support/tap.sh

mkdir -p "$WORK/stub/bin" && : >"$WORK/stub/libesmm.so.0"
cat >"$WORK/stub/esmm" <<'SCRIPT'
#!/bin/sh
case $1 in
info)
  printf '  "%s": "%s",\n' version 1 source_id abc cpu CPU gpu 'NVIDIA GPU' gpu_driver 570 features sm_90
  echo '  "dense_libraries": ["cuBLAS 13"]'
  ;;
list) printf '%s cuda yes\n' decode_bf16 dense_f32 joint_f32 ;;
bench)
  [ -z "${BENCH_FAILS:-}" ] || case "$*" in *$BENCH_FAILS*) exit 1 ;; esac
  echo others >>"$ORDER"
  while [ "$1" != --json ]; do shift; done
  echo '{"kernel":"decode_bf16","host_ns":5,"outcome":"ok"}' >"$2"
  ;;
esac
SCRIPT
cat >"$WORK/stub/ladder" <<'SCRIPT'
#!/bin/sh
case $* in '--device cuda --runs 7 --size 4096 --sweep .5 --json '*) ;; *) exit 1 ;; esac
printf '{"kernel":"ladder","number":%s,"outcome":"ok"}\n' 10 29 >"${10}"
SCRIPT
cat >"$WORK/stub/bin/python3" <<'SCRIPT'
#!/bin/sh
[ "$1" != -c ] || exit 0
echo peers >>"$ORDER"
echo "$@" >"$ORDER.words"
while [ "$1" != --json ]; do shift; done
echo '{"suite":"peers16","asked":"1","kernel":"one","outcome":"ok"}' >"$2"
printf '{"suite":"peers16","asked":"1","kernel":"half of' >>"$2" # it was ended here
case ${PEERS:-} in
killed) kill -KILL $$ ;;
wrong) echo 'ours is wrong: 1 x 1' && exit 1 ;;
wrong-killed) echo 'ours is wrong: 1 x 1' && kill -KILL $$ ;;
wrong-line)
  echo '{"suite":"peers16","asked":"1","kernel":"own","requested":"auto","reason":"wrong: 1","outcome":"failed"}' >"$2"
  kill -KILL $$
  ;;
rival-wrong)
  echo '{"suite":"peers16","asked":"1","kernel":"one","requested":"one","reason":"wrong: 1","outcome":"failed"}' >"$2"
  ;;
left-out) printf 'cut off: no "time" \\ for\t2 jobs\n' && exit 3 ;;
esac
SCRIPT
chmod +x "$WORK/stub/esmm" "$WORK/stub/ladder" "$WORK/stub/bin/python3"

record() { # VARIABLE=VALUE...: a small record in $WORK/out
  rm -rf "$WORK/out" "$WORK/order"
  env "$@" ORDER="$WORK/order" PATH="$WORK/stub/bin:$PATH" ESMM="$WORK/stub/esmm" OUT="$WORK/out" SUITES='host peers' sh bench/gpu_record.sh
}
has() { # FILE SUITE COUNT
  [ "$(grep -c "^{\"suite\":\"$2\",\"asked\":\"[^\"]*\",\"date\":\"....-..-..\",.*}\$" "$WORK/out/$1")" = "$3" ] || { cat "$WORK/out/$1"; return 1; }
}
whole() { record && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 && has gpu.jsonl cut 0; }
killed() {
  record PEERS=killed && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 && has gpu.jsonl cut 1 &&
    grep -q '"suite":"cut","asked":"peers",.*"device_name":"NVIDIA GPU","reason":"it was ended after .*"source_id":"abc"' "$WORK/out/gpu.jsonl"
}
left_out() {
  record PEERS=left-out && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 && has gpu.jsonl cut 1 &&
    grep -q '"suite":"cut","asked":"peers",.*"reason":"no time  for2 jobs",' "$WORK/out/gpu.jsonl"
}
# VARIABLE=VALUE... FIRST SECONDS: who is measured first, and how long the peers may take; their lines are the last ones.
order() {
  record "$1" && [ "$(head -n 1 "$WORK/order")" = "$2" ] && [ "$(sort -u "$WORK/order" | wc -l)" = 2 ] &&
    grep -q -e "--seconds $3 " "$WORK/order.words" && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 &&
    tail -n 1 "$WORK/out/gpu.jsonl" | grep -q '"suite":"peers16"' || { cat "$WORK/order" "$WORK/order.words"; return 1; }
}
late() { record LIMIT=30 && has gpu.jsonl host 3 && has gpu.jsonl peers16 0 && has gpu.jsonl cut 1; }
wrong() { # HOW
  ! record PEERS="$1" && [ ! -e "$WORK/out/gpu.jsonl" ] && has gpu.partial.jsonl host 3
}
rival_wrong() { record PEERS=rival-wrong && has gpu.jsonl peers16 1 && has gpu.jsonl cut 0; }
failed() { ! record BENCH_FAILS=16x14336x4096 && [ ! -e "$WORK/out/gpu.jsonl" ] && has gpu.partial.jsonl host 1; }
check 'a whole record has its peers' whole
fp32() { # the ladder is a program of its own
  env "$@" ORDER="$WORK/order" ESMM="$WORK/stub/esmm" OUT="$WORK/out" SUITES=fp32 sh bench/gpu_record.sh
}
ladder() {
  rm -rf "$WORK/out" && fp32 LADDER= && has gpu.jsonl ladder 2 && grep -q '"suite":"ladder".*"number":29,' "$WORK/out/gpu.jsonl" &&
    ! fp32 LADDER=/none >"$WORK/out.txt" 2>&1 && grep -q 'there is no /none; build it with make ladder' "$WORK/out.txt"
}
check 'the ladder is in the record, by its numbers' ladder
check 'peers that are killed leave what they measured, and a mark' killed
check 'peers come first where the others have time enough' order LIMIT=570 peers 115
check 'and get what these do not need' order LIMIT=450 peers '\(8[0-5]\|7[0-9]\)'
check 'else they come last' order LIMIT=300 others 115
rest() { ! record REST=0 && ! record REST=4m; }
check 'REST is a number of seconds' rest
check 'where there is no time left for peers, there is a record without them' late
check 'peers that left something out leave a mark with the reason' left_out
check 'a wrong result is no record, and the rest is not lost' wrong wrong
check 'nor is it where the peers are killed after it' wrong wrong-killed
check 'nor where only its line says so' wrong wrong-line
check 'a wrong result of a peer is the peer'"'"'s' rival_wrong
check 'a measurement that fails leaves those before it' failed

# gpu_check.sh gives the record LIMIT and 20 seconds; it names what is left of one only where there is something.
gpu_check() { # VARIABLE=VALUE...: its stage record, in a tree of its own
  rm -rf "$WORK/tree" && mkdir -p "$WORK/tree/bench" "$WORK/tree/build/gpu" &&
    cp bench/gpu_check.sh "$WORK/tree/bench/" && cp "$WORK/stub/esmm" "$WORK/tree/build/gpu/esmm" &&
    printf '%s\n' "$RECORD" >"$WORK/tree/bench/gpu_record.sh" &&
    (cd "$WORK/tree" && sh bench/gpu_check.sh --id >build/gpu/id 2>/dev/null)
  env "$@" PATH="$WORK/stub/bin:$PATH" STAGES=record BUILD=build sh "$WORK/tree/bench/gpu_check.sh" >"$WORK/out.txt" 2>&1
}
limits() {
  RECORD='mkdir -p "$OUT" && echo "limit $LIMIT" >"$OUT/gpu.jsonl"'
  gpu_check LIMIT=700 && grep -q 'limit 700' "$WORK/tree/build/gpu-check/record/gpu.jsonl" &&
    grep -q -x 'timeout 720' "$WORK/timeouts" && gpu_check LIMIT= && grep -q -x 'timeout 590' "$WORK/timeouts" ||
    return 1
  for limit in 0 -3 ten 1.5; do
    ! gpu_check LIMIT=$limit && grep -q "LIMIT: '$limit' is not a positive whole number" "$WORK/out.txt" || return 1
  done
}
names_partial() {
  RECORD='exit 1'
  ! gpu_check LIMIT=9 && grep -q 'FAILED: the record$' "$WORK/out.txt" && ! grep -q partial "$WORK/out.txt" || return 1
  RECORD='mkdir -p "$OUT" && : >"$OUT/gpu.partial.jsonl"; exit 1'
  ! gpu_check LIMIT=9 && grep -q 'FAILED: the record; .*/gpu.partial.jsonl has what came before' "$WORK/out.txt"
}
cat >"$WORK/stub/bin/timeout" <<SCRIPT
#!/bin/sh
echo "timeout \$1" >>"$WORK/timeouts"
while :; do case \$1 in -k) shift 2 ;; [0-9]*) shift && break ;; esac; done
exec "\$@"
SCRIPT
chmod +x "$WORK/stub/bin/timeout"
check 'gpu_check.sh takes LIMIT for what it is' limits
check 'gpu_check.sh names a partial record where there is one' names_partial
finish
