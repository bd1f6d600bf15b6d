#!/bin/sh
# test_figures.sh: the tables and numbers of README.md, docs/PERFORMANCE.md and docs/report.md are those of the records and
# agree with each other, the figures are of the same records, and what makes them says what is missing. Drawing needs
# matplotlib, the rest Python alone. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

python=${PYTHON:-python3}
if ! have "$python" || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
  skip 'the tables, the report and its figures' "$python is not Python 3.9 or later"
  exit 0
fi
export PYTHONDONTWRITEBYTECODE=1
unset CPU_RECORD GPU_RECORD

check 'the report is that of its template and the records' "$python" bench/report.py --check
check 'every number is a record'"'"'s, or says what else it is' "$python" bench/check_numbers.py --cells

gpu_record=$("$python" -c 'import sys; sys.path.insert(0, "bench"); import records; print(records.newest("gpu"))')
check 'the tables are those of the records' "$python" bench/tables.py --check

# made SUITE ASKED KERNEL REQUESTED M MS BASELINE MORE: a line of a record of ours.
made() {
  printf '{"suite":"%s","asked":"%s","kernel":"%s","requested":"%s","m":%s,"n":8,"k":16,"ms":%s,"ms_baseline":%s,%s,' "$@"
  printf '"speedup":%s,"dtype":"bf16","date":"D","features":"F","libraries":"L","driver":"V","device":"cuda:0",' \
    "$(awk "BEGIN { print $7 / $6 }")"
  printf '"device_name":"G","source_id":"S","ms_extract":0,"rel_err":1,"rel_err_baseline":1,"outcome":"ok","bit_identical":true}\n'
}
made_tables() { # KIND: the blocks of that record, a file each
  blocks=$WORK/made
  rm -rf "$blocks"
  mkdir -p "$blocks"
  "$python" - "$WORK/made.jsonl" "$1" "$blocks" <<'PY'
import os, sys
sys.path.insert(0, "bench")
import records, tables
path, kind, place = sys.argv[1:]
try:
    made = tables.blocks(**{"cpu": None, "gpu": None, kind: records.Record(path, kind)})
except records.RecordError as e:
    sys.exit(str(e))
for name, text in made.items():
    with open(os.path.join(place, name), "w", encoding="utf-8") as file:
        file.write(text + "\n" if text else "")
PY
}
made_rows() { # against the best of all, random products, a switch, the host
  {
    made sweep16 1 own auto 1 2 2 '"ms_first":2'
    made sweep16 1 rival rival 1 4 2 '"ms_first":null'
    made sweep16 .5 own auto 16 2 3 '"ms_first":8'
    made sweep16 .5 rival rival 16 1 3 '"ms_first":null'
    made storm .5 own auto 7 2 1 '"line":4,"generator":"random","density_a":0.5,"density_b":1'
    made storm .5 own auto 9 1 2 '"line":5,"generator":"random","density_a":0.5,"density_b":1'
    made switch .05 auto auto 16 1 1 '"switch_every":50,"best_dense":"x","best_sparse":"y","switch_ratio":1.25,"dense_ratio":1.01,"ms_best":1,"ms_auto":1.25,"ms_auto_dense":2.02,"ms_baseline_dense":2'
    made host .05 own auto 16 1 1 '"host_ns":1234'
    made given16 .125 own auto 32 2 6 '"given":null'
    made given16 .125 own auto 32 1.5 6 '"given":"a"'
    made random16 .01 own auto 32 2 3 '"given":null'
    made random16 .01 rival rival 32 4 3 '"given":null'
  } >"$WORK/made.jsonl"
  made_tables gpu || return 1
  grep -q -F '| 16 rows and more, 5 to 50 % | 1 | 1.50 | 3.00 | 0.500 | 0.500 | 1 | 0 |' "$blocks/gpu16-best" &&
    grep -q -F '| all | 2 | 1.22 | 1.73 | 0.707 | 0.500 | 1 | 0 |' "$blocks/gpu16-best" &&
    tr '\n' ' ' <"$blocks/gpu16-best" | grep -q 'best: 16 × 8, k 16 at 50 %, where it took own and rival is the fastest. A first call, .* takes 2.00 times .* 4.00 times at most' &&
    grep -q -F '| 4 | 7 × 8, k 16 | bf16 | random, A 50 %, B 100 % | own | 2.000 | 0.50 |' "$blocks/gpu-storm" &&
    tr '\n' ' ' <"$blocks/gpu-storm" | grep -q -F 'below 0.95 times cuBLAS on 1 of 2 products (50 %), those above. It is at its worst on 7 × 8' &&
    grep -q 'turns from dense to 5 % and back every 50 calls | x, y | 1.000 | 1.250 | 1.250 |' "$blocks/gpu-switch" &&
    grep -q 'stays dense | cuBLAS | 2.000 | 2.020 | 1.010 |' "$blocks/gpu-switch" &&
    grep -q -F '| 16 × 8, k 16 | 5 % | own | 1.23 |' "$blocks/gpu-host" &&
    grep -q -F '| 32 × 8, k 16 | 12.5 % | own | 2.000 | 1.500 | 6.000 | 4.00 |' "$blocks/gpu16-given" &&
    grep -q -F '| 32 × 8, k 16 | 1 % | own | 2.000 | 1.50 |' "$blocks/gpu16-anywhere" ||
    { cat "$blocks"/gpu16-[abg]* "$blocks"/gpu-[shs]*; return 1; }
}
check 'tables of a made-up record' made_rows
made_none() { # a record without these suites leaves nothing behind
  made sweep16 1 own auto 1 2 2 '"ms_first":null' >"$WORK/made.jsonl"
  made_tables gpu && [ -s "$blocks/gpu16-sweep" ] || return 1
  for name in gpu16-best gpu-storm gpu-switch gpu-host cpu-calls; do [ ! -s "$blocks/$name" ] || return 1; done
}
check 'tables of a record that lacks suites' made_none
made_calls() { # on one thread and on the record's own number; another suite on another number is another record
  {
    made blockwise 1 own auto 512 2 2 '"threads":2,"host_ns":null'
    made calls 1 own auto 1 1 1 '"threads":1,"host_ns":123.4,"host_ns_min":99.6'
    made calls 1 own auto 1 1 1 '"threads":2,"host_ns":124.6,"host_ns_min":100'
  } | sed 's/"cuda:0"/"cpu"/' >"$WORK/made.jsonl"
  made_tables cpu && grep -q '^### What a call costs' "$blocks/cpu-calls" &&
    grep -q -F '| product | dtype | kernel chosen | ns, 1 thread | ns, 2 threads |' "$blocks/cpu-calls" &&
    grep -q -F '| 1 × 8, k 16 | bf16 | own | 123 | 125 |' "$blocks/cpu-calls" || { cat "$blocks/cpu-calls"; return 1; }
  sed 's/"suite":"calls"/"suite":"decode"/' "$WORK/made.jsonl" >"$WORK/other.jsonl"
  mv "$WORK/other.jsonl" "$WORK/made.jsonl"
  ! made_tables cpu 2>"$WORK/made.err" && grep -q 'threads 1 is not 2, that of the first line' "$WORK/made.err"
}
check 'tables of calls' made_calls
made_twice() { # two lines of auto for one row are not one of them
  {
    made random16 .01 own auto 32 2 3 '"given":null'
    made random16 .01 own auto 32 4 3 '"given":null'
  } >"$WORK/made.jsonl"
  ! made_tables gpu 2>"$WORK/made.err" && grep -q "two lines fill 'ms' of 32 × 8, k 16, 1 %: 2.000 and 4.000" "$WORK/made.err"
}
check 'two lines for one cell of a table are an error' made_twice

