#!/bin/sh
# test_ladder.sh: the program of bench/ladder: its words, what it says without a GPU, and on the fake driver, whose
# kernels do nothing, that it names wrong results and fails. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

ladder() { timeout 120 "$TREE/ladder" "$@" >"$WORK/out" 2>&1; }
says() { # STATUS TEXT WORDS...
  says_status=$1 says_text=$2
  shift 2
  ladder "$@"
  [ $? = "$says_status" ] && grep -q -e "$says_text" "$WORK/out" || { cat "$WORK/out"; return 1; }
}
numbers() {
  says 2 '^esmm: ladder: numbers: there is no kernel 99; the ladder has 10, 15, .* 30, and 0$' 99 &&
    says 2 'there is no kernel 11-14;' 11-14 && says 2 'numbers: 30-10 runs backwards' 30-10 &&
    says 2 "numbers: '' is not a whole number" 20- && says 2 'numbers: joint is not a whole number' joint
}
options() {
  says 2 -- '--size: 0 is out of range' --size 0 && says 2 '--sweep: 2 is out of range' --sweep 2 &&
    says 2 '--device: banana is no device' --device banana && says 2 'unknown option' --blockwise &&
    says 0 '^Usage: ladder \[numbers\] \[options\]$' --help
}
on_cpu() { says 1 "the ladder's kernels run on a GPU, and this is the CPU, as was asked for" --device cpu --size 64; }
check 'numbers are those of the ladder' numbers
check 'options are checked' options
check 'the ladder is for a GPU' on_cpu

wrong() { # the steps asked for, each once, in order
  LD_LIBRARY_PATH="$TREE/tests/fake" says 1 '^ladder_25_fused_64x32 is WRONG: ' 20-25 21 --device cuda --size 128 \
    --sweep 1,.5 --runs 1 --json "$WORK/lines" && [ "$(grep -c WRONG "$WORK/out")" -ge 6 ] &&
    [ "$(sed -n 's/.*"number":\([0-9]*\),.*"ms_extract":.*"outcome":"wrong".*/\1/p' "$WORK/lines" |
      tr '\n' ' ')" = '20 21 25 20 21 25 ' ] || { cat "$WORK/out" "$WORK/lines"; return 1; }
}
if [ -e "$TREE/tests/fake/libcuda.so.1" ] && [ -n "$(sh scripts/find_nvcc.sh)" ]; then
  check 'wrong results are named, and are a failure' wrong
else
  skip 'wrong results are named, and are a failure' 'this build has no GPU kernels, or no fake driver'
fi

right() { says 0 'ladder_10_dense' --device cuda --size 256 --sweep 1,.25 --runs 1; }
if ladder --help && LD_LIBRARY_PATH= "$TREE/esmm" info --device cuda >/dev/null 2>&1; then
  check 'every step is right on the GPU' right
else
  skip 'every step is right on the GPU' 'there is no GPU'
fi

finish
