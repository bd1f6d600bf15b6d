"""series.py: what the figures show, taken from the records; bench/figures.py draws it and bench/report.py writes of it.
What the report and bench/tables.py both write of is at the end.

Each function returns the data of one figure. What every record must have is asked for with need(), which fails by name;
what only newer records have is left out, and says so in `missing`, which the report prints below the figure.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Tuple

from records import Line, Record, RecordError, by, ms, percent, product

BYTES = {"f32": 4, "bf16": 2, "f16": 2}
Points = List[Tuple[float, float]]


class Curve(NamedTuple):
    name: str
    device: str  # cpu or gpu: it decides the line's style
    points: Points


def _curve(name: str, device: str, lines: List[Line], x: str, best: bool = False) -> Curve:
    """Speed-ups of lines over one of their fields; where there are several for a value, the best, or all must agree."""
    points = []
    for value, group in sorted(by(lines, lambda line: float(line[x])).items()):
        if len(group) > 1 and not best:
            raise RecordError(f"{name}: {group[0]['_at']} and {group[1]['_at']} are of the same {x}, {value}")
        points.append((value, max(float(line["speedup"]) for line in group)))
    return Curve(name, device, points)


# ---- 1: speed-up over density ----


class Density(NamedTuple):
    both: List[Curve]  # zeros in A and B: ideally 1/d²
    only_a: List[Curve]  # zeros in A: ideally 1/d
    missing: List[str]


def density(cpu: Record, gpu: Record) -> Density:
    what = "figure 1"
    both = [
        _curve("CPU fp32, 2048³, strips of 32", "cpu",
               cpu.need(what, suite="blockwise", m=2048, requested="auto"), "asked"),
        _curve("GPU fp32, 4096³, strips of 32", "gpu",
               gpu.need(what, suite="blockwise", m=4096, requested="auto") + gpu.some(suite="over", requested="auto"),
               "asked"),
        _curve("GPU bf16, 8192³, strips of 128", "gpu",
               gpu.need(what, suite="joint16", m=8192, requested="auto")
               + gpu.need(what, suite="strips16", m=8192, requested="auto", asked="1"), "asked"),
    ]  # fmt: skip
    only_a = [
        _curve("CPU fp32, 1024³, anywhere, rows forced", "cpu",
               cpu.need(what, suite="over-single", kernel=lambda name: name.startswith("rows")), "asked"),
        _curve("CPU fp32, 1 row, anywhere", "cpu", cpu.need(what, suite="decode", m=1), "asked"),
        _curve("GPU bf16, 8192³, strips of 128", "gpu",
               gpu.need(what, suite="strips16", m=8192, requested="auto"), "asked"),
        _curve("GPU bf16, 1 row, anywhere", "gpu",
               gpu.need(what, suite="decode16", m=1, k=14336, requested="auto"), "asked"),
        _curve("GPU bf16, 4096 × 4096, k 14336, anywhere", "gpu",
               gpu.need(what, suite="random16", m=4096, n=4096, requested="auto"), "asked"),
    ]  # fmt: skip
    missing = []
    if cpu.has("strips16"):
        only_a.insert(0, _curve("CPU bf16, 1024³, strips of 32", "cpu", cpu.some(suite="strips16"), "asked"))
    else:
        missing.append("the CPU in bf16 (suite strips16 of the CPU's record)")
    return Density(both, only_a, missing)


# ---- 2: speed-up over size ----


class Sizes(NamedTuple):
    panels: List[Tuple[str, List[Curve]]]
    missing: List[str]


def _zeros(asked: Any) -> str:
    return f"{100 * (1 - float(asked)):g} % zeros"


def _by_zeros(lines: List[Line]) -> List[Curve]:
    groups = sorted(by(lines, lambda x: x["asked"]).items(), key=lambda x: -float(x[0]))
    return [_curve(_zeros(d), "gpu", group, "m") for d, group in groups]


def sizes(cpu: Record, gpu: Record) -> Sizes:
    what = "figure 2"
    panels, missing = [], []
    if gpu.has("sizes16"):
        panels.append(("GPU, bf16, strips of 128 in A", _by_zeros(gpu.some(suite="sizes16", format="dense"))))
        curves = _by_zeros(gpu.some(suite="sizes16", format="bsr:128"))
        halves = gpu.some(suite="sizes16", format="nm:2:4")
        if halves:
            curves.append(_curve("2:4", "gpu", halves, "m"))
        if curves:
            panels.append(("GPU, bf16, blocks of 128 in B, and 2:4", curves))
    else:
        missing.append("bf16 from 1K to 64K at 50, 78, 90 and 95 % zeros (suite sizes16 of the GPU's record)")
    curves = []
    for asked in (0.5, 0.25):
        lines = [
            line
            for suite in ("sizes", "blockwise")
            for line in gpu.need(what, suite=suite, requested="auto")
            if float(line["asked"]) == asked
        ]
        curves.append(_curve(f"fp32, A and B, {_zeros(asked)}", "gpu", lines, "m"))
    blocks = [
        line
        for line in gpu.need(what, suite="bsr16", format="bsr:128", asked_density_b=0.22, asked_density_a=1)
        if line["m"] == line["n"] == line["k"]
    ]
    if len(panels) < 2:
        curves.append(_curve("bf16, blocks of 128 in B, 78 % zeros", "gpu", blocks, "m"))
    panels.append(
        ("GPU, strips of 32, and blocks" if len(panels) < 2 else "GPU, fp32, strips of 32 in A and B", curves)
    )
    lines = cpu.need(what, suite="blockwise", requested="auto")
    panels.append((
        "CPU, fp32, strips of 32 in A and B",
        [_curve(_zeros(asked), "cpu", [x for x in lines if float(x["asked"]) == asked], "m")
         for asked in (0.5, 0.25, 0.125)],
    ))  # fmt: skip
    return Sizes(panels, missing)


# ---- 3: the ladder ----


class Step(NamedTuple):
    name: str
    extract: float
    multiply: float
    inside: bool  # the scan of A is a part of the one kernel


class Ladder(NamedTuple):
    steps: List[Step]
    dense: float  # ms of cuBLAS
    product: Line


STEPS = {  # what each number was
    10: "dense, by hand",
    15: "dense, cuBLAS",
    17: "zeros of B alone",
    20: "joint, strips of 64",
    21: "joint, strips of 8",
    25: "joint, 64, fused",
    28: "joint, 8, branchless",
    29: "joint, strips of 32",
    30: "joint, 8 × 8 tiles",
    0: "joint, today's",
}
FUSED = {25, 28}


def ladder(gpu: Record) -> Ladder:
    lines = gpu.need("figure 3", suite="ladder")
    steps = []
    for line in lines:
        number = line["number"]
        if number not in STEPS:
            raise RecordError(
                f"figure 3: {line['_at']}: the ladder's number {number} has no name; series.py lists them"
            )
        scan = 0.0 if number in FUSED or number in (10, 15, 17) else float(line["ms_extract"])
        title = f"{number}: {STEPS[number]}" if number else STEPS[number]
        steps.append(Step(title, scan, float(line["ms"]) - scan, number in FUSED))
    return Ladder(steps, min(float(line["ms_baseline"]) for line in lines), lines[0])


# ---- 4: where the time goes ----


class Kernel(NamedTuple):
    name: str
    what: str
    dtype: str
    ms: float
    scan: float
    floor: float  # ms that the ceilings allow
    flop: float
    bytes: float
    line: Line


class Roofline(NamedTuple):
    kernels: List[Kernel]
    rate: Dict[str, float]  # flop/s by dtype
    bandwidth: float  # bytes/s
    source: str
    missing: List[str]


def work(line: Line) -> Tuple[float, float]:
    """The least arithmetic and traffic of a product: A as it lies in memory, of B what some row needs, C once."""
    m, n, k, size = line["m"], line["n"], line["k"], BYTES[line["dtype"]]
    flop = float(line["flop_useful"])
    form = str(line["format"])
    share = 1.0
    if form.startswith("bsr"):
        share = float(line["density_b"])
    elif form.startswith("nm"):
        share = float(line["density_b"]) + 1 / 16 * 2 / size  # two bits an element of four, for two kept ones
        flop = 2.0 * m * n * k * float(line["density_b"])
    elif m <= 16:
        share = float(line["strip128_density_a"])
    return flop, size * (m * k + share * k * n + m * n)


def roofline(gpu: Record) -> Roofline:
    what = "figure 4"
    missing: List[str] = []
    products = [line for suite in ("dense16", "blockwise", "nm24", "bsr16", "decode16", "strips16", "long-k")
                for line in gpu.need(what, suite=suite)]  # fmt: skip
    if gpu.has("ceilings"):
        read = gpu.one(what, suite="ceilings", asked="read")
        bandwidth = float(read["gb_per_s"]) * 1e9
        source = "memory measured alone"
    else:
        dense = [line for line in products if line["suite"] == "decode16" and line["m"] == 1 and line["asked"] == "1"]
        if not dense:
            raise RecordError(f"{what}: {gpu.path} has no line of suite decode16 with one row and no zeros")
        bandwidth = max(work(line)[1] / (1e-3 * float(line["ms"])) for line in dense)
        source = "the fastest in this record"
        missing.append("the memory's rate, measured alone (suite ceilings of the GPU's record); the fastest product "
                       "of one row stands in for it")  # fmt: skip
    rate: Dict[str, float] = {}
    for line in products:
        # Data without zeros: with many, the chip draws less power and every library runs faster.
        if float(line["asked_density_a"]) < 1 or float(line["density_b"]) < 1 or line["dtype"] not in BYTES:
            continue
        fastest = 2e3 * line["m"] * line["n"] * line["k"] / min(float(line["ms_baseline"]), float(line["ms"]))
        rate[line["dtype"]] = max(rate.get(line["dtype"], 0.0), fastest)
    for dtype in ("bf16", "f32"):
        if dtype not in rate:
            raise RecordError(f"{what}: {gpu.path} has no product without zeros in {dtype}")

    kernels = []

    def add(name: str, text: str, **where: Any) -> None:
        line = gpu.one(what, **where)
        flop, traffic = work(line)
        floor = 1e3 * max(flop / rate[line["dtype"]], traffic / bandwidth)
        scan = float(line["ms_extract"]) if float(line["ms_extract"]) > 0.002 else 0.0  # less is the timer's own
        kernels.append(Kernel(name, text, line["dtype"], float(line["ms"]), scan, floor, flop, traffic, line))

    add("dense fp32", "4096³", suite="blockwise", asked="1", requested="dense_f32_sm90a")
    add("joint fp32", "4096³, 12.5 %", suite="blockwise", asked=".125", requested="auto")
    add("dense bf16", "8192³", suite="dense16", m=8192, kernel="dense_bf16_sm90a", requested="dense_bf16_sm90a")
    add("joint bf16", "8192³, A 50 %", suite="strips16", m=8192, asked="0.5", requested="auto")
    add("joint bf16", "8192³, A 12.5 %", suite="strips16", m=8192, asked="0.125", requested="auto")
    add("bsr bf16", "8192³, B 22 %", suite="bsr16", m=8192, format="bsr:128", asked_density_b=0.22, asked_density_a=1)
    add("2:4 bf16", "8192³", suite="nm24", m=8192, n=8192)
    add("2:4 bf16", "1 row", suite="nm24", m=1)
    add("decode bf16", "1 row, 100 %", suite="decode16", m=1, k=14336, asked="1", requested="auto")
    add("decode bf16", "1 row, 10 %", suite="decode16", m=1, k=14336, asked="0.1", requested="auto")
    return Roofline(kernels, rate, bandwidth, source, missing)


# ---- 5: trained nets ----


class Nets(NamedTuple):
    heights: List[Tuple[str, Points]]  # share alive over rows of a strip
    rows: List[Tuple[str, Dict[str, float]]]  # a layer and product: speed-ups by method
    missing: List[str]


def method(kernel: str) -> str:
    return {"nm": "2:4"}.get(kernel.split("_")[0], kernel.split("_")[0])


def nets(cpu: Record, gpu: Record) -> Nets:
    what = "figure 5"
    missing = []
    real = gpu.need(what, suite="real16", m=8192, n=3072)
    names = {name: f"layer {name.rsplit('layer', 1)[-1]}" for name in by(real, lambda line: line["asked"])}
    heights: List[Tuple[str, Points]] = []
    if gpu.has("layers"):
        for name, group in by(gpu.some(suite="layers"), lambda line: line["asked"]).items():
            points = sorted((float(line["strip_rows"]), float(line["density"])) for line in group)
            heights.append((f"{names.get(name, name)}, trained", points))
    else:
        missing.append("strips of 2 to 64 rows (suite layers of the GPU's record): only single rows and 128")
        for name, group in by(real, lambda line: line["asked"]).items():
            first = group[0]
            heights.append((f"{names[name]}, trained",
                            [(1.0, float(first["density_a"])), (128.0, float(first["strip128_density_a"]))]))  # fmt: skip
    for line in cpu.need(what, suite="activations"):
        heights.append((f"{line['asked']}, made alike",
                        [(1.0, float(line["density_a"])), (128.0, float(line["strip128_density_a"]))]))  # fmt: skip
    rows: List[Tuple[str, Dict[str, float]]] = []
    for m in (2048, 8192):
        for name, group in by(gpu.some(suite="real16", m=m, n=3072), lambda line: line["asked"]).items():
            rows.append((f"{names[name]}, GPU {m}",
                         {("auto" if line["requested"] == "auto" else method(line["kernel"])): float(line["speedup"])
                          for line in group}))  # fmt: skip
    seen = {name for _, found in rows for name in found}
    if not {"half", "fine"} <= seen:
        missing.append("half (2:4 made of A, exact) and fine on trained layers (suite real16, of a newer record)")
    for preset in ("early", "middle", "late"):
        line = gpu.one(what, suite="decode16", m=16, k=14336, asked=preset, requested="auto")
        forced = gpu.some(suite="decode16", m=16, k=14336, asked=preset, requested=lambda name: name != "auto")
        rows.append((f"{preset}, GPU 16",
                     {"auto": line["speedup"], **{method(x["kernel"]): x["speedup"] for x in forced or [line]}}))  # fmt: skip
    for preset in ("early", "middle", "late"):
        line = cpu.one(what, suite="activations", asked=preset)
        rows.append((f"{preset}, CPU 2048", {"auto": line["speedup"], method(line["kernel"]): line["speedup"]}))
    return Nets(heights, rows, missing)


# ---- 6: who wins where ----


class Cell(NamedTuple):
    kernel: str
    speedup: float  # of the fastest over cuBLAS


class Map(NamedTuple):
    shape: str
    rows: List[int]
    densities: List[float]
    cells: Dict[Tuple[int, float], Cell]


def crossover(gpu: Record) -> List[Map]:
    maps = []
    for (n, k), lines in by(gpu.need("the crossover map", suite="sweep16"), lambda x: (x["n"], x["k"])).items():
        cells: Dict[Tuple[int, float], Cell] = {}
        for key, group in by(lines, lambda x: (int(x["m"]), float(x["asked"]))).items():
            forced = [line for line in group if line["requested"] != "auto"]
            if not forced:
                raise RecordError(f"the crossover map: {group[0]['_at']}: no kernel is forced beside auto")
            best = min(forced, key=lambda x: float(x["ms"]))
            dense = min(float(line["ms_baseline"]) for line in group)
            fastest = min(dense, float(best["ms"]))
            kernel = "cublas" if fastest == dense else method(best["kernel"])
            cells[key] = Cell(kernel, dense / fastest)
        rows = sorted({m for m, _ in cells})
        densities = sorted({d for _, d in cells}, reverse=True)
        for m in rows:
            for d in densities:
                if (m, d) not in cells:
                    raise RecordError(f"the crossover map: {gpu.path} has no product of {m} rows, n {n}, k {k} at {d}")
        maps.append(Map(f"k {k} → n {n}", rows, densities, cells))
    return maps


def log_ticks(low: float, high: float) -> List[float]:
    """1, 2 and 5 times powers of ten within the range."""
    ticks = [base * 10.0**power for power in range(-4, 5) for base in (1, 2, 5)]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001 and math.isfinite(tick)]


# ---- what auto chose, and other libraries ----


class Choice(NamedTuple):
    """A product of the sweep: what auto took, and the best of all that it could have taken."""

    auto: Line
    name: str
    kernel: str  # the fastest, or cuBLAS
    over_dense: float  # speed of auto over cuBLAS,
    best_over_dense: float  # of the fastest over cuBLAS,
    over_best: float  # and of auto over the fastest


def sweep(gpu: Record) -> List[Choice]:
    made = []
    for group in by(gpu.some(suite="sweep16"), lambda x: (x["m"], x["n"], x["k"], x["asked"])).values():
        auto = next((line for line in group if line["requested"] == "auto"), None)
        if auto is None:
            raise RecordError(f"the sweep: {group[0]['_at']}: auto is not measured beside {group[0]['kernel']}")
        all_of = [x for line in group for x in ((line["ms_baseline"], "cuBLAS"), (line["ms"], line["kernel"]))]
        best, kernel = min(all_of, key=lambda x: float(x[0]))
        dense = auto["ms_baseline"]
        name = f"{product(auto)} at {percent(float(auto['asked']))}"
        made.append(Choice(auto, name, kernel, dense / auto["ms"], dense / best, best / auto["ms"]))
    return made


def slow(lines: List[Line]) -> List[Line]:
    return [line for line in lines if line["speedup"] < 0.95]


LIBRARIES = ("cusparselt", "cusparse_bsr", "cusparse_csr")


def libraries(gpu: Record) -> List[Line]:
    """Products beside which a library for sparse weights was measured."""
    return [line for line in gpu.lines if line["suite"] in ("bsr16", "nm24") and any(library_cells(line))]


def library_cells(line: Line) -> List[str]:
    found = line.get("peer_ms") or {}
    return [ms(found[name]) if found.get(name) else "" for name in LIBRARIES]


def library_row(line: Line) -> List[str]:
    return [product(line), line["format"], percent(float(line["asked"])), ms(line["ms"]), ms(line["ms_baseline"])]
