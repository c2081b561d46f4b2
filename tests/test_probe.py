"""The probe: its measures of weights whose answers are known, and of every recipe's own weights."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_config

import eval as eval_script
from attention import ATTENTIONS, Sight, visible
from common.machine import Machine
from data import tokens
from evals.instrument import instead
from evals.probe import MEASURES, Probe, probe
from model import GPT


def measure(*sequences, block=None):
    """The probe's measures of hand-made weights: each sequence (T, T) of one head, shown in blocks of rows."""
    shown = Probe()
    for w in sequences:
        w = torch.as_tensor(w, dtype=torch.float32)[None, None]
        anything = torch.ones(1, 1, w.shape[2], 4)
        module = SimpleNamespace(weight_blocks=lambda q, k, x, table, w=w: w.split(block or w.shape[2], 2),
                                 has_extra_key=False, ahead=0, sight=Sight())
        shown.see(module, anything, anything, anything, None)
    return {name: value.item() for name, value in shown.result().items()}


def assert_measures(found, **expected):
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def even_rows(T):
    return torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]


def on_first(T):
    return torch.eye(T)[:1].repeat(T, 1)


@pytest.mark.parametrize("block", [None, 3, 7])
def test_even_rows(block):
    mean = sum(1 / n for n in range(1, 21)) / 20
    assert_measures(measure(even_rows(20), block=block), sink=mean, uniform=mean, share=mean, times_uniform=1,
                    density=1 - mean, row_mass=1, sparsity=0, empty_rows=0, sink_eps=0)


def test_all_weight_on_the_first_token():
    mean = sum(1 / n for n in range(1, 21)) / 20
    assert_measures(measure(on_first(20), block=6), sink=1, uniform=mean, share=1, times_uniform=1 / mean, density=0,
                    row_mass=1, sparsity=190 / 210, empty_rows=0, sink_eps=1)


def test_all_weight_on_oneself():
    assert_measures(measure(torch.eye(10)), sink=0.1, share=0.1, density=0.9, row_mass=1, sparsity=45 / 55, sink_eps=0)


def test_signed_weights_and_rows_that_sum_to_nothing():
    w = [[1.0, 0, 0], [-1, 1, 0], [0.5, -1, -0.5]]
    uniform = (1 + 1 / 2 + 1 / 3) / 3
    assert_measures(measure(w), sink=0.5 / 3, share=1.75 / 3, times_uniform=1.75 / 3 / uniform, row_mass=0,
                    density=-0.5 / 3, sparsity=0, empty_rows=0)


def test_empty_rows_have_no_share_and_all_zeros():
    w = torch.zeros(4, 4)
    w[3, 1] = 0.25
    assert_measures(measure(w), sink=0, share=0, row_mass=0.25 / 4, density=0.25 / 4, sparsity=9 / 10, empty_rows=3 / 4,
                    sink_eps=0)


def test_rows_that_spend_little_are_measured_as_they_are():
    assert_measures(measure(0.1 * on_first(8)), sink=0.1, share=1, density=0, row_mass=0.1, sink_eps=1)


def test_sink_eps_counts_sequences_and_looks_at_the_first_64_queries_only():
    late = torch.cat([torch.eye(100)[:64], on_first(100)[64:]])          # a sink only after query 64
    early = torch.cat([on_first(100)[:64], torch.eye(100)[64:]])
    assert_measures(measure(late, early, early, block=10), sink_eps=2 / 3)
    weak = torch.cat([on_first(64)[:19], torch.eye(64)[19:]])           # 19 of 64 queries: 0.297; one more: above 0.3
    strong = torch.cat([on_first(64)[:20], torch.eye(64)[20:]])
    assert_measures(measure(weak), sink_eps=0)
    assert_measures(measure(strong), sink_eps=1)


@pytest.fixture(scope="module")
def fox(data):
    return tokens.Tokens(data, "val")


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_probe_of_a_model_equals_its_weights(attn, fox):
    """The streamed means of two layers and heads equal those of the whole weight matrices."""
    gpt, whole = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257, block_size=200)).eval(), []
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(4 if p.dim() > 1 else 0.7)
    found = probe(gpt, fox, Machine("cpu", "float32"), count=3, batch_size=2)
    starts = tokens.fixed_windows(fox, 200, 3)

    def look(attend, layer, module, q, k, v, x, table):
        i = torch.arange(200)
        whole.append((module.weights_of(q, k, x, table)[:, :, -200:, -200:], visible(i[:, None], i, module.sight)))
        return attend(q, k, v, x, table)

    with instead(gpt, look), torch.no_grad():
        gpt(torch.from_numpy(fox.windows(starts, 200, 257)))
    assert found["windows"] == 3 and len(found["layers"]) == 2
    for layer, (w, seen) in zip(found["layers"], whole, strict=True):
        assert layer["sink"] == pytest.approx(w[..., 0].mean((0, 2)).tolist(), abs=2e-6)
        assert layer["row_mass"] == pytest.approx(w.sum(-1).mean((0, 2)).tolist(), rel=1e-6, abs=2e-6)
        zeros = ((w == 0) & seen).double().sum((0, 2, 3)) / (3 * seen.sum())
        assert layer["sparsity"] == pytest.approx(zeros.tolist(), abs=2e-6)
    assert found["mean"]["sink"] == pytest.approx(np.mean([layer["sink"] for layer in found["layers"]]), abs=2e-6)


def test_softmax_sink_and_density_sum_to_one_and_elastic_has_zeros(fox):
    machine = Machine("cpu", "float32")
    seen = {attn: probe(GPT(tiny_config(attn=attn, vocab_size=257)), fox, machine, 5)["mean"]
            for attn in ("softmax", "elastic")}
    assert seen["softmax"]["sink"] + seen["softmax"]["density"] == pytest.approx(1, abs=1e-6)
    assert seen["softmax"]["sparsity"] == 0
    assert seen["elastic"]["sparsity"] > 0.2 and seen["elastic"]["row_mass"] < 0.2


def test_as_json_it_holds_every_layer_and_head(elastic_run, capsys):
    eval_script.main(["probe", f"--out_dir={elastic_run}", "--json", "--device=cpu", "--windows=3"])
    found = json.loads(capsys.readouterr().out)
    assert found["windows"] == 3 and found["length"] == 16 and len(found["layers"]) == 1
    assert found["mean"].keys() == found["layers"][0].keys() == MEASURES.keys() and len(found["layers"][0]["sink"]) == 2


def test_a_picture_shows_every_layer_and_head(elastic_run, tmp_path, capsys):
    eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", "--windows=2", f"--png={tmp_path}/x.png"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and "mean" in capsys.readouterr().out


@pytest.mark.parametrize("flags, count", [
    ((), 100), (["--length=256"], 100), (["--length=1024"], 25), (["--length=30000"], 1), (["--windows=3"], 3),
    (["--windows=0"], 0)])
def test_by_default_long_windows_are_fewer(flags, count, elastic_run, monkeypatch):
    asked = []
    monkeypatch.setattr(eval_script.probe, "probe", lambda *args, **kwargs: asked.append(args[3]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", *flags])
    assert asked == [count]
