"""check_cells.py: README.md, docs/PERFORMANCE.md and docs/report.md agree with the records and with each other.
`check_numbers.py --cells` runs it.

The pages are read as they stand, by other code than wrote them. A row of a table names its product, its share of
nonzeros and its kernel; the one line of the record that has them must say every measured cell of the row. A row that
names no forced kernel is of `auto`: only lines with "requested":"auto" count. The report's sentences are read through
their template. Where two places give the same field of the same line, the texts must be equal. A table that is not
listed here is an error.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import records
import report
import series
from records import Line, Record, RecordError, asked, percent, product

# Block, or the report's table by its first column: the record and the suites of its rows.
TABLES = {
    "cpu": "cpu", "cpu-activations": "cpu activations", "cpu-calls": "cpu calls", "summary": "", "gpu": "gpu blockwise",
    "gpu-sizes": "gpu sizes blockwise", "gpu-one-operand": "gpu", "gpu-long-k": "gpu long-k",
    "gpu16-dense": "gpu dense16", "gpu16-strips": "gpu strips16", "gpu16-joint": "gpu joint16",
    "gpu16-few-rows": "gpu decode16", "gpu16-anywhere": "gpu random16", "gpu16-sweep": "gpu sweep16",
    "gpu-storm": "gpu storm", "gpu16-bsr": "gpu bsr16", "gpu16-nm": "gpu nm24", "gpu16-epilogue": "gpu epilogue16",
    "gpu16-given": "gpu given16",
    "gpu16-prepare": "gpu prepare16", "gpu-switch": "gpu switch", "gpu-host": "gpu host", "gpu16-trained": "gpu real16",
    "job": "gpu peers16", "product": "gpu bsr16 nm24", "step": "gpu ladder", "floor": "gpu", "layer, device, rows": "",
    "zeros of the hidden layer": "gpu ffn16",
}  # fmt: skip
MEANS = {"gpu16-best"}  # over many lines
WORDS = {"what was found"}  # the report's tables without cells of the records, by their second column
ZEROS = {  # rows whose suite is named by their zeros
    "CPU, none": "cpu blockwise", "CPU, anywhere in A": "cpu unstructured",
    "GPU, of a trained net, early layer": "gpu real16", "GPU, blocks of 128 in B": "gpu bsr16",
    "cpu, strips of 32 in A and B": "cpu blockwise", "cpu, anywhere in A": "cpu unstructured",
    "cpu, anywhere in A, few rows": "cpu decode", "cpu, strips of 32 in A, bf16": "cpu strips16",
}  # fmt: skip


def is_auto(line: Line) -> bool:
    return bool(line["requested"] == "auto")


def _a_of(line: Line) -> str:
    return "dense" if line["density_a"] >= 0.99 else f"{percent(line['strip128_density_a'])} in strips"


def _dtype(line: Line) -> str:
    return re.sub("^f", "fp", line["dtype"])


# What a cell of that column says of its line.
NAMES: Dict[str, Callable[[Line, str], bool]] = {
    "product": lambda x, cell: cell in (product(x), f"{product(x)}, {_dtype(x)}"),
    "times faster, by size": lambda x, cell: product(x) == cell,
    "dtype": lambda x, cell: _dtype(x) == cell,
    "nonzeros": lambda x, cell: cell in (percent(asked(x)), percent(x.get("density_a") or 0.0)),
    "nonzeros of A": lambda x, cell: percent(asked(x)) == cell,
    "nonzeros of B": lambda x, cell: percent(asked(x)) == cell,
    "k's some row needs": lambda x, cell: percent(x["strip128_density_a"]) == cell,
    "in strips of 128": lambda x, cell: percent(x["strip128_density_a"]) == cell,
    "kernel": lambda x, cell: is_auto(x) if cell == "`auto`" else cell == x["requested"] == x["kernel"],
    "contestant": lambda x, cell: cell == (f"**ours** ({x['kernel']})" if is_auto(x) else x["kernel"]),
    "activations": lambda x, cell: x["asked"] == cell,
    "layers": lambda x, cell: x["asked"] == cell,
    "step": lambda x, cell: str(x["number"]) == (cell.split(":")[0] if ":" in cell else "0"),
    "block": lambda x, cell: x["format"] == f"bsr:{cell}",
    "format": lambda x, cell: bool(x["format"] == cell),
    "epilogue": lambda x, cell: (x["epilogue"] or "").replace(",", ", ") == cell,
    "job": lambda x, cell: bool(x["job"] == cell),
    "line": lambda x, cell: str(x["line"]) == cell,
    "B": lambda x, cell: f"{x['k']} × {x['n']}" == cell,
    "sparse": lambda x, cell: x["suite"] == cell.lower().replace(" ", "-"),
    "zeros of the hidden layer": lambda x, cell: cell == x["zeros"] and x["mode"] == "exact",
}
CHOSEN = {"kernel chosen", "`auto` takes"}  # the kernel of auto's line
FORCED = {"our dense kernel": "dense", "joint forced": "joint"}  # columns of a kernel that is forced
FIELDS: Dict[str, Callable[[Line], Any]] = {
    "ms_baseline": lambda x: x["ms_baseline"],
    "ms": lambda x: x["ms"],
    "speedup": lambda x: x["speedup"],
    "ms_extract": lambda x: x["ms_extract"],
    "multiply": lambda x: x["ms"] - x["ms_extract"],
    "scan": lambda x: 100 * x["ms_extract"] / x["ms"],
    "error": lambda x: records.error(x),
    "ns": lambda x: x["host_ns"],
    "us": lambda x: x["host_ns"] / 1000,
    "ms_prune": lambda x: x["ms_prune"],
    "ms_prepare": lambda x: x["ms_prepare"],
    "forward": lambda x: x["forward_times_dense"],
    "step": lambda x: x["step_times_dense"],
    **{name: lambda x, name=name: x["peer_ms"][name] for name in series.LIBRARIES},  # type: ignore[misc]
}
COLUMNS = {
    "ms": "ms", "ESMM ms": "ms", "ours ms": "ms", "`auto` ms": "ms", "A looked at, ms": "ms", "bitmaps given, ms": "ms",
    "cuBLAS ms": "ms_baseline", "library ms": "ms_baseline", "dense library ms": "ms_baseline",
    "times faster": "speedup", "times cuBLAS": "speedup", "our dense kernel": "speedup", "joint forced": "speedup",
    "scan of A": "scan", "look for zeros ms": "ms_extract", "error over cuBLAS's": "error",
    "us a call, of the host": "us", "prune ms": "ms_prune", "prepare ms": "ms_prepare",
    "cuSPARSE BSR ms": "cusparse_bsr", "cuSPARSE CSR ms": "cusparse_csr",
    "multiply ms": "multiply", "forward, times dense": "forward", "whole step, times dense": "step",
}  # fmt: skip
OTHERS = {"zeros", "", "A", "layer, device, rows", "floor ms", "floor over time", "over our plain product",
          "the best for it"}  # fmt: skip


class Fact(NamedTuple):
    where: str  # page and line
    line: Line
    field: str
    text: str


def agrees(text: str, value: Optional[float]) -> bool:
    """The value, rounded as the text is."""
    form = "e" if "e" in text else "f"
    digits = len(text.split("e")[0].partition(".")[2])
    return value is not None and f"{value:.{digits}{form}}" == text


# ---- tables ----


class Row(NamedTuple):
    where: str
    table: str
    cells: List[Tuple[str, str]]


def rows_of(page: str) -> Iterator[Row]:
    block, head = "", []
    for number, text in enumerate(records.page(page).splitlines(), 1):
        mark = re.fullmatch(r"<!-- (/?)([a-z0-9-]+) -->", text)
        if mark:
            block = "" if mark.group(1) else mark.group(2)
        if not text.startswith("| "):
            head = []
            continue
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if not head:
            head = cells
        elif block not in MEANS and head[1] not in WORDS and head[0] != "in the earlier write-ups" \
                and not set(cells) <= {"---", "---:"} and (block or page == report.PAGE):
            yield Row(f"{page}:{number}", block or ("floor" if "floor ms" in head else head[0]), list(zip(head, cells)))


def lines_of(words: str, found: Dict[str, Record]) -> List[Line]:
    kind, *suites = words.split()
    return [line for line in found[kind].lines if not suites or line["suite"] in suites]


def row_lines(row: Row, found: Dict[str, Record]) -> List[Line]:
    """The lines that a row may be of, of auto and of forced kernels."""
    first, second = row.cells[0][1], row.cells[1][1]
    if row.table == "floor":
        return [k.line for k in series.roofline(found["gpu"]).kernels if (k.name, k.what) == (first, second)]
    if row.table == "layer, device, rows":
        name, device = first.split(", ")
        return [x for x in lines_of("gpu real16", found) if x["asked"].endswith(name.replace(" ", ""))
                and device.endswith(f" {x['m']}") and x["n"] == 3072]  # fmt: skip
    words = TABLES.get(row.table)
    if words is None:
        raise RecordError(f"{row.where}: the table {row.table} is not listed in check_cells.py")
    key = f"{first}, {second}" if row.table == "summary" else f"cpu, {first}" if row.table == "cpu" else ""
    if key and key not in ZEROS:
        raise RecordError(f"{row.where}: '{key}' is not listed in check_cells.py")
    lines = lines_of(ZEROS[key] if key else words, found)
    blocks = re.fullmatch(r"GPU, blocks of (\d+) in B", key)
    if blocks:
        lines = [line for line in lines if line["format"] == f"bsr:{blocks.group(1)}" and _a_of(line) == "dense"]
    for column, cell in row.cells:
        if column in NAMES:
            lines = [line for line in lines if NAMES[column](line, cell)]
        elif column == "A" and row.table == "gpu16-bsr":
            lines = [line for line in lines if _a_of(line) == cell]
    return lines


def cell_lines(row: Row, column: str, lines: List[Line]) -> List[Line]:
    """Those of them that one column is of."""
    share = re.fullmatch(r"(?:scan of A at )?(\d+(?:\.\d+)?) %", column)
    if share:
        lines = [line for line in lines if agrees(share.group(1), 100 * asked(line))
                 or abs(100 * asked(line) - float(share.group(1))) < 1e-9]  # fmt: skip
    threads = re.fullmatch(r"ns, (\d+) threads?", column)
    if threads:
        lines = [line for line in lines if line["threads"] == int(threads.group(1))]
    if row.table == "gpu16-given":
        lines = [line for line in lines if bool(line["given"]) == (column not in ("kernel chosen", "A looked at, ms"))]
    if row.table == "layer, device, rows" and column != "auto":
        own = [line for line in lines if series.method(line["kernel"]) == column]
        return [line for line in own if not is_auto(line)] or own
    if column in FORCED:
        return [line for line in lines if not is_auto(line) and line["kernel"].startswith(FORCED[column])]
    if row.table in ("step", "floor", "job", "gpu-switch", "gpu16-prepare", "zeros of the hidden layer") \
            or ("kernel" in dict(row.cells) and dict(row.cells)["kernel"] != "`auto`"):
        return lines
    return [line for line in lines if is_auto(line)]


def field_of(row: Row, column: str) -> Optional[str]:
    if re.fullmatch(r"\d+(\.\d+)? %", column) or (row.table == "layer, device, rows" and column != row.table):
        return "speedup"
    return "scan" if column.startswith("scan of A") else "ns" if column.startswith("ns, ") else COLUMNS.get(column)


def facts_of_row(row: Row, found: Dict[str, Record]) -> Iterator[Tuple[str, Optional[Fact]]]:
    """A problem, or a fact, for each measured cell."""
    lines = row_lines(row, found)
    if row.table == "gpu-switch":
        seen = [x for line in lines for x in line.values() if isinstance(x, float)]
        for column, cell in row.cells[3:]:
            if not any(agrees(cell, x) for x in seen):
                yield f"{row.where}: {cell} under '{column}' is no line's of the records", None
        return
    for column, cell in row.cells:
        field = field_of(row, column)
        if column in CHOSEN:
            mine = cell_lines(row, column, lines)
            if not any(line["kernel"] == cell for line in mine):
                took = ", ".join(sorted({line["kernel"] for line in mine})) or "no line is that"
                yield f"{row.where}: auto did not take {cell} there: {took}", None
        elif column not in NAMES and column not in OTHERS and field is None:
            yield f"{row.where}: the column '{column}' of {row.table} is not listed in check_cells.py", None
        number = cell.replace(" %", "")
        if field is None or column in NAMES or cell == "inside" or not cell:
            continue
        mine = cell_lines(row, column, lines)
        if column == "library ms" and row.table == "cpu":
            mine = sorted(mine, key=lambda line: float(line["ms_baseline"]))[:1]
        if row.table == "step" and field == "multiply" and dict(row.cells)["look for zeros ms"] in ("", "inside"):
            field = "ms"
        if len(mine) != 1 or not agrees(number, FIELDS[field](mine[0])):
            one = len(mine) == 1
            says = f", which says {FIELDS[field](mine[0]):.6g}" if one else f", of which there are {len(mine)}"
            yield f"{row.where}: {cell} under '{column}' of {row.table} is no line's of the records{says}", None
        else:
            yield "", Fact(row.where, mine[0], field, number)


# ---- the report's sentences ----


def report_facts(page: str, found: Dict[str, Record]) -> Iterator[Tuple[str, Optional[Fact]]]:
    """The report is its template with texts in place of references: what stands between the template's words."""
    raw = records.page(page)
    text, at = " ".join(raw.split()), 0
    pieces = report.REFERENCE.split(records.page(report.TEMPLATE))
    words, references = [" ".join(x.split()) for x in pieces[::2]], [" ".join(x.split()) for x in pieces[1::2]]
    for before, reference, after in zip(words, references, words[1:]):
        at = text.find(before, at) + len(before)
        end = text.find(after, at) if after else at
        if at < len(before) or end < at:
            yield f"{page}: it is not its template's at '{before[-60:]}'", None
            return
        if reference in report.PARTS:
            continue
        line, field, form = report.refer(reference, found["cpu"], found["gpu"])
        said = text[at:end].strip()
        if form in ("times", "ms", "us"):
            value = line[field] * (1000 if form == "us" else 1)
            if not agrees(said, value):
                yield f"{page}: '{said}' after '{before[-60:]}' is not {field} of {line['_at']}: {value:.6g}", None
            elif form != "us":
                yield "", Fact(f"{page}: '{before[-40:]} {said}'", line, field, said)


def problems(cpu: Record, gpu: Record) -> Iterator[str]:
    found = {"cpu": cpu, "gpu": gpu}
    facts: Dict[Tuple[str, str], Fact] = {}
    pages = ("README.md", "docs/PERFORMANCE.md", report.PAGE)
    made = [x for page in pages for row in rows_of(page) for x in facts_of_row(row, found)]
    made += report_facts(report.PAGE, found)
    for problem, fact in made:
        if fact is None:
            yield problem
            continue
        first = facts.setdefault((fact.line["_at"], fact.field), fact)
        if first.text != fact.text:
            both = f"{first.where} says {first.text} and {fact.where} says {fact.text}"
            yield f"{both}: both are {fact.field} of {fact.line['_at']}"
    if len(facts) < 100:
        yield f"only {len(facts)} numbers were found in the tables of {', '.join(pages)}"
