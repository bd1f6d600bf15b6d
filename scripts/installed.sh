#!/bin/sh
# installed.sh PREFIX LIBDIR: what to type to build against the tree that was just installed. pkg-config names the
# directory of a library to the linker, but not to the loader, which looks in its own alone.
libdir=$1/$2
ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
echo '  to build a program against it:'
case ":$(pkg-config --variable pc_path pkg-config 2>/dev/null):${PKG_CONFIG_PATH:-}:" in
*":$libdir/pkgconfig:"*) ;;
*) echo "    export PKG_CONFIG_PATH=$libdir/pkgconfig" ;;
esac
if "$ldconfig" -v -N -X 2>/dev/null | grep -q "^$libdir:"; then
  echo '    ldconfig    # once, as root: the loader learns of it'
  echo '    cc program.c $(pkg-config --cflags --libs esmm)'
else
  echo '    cc program.c $(pkg-config --cflags --libs esmm) -Wl,-rpath,$(pkg-config --variable=libdir esmm)'
fi
