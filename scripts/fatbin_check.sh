#!/bin/sh
# fatbin_check.sh LOG: fails if the log of a .cu file's compilation has a warning or a spill, or says that ptxas puts
# every wgmma after the one before, which it calls information and which costs a fifth of a product; shows which.
if [ ! -e "$1" ]; then
  echo "$1 is not there" >&2
  exit 1
fi
never='warning[ :#]|[1-9][0-9]* bytes spill'
case ${1##*/} in
k_fused16_sm90a.log) ;; # it is so there: a stage has any number of steps
*) never="$never|wgmma.mma_async instructions are serialized" ;;
esac
bad=$(grep -n -E "$never" "$1") || exit 0
printf '%s\n' "$bad" | sed "s|^|$1: |" >&2
exit 1
