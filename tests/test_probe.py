"""eval.py probe: inputs, lengths, precision and memory. test_measures.py tests its numbers."""

from statistics import mean

import pytest
import torch
from bounds import below, close, same
from conftest import TEXT, tiny_config

from common.machine import Machine
from data import tokens
from evals.measures import MEASURES
from evals.probe import by_position, probe
from model import GPT

MACHINE = Machine("cpu", "float32")


@pytest.fixture
def probed(elastic_run, evaluate):
    return lambda *flags: evaluate("probe", f"--out_dir={elastic_run}", *flags)


@pytest.mark.parametrize("attn", ["softmax", "tda"])
def test_memory_is_linear_in_length(attn, data):
    """Eight times as many tokens take eight times the memory. If it were quadratic, they would take
    64 times."""
    gpt = GPT(tiny_config(attn=attn, vocab_size=257, block_size=2048)).eval()
    fox = tokens.Tokens(data, "val")
    short, long = (
        MACHINE.peak_memory(lambda T=T: probe(gpt, fox, MACHINE, 1, 1, length=T))
        for T in (256, 2048)
    )
    below(long, 20 * short)


def test_means_are_over_all_layers_heads_and_windows_also_in_low_precision(data):
    fox = tokens.Tokens(data, "val")
    gpt = GPT(tiny_config(attn="kv_bias", n_layer=2, n_kv_head=1, vocab_size=257)).eval()
    found, other = (probe(gpt, fox, MACHINE, 3, batch_size) for batch_size in (3, 2))
    low = probe(gpt, fox, Machine("cpu", "bfloat16"), 3)
    for name in ("sink", "row_mass", "dispersion"):
        close(low["mean"][name], found["mean"][name], terms=4, size=1.0, dtype=torch.bfloat16)
    close(other["mean"], found["mean"], terms=4, size=4.0, dtype=torch.float32)
    for name, value in found["mean"].items():
        if value is not None:  # layers have six decimals
            close(
                value,
                mean(x for layer in found["layers"] for x in layer[name]),
                terms=1,
                size=4.0,
                dtype=torch.float32,
            )
    assert found["mean"]["peak_a"] is None


def test_several_lengths_have_a_line_each(probed):
    found = probed("--lengths=16,4", "--windows=5", "--k=2", "--eps=0")
    assert [line["length"] for line in found["lengths"]] == [4, 16] and found["length"] == 16
    for line in found["lengths"]:
        alone = probed(f"--length={line['length']}", "--windows=5", "--k=2", "--eps=0")
        same({name: line[name] for name in MEASURES}, alone["mean"])
        same(
            [line["massive"], line["windows"]],
            [max(place["massive"] for place in alone["stream"]), 5],
        )
    assert found["mean"]["sink_eps"] == 1 and found["k"] == 2  # those of Sink_k^eps
    assert probed("--windows=4", "--eps=1")["mean"]["sink_eps"] == 0


def test_the_model_reads_the_chosen_input(probed, monkeypatch):
    read = {}
    forward = GPT.forward
    for kind in ("data", "repeat", "random", "bos", "random "):  # the second time the same
        rows = read[kind] = []
        monkeypatch.setattr(
            GPT,
            "forward",
            lambda gpt, idx, starts, rows=rows: rows.extend(idx) or forward(gpt, idx),
        )
        probed("--windows=6", f"--input={kind.strip()}")
    data, repeated, random, after, again = map(torch.stack, read.values())
    assert (repeated == data[:, :1]).all() and len(data[:, 0].unique()) > 1
    assert (after[:, 0] == 256).all() and torch.equal(after[:, 1:], data[:, :-1])
    assert torch.equal(random, again) and len(random.unique()) > 60


@pytest.mark.parametrize("kind", ["data", "repeat"])
def test_a_sentence_is_read_like_a_window_and_its_tokens_are_listed(kind, probed):
    text = (TEXT * 300)[20000:20020]  # the first held-out tokens
    found = probed(f"--text={text}", f"--input={kind}")
    same(found["mean"], probed("--length=20", "--windows=1", f"--input={kind}")["mean"])
    assert found["tokens"] == [*(text if kind == "data" else text[:1] * 20).replace(" ", "␣")]
    *_, last, rest = by_position(found["stream"][1], 1, found["tokens"]).splitlines()
    assert last.split()[:2] == ["19", found["tokens"][-1]] and rest.split()[0] == "rest"
