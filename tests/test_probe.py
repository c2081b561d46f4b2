"""eval.py probe: inputs, lengths, precision, memory, tables and pictures. test_measures.py tests its numbers."""
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from bounds import below, close, same
from conftest import tiny_config

from common.machine import Machine
from data import tokens
from evals.measures import MEASURES
from evals.probe import probe
from evals.probe_view import number, tables, tell
from model import GPT

MACHINE = Machine("cpu", "float32")


@pytest.fixture
def probed(elastic_run, evaluate):
    return lambda *flags: evaluate("probe", f"--out_dir={elastic_run}", *flags)


@pytest.mark.parametrize("attn", ["softmax", "lazy", "sink", "tda"])
def test_memory_is_linear_in_length(attn, data):
    """Eight times as many tokens take eight times the memory. If it were quadratic, they would take 64 times."""
    gpt = GPT(tiny_config(attn=attn, vocab_size=257, block_size=2048)).eval()
    fox = tokens.Tokens(data, "val")
    short, long = (MACHINE.peak_memory(lambda T=T: probe(gpt, fox, MACHINE, 1, 1, length=T)) for T in (256, 2048))
    below(long, 20 * short)


def test_means_are_over_all_layers_heads_and_windows_also_in_low_precision(data):
    fox = tokens.Tokens(data, "val")
    gpt = GPT(tiny_config(attn="kv_bias", n_layer=2, n_kv_head=1, vocab_size=257)).eval()
    found, other = (probe(gpt, fox, MACHINE, 3, batch_size) for batch_size in (3, 2))
    low = probe(gpt, fox, Machine("cpu", "bfloat16"), 3)
    for name in ("sink", "row_mass", "dispersion"):
        close(low["mean"][name], found["mean"][name], terms=4, size=1.0, dtype=torch.bfloat16)
    for place, exact in zip(low["stream"], found["stream"], strict=True):
        close(*([part[name] for name in exact["positions"]] for part in (place, exact)), terms=4, dtype=torch.bfloat16)
    for name, value in found["mean"].items():
        close(other["mean"][name], value, terms=4, size=1.0, dtype=torch.float32)
        if value is not None:                   # layers have six decimals
            close(value, mean(x for layer in found["layers"] for x in layer[name]), terms=1, size=4.0,
                  dtype=torch.float32)
    assert found["mean"]["peak_a"] is None


def test_several_lengths_have_a_line_each(probed):
    found = probed("--lengths=16,4,8", "--windows=5", "--k=2", "--eps=0")
    assert [line["length"] for line in found["lengths"]] == [4, 8, 16] and found["length"] == 16
    for line in found["lengths"]:
        alone = probed(f"--length={line['length']}", "--windows=5", "--k=2", "--eps=0")
        same({name: line[name] for name in MEASURES}, alone["mean"])
        same([line["massive"], line["windows"]], [max(place["massive"] for place in alone["stream"]), 5])
    assert found["mean"]["sink_eps"] == 1 and found["k"] == 2           # those of Sink_k^eps
    assert probed("--windows=4", "--eps=1")["mean"]["sink_eps"] == 0


def test_the_model_reads_the_chosen_input(elastic_run, probed, monkeypatch):
    read, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda gpt, idx: read.append(idx) or forward(gpt, idx))
    for kind in ("data", "repeat", "random", "bos", "random"):
        assert probed("--windows=6", f"--input={kind}")["input"] == kind
    data, repeated, random, after, again = (torch.cat(read[i:i + 2]) for i in range(0, 10, 2))   # 4 and 2 windows
    assert (repeated == data[:, :1]).all() and len(set(data[:, 0].tolist())) > 1
    assert (after[:, 0] == 256).all() and torch.equal(after[:, 1:], data[:, :-1])
    assert torch.equal(random, again) and len(random.unique()) > 60 and not torch.equal(random[:2], random[4:])


def known(**more):
    """Two layers of three heads with known sinks and a known stream. All other measures are 0 or None."""
    layer = dict.fromkeys(MEASURES, [0.0] * 3) | {"peak_a": [None] * 3}
    layers = [layer | {"sink": [0.1, 0.7, 0.4], "peak": [0.2, 0.9, 0.1]}, layer | {"sink": [0.0, 0.0, 0.3]}]
    mean = dict.fromkeys(MEASURES, 0.0) | {"sink": 0.25, "peak": 0.2, "peak_a": None}
    positions = {"hidden_norm": [8.0, 2.0], "hidden_var": [9.0, 0.0]}
    place = {"massive": 4.0, "largest": 5.0, "spread": 3.0, "at": 0, "at_share": 0.75, "median": 0.5,
             "channels": [[7, -1234.5, 2469.0], [2, 1.5, 3.0]], "positions": positions, **positions}
    return {"windows": 4, "length": 256, "dataset": "books", "split": "val", "input": "data", "k": 1, "eps": 0.3,
            "mean": mean, "layers": layers, "stream": [place, place | {"cos_qk": 0.5, "cos_kk": -0.25}, place]} | more


TABLES = """
4 windows of 256 tokens of books (val), --input=data
an even spread puts 0.0000 on the first token; sink_eps is Sink_1^0.3
layer sink top share row_mass peak
0 0.4000 0.70 (1) 0.0000 0.0000 0.9000
1 0.1000 0.30 (2) 0.0000 0.0000 0.0000
mean 0.2500 - 0.0000 0.0000 0.2000
0 everywhere: times_uniform, extra, sparsity, negative, empty_rows, dead_heads, dispersion, peak_b,
layer norm massive largest at channels x median var var_in query key value cos_qk cos_kk spread
1 8.00 / 2.00 4.00 5.00 0 (0.75) 7:-1234 2:1.50 2469 - - - - - 0.50 -0.25 3.00
layer 1 by position, means over sequences and heads position hidden_norm hidden_var 0 8 9 1 2 0 rest 2 0"""


def test_the_tables_of_known_numbers():
    def text(heads=False, layer=-1, **more):
        return " ".join(" ".join(part for _, part, _ in tables(known(**more), heads, layer)).split())

    assert all(line in text(layer=1) for line in TABLES.splitlines())
    assert "1.2 0.3000 0.0000 0.0000 0.0000 mean 0.2500" in text(heads=True)
    lengths = [{"length": 64, "windows": 3, "massive": 7.5, **known()["mean"]}]
    assert "length sink share row_mass peak massive 64 0.2500 0.0000 0.0000 0.2000 7.5000" in text(lengths=lengths)
    both = tell(SimpleNamespace(heads=False, layer=-1), {"out/a": known(), "out/b": known()})
    assert both.startswith("out/a\n\n4 windows") and both.count("4 windows") == 2
    assert both.count("first token, mean over queries") == both.count("mean cosine of the later keys") == 1
    assert [number(x) for x in (None, 0.123, 99.4, 123.4, -2e4)] == "- 0.12 99.40 123 -20000".split()
