#!/bin/sh
# find_nvcc.sh: which nvcc the build uses. Prints its path, or nothing where the build is for the CPU alone.
#
#   sh scripts/find_nvcc.sh           the path; $NVCC decides where it is set, else PATH, else /usr/local/cuda
#   sh scripts/find_nvcc.sh explain   a sentence for people: what was found and what that means
#   sh scripts/find_nvcc.sh version   1000 * major + 10 * minor of it, as the driver writes versions; 0 without one
#
# $CUDA = 0 (or no, off, false) asks for a build without GPU kernels. nvcc needs a C++ compiler of the host's, too.
set -u
mode=${1:-path}
path= version= why=

case ${CUDA:-1} in
0 | [Nn]o | NO | [Oo]ff | OFF | [Ff]alse | FALSE) wanted=no ;;
1 | [Yy]es | YES | [Oo]n | ON | [Tt]rue | TRUE) wanted=yes ;;
*)
  echo "find_nvcc.sh: CUDA='$CUDA' is not understood: 1, yes, on or true, or 0, no, off or false" >&2
  exit 2
  ;;
esac
if [ $wanted = no ]; then
  why="not used (CUDA=$CUDA)"
else
  for candidate in "${NVCC:-}" "$(command -v nvcc 2>/dev/null)" /usr/local/cuda/bin/nvcc; do
    [ -n "$candidate" ] && path=$(command -v "$candidate" 2>/dev/null) && break
    [ -z "${NVCC:-}" ] || break # who names one gets that one or none
  done
  if [ -z "$path" ]; then
    why=${NVCC:+"$NVCC "}'not found'
  else
    version=$("$path" --version 2>/dev/null | sed -n 's/.*release \([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p')
    if [ -z "$version" ] || [ "${version%%.*}" -lt 12 ]; then
      why="$path is ${version:-of no known version}, 12.0 is needed"
    elif ! command -v "${NVCC_CCBIN:-g++}" >/dev/null 2>&1; then
      why="$path $version found, but it needs a C++ compiler: ${NVCC_CCBIN:-g++} is not there"
    fi
  fi
fi
[ -z "$why" ] || path=

case $mode in
path) [ -z "$path" ] || echo "$path" ;;
version) if [ -n "$path" ]; then echo "$((${version%%.*} * 1000 + ${version#*.} * 10))"; else echo 0; fi ;;
explain)
  if [ -n "$path" ]; then
    echo "$version in ${path%/*}: kernels for sm_80, sm_90a, and PTX for later GPUs"
  else
    echo "$why: no GPU kernels, the build is for the CPU"
  fi
  ;;
*)
  echo "usage: find_nvcc.sh [explain|version]" >&2
  exit 2
  ;;
esac
