"""esmm.torch.convert and profile: what they find in models of many kinds, that results stay, that it can be undone."""

from __future__ import annotations

import copy
import io
import time

import pytest

from need_torch import torch

import torch.nn.functional as F
from torch import nn

import esmm.torch
from esmm.torch import _convert, _timing
from esmm.torch._blocks import ConvertedBlock, ConvertedLinear


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Times do not matter here: a short look is enough, and everything that can be replaced is."""
    monkeypatch.setattr(_timing, "BUDGET", 0.002)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of torch wait for each other on a busy machine
    yield
    torch.set_num_threads(threads)


def outputs(model, sample):
    with torch.no_grad():
        return _convert._first_tensor(_convert.call_model(model, sample))


def children(model):
    return [(name, id(module)) for name, module in model.named_modules()]


def check(model, sample, kinds, tolerance=1e-5):
    """Converts, compares, and undoes; kinds: {name: kind} of what has to be replaced."""
    model.eval()
    want, keys, before = outputs(model, sample), list(model.state_dict()), children(model)
    done = esmm.torch.convert(model, sample, min_speedup=0)
    assert {layer.name: layer.kind for layer in done.replaced} == kinds, str(done)
    assert len(done.layers) == len(kinds), str(done)
    assert _convert.difference(outputs(model, sample), want) < tolerance
    assert done.difference < tolerance
    assert list(model.state_dict()) == keys
    for layer in done.replaced:
        assert isinstance(model.get_submodule(layer.name), ConvertedBlock if "block" in layer.kind else ConvertedLinear)
        assert layer.sizes and all(size.way != "dense" and 0 < size.predicted < 1e6 for size in layer.sizes)
        assert layer.name in str(done)
    # What is loaded now reaches the layers; what is saved now can be loaded by a model that was never converted.
    other = {key: value + 0.01 for key, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict(other, strict=False)
    moved = outputs(model, sample)
    assert _convert.difference(moved, want) > 10 * tolerance
    new = children(model)
    assert children(done.switch(False)) == before and children(done.switch(True)) == new
    done.undo()
    assert children(model) == before and children(done.switch(True)) == before
    assert _convert.difference(outputs(model, sample), moved) < tolerance
    return done


# ---- models of transformers ----


def language_model(kind, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = getattr(transformers, kind + "Config")(**{**sizes, **options})
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, kind + head)(config), torch.randint(0, 64, (2, 9))


@pytest.mark.parametrize("kind, activation", [("Llama", "relu"), ("Mistral", "relu2"), ("Llama", "relu2")])
def test_gated_decoders(kind, activation):
    model, ids = language_model(kind, hidden_act=activation, num_key_value_heads=2)
    check(model, ids, {f"model.layers.{i}.mlp": f"gated {activation} block" for i in range(2)})


def test_gpt2_with_its_conv1d():
    model, ids = language_model("GPT2", n_embd=32, n_inner=80, n_layer=2, n_head=4, activation_function="relu")
    check(model, ids, {f"transformer.h.{i}.mlp": "relu block" for i in range(2)})


def test_opt_whose_linears_lie_in_the_decoder_layer():
    model, ids = language_model("OPT", ffn_dim=80, word_embed_proj_dim=32, max_position_embeddings=32)
    check(model, ids, {f"model.decoder.layers.{i}.fc2": "Linear" for i in range(2)})


def test_nemotron():
    model, ids = language_model("Nemotron", hidden_act="relu2", num_key_value_heads=4)
    check(model, ids, {f"model.layers.{i}.mlp": "relu2 block" for i in range(2)})


def test_nemotron_h():
    model, ids = language_model(
        "NemotronH", hybrid_override_pattern="*-*-", num_hidden_layers=4, head_dim=8, num_key_value_heads=2,
        mamba_num_heads=4, mamba_head_dim=8, n_groups=1, ssm_state_size=8,
    )  # fmt: skip
    names = [name for name, module in model.named_modules() if type(module).__name__ == "NemotronHMLP"]
    assert names
    check(model, ids, {name: "relu2 block" for name in names})


def test_t5_relu_and_gated_gelu():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(d_model=32, d_kv=8, d_ff=80, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    ids = torch.randint(1, 64, (2, 9))
    sample = {"input_ids": ids, "decoder_input_ids": ids}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    names = [n for n, module in model.named_modules() if type(module).__name__ == "T5DenseActDense"]
    assert len(names) == 4
    check(model, sample, {name: "relu block" for name in names})
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
    nothing_replaced(model.eval(), sample, 4, "NewGELUActivation makes no zeros")


def test_vit():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=16, patch_size=4,
        hidden_act="relu",
    )  # fmt: skip
    model = transformers.ViTModel(config)
    done = esmm.torch.convert(model.eval(), torch.randn(2, 3, 16, 16), min_speedup=0)
    assert len(done.replaced) == 2 and done.difference < 1e-5, str(done)


def nothing_replaced(model, sample, layers, reason):
    before = children(model)
    done = esmm.torch.convert(model, sample, min_speedup=0)
    assert not done.replaced and children(model) == before
    assert [layer.reason for layer in done.layers] == [reason] * layers, str(done)
    assert reason in str(done) and f"0 of {layers} layers replaced" in str(done)


def test_gelu_models_stay_and_the_table_says_why():
    model, ids = language_model("GPT2", n_embd=32, n_inner=80, n_layer=2, n_head=4)
    nothing_replaced(model.eval(), ids, 2, "NewGELUActivation makes no zeros")
    model, ids = language_model("Llama")
    nothing_replaced(model.eval(), ids, 2, "SiLUActivation makes no zeros")


# ---- models of one's own ----


class Functional(nn.Module):
    """No activation module, odd names, a nested list: only its results show what it is."""

    def __init__(self, d=24, hidden=72, dropout=0.0, act=lambda v: F.relu(v).square()):
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(hidden, d), nn.Linear(d, hidden)])
        self.p = dropout
        self.act = act

    def forward(self, z):
        return F.dropout(self.w[0](self.act(self.w[1](z))), self.p, self.training)


class Wrapped(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.block = block

    def forward(self, x):
        return x + self.block(self.norm(x))


X = torch.randn(3, 10, 24, generator=torch.Generator().manual_seed(4))


def test_blocks_are_found_by_what_they_compute():
    check(Wrapped(Functional()), X, {"block": "relu2 block"})
    check(Wrapped(nn.Sequential(nn.Linear(24, 72), nn.ReLU(inplace=True), nn.Linear(72, 24, bias=False))), X,
          {"block": "relu block"})  # fmt: skip


@pytest.mark.parametrize(
    "act", [F.relu6, lambda v: F.relu(v - 0.1), lambda v: F.relu(v) ** 3, lambda v: F.relu(v.sin())]
)
def test_an_activation_that_only_resembles_relu_is_not_fused(act):
    block = Functional(act=act)
    if act is F.relu6:  # on the sample it is a ReLU
        assert float(block.w[1](X).detach().max()) < 6
    done = check(Wrapped(block), X, {"block.w.0": "Linear"})
    assert done.layers[0].density < 0.9


def test_rows_that_see_each_other_are_no_block():
    class Mixing(Functional):
        def forward(self, z):
            return super().forward(z) + 0.01 * z.mean(-2, keepdim=True).sum(-1, keepdim=True)

    check(Wrapped(Mixing()), X, {"block.w.0": "Linear"})


def test_the_outermost_module_stays_itself():
    check(nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 24)), X, {"2": "Linear"})


def test_a_block_in_two_places_is_replaced_in_both():
    block = Functional()
    model = nn.ModuleDict({"a": Wrapped(block), "b": Wrapped(block)})
    model.forward = lambda x: model["b"](model["a"](x))
    done = esmm.torch.convert(model, X, min_speedup=0)
    assert model["a"].block is model["b"].block and type(model["a"].block) is ConvertedBlock
    assert len(done.replaced) == 1
    done.undo()
    assert model["a"].block is block and model["b"].block is block


def test_linears_that_are_not_plain_stay():
    class Mine(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(24, 72), nn.ReLU(), Mine(72, 24))
    done = esmm.torch.convert(model, X, min_speedup=0)
    assert not done.replaced and type(model[2]) is Mine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, x = Wrapped(Functional()).to(dtype).eval(), X.to(dtype)
    want = outputs(model.double(), x.double())
    model.to(dtype)
    off = _convert.difference(outputs(model, x), want)
    done = esmm.torch.convert(model, x, min_speedup=0)
    assert len(done.replaced) == 1, str(done)
    assert _convert.difference(outputs(model, x), want) < 2 * off


def test_double_precision_stays():
    done = esmm.torch.convert(Wrapped(Functional()).double(), X.double(), min_speedup=0)
    assert not done.replaced


def test_gradients_and_training():
    for model in (Wrapped(Functional()), Wrapped(nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 24)))):
        esmm_model = copy.deepcopy(model)
        esmm.torch.convert(esmm_model, X, min_speedup=0)
        for m in (model, esmm_model):
            m.train()
            (m(X) ** 2).mean().backward()
        for (name, want), got in zip(model.named_parameters(), esmm_model.parameters()):
            assert _convert.difference(got.grad, want.grad) < 1e-5, name
        steps = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, esmm_model)]
        for step in steps:
            step.step()
        assert _convert.difference(outputs(esmm_model, X), outputs(model, X)) < 1e-5  # the new weights are used


def test_dropout_still_drops_in_training():
    model = Wrapped(Functional(dropout=0.5))
    esmm.torch.convert(model, X, min_speedup=0)
    assert not model.block.trains
    model.train()
    assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))
    model.train()
    assert model.block.original.training and model.training


def test_what_is_slower_in_training_trains_as_before(monkeypatch):
    slow = iter(range(10))
    monkeypatch.setattr(_convert, "_training", lambda *_: 0.5 if next(slow) % 2 == 0 else 2.0)
    faster = {"dense": 2.0, "down": 1.0, "fused": 1.5}
    monkeypatch.setattr(_convert, "race", lambda ways, *_: {name: faster.get(name, 1.0) for name in ways})
    for trains in (False, True):
        model = Wrapped(Functional())
        done = esmm.torch.convert(model, X)
        layer = done.replaced[0]
        assert model.block.trains is layer.trains is trains and layer.training == (2.0 if trains else 0.5)
        assert ("train as before" in str(done)) is not trains
        monkeypatch.setattr(model.block.original, "forward", lambda x: pytest.fail("the old way"))
        model.train()
        if trains:
            model(X)
        else:
            with pytest.raises(pytest.fail.Exception):
                model(X)
        model.eval()
        model(X)  # by its own way


def test_inference_mode_has_no_training_to_time():
    """Nor has a sample made in it to be fed to the steps as it is."""
    with torch.inference_mode():
        x, model = torch.randn(30, 24), Wrapped(Functional())
        assert esmm.torch.convert(model, x, min_speedup=0).replaced
    model = Wrapped(Functional())
    with torch.inference_mode():
        (layer,) = esmm.torch.convert(model, x, min_speedup=0).replaced
    assert layer.training != layer.training and layer.trains
    (layer,) = esmm.torch.convert(esmm.torch.undo(model), x, min_speedup=0).replaced
    assert layer.training > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("esmm: CUDA out of memory. Tried to")])
def test_steps_that_memory_runs_out_in_are_left_out(error, monkeypatch):
    def no_memory(*_):
        raise error

    monkeypatch.setattr(_convert, "_time_steps", no_memory)
    (layer,) = esmm.torch.convert(Wrapped(Functional()), X, min_speedup=0).replaced
    assert layer.training != layer.training and not layer.trains
    error = RuntimeError("another one")
    with pytest.raises(RuntimeError, match="another one"):
        esmm.torch.convert(Wrapped(Functional()), X, min_speedup=0)


@pytest.mark.parametrize("on", (True, False))
def test_a_comparison_leaves_those_modules_in_that_were(on):
    model = Wrapped(Functional()).train()
    done = esmm.torch.convert(model, X, min_speedup=0)
    held = children(done.switch(on))
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError):
        done.compare(torch.randn(3, 5))
    assert children(model) == held and [module.training for module in model.modules()] == modes
    assert done.compare(X[:2]).seconds_after > 0
    assert children(model) == held and [module.training for module in model.modules()] == modes


def test_modules_inside_a_run_are_timed_whatever_they_are_called_with():
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(24, 24), 0

        def forward(self, x):
            self.calls += 1
            time.sleep(0.2)
            return self.linear(input=x)

    model = Slow()
    (share,), rows = _timing.time_inside(model, X[0, :5], [model.linear], torch.device("cpu"))
    assert 0 < share < 0.5 and rows == [5]
    assert model.calls == 3  # not longer than it takes


def test_pauses_of_a_busy_machine_are_in_no_share():
    """Every other run is held up inside the module, for ten times as long as the run takes."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(24, 24), 0
            self.linear.register_forward_hook(lambda *_: time.sleep(0.005))

        def forward(self, x):
            self.calls += 1
            if self.calls % 2:
                self.linear.register_forward_pre_hook(self.hold)
            time.sleep(0.005)
            return self.linear(x)

        def hold(self, module, args):
            module._forward_pre_hooks.popitem()
            time.sleep(0.05)

    model = Held()
    (share,), _ = _timing.time_inside(model, X[0, :5], [model.linear], torch.device("cpu"))
    assert 0.25 < share < 0.75  # a half; over all runs more than 0.8