# In a record all of whose forced lines have one time and one speed, these stand only where a kernel is named as forced.
forced_apart() {
  sed -E '/"requested":"auto"/!s/"ms":[0-9.e-]+/"ms":77.25/; /"requested":"auto"/!s/"speedup":[0-9.e-]+/"speedup":1234.5/' \
    "$gpu_record" >"$WORK/made.jsonl" && made_tables gpu && grep -h -r -E '1234\.5|77\.2' "$blocks" >"$WORK/forced" || return 1
  [ "$(grep -c '1234' "$blocks/gpu16-dense")" = 8 ] && [ "$(grep -c '1234' "$blocks/gpu16-strips")" = 2 ] &&
    ! grep -E '1234|77\.2' "$blocks/gpu16-anywhere" "$blocks/gpu16-few-rows" "$blocks/gpu16-sweep" "$blocks/gpu16-bsr" \
      "$blocks/gpu16-nm" "$blocks/gpu" "$blocks/summary" "$blocks/gpu-sizes" &&
    ! grep -E '`auto` \|.*1234|kernel chosen.*77' "$WORK/forced" && ! grep -E '77\.2' "$blocks/gpu16-trained" "$blocks/gpu16-dense"
}
check 'no forced row is shown as one of auto' forced_apart

# A copy of the pages in which something is wrong.
copy() {
  rm -rf "$WORK/tree"
  mkdir -p "$WORK/tree/docs" && cp -r bench README.md "$WORK/tree/" && cp docs/PERFORMANCE.md docs/report.md "$WORK/tree/docs/"
}
finds() { # WORDS PROGRAM...: it fails, and says so
  words=$1
  shift
  ! (cd "$WORK/tree" && "$python" "$@") >"$WORK/out" 2>&1 && grep -q -F "$words" "$WORK/out" && ! grep -q Traceback "$WORK/out" ||
    { cat "$WORK/out"; return 1; }
}
wrong_cell() {
  copy &&
    sed -i '/^<!-- gpu16-strips -->/,/^<!-- .gpu16-strips -->/s/| \([0-9.]*\) |$/| 9\1 |/' "$WORK/tree/docs/PERFORMANCE.md" &&
    finds 'is no line' bench/check_numbers.py --cells
}
change_page() { # docs/PERFORMANCE.md of the copy; the statements on stdin change `text`, with `gpu` the record
  cat >"$WORK/change.py"
  (cd "$WORK/tree" && "$python" - "$WORK/change.py" <<'PY'
import sys
sys.path.insert(0, "bench")
import records, tables
path = "docs/PERFORMANCE.md"
words = {"text": records.page(path), "gpu": records.load("gpu"), "records": records, "tables": tables}
with open(sys.argv[1], encoding="utf-8") as file:
    exec(file.read(), words)
assert words["text"] != records.page(path)
with open(path, "w", encoding="utf-8") as file:
    file.write(words["text"])
PY
  )
}
forced_cells() { # the row of a kernel that was forced, in a table of auto's
  copy && change_page <<'PY' || return 1
auto, forced = next((a, f) for a in gpu.some(suite="random16", requested="auto") for f in gpu.some(suite="random16", asked=a["asked"], m=a["m"], n=a["n"])
                    if f["kernel"] != a["kernel"])
text = text.replace(" | ".join(tables.chosen(auto).values()), " | ".join(tables.chosen(forced).values()))
PY
  finds 'auto did not take' bench/check_numbers.py --cells
}
two_pages() { # a number that is right in both, with more digits in one
  copy && change_page <<'PY' || return 1
line = gpu.one("a layer", suite="real16", m=8192, n=3072, requested="auto", asked="relu2_layer1")
row = f"{records.ms(line['ms'])} | "
text = text.replace(row + records.times(line["speedup"]), f"{row}{line['speedup']:.4f}")
PY
  finds ': both are speedup of' bench/check_numbers.py --cells
}
wrong_sentence() {
  copy &&
    sed -i 's/from [0-9.]* at 1024³/from 9.99 at 1024³/' "$WORK/tree/docs/report.md" &&
    finds "'9.99' after" bench/check_numbers.py --cells
}
wrong_prose() {
  copy &&
    echo 'It is 7.3 times as fast.' >>"$WORK/tree/README.md" &&
    finds "'7.3 times' is in no record" bench/check_numbers.py
}
stale_entry() {
  copy &&
    echo 'README.md | 99.9 % | nothing' >>"$WORK/tree/bench/prose_numbers.txt" &&
    finds "no '99.9 %' any more" bench/check_numbers.py
}
wrong_report() {
  copy &&
    sed -i 's/times as fast/times as quick/' "$WORK/tree/docs/report.md" &&
    finds 'make report writes it' bench/report.py --check
}
no_line() {
  copy &&
    sed -i 's/m=8192 asked=.125/m=8193 asked=.125/' "$WORK/tree/bench/report.in.md" &&
    finds 'has no line with suite strips16, m 8193' bench/report.py
}
wrong_line() {
  copy &&
    sed -i '3s/"outcome":"ok"/"outcome":"wrong"/' "$WORK/tree/$gpu_record" &&
    finds 'gpu.jsonl:3: outcome wrong' bench/report.py
}
not_json() {
  copy &&
    sed -i '2s/.*/<script>/' "$WORK/tree/$gpu_record" &&
    finds 'gpu.jsonl:2: not a line of a record' bench/report.py
}
two_builds() {
  copy &&
    sed -i '5s/"source_id":"[^"]*"/"source_id":"other"/' "$WORK/tree/$gpu_record" &&
    finds 'source_id other is not' bench/report.py
}
cut_off() { # a record whose peers were cut off before the first of them
  copy &&
    sed -i '/"suite":"\(peers16\|cut\)"/d' "$WORK/tree/$gpu_record" &&
    sed -n '1s/"suite":"[^"]*","asked":"[^"]*"\(.*\)"reason":"[^"]*"/"suite":"cut","asked":"peers"\1"reason":"no time"/p' \
      "$WORK/tree/$gpu_record" >"$WORK/cut" && [ -s "$WORK/cut" ] &&
    cat "$WORK/cut" >>"$WORK/tree/$gpu_record" && (cd "$WORK/tree" && "$python" bench/report.py) &&
    tr '\n' ' ' <"$WORK/tree/docs/report.md" >"$WORK/cut" &&
    grep -q 'peers were cut off before the first of them (no time)' "$WORK/cut" && ! grep -q 'suite peers16 yet' "$WORK/cut"
}
check 'a changed cell is found' wrong_cell
check 'a forced row in a table of auto is found' forced_cells
check 'pages that differ are found' two_pages
check 'a changed number of a sentence is found' wrong_sentence
check 'a number that no record has is found' wrong_prose
check 'a reason for a number that is gone is found' stale_entry
check 'a changed number of the report is found' wrong_report
check 'a reference to no line is an error that names it' no_line
check 'a record with a wrong result is refused' wrong_line
check 'a record with a broken line is refused' not_json
check 'a record of two builds is refused' two_builds
check 'peers that were cut off are not asked for as if they were new' cut_off

