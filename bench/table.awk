# table.awk: what cpu_table.awk and gpu_table.awk share: reading a line of a record, lists, wrapped text.

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
