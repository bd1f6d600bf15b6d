#!/bin/sh
# readme_table.sh: the README's results, made from the records that bench/record.sh and bench/gpu_check.sh wrote.
#
#   sh bench/readme_table.sh           rewrites README.md between <!-- results --> and <!-- /results -->, and between
#                                      <!-- gpu-results --> and <!-- /gpu-results -->
#   sh bench/readme_table.sh --print   prints what would stand there
#   sh bench/readme_table.sh --check   fails if something else stands there
#
# The records are the newest bench/results/*/cpu.jsonl and gpu.jsonl, or CPU_RECORD and GPU_RECORD; without a GPU record
# its part is empty. README is the file to rewrite (README.md). A record with a result that was not right, or from more
# than one build, is refused: README.md stays as it was.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
README=${README:-README.md}

die() {
  echo "readme_table.sh: $*" >&2
  exit 1
}
mode=write
case ${1:-} in
--print | --check)
  mode=${1#--}
  shift
  ;;
esac
newest() { # NAME: of the records of that name, the one with the latest date
  for file in bench/results/*/"$1"; do
    [ ! -f "$file" ] || printf '%s %s\n' "$(sed -n '1s/.*"date":"\([0-9-]*\)".*/\1/p' "$file")" "$file"
  done | sort | tail -n 1 | cut -d' ' -f2-
}
record=${CPU_RECORD:-$(newest cpu.jsonl)}
gpu_record=${GPU_RECORD:-$(newest gpu.jsonl)}
[ -n "$record" ] || die "there is no record in bench/results yet; make bench-record writes one"
for file in "$record" ${gpu_record:+"$gpu_record"}; do
  [ -r "$file" ] || die "cannot read $file"
done

work=$(mktemp -d) || exit 1
temporary=
trap 'rm -rf "$work" ${temporary:+"$temporary"}' EXIT
awk -f bench/table.awk -f bench/cpu_table.awk "$record" >"$work/block" || exit 1

printf '' >"$work/gpu-block"
[ -z "$gpu_record" ] || awk -f bench/table.awk -f bench/gpu_table.awk "$gpu_record" >"$work/gpu-block" || exit 1

if [ "$mode" = print ]; then
  cat "$work/block"
  [ ! -s "$work/gpu-block" ] || { echo; cat "$work/gpu-block"; }
  exit
fi

# put MARK BLOCK: stdin with what stands between <!-- MARK --> and <!-- /MARK --> replaced by the file BLOCK.
put() {
  awk -v mark="<!-- $1 -->" -v end="<!-- /$1 -->" -v block="$2" '
    $0 == mark && !done { print; while ((getline line < block) > 0) print line; inside = 1; done = 1 }
    $0 == end { inside = 0 }
    !inside && $0 != mark { print }
    END { exit inside || !done }' || die "$README needs the lines <!-- $1 --> and, below it, <!-- /$1 -->"
}
put results "$work/block" <"$README" >"$work/half" && put gpu-results "$work/gpu-block" <"$work/half" >"$work/readme" ||
  exit 1
if cmp -s "$work/readme" "$README"; then
  exit 0
fi
[ "$mode" != check ] ||
  die "the results in $README are not those of $record${gpu_record:+ and $gpu_record}; make readme-table writes them"
temporary=$(mktemp "$README.XXXXXX") && cp -p "$README" "$temporary" && cat "$work/readme" >"$temporary" &&
  sync "$temporary" && mv "$temporary" "$README" || die "cannot write $README"
echo "$README: results of $record${gpu_record:+ and $gpu_record}"
