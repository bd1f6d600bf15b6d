#!/usr/bin/env python3
"""tables.py: the tables and sentences of README.md and docs/PERFORMANCE.md from the records in bench/results. `make
tables` runs it.

    python3 bench/tables.py           rewrites what stands between <!-- NAME --> and <!-- /NAME -->
    python3 bench/tables.py --check   changes nothing, and fails if something else stands there

Each function below makes one block. A block may start with a heading of its own: a record without the suites that fill
it then leaves nothing behind. A row of `auto` is made of lines with "requested":"auto" alone, and no cell is written
twice: two lines that would fill it with different numbers are an error.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import records
import series
from records import Line, Record, RecordError, asked, by, error, fold, grid, mean, ms, percent, product, times

PAGES = ("README.md", os.path.join("docs", "PERFORMANCE.md"))
BLOCK = re.compile(r"^<!-- ([a-z0-9-]+) -->\n(.*?)^<!-- /\1 -->$", re.S | re.M)
OPEN = re.compile(r"^<!-- ([a-z0-9-]+) -->$", re.M)


class Table:
    """Rows and columns keep the order in which they first come. The > at the end of a name aligns to the right."""

    def __init__(self, *title: str) -> None:
        self.title = title
        self.rows: Dict[Tuple[str, ...], Dict[str, str]] = {}
        self.columns: Dict[str, None] = {}

    def put(self, row: Sequence[str], cells: Dict[str, str]) -> None:
        mine = self.rows.setdefault(tuple(row), {})
        for column, text in cells.items():
            if mine.get(column, text) != text:
                where = f"'{column.rstrip('>')}' of {', '.join(row)}"
                raise RecordError(f"two lines fill {where}: {mine[column]} and {text}")
            mine[column] = text
        self.columns.update(dict.fromkeys(cells))

    def put_share(self, row: Sequence[str], line: Line) -> None:
        """Its speed-up, in the column of the share of nonzeros that was asked for."""
        self.put(row, {percent(asked(line)) + ">": times(line["speedup"])})

    def __str__(self) -> str:
        rows = [[*row, *[cells.get(column, "") for column in self.columns]] for row, cells in self.rows.items()]
        return grid([*self.title, *self.columns], rows) if rows else ""


def some(record: Record, suites: str, **where: Any) -> List[Line]:
    return record.some(suite=lambda name: name in suites.split(), **where)


def autos(record: Record, suites: str, **where: Any) -> List[Line]:
    return some(record, suites, requested="auto", **where)


def forced(record: Record, suites: str, kernel: str, **where: Any) -> List[Line]:
    lines = some(record, suites, kernel=lambda name: name.startswith(kernel), **where)
    return [line for line in lines if line["requested"] != "auto"]


def dtype(line: Line) -> str:
    return re.sub("^f", "fp", line["dtype"])


def chosen(line: Line) -> Dict[str, str]:
    return {"kernel chosen": line["kernel"], "ms>": ms(line["ms"]), "times faster>": times(line["speedup"])}


def scan(line: Line) -> str:
    return f"{100 * line['ms_extract'] / line['ms']:.1f} %" if line["ms_extract"] > 0 else ""


def densities(line: Line, strips: str) -> Dict[str, str]:
    return {"nonzeros>": percent(line["density_a"]), strips: percent(line["strip128_density_a"])}


def worst_error(lines: List[Line]) -> str:
    return times(max((error(line) for line in lines), default=0.0))


def dense_wins(gain: Dict[float, float]) -> str:
    """The share of nonzeros above which the gain is below 1, between the two shares measured beside it."""
    low = max((d for d, x in gain.items() if x >= 1), default=0.0)
    high = min((d for d in gain if d > low), default=None)
    if high is None:
        return f"at no share up to {percent(low)}" if low else "(not measured)"
    if not low:
        return f"already at {percent(high)}"
    return f"above {100 * (low + (high - low) * (gain[low] - 1) / (gain[low] - gain[high])):.0f} %"


def esmm_wins(shares: str) -> str:
    """The same, said of ESMM."""
    shares = re.sub("^at no share up to", "at every share measured, up to", shares)
    return re.sub("^already at", "at no share measured, from", shares.replace("above", "below"))


def cpu_wins(cpu: Record, suite: str) -> str:
    groups = by(some(cpu, suite), asked)
    return dense_wins({d: max(line["speedup"] for line in group) for d, group in groups.items()})


def gpu_wins(gpu: Record, dense: Callable[[Line], float], kernel: str) -> str:
    """That time over the skipping kernel's, in strips in fp32."""
    joint = {asked(line): line["ms"] for line in forced(gpu, "blockwise over", "joint")}
    lines = forced(gpu, "blockwise over", kernel) if kernel else some(gpu, "blockwise over")
    least = {d: min(map(dense, group)) for d, group in by(lines, asked).items()}
    return dense_wins({d: least[d] / joint[d] for d in joint if d in least})


