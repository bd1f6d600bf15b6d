"""records.py: reads the records of bench/results for the figures, the report and the check of numbers.

A record is a file of lines, each one flat JSON object as `esmm bench --json` writes it, with what was asked for in
front. The rules are those of bench/tables.awk: a record is of one machine, one day and one build, and a line that was
checked and found wrong spoils all of it. Whoever looks for a line that is not there gets an error that says which one, in which file
and what makes it: a figure with a hole would say less.

Only Python's own library is used: the report must not need what the figures need.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Line = Dict[str, Any]

# Suites that time no product and are checked in other ways, or not at all.
UNCHECKED = {"switch", "host", "calls", "prepare16", "ffn16", "ceilings", "layers", "cut"}
NEWER = {"cpu": "make bench-record", "gpu": "make gpu-check, where there is a GPU,"}


class RecordError(Exception):
    """A record that is not there, is wrong, or lacks a line that is needed."""


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
                line = json.loads(text)
            except ValueError as e:
                raise RecordError(f"{path}:{number}: not a line of a record: {e}") from e
            if not isinstance(line, dict):
                raise RecordError(f"{path}:{number}: not a line of a record: no object")
            line["_at"] = f"{path}:{number}"
            self._check(line)
            self.lines.append(line)
        if not self.lines:
            raise RecordError(f"{path} has no lines; {NEWER[kind]} writes them")

    def _check(self, line: Line) -> None:
        for key in ("suite", "asked", "date", "kernel", "device_name", "source_id"):
            if key not in line:
                raise RecordError(f"{line['_at']}: there is no {key}; {NEWER[self.kind]} writes a record anew")
        first = self.lines[0] if self.lines else line
        for key in ("device_name", "date", "source_id"):
            if line[key] != first[key]:
                raise RecordError(f"{line['_at']}: {key} {line[key]} is not {first[key]}, that of the first line")
        if line["suite"] in UNCHECKED:
            return
        if line.get("outcome") != "ok" and not (line["suite"] == "peers16" and line.get("outcome") == "failed"):
            raise RecordError(f"{line['_at']}: outcome {line.get('outcome')}: no figure is made of a wrong result")
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
    """Of the records of that kind, the one with the latest date: the rule of bench/tables.sh."""
    best = ("", "")
    for path in glob.glob(os.path.join(ROOT, "bench", "results", "*", f"{kind}.jsonl")):
        try:
            with open(path, encoding="utf-8") as file:
                date = str(json.loads(file.readline()).get("date", ""))
        except (OSError, ValueError, AttributeError) as e:
            raise RecordError(f"{path}: {e}") from e
        best = max(best, (date, os.path.relpath(path, ROOT)))
    return best[1] or None


def load(kind: str) -> Record:
    """The record that CPU_RECORD or GPU_RECORD names, or else the newest."""
    path = os.environ.get(f"{kind.upper()}_RECORD") or newest(kind)
    if path is None:
        raise RecordError(f"there is no bench/results/*/{kind}.jsonl; {NEWER[kind]} writes one")
    return Record(path, kind)


# ---- how values are written: the same as in bench/tables.awk ----


def percent(x: float) -> str:
    return f"{100 * x:.3g} %"


def times(x: float) -> str:
    return f"{x:.1f}" if x >= 9.95 else f"{x:.2f}"


def ms(x: float) -> str:
    return f"{x:.1f}" if x >= 9.995 else f"{x:.3f}" if x >= 0.0995 else f"{x:.4f}"


def product(line: Line) -> str:
    m, n, k = line["m"], line["n"], line["k"]
    return f"{m}³" if m == n == k else f"{m} × {n}, k {k}"


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(x) for x in values) / len(values))


def by(lines: Iterable[Line], key: Callable[[Line], Any]) -> Dict[Any, List[Line]]:
    groups: Dict[Any, List[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups
