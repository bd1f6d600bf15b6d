#!/usr/bin/env python3
"""check_numbers.py: every number of README.md, docs/PERFORMANCE.md and docs/report.md is a record's, or has a reason.

    python3 bench/check_numbers.py           lists the numbers that are held to nothing; none is a success
    python3 bench/check_numbers.py --cells   the same, and tables and the report's sentences are those of the records

What stands between <!-- NAME --> and <!-- /NAME --> bench/tables.py writes and checks; docs/report.md, bench/report.py.
This looks at the rest: a number with a unit of time, speed, size or share, or with a decimal point, outside of those
places and in the report's template. It is an error unless bench/prose_numbers.txt names it, with the reason why no
record has it: a definition, arithmetic, a limit. An entry that fits nothing any more is an error, too.

--cells runs check_cells.py: the pages agree with the records, and with each other.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Dict, Iterator, List, Tuple

import check_cells
import records
from records import RecordError

PROSE = os.path.join("bench", "prose_numbers.txt")
PAGES = ("README.md", os.path.join("docs", "PERFORMANCE.md"), os.path.join("bench", "report.in.md"))
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
    for number, line in prose(records.page(page)):
        for match in NUMBER.finditer(line):
            text = match.group()
            if "." in text or re.search(UNITS + "$", text):
                yield number, " ".join(text.split())


def allowed() -> Dict[Tuple[str, str], str]:
    """page|number|reason, a line each."""
    made = {}
    for at, line in enumerate(records.page(PROSE).splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 3 or not all(parts):
            raise RecordError(f"{PROSE}:{at}: not page | number | reason")
        made[parts[0], parts[1]] = parts[2]
    return made


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
            problems += check_cells.problems(records.load("cpu"), records.load("gpu"))
    except (RecordError, OSError) as e:
        sys.exit(f"check_numbers.py: {e}")
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