def test_the_prediction_is_made_of_densities_and_shares(monkeypatch):
    """A model takes 10 s, its block 6 of them; with half of h zero the second product takes half of 2 s."""
    model = Wrapped(Functional()).requires_grad_(False)
    seconds = {"dense": 4.0, "down": 2.5, "fused": 9.0, "full": 2.0, "none": 0.0, "before": 10.0, "after": 6.0}
    seconds.update({"before down": 1.0, "before fused": 8.0})
    parts = []

    def race(ways, *_):
        parts.append(set(ways))
        return {name: seconds[name] for name in ways}

    monkeypatch.setattr(_convert, "race", race)
    monkeypatch.setattr(_convert, "time_inside", lambda model, sample, modules, device: ([0.6], [30]))
    done = esmm.torch.convert(model, X, rows=[30])
    (layer,) = done.replaced
    (size,) = layer.sizes
    # In turns, all of them: what is read over and over by itself stays in a CPU's cache, whatever is done to empty it.
    assert size.way == "down" and parts[0] == {"before down", "before fused", "none", "full", "dense", "down", "fused"}
    block = 4.0 / (1.0 + 2.0 * size.density)
    assert abs(size.predicted - block) < 1e-9
    assert abs(done.predicted - 10 / (10 - 6 * (1 - 1 / block))) < 1e-9 and done.measured == 10 / 6
    again = done.compare(X[:1])
    assert again.predicted == done.predicted and again.seconds_in_layers == {"block": 6.0}
    assert isinstance(model.block, _convert.Converted)