# ---- README ----


def build(record: Record) -> str:
    first = record.lines[0]
    threads = f"{first['threads']} threads, " if record.kind == "cpu" else ""
    return f"{record.machine}, {threads}{first['libraries']}, {first['date']}"


def block_summary(cpu: Optional[Record], gpu: Optional[Record]) -> str:
    """Four rows: zeros of activations and of weights, on both devices, and what it costs where there are none."""
    table, words = Table("", "zeros"), []

    def put(zeros: str, lines: List[Line], share: str = "asked") -> None:
        for line in lines:
            table.put(["CPU" if line["device"] == "cpu" else "GPU", zeros], {
                "product": f"{product(line)}, {dtype(line)}", "nonzeros>": percent(float(line[share])),
                "dense library ms>": ms(line["ms_baseline"]), "ESMM ms>": ms(line["ms"]),
                "times faster>": times(line["speedup"])})  # fmt: skip

    if cpu:
        put("anywhere in A", autos(cpu, "unstructured", asked=0.1))
        put("none", autos(cpu, "blockwise", m=2048, asked=1))
        words.append(f"CPU: {build(cpu)}. With whole strips of zeros ESMM wins "
                     f"{esmm_wins(cpu_wins(cpu, 'over-strips'))} nonzeros; with scattered zeros, at 1024³, "
                     f"{esmm_wins(cpu_wins(cpu, 'over-single'))}.")  # fmt: skip
        rows = [float(x["speedup"]) for x in autos(cpu, "decode", m=1, asked=1)]
        if rows:
            words.append(f"One row without zeros is {times(min(rows))} times as fast.")
    if gpu:
        layer = autos(gpu, "real16", m=8192, n=3072, asked=lambda name: name.endswith("1"))
        put("of a trained net, early layer", layer, "density_a")
        put("blocks of 128 in B", autos(gpu, "bsr16", m=8192, asked=0.22, format="bsr:128", asked_density_a=1))
        skips = esmm_wins(gpu_wins(gpu, lambda x: float(x["ms"]), "dense"))
        words.append(f"GPU: {build(gpu)}. In fp32, skipping strips of 32 rows pays {skips} nonzeros.")
        gains = sorted((x for x in autos(gpu, "random16", m=4096, n=4096) if x["speedup"] >= 1.05), key=asked)
        if gains:
            words.append(f"With scattered zeros bf16 gains from {percent(asked(gains[-1]))} down: "
                         f"{times(gains[-1]['speedup'])} times, {times(gains[0]['speedup'])} at "
                         f"{percent(asked(gains[0]))} ({product(gains[0])}).")  # fmt: skip
    return block("", table, " ".join(words))


# ---- docs/PERFORMANCE.md: CPU ----


ZEROS = {"blockwise": "strips of 32 in A and B", "unstructured": "anywhere in A", "decode": "anywhere in A, few rows",
         "strips16": "strips of 32 in A, bf16"}  # fmt: skip


def block_cpu(cpu: Record) -> str:
    table = Table("zeros", "product")
    for row, lines in by(autos(cpu, " ".join(ZEROS)), lambda x: (ZEROS[x["suite"]], product(x))).items():
        table.put(row, {"library ms>": ms(min(line["ms_baseline"] for line in lines))})
        for line in lines:
            table.put_share(row, line)
    checked = [x for x in cpu.lines if x["suite"] != "calls" and not x["suite"].startswith("bf16")]
    return block("", table, f"{cpu.build}. **Dense wins** {cpu_wins(cpu, 'over-strips')} nonzeros in strips, and "
                 f"{cpu_wins(cpu, 'over-single')} where zeros are anywhere in A (1024³). Our error against float64 is "
                 f"at most {worst_error(checked)} times the library's.")  # fmt: skip


