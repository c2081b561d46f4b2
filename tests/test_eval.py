"""eval.py: the probe's measures on weights whose answers are known, losses over ranks, samples, overrides."""
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import complain, run, tiny_config, train

import eval as eval_script
from attention import ATTENTIONS, View, visible
from data import tokens
from model import GPT


def measure(*sequences, block=None):
    """The probe's measures of hand-made weights: each sequence (T, T) of one head, shown in blocks of rows."""
    probe = eval_script.Probe()
    for w in sequences:
        w = torch.as_tensor(w, dtype=torch.float32)[None, None]
        anything = torch.ones(1, 1, w.shape[2], 4)
        module = SimpleNamespace(weight_blocks=lambda q, k, x, table, w=w: w.split(block or w.shape[2], 2), has_extra_key=False, ahead=0,
                                 view=View())
        probe.see(module, anything, anything, anything, None)
    return {name: value.item() for name, value in probe.result().items()}


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
    assert_measures(measure(even_rows(20), block=block), sink=mean, uniform=mean, share=mean, times_uniform=1, density=1 - mean, row_mass=1,
                    sparsity=0, empty_rows=0, sink_eps=0)


def test_all_weight_on_the_first_token():
    mean = sum(1 / n for n in range(1, 21)) / 20
    assert_measures(measure(on_first(20), block=6), sink=1, uniform=mean, share=1, times_uniform=1 / mean, density=0, row_mass=1,
                    sparsity=190 / 210, empty_rows=0, sink_eps=1)


def test_all_weight_on_oneself():
    assert_measures(measure(torch.eye(10)), sink=0.1, share=0.1, density=0.9, row_mass=1, sparsity=45 / 55, sink_eps=0)


def test_signed_weights_and_rows_that_sum_to_nothing():
    w = [[1.0, 0, 0], [-1, 1, 0], [0.5, -1, -0.5]]
    uniform = (1 + 1 / 2 + 1 / 3) / 3
    assert_measures(measure(w), sink=0.5 / 3, share=1.75 / 3, times_uniform=1.75 / 3 / uniform, row_mass=0, density=-0.5 / 3, sparsity=0,
                    empty_rows=0)


def test_empty_rows_have_no_share_and_all_zeros():
    w = torch.zeros(4, 4)
    w[3, 1] = 0.25
    assert_measures(measure(w), sink=0, share=0, row_mass=0.25 / 4, density=0.25 / 4, sparsity=9 / 10, empty_rows=3 / 4, sink_eps=0)


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
    found = eval_script.probe(gpt, fox, eval_script.Machine("cpu", "float32"), count=3, batch_size=2)
    starts = eval_script.fixed_windows(fox, 200, 3)

    def look(attend, layer, module, q, k, v, x, table):
        whole.append((module.weights_of(q, k, x, table)[:, :, -200:, -200:], visible(torch.arange(200)[:, None], torch.arange(200), module.view)))
        return attend(q, k, v, x, table)

    with eval_script.instead(gpt, look), torch.no_grad():
        gpt(torch.from_numpy(fox.windows(starts, 200, 257)))
    assert found["windows"] == 3 and len(found["layers"]) == 2
    for layer, (w, seen) in zip(found["layers"], whole, strict=True):
        assert layer["sink"] == pytest.approx(w[..., 0].mean((0, 2)).tolist(), abs=2e-6)
        assert layer["row_mass"] == pytest.approx(w.sum(-1).mean((0, 2)).tolist(), rel=1e-6, abs=2e-6)
        zeros = ((w == 0) & seen).double().sum((0, 2, 3)) / (3 * seen.sum())
        assert layer["sparsity"] == pytest.approx(zeros.tolist(), abs=2e-6)
    assert found["mean"]["sink"] == pytest.approx(np.mean([layer["sink"] for layer in found["layers"]]), abs=2e-6)


def test_softmax_sink_and_density_sum_to_one_and_elastic_has_zeros(fox):
    machine = eval_script.Machine("cpu", "float32")
    seen = {attn: eval_script.probe(GPT(tiny_config(attn=attn, vocab_size=257)), fox, machine, 5)["mean"] for attn in ("softmax", "elastic")}
    assert seen["softmax"]["sink"] + seen["softmax"]["density"] == pytest.approx(1, abs=1e-6) and seen["softmax"]["sparsity"] == 0
    assert seen["elastic"]["sparsity"] > 0.2 and seen["elastic"]["row_mass"] < 0.2


def test_watching_leaves_the_model_as_it_was(fox):
    gpt, idx = GPT(tiny_config(vocab_size=257)), torch.zeros(1, 4, dtype=torch.long)
    before = gpt(idx)[0]
    with eval_script.instead(gpt, lambda attend, layer, module, *inputs: attend(*inputs)):
        assert torch.equal(gpt(idx)[0], before)
    assert all("attend" not in vars(block.attn) for block in gpt.transformer.h)