def test_a_model_that_is_larger_than_the_cache_is_timed_with_it_emptied(monkeypatch):
    model = nn.Linear(100, 100)
    assert _timing.emptier(model, torch.device("cpu")) is None
    monkeypatch.setattr(_timing, "cache_bytes", lambda device: 1000)
    assert _timing.emptier(model, torch.device("cpu"))().item() == 500
    calls = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    taken = _timing.race(ways, torch.device("cpu"), 0.0, lambda: calls.append("-"))
    assert set(taken) == {"a", "b"} and "".join(calls).endswith("-a-b-a-b")


def test_a_linear_is_called_as_before():
    """With its input by place or by name; what the old one refuses, the new one refuses."""
    model = Wrapped(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Dropout(0.0), nn.Linear(48, 24)))
    linear = model.block[3]
    new = ConvertedLinear(linear, [(1, "down")])
    h = torch.relu(torch.randn(5, 48))
    for made in (new(h), new(input=h)):
        torch.testing.assert_close(made, linear(h))
    for args, kwargs in ((), {}), ((h,), {"x": h}), ((), {"x": h}), ((), {"input": h, "x": h}):
        with pytest.raises(TypeError, match="argument"):
            new(*args, **kwargs)


def test_linears_without_zeros_on_request():
    model = Wrapped(Functional())
    model.more = nn.Linear(24, 24)
    model.forward = lambda x: model.more(x + model.block(model.norm(x)))
    want = outputs(model, X)
    assert [layer.name for layer in esmm.torch.convert(model, X, min_speedup=0).layers] == ["block"]
    esmm.torch.undo(model)
    done = esmm.torch.convert(model, X, min_speedup=0, dense=True)
    assert sorted(layer.name for layer in done.replaced) == ["block", "more"]  # not the Linears of the block
    assert _convert.difference(outputs(model, X), want) < 1e-5


def test_conversion_leaves_the_modes_alone():
    model = Wrapped(Functional()).train()
    model.norm.eval()
    done = esmm.torch.convert(model, X, min_speedup=0)
    assert model.training and model.block.training and not model.norm.training
    assert not any(module._forward_hooks for module in model.modules())
    done.undo()
    assert model.block.training


def test_copies_pickles_and_undo_without_the_report():
    model = Wrapped(Functional(act=F.relu))
    esmm.torch.convert(model, X, min_speedup=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.block) is ConvertedBlock
        assert torch.equal(outputs(other, X), outputs(model, X))
        assert other.block.original.w[0] is other.block.w[0]  # still one set of weights
        with torch.no_grad():
            other.block.w[0].weight.zero_()
        assert not torch.equal(outputs(other, X), outputs(model, X))
        esmm.torch.undo(other)
        assert type(other.block) is Functional and not any("Converted" in type(m).__name__ for m in other.modules())


def test_moving_and_exchanging_children():
    model = Wrapped(Functional())
    esmm.torch.convert(model, X, min_speedup=0)
    want = outputs(model, X)
    assert _convert.difference(outputs(model.to(torch.bfloat16), X.bfloat16()), want) < 2e-2
    model.to(torch.float32)

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    plain = esmm.torch.undo(copy.deepcopy(model))
    for m in (model, plain):
        m.block.w[0] = Adapter(m.block.w[0])
    assert _convert.difference(outputs(model, X), outputs(plain, X)) < 1e-6