def block_cpu_activations(cpu: Record) -> str:
    table = Table("layers", "product")
    for line in autos(cpu, "activations"):
        table.put([line["asked"], product(line)], {
            "nonzeros>": percent(line["density_a"]), "kernel chosen": line["kernel"], "ms>": ms(line["ms"]),
            "times faster>": times(line["speedup"])})  # fmt: skip
    return block("", table)


def block_cpu_calls(cpu: Record) -> str:
    table = Table("product", "dtype", "kernel chosen")
    for line in autos(cpu, "calls"):
        threads = f"{line['threads']} thread{'s' * (line['threads'] > 1)}"
        table.put([product(line), dtype(line), line["kernel"]], {f"ns, {threads}>": f"{line['host_ns']:.0f}"})
    return block("### What a call costs\n\nSmall products, without zeros, call after call on the same operands: what "
                 "`auto` takes once the plan knows them.\nNanoseconds a call, the median.", table)  # fmt: skip


# ---- GPU, fp32 ----


def put_fp32(table: Table, lines: List[Line]) -> None:
    for line in lines:
        more = {"scan of A>": scan(line), "error over cuBLAS's>": f"{error(line):.2f}"}
        table.put([percent(asked(line))], {**chosen(line), **more})


def block_gpu(gpu: Record) -> str:
    table = Table("nonzeros>")
    put_fp32(table, autos(gpu, "blockwise"))
    ours = [x for x in some(gpu, "blockwise sizes only-a only-b long-k ladder over")
            if not x["kernel"].startswith(("cublas", "ladder"))]  # fmt: skip
    return block("", table, f"{gpu.build}. **Dense wins** {gpu_wins(gpu, lambda x: float(x['ms']), 'dense')} nonzeros "
                 "in strips, if the dense kernel is ours; cuBLAS beats the skipping kernel "
                 f"{gpu_wins(gpu, lambda x: float(x['ms_baseline']), '')}. The error of our fp32 kernels against "
                 f"float64 is at most {worst_error([x for x in ours if x['suite'] != 'long-k'])} times cuBLAS's, "
                 f"{worst_error([x for x in ours if x['suite'] == 'long-k'])} times at k = 16384.")  # fmt: skip


def block_gpu_sizes(gpu: Record) -> str:
    table = Table("times faster, by size")
    for line in sorted(autos(gpu, "sizes blockwise"), key=lambda x: (int(x["m"]), -asked(x))):
        if asked(line) in (0.5, 0.25):
            share = percent(asked(line))
            looking = {f"scan of A at {share}>": scan(line)} if asked(line) == 0.25 else {}
            table.put([product(line)], {share + ">": times(line["speedup"]), **looking})
    return block("", table)


def block_gpu_one_operand(gpu: Record) -> str:
    table = Table("sparse")
    for line in autos(gpu, "only-a only-b"):
        table.put_share(["only A" if line["suite"] == "only-a" else "only B"], line)
    return block("", table)


def block_gpu_long_k(gpu: Record) -> str:
    table = Table("nonzeros>")
    put_fp32(table, autos(gpu, "long-k"))
    for line in forced(gpu, "long-k", "dense"):
        table.put([percent(asked(line))], {"our dense kernel>": times(line["speedup"])})
    return block("", table)


# ---- GPU, bf16 and fp16 ----


def block_gpu16_dense(gpu: Record) -> str:
    table = Table("product", "dtype")
    for line in autos(gpu, "dense16"):
        table.put([product(line), dtype(line)], {
            "`auto` takes": line["kernel"], "`auto` ms>": ms(line["ms"]),
            "times faster>": times(line["speedup"])})  # fmt: skip
    for line in forced(gpu, "dense16", "dense"):
        table.put([product(line), dtype(line)], {"our dense kernel>": times(line["speedup"])})
    return block("", table)


def block_gpu16_strips(gpu: Record) -> str:
    table = Table("product", "kernel")
    for line in some(gpu, "strips16"):
        table.put_share([product(line), "`auto`" if line["requested"] == "auto" else line["kernel"]], line)
    return block("", table)


def block_gpu16_joint(gpu: Record) -> str:
    table = Table("product")
    for line in autos(gpu, "joint16"):
        table.put_share([product(line)], line)
    return block("", table)


