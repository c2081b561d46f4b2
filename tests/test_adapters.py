"""--train_only: frozen weights do not change, an adapter is small and needs its base, LoRA merges
into the weights."""

import math

import bounds
import pytest
import torch
from bounds import below, close, same
from conftest import assert_same_run, contents, meta, tiny_config, train_here, weights
from layers import normal

import train as train_script
from common.runs import fingerprint, frozen, merged, read_weights
from common.weights import num_trained, train_only
from evals.instrument import load_run
from model import GPT
from pretrained import export

SHORT = """
    --max_iters=8 --eval_interval=4 --log_interval=1 --eval_iters=1 --batch_size=4 --warmup_iters=2
    --lr_decay_iters=8 --learning_rate=5e-2 --device=cpu --dtype=float32
""".split()
LORA = ("--train_only=lora", "--lora_rank=2")
FOCUS = ("--train_only=focus", "--attn=focus", "--window=4")


@pytest.fixture(scope="session")
def base(tmp_path_factory, data):
    """A run that adapters are trained on."""
    out = tmp_path_factory.mktemp("adapters") / "base"
    train_here(
        f"--dataset={data}",
        f"--out_dir={out}",
        "--n_layer=2",
        "--attn=softmax",
        "--norm=rmsnorm",
        "--mlp=swiglu",
    )
    return out


def adapt(base, out, *flags):
    train_here(f"--init_from={base}", f"--out_dir={out}", *SHORT, *flags)
    return out


@pytest.fixture(scope="session")
def lora(base):
    """A LoRA adapter of the base, in a folder next to it."""
    return adapt(base, base.parent / "lora", *LORA)


@pytest.mark.parametrize(
    "lora_on, changed, choices",
    [
        ("both", 2, {"bias": True, "n_kv_head": 1, "attn": "elastic"}),
        ("qv", 1, {"n_kv_head": 1, "n_head": 4}),
        ("all", 4, {"attn": "gated_deltanet"}),
        ("all", 5, {"mlp": "swiglu"}),
    ],
)
@torch.no_grad()
def test_lora_adds_nothing_at_first_and_then_b_a(lora_on, changed, choices):
    """A is initialised like other weights, B is 0. The seed and the layer decide A. Where it is on
    queries and values alone, keys stay as they were, and Hu et al. count its parameters."""
    config = tiny_config(n_layer=2, **choices)
    plain, one, other = (GPT(config, bounds.SEED).eval() for _ in range(3))
    knobs = {"init_from": "run", "train_only": "lora", "lora_rank": 16, "seed": bounds.SEED}
    knobs["lora_on"] = lora_on
    for model in (one, other):
        train_only(model, train_script.Train(**knobs))
    idx = torch.arange(16)[None]
    same(one(idx)[0], plain(idx)[0])
    first, a = (block.attn.c_attn.lora_a for block in one.transformer.h)
    same(a, other.transformer.h[1].attn.c_attn.lora_a)
    assert not torch.equal(a, first)
    below((a.std() / 0.02 - 1).abs(), 8 / math.sqrt(2 * a.numel()))  # eight standard errors
    for n, (name, p) in enumerate(one.named_parameters()):
        if ".lora_" in name:
            p.data = 0.1 * normal(*p.shape, stream=n, dtype=torch.float32)
    before = plain.transformer.h[0].state_dict()
    before = {name: value.clone() for name, value in before.items()}
    plain.load_state_dict(merged(one.state_dict(), "here"))
    close(one(idx)[0], plain(idx)[0])
    after = plain.transformer.h[0].state_dict()
    assert changed == sum(not torch.equal(after[name], before[name]) for name in before)
    if lora_on == "qv":
        q, k, v = (heads * width for heads, width in plain.transformer.h[0].attn.shapes.values())
        was, now = (part["attn.c_attn.weight"].split([q, k, v]) for part in (before, after))
        assert [torch.equal(*pair) for pair in zip(was, now, strict=True)] == [False, True, False]
        assert num_trained(one) == 2 * 16 * (config.n_embd + q + config.n_embd + v)

    # only these matrices are trained, with weight decay
    (decay,) = one.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert decay["weight_decay"] == 0.1
    assert sum(p.numel() for p in decay["params"]) == num_trained(one)
    names = [name for name, _ in one.named_parameters(remove_duplicate=False)]
    assert frozen(one) == {name for name in names if ".lora_" not in name}


@pytest.mark.parametrize(
    "saved, flags",
    [(False, LORA), (True, FOCUS), (True, (*LORA, "--lora_on=qv"))],
    ids=["lora", "focus", "qv"],
)
def test_an_adapter_stores_what_was_trained_and_resumes_as_if_uninterrupted(
    saved, flags, base, tmp_path, monkeypatch
):
    """Frozen weights change neither in the trained model after its last step nor in the base's
    folder. Buffers are stored as well. A run can also resume before its first checkpoint."""
    trained = []
    before = contents(base)
    monkeypatch.setattr(train_script, "report", lambda model, *more: trained.append(model) or {})
    stopped = adapt(base, tmp_path / "stopped", *flags, "--max_iters=4")
    whole = adapt(base, tmp_path / "whole", *flags)
    now = trained[1].state_dict()
    own, kept = weights(whole), weights(base)
    assert set(now) - set(own) == set(kept) and contents(base) == before
    same(now, kept | own)
    assert all(value.abs().max() > 0 for value in own.values())
    named = {"path": str(base), "weights": fingerprint(base)}
    assert meta(whole)["base"] == meta(stopped)["base"] == named
    learned = [p for p in trained[1].parameters() if p.requires_grad]
    assert meta(whole)["trained"] == sum(p.numel() for p in learned)
    assert flags != FOCUS or {"centroids", "potential"} <= {name.split(".")[-1] for name in own}
    if not saved:
        (stopped / "ckpt.pt").unlink()
    train_here(f"--out_dir={stopped}", "--init_from=resume", "--max_iters=8")
    assert_same_run(stopped, whole)


def test_every_reader_sees_base_and_adapter_as_one_model(base, lora, evaluate, tmp_path):
    """So are the exported weights, and an adapter on an adapter."""
    name = "transformer.h.0.attn.c_proj"
    together = read_weights(lora)
    same(together, merged(weights(base) | weights(lora), lora))
    same(load_run(lora, "cpu")[0].state_dict(), together)
    old, new = (evaluate("loss", f"--out_dir={run}", "--windows=4")["loss"] for run in (base, lora))
    below(0.001, old - new)
    safetensors = pytest.importorskip("safetensors.torch")
    export.export(lora, tmp_path / "exported")
    exported = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    same(exported["model.layers.0.self_attn.o_proj.weight"], together[f"{name}.weight"])
    twice = adapt(lora, tmp_path / "twice", *LORA, "--seed=2")
    b, a = (weights(twice)[f"{name}.lora_{part}"] for part in "ba")
    close(read_weights(twice)[f"{name}.weight"], together[f"{name}.weight"] + b @ a, terms=2)
