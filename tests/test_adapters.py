"""--train_only: frozen weights do not change, an adapter is small and needs its base, LoRA merges into the weights."""
import math
import shutil

import bounds
import numpy as np
import pytest
import torch
from bounds import below, close, same
from conftest import (assert_close_runs, assert_same_run, by_default, contents, meta, run, tiny_config, train_here,
                      weights)
from layers import normal

import attention
import train as train_script
from common import files
from common.adapters import add_lora, freeze_all_but, frozen, merged, num_trained
from common.runs import Run, read_weights
from evals.instrument import load_run
from model import GPT
from pretrained import export

SHORT = ("--max_iters=8", "--eval_interval=4", "--log_interval=1", "--eval_iters=1", "--batch_size=4",
         "--warmup_iters=2", "--learning_rate=5e-2", "--device=cpu", "--dtype=float32")
LORA = ("--train_only=lora", "--lora_rank=2")
FOCUS = ("--train_only=focus", "--attn=focus", "--window=4")
TAU = ("--train_only=focus", "--attn=elastic")          # stands for any mixer with added parameters: see `adds_tau`


@pytest.fixture(scope="session")
def base(tmp_path_factory, data):
    """A run that adapters are trained on."""
    out = tmp_path_factory.mktemp("adapters") / "base"
    train_here(f"--dataset={data}", f"--out_dir={out}", "--n_layer=2")
    return out


def adapt(base, out, *flags):
    train_here(f"--init_from={base}", f"--out_dir={out}", *SHORT, *flags)
    return out


@pytest.fixture(scope="session")
def lora(base):
    """A LoRA adapter of the base, in a folder next to it."""
    return adapt(base, base.parent / "lora", *LORA)


@pytest.fixture
def adds_tau(monkeypatch):
    """Let attention declare tau as an added parameter, as a mixer does."""
    monkeypatch.setattr(attention.Attention, "added", ("tau",))


@pytest.fixture
def pair(base, lora, tmp_path):
    """Copies of base and adapter, which a test may change. The adapter still names the original base."""
    for folder in (base, lora):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "base", tmp_path / "lora"


@pytest.fixture
def loss(evaluate):
    return lambda folder, *flags: evaluate("loss", f"--out_dir={folder}", "--windows=4", *flags)["loss"]


def cut_short(step, base, out, *flags):
    """Train, but stop when this step is logged, like a process that is killed there."""
    def log(self, **row):
        if row["step"] == step:
            raise KeyboardInterrupt
        real(self, **row)
    real = Run.log
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Run, "log", log)
        train_script.main([f"--init_from={base}", f"--out_dir={out}", *SHORT, *flags])
    return out


# -------------------------------------------------------------------------------------------------------------- LoRA


def lora_model(**choices):
    """A model with LoRA, whose matrices B are far from 0."""
    gpt = GPT(tiny_config(n_layer=2, **choices), bounds.SEED).eval()
    add_lora(gpt, ("c_attn", "c_proj"), 3, bounds.SEED)
    for n, (name, p) in enumerate(gpt.named_parameters()):
        if ".lora_" in name:
            p.data = 0.3 * normal(*p.shape, stream=n, dtype=torch.float32)
    return gpt


@torch.no_grad()
def logits(gpt):
    return gpt(torch.arange(16)[None])[0]


@pytest.mark.parametrize("choices", [
    {}, {"bias": True, "n_kv_head": 1, "attn": "elastic"}, {"attn": "diff2"}, {"attn": "gated_deltanet"}])
def test_merged_weights_give_the_logits_of_w_plus_b_a(choices):
    gpt, plain = lora_model(**choices), GPT(tiny_config(n_layer=2, **choices), bounds.SEED).eval()
    before = logits(plain)
    plain.load_state_dict(merged(gpt.state_dict(), "here"))
    close(logits(gpt), logits(plain))
    below(0.01, (logits(plain) - before).abs().max())


def test_lora_starts_with_the_logits_of_its_base():
    """B is 0, so LoRA adds exactly nothing. A is initialised like other weights."""
    plain, one, other = (GPT(tiny_config(n_layer=2)).eval() for _ in range(3))
    for model in (one, other):
        add_lora(model, ("c_attn",), 16, seed=bounds.SEED)
    same(logits(one), logits(plain))
    a, b = (model.transformer.h[1].attn.c_attn.lora_a for model in (one, other))
    same(a, b)
    assert not torch.equal(a, one.transformer.h[0].attn.c_attn.lora_a)
    below((a.std() / 0.02 - 1).abs(), 8 / math.sqrt(2 * a.numel()))     # eight standard errors
    assert not hasattr(one.transformer.h[0].attn.c_proj, "lora_a")