def block_gpu16_few_rows(gpu: Record) -> str:
    table = Table("product", "activations")
    for line in autos(gpu, "decode16", m=lambda m: m > 1, k=lambda k: k > 4096):
        table.put([product(line), line["asked"]], {**densities(line, "k's some row needs>"), **chosen(line)})
    return block("", table)


def block_gpu16_anywhere(gpu: Record) -> str:
    table = Table("product", "nonzeros>")
    for line in autos(gpu, "random16"):
        table.put([product(line), percent(asked(line))], chosen(line))
    return block("", table)


def block_gpu16_trained(gpu: Record) -> str:
    table = Table("activations", "product")
    for line in autos(gpu, "real16"):
        table.put([line["asked"], product(line)], {**densities(line, "in strips of 128>"), **chosen(line)})
    for line in forced(gpu, "real16", "joint"):
        table.put([line["asked"], product(line)], {"joint forced>": times(line["speedup"])})
    return block("", table)


SUITES16 = "dense16 strips16 joint16 sweep16 random16 decode16 real16"


def block_gpu16_sweep(gpu: Record) -> str:
    table, found = Table("product"), series.sweep(gpu)
    if not found:
        return ""
    for choice in found:
        if asked(choice.auto) != 0.125:
            table.put_share([product(choice.auto)], choice.auto)
    worst = min(found, key=lambda x: x.over_dense)
    ours = [x for x in some(gpu, SUITES16) if not x["kernel"].startswith("cublas")] + some(gpu, "bsr16 nm24")
    fp32_c = [x for x in some(gpu, "error16") if not x["kernel"].startswith("cublas")]
    return block("", table, f"`auto` is at its worst, of {len(found)} products, those at 12.5 % included, on "
                 f"{worst.name}, where it took {worst.auto['kernel']}: {worst.over_dense:.3f} times cuBLAS. The error "
                 f"of our 16-bit kernels against float64 is at most {worst_error(ours)} times cuBLAS's, "
                 f"{worst_error(fp32_c)} times where C is fp32; every one gave the same bits twice.")  # fmt: skip


def block_gpu16_best(gpu: Record) -> str:
    table, found = Table("products"), series.sweep(gpu)
    if not forced(gpu, "sweep16", ""):
        return ""
    middle = [x for x in found if x.auto["m"] >= 16 and 0.05 <= asked(x.auto) <= 0.5]
    for name, group in (("16 rows and more, 5 to 50 %", middle), ("all", found)):
        if group:
            table.put([name], {
                "number>": str(len(group)), "`auto` over cuBLAS>": times(mean([x.over_dense for x in group])),
                "the best over cuBLAS>": times(mean([x.best_over_dense for x in group])),
                "`auto` over the best>": f"{mean([x.over_best for x in group]):.3f}",
                "at its worst>": f"{min(x.over_best for x in group):.3f}",
                "below 0.97 of the best>": str(sum(x.over_best < 0.97 for x in group)),
                "below 0.97 of cuBLAS>": str(sum(x.over_dense < 0.97 for x in group))})  # fmt: skip
    furthest = min(found, key=lambda x: x.over_best)
    text = (f"Furthest from the best: {furthest.name}, where it took {furthest.auto['kernel']} and {furthest.kernel} "
            "is the fastest.")  # fmt: skip
    first = {x.name: x.auto["ms_first"] / x.auto["ms"] for x in found if x.auto["ms_first"]}
    if first:
        worst = max(first, key=lambda name: first[name])
        text += (f" A first call, which knows nothing of A yet, takes {times(mean(list(first.values())))} times as "
                 f"long as a later one in the geometric mean, {times(first[worst])} times at most ({worst}).")  # fmt: skip
    return block("### `auto` against the best of all\n\nThe same products, with our dense kernel, joint, fused (up to "
                 "1024 rows), decode (up to 16) and cuBLAS forced beside\n`auto`. Figures are of speed, so 1 is as fast; "
                 "means are geometric.", table, text)  # fmt: skip


