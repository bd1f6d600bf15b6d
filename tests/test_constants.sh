#!/bin/sh
# test_constants.sh: the predictions' constants are in the headers that scripts/constants.py counts, few of them, and it
# changes each of them and nothing else. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

python=${PYTHON:-python3}
if ! have "$python"; then
  skip 'constants of the predictions' "there is no $python"
  finish
  exit
fi

check 'at most 120 constants, and no others' "$python" scripts/constants.py --most 120

copy() { rm -rf "$WORK/tree" && mkdir -p "$WORK/tree" && cp -R scripts src "$WORK/tree"; }
# finds TEXT OPTIONS...: in the copy, it fails and says so
finds() {
  finds_text=$1
  shift
  ! "$python" "$WORK/tree/scripts/constants.py" "$@" >"$WORK/out" 2>&1 && grep -q -e "$finds_text" "$WORK/out" ||
    { cat "$WORK/out"; return 1; }
}
# planted FILE LINE TEXT: what is put behind the first line that matches is found there
planted() {
  copy && at=$(grep -n -m 1 -e "$2" "src/cpu/$1" | cut -d : -f 1) && [ -n "$at" ] &&
    sed -i "${at}a\\
$3" "$WORK/tree/src/cpu/$1" && finds "^src/cpu/$1:$((at + 1)): 0\\.37 is no constant"
}
in_functions() {
  planted joint.h '^  units\[0\] =' '  units[0] *= 0.37;' && planted kept.h '^  return (double)w->bsr.blocks' '  /* 0.41 */ 0.37;' &&
    planted rows.h '^#define BAND ' '#define ROW_BLOCK 0.37' && planted sample.c '^  const double places' '  0.37;'
}
in_costs() { copy && sed -i 's/\.cost = {COST_FMA,/.cost = {3.7e-10,/' "$WORK/tree/src/cpu/dense.h" && finds '^src/cpu/dense.h:[0-9]*: 3.7e-10 is'; }
in_others() { # powers of two, and what is not predicted
  copy && echo 'double elsewhere(void) { return 0.37; }' >>"$WORK/tree/src/cpu/product.c" &&
    sed -i 's/^  units\[0\] = /&0.25 * /' "$WORK/tree/src/cpu/joint.h" &&
    "$python" scripts/constants.py >"$WORK/before"; "$python" "$WORK/tree/scripts/constants.py" | cmp - "$WORK/before"
}
too_many() { copy && finds 'more than 10$' --most 10; }
check 'a number in a cost function is found' in_functions
check 'a number in .cost is found' in_costs
check 'other numbers are not' in_others
check 'too many are a failure' too_many

perturbed() { # each constant within a factor of 2, another one, and nothing else; the same by the same seed
  "$python" scripts/constants.py --perturb 1 "$WORK/one" && "$python" scripts/constants.py --perturb 1 "$WORK/same" &&
    "$python" scripts/constants.py --perturb 2 "$WORK/two" && diff -r "$WORK/one" "$WORK/same" &&
    ! cmp -s "$WORK/one/cpu/costs.h" "$WORK/two/cpu/costs.h" && for header in src/cpu/costs.h src/cuda/costs.h; do
    [ -e "$header" ] || continue
    paste -d '\n' "$header" "$WORK/two/${header#src/}" | awk '
      NR % 2 { line = $0; split($0, was); next }
      line ~ /^#define [A-Za-z0-9_]+ [0-9]/ {
        constants++; factor = $3 / was[3]; least += factor < 0.8; most += factor > 1.25
        if (factor == 1 || factor < 0.499999 || factor > 2.000001) { print "by " factor ": " $0; bad = 1 }
        sub(/ [0-9][^ ]*/, " "); sub(/ [0-9][^ ]*/, " ", line)
      }
      $0 != line { print; bad = 1 }
      END { exit bad || !constants || !least || !most }' || return 1
  done
}
check 'perturbed constants are within a factor of 2' perturbed

# COSTS=: the library is made of these. BUILD lies outside of the tree: make -n writes to it, too.
built() {
  built_in=$(mktemp -d) || return 1
  built_with "$built_in"
  built_status=$?
  rm -rf "$built_in"
  return $built_status
}
built_with() { # BUILD
  printf '#include "cpu/costs.h"\nESMM_CPU_COST_CALL\n' >"$WORK/one.c" &&
    flags=$(${MAKE:-make} -s -n BUILD="$1" CUDA=0 COSTS="$WORK/two" "$1/obj/src/cpu/sample.o" |
      sed -n 's/.* \(-Iinclude .*\) -Isrc .*/\1/p') && [ -n "$flags" ] &&
    [ "$(gcc -E -P $flags -Isrc "$WORK/one.c")" = "$(sed -n 's/^#define ESMM_CPU_COST_CALL \([^ ]*\).*/\1/p' "$WORK/two/cpu/costs.h")" ]
}
check 'COSTS= builds with them' built
finish
