#!/bin/sh
# tables.sh: writes the measured tables of README.md and docs/PERFORMANCE.md, from the records that bench/record.sh and
# bench/gpu_record.sh wrote. `make tables` runs it.
#
#   sh bench/tables.sh           rewrites what stands between <!-- NAME --> and <!-- /NAME -->; tables.awk has the names
#   sh bench/tables.sh --check   changes nothing, and fails if something else stands there
#
# The records are the newest bench/results/*/cpu.jsonl and gpu.jsonl, or CPU_RECORD and GPU_RECORD; without a GPU record
# its tables are empty. A record with a wrong result, or of more than one build, is refused and nothing is written.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
die() {
  echo "tables.sh: $*" >&2
  exit 1
}
case "$#${1:+ $1}" in
0 | '1 --check') ;;
*) die "unknown words: $*; it takes none but --check" ;;
esac
newest() { # NAME: of the records of that name, the one with the latest date
  for file in bench/results/*/"$1"; do
    [ ! -f "$file" ] || printf '%s %s\n' "$(sed -n '1s/.*"date":"\([0-9-]*\)".*/\1/p' "$file")" "$file"
  done | sort | tail -n 1 | cut -d' ' -f2-
}
cpu=${CPU_RECORD:-$(newest cpu.jsonl)}
gpu=${GPU_RECORD:-$(newest gpu.jsonl)}
[ -n "$cpu" ] || die "there is no record in bench/results yet; make bench-record writes one"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkdir "$work/blocks" "$work/docs"
awk -v blocks="$work/blocks" -f bench/json.awk -f bench/tables.awk "$cpu" ${gpu:+"$gpu"} || die "nothing is written"

pages='README.md docs/PERFORMANCE.md'
for page in $pages; do
  awk -v blocks="$work/blocks" '
    inside && $0 == "<!-- /" name " -->" { inside = 0 }
    !inside { print }
    !inside && /^<!-- [a-z0-9-]+ -->$/ {
      name = $2
      inside = 1
      while ((got = (getline line < (blocks "/" name))) > 0)
        print line
      if (got < 0)
        exit
    }
    END { if (inside) print "no table " name ", or no end of it" > "/dev/stderr"; exit inside }' \
    "$page" >"$work/$page" || die "$page stays as it was"
done
for page in $pages; do
  ! cmp -s "$work/$page" "$page" || continue
  [ $# = 0 ] || die "the tables of $page are not those of $cpu${gpu:+ and $gpu}; make tables writes them"
  cp "$work/$page" "$page.new" && mv "$page.new" "$page" || die "cannot write $page"
  echo "$page: tables of $cpu${gpu:+ and $gpu}"
done