def block_gpu_storm(gpu: Record) -> str:
    table, lines = Table("line>", "product", "dtype", "zeros"), autos(gpu, "storm")
    if not lines:
        return ""

    def zeros(line: Line) -> str:
        return f"{line['generator']}, A {percent(line['density_a'])}, B {percent(line['density_b'])}"

    slow = series.slow(lines)
    for line in slow:
        table.put([str(line["line"]), product(line), dtype(line), zeros(line)], chosen(line))
    worst = min(lines, key=lambda line: line["speedup"])
    share = f" ({percent(len(slow) / len(lines))}), those above" if slow else ""
    return block("### Random products\n\nSizes from 1 up, odd ones too, bf16, fp16 and fp32, zeros anywhere, in strips "
                 "or as in activations.", table,
                 f"`auto` is below 0.95 times cuBLAS on {len(slow) or 'none'} of {len(lines)} products{share}. It is "
                 f"at its worst on {product(worst)} ({dtype(worst)}, {zeros(worst)}), where it took {worst['kernel']}: "
                 f"{worst['speedup']:.3f} times cuBLAS. In the geometric mean it is "
                 f"{times(mean([line['speedup'] for line in lines]))} times as fast.")  # fmt: skip


def block_gpu16_bsr(gpu: Record) -> str:
    table = Table("product", "block>", "A")
    for line in autos(gpu, "bsr16"):
        zeros = f"{percent(line['strip128_density_a'])} in strips" if line["density_a"] < 0.99 else "dense"
        table.put_share([product(line), line["format"].replace("bsr:", ""), zeros], line)
    return block("### Weights in blocks\n\nbf16, B in format BSR: times faster than cuBLAS with the dense B, by the "
                 "share of blocks that are kept.", table)  # fmt: skip


def block_gpu16_nm(gpu: Record) -> str:
    table, lines = Table("product"), autos(gpu, "nm24")
    if not lines:
        return ""
    for line in lines:
        if line["m"] in (1, 4, 16, 64, 256, 1024) or line["m"] > 2048:  # every other one
            table.put([product(line)], chosen(line))
    worst = min(lines, key=lambda line: line["speedup"])
    return block("### Weights of 2:4\n\nbf16, B in format N:M, A dense; beside cuBLAS with the dense B.", table,
                 f"`auto` is at its worst, of {len(lines)} products, on {product(worst)}, where it took "
                 f"{worst['kernel']}: {worst['speedup']:.3f} times cuBLAS with dense weights.")  # fmt: skip


def block_gpu16_epilogue(gpu: Record) -> str:
    """Beside the plain product of the same size; with a gate, beside two of them."""
    table, lines = Table("product", "epilogue"), autos(gpu, "epilogue16")
    plain = {product(line): line["ms"] for line in lines if not line["epilogue"]}
    for line in lines:
        if line["epilogue"]:
            name, count = product(line), 2 if "gate" in line["epilogue"] else 1
            table.put([name, line["epilogue"].replace(",", ", ")], {
                "ms>": ms(line["ms"]), "times faster>": times(line["speedup"]),
                "over our plain product>": f"{line['ms'] / plain[name] / count:.3f}" if name in plain else "",
            })  # fmt: skip
    return block("### Epilogues\n\nbf16, without zeros. cuBLAS multiplies only, twice with a gate; what it would need "
                 "for the rest is not in its time.\n*Over our plain product* is of time: with a gate over two of them.",
                 table)  # fmt: skip


def block_gpu16_given(gpu: Record) -> str:
    table = Table("product", "nonzeros of A>")
    for line in autos(gpu, "given16"):
        table.put([product(line), percent(asked(line))], {
            "bitmaps given, ms>": ms(line["ms"]), "cuBLAS ms>": ms(line["ms_baseline"]),
            "times faster>": times(line["speedup"])} if line["given"] else
            {"kernel chosen": line["kernel"], "A looked at, ms>": ms(line["ms"])})  # fmt: skip
    return block("### Bitmaps given\n\nbf16, A sparse by strips of 128, B dense. The product whose C is A has "
                 "left A's bitmaps on the GPU (`c_pattern`); this\none reads them (`a_pattern`) and does not scan A.",
                 table)  # fmt: skip


def block_gpu16_prepare(gpu: Record) -> str:
    table = Table("B", "format")
    for line in some(gpu, "prepare16"):
        table.put([f"{line['k']} × {line['n']}", line["format"]],
                  {"prune ms>": ms(line["ms_prune"]), "prepare ms>": ms(line["ms_prepare"])})  # fmt: skip
    return block("### Making weights\n\nA dense bf16 B in the GPU's memory, pruned and prepared there.", table)