def test_the_way_depends_on_the_number_of_rows():
    block = ConvertedBlock(Functional(), "w.1", "w.0", None, 2, [(1, "fused"), (16, "down"), (256, "dense")], True)
    ways = {rows: block.way(torch.zeros(rows, 24)) for rows in (1, 3, 4, 5, 16, 63, 65, 10000)}
    assert ways == {1: "fused", 3: "fused", 4: "fused", 5: "down", 16: "down", 63: "down", 65: "dense", 10000: "dense"}
    want = block.original(X)
    for rows in ([(1, "fused")], [(1, "down")], [(1, "dense")]):
        block.set_ways(rows)
        assert _convert.difference(block(X), want) < 1e-5


def test_what_is_not_faster_stays():
    model = Wrapped(Functional())
    done = esmm.torch.convert(model, X, min_speedup=1e9)
    assert not done.replaced and type(model.block) is Functional
    assert done.layers[0].reason.startswith("not faster: ") and "not faster" in str(done)


def test_rows_are_those_that_were_asked_for():
    done = esmm.torch.convert(Wrapped(Functional()), X, rows=[1, 4, 10**6], min_speedup=0)
    assert [size.rows for size in done.layers[0].sizes] == [1, 4, 30]  # not more than the sample has


def test_compiled_without_breaks():
    model = Wrapped(Functional()).eval()
    want = outputs(model, X)
    esmm.torch.convert(model, X, min_speedup=0)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert _convert.difference(compiled(X), want) < 1e-5


