#!/bin/sh
# Says what the build found: compiler, nvcc, the dense libraries that the benchmark will open, and what the
# command reads model files with. Fails where nothing can be compiled: each file would say so in its own words.
library() {
  for dir in /usr/lib /usr/lib64 /usr/local/lib "/usr/lib/$(uname -m)-linux-gnu" $(printf '%s' "${LD_LIBRARY_PATH:-}" | tr ':' ' '); do
    [ -e "$dir/$1" ] && { echo "$dir/$1"; return; }
  done
  echo "not found (the benchmark has no baseline from it; $2)"
}
version=$(${CC:-gcc} --version 2>/dev/null | head -n 1)
if [ -z "$version" ]; then
  echo "compiler   ${CC:-gcc} not found (apt-get install gcc libc6-dev)"
  exit 1
fi
if ! printf '#include <stdint.h>\n#include <stdio.h>\n' | ${CC:-gcc} -fsyntax-only -x c - 2>/dev/null; then
  echo "compiler   $version"
  echo "libc       its headers are not found: $CC can compile nothing (apt-get install libc6-dev)"
  exit 1
fi
echo "compiler   $version for $ARCH"
echo "nvcc       $(sh scripts/find_nvcc.sh explain)"
echo "OpenBLAS   $(library libopenblas.so.0 'apt-get install libopenblas0-pthread')"
echo "BLIS       $(library libblis.so.4 'apt-get install libblis4-pthread')"
echo "oneDNN     $(library libdnnl.so.2 'apt-get install libdnnl2')"
[ "$JANSSON" = 1 ] && jansson='found: the command reads safetensors' ||
  jansson="not found, or off (JANSSON=$JANSSON): the command reads no safetensors (apt-get install libjansson-dev)"
[ "$LIBZIP" = 1 ] && libzip='found: the command reads .pt' ||
  libzip="not found, or off (LIBZIP=$LIBZIP): the command reads no .pt (apt-get install libzip-dev)"
echo "jansson    $jansson"
echo "libzip     $libzip"
