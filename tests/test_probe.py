"""eval.py probe: measures of every recipe's model, inputs and lengths, printed text and pictures."""
import numpy as np
import pytest
import torch
from bounds import below, close, same
from conftest import RECIPES, assert_says, enliven, tiny_config, train_here
from layers import in_every_layer

import eval as eval_script
from attention import ATTENTIONS
from axes.sight import visible
from common.machine import Machine
from data import tokens
from evals.measures import MEASURES
from evals.probe import probe
from model import GPT

MACHINE = Machine("cpu", "float32")


@pytest.fixture(scope="module")
def fox(data):
    return tokens.Tokens(data, "val")


@pytest.fixture
def probed(elastic_run, evaluate):
    """The output of `eval.py probe --json` for the elastic run with these flags."""
    return lambda *flags: evaluate("probe", f"--out_dir={elastic_run}", *flags)


@pytest.fixture
def printed(elastic_run, capsys):
    """The text that it prints without --json."""
    def call(*flags):
        eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", *flags])
        return capsys.readouterr().out
    return call


# -------------------------------------------------------------------------------------------------- measures of models


@pytest.mark.parametrize("attn", RECIPES)
def test_streamed_measures_of_a_model_equal_those_of_its_whole_weights(attn, fox):
    """The streamed means of two layers and heads equal those of the whole weight matrices."""
    gpt = GPT(tiny_config(attn=attn, n_layer=2, vocab_size=257, block_size=200)).eval()
    enliven(gpt)
    found = probe(gpt, fox, MACHINE, count=3, batch_size=2)
    text, i = torch.from_numpy(fox.windows(tokens.fixed_windows(fox, 200, 3), 200, 257)), torch.arange(200)
    whole = in_every_layer(lambda module, q, k, v, x, table: module.weights_of(q, k, x, table)[:, :, -200:, -200:],
                           gpt, text)
    module = gpt.transformer.h[0].attn
    seen = visible(i[:, None], i, module.sight)
    assert found["windows"] == 3 and len(found["layers"]) == 2 and len(found["stream"]) == 3
    for layer, w in zip(found["layers"], whole, strict=True):
        mass = w.double().sum(-1)
        size = max(1.0, w.double().abs().sum(-1).mean((0, 2)).max().item())
        for name, expected in (("sink", w.double()[..., 0]), ("row_mass", mass)):
            close(torch.tensor(layer[name]), expected.mean((0, 2)), terms=8, size=size)
        # a weight that is only rounding error may be 0 in one of the two
        pairs, doubtful = 3 * seen.sum(), 1 + ((w != 0) & (w.abs() < 1e-7)).sum((0, 2, 3)).max()
        close(torch.tensor(layer["sparsity"]), ((w == 0) & seen).sum((0, 2, 3)) / pairs, terms=8, size=1.0,
              moved=(doubtful / pairs).item())
    close(found["mean"]["sink"], np.mean([layer["sink"] for layer in found["layers"]]), terms=4, size=1.0,
          dtype=torch.float32)
    # a measure that a recipe does not have is None
    assert (found["layers"][0]["peak_a"][0] is not None) == (module.score_heads > module.heads)
    assert (found["mean"]["extra_eps"] is not None) == (module.has_extra_key or module.ahead > 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_recipe_in_low_precision_and_with_grouped_heads(attn, fox):
    """The measures in bfloat16 are close to those in float32."""
    config = tiny_config(attn=attn, n_layer=2, n_head=4, n_kv_head=2, vocab_size=257, block_size=150)
    if not GPT(config).transformer.h[0].attn.exact:
        pytest.skip("the derivatives that replace its weights differ too much while the memory is new")
    found = {dtype: probe(GPT(config).eval(), fox, Machine("cpu", dtype), 2) for dtype in ("float32", "bfloat16")}
    exact, low = ({name: found[dtype]["mean"][name] for name in ("sink", "row_mass", "dispersion")} for dtype in found)
    close(low, exact, terms=4, size=max(1.0, exact["row_mass"]), dtype=torch.bfloat16)
    for exact, low in zip(*(found[dtype]["stream"] for dtype in found), strict=True):
        for name in exact["positions"]:
            close(torch.tensor(low[name]), torch.tensor(exact[name]), terms=4, dtype=torch.bfloat16)


def test_softmax_sink_and_density_sum_to_one_and_elastic_has_zeros(fox):
    seen = {attn: probe(GPT(tiny_config(attn=attn, vocab_size=257)), fox, MACHINE, 5)["mean"]
            for attn in ("softmax", "elastic")}
    close(seen["softmax"]["sink"] + seen["softmax"]["density"], 1, terms=4, dtype=torch.float32)
    assert seen["softmax"]["sparsity"] == 0
    below(0.2, seen["elastic"]["sparsity"])
    below(seen["elastic"]["row_mass"], 0.2)


@pytest.mark.parametrize("window", [0, 7])
def test_rows_without_a_preference_are_uniform(window, fox):
    """With a window, rows that do not see the first token count with weight 0 on it."""
    gpt = GPT(tiny_config(vocab_size=257, block_size=50, window=window))
    with torch.no_grad():
        gpt.transformer.h[0].attn.c_attn.weight[:16] = 0                # queries of 0
    mean = probe(gpt, fox, MACHINE, 4)["mean"]
    close([mean["dispersion"], mean["times_uniform"]], [1, 1], terms=16, dtype=torch.float32)
    close(mean["sink"], mean["uniform"], terms=4, dtype=torch.float32)


@pytest.mark.parametrize("attn", ["softmax", "lazy", "sink", "tda"])
def test_memory_is_linear_in_length(attn, fox):
    """Eight times as many tokens take eight times the memory. If it were quadratic, they would take 64 times."""
    gpt = GPT(tiny_config(attn=attn, vocab_size=257, block_size=2048)).eval()
    short, long = (MACHINE.peak_memory(lambda T=T: probe(gpt, fox, MACHINE, 1, 1, length=T)) for T in (256, 2048))
    below(long, 20 * short)


# --------------------------------------------------------------------------------------------------------- the command


def test_the_json_holds_every_layer_and_head(probed):
    found = probed("--windows=3")
    assert found["windows"] == 3 and found["length"] == 16 and len(found["layers"]) == 1
    assert found["mean"].keys() == found["layers"][0].keys() == MEASURES.keys() and len(found["layers"][0]["sink"]) == 2
    assert [len(place["positions"]) for place in found["stream"]] == [10, 2] and "cos_qk" in found["stream"][0]


@pytest.mark.parametrize("flags, count", [
    ((), 100), (["--length=256"], 100), (["--length=1024"], 25), (["--length=30000"], 1), (["--windows=3"], 3),
    (["--windows=0"], 0)])
def test_the_default_number_of_windows_falls_with_their_length(flags, count, elastic_run, monkeypatch):
    asked = []
    monkeypatch.setattr(eval_script.probe, "probe", lambda *args, **kwargs: asked.append(args[3]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eval_script.main(["probe", f"--out_dir={elastic_run}", "--device=cpu", *flags])
    assert asked == [count]


def test_several_lengths_have_a_line_each(probed, printed):
    found = probed("--lengths=16,4,8", "--windows=5")
    assert [line["length"] for line in found["lengths"]] == [4, 8, 16] and found["length"] == 16
    for line in found["lengths"]:
        alone = probed(f"--length={line['length']}", "--windows=5")
        same({name: line[name] for name in MEASURES}, alone["mean"])
        same([line["massive"], line["windows"]], [max(place["massive"] for place in alone["stream"]), 5])
    said = printed("--lengths=4,16", "--windows=5")
    assert_says(r"length +sink +share", said)
    assert_says(r"\n +4 +0\.\d+(.*\n)  +16 +0\.\d+", said)


def test_k_and_eps_are_those_of_sink_eps(probed, printed):
    found = probed("--windows=4", "--k=2", "--eps=0")
    assert found["mean"]["sink_eps"] == 1 and found["k"] == 2
    assert probed("--windows=4", "--eps=1")["mean"]["sink_eps"] == 0
    assert "Sink_2^0.05" in printed("--windows=2", "--k=2", "--eps=0.05")


def test_the_model_reads_the_chosen_input(elastic_run, probed, monkeypatch):
    read = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda gpt, idx: read.append(idx) or forward(gpt, idx))
    for kind in ("data", "repeat", "random", "bos", "random"):
        assert probed("--windows=6", f"--input={kind}")["input"] == kind
    batches = [torch.cat(read[i:i + 2]) for i in range(0, 10, 2)]       # each in 4 and 2 windows
    data, repeated, random, after, again = batches
    assert (repeated == data[:, :1]).all() and len(set(data[:, 0].tolist())) > 1
    assert (after[:, 0] == 256).all() and torch.equal(after[:, 1:], data[:, :-1])
    assert torch.equal(random, again) and len(random.unique()) > 60 and random.max() < 257
    assert not torch.equal(random[:2], random[4:])


def test_random_input_of_symbols(backcopy, tmp_path):
    train_here("--preset=lab", f"--dataset={backcopy}", f"--out_dir={tmp_path}", "--max_iters=2")
    eval_script.main(["probe", f"--out_dir={tmp_path}", "--device=cpu", "--windows=2", "--input=random"])


# ---------------------------------------------------------------------------------------------------------- the picture


@pytest.mark.parametrize("flags", [(), ("--lengths=4,8,16",)])
def test_a_picture_shows_every_layer_and_head(flags, printed, tmp_path):
    assert "sink" in printed("--windows=2", f"--png={tmp_path}/x.png", *flags)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
