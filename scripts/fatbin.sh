#!/bin/sh
# fatbin.sh: compiles one .cu file, and fails on what must not be: an error, a warning, a register spill.
#
#   sh scripts/fatbin.sh SOURCE FATBIN NVCC [FLAGS...]
#
# What ptxas says of registers, shared memory and spills stays beside the fatbin, in NAME.log.
set -u
source=$1 fatbin=$2
shift 2
log=${fatbin%.fatbin}.log
mkdir -p "$(dirname "$fatbin")" || exit 1
rm -f "$fatbin"

if ! "$@" -Xptxas -v,-warn-spills -Werror all-warnings -MMD -MP -MF "${fatbin%.fatbin}.d" -MT "$fatbin" -fatbin "$source" \
  -o "$fatbin.tmp" >"$log" 2>&1; then
  grep -v -E "^ptxas info|bytes stack frame, 0 bytes spill" "$log" >&2
  exit 1
fi
sh scripts/fatbin_check.sh "$log" || exit 1
mv "$fatbin.tmp" "$fatbin"
