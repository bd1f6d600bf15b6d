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
awk '
function fail(text) { print "readme_table.sh: " FILENAME ":" FNR ": " text > "/dev/stderr"; failed = 1; exit 1 }

# The value of a key of one flat JSON object; strings in these records hold no escaped quotes where they are read.
function value(key,   at, rest) {
  at = index($0, "\"" key "\":")
  if (!at)
    fail("there is no " key)
  rest = substr($0, at + length(key) + 3)
  if (substr(rest, 1, 1) == "\"") {
    rest = substr(rest, 2)
    return substr(rest, 1, index(rest, "\"") - 1)
  }
  match(rest, /^[^,}]*/)
  return substr(rest, 1, RLENGTH)
}
function percent(density) { return sprintf("%.3g %%", 100 * density) }
function times(x) { return x >= 9.95 ? sprintf("%.0f", x) : sprintf(x >= 1.995 ? "%.1f" : "%.2f", x) }
function milliseconds(x) { return x >= 99.5 ? sprintf("%.0f", x) : sprintf("%.3g", x) }

# Keeps list[1..count] in descending order, without doubles.
function insert(list, count, x,   i) {
  for (i = 1; i <= count; i++)
    if (list[i] == x)
      return count
  for (i = count; i > 0 && list[i] < x; i--)
    list[i + 1] = list[i]
  list[i + 1] = x
  return count + 1
}

# The density at which the best skipping kernel is as fast as the dense library, between the two measured beside it.
function crossover(suite, count, densities, best,   i, high, low, at) {
  if (!count)
    return "(not measured)"
  if (best[suite, densities[1]] >= 1)
    return "at no density up to " percent(densities[1])
  for (i = 2; i <= count; i++)
    if (best[suite, densities[i]] >= 1) {
      high = best[suite, densities[i - 1]]
      low = best[suite, densities[i]]
      at = densities[i] + (densities[i - 1] - densities[i]) * (low - 1) / (low - high)
      return sprintf("above %.0f %%", 100 * at)
    }
  return "already at " percent(densities[count])
}

# Prints text in lines of at most 120 characters.
function wrapped(text,   words, n, i, line) {
  n = split(text, words, " ")
  line = words[1]
  for (i = 2; i <= n; i++)
    if (length(line) + 1 + length(words[i]) > 120) {
      print line
      line = words[i]
    } else
      line = line " " words[i]
  print line
}

{
  suite = value("suite"); asked = value("asked"); speedup = value("speedup") + 0; baseline = value("ms_baseline") + 0
  if (value("outcome") != "ok")
    fail("the result of " value("kernel") " is " value("outcome") ", not ok")
  if (FNR == 1) {
    id = value("source_id"); date = value("date"); cpu = value("device_name"); features = value("features")
    libraries = value("libraries"); threads = value("threads"); dtype = value("dtype")
  }
  if (value("source_id") != id || value("threads") != threads || value("date") != date)
    fail("not of the same build, threads and day as the first line")
  if (speedup <= 0 || baseline <= 0)
    fail("speedup is " value("speedup") ", ms_baseline " value("ms_baseline"))
  error = value("rel_err") + 0; dense_error = value("rel_err_baseline") + 0
  if (dense_error > 0 && error / dense_error > worst)
    worst = error / dense_error
  if (suite == "activations") {
    activations = activations (activations ? ", " : "") asked " layers (" sprintf("%.1f %%", 100 * value("density_a")) \
      " nonzero) " times(speedup) " x"
    shape = value("m") " x " value("k") " x " value("n")
  } else if (suite == "over-strips" || suite == "over-single") {
    if (suite == "over-strips")
      strips = insert(strip_at, strips, asked + 0)
    else
      singles = insert(single_at, singles, asked + 0)
    if (speedup > best[suite, asked + 0])
      best[suite, asked + 0] = speedup
  } else {
    m = value("m")
    if (suite == "blockwise")
      name = "strips of 32, A and B, " m "³"
    else if (suite == "unstructured")
      name = "single elements, A only, " m "³"
    else if (suite == "decode")
      name = "decode, A only, " m " x " value("k") " x " value("n")
    else
      fail("unknown suite " suite)
    if (!(name in seen)) {
      seen[name] = 1
      row[++rows] = name
      dense[name] = baseline
    }
    if (baseline < dense[name])
      dense[name] = baseline
    columns = insert(column, columns, asked + 0)
    cell[name, asked + 0] = times(speedup)
  }
}
END {
  if (failed)
    exit 1
  if (!rows) {
    print "readme_table.sh: the record has no products" > "/dev/stderr"
    exit 1
  }
  wrapped("Times faster than the fastest of " libraries ", by share of nonzeros; " dtype ", " threads " thread" \
    (threads == 1 ? "" : "s") ", " cpu " (" features "), " date ", source `" id "`. The scan of A is part of our time.")
  print ""
  head = "| where the zeros are | dense ms |"
  rule = "| --- | ---: |"
  for (i = 1; i <= columns; i++) {
    head = head " " percent(column[i]) " |"
    rule = rule " ---: |"
  }
  print head
  print rule
  for (r = 1; r <= rows; r++) {
    line = "| " row[r] " | " milliseconds(dense[row[r]]) " |"
    for (i = 1; i <= columns; i++)
      line = line " " cell[row[r], column[i]] " |"
    print line
  }
  print ""
  if (activations)
    wrapped("Generated activations like those of a trained ReLU² net, " shape ": " activations ".")
  wrapped("**Dense wins** " crossover("over-strips", strips, strip_at, best) " nonzeros for strips, " \
    crossover("over-single", singles, single_at, best) " for single elements of A (1024³). Our error against float64 " \
    "is at most " sprintf("%.1f", worst) " times that library\047s.")
}' "$record" >"$work/block" || exit 1

printf '' >"$work/gpu-block"
[ -z "$gpu_record" ] || awk -f bench/gpu_table.awk "$gpu_record" >"$work/gpu-block" || exit 1

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
