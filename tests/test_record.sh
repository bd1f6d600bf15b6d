#!/bin/sh
# test_record.sh: what bench/gpu_record.sh leaves where a part of it is cut off, fails or is wrong, with stand-ins for the
# command on a GPU and for Python with torch. Called by run_tests.sh with TREE and WORK set.
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
list) echo 'decode_bf16 0 cuda yes' ;;
bench)
  [ -z "${BENCH_FAILS:-}" ] || case "$*" in *$BENCH_FAILS*) exit 1 ;; esac
  while [ "$1" != --json ]; do shift; done
  echo '{"kernel":"decode_bf16","host_ns":5}' >"$2"
  ;;
esac
SCRIPT
cat >"$WORK/stub/bin/python3" <<'SCRIPT'
#!/bin/sh
[ "$1" != -c ] || exit 0
while [ "$1" != --json ]; do shift; done
echo '{"suite":"peers16","asked":"1","kernel":"one","outcome":"ok"}' >"$2"
printf '{"suite":"peers16","asked":"1","kernel":"half of' >>"$2" # it was ended here
case ${PEERS:-} in
killed) kill -KILL $$ ;;
wrong) echo 'ours is wrong: 1 x 1' && exit 1 ;;
esac
SCRIPT
chmod +x "$WORK/stub/esmm" "$WORK/stub/bin/python3"

record() { # VARIABLE=VALUE...: a small record in $WORK/out
  rm -rf "$WORK/out"
  env "$@" PATH="$WORK/stub/bin:$PATH" ESMM="$WORK/stub/esmm" OUT="$WORK/out" SUITES='host peers' sh bench/gpu_record.sh
}
has() { # FILE SUITE COUNT
  [ "$(grep -c "^{\"suite\":\"$2\",\"asked\":\"[^\"]*\",\"date\":\"....-..-..\",.*}\$" "$WORK/out/$1")" = "$3" ] || { cat "$WORK/out/$1"; return 1; }
}
whole() { record && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 && has gpu.jsonl cut 0; }
killed() {
  record PEERS=killed && has gpu.jsonl host 3 && has gpu.jsonl peers16 1 && has gpu.jsonl cut 1 &&
    grep -q '"suite":"cut","asked":"peers",.*"device_name":"NVIDIA GPU","reason":"it was ended after .*"source_id":"abc"' "$WORK/out/gpu.jsonl"
}
late() { record LIMIT=30 && has gpu.jsonl host 3 && has gpu.jsonl peers16 0 && has gpu.jsonl cut 1; }
wrong() { ! record PEERS=wrong && [ ! -e "$WORK/out/gpu.jsonl" ] && has gpu.partial.jsonl host 3; }
failed() { ! record BENCH_FAILS=16x14336x4096 && [ ! -e "$WORK/out/gpu.jsonl" ] && has gpu.partial.jsonl host 1; }
check 'a whole record has its peers' whole
check 'peers that are killed leave what they measured, and a mark' killed
check 'where there is no time left for peers, there is a record without them' late
check 'a wrong result is no record, and the rest is not lost' wrong
check 'a measurement that fails leaves those before it' failed
finish
