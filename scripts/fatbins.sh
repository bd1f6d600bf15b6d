#!/bin/sh
# fatbins.sh: writes the assembly that embeds the fatbins in the library.
#
#   sh scripts/fatbins.sh VERSION DIRECTORY NAME... >fatbins.S
#
# Each DIRECTORY/NAME.fatbin lies between esmm_fatbin_NAME and esmm_fatbin_NAME_end. VERSION is the toolkit's, as
# find_nvcc.sh prints it, and becomes esmm_fatbin_toolkit; with 0 there are no files, and the symbols enclose nothing.
set -u
version=$1 directory=$2
shift 2

label() { printf '  .globl %s\n  .hidden %s\n%s:\n' "$1" "$1" "$1"; }

echo '  .section .rodata'
echo '  .balign 16'
label esmm_fatbin_toolkit
echo "  .long $version"
for name in "$@"; do
  echo '  .balign 16'
  label "esmm_fatbin_$name"
  [ "$version" = 0 ] || echo "  .incbin \"$directory/$name.fatbin\""
  label "esmm_fatbin_${name}_end"
done
echo '  .byte 0' # so that every label lies inside the section
echo '  .section .note.GNU-stack,"",%progbits'
