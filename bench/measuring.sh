# measuring.sh: what record.sh and gpu_record.sh share; both read it with `.`. No Python: a machine that is measured may
# have none.

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}
# check_suites NAME VALUE: SUITES are some of $all; where they are not all, the variable NAME says where the lines go.
check_suites() {
  for word in $SUITES; do
    case " $all " in *" $word "*) ;; *) die "SUITES: there is no $word; there are $all" ;; esac
  done
  [ "$SUITES" = "$all" ] || [ -n "$2" ] || die "SUITES: a record of some suites only is no record: $1 must say where"
}
# Of $work/info, which `esmm info --json` wrote.
info() { sed -n "s/^ *\"$1\": \"\(.*\)\",\{0,1\}\$/\1/p" "$work/info"; }
dense_libraries() { sed -n 's/^ *"dense_libraries": \[\(.*\)\].*/\1/p' "$work/info" | sed 's/", "/ and /g; s/"//g'; }
slug() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^nvidia-//; s/^-//; s/-$//'; }

# For awk: value(key) of the line at hand, one flat JSON object as `esmm bench --json` writes it; "" where it has none.
# Strings are read up to their first quote: those that are asked for have none inside.
value='function value(key,   rest) {
  if (!index($0, "\"" key "\":"))
    return ""
  rest = substr($0, index($0, "\"" key "\":") + length(key) + 3)
  if (sub(/^"/, "", rest))
    sub(/".*/, "", rest)
  else
    sub(/[,}].*/, "", rest)
  return rest
}'
