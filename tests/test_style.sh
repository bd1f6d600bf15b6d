#!/bin/sh
# test_style.sh: formatting and clang-tidy over every C file of the tree. Formatting differs between versions of
# clang-format, so only the version that Debian 12 has decides. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/tap.sh

files=$(find include src cli io tests -name '*.[ch]' | sort)
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
check 'no C file is longer than 900 lines' too_long

tidy() {
  printf '%s\n' $files | grep '\.c$' | xargs -P "$(nproc)" -n 4 sh -c '
    for file; do
      case $file in
      *_avx2.c) isa="-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt" ;;
      *_avx512.c) isa="-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512cd" ;;
      *) isa= ;;
      esac
      case $(uname -m),$file in
      x86_64,* | *,*[!2].c) clang-tidy --quiet "$file" -- -std=c11 -D_GNU_SOURCE -fopenmp $isa \
        -Iinclude -Isrc -Iio -Itests -I"$TREE/gen" || status=1 ;;
      esac
    done
    exit ${status:-0}' tidy
}
if have clang-tidy && have clang; then
  check 'clang-tidy finds nothing' tidy
else
  skip 'clang-tidy finds nothing' 'clang-tidy is not installed'
fi
finish
