#!/usr/bin/env python3
"""figures.py: the figures of README.md and docs/report.md from the records in bench/results, as SVG and PNG. `make
figures` runs it.

    python3 bench/figures.py [--out docs/figures] [--png build/figures]

By matplotlib, which most papers and reports of this field are drawn with, so that most readers can change a figure.

One column of panels, 5 inches wide: on a phone's 400 pixels, type of 9 points is still 10 pixels high. Colours are
Okabe and Ito's, which the colour-blind can tell apart, and each series has a marker or a letter too, for print in grey.
Type is drawn as paths, so that a figure looks alike everywhere, and the files have neither date nor random ids: the
same records and the same matplotlib give the same bytes. Each says of which records it is, and carries their hash, by
which `make test` knows one that is out of date. The title of a figure says what to see in it, in numbers of the same
records.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

import records
import series
from records import Record, RecordError

try:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ImportError as e:
    sys.exit(f"figures.py: {e}: the figures need matplotlib 3.6 or later; python3 -m pip install matplotlib, or "
             "apt-get install python3-matplotlib")  # fmt: skip

WIDTH = 5.0
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, RED, PINK, GREY = "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"
CYCLE = [BLUE, RED, GREEN, ORANGE, PINK, BLACK]
MARKERS = ["o", "s", "^", "D", "v", "P"]
COLOURS = {  # of kernels, the same in each figure
    "cublas": GREY, "dense": BLACK, "joint": BLUE, "fused": SKY, "decode": GREEN, "rows": ORANGE, "half": PINK,
    "fine": YELLOW, "2:4": PINK, "bsr": ORANGE, "auto": RED,
}  # fmt: skip
LETTERS = {"cublas": "C", "dense": "D", "joint": "J", "fused": "F", "decode": "d", "half": "H", "fine": "f"}
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: no figure depends on the fonts of a machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "esmm",
    "path.simplify": True,
}


def log_axis(axis: Any, ticks: Sequence[float], text: Any) -> None:
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: text(x)))
    axis.set_minor_locator(NullLocator())


def short(x: float) -> str:
    return f"{x:g}"


def legend_below(axes: Any, columns: int, handles: Optional[List[Any]] = None, drop: float = -0.2) -> None:
    """Below the panel and its axis' label: never over data."""
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.02, drop), ncol=columns, columnspacing=1.2,
                    handlelength=1.8, borderaxespad=0)  # fmt: skip
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, drop), ncol=columns, columnspacing=1.2, handlelength=2.2,
                    borderaxespad=0)  # fmt: skip