figures_fit() { # valid, small, undated, of these records
  "$python" - <<'PY'
import glob, os, re, sys, xml.dom.minidom
sys.path.insert(0, "bench")
import records
hashes = {records.load("cpu").hash, records.load("gpu").hash}
shown = set(re.findall(r"\]\((figures/\S+)\)", open("docs/report.md", encoding="utf-8").read()))
assert len(shown) == 6, shown
shown |= set(re.findall(r"\]\(docs/(figures/\S+)\)", open("README.md", encoding="utf-8").read()))
assert len(shown) == 7, shown
for name in sorted(shown):
    path = os.path.join("docs", name)
    text = open(path, encoding="utf-8").read()
    xml.dom.minidom.parseString(text.encode())
    assert len(text) < 300 * 1024, path
    assert "<dc:date>" not in text and "<script" not in text, path
    made = re.search(r"records ([0-9a-f ]+)<", text)
    assert made and set(made.group(1).split()) <= hashes, f"{path} is of other records: make figures draws it anew"
PY
}
check 'the figures are valid, small and of these records' figures_fit

if ! "$python" -c 'import matplotlib' 2>/dev/null; then
  skip 'make figures' 'matplotlib is not installed (pip install matplotlib)'
else
  draw() { "$python" bench/figures.py --out "$1" --png "$1"; }
  same_twice() {
    draw "$WORK/one" &&
      draw "$WORK/two" &&
      for file in "$WORK"/one/*.svg; do cmp "$file" "$WORK/two/${file##*/}" || return 1; done
  }
  lacks() {
    grep -v '"suite":"ladder"' "$gpu_record" >"$WORK/gpu.jsonl"; ! GPU_RECORD=$WORK/gpu.jsonl draw "$WORK/three" >"$WORK/out" 2>&1 &&
      grep -q 'figure 3: .* has no line with suite ladder' "$WORK/out" &&
      [ ! -e "$WORK/three/1-density.svg" ]
  }
  newer() { # suites that a record with torch on its machine has; those of this one are left out
    grep -v -E '"suite":"(sizes16|ceilings|layers|peers16|cut)"' "$gpu_record" >"$WORK/older.jsonl"
    GPU_RECORD=$WORK/older.jsonl draw "$WORK/older" || return 1
    "$python" - "$WORK/older.jsonl" >"$WORK/newer.jsonl" <<'PY'
import json, sys
text = open(sys.argv[1], encoding="utf-8").read()
print(text, end="")
base = json.loads(text.splitlines()[0])
def line(**more):
    print(json.dumps({**base, "dtype": "bf16", **more}))
for size in (1024, 4096, 16384, 65536):
    for d in (0.5, 0.22, 0.1, 0.05):
        for form, lag in (("dense", 0.8), ("bsr:128", 0.7)):
            line(suite="sizes16", asked=f"{d:g}", requested="auto", m=size, n=size, k=size, format=form, speedup=min(lag / d, size / 2000 + 0.3), ms=1.0, ms_baseline=2.0)
    line(suite="sizes16", asked="0.5", requested="auto", m=size, n=size, k=size, format="nm:2:4", speedup=1.5, ms=1.0, ms_baseline=2.0)
line(suite="ceilings", asked="read", gb_per_s=4100.0)
for name, top in (("relu2_layer1", 0.024), ("relu2_layer4", 0.98)):
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        line(suite="layers", asked=name, strip_rows=rows, density=top * (rows / 128) ** 0.3)
peer = dict(suite="peers16", asked="0.1", m=1, n=4096, k=14336, job="one row", ms_baseline=0.04, rel_err=1e-3)
line(**peer, requested="auto", kernel="decode_bf16", ms=0.02, speedup=2.0)
line(**peer, requested="rival", kernel="rival", ms=0.01, speedup=4.0)
line(**{**peer, "ms": None, "speedup": None}, requested="broken", kernel="broken", outcome="failed", reason="no such library")
PY
    GPU_RECORD=$WORK/newer.jsonl draw "$WORK/four" &&
      [ "$(wc -c <"$WORK/four/2-size.svg")" -gt "$(wc -c <"$WORK/older/2-size.svg")" ]
  }
  peers_first() {
    copy && cp "$WORK/newer.jsonl" "$WORK/tree/$gpu_record" && (cd "$WORK/tree" && "$python" bench/report.py) &&
      tr '\n' ' ' <"$WORK/tree/docs/report.md" | grep -q '\*\*rival\*\* is 2.00 times as fast as ours on 1 × 4096, k 14336, one row, 10 % .* What did not run: broken' &&
      ! grep -q 'suite sizes16 of' "$WORK/tree/docs/report.md"
  }
  check 'the same records give the same figures' same_twice
  check 'a record that lacks a suite draws nothing and says which' lacks
  check 'newer suites are drawn' newer
  check 'what a peer does better comes first' peers_first