def test_only_lora_is_trained_and_its_matrices_decay():
    gpt = lora_model(attn="elastic")
    freeze_all_but(gpt, "lora")
    decay, = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert decay["weight_decay"] == 0.1 and len(decay["params"]) == 8
    assert sum(p.numel() for p in decay["params"]) == num_trained(gpt) == 2 * 3 * (16 + 48 + 16 + 16)
    assert frozen(gpt) == {name for name, _ in gpt.named_parameters(remove_duplicate=False) if ".lora_" not in name}


# ---------------------------------------------------------------------------------------- the checkpoint of an adapter


def test_an_adapter_holds_what_was_trained_and_names_its_base(base, lora):
    state = torch.load(lora / "ckpt.pt", weights_only=True)
    shapes = {f"transformer.h.{layer}.attn.{module}.{part}": shape for layer in (0, 1)
              for module, rows in (("c_attn", 48), ("c_proj", 16))
              for part, shape in (("lora_a", (2, 16)), ("lora_b", (rows, 2)))}
    assert {name: tuple(value.shape) for name, value in state["model"].items()} == shapes
    assert len(state["optimizer"]["state"]) == len(shapes) and state["step"] == 8
    assert meta(lora)["base"].keys() == {"path", "weights"} and meta(lora)["base"]["path"] == str(base)
    assert meta(lora)["trained"] == sum(np.prod(shape) for shape in shapes.values())
    assert (lora / "ckpt.pt").stat().st_size < 0.25 * (base / "ckpt.pt").stat().st_size


def test_every_reader_sees_base_and_adapter_as_one_model(base, lora, loss):
    """Adapted weights are W + B A. All others equal the base's bit for bit."""
    own, below_it, together = weights(lora), weights(base), read_weights(lora)
    assert together.keys() == below_it.keys()
    for name, value in together.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_a" in own:
            product = own[f"{module}.lora_b"].double() @ own[f"{module}.lora_a"].double()
            close(value, below_it[name] + product, terms=2)
            below(1e-3, product.abs().max())
        else:
            same(value, below_it[name])
    same(load_run(lora, "cpu")[0].state_dict(), together)
    below(0.001, loss(base) - loss(lora))
    close(loss(lora, "--attn=elastic", "--attn_args=tau_init=0"), loss(lora), dtype=torch.float32)


@pytest.mark.parametrize("flags", [LORA, TAU, FOCUS], ids=["lora", "tau", "focus"])
def test_frozen_weights_do_not_change(flags, base, adds_tau, tmp_path, monkeypatch):
    """They are unchanged in the trained model after its last step and in the base's folder."""
    trained, before = [], contents(base)
    monkeypatch.setattr(train_script, "report", lambda model, *more: trained.append(model))
    out = adapt(base, tmp_path / "out", *flags)
    now, own, kept = trained[0].state_dict(), weights(out), weights(base)
    assert set(now) - set(own) == set(kept)
    same({name: now[name] for name in kept}, kept)
    same({name: now[name] for name in own}, own)
    assert all(value.abs().max() > 0 for value in own.values())
    assert contents(base) == before


def test_focus_saves_the_parameters_and_buffers_it_adds(base, tmp_path, loss):
    """It saves trained parameters and the buffers that training counts."""
    out = adapt(base, tmp_path / "out", *FOCUS)
    model = load_run(out, "cpu")[0]
    added = {f"transformer.h.{layer}.attn.{name}" for layer in (0, 1) for name in model.transformer.h[layer].attn.added}
    assert weights(out).keys() == added & model.state_dict().keys()
    assert any(name.endswith("centroids") for name in weights(out))
    assert weights(out)["transformer.h.0.attn.potential"].abs().max() > 0
    assert loss(out, "--topk=2") > 0


def test_buffers_that_training_sets_are_saved(data, tmp_path):
    """The training loop sets Dex's buffer `progress`. Dex's own parameters were trained in the base."""
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'base'}", "--attn=dex", "--max_iters=10")
    out, first = adapt(tmp_path / "base", tmp_path / "lora", *LORA), weights(tmp_path / "base")
    name, *learned = (f"transformer.h.0.attn.{part}" for part in ("progress", "dex_lambda", "dex_proj.weight"))
    assert all(first[part].abs().max() > 0 for part in learned)
    cut_short(6, tmp_path / "base", tmp_path / "half", *LORA)
    assert (first[name], read_weights(out)[name], weights(out)[name]) == (1, 1, 1)
    assert read_weights(tmp_path / "half")[name] == 0.5                 # the adapter's own value, not the base's


