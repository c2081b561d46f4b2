"""The probe: its measures of every recipe's model, its inputs and lengths, what it prints and draws."""
import json

import numpy as np
import pytest
import torch
from conftest import assert_says, enliven, tiny_config, train_here

import eval as eval_script
from attention import ATTENTIONS, visible
from common.machine import Machine
from data import tokens
from evals.instrument import instead
from evals.measures import MEASURES
from evals.probe import probe
from model import GPT

MACHINE = Machine("cpu", "float32")


@pytest.fixture(scope="module")
def fox(data):
    return tokens.Tokens(data, "val")


@pytest.fixture
def probed(elastic_run, capsys):
    """What `eval.py probe` says about the elastic run with these flags, as numbers or as text."""
    def call(*flags, out_dir=elastic_run, text=False):
        eval_script.main(["probe", f"--out_dir={out_dir}", "--device=cpu", *([] if text else ["--json"]), *flags])
        said = capsys.readouterr().out
        return said if text else json.loads(said)
    return call


# ----------------------------------------------------------------------------------------------------------- of models


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_probe_of_a_model_equals_its_weights(attn, fox):
    """The streamed means of two layers and heads equal those of the whole weight matrices."""
    gpt, whole = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257, block_size=200)).eval(), []
    enliven(gpt)
    found = probe(gpt, fox, MACHINE, count=3, batch_size=2)
    starts = tokens.fixed_windows(fox, 200, 3)

    def look(attend, layer, module, q, k, v, x, table):
        i = torch.arange(200)
        whole.append((module.weights_of(q, k, x, table)[:, :, -200:, -200:], visible(i[:, None], i, module.sight)))
        return attend(q, k, v, x, table)

    with instead(gpt, look), torch.no_grad():
        gpt(torch.from_numpy(fox.windows(starts, 200, 257)))
    assert found["windows"] == 3 and len(found["layers"]) == 2 and len(found["stream"]) == 3
    for layer, (w, seen) in zip(found["layers"], whole, strict=True):
        assert layer["sink"] == pytest.approx(w[..., 0].mean((0, 2)).tolist(), abs=2e-6)
        assert layer["row_mass"] == pytest.approx(w.sum(-1).mean((0, 2)).tolist(), rel=1e-6, abs=2e-6)
        zeros = ((w == 0) & seen).double().sum((0, 2, 3)) / (3 * seen.sum())
        assert layer["sparsity"] == pytest.approx(zeros.tolist(), abs=2e-6)
    assert found["mean"]["sink"] == pytest.approx(np.mean([layer["sink"] for layer in found["layers"]]), abs=2e-6)
    module = gpt.transformer.h[0].attn          # what has no meaning for a recipe is None
    assert (found["layers"][0]["peak_a"][0] is not None) == (module.score_heads > module.heads)
    assert (found["mean"]["extra_eps"] is not None) == (module.has_extra_key or module.ahead > 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_recipe_in_low_precision_and_with_grouped_heads(attn, fox):
    """All numbers are there, and near those of float32."""
    config = tiny_config(attn=attn, n_layer=2, n_head=4, n_kv_head=2, vocab_size=257, block_size=150)
    if not GPT(config).transformer.h[0].attn.exact:
        pytest.skip("derivatives that stand in for its weights are far apart where the memory has just begun")
    found = {dtype: probe(GPT(config).eval(), fox, Machine("cpu", dtype), 2) for dtype in ("float32", "bfloat16")}
    for name in ("sink", "row_mass", "dispersion"):
        low, exact = (np.array(found[dtype]["mean"][name]) for dtype in found)
        assert abs(low - exact) < 0.05 * abs(exact) + 0.02
    for low, exact in zip(found["bfloat16"]["stream"], found["float32"]["stream"], strict=True):
        for name in exact["positions"]:
            assert low[name] == pytest.approx(exact[name], rel=0.05, abs=0.01)


def test_softmax_sink_and_density_sum_to_one_and_elastic_has_zeros(fox):
    seen = {attn: probe(GPT(tiny_config(attn=attn, vocab_size=257)), fox, MACHINE, 5)["mean"]
            for attn in ("softmax", "elastic")}
    assert seen["softmax"]["sink"] + seen["softmax"]["density"] == pytest.approx(1, abs=1e-6)
    assert seen["softmax"]["sparsity"] == 0
    assert seen["elastic"]["sparsity"] > 0.2 and seen["elastic"]["row_mass"] < 0.2


def test_rows_without_a_preference_are_uniform(fox):
    gpt = GPT(tiny_config(vocab_size=257, block_size=50))
    with torch.no_grad():
        gpt.transformer.h[0].attn.c_attn.weight[:16] = 0                # queries of 0
    mean = probe(gpt, fox, MACHINE, 4)["mean"]
    assert mean["dispersion"] == pytest.approx(1, abs=1e-5) and mean["times_uniform"] == pytest.approx(1, abs=1e-5)
    assert mean["sink"] == pytest.approx(mean["uniform"], abs=1e-6)


@pytest.mark.parametrize("attn", ["softmax", "lazy", "sink", "tda"])
def test_memory_is_linear_in_length(attn, fox):
    """Four times the tokens take about four times the memory, not sixteen."""
    gpt = GPT(tiny_config(attn=attn, vocab_size=257, block_size=2048)).eval()
    short, long = (MACHINE.peak_memory(lambda T=T: probe(gpt, fox, MACHINE, 1, 1, length=T)) for T in (512, 2048))
    assert long < 5 * short


# --------------------------------------------------------------------------------------------------------- the command


def test_as_json_it_holds_every_layer_and_head(probed):
    found = probed("--windows=3")
    assert found["windows"] == 3 and found["length"] == 16 and len(found["layers"]) == 1
    assert found["mean"].keys() == found["layers"][0].keys() == MEASURES.keys() and len(found["layers"][0]["sink"]) == 2
    assert [len(place["positions"]) for place in found["stream"]] == [10, 2] and "cos_qk" in found["stream"][0]


@pytest.mark.parametrize("flags, count", [
    ((), 100), (["--length=256"], 100), (["--length=1024"], 25), (["--length=30000"], 1), (["--windows=3"], 3),
    (["--windows=0"], 0)])
def test_by_default_long_windows_are_fewer(flags, count, elastic_run, monkeypatch):
    asked = []
    monkeypatch.setattr(eval_script.probe, "probe", lambda *args, **kwargs: asked.append(args[3]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", *flags])
    assert asked == [count]


def test_several_lengths_are_a_line_each(probed):
    found = probed("--lengths=16,4,8", "--windows=5")
    assert [line["length"] for line in found["lengths"]] == [4, 8, 16] and found["length"] == 16
    for line in found["lengths"]:
        alone = probed(f"--length={line['length']}", "--windows=5")
        assert {name: line[name] for name in MEASURES} == alone["mean"] and line["windows"] == 5
        assert line["massive"] == max(place["massive"] for place in alone["stream"])
    said = probed("--lengths=4,16", "--windows=5", text=True)
    assert_says(r"length +sink +share", said)
    assert_says(r"\n +4 +0\.\d+(.*\n)  +16 +0\.\d+", said)


def test_k_and_eps_are_those_of_the_sink(probed):
    found = probed("--windows=4", "--k=2", "--eps=0")
    assert found["mean"]["sink_eps"] == 1 and found["k"] == 2
    assert probed("--windows=4", "--eps=1")["mean"]["sink_eps"] == 0
    assert "Sink_2^0.05" in probed("--windows=2", "--k=2", "--eps=0.05", text=True)


def test_what_the_model_reads(elastic_run, probed, monkeypatch):
    read = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda gpt, idx: read.append(idx) or forward(gpt, idx))
    for kind in ("data", "repeat", "random", "bos", "random"):
        assert probed("--windows=6", f"--input={kind}")["input"] == kind
    batches = [torch.cat(read[i:i + 2]) for i in range(0, 10, 2)]       # of 4 and 2 windows
    data, repeated, random, after, again = batches
    assert (repeated == data[:, :1]).all() and len(set(data[:, 0].tolist())) > 1
    assert (after[:, 0] == 256).all() and torch.equal(after[:, 1:], data[:, :-1])
    assert torch.equal(random, again) and len(random.unique()) > 60 and random.max() < 257
    assert not torch.equal(random[:2], random[4:])


def test_symbols_may_be_random(backcopy, tmp_path):
    train_here("--preset=lab", f"--dataset={backcopy}", f"--out_dir={tmp_path}", "--max_iters=2")
    eval_script.main(["probe", f"--out_dir={tmp_path}", "--device=cpu", "--windows=2", "--input=random"])


# ---------------------------------------------------------------------------------------------------------- the picture


@pytest.mark.parametrize("flags", [(), ("--lengths=4,8,16",)])
def test_a_picture_shows_every_layer_and_head(flags, elastic_run, tmp_path, capsys):
    eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", "--windows=2", f"--png={tmp_path}/x.png",
                      *flags])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and "sink" in capsys.readouterr().out