fi

refused() {
  ! "$python" bench/peers/run.py --suites nothing >"$WORK/out" 2>&1 &&
    grep -q 'there is no suite nothing' "$WORK/out"
}
check 'bench/peers names its suites' refused
ends() { # what its exit status says, with suites that stop, are late or are whole
  "$python" - <<'PY'
import contextlib, io, sys, types
sys.path.insert(0, "bench/peers")
import run
run.Rig = lambda seconds: types.SimpleNamespace(common={})
def whole(rig): pass
def late(rig): run.late["jobs of peers16"] += 2
def stops(rig): raise MemoryError("full")
def wrong(rig): run.wrong_ours.append("1 x 1"); late(rig)
for suite, status, words in ((whole, 0, None), (late, 3, "cut off: there was no time left for 2 jobs of peers16"),
                             (stops, 3, "cut off: peers16 stopped: MemoryError: full"), (wrong, 1, None)):
    run.late.clear(), run.stopped.clear(), run.wrong_ours.clear()
    run.suite_peers16, out = suite, io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        got = run.main(["--suites", "peers16"])
    assert got == status, (suite, got)
    assert words is None or words == out.getvalue().splitlines()[-1], out.getvalue()
PY
}
check 'bench/peers says with its exit status that something is missing' ends
data() { # shares that are those asked for, also where there are few blocks; a wrong result that is said at once
  "$python" - <<'PY'
import contextlib, io, sys, types, torch
sys.path.insert(0, "bench/peers")
import run
rig = types.SimpleNamespace(torch=torch, device="cpu", common={})
for density, blocks, ks in ((0.5, 32, 512), (0.22, 14, 225), (0.05, 3, 51), (1e-6, 1, 1)):
    weight = run.keep_blocks(rig, torch.ones(1024, 1024, dtype=torch.bfloat16), 128, density)
    assert run.shares(rig, weight, 128) == (blocks / 64, blocks / 64), (density, run.shares(rig, weight, 128))
    x = run.strips(rig, 1024, 1024, density)
    assert run.shares(rig, x, 128)[1] == ks / 1024, (density, run.shares(rig, x, 128))
    assert ((x != 0).view(8, 128, 1024).any(1).sum(1) == ks).all(), density
x, weight = torch.ones(4, 8), torch.ones(2, 8)
results = (("cublas_nk", x @ weight.t()), ("esmm", torch.ones(4, 2)))
both = [run.Contestant(name, lambda: None, lambda y=y: y) for name, y in results]
for c in both:
    c.times = [1.0]
what = {"job": "dense", "m": 4, "n": 2, "k": 8, "asked_density": 1.0}
for apart in (False, True):
    out = io.StringIO()
    for c in both:
        c.failed = ""
    with contextlib.redirect_stdout(out):
        run.judge(rig, "peers16", what, both, x, weight, apart)
    assert "\nours is wrong: 4 x 2, k 8: wrong: off by" in "\n" + out.getvalue(), out.getvalue()
mine = [line for line in run.lines if line["requested"] == "auto"]
assert len(mine) == 1 and mine[0]["outcome"] == "failed" and mine[0]["reason"].startswith("wrong"), mine
PY
}
if "$python" -c 'import torch' 2>/dev/null; then
  check 'the data of bench/peers are as asked, and what is wrong is said at once' data
else
  skip 'the data of bench/peers are as asked, and what is wrong is said at once' 'torch is not installed'
fi
if "$python" -c 'import torch, triton' 2>/dev/null; then
  check 'the Triton kernels of the peers are right' env TRITON_INTERPRET=1 "$python" bench/peers/run.py --self-check
else
  skip 'the Triton kernels of the peers are right' 'torch or triton is not installed'
fi
finish
