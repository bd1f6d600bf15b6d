#!/usr/bin/env python3
"""models_gpu.py: what esmm.torch.convert does to a decoder on a GPU, a step of training, and esmm.jax there. A few
minutes, one table.

    python3 bench/models_gpu.py [--layers 8] [--d 4096] [--hidden 14336] [--density 0.1] [--kernels]
                                [--part torch|training|transformers|jax]

The decoder has ReLU2, bf16 and random weights; the biases are moved so that of a token's hidden layer that share is not
zero. --kernels lists what a decode step's time goes to. The step of training is that of examples/relu2_gpt.py, with
SparseFFN and with the model's own layers, compiled and not. Times are medians of CUDA events, the old and the new model
in turns. Each part stands alone: one that fails says so, and the others run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
sys.path.insert(0, os.path.join(ROOT, "examples"))

failures: List[str] = []


def line(what: str, value: str, verdict: Any = None) -> None:
    mark = "" if verdict is None else "  ok" if verdict else "  MISSED"
    print(f"{what:56}{value:>30}{mark}", flush=True)
    if verdict is not None and not verdict:
        failures.append(what)


def milliseconds(runs: Dict[str, Callable[[], Any]], repeats: int = 15, before: Any = None) -> Dict[str, float]:
    """The median of each, in turns."""
    import torch

    times: Dict[str, List[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            if before is not None:
                before(name)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def sparse_gpt(words: Any) -> Tuple[Any, Any]:
    """The decoder of examples/relu2_gpt.py, with most of each hidden layer zero."""
    import torch
    from relu2_gpt import GPT

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(words.d, words.layers, words.d // 128, 4224, words.hidden).to(torch.bfloat16).eval()
    model.requires_grad_(False)
    ids = torch.randint(0, 256, (1, 4096), device="cuda")
    quantile = statistics.NormalDist().inv_cdf(1 - words.density)
    for block in model.blocks:
        block.mlp.up.weight.normal_(std=words.d**-0.5)
        block.mlp.down.weight.normal_(std=words.hidden**-0.5)
        block.mlp.up.bias.fill_(-quantile)
    return model, ids


def list_kernels(replays: Dict[str, Callable[[], Any]]) -> None:
    """What the GPU does in a replay of each, by kernel; the rest of its time are gaps between them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for name, replay in replays.items():
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                replay()
            torch.cuda.synchronize()
        events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
        events.sort(key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in events) / 5
        count = sum(e.count for e in events) // 5
        print(f"  {name}: {count} kernels, {total:.0f} us of work", flush=True)
        for e in events[:12]:
            print(f"    {e.self_device_time_total / 5:8.1f} us  {e.count // 5:4d} x  {e.key[:80]}", flush=True)


