#!/bin/sh
# test_report.sh: records as esmm compare and esmm report read them, and the page in a browser. Called by run_tests.sh
# with TREE and WORK set. The browser is Chromium, where it is installed.
set -u
. tests/support/tap.sh

record=$(pwd)/bench/results/amd-epyc/cpu.jsonl page_test=$(pwd)/tests/browser/page_test.py
cd "$WORK" || exit 1
mkdir -p bin && ln -sf "$TREE/esmm" bin/esmm && PATH=$WORK/bin:$PATH
export NO_COLOR=1
unset COLUMNS
if ! esmm report nowhere 2>&1 | grep -q 'cannot be opened'; then
  skip 'records' 'this build has no jansson'
  finish
  exit
fi

# said STATUS TEXT COMMAND...: the exit status, and a text that it says.
said() {
  said_status=$1 said_text=$2
  shift 2
  "$@" >said.out 2>&1
  [ $? = "$said_status" ] && grep -q -F -e "$said_text" said.out || { cat said.out; return 1; }
}

# A record of the same with one product slower, one faster; one whose median alone moved, and one where the dense library
# moved as much: those are noise. One is missing.
awk '
  function scale(name, factor,   at, rest, value) {
    at = match($0, "\"" name "\":[0-9.e+-]+")
    value = substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
    rest = substr($0, RSTART + RLENGTH)
    $0 = substr($0, 1, RSTART - 1) "\"" name "\":" value * factor rest
  }
  NR == 4 { scale("ms", 1.5); scale("ms_min", 1.4) }
  NR == 6 { scale("ms", .5); scale("ms_min", .5) }
  NR == 8 { scale("ms", 1.5) }
  NR == 10 { scale("ms", 1.5); scale("ms_min", 1.5); scale("ms_baseline", 1.5) }
  NR != 12' "$record" >new.jsonl

check 'compare finds nothing in the same record' said 0 ' 0 slower, 0 faster' esmm compare "$record" "$record"
check 'compare finds what is slower, and its status says so' said 3 ': 1 slower, 1 faster, ' esmm compare "$record" new.jsonl
check 'compare names it' sh -c 'esmm compare "$1" new.jsonl | grep -q "^blockwise .25  *512 x 512 x 512 f32 .*slower 1.40x"' - "$record"
check 'compare says what is in one only' said 3 'Only in the old: 1. Only in the new: 0.' esmm compare "$record" new.jsonl
check 'compare the other way round' said 3 ': 1 slower, 1 faster, ' esmm compare new.jsonl "$record"
check 'compare with more noise' said 0 " 0 slower, 0 faster" esmm compare "$record" new.jsonl --noise 1
sed 's/"m":/"m":9/' "$record" >other.jsonl
check 'compare refuses records without a common measurement' said 1 'nothing was measured in both' esmm compare "$record" other.jsonl
check 'compare wants two' said 2 'two records' esmm compare "$record"

# ---- suites: what bench --suite writes is the same measurement as the record's ----
check 'bench --suite list' said 0 'decode        cpu            9' env ESMM_DEVICE=cpu esmm bench --suite list
check 'bench --suite wants a name that there is' said 2 'there is no decod; did you mean decode' esmm bench --device cpu --suite decod
check 'bench --suite knows whose it is' said 2 'nm24 is of a GPU' esmm bench --device cpu --suite nm24
check 'bench --suite alone' said 2 'cannot both be given' esmm bench --device cpu --suite decode --sweep 1,.5
suite() {
  esmm bench auto 1 --no-tune --no-check --device cpu --threads 2 --suite activations --json suite.jsonl >suite.out 2>&1 &&
    esmm compare "$record" suite.jsonl --noise 1 >suite.out 2>&1
  [ $? -le 3 ] && grep -q '^3 measurements in both' suite.out || { cat suite.out; return 1; }
}
check 'bench --suite measures what the record has' suite
same_b() { # B is made once, and A is another for each
  esmm bench auto 1 --no-tune --device cpu --threads 2 --suite unstructured --json again.jsonl >again.out 2>&1 || { cat again.out; return 1; }
  [ "$(grep -c '"outcome":"ok"' again.jsonl)" = 2 ] && grep -q '"asked":".1",.*"density_a":0.1[0-9]*,"density_b":1,' again.jsonl &&
    grep -q '"asked":".05",.*"density_a":0.05[0-9]*,"density_b":1,' again.jsonl || { cat again.jsonl; return 1; }
}
check 'bench --suite makes A anew where only its zeros differ' same_b

# ---- figures ----
plot() {
  esmm bench auto,dense_f32_portable 1 --no-tune --no-check --device cpu --size 48 --sweep 1,.5,.25 --plot plot.svg >plot.out 2>&1 || { cat plot.out; return 1; }
  [ "$(grep -c '<circle' plot.svg)" = 6 ] && grep -q 'nonzero share, %' plot.svg && grep -q '48 x 48 x 48, f32' plot.svg &&
    { ! have python3 || python3 -c 'import xml.dom.minidom; xml.dom.minidom.parse("plot.svg")'; }
}
check 'bench --plot writes SVG' plot
check 'bench --plot wants a sweep' said 2 '--plot draws a sweep' esmm bench --device cpu --plot x.svg
check 'bench --plot knows .svg and .png' said 2 'ends neither in .svg nor in .png' esmm bench --device cpu --sweep 1,.5 --plot x.gif
have rsvg-convert || check 'bench --plot says what a .png needs' said 1 'a .png needs rsvg-convert' \
  esmm bench auto 1 --no-tune --no-check --device cpu --size 8 --sweep 1,.5 --plot x.png

