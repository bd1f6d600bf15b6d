#!/usr/bin/env python3
"""storm.py: random products through `esmm bench auto`, in one process: which of them lose against the dense library.

usage: storm.py ESMM [--device cpu|cuda] [--seed N] [--count N] [--below 0.95] [--threads N] [--json FILE] [--list FILE]

Prints the products that are slower than --below times the dense library and those that fail, then a summary. --json
keeps a line for each product, with its options as "args". --list writes the products for `esmm bench --list`, and
measures nothing. The same seed gives the same products. Exit status 1 if a product failed.
"""
import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile

# Even sizes and odd ones, one row and one column, those of real layers, and those beside a tile's edge.
ROWS = [1, 2, 3, 4, 7, 8, 12, 16, 19, 31, 32, 48, 65, 96, 127, 128, 200, 256, 385, 512, 900, 1024]
SIDES = [1, 7, 31, 33, 64, 96, 129, 250, 511, 512, 768, 1001, 1024, 1536, 2047, 2048]
LARGE_ROWS = [1537, 2048, 3001, 4096]
LARGE_SIDES = [3072, 4095, 4096, 6144, 8192, 11008]
DTYPES = {"cpu": ["f32", "f32", "bf16"], "cuda": ["bf16", "bf16", "f16", "f32"]}
STRIPS = [4, 16, 32, 64, 128, 200]
DENSITIES = [1, 0.95, 0.7, 0.5, 0.3, 0.15, 0.08, 0.03, 0.005, 0]
DENSITIES_B = [1, 1, 1, 0.6, 0.2]


def product(draw, device):
    """The options of one product."""
    gpu = device == "cuda"
    rows = ROWS + (LARGE_ROWS if gpu else [])
    sides = SIDES + (LARGE_SIDES if gpu else [])
    dims = [draw.choice(rows), draw.choice(sides), draw.choice(sides)]
    words = ["--dims", *map(str, dims), "--dtype", draw.choice(DTYPES[device]), "--seed", str(draw.randrange(1, 10**6))]
    zeros = draw.choice(["strips", "random", "early", "middle"])
    if zeros in ("early", "middle"):
        return words + [f"--activations={zeros}"]
    words += ["--random"] if zeros == "random" else ["--blockwise", "--strip", str(draw.choice(STRIPS))]
    return words + ["--density-a", str(draw.choice(DENSITIES)), "--density-b", str(draw.choice(DENSITIES_B))]


def products(options):
    draw = random.Random(options.seed)
    return [" ".join(product(draw, options.device)) for _ in range(options.count)]


def write_list(file, lines):
    file.write("".join(line + "\n" for line in lines))
    file.flush()


def measure(options, lines):
    """Yields (number, record or None, error) in the order of the lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed, tempfile.TemporaryFile("w+") as said:
        write_list(listed, lines)
        command = [options.esmm, "bench", "auto", "3", "--device", options.device, "--no-tune", "--list", listed.name]
        if options.device == "cpu":
            command += ["--threads", str(options.threads)]
        try:
            child = subprocess.Popen([*command, "--json", "-"], stdout=subprocess.PIPE, stderr=said, text=True)
        except OSError as error:
            sys.exit(f"storm.py: {options.esmm}: {error.strerror}")
        records = {}
        for line in child.stdout:
            if line.startswith("{"):
                record = json.loads(line)
                records[record["line"]] = record
                if sys.stderr.isatty():
                    print(f"\r{record['line']} of {len(lines)}", end="", file=sys.stderr)
        status = child.wait()
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
        said.seek(0)
        errors, rest = {}, ""
        for text in said.read().splitlines():
            found = re.search(re.escape(listed.name) + r":(\d+): (.*)", text)
            if found:
                errors[int(found.group(1))] = found.group(2)
            elif text.startswith("esmm"):
                rest = text
    if not records and not errors:
        sys.exit(rest or f"storm.py: {options.esmm} bench ended with {status} and said nothing")
    for number in range(1, len(lines) + 1):
        record = records.get(number)
        error = errors.get(number, f"nothing was said; esmm bench ended with {status}")
        if record and not record["speedup"]:
            record, error = None, f"{record['outcome']}: {record['reason']}"
        yield number, record, error


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("esmm", metavar="ESMM", help="the command, such as build/esmm")
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--below", type=float, default=0.95)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on a CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--list", metavar="FILE")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count: {options.count} is not a positive whole number")
    if not options.below > 0:
        parser.error(f"--below: {options.below} is not a positive number")
    if options.list and options.json:
        parser.error("--list measures nothing, so there is nothing for --json")
    return options


def main():
    options = parse()
    lines = products(options)
    path = options.list or options.json
    try:
        out = open(path, "w", encoding="utf-8") if path else None
    except OSError as error:
        sys.exit(f"storm.py: {path}: {error.strerror}")
    if options.list:
        write_list(out, lines)
        out.close()
        return 0
    kept, speeds, failed = [], [], 0
    for number, record, error in measure(options, lines):
        if not record:
            failed += 1
            print("FAILED", lines[number - 1], error)
            continue
        record["args"] = lines[number - 1]
        kept.append(record)
        speeds.append(record["speedup"])
        if record["speedup"] < options.below:
            print(f"{record['speedup']:.2f}  {record['args']}  {record['kernel']} {record['ms']:.4f} ms, "
                  f"dense {record['ms_baseline']:.4f}")
    if out:
        with out:
            out.write("".join(json.dumps(record) + "\n" for record in kept))
    if speeds:
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        print(f"{len(speeds)} products, {failed} failed, {sum(s < options.below for s in speeds)} below {options.below}, "
              f"{sum(s > 1.1 for s in speeds)} above 1.1, geometric mean {mean:.2f}, worst {min(speeds):.2f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