def decoder(words: Any) -> None:
    import torch

    import esmm.torch
    from esmm.torch._convert import difference

    model, ids = sparse_gpt(words)
    with torch.no_grad():
        want = model(ids[:, :512]).float()
        reference = model.float()(ids[:, :512])
        model.to(torch.bfloat16)
        rounding = difference(want, reference)
    began = time.perf_counter()
    done = esmm.torch.convert(model, ids, dense=True)
    print(done, flush=True)
    line("convert, seconds", f"{time.perf_counter() - began:.1f}")
    blocks = sum("block" in layer.kind for layer in done.replaced)
    line("blocks replaced", f"{blocks} of {words.layers}", blocks == words.layers)
    if not done.replaced:
        return
    with torch.no_grad():
        got = model(ids[:, :512]).float()
        off = difference(got, reference)
        line("logits, error before and after", f"{rounding:.1e} {off:.1e}", off < 2 * rounding)

        prefill = milliseconds(
            {"old": lambda: model(ids), "new": lambda: model(ids)}, before=lambda name: done.switch(name == "new")
        )
        times = prefill["old"] / prefill["new"]
        line(
            "prefill of 4096 tokens, ms and times",
            f"{prefill['old']:.2f} {prefill['new']:.2f} {times:.2f}",
            times > 0.98,
        )

        # One token after 512, again and again.
        caches = model.caches(1)
        model(ids[:, :512], caches)
        token = ids[:, 512:513].clone()

        def step() -> Any:
            return model(token, caches, 512)

        eager = milliseconds({"old": step, "new": step}, 40, before=lambda name: done.switch(name == "new"))
        times = eager["old"] / eager["new"]
        line("decode step, eager, ms and times", f"{eager['old']:.3f} {eager['new']:.3f} {times:.2f}", times >= 1.25)
        graphs = {}
        side = torch.cuda.Stream()
        for name in ("old", "new"):
            done.switch(name == "new")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    out = step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                out = step()
            graphs[name] = (graph, out)
        replay = milliseconds({name: graph.replay for name, (graph, _) in graphs.items()}, 60)
        times = replay["old"] / replay["new"]
        line(
            "decode step, CUDA graph, ms and times",
            f"{replay['old']:.3f} {replay['new']:.3f} {times:.2f}",
            times >= 1.25,
        )
        if words.kernels:
            try:
                list_kernels({name: graph.replay for name, (graph, _) in graphs.items()})
            except Exception as e:  # noqa: BLE001  (no profiler here)
                print(f"  the kernels cannot be listed: {e}", flush=True)
        off = difference(graphs["new"][1].float(), graphs["old"][1].float())
        line("decode, graph against graph", f"{off:.1e}", off < 4 * rounding)
    done.undo()
    line("undone", "", not any("Converted" in type(m).__name__ for m in model.modules()))


def training(words: Any) -> None:
    """A step of examples/relu2_gpt.py, at its own size, after some seconds of training."""
    import copy

    import torch
    from relu2_gpt import GPT, batch, loss_of, sources, train

    import esmm.torch

    torch.manual_seed(0)
    device = torch.device("cuda")
    data = sources()
    model = GPT(256, 4, 8, 128, 2048).to(device)
    losses = train(model, data, words.seconds, 64, device)
    x, y = batch(data, 64, 128, device, torch.Generator().manual_seed(3))
    with torch.no_grad():
        seen = esmm.torch.profile(model, x)
    told = ", ".join(f"{100 * layer.density:.0f} %" for layer in seen.sparse)
    print(f"after {losses[-1][0]} steps, loss {losses[-1][1]:.2f}, nonzeros by layer: {told}", flush=True)
    ours = copy.deepcopy(model)
    for block in ours.blocks:
        block.mlp = esmm.torch.SparseFFN.from_linears(block.mlp.up, block.mlp.down, activation="relu2")
    fitted = esmm.torch.fit(ours, x)
    told = ", ".join(f"{times:.2f}" for times in fitted.values())
    by = ", ".join(block.mlp.by for block in ours.blocks)
    print(f"the library's step over plain torch's, by layer: {told}; trained by {by}", flush=True)
    models = {"dense": model, "ours": ours}
    for name in ("dense", "ours"):
        models[f"{name}, compiled"] = torch.compile(copy.deepcopy(models[name]), fullgraph=True)
    steps: Dict[str, Callable[[], Any]] = {}
    first: Dict[str, float] = {}
    for name, each in models.items():
        each.train()
        optimizer = torch.optim.AdamW(each.parameters(), 1e-5, fused=True)

        def step(each: Any = each, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(each, x, y)
            loss.backward()
            optimizer.step()
            return loss

        began = time.perf_counter()
        first[name] = step().detach().item()
        taken = time.perf_counter() - began
        line(f"training, {name}: loss of the first step, seconds", f"{first[name]:.4f} {taken:.1f}")
        steps[name] = step
    off = max(abs(loss - first["dense"]) for loss in first.values())
    line("training, losses differ by", f"{off:.1e}", off < 1e-3)
    times = milliseconds(steps, 30)
    for name in times:
        line(f"training step, {name}, ms", f"{times[name]:.3f}")
    best = min(times["ours"], times["ours, compiled"])
    line(
        "training step, torch.compile'd dense over ours",
        f"{times['dense, compiled'] / best:.2f}",
        best <= 1.02 * times["dense, compiled"],
    )


def pretrained_kind(words: Any) -> None:
    """A Llama of transformers with ReLU, built from its config."""
    import torch
    import transformers

    import esmm.torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=4096, hidden_act="relu",
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, 4096, (1, 256), device="cuda")
    done = esmm.torch.convert(model, ids, min_speedup=0)
    print(done, flush=True)
    line(
        "transformers' Llama, ReLU: blocks",
        f"{len(done.replaced)} of 2",
        len(done.replaced) == 2 and done.difference < 2e-2,
    )


