#!/bin/sh
# test_build.sh: what the build makes of its options and of a machine that misses something. Called by run_tests.sh with
# TREE (the build) and WORK (scratch) set.
set -u
. tests/support/tap.sh

# report VARIABLES...: what `make` would say it builds. In a tree of its own: options are part of what is up to date.
report() { "$MAKE" --no-print-directory BUILD="$WORK/tree" "$@" found 2>&1; }

words_for_no() {
  for word in 0 no NO No off OFF false; do
    report CUDA=$word JANSSON=$word LIBZIP=$word >"$WORK/report" || return 1
    for line in 'nvcc  *not used' 'jansson  *not found' 'libzip  *not found'; do
      grep -q "^$line" "$WORK/report" || { echo "$word: no line '$line'" && cat "$WORK/report" && return 1; }
    done
  done
}
check 'CUDA, JANSSON and LIBZIP take 0, no, off and false' words_for_no
words_for_yes() {
  for word in 1 yes YES on true; do
    ! report CUDA=$word | grep -E '^nvcc  *not used' || return 1
  done
}
check 'CUDA takes 1, yes, on and true' words_for_yes
mistakes() {
  for name in CUDA WERROR JANSSON LIBZIP; do
    ! report $name=maybe >"$WORK/report" && grep -q "$name='maybe' is not understood" "$WORK/report" ||
      { echo "$name" && cat "$WORK/report" && return 1; }
  done
  ! CUDA=maybe sh scripts/find_nvcc.sh 2>"$WORK/report" && grep -q "CUDA='maybe' is not understood" "$WORK/report"
}
check 'a word that is neither is an error that names it' mistakes
nvcc_words() { [ -z "$(CUDA=no sh scripts/find_nvcc.sh)" ] && CUDA=Off sh scripts/find_nvcc.sh explain | grep -q 'CUDA=Off'; }
check 'find_nvcc.sh takes them, too' nvcc_words

# jobs N MAKEFLAGS OPTIONS...: make runs so many jobs, and a make that it calls shares them.
jobs() {
  jobs_wanted=$1 jobs_flags=$2
  shift 2
  MAKEFLAGS=$jobs_flags "$MAKE" -s BUILD="$WORK/tree" "$@" --eval='jobs:;@echo "$$MAKEFLAGS"' \
    --eval='sub:;@$(MAKE) -s jobs' jobs sub >"$WORK/jobs" 2>&1 || return 1
  [ "$(grep -c -- " -j$jobs_wanted " "$WORK/jobs")" = 2 ] && ! grep warning "$WORK/jobs" || { cat "$WORK/jobs" && return 1; }
}
check 'make uses all cores' jobs "$(nproc)" ''
check 'make -j1 uses one' jobs 1 '' -j1
check 'make -j3 uses three' jobs 3 '' -j3
check 'MAKEFLAGS=-j1 is obeyed' jobs 1 -j1

# One directory, however it is written: what is made there is the same, so that it is not made again. (Where WORK is
# outside of the tree there is one way only.)
one_tree() {
  report >/dev/null && cp "$WORK/tree/gen/flags" "$WORK/flags" &&
    "$MAKE" --no-print-directory BUILD="${WORK#"$PWD"/}/tree" found >/dev/null &&
    cmp "$WORK/tree/gen/flags" "$WORK/flags"
}
check 'a build directory may be named by its whole path or within the tree' one_tree

# A compiler without libc's headers: its own includes fail, all else works.
mkdir -p "$WORK/bare"
printf '#!/bin/sh\ncase "$*" in *--version*) echo "gcc (bare) 1.0" ;; *-dumpmachine*) echo x86_64-linux-gnu ;;\n*) exit 1 ;; esac\n' \
  >"$WORK/bare/gcc"
chmod +x "$WORK/bare/gcc"
no_headers() {
  ! report CC="$WORK/bare/gcc" >"$WORK/report" && grep -q '^libc .*apt-get install libc6-dev' "$WORK/report" &&
    ! grep nvcc "$WORK/report"
}
check "without libc's headers the build stops and names them" no_headers
no_compiler() { ! report CC="$WORK/nowhere" >"$WORK/report" && grep -q 'not found (apt-get install gcc' "$WORK/report"; }
check 'without a compiler the build stops and says so' no_compiler
set_up_wants() {
  said=$(PATH=$WORK/bare:$PATH ESMM_SETUP=no sh scripts/setup.sh run)
  for package in libc6-dev libjansson-dev libzip-dev; do
    case $said in *" $package"*) ;; *) echo "$package: $said" && return 1 ;; esac
  done
}
check "what 'make run' installs has libc's headers, jansson and libzip" set_up_wants
finish