def test_fixed_windows_are_spread_over_the_whole_split(fox):
    starts = eval_script.fixed_windows(fox, 16, 5)
    assert starts[0] == 0 and starts[-1] == len(fox) - 17 and len(starts) == 5 and len(set(np.diff(starts) // 10)) == 1
    assert len(eval_script.fixed_windows(fox, 16, 10 ** 9)) == len(eval_script.fixed_windows(fox, 16, 0)) == (len(fox) - 1) // 16


# ------------------------------------------------------------------------------------------------------------------- commands

@pytest.fixture
def look(elastic_run, capsys):
    """eval.main on the finished run with --json, in this process."""
    def call(command, *flags):
        eval_script.main([command, f"--out_dir={elastic_run}", "--json", "--device=cpu", *flags])
        return json.loads(capsys.readouterr().out)
    return call


def test_loss_is_the_mean_over_the_windows_in_nats_and_bits(look, elastic_run, data):
    found = look("loss", "--windows=6")
    gpt, _ = eval_script.load_run(elastic_run, "cpu")
    split = tokens.Tokens(data, "val")
    rows = torch.from_numpy(split.windows(eval_script.fixed_windows(split, 16, 6), 17, 257))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(gpt(rows[:, :-1])[0].reshape(-1, 257), rows[:, 1:].reshape(-1)).item()
    assert found["loss"] == pytest.approx(expected, abs=1e-5) and found["bits_per_byte"] == pytest.approx(expected / math.log(2), abs=1e-5)
    assert look("loss", "--windows=6", "--batch_size=4")["loss"] == pytest.approx(expected, abs=1e-5)
    assert look("loss", "--windows=6", "--split=train")["loss"] != found["loss"]


def test_loss_of_two_ranks_equals_one_process(look, elastic_run):
    alone = look("loss", "--windows=7", "--batch_size=2")["loss"]
    done = run("eval.py", "loss", f"--out_dir={elastic_run}", "--json", "--windows=7", "--batch_size=2", "--device=cpu", ranks=2)
    assert json.loads(done.stdout)["loss"] == pytest.approx(alone, abs=1e-5)


def test_probe_as_json_holds_every_layer_and_head(look):
    found = look("probe", "--windows=3")
    assert found["windows"] == 3 and found["length"] == 16 and len(found["layers"]) == 1
    assert found["mean"].keys() == found["layers"][0].keys() == eval_script.MEASURES.keys() and len(found["layers"][0]["sink"]) == 2


def test_sample_follows_its_seed_and_prompt(look):
    texts = [look("sample", "--tokens=12", "--samples=2", "--prompt=the quick", f"--seed={seed}")["samples"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 2 and all(text.startswith("the quick") for text in texts[0])
    greedy = [look("sample", "--tokens=12", "--temperature=0", f"--seed={seed}")["samples"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize("command, words", [("loss", ["bits per byte", "val"]), ("probe", ["sink", "0.1", "mean", "density"]), ("sample", ["fox"])])
def test_tables_are_for_people(command, words, elastic_run):
    flags = {"probe": ["--windows=2"], "sample": ["--tokens=3", "--prompt=fox"], "loss": ["--windows=2"]}[command]
    done = run("eval.py", command, f"--out_dir={elastic_run}", "--device=cpu", *flags)
    assert all(word in done.stdout for word in words) and done.stderr == ""


def test_axes_may_be_overridden_where_the_parameters_allow(look, elastic_run, capsys):
    assert look("loss", "--windows=4", "--pos=none")["loss"] != look("loss", "--windows=4")["loss"]
    assert look("loss", "--windows=4", "--kernel=torch")["loss"] == pytest.approx(look("loss", "--windows=4")["loss"], abs=1e-6)
    assert look("loss", "--windows=4", "--window=3")["loss"] != look("loss", "--windows=4", "--window=16")["loss"]
    assert look("loss", "--windows=4", "--window=16")["loss"] == pytest.approx(look("loss", "--windows=4")["loss"], abs=1e-6)
    for flag, says in (("--attn=softmax", "tau"), ("--pos=learned", "wpe"), ("--kernel=sdpa", "sdpa")):
        assert says in complain(eval_script.main, capsys, "loss", f"--out_dir={elastic_run}", flag)[1]


def test_streaming_on_a_softmax_checkpoint(tmp_path, data, capsys):
    """A model trained on all keys, read with a window and first keys: no parameter differs, and text goes on past the window."""
    train(tmp_path, data, "--attn=softmax")
    for flags in ((), ("--attn=streaming", "--window=4", "--first=1"), ("--attn=window", "--window=16")):
        eval_script.main(["sample", f"--out_dir={tmp_path}", "--json", "--device=cpu", "--tokens=40", "--prompt=the quick", *flags])
        assert len(json.loads(capsys.readouterr().out)["samples"][0]) >= 40
    found = []
    for flags in ((), ("--attn=window", "--window=16"), ("--attn=streaming", "--window=4", "--first=1")):
        eval_script.main(["loss", f"--out_dir={tmp_path}", "--json", "--device=cpu", "--windows=5", *flags])
        found.append(json.loads(capsys.readouterr().out)["loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5) and found[2] != found[0]


def test_a_run_is_named_by_its_folder_or_its_checkpoint(look, elastic_run, capsys):
    eval_script.main(["loss", f"--out_dir={elastic_run / 'ckpt.pt'}", "--json", "--device=cpu", "--windows=3"])
    assert json.loads(capsys.readouterr().out) == look("loss", "--windows=3")