def jax_product(words: Any) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import esmm.jax

    line("JAX", f"{jax.__version__} on {jax.devices()[0].platform}", jax.devices()[0].platform == "gpu")
    assert esmm.jax._open(), "the foreign function was not built"
    for m, k, n in ((1, words.hidden, words.d), (256, words.hidden, words.d), (77, 200, 120)):
        rng = np.random.default_rng(1)
        a = jnp.asarray(rng.standard_normal((m, k)) * (rng.random((m, k)) < words.density), jnp.bfloat16)
        b = jnp.asarray(rng.standard_normal((k, n)) / k**0.5, jnp.bfloat16)
        w = esmm.jax.prepare(b)
        ours = jax.jit(lambda a, w=w: esmm.jax.matmul(a, w, activation="relu2"))
        plain = jax.jit(lambda a, b=b: jnp.square(jax.nn.relu(jnp.matmul(a, b, preferred_element_type=jnp.float32))))
        want = np.asarray(plain(a), np.float64)
        off = float(np.abs(np.asarray(ours(a), np.float64) - want).max() / max(1e-9, np.abs(want).max()))
        times: Dict[str, List[float]] = {"ours": [], "plain": []}
        for _ in range(7):
            for name, run in (("ours", ours), ("plain", plain)):
                begin = time.perf_counter()
                for _ in range(20):
                    out = run(a)
                out.block_until_ready()
                times[name].append((time.perf_counter() - begin) / 20)
        told = " ".join(f"{1e6 * statistics.median(times[name]):.0f}" for name in ("plain", "ours"))
        line(f"JAX {m} x {k} x {n}, us before and after", f"{told}, error {off:.1e}", off < 8e-3)
    a, b = (jnp.asarray(np.random.default_rng(i).standard_normal((48, 48)), jnp.float32) for i in range(2))
    got = jax.jit(jax.grad(lambda a, b: (esmm.jax.matmul(a, b, activation="relu") ** 2).sum(), (0, 1)))(a, b)
    with jax.default_matmul_precision("highest"):
        want = jax.grad(lambda a, b: (jax.nn.relu(a @ b) ** 2).sum(), (0, 1))(a, b)
    off = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(got, want))
    line("JAX gradients, error", f"{off:.1e}", off < 1e-4)
    close = esmm.jax.prepare(np.ones((4, 4), np.float32), device="cpu")
    try:
        jax.block_until_ready(esmm.jax.matmul(jnp.ones((4, 4)), close))
        line("JAX, weights on the wrong device", "accepted", False)
    except Exception as e:
        line("JAX, weights on the wrong device", "refused", "prepare them there" in str(e))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=8, help="of training before its steps are timed")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a decode step")
    parser.add_argument("--part", choices=["torch", "training", "transformers", "jax"], action="append")
    words = parser.parse_args()
    # JAX would take most of the GPU's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parts = {"torch": decoder, "training": training, "transformers": pretrained_kind, "jax": jax_product}
    for name in words.part or parts:
        try:
            parts[name](words)
        except Exception:
            failures.append(name)
            print(f"{name} FAILED\n{traceback.format_exc()[-3000:]}", flush=True)
    print("all met" if not failures else f"missed or failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
