#!/usr/bin/env python3
"""report.py: docs/report.md from bench/report.in.md and the records in bench/results. `make report` runs it.

    python3 bench/report.py           writes docs/report.md
    python3 bench/report.py --check   changes nothing, and fails if something else stands there

The template has no measured number of its own; each stands as a reference in double braces, and a new record renews it:

    {{gpu suite=strips16 m=8192 asked=.125 requested=auto : speedup times}}   a field of the one line that fits, and how
                                                                              it is written: times, ms, percent, text,
                                                                              product, us, integer
    {{table NAME}} {{text NAME}}                                              what a function below makes: a table, words

A reference that fits no line, or more than one, is an error that names it, and nothing is written.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Dict, List, Tuple

import records
import series
from records import Line, Record, RecordError, by, fold, grid, mean, ms, percent, product, times

TEMPLATE = os.path.join("bench", "report.in.md")
PAGE = os.path.join("docs", "report.md")
FORMATS: Dict[str, Callable[[Any], str]] = {
    "times": times,
    "ms": ms,
    "percent": lambda x: percent(float(x)),
    "text": str,
    "us": lambda x: f"{1000 * float(x):.1f}",
    "integer": lambda x: f"{float(x):.0f}",
    "short": lambda x: f"{float(x):.3g}",
}


# ---- named parts ----


def missing(what: List[str]) -> str:
    return "*Not in these records yet: " + "; ".join(what) + ".*" if what else ""


def text_sweep(cpu: Record, gpu: Record) -> str:
    found = series.sweep(gpu)
    worst = min(found, key=lambda x: x.over_dense)
    return (f"Over {len(found)} products `auto` is {times(mean([x.over_dense for x in found]))} times as fast as "
            f"cuBLAS in the geometric mean, and {mean([x.over_best for x in found]):.3f} of the fastest that could have "
            f"been taken; at its worst against cuBLAS it is {worst.over_dense:.3f} times as fast ({worst.name})")  # fmt: skip


def text_storm(cpu: Record, gpu: Record) -> str:
    lines = gpu.need("random products", suite="storm")
    return (f"of {len(lines)} random products, {len(series.slow(lines))} are slower than 0.95 times cuBLAS, and the "
            f"geometric mean is {times(mean([line['speedup'] for line in lines]))}")  # fmt: skip


def text_ceilings(cpu: Record, gpu: Record) -> str:
    data = series.roofline(gpu)
    return (f"{data.rate['bf16'] / 1e12:.0f} TFLOP/s in bf16, {data.rate['f32'] / 1e12:.0f} TFLOP/s in fp32 and "
            f"{data.bandwidth / 1e12:.2f} TB/s ({data.source})")  # fmt: skip


def floor_text(number: int) -> Callable[[Record, Record], str]:
    def text(cpu: Record, gpu: Record) -> str:
        kernel = series.roofline(gpu).kernels[number - 1]
        return f"{100 * kernel.floor / kernel.ms:.0f} %"

    return text


def text_peers(cpu: Record, gpu: Record) -> str:
    """Where a peer is faster than ours; that comes first."""
    cut = [line["reason"] for line in gpu.some(suite="cut", asked="peers")]
    if not gpu.has("peers16") and cut:
        return f"*This record's peers were cut off before the first of them ({'; '.join(cut)}).*"
    if not gpu.has("peers16"):
        return ("*This GPU record has no suite peers16 yet: `make gpu-check` on a machine with a GPU and torch measures "
                "the peers of [bench/peers](../bench/peers), and this section is then theirs.*")  # fmt: skip
    found: List[str] = []
    failed: Dict[str, List[str]] = {}
    for group in peer_groups(gpu).values():
        ours = [x for x in group if x["requested"] == "auto" and x["outcome"] == "ok"]
        for line in group:
            if line["outcome"] != "ok":
                failed.setdefault(f"{line['kernel']}: {line['reason']}", []).append(f"{product(line)}, {line['job']}")
            elif ours and line["requested"] != "auto" and line["ms"] < ours[0]["ms"]:
                found.append(f"- **{line['kernel']}** is {times(ours[0]['ms'] / line['ms'])} times as fast as ours on "
                             f"{product(line)}, {line['job']}, {percent(float(line['asked']))} nonzeros "
                             f"({ms(line['ms'])} ms against {ms(ours[0]['ms'])} ms).")  # fmt: skip
    text = (
        "Where a peer is faster:\n\n" + "\n".join(found) if found else "No peer is faster than ours on these products."
    )
    if cut:
        text += f"\n\nThis record's peers were cut off ({'; '.join(cut)}): some of them are missing."
    if failed:
        text += "\n\nWhat did not run: " + "; ".join(f"{x} ({'; '.join(at)})" for x, at in failed.items()) + "."
    return text


def peer_groups(gpu: Record) -> Dict[Any, List[Line]]:
    return by(gpu.some(suite="peers16"), lambda x: (x["job"], x["m"], x["n"], x["k"], x["asked"]))


def table_peers(cpu: Record, gpu: Record) -> str:
    """Without cuBLAS, which is the unit."""
    rows = []
    for (job, *_), group in sorted(peer_groups(gpu).items(), key=lambda x: (*x[0][:4], float(x[0][4]))):
        for line in sorted((x for x in group if x["outcome"] == "ok"), key=lambda x: float(x["ms"])):
            name = f"**ours** ({line['kernel']})" if line["requested"] == "auto" else line["kernel"]
            if not name.startswith("cublas"):
                rows.append([job, product(line), percent(float(line["asked"])), name, times(line["speedup"])])
    return grid(["job", "product", "nonzeros>", "contestant", "times cuBLAS>"], rows) if rows else ""


def table_libraries(cpu: Record, gpu: Record) -> str:
    """cuSPARSE, from the command's own --peers."""
    head = ["product", "format", "nonzeros of B>", "ours ms>", "cuBLAS ms>", "cuSPARSE BSR ms>", "cuSPARSE CSR ms>"]
    return grid(head, [[*series.library_row(line), *series.library_cells(line)[1:]] for line in series.libraries(gpu)])


