#!/bin/sh
# test_figures.sh: every number of README.md, docs/PERFORMANCE.md and docs/report.md is a record's, the figures are those of
# the records, and what makes them says what is missing. Drawing needs matplotlib, the rest Python alone. Called by
# run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

python=${PYTHON:-python3}
if ! have "$python" || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
  skip 'the report and its figures' "$python is not Python 3.9 or later"
  exit 0
fi
export PYTHONDONTWRITEBYTECODE=1
unset CPU_RECORD GPU_RECORD

check 'the report is that of its template and the records' "$python" bench/report.py --check
check 'every number is a record'"'"'s, or says what else it is' "$python" bench/check_numbers.py --cells

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
gpu_record=$("$python" -c 'import sys; sys.path.insert(0, "bench"); import records; print(records.newest("gpu"))')
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
