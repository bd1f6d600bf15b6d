#!/usr/bin/env python3
"""relu2_gpt.py: trains a byte-level GPT with ReLU2 on this project's sources, converts it, and shows what that did.

    python3 examples/relu2_gpt.py --seconds 60 --device cpu --threads 2 --out relu2_gpt

It prints the loss, the tokens per second and the sparsity of each layer before and after esmm.torch.convert, and draws
them in OUT.png where matplotlib is installed. Tokens per second are those of decoding, one token at a time with the
keys and values of the earlier ones kept, and of reading a whole prompt.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import sys
import time
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esmm.torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Cache = Tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = MLP(d, hidden)

    def forward(self, x: Tensor, cache: Optional[Cache], start: int) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            for kept, new in zip(cache, (k, v)):
                kept[:, :, start : start + t] = new
            k, v = (kept[:, :, : start + t] for kept in cache)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    """relu(x)^2: as good as GELU in a transformer, and most of its results are zero once it has been trained."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class GPT(nn.Module):
    def __init__(self, d: int, layers: int, heads: int, context: int, hidden: int) -> None:
        super().__init__()
        self.context, self.heads = context, heads
        self.tokens, self.places = nn.Embedding(256, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList([Block(d, heads, hidden) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * layers) if name.endswith(("proj.weight", "down.weight")) else 0.02
                )

    def caches(self, count: int) -> List[Cache]:
        """Room for the keys and values of so many texts."""
        like = self.tokens.weight
        shape = (count, self.heads, self.context, like.shape[1] // self.heads)
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in self.blocks]

    def forward(self, ids: Tensor, caches: Optional[List[Cache]] = None, start: int = 0) -> Tensor:
        """Logits. caches: keys and values of the tokens before place `start`; those of ids are added. More than one
        token at once only from the start."""
        x = self.tokens(ids) + self.places.weight[start : start + ids.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None, start)
        return self.head(self.norm(x))


def sources() -> Tensor:
    """All of the project's C, CUDA, Python and text as bytes."""
    names = [
        name for end in ("c", "h", "cu", "cuh", "py", "md") for name in glob.glob(f"{ROOT}/**/*.{end}", recursive=True)
    ]
    kept = [name for name in sorted(names) if not os.path.relpath(name, ROOT).startswith("build")]
    text = b"".join(open(name, "rb").read() for name in kept)
    if len(text) < 100_000:
        raise SystemExit(f"relu2_gpt.py: {ROOT} holds only {len(text)} bytes of sources: run it in the project's tree")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(
    data: Tensor, count: int, context: int, device: torch.device, generator: torch.Generator
) -> Tuple[Tensor, Tensor]:
    at = torch.randint(0, len(data) - context - 1, (count,), generator=generator)
    rows = torch.stack([data[i : i + context + 1] for i in at.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, seconds: float) -> None:
        self.begin, self.seconds, self.told = time.perf_counter(), seconds, 0.0
        self.bar = sys.stderr.isatty()

    def __call__(self, text: str) -> float:
        gone = time.perf_counter() - self.begin
        share = min(1.0, gone / self.seconds)
        if self.bar:
            full = int(30 * share)
            print(f"\r[{'#' * full}{'.' * (30 - full)}] {gone:4.0f} s  {text}", end="", file=sys.stderr, flush=True)
        elif gone - self.told >= 10:
            print(f"{gone:4.0f} s  {text}", file=sys.stderr, flush=True)
            self.told = gone
        return share

    def end(self) -> None:
        if self.bar:
            print(file=sys.stderr)


def train(model: GPT, data: Tensor, seconds: float, count: int, device: torch.device) -> List[Tuple[int, float]]:
    """Adam for so long; (step, loss) now and then. A little L1 on relu(up(x)) asks for fewer nonzeros."""
    generator = torch.Generator().manual_seed(1)
    step = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    progress, losses, number, share = Progress(seconds), [], 0, 0.0
    hidden: List[Tensor] = []
    hooks = [b.mlp.down.register_forward_pre_hook(lambda _, args: hidden.append(args[0])) for b in model.blocks]
    while share < 1:
        for group in step.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 20, max(0.05, 1.2 * (1 - share)))
        hidden.clear()
        loss = loss_of(model, *batch(data, count, model.context, device, generator))
        step.zero_grad()
        (loss + 0.01 * sum((h + 1e-6).sqrt().mean() for h in hidden)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        number += 1
        if number % 5 == 1:
            losses.append((number, loss.item()))
        share = progress(f"step {number}  loss {losses[-1][1]:.3f}")
    progress.end()
    for hook in hooks:
        hook.remove()
    return losses


def decode(model: GPT, prompt: Tensor, tokens: int) -> Tuple[float, Tensor]:
    """Greedy: tokens per second, and what came out."""
    with torch.no_grad():
        caches = model.caches(prompt.shape[0])
        made = [model(prompt, caches)[:, -1:].argmax(-1)]
        begin = None
        for i in range(tokens):
            if i == 3:
                begin = now(prompt.device)
            made.append(model(made[-1], caches, prompt.shape[1] + i)[:, -1:].argmax(-1))
        assert begin is not None
        return (tokens - 3) / (now(prompt.device) - begin), torch.cat(made, 1)


def prefill(model: GPT, prompt: Tensor) -> float:
    with torch.no_grad():
        model(prompt)
        begin = now(prompt.device)
        for _ in range(3):
            model(prompt)
        return 3 * prompt.numel() / (now(prompt.device) - begin)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def speeds(model: GPT, done: Any, prompt: Tensor, tokens: int) -> Tuple[List[float], List[float], bool]:
    """Decode and prefill speed before and after, in turns so that what disturbs one disturbs the other; whether both
    decode the same bytes."""
    best = [[0.0, 0.0], [0.0, 0.0]]
    texts = []
    for turn in range(5):
        for new in (0, 1):
            done.switch(bool(new))
            speed, text = decode(model, prompt[:, : model.context - tokens - 1], tokens)
            best[new][0] = max(best[new][0], speed)
            best[new][1] = max(best[new][1], prefill(model, prompt))
            texts.append(text)
    done.switch(True)
    return best[0], best[1], all(torch.equal(text, texts[0]) for text in texts)


def draw(path: str, losses: List[Tuple[int, float]], done: Any, before: List[float], after: List[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    left.plot(*zip(*losses), color="#2a6f97")
    left.set(xlabel="step", ylabel="loss, nats per byte", title="Training", ylim=(0, None))
    layers = done.profile.sparse
    places = range(len(layers))
    middle.bar(
        [p - 0.2 for p in places], [100 * layer.density for layer in layers], 0.4, color="#2a6f97", label="one token"
    )
    middle.bar([p + 0.2 for p in places], [100 * layer.strip_density for layer in layers], 0.4, color="#a9d6e5",
               label=f"{layers[0].strip_rows if layers else 8} tokens together")  # fmt: skip
    middle.set(xlabel="layer", ylabel="nonzero, per cent", title="Hidden layer", ylim=(0, 100), xticks=list(places))
    middle.legend(frameon=False)
    for i, (name, speed) in enumerate((("decode, batch 1", 0), ("prompt", 1))):
        times = after[speed] / before[speed]
        right.bar([i - 0.2, i + 0.2], [1, times], 0.4, color=["#bbbbbb", "#2a6f97"])
        right.text(i - 0.2, 1.02, f"{before[speed]:.0f}/s", ha="center")
        right.text(i + 0.2, times + 0.02, f"{after[speed]:.0f}/s", ha="center")
    right.set(xticks=[0, 1], ylabel="times as fast", title="Tokens per second, before and after",
              ylim=(0, 1.2 * max(1, after[0] / before[0], after[1] / before[1])))  # fmt: skip
    right.set_xticklabels(["decode, batch 1", "whole prompt"])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of training (default 60)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ..."
    )
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: as torch chooses")
    parser.add_argument("--width", type=int, default=256, help="d_model; a multiple of 32 (default 256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=0, help="of the feed-forward blocks; 0: 8 times the width")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=0, help="0: 8 on a CPU, 64 on a GPU")
    parser.add_argument("--tokens", type=int, default=64, help="to decode when speed is measured")
    parser.add_argument("--out", default="relu2_gpt", help="the picture is OUT.png; empty for none")
    words = parser.parse_args()
    if words.seconds <= 0 or words.width < 32 or words.width % 32 or words.layers < 1 or words.batch < 0:
        parser.error("--seconds and --layers must be above 0, --batch not below, --width a multiple of 32")
    if not 5 <= words.tokens < words.context - 1:
        parser.error("--tokens must be at least 5 and less than --context")
    if words.threads:
        torch.set_num_threads(words.threads)
    device = torch.device(words.device)
    torch.manual_seed(0)
    data = sources()
    model = GPT(words.width, words.layers, words.width // 32, words.context, words.hidden or 8 * words.width).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(data) / 1e6:.1f} MB of sources, {size / 1e6:.1f} million weights, on {device}")
    held = len(data) * 19 // 20
    losses = train(model, data[:held], words.seconds, words.batch or (64 if device.type == "cuda" else 8), device)
    model.eval()
    x, y = batch(data[held:], 16, words.context, device, torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss_before = loss_of(model, x, y).item()

    done = esmm.torch.convert(model, x[:1])
    print(done)
    with torch.no_grad():
        loss_after = loss_of(model, x, y).item()
    before, after, same = speeds(model, done, x[:1], words.tokens)
    caches, half = model.caches(1), words.context // 2
    with torch.no_grad():
        model(x[:1, :half], caches)
    step = done.compare((x[:1, half : half + 1], caches, half))
    print(f"\n{'':24}{'before':>12}{'after':>12}")
    print(f"{'loss, nats per byte':24}{loss_before:12.5f}{loss_after:12.5f}")
    print(f"{'decode, tokens/s':24}{before[0]:12.0f}{after[0]:12.0f}   {after[0] / before[0]:.2f} times")
    print(f"{'one token, ms':24}{1e3 * step.seconds_before:12.3f}{1e3 * step.seconds_after:12.3f}"
          f"   {step.measured:.2f} times; {step.predicted:.2f} predicted by the densities")  # fmt: skip
    print(f"{'whole prompt, tokens/s':24}{before[1]:12.0f}{after[1]:12.0f}   {after[1] / before[1]:.2f} times")
    print(f"decoded bytes are {'the same' if same else 'not all the same: rounding decided a tie'}")
    if words.out:
        try:
            draw(words.out + ".png", losses, done, before, after)
            print(f"{words.out}.png")
        except ImportError:
            print("no picture: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