# ---- streams of calls: neither has a time of one call ----


def block_gpu_switch(gpu: Record) -> str:
    table = Table("product", "A")
    for line in some(gpu, "switch"):
        turns = f"turns from dense to {percent(asked(line))} and back every {line['switch_every']} calls"
        for zeros, best, best_ms, auto_ms, ratio in (
            (turns, f"{line['best_dense']}, {line['best_sparse']}", "ms_best", "ms_auto", "switch_ratio"),
            ("stays dense", "cuBLAS", "ms_baseline_dense", "ms_auto_dense", "dense_ratio"),
        ):
            table.put([product(line), zeros], {"the best for it": best, "its ms>": ms(line[best_ms]),
                      "`auto` ms>": ms(line[auto_ms]), "`auto` over it>": f"{line[ratio]:.3f}"})  # fmt: skip
    return block("### Where A changes\n\nA stream of calls with the same weights, bf16. Figures are of time, ms of a "
                 "call: at 1.00 `auto` is as fast as if it\nhad known each A before.", table)  # fmt: skip


def block_gpu_host(gpu: Record) -> str:
    table = Table("product", "nonzeros>")
    for line in autos(gpu, "host"):
        table.put([product(line), percent(asked(line))],
                  {"kernel chosen": line["kernel"],
                   "us a call, of the host>": f"{line['host_ns'] / 1000:.2f}"})  # fmt: skip
    return block("### Host time\n\nWhat a call of `auto` costs the host once the plan knows it, bf16. The GPU works "
                 "meanwhile.", table)  # fmt: skip


# ---- blocks and pages ----


def block(head: str, table: Table, text: str = "") -> str:
    return "\n\n".join([part for part in (head, str(table), fold(text)) if part]) if table.rows or text else ""


CPU_BLOCKS = {"cpu": block_cpu, "cpu-activations": block_cpu_activations, "cpu-calls": block_cpu_calls}
GPU_BLOCKS: Dict[str, Callable[[Record], str]] = {
    "gpu": block_gpu,
    "gpu-sizes": block_gpu_sizes,
    "gpu-one-operand": block_gpu_one_operand,
    "gpu-long-k": block_gpu_long_k,
    "gpu16-dense": block_gpu16_dense,
    "gpu16-strips": block_gpu16_strips,
    "gpu16-joint": block_gpu16_joint,
    "gpu16-few-rows": block_gpu16_few_rows,
    "gpu16-anywhere": block_gpu16_anywhere,
    "gpu16-sweep": block_gpu16_sweep,
    "gpu16-best": block_gpu16_best,
    "gpu-storm": block_gpu_storm,
    "gpu16-bsr": block_gpu16_bsr,
    "gpu16-nm": block_gpu16_nm,
    "gpu16-epilogue": block_gpu16_epilogue,
    "gpu16-given": block_gpu16_given,
    "gpu16-prepare": block_gpu16_prepare,
    "gpu-switch": block_gpu_switch,
    "gpu-host": block_gpu_host,
    "gpu16-trained": block_gpu16_trained,
}


def blocks(cpu: Optional[Record], gpu: Optional[Record]) -> Dict[str, str]:
    """The text of each block; that of a record that is not there is empty."""
    made = {name: make(cpu) if cpu else "" for name, make in CPU_BLOCKS.items()}
    made.update({name: make(gpu) if gpu else "" for name, make in GPU_BLOCKS.items()})
    made["summary"] = block_summary(cpu, gpu)
    return made


def fill(page: str, text: str, made: Dict[str, str]) -> str:
    def one(found: Any) -> str:
        name = found.group(1)
        return f"<!-- {name} -->\n{made[name]}{chr(10) if made[name] else ''}<!-- /{name} -->"

    closed = [found.group(1) for found in BLOCK.finditer(text)]
    for name in OPEN.findall(text):
        if name not in made or name not in closed:
            raise RecordError(f"{page}: there is no table {name}, or no end of it")
    return BLOCK.sub(one, text)


def pages() -> Dict[str, str]:
    made = blocks(records.load("cpu"), records.load("gpu") if records.path_of("gpu") else None)
    return {page: fill(page, records.page(page), made) for page in PAGES}


if __name__ == "__main__":
    records.main("tables", pages)
