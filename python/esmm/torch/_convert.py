"""esmm.torch.convert: finds the feed-forward blocks of a model whose activation makes zeros, and lets them be skipped.

It goes by results, not by names. A run on the sample shows which Linears are fed zeros. For each of them the modules
around it are tried. A module is a block, and replaced as a whole, if its results equal down(act(up(x))) or
down(act(gate(x)) * up(x)) with its own Linears, act being ReLU or ReLU2, on the sample and on inputs far from it. If
there is none (the Linears of OPT lie in the decoder layer itself), the one Linear is replaced. Each replacement is
compared with the old module and timed against it; one that is not faster is dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ._blocks import Converted, ConvertedBlock, ConvertedLinear, ConvertedSequential, activate, product
from ._formats import DTYPES, RELU, RELU2
from ._profile import (
    LayerProfile,
    Profile,
    Sample,
    call_model,
    features,
    hooked,
    is_linear,
    parameter,
    profile,
    text_table,
    watching,
)
from ._timing import Emptier, emptier, race, time_inside

# How far a replacement's result may be from the block's, as a share of its norm: some units in the last place.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Size:
    """The measurements of one layer at one number of rows."""

    rows: int
    density: float  # nonzero share of what its product has to multiply: of rows, or of strips of rows
    seconds: Dict[str, float]  # by way; 'dense' is what was there
    seconds_before: Dict[str, float]  # by new way: what comes before the product that skips
    seconds_full: float  # of that product where nothing is zero, by the library
    seconds_none: float  # the same where all is
    way: str = "dense"  # what calls of such a size do

    @property
    def best(self) -> str:
        """The fastest of the new ways."""
        return min((way for way in self.seconds if way != "dense"), key=lambda way: self.seconds[way])

    @property
    def possible(self) -> float:
        """Times faster than before, by the best of the new ways."""
        return self.seconds["dense"] / self.seconds[self.best]

    @property
    def measured(self) -> float:
        """Times faster than before, by the way that was chosen."""
        return self.seconds["dense"] / self.seconds[self.way]

    def predicted_by(self, way: str) -> float:
        """Times faster than before, by the density alone: of the library's product without zeros the share that is
        multiplied, of the one of zeros alone the rest."""
        down = self.seconds_none + max(0.0, self.seconds_full - self.seconds_none) * self.density
        return self.seconds["dense"] / (self.seconds_before[way] + down)

    @property
    def predicted(self) -> float:
        """The same of the fastest of the new ways."""
        return self.predicted_by(self.best)


@dataclass
class Layer:
    """The outcome for one Linear that is fed zeros, or could have been."""

    name: str  # of the module that was replaced, or would have been
    kind: str  # "relu2 block", "gated relu block", "Linear", "Conv1D"
    replaced: bool
    reason: str  # why not; "" if replaced
    density: float
    strip_density: float
    sizes: List[Size] = field(default_factory=list)
    difference: float = 0.0  # of the results, as a share of their norm
    seconds_in_model: float = 0.0  # that it took of a run of the model on the sample, before
    training: float = float("nan")  # times faster in a step of training with the sample's rows; NaN: not timed
    trains: bool = True  # by its new way; False: as before


@dataclass
class Comparison:
    """A run of a model before and after its conversion."""

    seconds_before: float
    seconds_after: float
    seconds_predicted: float  # after, by the densities of the replaced layers alone
    seconds_in_layers: Dict[str, float]  # that the replaced layers took before

    @property
    def measured(self) -> float:
        """Times faster than before."""
        return self.seconds_before / self.seconds_after

    @property
    def predicted(self) -> float:
        return self.seconds_before / self.seconds_predicted


@dataclass
class Conversion:
    """The result of convert. Print it for a table; undo() puts everything back."""

    model: nn.Module
    layers: List[Layer]
    profile: Profile
    seconds_before: float  # of the model on the sample
    seconds_after: float
    difference: float  # of the model's outputs before and after, as a share of their norm
    _places: List[Tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list, repr=False)
    _pairs: List[Tuple[Layer, Converted, nn.Module]] = field(default_factory=list, repr=False)
    _predicted: float = 1.0

    @property
    def replaced(self) -> List[Layer]:
        return [layer for layer in self.layers if layer.replaced]

    @property
    def measured(self) -> float:
        """The model on the sample: times faster than before."""
        return self.seconds_before / self.seconds_after

    @property
    def predicted(self) -> float:
        """The same by the densities of the replaced layers alone."""
        return self._predicted

    def compare(self, sample: Sample) -> Comparison:
        """Times the model on another sample before and after, a step of decoding perhaps, and predicts the second from
        the first: each replaced layer's time shrinks as its density says for the nearest number of rows, and all else
        stays. Afterwards the same modules are in place, also where the model cannot be called with the sample."""
        return self._compare(sample)[0]

    def _compare(self, sample: Sample) -> Tuple[Comparison, Any]:
        """That, and the model's result now."""

        def whole(new: bool) -> Callable[[], Any]:
            def run() -> Any:
                self.switch(new)
                return call_model(self.model, sample)

            return run

        device = next((p.device for _, _, old in self._pairs for p in old.parameters()), torch.device("cpu"))
        modes = [(new, new.training) for _, new, _ in self._pairs]
        held = [(parent, name, parent._modules.get(name)) for parent, name, _, _ in self._places]
        self.switch(False)
        try:
            with watching(self.model, {}):  # which sees to the modes of the old ones
                for new, _ in modes:
                    new.training = False
                shares, rows = time_inside(self.model, sample, [old for _, _, old in self._pairs], device)
                seconds = race({"before": whole(False), "after": whole(True)}, device, 0.3)
                output = whole(True)()
        finally:
            for new, mode in modes:
                new.training = mode
            for parent, name, module in held:
                if module is not None:
                    parent._modules[name] = module
        saved, inside = 0.0, [share * seconds["before"] for share in shares]
        for (layer, new, _), taken, count in zip(self._pairs, inside, rows):
            way = new.way_of(count)
            if way != "dense" and count:
                size = min(layer.sizes, key=lambda s: abs(math.log(count / s.rows)))
                saved += taken * (1 - 1 / size.predicted_by(way))
        left = max(seconds["before"] - saved, 1e-3 * seconds["before"])
        names = [layer.name for layer, _, _ in self._pairs]
        return Comparison(seconds["before"], seconds["after"], left, dict(zip(names, inside))), output

    def switch(self, on: bool) -> nn.Module:
        """Puts the old modules in (False) or the new ones (True), the very objects, to compare them. Weights are shared
        and stay as they are now."""
        for parent, name, new, old in self._places:
            if parent._modules.get(name) is (old if on else new):
                parent._modules[name] = new if on else old
        return self.model

    def undo(self) -> nn.Module:
        """Puts the old modules back for good. Undoing twice does nothing."""
        self.switch(False)
        self._places.clear()
        self._pairs.clear()
        return self.model

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            if not layer.sizes:
                density = f"{100 * layer.density:.1f} %" if layer.density == layer.density else ""
                lines.append((layer.name, layer.kind, density, "", "", "", "", layer.reason))
            for i, size in enumerate(layer.sizes):
                lines.append(
                    (
                        layer.name if i == 0 else "",
                        layer.kind if i == 0 else "",
                        f"{100 * layer.density:.1f} %" if i == 0 else "",
                        f"{size.rows}",
                        f"{100 * size.density:.1f} %",
                        f"{size.predicted:.2f}",
                        f"{size.possible:.2f}",
                        (size.way if layer.replaced else layer.reason) if i == 0 or layer.replaced else "",
                    )
                )
        head = ("layer", "kind", "nonzero", "rows", "multiplied", "predicted", "measured", "way, or why not")
        text = [text_table(head, lines)] if lines else []
        done = len(self.replaced)
        text.append(
            f"{done} of {len(self.layers)} layers replaced" if self.layers else "nothing to replace: no Linears"
        )
        if done:
            text[-1] += (
                f"; the model on the sample: {1e3 * self.seconds_before:.2f} -> {1e3 * self.seconds_after:.2f} ms, "
                f"{self.measured:.2f} times faster ({self.predicted:.2f} predicted); "
                f"outputs differ by {self.difference:.1e} of their norm"
            )
            old = sum(not layer.trains for layer in self.replaced)
            if old:
                text[-1] += f"; {old} of them train as before: faster, with dropout, or too large to be timed"
        return "\n".join(text)


