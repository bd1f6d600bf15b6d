#!/usr/bin/env python3
"""check_numbers.py: every number of README.md, docs/PERFORMANCE.md and docs/report.md is a record's, or has a reason.

    python3 bench/check_numbers.py           lists the numbers that are held to nothing; none is a success
    python3 bench/check_numbers.py --cells   the same, and each measured cell of the tables is looked for in the records

What stands between <!-- NAME --> and <!-- /NAME --> bench/tables.sh writes and checks; docs/report.md, bench/report.py.
This looks at the rest: a number with a unit of time, speed, size or share, or with a decimal point, outside of those
places and in the report's template. It is an error unless bench/prose_numbers.txt names it, with the reason why no
record has it: a definition, arithmetic, a limit. An entry that fits nothing any more is an error, too.

The cells are a second look, by other code than wrote them: a time or speed-up in a table must be what some line of a
record says, of the same product and at the same density where the row and the column name them.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Dict, Iterator, List, Set, Tuple

import records
from records import Line, RecordError, product

PROSE = os.path.join("bench", "prose_numbers.txt")
TABLES = ("README.md", os.path.join("docs", "PERFORMANCE.md"))
PAGES = (*TABLES, os.path.join("bench", "report.in.md"))
UNITS = r"(?:[×x](?! ?\d)|times|%|per cent|ms|us|µs|ns|TF|TFLOPS|TFLOP/s|GFLOP/s|TB/s|GB/s|MB|GB|KB|minutes?|seconds?)"
NUMBER = re.compile(rf"(?<![\w.:/=-])(?:\d[\d,]*\.\d+|\d[\d,]*)(?:[ -]?{UNITS})?(?![\w³])(?! *[×x] *\d)")
# Versions and what is compared with them, not measurements.
VERSION = re.compile(
    r"(?:CUDA|Python|CMake|capability|esmm|before|until|Until|ABI|soname|libesmm\.so\.|find_package\(esmm) ?\d[\d.]*"
)


def prose(text: str) -> Iterator[Tuple[int, str]]:
    """The lines of a page that no program wrote; code blocks but for comments, links and references are left out."""
    inside = code = False
    for number, line in enumerate(REFERENCES.sub(lambda m: "\n" * m.group().count("\n"), text).splitlines(), 1):
        if re.fullmatch(r"<!-- [a-z0-9-]+ -->", line):
            inside = True
        elif re.fullmatch(r"<!-- /[a-z0-9-]+ -->", line):
            inside = False
        elif line.startswith("```"):
            code = not code
        elif not inside:
            if code:
                line = line[line.index("#") :] if "#" in line and not line.startswith("#include") else ""
            line = re.sub(r"\]\([^)]*\)", "]", line)  # where a link leads
            line = re.sub(r"`[^`]*`", "", line)
            line = re.sub(r"arXiv:\S+|\d+\(\d+\)", "", line)
            yield number, VERSION.sub("", line)


REFERENCES = re.compile(r"\{\{.*?\}\}", re.S)


def found_in(page: str) -> Iterator[Tuple[int, str]]:
    with open(os.path.join(records.ROOT, page), encoding="utf-8") as file:
        for number, line in prose(file.read()):
            for match in NUMBER.finditer(line):
                text = match.group()
                if "." in text or re.search(UNITS + "$", text):
                    yield number, " ".join(text.split())


def allowed() -> Dict[Tuple[str, str], str]:
    """page|number|reason, a line each."""
    made = {}
    with open(os.path.join(records.ROOT, PROSE), encoding="utf-8") as file:
        for at, line in enumerate(file, 1):
            if line.startswith("#") or not line.strip():
                continue
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 3 or not all(parts):
                raise RecordError(f"{PROSE}:{at}: not page | number | reason")
            made[parts[0], parts[1]] = parts[2]
    return made


# ---- cells ----


def said(line: Line, column: str) -> Set[str]:
    """What a cell of that column may say of a line, as it would be written."""
    if "err" in column:
        return {f"{line['rel_err'] / line['rel_err_baseline']:.2f}"} if line.get("rel_err_baseline") else set()
    if column.startswith(("us", "ns", "least")):
        found = [line.get("host_ns"), line.get("host_ns_min")]
        return {form for x in found if x for form in (f"{x:.0f}", f"{x / 1000:.2f}")}
    if "ms" in column or column in ("extract", "multiply"):
        times_of = [x for key, x in line.items() if key.startswith("ms") and isinstance(x, (int, float))]
        times_of += [x for x in (line.get("peer_ms") or {}).values() if x]
        if line.get("ms_extract") is not None and line.get("ms") is not None:
            times_of.append(line["ms"] - line["ms_extract"])
        return {form for x in times_of for form in (records.ms(x), f"{x:.3f}")}
    ratios = [line.get(key) for key in ("speedup", "switch_ratio", "dense_ratio")]
    return {form for x in ratios if x for form in (records.times(x), f"{x:.3f}")}


MEASURED = re.compile(
    r"times|ms\b|^\d+(\.\d+)? %$|us a call|ns a call|^least|^extract|^multiply|dense kernel|joint forced|over it|error"
)


def wrong_cells(page: str, lines: List[Line]) -> Iterator[str]:
    """Cells of tables in generated blocks that no line says: one of the row's product, at the column's density."""
    skip = {"gpu16-best", "gpu16-epilogue", "gpu16-given", "run"}  # means over many lines, ratios of two, another layout
    products = records.by([line for line in lines if line.get("n")], product)
    name = ""
    columns: List[str] = []
    with open(os.path.join(records.ROOT, page), encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            begin = re.match(r"<!-- (/?)([a-z0-9-]+) -->", text)
            if begin:
                name, columns = "" if begin.group(1) else begin.group(2), []
            if not name or name in skip or not text.startswith("|"):
                continue
            cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
            if not columns:
                columns = cells
                continue
            mine = next(
                (products[key] for cell in cells for key in (cell, cell.rsplit(", ", 1)[0]) if key in products), lines
            )
            for column, cell in zip(columns, cells):
                if not MEASURED.search(column) or not re.fullmatch(r"\d+(\.\d+)?", cell):
                    continue
                share = re.fullmatch(r"(\d+(?:\.\d+)?) %", column)
                fit = [x for x in mine if not share or _is(x["asked"], float(share.group(1)) / 100)]
                if not any(cell in said(line, column) for line in fit):
                    yield f"{page}:{number}: {cell} under '{column}' of {name} is no line's of the records"


def _is(asked: object, share: float) -> bool:
    try:
        return abs(float(str(asked)) - share) < 1e-9
    except ValueError:
        return False


def main() -> None:
    if sys.argv[1:] not in ([], ["--cells"]):
        sys.exit(f"check_numbers.py: unknown words: {' '.join(sys.argv[1:])}; it takes none but --cells")
    problems: List[str] = []
    try:
        reasons = allowed()
        unused = set(reasons)
        for page in PAGES:
            for number, text in found_in(page):
                if (page, text) in reasons:
                    unused.discard((page, text))
                else:
                    problems.append(
                        f"{page}:{number}: '{text}' is in no record: refer to a line, or give the reason in {PROSE}"
                    )
        problems += [f"{PROSE}: {page} has no '{text}' any more" for page, text in sorted(unused)]
        if sys.argv[1:]:
            lines = records.load("cpu").lines + records.load("gpu").lines
            for page in TABLES:
                problems += wrong_cells(page, lines)
    except (RecordError, OSError) as e:
        sys.exit(f"check_numbers.py: {e}")
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
