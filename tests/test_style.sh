#!/bin/sh
# test_style.sh: formatting over every C and CUDA file of the tree, and clang-tidy over every C file. Formatting differs between versions of
# clang-format, so only the version that Debian 12 has decides. Called by run_tests.sh with WORK set,
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