def test_an_exported_adapter_is_merged(data, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'base'}", "--attn=softmax", "--norm=rmsnorm",
               "--mlp=swiglu", "--max_iters=1")
    out = adapt(tmp_path / "base", tmp_path / "lora", *LORA)
    export.export(out, tmp_path / "exported")
    theirs = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    name = "transformer.h.0.attn.c_proj.weight"
    same(theirs["model.layers.0.self_attn.o_proj.weight"], read_weights(out)[name])
    assert not torch.equal(theirs["model.layers.0.self_attn.o_proj.weight"], weights(tmp_path / "base")[name])


# --------------------------------------------------------------------------------- resuming, ranks, further training


@pytest.mark.parametrize("step, flags", [
    by_default(False, 2, LORA), (6, LORA), (2, TAU), by_default(False, 6, TAU), (6, FOCUS)])
def test_killed_and_resumed_equals_uninterrupted(step, flags, base, adds_tau, tmp_path):
    """The run is killed before or after its first checkpoint."""
    whole, killed = adapt(base, tmp_path / "whole", *flags), cut_short(step, base, tmp_path / "killed", *flags)
    assert (killed / "ckpt.pt").exists() == (step > 4)
    train_here(f"--out_dir={killed}", "--init_from=resume")
    assert_same_run(killed, whole)
    assert meta(killed)["base"] == meta(whole)["base"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("only", [LORA, FOCUS], ids=["lora", "focus"])
def test_two_ranks_equal_one(only, base, tmp_path):
    """Losses, trained parameters and counted buffers agree."""
    flags = (f"--init_from={base}", *SHORT, *only, "--learning_rate=1e-2", "--gradient_accumulation_steps=3")
    run("train.py", *flags, f"--out_dir={tmp_path / '2'}", ranks=2)
    train_here(*flags, f"--out_dir={tmp_path / '1'}")
    assert_close_runs(tmp_path / "2", tmp_path / "1")


def test_all_weights_can_be_trained_after_an_adapter(base, lora, tmp_path, loss):
    """The second phase is a full run and needs no base. A step of Adam moves a weight by at most the learning rate."""
    out = adapt(lora, tmp_path / "all", "--max_iters=2", "--learning_rate=1e-9", "--weight_decay=0")
    together = read_weights(lora)
    assert weights(out).keys() == together.keys() and "base" not in meta(out)
    for name, value in weights(out).items():
        close(value, together[name], terms=1, moved=2e-9)
    close(loss(out), loss(lora), dtype=torch.float32)


def test_an_adapter_can_have_an_adapter_as_its_base(lora, base, adds_tau, tmp_path, loss):
    """The two may be of different kinds or of the same kind. The first adapter with its own base is the base."""
    taus, twice = adapt(lora, tmp_path / "taus", *TAU), adapt(lora, tmp_path / "twice", *LORA, "--seed=2")
    assert sorted(weights(taus)) == [f"transformer.h.{layer}.attn.tau" for layer in (0, 1)]
    assert meta(taus)["base"]["path"] == str(lora)
    same({name: read_weights(taus)[name] for name in read_weights(lora)}, read_weights(lora))
    name = "transformer.h.0.attn.c_proj"
    b, a = (weights(twice)[f"{name}.lora_{part}"] for part in "ba")
    close(read_weights(twice)[f"{name}.weight"], read_weights(lora)[f"{name}.weight"] + b @ a, terms=2)
    below(0.001, loss(lora) - loss(twice))
    assert all(".lora_" in name for name in weights(adapt(taus, tmp_path / "third", *LORA)))            # and no tau


# --------------------------------------------------------------------------------------------- where the base is found


def test_the_base_is_found_at_its_path_or_next_to_the_adapter(pair, tmp_path, monkeypatch, capsys, loss):
    base, lora = pair
    about = meta(lora)
    expected = loss(lora)

    def named(path):
        files.write_json(lora / "meta.json", about | {"base": about["base"] | {"path": path}})

    named("elsewhere/base")                     # no such folder: the base is next to the adapter
    assert loss(lora) == expected
    named("out/before")                         # relative to the current folder
    (tmp_path / "here" / "out").mkdir(parents=True)
    base.rename(tmp_path / "here" / "out" / "before")
    monkeypatch.chdir(tmp_path / "here")
    assert loss(lora) == expected
