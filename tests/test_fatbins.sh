#!/bin/sh
# test_fatbins.sh: what nvcc said of each .cu file, for each target: no spill, no warning. A build with either stops at
# once; this says it by name, and checks that what was embedded is there. Called by run_tests.sh with TREE, WORK and
# FATBIN_DIR set.
set -u
. tests/support/tap.sh

compiled() { # NAME: every entry function of the file was compiled for each target
  log=$FATBIN_DIR/$1.log
  [ -s "$FATBIN_DIR/$1.fatbin" ] && sh scripts/fatbin_check.sh "$log" && targets=sm_90a || return 1
  case $1 in *_sm90a) ;; *) targets='sm_80 sm_90a' ;; esac
  for target in $targets; do
    grep -q "Compiling entry function '.*' for '$target'" "$log" || { echo "$1: nothing for $target" && return 1; }
  done
}

nvcc=$(sh scripts/find_nvcc.sh)
for source in $(find src/cuda bench/ladder -name "*.cu" | sort); do
  name=$(basename "$source" .cu)
  if [ -n "$nvcc" ]; then
    check "$source: no spills, no warnings" compiled "$name"
  else
    skip "$source: no spills, no warnings" "nvcc $(sh scripts/find_nvcc.sh explain)"
  fi
done

if [ -n "$nvcc" ]; then
  in_flight() { ! grep -h C7511 "$FATBIN_DIR"/*.log; } # which ptxas only remarks
  check "no kernel's wgmma's wait for each other for want of registers" in_flight
fi

embedded() {
  nm "$TREE/libesmm.a" >"$WORK/symbols" 2>/dev/null
  for source in $(find src/cuda -name "*.cu" | sort); do
    name=$(basename "$source" .cu)
    grep -q " esmm_fatbin_$name\$" "$WORK/symbols" && grep -q " esmm_fatbin_${name}_end\$" "$WORK/symbols" ||
      { echo "$name is not in libesmm.a" && return 1; }
  done
}
check 'every .cu file is embedded in the library' embedded

stack() { readelf -lW "$TREE/libesmm.so" | grep GNU_STACK | grep -q 'RW ' && [ -z "$(readelf -dW "$TREE/libesmm.so" | grep TEXTREL)" ]; }
check 'libesmm.so has no executable stack and no text relocations' stack

refuses() { # SOURCE: the build's own gate must close on bad code
  ! sh scripts/fatbin.sh "$1" "$WORK/bad.fatbin" "$nvcc" -O3 -gencode arch=compute_90a,code=sm_90a && [ ! -e "$WORK/bad.fatbin" ]
}
if [ -n "$nvcc" ]; then
  printf 'extern "C" __global__ void k(float *p)\n{\n  int never_used;\n  *p = 1;\n}\n' >"$WORK/warning.cu"
  check 'a .cu file with a warning does not build' refuses "$WORK/warning.cu"
  cat >"$WORK/spill.cu" <<'CUDA'
extern "C" __global__ void __launch_bounds__(1024, 2) k(float *p)
{
  float x[64];
  for (int i = 0; i < 64; i++)
    x[i] = p[i * threadIdx.x];
  for (int j = 0; j < 100; j++)
    for (int i = 0; i < 64; i++)
      x[i] = x[i] * x[(i * 7 + 3) % 64] + p[j];
  for (int i = 0; i < 64; i++)
    p[i * threadIdx.x] = x[i];
}
CUDA
  check 'a .cu file with a spill does not build' refuses "$WORK/spill.cu"
fi
finish
