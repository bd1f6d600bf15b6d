#!/bin/sh
# setup.sh: installs what is missing.
#
#   sh scripts/setup.sh run     what `make run` wants: libc's headers, jansson and libzip, with which the command reads
#                               safetensors and .pt files, and the dense libraries it compares with
#   sh scripts/setup.sh test    what `make test` wants besides: cmocka, clang and its tools, cmake, pkg-config
#
# On Debian and its relatives, as root or with a sudo that asks for no password, apt-get installs exactly what is not
# there. Otherwise the line to type is printed. Nothing here is fatal: what stays missing is left out and said so.
# ESMM_SETUP=no never installs.
set -u

mode=${1:-}
case $mode in
run | test) ;;
*)
  echo "usage: setup.sh run|test" >&2
  exit 2
  ;;
esac

have() { command -v "$1" >/dev/null 2>&1; }
library() {
  { have ldconfig && ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q "$1" && return
  for dir in $(printf '%s' "${LD_LIBRARY_PATH:-}" | tr ':' ' '); do
    [ -e "$dir/$1" ] && return
  done
  return 1
}
compiles() { # COMPILER FLAGS..., with the program on stdin
  compiler=$1
  shift
  have "$compiler" && "$compiler" -x c - -o /dev/null "$@" >/dev/null 2>&1
}

missing=
want() { missing="$missing $1"; }

have "${CC:-gcc}" || [ -n "${CC:-}" ] || want gcc
printf '#include <stdint.h>\n#include <stdio.h>\nint main(void) { return 0; }\n' | compiles "${CC:-gcc}" || want libc6-dev
printf '#include <jansson.h>\nint main(void) { return 0; }\n' | compiles "${CC:-gcc}" -ljansson || want libjansson-dev
printf '#include <zip.h>\nint main(void) { return 0; }\n' | compiles "${CC:-gcc}" -lzip || want libzip-dev
library libopenblas.so.0 || want libopenblas0-pthread
library libblis.so.4 || want libblis4-pthread
library libdnnl.so.3 || library libdnnl.so.2 || want libdnnl2
if [ "$mode" = test ]; then
  printf '%s\n' '#include <setjmp.h>' '#include <stdarg.h>' '#include <stddef.h>' '#include <stdint.h>' \
    '#include <cmocka.h>' 'int main(void) { return 0; }' | compiles "${CC:-gcc}" -lcmocka || want libcmocka-dev
  have clang || want clang
  printf 'int main(void) { return 0; }\n' | compiles clang -fsanitize=thread || want libclang-rt-dev
  have clang-format || want clang-format
  have clang-tidy || want clang-tidy
  have cmake || want cmake
  have pkg-config || want pkg-config
fi
[ -n "$missing" ] || exit 0

if ! have apt-get; then
  echo "setup: not found here:$missing (Debian's names). Install what this system calls them; going on without."
  exit 0
fi
command="apt-get install -y --no-install-recommends$missing"
if [ "${ESMM_SETUP:-yes}" = no ]; then
  echo "setup: ESMM_SETUP=no, going on without:$missing. To install them: $command"
  exit 0
fi
if [ "$(id -u)" = 0 ]; then
  as_root=
elif have sudo && sudo -n true 2>/dev/null; then
  as_root='sudo -n env DEBIAN_FRONTEND=noninteractive'
else
  echo "setup: not installed:$missing. Going on without; to have it all, type:"
  echo "  sudo $command"
  exit 0
fi

echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp) || exit 0
trap 'rm -f "$log"' EXIT
$as_root apt-get update >"$log" 2>&1 || true # a stale list may still do
known=
for package in $missing; do # names differ between releases: one that is not known here must not stop the others
  if apt-cache show "$package" >/dev/null 2>&1; then known="$known $package"; fi
done
if [ -z "$known" ] || ! $as_root apt-get install -y --no-install-recommends $known >>"$log" 2>&1; then
  tail -n 5 "$log"
  echo "setup: apt-get could not install$missing. Going on without; to try again, type:"
  echo "  ${as_root:+sudo }$command"
fi
exit 0
