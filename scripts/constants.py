#!/usr/bin/env python3
"""constants.py: the constants of what the plan predicts, which src/cpu/costs.h and src/cuda/costs.h hold.

    python3 scripts/constants.py [--most N]          counts them, and looks for others
    python3 scripts/constants.py --perturb SEED DIR  writes DIR/cpu/costs.h and DIR/cuda/costs.h with other values

A constant is a line `#define NAME number` of these headers. A number in a cost function or in a kernel's .cost that is
in neither of them could not be changed with the others: it is named with its file and line, and is a failure; so are
more than N constants. Cost functions are those whose names end in terms, line, units, seconds_before, sample_seconds or
_threads, and what they use of the same file and of headers that it includes from the same folder: functions, macros,
tables. 0, a half, 1, and other powers of two are no constants.

--perturb multiplies each constant by a factor of its own, from 0.5 to 2, evenly by logarithm; the same seed gives the
same. `make BUILD=build/other COSTS=DIR` then builds the library with these. A folder without costs.h is left out.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import random
import re
import sys
from typing import Dict, Iterator, List, NamedTuple, Set, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ("cpu", "cuda")
CONSTANT = re.compile(r"^#define (\w+) (\d[\d.]*(?:e[+-]?\d+)?)(?![\w.])", re.M)
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)", re.I)
COST_FUNCTION = re.compile(r"(?:\w+_)?(?:terms|line|units)(?:_\w+)?|\w*(?:seconds_before|sample_seconds|_threads)")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.S)
ATTRIBUTE = re.compile(r"__attribute__\(\((?:[^()\n]|\([^()\n]*\))*\)\) ?")
MACRO = re.compile(r"^#define (\w+)((?:\\\n|[^\n])*)", re.M)
FUNCTION = re.compile(r"^[A-Za-z_][^;{}#]*?\b(\w+)\((?:[^;{}#])*\)\n\{\n.*?^\}", re.M | re.S)
TABLE = re.compile(r"^(?:static )?const [^;{}()=]*?\b(\w+)(?:\[[^\]]*\])* = .*?;\n", re.M | re.S)
COST = re.compile(r"\.cost = \{([^}]*)\}")


class Definition(NamedTuple):
    """A function, a macro or a table: its name, its text, and the line that this begins at."""

    name: str
    text: str
    line: int


class Source(NamedTuple):
    path: str
    text: str  # without comments and strings, line by line as it was
    includes: List[str]
    definitions: List[Definition]


def read(path: str) -> Source:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        whole = f.read()
    includes = re.findall(r'^#include "([^"]+)"', whole, re.M)
    text = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), whole)
    text = ATTRIBUTE.sub("", text)
    found = [
        Definition(m.group(1), m.group(), 1 + text.count("\n", 0, m.start()))
        for pattern in (MACRO, FUNCTION, TABLE)
        for m in pattern.finditer(text)
    ]
    return Source(path, text, includes, found)


def sources(folder: str) -> Dict[str, Source]:
    """The C files and headers of a device, by path."""
    at = os.path.join("src", folder)
    found = glob.glob(os.path.join(ROOT, at, "**", "*.[ch]"), recursive=True)
    return {path: read(path) for path in sorted(os.path.relpath(p, ROOT) for p in found)}


def seen_by(source: Source, all_of: Dict[str, Source]) -> Iterator[Source]:
    """A file and the headers that it includes, which include others."""
    seen: Set[str] = set()
    left = [source.path]
    while left:
        path = left.pop()
        if path in seen or path not in all_of:
            continue
        seen.add(path)
        yield all_of[path]
        for name in all_of[path].includes:
            left += [os.path.normpath(os.path.join(os.path.dirname(path), name)), os.path.join("src", name)]


def numbers(text: str, line: int) -> Iterator[Tuple[int, str]]:
    """Numbers with a point or an exponent that are no power of two, with their lines."""
    for m in NUMBER.finditer(text):
        if float(m.group()) != 0.0 and math.frexp(float(m.group()))[0] != 0.5:
            yield line + text.count("\n", 0, m.start()), m.group()


def strays(folder: str) -> Set[Tuple[str, int, str]]:
    """Numbers of cost functions and of .cost that are in no header: path, line, number."""
    header = os.path.join("src", folder, "costs.h")
    all_of = sources(folder)
    found: Set[Tuple[str, int, str]] = set()
    for source in all_of.values():
        if source.path == header:
            kept = CONSTANT.sub("", source.text)  # what is no plain constant
            found.update((header, line, number) for line, number in numbers(kept, 1))
            continue
        for m in COST.finditer(source.text):
            line = 1 + source.text.count("\n", 0, m.start(1))
            found.update((source.path, at, number) for at, number in numbers(m.group(1), line))
            for cost in m.group(1).replace("\\", " ").split(","):
                alone = cost.split("=")[-1].strip()  # also of [ESMM_COST_TERMS - 1] = ...
                if re.fullmatch(r"[\d.]+(?:e[+-]?\d+)?", alone, re.I) and float(alone) != 0.0:
                    found.add((source.path, line, alone))
        if not any(COST_FUNCTION.fullmatch(d.name) for d in source.definitions):
            continue
        visible: Dict[str, List[Tuple[str, Definition]]] = {}
        for other in seen_by(source, all_of):
            for d in other.definitions if other.path != header else []:
                visible.setdefault(d.name, []).append((other.path, d))
        left = [d.name for d in source.definitions if COST_FUNCTION.fullmatch(d.name)]
        done: Set[str] = set()
        while left:
            name = left.pop()
            if name in done:
                continue
            done.add(name)
            for path, d in visible.get(name, []):
                found.update((path, line, number) for line, number in numbers(d.text, d.line))
                left += re.findall(r"(?<![\w.>])[A-Za-z_]\w*", d.text)  # members of structs are none of them
    return found


def headers() -> Iterator[Tuple[str, str]]:
    """The folders that have constants, and their headers' texts."""
    for folder in FOLDERS:
        path = os.path.join(ROOT, "src", folder, "costs.h")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                yield folder, f.read()


def count(most: int) -> int:
    total = 0
    status = 0
    for folder, text in headers():
        here = len(CONSTANT.findall(text))
        total += here
        print(f"src/{folder}/costs.h: {here}")
        for path, line, number in sorted(strays(folder)):
            print(f"{path}:{line}: {number} is no constant of src/{folder}/costs.h")
            status = 1
    print(f"{total} constants")
    if total > most:
        print(f"more than {most}")
        status = 1
    return status


def perturb(seed: str, out: str) -> int:
    def other(m: "re.Match[str]") -> str:
        # By name: one constant more leaves the others what they were.
        value = float(m.group(2)) * 2.0 ** random.Random(f"{seed} {m.group(1)}").uniform(-1.0, 1.0)
        return f"#define {m.group(1)} {value:.9g}"

    for folder, text in headers():
        os.makedirs(os.path.join(out, folder), exist_ok=True)
        with open(os.path.join(out, folder, "costs.h"), "w", encoding="utf-8") as f:
            f.write(CONSTANT.sub(other, text))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=sys.maxsize, metavar="N", help="so many constants at most")
    parser.add_argument("--perturb", nargs=2, metavar=("SEED", "DIR"), help="write headers with other values")
    options = parser.parse_args()
    return perturb(*options.perturb) if options.perturb else count(options.most)


if __name__ == "__main__":
    sys.exit(main())