def undo(model: nn.Module) -> nn.Module:
    """Puts back all that convert replaced in this model, also in a copy of it or one loaded from a file."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            while isinstance(child, Converted):
                child = module._modules[name] = child.original
    return model


# ---- comparing and timing ----


def _first_tensor(output: Any) -> Optional[Tensor]:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((t for t in map(_first_tensor, values) if t is not None), None)


def difference(got: Optional[Tensor], want: Optional[Tensor]) -> float:
    """|got - want| / |want|; infinite where they cannot be compared."""
    if got is None or want is None or got.shape != want.shape:
        return float("inf")
    a, b = got.detach().double(), want.detach().double()
    norm, off = float(b.norm()), float((a - b).norm())
    if off != off or norm != norm:
        return float("inf")
    return off / norm if norm > 0 else off


# ---- finding blocks ----


@dataclass
class _Found:
    """A candidate: the Linear that is fed zeros, and the block around it if there is one."""

    name: str
    linear: nn.Module
    seen: LayerProfile
    around: List[Tuple[str, nn.Module]]  # modules that may be its block, the innermost first
    parent: Optional[Tuple[str, nn.Module]] = None  # the one that is
    h: Optional[Tensor] = None  # its input, until its block has been tried
    layer: Optional[Layer] = None
    new: Optional[Converted] = None

    @property
    def block(self) -> Optional[nn.Module]:
        return self.parent[1] if self.parent is not None else None


def _probes(x: Tensor) -> List[Tensor]:
    """The sample's rows, and rows far from them: only large values distinguish a ReLU6 from a ReLU."""
    x = x.detach().reshape(-1, x.shape[-1])
    rows = x[:: max(1, x.shape[0] // 16)][:16]
    far = 2 if x.dtype == torch.float16 else 16
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows.shape, generator=generator).to(rows) * rows.float().std().to(rows.dtype)
    scales = (2.0,) if x.dtype == torch.float16 else (16.0, 1e4, 1e6, 1e-4)
    return [rows, -rows * far, *(noise * scale for scale in scales)]


def _magnitudes(x: Tensor, features: int) -> Tensor:
    """Rows of numbers from 1e-6 to 1e6 (float16: 6e4), of both signs, and zero; every column has each of them."""
    top = 4.78 if x.dtype == torch.float16 else 6.0
    sizes = 10.0 ** torch.linspace(-6.0, top, 49, dtype=torch.float64)
    values = torch.cat((sizes, torch.zeros(1, dtype=torch.float64), -sizes))
    places = torch.arange(len(values))[:, None] + torch.arange(features)[None, :]
    return values[places % len(values)].to(x)


def _acts_as(
    parent: nn.Module, x: Tensor, up: nn.Module, down: nn.Module, gate: Optional[nn.Module], activation: int
) -> bool:
    """Whether the block makes act(up), or act(gate) * up, of whatever up and gate give: those give numbers of all sizes
    here, which alone distinguish a ReLU from one that is clipped at 1000 or begins at 1e-4."""
    many = _magnitudes(x, features(down)[0])
    rows = x.detach().reshape(-1, x.shape[-1])[:1].expand(many.shape[0], -1)
    ones = 1 + torch.rand(many.shape, generator=torch.Generator().manual_seed(1)).to(many)
    seen: List[Tensor] = []

    def say(given: Tensor) -> Callable[..., Tensor]:
        return lambda module, args, output: given

    for of_up, of_gate in [(many, many)] if gate is None else [(ones, many), (-ones, many), (many, ones)]:
        h = activate(of_up, activation) if gate is None else activate(of_gate, activation) * of_up
        handles = [
            up.register_forward_hook(say(of_up)),
            down.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        ]
        if gate is not None:
            handles.append(gate.register_forward_hook(say(of_gate)))
        seen.clear()
        try:
            parent.forward(rows)
        finally:
            for handle in handles:
                handle.remove()
        # Squares of small numbers may round to zero in one way of computing and not in another.
        rounding = 4 * torch.finfo(x.dtype).tiny * torch.finfo(x.dtype).eps
        if len(seen) != 1 or seen[0].shape != h.shape:
            return False
        if not torch.isclose(seen[0].double(), h.double(), TOLERANCE[x.dtype], rounding, equal_nan=True).all():
            return False
    return True


def _pattern(x: Tensor, up: nn.Module, down: nn.Module, gate: Optional[nn.Module], activation: int) -> Tensor:
    h = activate(up(x), activation) if gate is None else activate(gate(x), activation) * up(x)
    return down(h)  # type: ignore[no-any-return]


Match = Tuple[str, Optional[str], int]  # names of up and gate, activation


def _match(parent: nn.Module, down: nn.Module, x: Tensor) -> Optional[Match]:
    """The block that `parent` is, or None: found by comparing it with every pattern on every probe."""
    inside = {name: module for name, module in parent.named_modules() if name and is_linear(module)}
    weights = sum(1 for _ in parent.parameters())
    if weights != sum(1 for module in inside.values() for _ in module.parameters()):
        return None  # it does something else, too
    k, n = features(down)
    others = [name for name, module in inside.items() if module is not down]
    if len(others) not in (1, 2) or any(features(inside[name]) != (x.shape[-1], k) for name in others):
        return None
    probes = _probes(x)
    try:
        wants = [parent.forward(probe) for probe in probes]
    except Exception:  # a forward that needs more than rows of x is no block
        return None
    limit = TOLERANCE[x.dtype]
    orders: List[Tuple[str, Optional[str]]]
    orders = [(others[0], None)] if len(others) == 1 else [(u, g) for u, g in itertools.permutations(others)]
    for (up, gate), activation in itertools.product(orders, (RELU, RELU2)):
        parts = (inside[up], down, inside[gate] if gate is not None else None)
        if all(
            isinstance(want, Tensor) and difference(_pattern(probe, *parts, activation), want) <= limit
            for probe, want in zip(probes, wants)
        ) and _acts_as(parent, x, *parts, activation):
            return up, gate, activation
    return None


def _drops_out(block: nn.Module, x: Tensor) -> bool:
    """Whether the block's result is another one in training mode."""
    modes = [(module, module.training) for module in block.modules()]
    rows = _probes(x)[0]
    try:
        want = block.forward(rows)
        block.train()
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            return any(difference(block.forward(rows), want) > TOLERANCE[x.dtype] for _ in range(2))
    finally:
        for module, mode in modes:
            module.training = mode


def _activation_name(parent: nn.Module) -> str:
    """The operations between the Linears, for a reason."""
    quiet = ("Dropout", "Identity", "Linear", "Conv1D", "Norm", "Embedding")
    for child in parent.modules():
        name = type(child).__name__
        if child is not parent and not any(True for _ in child.parameters()) and not any(q in name for q in quiet):
            if not list(child.children()):
                return name
    return "its activation"


def _share(h: Tensor, strip: int) -> float:
    """Nonzero share of h, in strips of that many rows: the share to multiply."""
    seen = LayerProfile("", "", h.shape[-1], 0, strip_rows=strip)
    seen.add(h)
    return seen.strip_density


Way = Callable[[Tensor], Tensor]


def _measure(
    found: _Found, x: Tensor, h: Tensor, ways: Dict[str, Way], before: Dict[str, Way], rows: Sequence[int],
    empty: Emptier,
) -> None:  # fmt: skip
    """Times each way at each number of rows. 'down' and 'dense' of a Linear take h, those of a block x. before: the
    work of ways before the product that skips."""
    layer = found.layer
    assert layer is not None
    strip = found.seen.strip_rows
    for count in sorted({min(r, x.shape[0]) for r in rows if r > 0} or {x.shape[0]}):
        # One row may not be like the others: it is the one with the median number of nonzeros.
        first = int((h != 0).sum(1).float().argsort()[(h.shape[0] - 1) // 2]) if count == 1 else 0
        some, some_h = x[first : first + count].contiguous(), h[first : first + count].contiguous()
        full, none = torch.where(some_h == 0, torch.ones_like(some_h), some_h), torch.zeros_like(some_h)
        parts: Dict[str, Callable[[], Any]] = {f"before {name}": partial(f, some) for name, f in before.items()}
        parts["none"] = partial(product, none, found.linear)
        parts["full"] = partial(product, full, found.linear)
        whole: Dict[str, Callable[[], Any]] = {name: partial(f, some) for name, f in ways.items()}
        known: Dict[str, float] = {}
        if x.device.type == "cuda":
            # The numbers for predictions come first, each alone: a context remembers how dense its input was.
            for name, run in parts.items():
                known.update(race({name: run}, x.device, None, empty))
            known.update(race(whole, x.device, None, empty))
        else:
            # In turns: a CPU's last cache keeps a part of data that is read repeatedly, whatever is read in between.
            known.update(race({**parts, **whole}, x.device, None, empty))
        layer.sizes.append(
            Size(
                count, _share(some_h, min(count, strip)), {name: known[name] for name in ways},
                {name: known.get(f"before {name}", 0.0) for name in ways if name != "dense"},
                known["full"], known["none"],
            )
        )  # fmt: skip


def _can_train(target: nn.Module) -> bool:
    """Whether a step of training can be made here: torch.inference_mode() has none, nor have parameters made in it."""
    of = list(target.parameters())
    if torch.is_inference_mode_enabled() or any(p.is_inference() for p in of):
        return False
    return any(p.requires_grad for p in of)


def _training(target: nn.Module, old: Way, new: Way, x: Tensor) -> float:
    """How many times faster a forward and a backward pass are by the new way; NaN where memory runs out."""
    try:
        return _time_steps(target, old, new, x)
    except RuntimeError as e:
        # An operator of the library says so in the text: other exceptions do not pass torch's C interface.
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e) or "allocate memory" in str(e):
            return float("nan")
        raise


def _time_steps(target: nn.Module, old: Way, new: Way, x: Tensor) -> float:
    x = x.clone() if x.is_inference() else x.detach()  # what was made in inference mode cannot require a gradient
    given, of = x.requires_grad_(), [p for p in target.parameters() if p.requires_grad]
    dy = torch.ones_like(old(x))

    def step(way: Way) -> Callable[[], Any]:
        def run() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(way(given), [given, *of], dy)

        return run

    seconds = race({"old": step(old), "new": step(new)}, x.device)
    return seconds["old"] / seconds["new"]


def _examine(found: _Found, x: Tensor, h: Tensor, rows: Sequence[int], at_least: float, empty: Emptier) -> None:
    """Makes the replacement, compares and times it."""
    block = found.block
    target = found.linear if block is None else block
    layer = found.layer
    assert layer is not None
    x, h = x.detach().reshape(-1, x.shape[-1]), h.detach().reshape(-1, h.shape[-1])
    count = x.shape[0]
    match = _match(block, found.linear, x) if block is not None else None
    made: Converted
    if block is not None:
        assert match is not None
        up, gate, activation = match
        layer.kind = f"{'gated ' if gate else ''}{'relu' if activation == RELU else 'relu2'} block"
        down = next(name for name, module in block.named_modules() if module is found.linear)
        kind = ConvertedSequential if isinstance(block, nn.Sequential) else ConvertedBlock
        made = kind(block, up, down, gate, activation, [(count, "fused")], not _drops_out(block, x))
        ways = ["dense", "down", "fused"]
    else:
        made = ConvertedLinear(found.linear, [(count, "down")])
        ways = ["dense", "down"]
    made.training = False

    def by(way: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            if way == "dense":
                y: Tensor = target.forward(x)
                return y
            if isinstance(made, ConvertedBlock):
                return product(made.hidden(x, way), found.linear)
            return product(x, found.linear)

        return run

    runs = {way: by(way) for way in ways}
    limit = TOLERANCE[x.dtype]
    some = x[:256]
    want = target.forward(some)
    for way in ways:
        layer.difference = max(layer.difference, difference(runs[way](some), want))
    if not layer.difference <= limit:
        layer.reason = f"its result would differ by {layer.difference:.1e} of its norm"
        return
    before: Dict[str, Way] = {}
    if isinstance(made, ConvertedBlock):
        before = {way: partial(made.hidden, way=way) for way in ways if way != "dense"}
    _measure(found, x if block is not None else h, h, runs, before, rows or (1, count), empty)
    for size in layer.sizes:
        size.way = size.best if size.possible >= at_least else "dense"
    if all(size.way == "dense" for size in layer.sizes):
        best = max(layer.sizes, key=lambda size: size.possible)
        layer.reason = f"not faster: {best.possible:.2f} times at {best.rows} rows"
        return
    made.set_ways([(size.rows, size.way) for size in layer.sizes])
    if made.trains and made.way(x) != "dense" and _can_train(target):
        layer.training = _training(target, runs["dense"], runs[made.way(x)], x)
        made.trains = layer.training >= at_least  # not where it is NaN
    layer.trains = made.trains
    found.new = made
    layer.replaced = True


def _below(module: nn.Module) -> List[nn.Module]:
    return [m for m in module.modules() if m is not module]


def _places(model: nn.Module, old: nn.Module) -> List[Tuple[nn.Module, str]]:
    """All places in the model where this module is a child."""
    return [(m, name) for m in model.modules() for name, child in m._modules.items() if child is old]


def _candidates(model: nn.Module, seen: Profile, most: float, dense: bool) -> Tuple[List[_Found], List[Layer]]:
    """The Linears that are fed zeros (dense: and all others), and, as layers that stay, those that could have been."""
    modules = dict(model.named_modules())
    found: List[_Found] = []
    others: List[Layer] = []
    for entry in seen.layers:
        linear = modules[entry.name]
        above = entry.name.split(".")[:-1]
        around = [(".".join(above[:i]), modules[".".join(above[:i])]) for i in range(len(above), 0, -1)]
        parent = around[0][1] if around else model
        stays = Layer(entry.name, entry.kind, False, "", entry.density, entry.strip_density)
        if not entry.rows or entry.nan:
            stays.reason = "its input on the sample has NaNs" if entry.nan else "its input on the sample has no rows"
            others.append(stays)
        elif entry.density <= most:
            if linear.weight.dtype not in DTYPES:
                stays.reason = f"its weight is {linear.weight.dtype}: it must be float32, bfloat16 or float16"
                others.append(stays)
            elif hooked(linear):
                stays.reason = f"it has {hooked(linear)}, which a product by the library would leave out"
                others.append(stays)
            else:
                found.append(_Found(entry.name, linear, entry, around, layer=stays))
        elif dense and linear.weight.dtype in DTYPES and not hooked(linear):
            found.append(_Found(entry.name, linear, entry, [], layer=stays))
        elif entry.in_features > entry.out_features and any(
            is_linear(other)
            and features(other)[0] < features(other)[1]
            and features(other)[1] in (entry.in_features, 2 * entry.in_features)
            for other in parent.modules()
        ):
            # A projection down, beside one up: the second half of a feed-forward block.
            name = _activation_name(parent)
            zeros = "makes no zeros" if entry.density > 0.99 else f"makes too few zeros for max_density = {most:g}"
            stays.reason = f"{name} {zeros}"
            others.append(stays)
    for name in seen.uncalled:  # or called with operands that the library does not take
        dtype = parameter(modules[name], "weight").dtype
        if dtype not in DTYPES:
            why = f"its weight is {dtype}: it must be float32, bfloat16 or float16"
            others.append(Layer(name, "Linear", False, why, float("nan"), float("nan")))
    return found, others


def convert(
    model: nn.Module,
    sample: Sample,
    *,
    rows: Optional[Sequence[int]] = None,
    max_density: float = 0.9,
    min_speedup: float = 1.03,
    dense: bool = False,
) -> Conversion:
    """Replaces the feed-forward blocks, and single Linears, whose input has zeros worth skipping; in place.

    sample       the model's arguments: a tensor, a tuple of positional or a dict of named arguments. It should resemble
                 real inputs, as densities and times are measured on it
    rows         the numbers of rows (tokens of a call) to time the ways for; by default 1, as in decoding, and the
                 sample's. A call then goes the way that was fastest for the nearest number
    max_density  a layer whose input has more nonzeros than this stays
    min_speedup  a layer that is not this many times faster at any of these numbers of rows stays; 0 replaces all that
                 can be
    dense        also Linears whose input has no zeros, if the library is faster, as it may be in decoding on a GPU.
                 Their prepared weights take their memory again

    Results stay the same within rounding. So do the names in the state_dict, and the parameters themselves: the model
    can be trained, saved and loaded as before. A weight is prepared when it is first used, so a replaced layer
    takes about twice the memory it did.

    If parameters of a module require gradients, a training step (a forward and a backward pass with the sample's rows)
    is timed too. It decides for any number of rows whether the module trains by its new way. For training batches of
    another size give a sample of that size. Where memory runs out the module trains as before. Under
    torch.inference_mode() no training step is timed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: it has to be an nn.Module")
    if rows is not None and (not rows or any(r < 1 for r in rows)):
        raise ValueError(f"rows is {rows}: it needs numbers from 1 on")
    if any(isinstance(module, Converted) for module in model.modules()):
        raise ValueError("the model has been converted already: undo that first, with esmm.torch.undo(model)")
    seen = profile(model, sample)
    found, others = _candidates(model, seen, max_density, dense)
    order = {name: i for i, name in enumerate([*(entry.name for entry in seen.layers), *seen.uncalled])}

    empties: Dict[torch.device, Emptier] = {}

    def empty(device: torch.device) -> Emptier:
        if device not in empties:
            empties[device] = emptier(model, device)
        return empties[device]

    busy = [False]
    hooks: Dict[nn.Module, Callable[..., Any]] = {}
    done: Set[int] = set()

    def guarded(work: Callable[..., None]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
            if not busy[0]:  # the measurements call modules, too
                busy[0] = True
                try:
                    work(args, kwargs, output)
                finally:
                    busy[0] = False

        return hook

    def at_linear(f: _Found) -> Callable[..., None]:
        def work(args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if f.layer is not None and id(f) not in done and x.numel():
                h = x.detach()
                if f.block is None:
                    done.add(id(f))
                    _examine(f, h, h, rows or (), min_speedup, empty(h.device))
                else:
                    f.h = h

        return work

    def at_block(f: _Found) -> Callable[..., None]:
        def work(args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
            if f.h is not None and id(f) not in done:
                done.add(id(f))
                _examine(f, args[0], f.h, rows or (), min_speedup, empty(f.h.device))
                f.h = None

        return work

    # First find the blocks, then, in another run, time each replacement. The outermost module is not
    # tried: it cannot be replaced in itself.
    def look(module: nn.Module, inside: List[_Found]) -> Callable[..., None]:
        def work(args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
            alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            if not alone or not args[0].numel():
                return
            for f in inside:
                if f.parent is None and args[0].dtype == f.linear.weight.dtype and _match(module, f.linear, args[0]):
                    f.parent = next(pair for pair in f.around if pair[1] is module)

        return work

    around: Dict[nn.Module, List[_Found]] = {}
    for f in found:
        for _, module in f.around:
            if sum(1 for m in module.modules() if is_linear(m)) > 3:
                break
            if not module._forward_hooks and not module._forward_pre_hooks and not any(map(hooked, _below(module))):
                around.setdefault(module, []).append(f)
    with watching(model, {module: guarded(look(module, inside)) for module, inside in around.items()}):
        before = _first_tensor(call_model(model, sample))
    inside = {module for f in found if f.parent is not None for module in f.parent[1].modules()}
    found = [f for f in found if f.parent is not None or f.linear not in inside]
    for f in found:
        hooks[f.linear] = guarded(at_linear(f))
        if f.parent is not None:
            hooks[f.parent[1]] = guarded(at_block(f))
            assert f.layer is not None
            f.layer.name = f.parent[0]
    with watching(model, hooks):
        call_model(model, sample)
    result = Conversion(model, [], seen, 0.0, 0.0, 0.0)
    result.layers = sorted(
        [*others, *(f.layer for f in found if f.layer is not None)],
        key=lambda layer: min(
            i for name, i in order.items() if name == layer.name or name.startswith(layer.name + ".")
        ),
    )
    if not any(f.new is not None for f in found):
        return result

    for f in found:
        if f.new is not None:
            old = f.block if f.block is not None else f.linear
            f.new.training = old.training
            result._places += [(parent, name, f.new, old) for parent, name in _places(model, old)]
            assert f.layer is not None
            result._pairs.append((f.layer, f.new, old))
    compared, after = result._compare(sample)
    result.switch(True)
    for layer in result.replaced:
        layer.seconds_in_model = compared.seconds_in_layers[layer.name]
    result.seconds_before, result.seconds_after = compared.seconds_before, compared.seconds_after
    result._predicted = compared.predicted
    result.difference = difference(_first_tensor(after), before)
    return result
