#!/bin/sh
# test_readme.sh: what the README and docs/ffn.md show is a test. A ```c block with a main is compiled with warnings as
# errors and run; any other must compile inside a function. Every `esmm` command line of the ```sh and ```console blocks
# is run; Python is run by python/tests/test_docs.py. The program in the comments of esmm.h is run, too. Called by
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

block=$WORK/header
awk '/^ \*     #include <esmm.h>/ { on = 1 } on { sub(/^ [*]( *$|     )/, ""); print } on && /^}/ { exit }' include/esmm.h >"$block.c"
prints_the_product() { compile_and_run >"$block.txt" && printf '5 6\n28 32\n' | cmp - "$block.txt"; }
check 'the program in esmm.h compiles, runs and is right' prints_the_product
finish
