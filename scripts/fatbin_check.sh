#!/bin/sh
# fatbin_check.sh LOG: fails if the log of a .cu file's compilation has a warning or a spill, and shows which.
if [ ! -e "$1" ]; then
  echo "$1 is not there" >&2
  exit 1
fi
bad=$(grep -n -E 'warning[ :#]|[1-9][0-9]* bytes spill' "$1") || exit 0
printf '%s\n' "$bad" | sed "s|^|$1: |" >&2
exit 1