def test_errors():
    model = Wrapped(Functional())
    with pytest.raises(TypeError, match="nn.Module"):
        esmm.torch.convert(X, X)
    with pytest.raises(ValueError, match="rows is"):
        esmm.torch.convert(model, X, rows=[0])
    esmm.torch.convert(model, X, min_speedup=0)
    with pytest.raises(ValueError, match="converted already"):
        esmm.torch.convert(model, X)
    assert "no Linears" in str(esmm.torch.convert(nn.ReLU(), X))


# ---- profile ----


def test_profile_counts_and_touches_nothing():
    model = Wrapped(Functional())
    model.train()
    before, state = children(model), copy.deepcopy(model.state_dict())
    seen = esmm.torch.profile(model, X)
    h = F.relu(model.block.w[1](model.norm(X))).reshape(-1, 72)
    layer = seen["block.w.0"]
    assert layer.density == pytest.approx(float((h != 0).float().mean()))
    strips = torch.stack([(h[i : i + 8] != 0).any(0) for i in range(0, 30, 8)])
    assert layer.strip_density == pytest.approx(float(strips.float().mean()))
    assert layer.dead == pytest.approx(float((h == 0).all(0).float().mean()))
    assert (layer.rows, layer.calls, layer.in_features, layer.out_features) == (30, 1, 72, 24)
    assert [entry.name for entry in seen.layers] == ["block.w.1", "block.w.0"]
    assert [entry.name for entry in seen.sparse] == ["block.w.0"] and seen["block.w.1"].density == 1
    assert "block.w.0" in str(seen) and "1 other Linears have inputs without zeros" in str(seen)
    assert children(model) == before and model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    several = esmm.torch.profile(model, [X, X[:1]])["block.w.0"]
    assert (several.rows, several.calls) == (40, 2)
    with pytest.raises(KeyError):
        seen["nothing"]


# ---- a model that has been trained ----


def test_a_trained_model():
    """A ReLU2 net fits a function; its hidden layer has become sparse, and conversion keeps its loss."""
    torch.manual_seed(1)
    model = Wrapped(Functional(hidden=192))
    x = torch.randn(512, 24)
    target = torch.sin(3 * x) * x.roll(1, 1)
    step = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(200):
        step.zero_grad()
        h = F.relu(model.block.w[1](model.norm(x)))
        loss = F.mse_loss(model(x), target)
        (loss + 0.02 * h.mean()).backward()
        step.step()
    done = esmm.torch.convert(model, x, min_speedup=0)
    assert done.replaced[0].density < 0.5
    with torch.no_grad():
        after = F.mse_loss(model(x), target)
        before = F.mse_loss(done.undo()(x), target)
    assert float(after) == pytest.approx(float(before), rel=1e-4)


# ---- what is nearly a ReLU, and what a replacement would lose ----


class Feed(nn.Module):
    """up, an activation, down; gated if asked."""

    def __init__(self, act, gated=False, bias=True):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(24, 64, bias), nn.Linear(64, 24, bias), act
        self.gate = nn.Linear(24, 64, bias) if gated else None

    def forward(self, x):
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)) * self.up(x))


NEARLY = {
    "clipped at 100": lambda v: torch.relu(v).clamp(max=100),
    "clipped at 1000": lambda v: torch.relu(v).clamp(max=1000),
    "clipped at 3e5": lambda v: torch.relu(v).clamp(max=3e5),
    "from 1e-4": lambda v: F.threshold(v, 1e-4, 0.0),
    "leaking far out": lambda v: torch.where(v < -1e5, v, torch.relu(v)),
    "clipped squares": lambda v: torch.relu(v).square().clamp(max=1e6),
}


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_a_relu_is_not_taken_for_one(name, gated):
    model, x = nn.Sequential(Feed(NEARLY[name], gated)), torch.randn(40, 24)
    done = esmm.torch.convert(model, x, min_speedup=0)
    assert [(layer.name, layer.kind) for layer in done.replaced] == [("0.down", "Linear")], str(done)
    with torch.no_grad():
        want = done.switch(False)(1e7 * x)
        assert _convert.difference(done.switch(True)(1e7 * x), want) < 1e-5


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("kind", ("relu", "relu2"))
def test_relus_of_every_dtype_are_found(kind, gated, dtype):
    act = torch.relu if kind == "relu" else lambda v: torch.relu(v).pow(2)
    done = esmm.torch.convert(nn.Sequential(Feed(act, gated)).to(dtype), torch.randn(40, 24).to(dtype), min_speedup=0)
    assert [layer.kind for layer in done.replaced] == [f"{'gated ' if gated else ''}{kind} block"], str(done)


