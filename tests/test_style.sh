#!/bin/sh
# test_style.sh: formatting over every C and CUDA file of the tree, clang-tidy over every C file, and words that the
# text avoids. Versions of clang-format differ, so only that of Debian 12 decides. Called by run_tests.sh with WORK set,
# and LONG for clang-tidy.
set -u
. tests/support/tap.sh

files=$(find include src cli io tests examples bench/ladder -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort)
if have clang-format && clang-format --version | grep -q 'version 14\.'; then
  check 'formatted as .clang-format says' clang-format --dry-run --Werror $files
else
  skip 'formatted as .clang-format says' 'clang-format 14 is not installed'
fi

too_long() { # files over 900 lines are two files
  for file in $files; do
    lines=$(wc -l <"$file")
    if [ "$lines" -gt 900 ]; then echo "$file has $lines lines"; fi
  done | { ! grep .; }
}
check 'no C or CUDA file is longer than 900 lines' too_long

# Words for people, which hide the thread, block, warp, kernel or caller that acts, and private ones.
words='who whom whoever somebody nobody told tells handed'
worded() { # prints file:line: word
  grep -rHnowiEI --exclude-dir=__pycache__ "$(echo "$words" | tr ' ' '|')" "$@" |
    sed 's/:\([^:]*\)$/: \1/' | { ! grep .; }
}
check "the text names what acts: no $words" worded include src cli io python README.md
echo 'kernels, for who has told_one' >"$WORK/words.txt"
check 'that check finds a word, and only whole ones' \
  sh -c '[ "$1" = "$2" ]' sh "$(worded "$WORK/words.txt")" "$WORK/words.txt:1: who"

MAKE=${MAKE:-make} # an empty command would find nothing either
tidy() { "$MAKE" --no-print-directory -k -j"$(nproc)" BUILD="$WORK/tidy" CC=clang tidy 2>&1 | { ! grep -A 4 -E 'error|warning:|\*\*\*'; }; }
if [ "${LONG:-}" != long ]; then
  skip 'clang-tidy finds nothing' 'make test-long has it'
elif have clang-tidy && have clang; then
  check 'clang-tidy finds nothing' tidy
else
  skip 'clang-tidy finds nothing' 'clang-tidy is not installed'
fi
finish
