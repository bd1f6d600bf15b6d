"""records.py: reads the records of bench/results for the tables, the figures, the report and the check of numbers.

A record is a file of lines, each one flat JSON object as `esmm bench --json` writes it, with what was asked for in
front. A record is of one machine, one day and one build. A line with a wrong result makes all of it invalid. A line or
a field that is missing is an error that names it, its file and the command that measures it.

Only Python's own library is used: tables and report must not need what the figures need.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Suites that time no product and are checked in other ways, or not at all.
UNCHECKED = {"switch", "host", "calls", "prepare16", "ffn16", "ceilings", "layers", "cut"}
PEERS = {"peers16", "sizes16"}  # measured by bench/peers, which calls each contestant's own checks
STAMP = ("device_name", "features", "libraries", "date", "source_id")
NEWER = {"cpu": "make bench-record", "gpu": "make gpu-check, where there is a GPU,"}


class RecordError(Exception):
    """A record that is not there, is wrong, or lacks a line that is needed."""


class Line(Dict[str, Any]):
    """A line of a record; a field that it lacks is an error."""

    def __missing__(self, key: str) -> Any:
        raise RecordError(f"{self['_at']}: there is no {key}")


def _same(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        try:
            return math.isclose(float(value), float(wanted), rel_tol=1e-9)
        except (TypeError, ValueError):
            return False
    return bool(value == wanted)


def _text(where: Dict[str, Any]) -> str:
    return ", ".join(f"{key} {'of some kind' if callable(want) else want}" for key, want in where.items())


class Record:
    """The lines of one file. kind is cpu or gpu."""

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind = path, kind
        self.lines: List[Line] = []
        try:
            with open(os.path.join(ROOT, path), "rb") as file:
                data = file.read()
        except OSError as e:
            raise RecordError(f"{path}: {e.strerror}") from e
        self.hash = hashlib.sha256(data).hexdigest()[:16]
        for number, text in enumerate(data.splitlines(), 1):
            try:
                found = json.loads(text)
            except ValueError as e:
                raise RecordError(f"{path}:{number}: not a line of a record: {e}") from e
            if not isinstance(found, dict):
                raise RecordError(f"{path}:{number}: not a line of a record: no object")
            line = Line(found, _at=f"{path}:{number}")
            self._check(line)
            self.lines.append(line)
        if not self.lines:
            raise RecordError(f"{path} has no lines; {NEWER[kind]} writes them")

    def _check(self, line: Line) -> None:
        stamp = (*STAMP, "driver" if self.kind == "gpu" else "threads")
        for key in ("suite", "asked", "kernel", *stamp):
            if key not in line:
                raise RecordError(f"{line['_at']}: there is no {key}; {NEWER[self.kind]} writes a record anew")
        first = self.lines[0] if self.lines else line
        for key in stamp:
            if line[key] != first[key] and not (key == "threads" and line["suite"] == "calls"):
                raise RecordError(f"{line['_at']}: {key} {line[key]} is not {first[key]}, that of the first line")
        if line["suite"] in UNCHECKED:
            return
        if line.get("outcome") != "ok" and not (line["suite"] == "peers16" and line.get("outcome") == "failed"):
            raise RecordError(f"{line['_at']}: outcome {line.get('outcome')}: the result is wrong, or there is none")
        if line["suite"] not in PEERS and line.get("bit_identical") is not True:
            raise RecordError(f"{line['_at']}: bit_identical is {line.get('bit_identical')}")
        if line.get("outcome") == "ok":
            for key in ("ms", "ms_baseline", "speedup"):
                if not isinstance(line.get(key), (int, float)) or not line[key] > 0:
                    raise RecordError(f"{line['_at']}: {key} is {line.get(key)}")

    @property
    def machine(self) -> str:
        return str(self.lines[0]["device_name"])

    @property
    def stamp(self) -> str:
        """Machine, date and source in one line."""
        first = self.lines[0]
        threads = f", {first['threads']} threads" if self.kind == "cpu" else ""
        return f"{self.machine}{threads}, {first['date']}, source {first['source_id']}"

    @property
    def build(self) -> str:
        """The same with all that the times depend on."""
        first = self.lines[0]
        runs_on = f"{first['threads']} threads" if self.kind == "cpu" else f"driver {first['driver']}"
        return (f"{self.machine} ({first['features']}, {runs_on}), {first['libraries']}, {first['date']}, source "
                f"`{first['source_id']}`")  # fmt: skip

    def has(self, suite: str) -> bool:
        return any(line["suite"] == suite for line in self.lines)

    def some(self, **where: Any) -> List[Line]:
        """Every line whose fields are these; a number is compared as a number, a function is asked."""
        return [line for line in self.lines if all(_same(line.get(key), want) for key, want in where.items())]

    def need(self, what: str, **where: Any) -> List[Line]:
        """The same, at least one."""
        found = self.some(**where)
        if not found:
            raise RecordError(f"{what}: {self.path} has no line with {_text(where)}; {NEWER[self.kind]} measures it")
        return found

    def one(self, what: str, **where: Any) -> Line:
        """The only one."""
        found = self.need(what, **where)
        if len(found) > 1:
            raise RecordError(f"{what}: {self.path} has {len(found)} lines with {_text(where)}, not one")
        return found[0]


def newest(kind: str) -> Optional[str]:
    """Of the records of that kind, the one with the latest date."""
    best = ("", "")
    for path in glob.glob(os.path.join(ROOT, "bench", "results", "*", f"{kind}.jsonl")):
        try:
            with open(path, encoding="utf-8") as file:
                date = str(json.loads(file.readline()).get("date", ""))
        except (OSError, ValueError, AttributeError) as e:
            raise RecordError(f"{path}: {e}") from e
        best = max(best, (date, os.path.relpath(path, ROOT)))
    return best[1] or None


def path_of(kind: str) -> Optional[str]:
    """The record that CPU_RECORD or GPU_RECORD names, or else the newest."""
    return os.environ.get(f"{kind.upper()}_RECORD") or newest(kind)


def load(kind: str) -> Record:
    path = path_of(kind)
    if path is None:
        raise RecordError(f"there is no bench/results/*/{kind}.jsonl; {NEWER[kind]} writes one")
    return Record(path, kind)


# ---- how values are written ----


def percent(x: float) -> str:
    return f"{100 * x:.3g} %"


def times(x: float) -> str:
    return f"{x:.1f}" if x >= 9.95 else f"{x:.2f}"


def ms(x: float) -> str:
    return f"{x:.1f}" if x >= 9.995 else f"{x:.3f}" if x >= 0.0995 else f"{x:.4f}"


def product(line: Line) -> str:
    m, n, k = line["m"], line["n"], line["k"]
    return f"{m}³" if m == n == k else f"{m} × {n}, k {k}"


def asked(line: Line) -> float:
    """The share of nonzeros that was asked for; nan where that is the name of a file or a preset."""
    try:
        return float(line["asked"])
    except ValueError:
        return math.nan


def error(line: Line) -> float:
    """Our error over the library's, against float64."""
    return float(line["rel_err"]) / float(line["rel_err_baseline"]) if line["rel_err_baseline"] > 0 else 0.0


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(x) for x in values) / len(values))


def by(lines: Iterable[Line], key: Callable[[Line], Any]) -> Dict[Any, List[Line]]:
    groups: Dict[Any, List[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


# ---- pages ----


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the > at the end of a column's name aligns it to the right."""
    names = [name.rstrip(">") for name in head]
    rule = ["---:" if name.endswith(">") else "---" for name in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in [names, rule, *rows])


def fold(text: str, indent: str = "") -> str:
    """In lines of at most 120 characters; those after the first begin with indent."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > 120:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def page(name: str) -> str:
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def main(program: str, make: Callable[[], Dict[str, str]]) -> None:
    """make() gives pages by their names. They are written, or with --check compared with those that are there."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(f"{program}.py: unknown words: {' '.join(sys.argv[1:])}; it takes none but --check")
    try:
        pages = make()
        for name, text in pages.items():
            path = os.path.join(ROOT, name)
            if os.path.exists(path) and page(name) == text:
                continue
            if sys.argv[1:]:
                sys.exit(f"{program}.py: {name} is not that of the records; make {program} writes it")
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(path + ".new", path)
            print(f"{name}: {len(text.splitlines())} lines")
    except (RecordError, OSError) as e:
        sys.exit(f"{program}.py: {e}; nothing is written")