def panels(count: int, height: float) -> Tuple[Any, List[Any]]:
    figure, axes = plt.subplots(count, 1, figsize=(WIDTH, height), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(h_pad=0.08, hspace=0.04)
    return figure, [row[0] for row in axes]


def draw_curves(axes: Any, curves: Sequence[series.Curve]) -> None:
    for i, curve in enumerate(curves):
        axes.plot(*zip(*curve.points), label=curve.name, color=CYCLE[i % 6], marker=MARKERS[i % 6],
                  linestyle="-" if curve.device == "gpu" else "--")  # fmt: skip


def speed_up_axis(axes: Any, top: float, bottom: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    log_axis(axes.yaxis, series.log_ticks(bottom, top), short)
    axes.set_ylabel("speed-up over dense [×]")
    axes.axhline(1, color="#444444", linewidth=1, linestyle=":", zorder=1)


def bounds(values: Sequence[float], text: Any = lambda x: f"{x:.1f}") -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


# ---- the figures: what draws each, and its title ----


def figure_readme(cpu: Record, gpu: Record) -> Any:
    curves = readme_curves(cpu, gpu)
    figure, (axes,) = panels(1, 3.9)
    low, top = 0.045, max(y for curve in curves for _, y in curve.points)
    axes.set_xscale("log")
    axes.set_xlim(1.1, low)
    draw_curves(axes, curves)
    speed_up_axis(axes, top * 1.2, 0.7)
    log_axis(axes.xaxis, [1, 0.5, 0.25, 0.125, 0.05], lambda x: f"{100 * x:g}")
    axes.set_xlabel("nonzeros of A [%]")
    axes.text(low * 1.04, 1.0, "dense library ", ha="right", va="bottom", fontsize=8, color="#444444")
    legend_below(axes, 1, drop=-0.24)
    return figure


def readme_curves(cpu: Record, gpu: Record) -> List[series.Curve]:
    """Of figure 1's second panel, a line for each of: CPU, GPU, one row and many."""
    found = {curve.name: curve for curve in series.density(cpu, gpu).only_a}
    names = {
        "CPU fp32, 1 row, anywhere": "CPU fp32, 1 row, zeros anywhere",
        "GPU bf16, 1 row, anywhere": "GPU bf16, 1 row, zeros anywhere",
        "GPU bf16, 8192³, strips of 128": "GPU bf16, 8192³, zeros in strips of 128 rows",
    }
    return [found[name]._replace(name=shown) for name, shown in names.items()]


def at_half(curves: Sequence[series.Curve]) -> str:
    return bounds([y for curve in curves for x, y in curve.points if x == 0.5])


def title_readme(cpu: Record, gpu: Record) -> str:
    return f"With half of A zero, ESMM is {at_half(readme_curves(cpu, gpu))} times\nas fast as the dense library"


def title_density(cpu: Record, gpu: Record) -> str:
    data = series.density(cpu, gpu)
    return f"1  At 50 % nonzeros ESMM is {at_half([*data.both, *data.only_a])} times\n    as fast as dense libraries"


def figure_density(cpu: Record, gpu: Record) -> Any:
    data = series.density(cpu, gpu)
    figure, (first, second) = panels(2, 7.6)
    for axes, curves, power, low, title in (
        (first, data.both, 2, 0.1, "Zeros in A and in B"),
        (second, data.only_a, 1, 0.002, "Zeros in A alone"),
    ):
        axes.set_xscale("log")
        axes.set_xlim(1.1, low)
        ideal = [0.002 * 1.02**i for i in range(315)]
        top = max(y for curve in curves for _, y in curve.points) * 2.2
        ideal = [d for d in ideal if low <= d <= 1]
        axes.plot(ideal, [d**-power for d in ideal], color="#666666", linewidth=1, linestyle="-.",
                  label="ideal, 1/d²" if power == 2 else "ideal, 1/d")  # fmt: skip
        draw_curves(axes, curves)
        speed_up_axis(axes, top, min(0.7, min(y for curve in curves for _, y in curve.points) * 0.85))
        ticks = [1, 0.5, 0.25, 0.125] if power == 2 else [1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005]
        log_axis(axes.xaxis, ticks, lambda x: f"{100 * x:g}")
        axes.set_xlabel("nonzeros d [%]")
        axes.set_title(title)
        axes.text(low * 1.04, 1.0, "dense ", ha="right", va="bottom", fontsize=8, color="#444444")
        legend_below(axes, 1)
    return figure


def figure_sizes(cpu: Record, gpu: Record) -> Any:
    data = series.sizes(cpu, gpu)
    figure, axes = panels(len(data.panels), 3.1 * len(data.panels))
    for panel, (title, curves) in zip(axes, data.panels):
        sizes = sorted({x for curve in curves for x, _ in curve.points})
        panel.set_xscale("log")
        panel.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
        draw_curves(panel, curves)
        low = min(y for curve in curves for _, y in curve.points)
        speed_up_axis(panel, max(y for curve in curves for _, y in curve.points) * 1.3, min(0.8, low * 0.85))
        log_axis(panel.xaxis, sizes, lambda x: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}")
        panel.set_xlabel("m = n = k [elements]")
        panel.set_title(title)
        legend_below(panel, 2 if len(curves) > 3 or "CPU" in title else 1, drop=-0.26)
    return figure


def title_sizes(cpu: Record, gpu: Record) -> str:
    gpus = [curve for _, curves in series.sizes(cpu, gpu).panels for curve in curves if curve.device == "gpu"]
    best = [max(curve.points, key=lambda point: point[1])[0] for curve in gpus]
    return f"2  Large products gain more; on a GPU the gain\n    peaks at {bounds(best, lambda x: f'{x / 1024:g}K')}"


def figure_ladder(cpu: Record, gpu: Record) -> Any:
    data = series.ladder(gpu)
    figure, (axes,) = panels(1, 4.6)
    places = list(range(len(data.steps)))[::-1]
    axes.barh(places, [s.extract for s in data.steps], color=ORANGE, height=0.66, label="look for zeros in A")
    for place, step in zip(places, data.steps):
        axes.barh(place, step.multiply, left=step.extract, color=BLUE if not step.inside else SKY, height=0.66,
                  hatch="///" if step.inside else None, edgecolor="white", linewidth=0)  # fmt: skip
        axes.text(0.995, place, f"{step.extract + step.multiply:.2f}", va="center", ha="right", fontsize=8,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_yticks(places, [s.name for s in data.steps])
    axes.axvline(data.dense, color="#444444", linewidth=1, linestyle=":")
    axes.set_xlim(0, 1.18 * max(s.extract + s.multiply for s in data.steps))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of a product [ms]; dotted: cuBLAS")
    axes.set_title(f"fp32, {records.product(data.product)}, 50 % zeros in A and B")
    legend_below(axes, 2, [Patch(color=ORANGE, label="look for zeros in A"), Patch(color=BLUE, label="multiply"),
                           Patch(facecolor=SKY, edgecolor="white", hatch="///", label="both in one kernel")],
                 drop=-0.17)  # fmt: skip
    return figure


def title_ladder(cpu: Record, gpu: Record) -> str:
    """Which heights of strips beat cuBLAS."""
    data, won, lost = series.ladder(gpu), set(), set()
    for step in data.steps:
        height = re.search(r"joint, (?:strips of )?(\d+)", step.name)
        if height:
            (won if step.extract + step.multiply < data.dense else lost).add(int(height.group(1)))
    if not won or not lost or min(won) <= max(lost):
        return "3  The ladder of joint kernels against cuBLAS"
    names = [" and ".join(map(str, sorted(heights))) for heights in (won, lost)]
    return f"3  Strips of {names[0]} rows beat cuBLAS,\n    strips of {names[1]} do not"


def figure_roofline(cpu: Record, gpu: Record) -> Any:
    data = series.roofline(gpu)
    figure, (first, second) = panels(2, 8.2)
    places = list(range(len(data.kernels)))[::-1]
    for place, kernel in zip(places, data.kernels):
        floor, scan = min(1.0, kernel.floor / kernel.ms), kernel.scan / kernel.ms
        scan = min(scan, 1 - floor)
        first.barh(place, 100 * floor, color=GREEN, height=0.66)
        first.barh(place, 100 * scan, left=100 * floor, color=ORANGE, height=0.66)
        first.barh(place, 100 * (1 - floor - scan), left=100 * (floor + scan), color="#cccccc", height=0.66)
        first.text(1.5, place, f"{100 * floor:.0f}", va="center", color="white", fontsize=8)
        first.text(102, place, f"{kernel.ms:.3g} ms", va="center", fontsize=8)
    first.set_yticks(places, [f"{i + 1} {k.name}\n{k.what}" for i, k in enumerate(data.kernels)], fontsize=7.5)
    first.set_xlim(0, 124)
    first.set_xticks([0, 25, 50, 75, 100])
    first.grid(axis="y", visible=False)
    first.set_xlabel("share of the time [%]; right: the time")
    first.set_title("Share of a product's time")
    legend_below(first, 2, [Patch(color=GREEN, label="what the ceilings ask for"),
                            Patch(color=ORANGE, label="look for zeros in A"),
                            Patch(color="#cccccc", label="the rest: latency, waves, waiting")], drop=-0.15)  # fmt: skip

    low, high = 0.15, 6000.0
    second.set_xscale("log")
    second.set_yscale("log")
    colours = {"bf16": BLUE, "f32": RED}
    for dtype, colour in colours.items():
        peak = data.rate[dtype]
        ridge = peak / data.bandwidth
        second.plot([low, ridge, high], [low * data.bandwidth / 1e12, peak / 1e12, peak / 1e12], color=colour,
                    linewidth=1.2, zorder=2)  # fmt: skip
        name = {"bf16": "bf16", "f32": "fp32"}[dtype]
        second.text(low * 1.3, peak / 1e12 * 1.1, f"{name}: {peak / 1e12:.0f} TFLOP/s", fontsize=8, color=colour)
        second.plot([low, ridge], [peak / 1e12, peak / 1e12], color=colour, linewidth=0.8, linestyle=":", zorder=1)
    second.text(12, 12 * data.bandwidth / 1e12 * 1.25, f"{data.bandwidth / 1e12:.2f} TB/s", fontsize=8, ha="right")
    points = [(k.flop / k.bytes, k.flop / k.ms / 1e9) for k in data.kernels]
    for i, (kernel, (x, y)) in enumerate(zip(data.kernels, points)):
        second.plot(x, y, marker="o" if kernel.dtype == "bf16" else "s", color=colours[kernel.dtype], linestyle="none",
                    markersize=5)  # fmt: skip
        # Left of the ridge beside its point, right of it below; two that are close go apart.
        beside = [u for u, v in points if (u, v) != (x, y) and 0.6 < u / x < 1.7 and 0.7 < v / y < 1.4]
        offset = (9, -3) if x < 5 else (0, -11) if not beside else (-5, -11) if x < beside[0] else (5, -11)
        second.annotate(str(i + 1), (x, y), xytext=offset, textcoords="offset points", fontsize=8, ha="center")
    second.set_xlim(low, high)
    second.set_ylim(0.3, 2000)
    log_axis(second.xaxis, [1, 10, 100, 1000], short)
    log_axis(second.yaxis, [1, 10, 100, 1000], short)
    second.set_xlabel("useful arithmetic over least traffic [flop/byte]")
    second.set_ylabel("useful rate [TFLOP/s]")
    second.set_title(f"Roofline; ceilings: {data.source}")
    return figure


def title_roofline(cpu: Record, gpu: Record) -> str:
    """Dense, and two densities of joint."""
    wanted = ("8192³", "8192³, A 50 %", "8192³, A 12.5 %")
    share = {k.what: k.floor / k.ms for k in series.roofline(gpu).kernels if k.name in ("dense bf16", "joint bf16")}
    shares = [share[what] for what in wanted]
    if shares != sorted(shares, reverse=True):
        return "4  Where the time goes"
    text = ", ".join(f"{100 * x:.0f}" for x in shares)
    return f"4  The more zeros, the further from the ceilings:\n    bf16 reaches {text} % at 0, 50, 87.5 % zeros"


def figure_nets(cpu: Record, gpu: Record) -> Any:
    data = series.nets(cpu, gpu)
    figure, (first, second) = panels(2, 8.6)
    for i, (name, points) in enumerate(data.heights):
        first.plot([x for x, _ in points], [100 * y for _, y in points], label=name, color=CYCLE[i % 6],
                   marker=MARKERS[i % 6], linestyle="-" if "trained" in name else "--",
                   markerfacecolor=CYCLE[i % 6] if "trained" in name else "none",
                   markersize=5 if "trained" in name else 8)  # fmt: skip
    first.set_xscale("log", base=2)
    first.set_yscale("log")
    heights = sorted({x for _, points in data.heights for x, _ in points})
    first.set_xlim(heights[0] / 1.15, heights[-1] * 1.15)
    first.set_ylim(0.3, 130)
    log_axis(first.xaxis, heights, short)
    log_axis(first.yaxis, [0.5, 1, 2, 5, 10, 20, 50, 100], short)
    first.set_xlabel("tokens in a strip [rows]")
    first.set_ylabel("features alive in it [%]")
    first.set_title("How dense activations are")
    legend_below(first, 2, drop=-0.2)

    places = list(range(len(data.rows)))[::-1]
    markers = {"cublas": "|", "joint": "s", "fused": "^", "rows": "D", "decode": "v", "half": "P", "fine": "X",
               "dense": "d", "auto": "o"}  # fmt: skip
    methods = [name for name in markers if any(name in found for _, found in data.rows)]
    for name in methods:
        xs = [(found[name], place) for place, (_, found) in zip(places, data.rows) if name in found]
        hollow = name == "auto"
        second.plot(*zip(*xs), linestyle="none", marker=markers[name], markersize=10 if hollow else 6,
                    markerfacecolor="none" if hollow else COLOURS[name], markeredgecolor=COLOURS[name],
                    markeredgewidth=1.4 if hollow or name == "cublas" else 0.5, label=name.replace("cublas", "cuBLAS"),
                    zorder=3)  # fmt: skip
    second.set_yticks(places, [name for name, _ in data.rows], fontsize=8)
    second.set_ylabel("layer, device, rows of A")
    speeds = [x for _, found in data.rows for x in found.values()]
    second.set_xscale("log")
    second.set_xlim(min(speeds) * 0.8, max(speeds) * 1.25)
    second.set_ylim(-0.7, len(places) - 0.3)
    log_axis(second.xaxis, series.log_ticks(min(speeds) * 0.8, max(speeds) * 1.25), short)
    second.axvline(1, color="#444444", linewidth=1, linestyle=":", zorder=1)
    second.set_xlabel("speed-up over dense [×]")
    second.set_title("What each method makes of it")
    legend_below(second, 4, drop=-0.17)
    return figure


def title_nets(cpu: Record, gpu: Record) -> str:
    rows = [(name.split(",")[0], found["auto"]) for name, found in series.nets(cpu, gpu).rows if "GPU 8192" in name]
    parts = [f"{name} {'gains nothing' if abs(x - 1) < 0.05 else f'is {x:.1f} times as fast'}" for name, x in rows]
    joined = ",\n    ".join(parts)
    return f"5  On a GPU, {joined}"


def figure_crossover(cpu: Record, gpu: Record) -> Any:
    maps = series.crossover(gpu)
    figure, axes = panels(len(maps), 2.65 * len(maps) + 0.3)
    used = []
    for panel, data in zip(axes, maps):
        for (m, d), cell in data.cells.items():
            x, y = data.densities.index(d), data.rows.index(m)
            if cell.kernel not in LETTERS:
                raise RecordError(f"the crossover map: no letter for the kernel {cell.kernel}; figures.py lists them")
            used.append(cell.kernel)
            text = "C" if cell.kernel == "cublas" else f"{LETTERS[cell.kernel]} {cell.speedup:.2f}"
            dark = cell.kernel in ("dense", "joint", "decode")
            panel.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=COLOURS[cell.kernel], edgecolor="white"))
            panel.text(x, y, text, ha="center", va="center", fontsize=7.5,
                       color="white" if dark else "black")  # fmt: skip
        panel.set_xlim(-0.5, len(data.densities) - 0.5)
        panel.set_ylim(-0.5, len(data.rows) - 0.5)
        panel.set_xticks(range(len(data.densities)), [f"{100 * d:g}" for d in data.densities])
        panel.set_yticks(range(len(data.rows)), [str(m) for m in data.rows])
        panel.grid(visible=False)
        panel.set_ylabel("rows of A [m]")
        panel.set_title(f"bf16, {data.shape}; strips of 128 in A")
    axes[-1].set_xlabel("nonzeros of A [%]")
    handles = [Patch(color=COLOURS[name], label=f"{LETTERS[name]} {name.replace('cublas', 'cuBLAS')}")
               for name in LETTERS if name in used]  # fmt: skip
    legend_below(axes[-1], 5, handles, drop=-0.3)
    return figure


def title_crossover(cpu: Record, gpu: Record) -> str:
    """Up to how many rows decode is the fastest at any density, and below which one others skip."""
    cells = [(m, d, cell.kernel) for data in series.crossover(gpu) for (m, d), cell in data.cells.items()]
    few = [m for m in {m for m, _, _ in cells} if all(kernel == "decode" for n, _, kernel in cells if n <= m)]
    pays = [d for m, d, kernel in cells if m > 16 and kernel not in ("cublas", "dense")]
    if not few or not pays:
        return "6  The fastest kernel, and its speed-up over cuBLAS"
    return (f"6  Decode is fastest up to {max(few)} rows; above 16 rows\n"
            f"    skipping pays at {100 * max(pays):g} % nonzeros and less, at best")  # fmt: skip


FIGURES = {  # name: (what draws it, what makes its title, which records)
    "0-readme": (figure_readme, title_readme, "both"),
    "1-density": (figure_density, title_density, "both"),
    "2-size": (figure_sizes, title_sizes, "both"),
    "3-ladder": (figure_ladder, title_ladder, "gpu"),
    "4-roofline": (figure_roofline, title_roofline, "gpu"),
    "5-nets": (figure_nets, title_nets, "both"),
    "6-crossover": (figure_crossover, title_crossover, "gpu"),
}


def save(figure: Any, title: str, name: str, stamps: List[str], marks: str, out: str, png: str) -> int:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel("\n".join(stamps), x=0.01, ha="left", fontsize=7, color="#444444")
    path = os.path.join(out, name + ".svg")
    name_of = " ".join(title.split())
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Title": name_of, "Description": marks})
    figure.savefig(os.path.join(png, name + ".png"), dpi=200, metadata={"Software": None, "Description": marks})
    plt.close(figure)
    return os.path.getsize(path)


def marks_of(which: str, cpu: Record, gpu: Record) -> str:
    """What a figure is made of: the test compares it with the records that are there."""
    return "records " + " ".join(r.hash for r in ((cpu, gpu) if which == "both" else (gpu,)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the records in bench/results.")
    parser.add_argument("--out", default=os.path.join(records.ROOT, "docs", "figures"), help="where the SVGs go")
    parser.add_argument("--png", default=os.path.join(records.ROOT, "docs", "figures"), help="where the PNGs go")
    words = parser.parse_args()
    matplotlib.rcdefaults()  # without the user's own matplotlibrc
    matplotlib.use("agg")
    matplotlib.rcParams.update(STYLE)
    sizes: Dict[str, int] = {}
    try:
        cpu, gpu = records.load("cpu"), records.load("gpu")
        for place in {words.out, words.png}:
            os.makedirs(place, exist_ok=True)
        drawn = {name: (draw(cpu, gpu), title(cpu, gpu)) for name, (draw, title, _) in FIGURES.items()}  # all, or none
        for name, (_, _, which) in FIGURES.items():
            stamps = [
                f"{'GPU: ' if r is gpu else 'CPU: '}{r.stamp}" for r in ((gpu, cpu) if which == "both" else (gpu,))
            ]
            sizes[name] = save(*drawn[name], name, stamps, marks_of(which, cpu, gpu), words.out, words.png)
    except (RecordError, OSError) as e:
        sys.exit(f"figures.py: {e}")
    for name, size in sizes.items():
        print(f"{os.path.relpath(os.path.join(words.out, name))}.svg: {(size + 1023) // 1024} KB")
        if size > 300 * 1024:
            sys.exit(f"figures.py: {name}.svg has more than 300 KB")


if __name__ == "__main__":
    main()
