#!/bin/sh
# test_install.sh: what is exported, what is needed, and whether a stranger's program builds against the installed tree.
# Called by run_tests.sh with TREE (the build) and WORK (scratch) set.
set -u
. tests/support/tap.sh

# Exactly the functions that the headers declare: nothing internal leaks, nothing declared is missing.
exported() {
  cat include/*.h | tr '\n' ' ' | grep -o 'ESMM_API [^;(]*(' | sed -n 's/.*[ *]\(esmm_[a-z0-9_]*\)($/\1/p' | sort >"$WORK/declared"
  nm -D --defined-only "$TREE/libesmm.so" | awk '{ print $3 }' | sort >"$WORK/exported"
  [ -s "$WORK/declared" ] && diff "$WORK/declared" "$WORK/exported"
}
check 'libesmm.so exports exactly the functions of its headers' exported

# The core library rests on libc alone.
needed() {
  readelf -d "$TREE/libesmm.so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' >"$WORK/needed"
  ! grep -v -E '^(libc|libm|libpthread|libdl|libgcc_s|ld-linux[-a-z0-9_]*)\.so' "$WORK/needed"
}
check 'libesmm.so needs libc and libm alone' needed
# Until 1.0 minor versions may change the interface, so that both numbers count.
soname() { readelf -d "$TREE/libesmm.so" | grep -q -E 'SONAME.*\[libesmm\.so\.(0\.[0-9]+|[1-9][0-9]*)\]'; }
check 'libesmm.so has a version in its name' soname
header_alone() { # HEADER: in C99 pedantic and in C++: other people's settings
  printf '#include "%s"\nint main(void) { return 0; }\n' "$1" >"$WORK/alone.c"
  gcc -std=c99 -Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only "$WORK/alone.c" &&
    { ! have g++ || g++ -Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only -x c++ "$WORK/alone.c"; }
}
for header in esmm.h esmm_ffn.h esmm_tools.h; do check "$header stands alone" header_alone $header; done

prefix=$WORK/prefix
install_to() { "$MAKE" --no-print-directory BUILD="$TREE" WERROR=1 PREFIX="$prefix" "$@"; }
check 'make install' install_to install
check 'the installed command runs' "$prefix/bin/esmm" --version

with_pkg_config() { # FLAGS...
  PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config "$@" --cflags --libs esmm >"$WORK/flags" &&
    gcc tests/consumer/main.c -o "$WORK/consumer" $(cat "$WORK/flags") "-Wl,-rpath,$prefix/lib" && "$WORK/consumer"
}
as_said() { # the lines that make install ends with, typed: the program runs, from a prefix that no loader knows
  install_to install | sed -n 's|^    ||p' |
    sed "s|^cc program.c|gcc tests/consumer/main.c -o $WORK/said|" \
    >"$WORK/said.sh"
  cat "$WORK/said.sh"
  rm -f "$WORK/said"
  (unset LD_LIBRARY_PATH PKG_CONFIG_PATH && sh "$WORK/said.sh" && "$WORK/said")
}
if have pkg-config; then
  check 'a program built with pkg-config' with_pkg_config
  check 'a program built as make install says' as_said
  statically() {
    PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --static --cflags --libs esmm | sed 's/-lesmm/-l:libesmm.a/' \
      >"$WORK/flags" && gcc tests/consumer/main.c -o "$WORK/consumer_static" $(cat "$WORK/flags") &&
      "$WORK/consumer_static"
  }
  check 'a program built with pkg-config, linked statically' statically
else
  skip 'a program built with pkg-config' 'pkg-config is not installed'
fi

with_cmake() {
  cmake -S tests/consumer -B "$WORK/cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER=gcc &&
    cmake --build "$WORK/cmake" && "$WORK/cmake/shared" && "$WORK/cmake/static"
}
if have cmake; then
  check 'a program built with CMake' with_cmake
else
  skip 'a program built with CMake' 'cmake is not installed'
fi

gone() { install_to uninstall && ! find "$prefix" -type f -o -type l | grep .; }
check 'make uninstall leaves no file' gone
finish