def table_ladder(cpu: Record, gpu: Record) -> str:
    data = series.ladder(gpu)
    return grid(["step", "look for zeros ms>", "multiply ms>", "times cuBLAS>"],
                [[s.name, "inside" if s.inside else ms(s.extract) if s.extract else "", ms(s.multiply),
                  times(data.dense / (s.extract + s.multiply))] for s in data.steps])  # fmt: skip


def table_floor(cpu: Record, gpu: Record) -> str:
    return grid(["kernel", "product", "ms>", "floor ms>", "floor over time>"],
                [[k.name, k.what, ms(k.ms), ms(k.floor), f"{100 * k.floor / k.ms:.0f} %"] for k in series.roofline(gpu).kernels])  # fmt: skip


def table_nets(cpu: Record, gpu: Record) -> str:
    """The layers of the trained net: PERFORMANCE.md has the activations generated alike."""
    found_rows = [row for row in series.nets(cpu, gpu).rows if row[0].startswith("layer")]
    names = [n for n in ("auto", "joint", "fused", "half", "fine") if any(n in f for _, f in found_rows)]
    return grid(["layer, device, rows", *[n + ">" for n in names]],
                [[name, *[times(found[n]) if n in found else "" for n in names]] for name, found in found_rows])  # fmt: skip


def table_ffn(cpu: Record, gpu: Record) -> str:
    lines = gpu.need("the layer", suite="ffn16", mode="exact")
    return grid(["zeros of the hidden layer", "forward, times dense>", "whole step, times dense>"],
                [[x["zeros"], times(x["forward_times_dense"]), times(x["step_times_dense"]) if "step_times_dense" in x
                  else ""] for x in lines])  # fmt: skip


PARTS: Dict[str, Callable[[Record, Record], str]] = {
    "text sweep": text_sweep,
    "text storm": text_storm,
    "text ceilings": text_ceilings,
    "text peers": text_peers,
    "text floor-joint-f32": floor_text(2),
    "text floor-joint": floor_text(5),
    "text floor-decode": floor_text(10),
    "text cpu": lambda cpu, gpu: cpu.stamp,
    "text gpu": lambda cpu, gpu: gpu.stamp,
    "text missing-density": lambda cpu, gpu: missing(series.density(cpu, gpu).missing),
    "text missing-size": lambda cpu, gpu: missing(series.sizes(cpu, gpu).missing),
    "text missing-roofline": lambda cpu, gpu: missing(series.roofline(gpu).missing),
    "text missing-nets": lambda cpu, gpu: missing(series.nets(cpu, gpu).missing),
    "table peers": table_peers,
    "table libraries": table_libraries,
    "table ladder": table_ladder,
    "table floor": table_floor,
    "table nets": table_nets,
    "table ffn": table_ffn,
}
REFERENCE = re.compile(r"\{\{(.*?)\}\}", re.S)


def refer(words: str, cpu: Record, gpu: Record) -> Tuple[Line, str, str]:
    """The line of a reference, its field, and how that is written."""
    found = re.fullmatch(r"(cpu|gpu) ((?:\w+=\S+ )+): (\w+) (\w+)", words)
    if not found:
        raise RecordError(f"{{{{{words}}}}} is no reference; report.py says what there is")
    kind, conditions, field, form = found.groups()
    where: Dict[str, Any] = {}
    for condition in conditions.split():
        key, value = condition.split("=", 1)
        try:
            where[key] = float(value)
        except ValueError:
            where[key] = value
    return (cpu if kind == "cpu" else gpu).one(f"{{{{{words}}}}}", **where), field, form


def resolve(words: str, cpu: Record, gpu: Record) -> str:
    words = " ".join(words.split())
    if words in PARTS:
        return PARTS[words](cpu, gpu)
    line, field, form = refer(words, cpu, gpu)
    if form == "product":
        return product(line)
    if form not in FORMATS:
        raise RecordError(f"{{{{{words}}}}}: nothing is written as {form}; there are {', '.join(FORMATS)} and product")
    if line.get(field) is None:
        raise RecordError(f"{{{{{words}}}}}: {line['_at']} has no {field}")
    return FORMATS[form](line[field])


def fold_page(text: str) -> str:
    """Paragraphs in lines of at most 120 characters; tables, headings, code and figures as they are."""
    made, code = [], False
    for block in re.split(r"\n{2,}", text):
        code_here = code
        if block.count("```") % 2:
            code = not code
        if code_here or code or re.match(r"(\||#|```|<|!\[|- |\d+\. )", block) or not block.strip():
            if re.match(r"(- |\d+\. )", block) and not code_here:
                block = "\n".join(fold(item, "  ") for item in re.split(r"\n(?=- |\d+\. )", block))
            made.append(block)
        else:
            made.append(fold(block))
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(made)).rstrip() + "\n"


def render(template: str, cpu: Record, gpu: Record) -> str:
    note = "<!-- Made by `make report` from bench/report.in.md and the records in bench/results: change those. -->"
    return note + "\n\n" + fold_page(REFERENCE.sub(lambda found: resolve(found.group(1), cpu, gpu), template))


if __name__ == "__main__":
    records.main("report", lambda: {PAGE: render(records.page(TEMPLATE), records.load("cpu"), records.load("gpu"))})
