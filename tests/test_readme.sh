#!/bin/sh
# test_readme.sh: the README's code is a test. Every block marked ```c that has a main is compiled with warnings as errors
# and run; every other ```c block must at least compile inside a function. Every `esmm` command line of the ```sh
# blocks is run. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/tap.sh

if [ ! -f README.md ]; then
  skip 'README' 'there is no README.md'
  finish
  exit
fi

# Block n of language L goes to $WORK/L.n.
awk -v dir="$WORK" '
  /^```[a-z]+ *$/ && !inside { language = substr($0, 4); sub(/ *$/, "", language); inside = 1
                              file = dir "/" language "." ++count[language]; printf "" > file; next }
  /^```/ { if (inside) close(file); inside = !inside; language = ""; file = "/dev/null"; next }
  inside { print > file }' README.md

flags="-std=c11 -Wall -Wextra -Werror -Iinclude"
link="$TREE/libesmm.a -lm -lpthread -fopenmp"
blocks=0
for block in "$WORK"/c.*; do
  [ -f "$block" ] || continue
  blocks=$((blocks + 1))
  name="README's C block ${block##*.}"
  if grep -q 'int main' "$block"; then
    cp "$block" "$block.c"
    compile_and_run() { gcc $flags "$block.c" -o "$block.out" $link && (cd "$WORK" && timeout 60 "$block.out"); }
    check "$name compiles and runs" compile_and_run
  else
    { printf '#include "esmm_ffn.h"\n#include "esmm_tools.h"\n#include <stdio.h>\n#include <stdlib.h>\n'
      printf 'void readme(void);\nvoid readme(void)\n{\n'
      cat "$block"
      echo '}'; } >"$block.c"
    check "$name compiles" gcc $flags -Wno-unused -c "$block.c" -o "$block.o"
  fi
done
[ "$blocks" -gt 0 ] || echo 'README.md has no block marked ```c' | not_ok "README's C code"

# Command lines: what starts with esmm or build/esmm. A word in capitals stands for the reader's own file: not run.
cat "$WORK"/sh.* "$WORK"/console.* 2>/dev/null | sed -e 's/^\$ //' -e 's/ *#.*//' |
  grep -E '^(build/)?esmm ' | grep -v -E ' [A-Z]+(\.[a-z]+(::[A-Z]+)?)?( |$)' >"$WORK/commands"
while read -r line; do
  run_line() { (cd "$WORK" && timeout 120 sh -c "$TREE/esmm ${line#*esmm }" </dev/null); }
  check "README's command: $line" run_line
done <"$WORK/commands"
finish