@pytest.mark.parametrize("where, replaced", [("up", ["0.down"]), ("act", ["0.down"]), ("down", [])])
def test_hooks_go_on_being_called(where, replaced):
    model, x, calls = nn.Sequential(Feed(nn.ReLU())), torch.randn(40, 24), []
    model.get_submodule("0." + where).register_forward_hook(lambda *_: calls.append(1))
    done = esmm.torch.convert(model, x, min_speedup=0)
    assert [layer.name for layer in done.replaced] == replaced
    assert replaced or "forward hooks" in str(done)
    calls.clear()
    model(x)
    assert len(calls) == 1


def test_hooks_that_come_later_are_called():
    model, x, calls = nn.Sequential(Feed(nn.ReLU())), torch.randn(40, 24), []
    assert esmm.torch.convert(model, x, min_speedup=0).replaced[0].kind == "relu block"
    model[0].up.register_forward_hook(lambda *_: calls.append(1))
    model(x)
    assert len(calls) == 1


def test_second_derivatives_of_a_converted_model():
    model, x = nn.Sequential(Feed(nn.ReLU())), torch.randn(40, 24, requires_grad=True)
    done = esmm.torch.convert(model, x.detach(), min_speedup=0)
    got = []
    for on in (False, True):
        done.switch(on)
        (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        got += torch.autograd.grad(g.pow(2).sum(), x)
    assert got[0].norm() > 0 and _convert.difference(got[1], got[0]) < 1e-5


def test_the_table_says_why_nothing_was_looked_at():
    x = torch.randn(40, 24)
    for model, sample, reason in (
        (Feed(nn.ReLU()).double(), x.double(), "its weight is torch.float64"),
        (Feed(nn.ReLU()), x[:0], "its input on the sample has no rows"),
        (Feed(nn.ReLU()), x * float("nan"), "its input on the sample has NaNs"),
    ):
        done = esmm.torch.convert(nn.Sequential(model), sample, min_speedup=0)
        assert not done.replaced and [layer.reason[: len(reason)] for layer in done.layers] == [reason] * 2
        assert reason in str(done) and "makes no zeros" not in str(done)


def test_a_sequential_stays_one():
    block = nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 24))
    model, x = nn.Sequential(block, nn.Identity()).eval(), torch.randn(40, 24)
    keys, parts = list(model.state_dict()), list(block)
    done = esmm.torch.convert(model, x, min_speedup=0)
    new = model[0]
    assert new is not block and isinstance(new, nn.Sequential) and len(new) == 3 and bool(new)
    assert new[0] is parts[0] and new[-1] is parts[2] and list(new) == parts and new[2] in new
    assert type(new[:2]) is nn.Sequential and list(new[:2]) == parts[:2]
    assert list(model.state_dict()) == keys
    assert esmm.torch.undo(copy.deepcopy(model))[0][2].weight.shape == (24, 72)
    # What is exchanged in it counts, though it is not what was converted.
    new[1] = nn.GELU()
    assert torch.equal(model(x), parts[2](F.gelu(parts[0](x))))
    new[1] = parts[1]
    new.append(nn.Tanh())
    assert torch.equal(model(x), torch.tanh(parts[2](F.relu(parts[0](x)))))
    assert type(new.pop(3)) is nn.Tanh and len(block) == 3 and list(block) == parts
    del new[1]
    assert torch.equal(model(x), parts[2](parts[0](x)))
    assert list(model.state_dict()) == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]
    new.insert(1, parts[1])
    assert _convert.difference(model(x), parts[2](F.relu(parts[0](x)))) < 1e-5
    done.undo()
    assert model[0] is block and type(block) is nn.Sequential and list(block) == parts
    assert list(model.state_dict()) == keys