with_failure() { # SUITE: the record, and a line of that suite that has no time
  cat "$record"
  head -n 1 "$record" | sed "s/\"ms\":[^,]*/\"ms\":null/; s/\"outcome\":\"ok\"/\"outcome\":\"failed\"/
    s/\"suite\":\"[^\"]*\"/\"suite\":\"$1\"/"
}
quiet() { # SUITE
  with_failure "$1" >peers.jsonl
  esmm compare "$record" peers.jsonl >quiet.out 2>&1 && ! grep -q 'no time' quiet.out || { cat quiet.out; return 1; }
}
loud() { # SUITE
  with_failure "$1" >peers.jsonl
  esmm compare "$record" peers.jsonl >quiet.out 2>&1
  grep -q "field 'ms' is no time" quiet.out || { cat quiet.out; return 1; }
}
check 'compare takes a peer that could not run for no mistake' quiet peers16
check 'nor one of the sizes' quiet sizes16
check 'but a line of another suite without a time is one' loud dense16

mkdir -p empty two
cp "$record" new.jsonl two/
lines=$(cat "$record" new.jsonl | wc -l)
check 'report of a directory' said 0 "report.html: $((lines)) measurements of 2 records" esmm report two
check 'report of a file, to stdout' sh -c 'esmm report "$1" --out - | grep -q "</html>"' - "$record"
check 'report does not replace a record' said 2 'a record' esmm report two --out two/new.jsonl
check 'report of an empty directory' said 1 'no .jsonl file' esmm report empty
echo '{"check":"test_values","passed":1}' >checks.jsonl
check 'report of a record without a measurement writes nothing' said 1 'there is no measurement' esmm report checks.jsonl --out none.html
check 'and leaves no page' [ ! -e none.html ]
{
  head -n 20 "$record"
  echo 'this is no line of a record'
  echo '{"ms":1,"kernel":"x","m":1,"n":1}'
  echo '{"ms":-1,"kernel":"x","m":1,"n":1,"k":1}'
  echo '{"ms":1,"m":1,"n":1,"k":1}'
  echo '[1]'
  head -n 1 "$record" | sed 's/"version":"[^"]*"/"version":"9.9.9"/; s/"suite":"[^"]*"/"suite":"<\/script><script>window.stolen=1<\/script>"/'
  head -n 1 "$record" | sed 's/"kernel":"[^"]*"/"kernel":"<img src=x onerror=window.stolen=1>"/'
  head -n 1 "$record" | sed "s/\"asked\":\"[^\"]*\"/\"asked\":\"\\\\u2028 \\\\\"'\&amp;\\\\\\\\ $(printf '\342\200\251')\"/"
} >hostile.jsonl
hostile() {
  esmm report hostile.jsonl --out hostile.html >hostile.out 2>&1 && grep -q 'without what is wrong' hostile.out || { cat hostile.out; return 1; }
  for text in ':21: is no JSON' ":22: field 'k' is not there" ":23: field 'ms' is no time" ":24: field 'kernel' is not there" \
    ':25: is no JSON object' ':26: is of version 9.9.9, and this is'; do
    grep -q -F "hostile.jsonl$text" hostile.out || { echo "not said: $text"; cat hostile.out; return 1; }
  done
}
check 'wrong lines are named, the others are shown' hostile
inert() { # the data hold no markup, and no character that ends a line of JavaScript
  sed -n '/id="data"/,/<\/script>/p' hostile.html | sed '1s/.*id="data">//; $s/<\/script>$//' >data.json
  ! grep -q '[<>&]' data.json && ! grep -q "$(printf '\342\200\250')" data.json && ! grep -q "$(printf '\342\200\251')" data.json
}
check 'text in a record cannot leave its place' inert
alone() { ! grep -Eq '(src|href)="(https?:)?//|@import|url\(' report.html && grep -q "default-src 'none'" report.html; }
check 'the page refers to nothing outside itself' alone

browser=
for program in chromium chromium-browser google-chrome; do
  have "$program" && browser=$program && break
done
if [ -z "$browser" ]; then
  skip 'the page in a browser' 'chromium is not installed'
elif ! have python3; then
  skip 'the page in a browser' 'there is no python3'
else
  timeout 300 python3 "$page_test" "$browser" report.html hostile.html "$WORK/browser" >page.out 2>page.err
  status=$?
  grep '^ok\|^not ok\|^#' page.out
  failures=$((failures + $(grep -c '^not ok' page.out)))
  if [ $status != 0 ] && ! grep -q '^not ok' page.out; then not_ok 'the page in a browser' <page.err; fi
fi
finish
