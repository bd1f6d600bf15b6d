#!/bin/sh
# test_readme.sh: what the README and docs/ffn.md show is a test. A ```c block with a main is compiled with warnings as
# errors and run; any other must compile inside a function. Every `esmm` command line of the ```sh and ```console blocks
# is run; Python is run by python/tests/test_docs.py. The measured tables are those of the records. Called by
# run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

flags="-std=c11 -Wall -Wextra -Werror -Iinclude"
link="$TREE/libesmm.a -lm -lpthread"
compile_and_run() { gcc $flags "$block.c" -o "$block.out" $link && (cd "$WORK" && timeout 60 "$block.out"); }
run_line() { (cd "$WORK" && timeout 120 sh -c "$TREE/esmm ${line#*esmm }" </dev/null); }

for page in README.md docs/ffn.md; do
  blocks=$WORK/$(basename "$page" .md)
  # Block n of language L goes to $blocks.L.n.
  awk -v blocks="$blocks" '
    /^```[a-z]+ *$/ && !inside { language = substr($0, 4); sub(/ *$/, "", language); inside = 1
                                file = blocks "." language "." ++count[language]; printf "" > file; next }
    /^```/ { if (inside) close(file); inside = !inside; file = "/dev/null"; next }
    inside { print > file }' "$page"

  [ -f "$blocks.c.1" ] || echo "$page has no block marked \`\`\`c" | not_ok "C code of $page"
  for block in "$blocks".c.*; do
    [ -f "$block" ] || continue
    name="C block ${block##*.} of $page"
    if grep -q 'int main' "$block"; then
      cp "$block" "$block.c"
      check "$name compiles and runs" compile_and_run
    else
      { for header in include/*.h; do printf '#include "%s"\n' "${header#include/}"; done
        printf '#include <stdio.h>\n#include <stdlib.h>\nvoid readme(void);\nvoid readme(void)\n{\n'
        cat "$block"
        echo '}'; } >"$block.c"
      check "$name compiles" gcc $flags -Wno-unused -c "$block.c" -o "$block.o"
    fi
  done

  # Command lines start with esmm or build/esmm. A word in capitals stands for the reader's own file: not run.
  cat "$blocks".sh.* "$blocks".console.* 2>/dev/null | sed -e 's/^\$ //' -e 's/ *#.*//' |
    grep -E '^(build/)?esmm ' | grep -v -E ' [A-Z]+(\.[a-z]+(::[A-Z]+)?)?( |$)' >"$blocks.commands"
  while read -r line; do
    check "command of $page: $line" run_line
  done <"$blocks.commands"
done

check 'the tables are those of the records' sh bench/tables.sh --check

# made SUITE ASKED KERNEL REQUESTED M MS BASELINE MORE: a line of a record of ours.
made() {
  printf '{"suite":"%s","asked":"%s","kernel":"%s","requested":"%s","m":%s,"n":8,"k":16,"ms":%s,"ms_baseline":%s,%s,' "$@"
  printf '"speedup":%s,"dtype":"bf16","date":"D","features":"F","libraries":"L","driver":"V","device":"cuda:0",' \
    "$(awk "BEGIN { print $7 / $6 }")"
  printf '"device_name":"G","source_id":"S","ms_extract":0,"rel_err":1,"rel_err_baseline":1,"outcome":"ok","bit_identical":true}\n'
}
made_tables() {
  blocks=$WORK/made
  rm -rf "$blocks"
  mkdir -p "$blocks"
  awk -v blocks="$blocks" -f bench/json.awk -f bench/tables.awk "$WORK/made.jsonl"
}
made_rows() { # against the best of all, random products, a switch, the host
  {
    made sweep16 1 own auto 1 2 2 '"ms_first":2'
    made sweep16 1 rival rival 1 4 2 '"ms_first":null'
    made sweep16 .5 own auto 16 2 3 '"ms_first":8'
    made sweep16 .5 rival rival 16 1 3 '"ms_first":null'
    made storm .5 own auto 7 2 1 '"line":4,"generator":"random","density_a":0.5,"density_b":1'
    made storm .5 own auto 9 1 2 '"line":5,"generator":"random","density_a":0.5,"density_b":1'
    made switch .05 auto auto 16 1 1 '"switch_every":50,"best_dense":"x","best_sparse":"y","switch_ratio":1.25,"dense_ratio":1.01,"ms_best":1,"ms_auto":1.25,"ms_auto_dense":2.02,"ms_baseline_dense":2'
    made host .05 own auto 16 1 1 '"host_ns":1234'
    made given16 .125 own auto 32 2 6 '"given":null'
    made given16 .125 own auto 32 1.5 6 '"given":"a"'
  } >"$WORK/made.jsonl"
  made_tables || return 1
  grep -q -F '| 16 rows and more, 5 to 50 % | 1 | 1.50 | 3.00 | 0.500 | 0.500 | 1 | 0 |' "$blocks/gpu16-best" &&
    grep -q -F '| all | 2 | 1.22 | 1.73 | 0.707 | 0.500 | 1 | 0 |' "$blocks/gpu16-best" &&
    tr '\n' ' ' <"$blocks/gpu16-best" | grep -q 'best: 16 × 8, k 16 at 50 %, where it took own and rival is the fastest. A first call, .* takes 2.00 times .* 4.00 times at most' &&
    grep -q -F '| 4 | 7 × 8, k 16 | bf16 | random, A 50 %, B 100 % | own | 2.000 | 1.000 | 0.50 |' "$blocks/gpu-storm" &&
    tr '\n' ' ' <"$blocks/gpu-storm" | grep -q -F 'below 0.95 times cuBLAS on 1 of 2 products (50 %), those above. It is at its worst on 7 × 8' &&
    grep -q 'turns from dense to 5 % and back every 50 calls | x, y | 1.000 | 1.250 | 1.250 |' "$blocks/gpu-switch" &&
    grep -q 'stays dense | cuBLAS | 2.000 | 2.020 | 1.010 |' "$blocks/gpu-switch" &&
    grep -q -F '| 16 × 8, k 16 | 5 % | own | 1.23 |' "$blocks/gpu-host" &&
    grep -q -F '| 32 × 8, k 16 | 12.5 % | own | 2.000 | 1.500 | 6.000 | 4.00 |' "$blocks/gpu16-given" ||
    { cat "$blocks"/gpu16-best "$blocks"/gpu16-given "$blocks"/gpu-[shs]*; return 1; }
}
check 'tables of a made-up record' made_rows
made_none() { # a record without these suites leaves nothing behind
  made sweep16 1 own auto 1 2 2 '"ms_first":null' >"$WORK/made.jsonl"
  made_tables && [ -s "$blocks/gpu16-sweep" ] || return 1
  for name in gpu16-best gpu-storm gpu-switch gpu-host cpu-calls; do [ ! -s "$blocks/$name" ] || return 1; done
}
check 'tables of a record that lacks suites' made_none
made_calls() { # on one thread and on the record's own number; another suite on another number is another record
  {
    made blockwise 1 own auto 512 2 2 '"threads":2,"host_ns":null'
    made calls 1 own auto 1 1 1 '"threads":1,"host_ns":123.4,"host_ns_min":99.6'
    made calls 1 own auto 1 1 1 '"threads":2,"host_ns":124.6,"host_ns_min":100'
  } | sed 's/"cuda:0"/"cpu"/' >"$WORK/made.jsonl"
  made_tables && grep -q '^### What a call costs' "$blocks/cpu-calls" &&
    grep -q -F '| 1 × 8, k 16 | bf16 | 1 | own | 123 | 100 |' "$blocks/cpu-calls" &&
    grep -q -F '| 1 × 8, k 16 | bf16 | 2 | own | 125 | 100 |' "$blocks/cpu-calls" || { cat "$blocks/cpu-calls"; return 1; }
  sed 's/"suite":"calls"/"suite":"decode"/' "$WORK/made.jsonl" >"$WORK/other.jsonl"
  mv "$WORK/other.jsonl" "$WORK/made.jsonl"
  ! made_tables 2>"$WORK/made.err" && grep -q 'not of the same build' "$WORK/made.err"
}
check 'tables of calls' made_calls
finish
