"""The tables that eval.py probe prints."""
from types import SimpleNamespace

from conftest import assert_says

from evals.measures import MEASURES
from evals.probe_view import number, tables, tell


def place(**more):
    """The result of a Stream after the last layer."""
    positions = {"hidden_norm": [8.0, 2.0], "hidden_var": [9.0, 0.0]}
    return {"massive": 4.0, "largest": 5.0, "spread": 3.0, "at": 0, "at_share": 0.75, "median": 0.5,
            "channels": [[7, -1234.5, 2469.0], [2, 1.5, 3.0]], "hidden_norm": [8.0, 2.0], "hidden_var": [9.0, 0.0],
            "positions": positions} | more


def found(**more):
    """Two layers of three heads with known sinks. All other measures are 0 or None."""
    layer = dict.fromkeys(MEASURES, [0.0] * 3) | {"peak_a": [None] * 3}
    layers = [layer | {"sink": [0.1, 0.7, 0.4], "peak": [0.2, 0.9, 0.1]}, layer | {"sink": [0.0, 0.0, 0.3]}]
    mean = dict.fromkeys(MEASURES, 0.0) | {"sink": 0.25, "peak": 0.2, "peak_a": None}
    return {"windows": 4, "length": 256, "dataset": "books", "split": "val", "input": "data", "k": 1, "eps": 0.3,
            "mean": mean, "layers": layers, "stream": [place(), place(cos_qk=0.5, cos_kk=-0.25), place()]} | more


def parts(*args, heads=False, layer=-1, **more):
    return [text for _, text, _ in tables(found(**more), heads, layer)]


def test_each_layer_has_a_line_with_its_strongest_head():
    about, weights, stream = parts()
    assert_says(r"4 windows of 256 tokens of books \(val\), --input=data\nan even spread puts 0.0000", about)
    assert_says(r"sink_eps is Sink_1\^0.3", about)
    header, first, second, mean = weights.splitlines()[:4]
    assert header.split() == ["layer", "sink", "top", "share", "row_mass", "peak"]
    assert first.split() == ["0", "0.4000", "0.70", "(1)", "0.0000", "0.0000", "0.9000"]
    assert second.split() == ["1", "0.1000", "0.30", "(2)", "0.0000", "0.0000", "0.0000"]
    assert mean.split() == ["mean", "0.2500", "-", "0.0000", "0.0000", "0.2000"]


def test_measures_that_are_zero_everywhere_are_listed_and_missing_ones_are_not():
    weights = parts()[1]
    assert_says("0 everywhere: times_uniform, .*sparsity", weights)
    assert "peak_a" not in weights and "uniform," not in weights.replace("times_uniform,", "")
    layers = [layer | {"row_mass": [1.0] * 3, "uniform": [i / 2] * 3} for i, layer in enumerate(found()["layers"])]
    about, weights, _ = parts(layers=layers, mean=found()["mean"] | {"row_mass": 1.0})
    assert "even spread" not in about and weights.endswith("1 everywhere: row_mass")
    assert weights.split()[4] == "uniform" and "row_mass" not in weights.splitlines()[0]


def test_several_runs_share_one_legend():
    text = tell(SimpleNamespace(heads=False, layer=-1), {"out/a": found(), "out/b": found()})
    assert text.startswith("out/a\n\n4 windows") and text.count("4 windows") == 2
    assert text.count("first token, mean over queries") == text.count("mean cosine of the later keys") == 1
    assert "out/a" not in tell(SimpleNamespace(heads=False, layer=-1), {"out/a": found()})


def test_each_head_has_a_line():
    lines = parts(heads=True)[1].splitlines()
    assert lines[0].split() == ["layer.head", "sink", "share", "row_mass", "peak"]
    assert [line.split()[:2] for line in lines[1:8]] == [
        ["0.0", "0.1000"], ["0.1", "0.7000"], ["0.2", "0.4000"], ["1.0", "0.0000"], ["1.1", "0.0000"],
        ["1.2", "0.3000"], ["mean", "0.2500"]]


def test_the_stream_has_a_line_more_than_layers_and_dashes_for_missing_values():
    lines = parts()[2].splitlines()
    assert lines[1].split()[:8] == ["0", "8.00", "/", "2.00", "4.00", "5.00", "0", "(0.75)"]
    assert "7:-1234 2:1.50" in lines[1] and "2469" in lines[1] and lines[2].split()[-3:] == ["0.50", "-0.25", "3.00"]
    assert lines[3].split()[0] == "end" and lines[3].split()[-8:] == ["-"] * 7 + ["3.00"]       # rest: variance 0


def test_the_positions_of_one_layer_are_shown():
    text = parts(layer=1)[3]
    assert_says("layer 1 by position", text)
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["position", "hidden_norm", "hidden_var"], ["0", "8", "9"], ["1", "2", "0"], ["rest", "2", "0"]]


def test_each_length_has_a_line():
    lengths = [{"length": T, "windows": 3, "massive": 7.5, **found()["mean"]} for T in (64, 256)]
    about, table = parts(lengths=lengths)
    assert [line.split()[0] for line in table.splitlines()[:3]] == ["length", "64", "256"]
    assert "massive" in table.splitlines()[0] and "7.5000" in table


def test_numbers_have_two_decimals_below_a_hundred():
    assert [number(x) for x in (None, 0.123, -5.0, 99.4, 123.4, -2e4)] == "- 0.12 -5.00 99.40 123 -20000".split()
