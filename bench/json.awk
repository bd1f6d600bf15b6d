# json.awk: value(key) of the line at hand, one flat JSON object as `esmm bench --json` writes it; "" where it has none.
# Strings are read up to their first quote: those that are asked for have none inside.
function value(key,   rest) {
  if (!index($0, "\"" key "\":"))
    return ""
  rest = substr($0, index($0, "\"" key "\":") + length(key) + 3)
  if (sub(/^"/, "", rest))
    sub(/".*/, "", rest)
  else
    sub(/[,}].*/, "", rest)
  return rest
}
