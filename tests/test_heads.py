"""eval.py heads: measures of hand-made weights and of every recipe's weights, ablations, and the printed text."""
import json
from types import SimpleNamespace

import pytest
import torch
from bounds import close, same
from conftest import WORDS, enliven, some_recipes, tiny_config, write_data
from layers import in_every_layer, token_ids

import eval as eval_script
from attention import ATTENTIONS
from axes.outputs import sigmoid_gate
from axes.sight import Sight, visible
from common.machine import Machine
from evals.heads import MEASURES, HeadSums, Heads, compared, correlation, measure, summary, variation
from model import GPT


def hand_made(w, block=None, local=2, **traits):
    """The measures of hand-made weights (T, T) of one head, shown in blocks of rows."""
    w, sums = torch.as_tensor(w, dtype=torch.float32)[None, None], HeadSums(local)
    module = SimpleNamespace(**{
        "weight_blocks": lambda q, k, x, table: w.split(block or w.shape[2], 2), "has_extra_key": False, "ahead": 0,
        "sight": Sight(), "choices": {"gate": SimpleNamespace(gated=None)}} | traits)
    sums.see(module, *[torch.ones(1, 1, w.shape[2], 4)] * 3, None)
    return {name: value.item() for name, value in sums.result().items()}


def close_measures(found, **expected):
    """Compare measures of rows that sum to at most 1, in float32."""
    close({name: found[name] for name in expected}, expected, terms=1, size=1.0, dtype=torch.float32)


def even_rows(T):
    return torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]


@pytest.mark.parametrize("block", [None, 3, 7])
def test_measures_of_even_rows(block):
    found = hand_made(even_rows(20), block, local=5)
    first = sum(1 / n for n in range(1, 21)) / 20
    local = sum(5 / n for n in range(5, 21)) / 16                       # the 16 rows from 5 on
    close_measures(found, alpha_sink=first, importance=1 - first, alpha_local=local, sigma2=0)


@pytest.mark.parametrize("block", [None, 4])
def test_measures_of_rows_with_all_weight_on_the_first_token_or_on_themselves(block):
    # one of n keys has all the weight: ((1 - 1/n)^2 + (n - 1)/n^2) / n
    spread = sum(((1 - 1 / n) ** 2 + (n - 1) / n ** 2) / n for n in range(1, 11)) / 10
    dormant, local = hand_made(torch.eye(10)[:1].repeat(10, 1), block), hand_made(torch.eye(10), block)
    close_measures(dormant, alpha_sink=1, alpha_local=1 / 9, sigma2=spread, importance=0)
    close_measures(local, alpha_sink=0.1, alpha_local=1, sigma2=spread, importance=0.9)


def test_only_sigma2_divides_weights_by_their_sum():
    whole, tenth = hand_made(even_rows(9)), hand_made(-0.1 * even_rows(9))
    close_measures(tenth, alpha_sink=-0.1 * whole["alpha_sink"], alpha_local=-0.1 * whole["alpha_local"],
                   importance=0.1 * whole["importance"], sigma2=0)
    empty = hand_made(torch.zeros(9, 9))        # each of n keys lacks 1/n
    close_measures(empty, sigma2=sum(1 / n ** 2 for n in range(1, 10)) / 9)
    assert empty["importance"] == empty["alpha_sink"] == 0


def test_an_extra_key_is_the_sink():
    w = torch.cat([torch.full((8, 1), 0.25), 0.75 * even_rows(8)], 1)
    found = hand_made(w, has_extra_key=True)
    close_measures(found, alpha_sink=0.25, importance=0.75, sigma2=0,
                   alpha_local=0.75 * sum(2 / n for n in range(2, 9)) / 7)
    # the row of a sink token itself is not counted
    close_measures(hand_made(torch.cat([torch.eye(9)[:1], w]), 4, ahead=1), **found)


def test_sigma2_compares_with_an_even_spread_over_the_window():
    i = torch.arange(12)
    seen = visible(i[:, None], i, Sight(window=3)).float()
    close_measures(hand_made(seen / seen.sum(-1, keepdim=True), sight=Sight(window=3)), sigma2=0)


def double_measures(module, w, local):
    """The same measures of whole weights (B, H, T, T or 1 + T), computed in float64 by a loop over rows."""
    w, found = w.double(), {name: 0.0 for name in ("alpha_sink", "alpha_local", "sigma2", "importance")}
    w = w[:, :, module.ahead:]
    T = w.shape[2]
    for i in range(T):
        row, ahead = w[:, :, i], int(module.has_extra_key or module.ahead)
        real = row[..., ahead:ahead + i + 1]                            # (B, H, i + 1)
        if module.sight.window:
            places = torch.arange(module.ahead, module.ahead + i + 1)
            real = real[..., visible(torch.tensor(module.ahead + i), places, module.sight)]
        found["alpha_sink"] += row[..., 0].mean(0) / T
        found["importance"] += row[..., 1:].abs().sum(-1).mean(0) / T
        share = real.abs() / (real.abs().sum(-1, keepdim=True) + 1e-8)
        found["sigma2"] += ((share - 1 / real.shape[-1]) ** 2).mean(-1).mean(0) / T
        if i >= local - 1:
            found["alpha_local"] += row[..., ahead + i - local + 1:ahead + i + 1].sum(-1).mean(0) / (T - local + 1)
    return found


@pytest.mark.parametrize("attn", some_recipes(
    "softmax", "sink", "sink_token", "gpt_oss", "streaming", "diff", "diff2", "elastic", "gated", "tra", "identity",
    "sigmoid", "retnet"))
def test_streamed_measures_of_a_model_equal_those_of_its_whole_weights(attn):
    few = {"window": 20} if ATTENTIONS[attn].get("window") else {}
    gpt, rows = GPT(tiny_config(attn=attn, n_layer=2, block_size=140, **few)).eval(), token_ids(3, 141)
    enliven(gpt)

    def expected(module, q, k, v, x, table):
        measures = double_measures(module, module.weights_of(q, k, x, table), local=4)
        if module.choices["gate"].gated is sigmoid_gate:
            measures["importance"] = torch.sigmoid(module.gate(x)).mean((0, 1)).unflatten(0, (module.heads, -1)).mean(1)
        return measures

    found = measure(gpt, rows, Machine("cpu", "float32"), batch_size=2, local=4)
    for layer, measures in enumerate(in_every_layer(expected, gpt, rows[:, :-1])):
        for name in MEASURES:
            close(found[name][layer], measures[name], terms=4, size=max(1.0, measures["importance"].max().item()),
                  dtype=torch.float32)


def test_the_summary_of_the_measures():
    alpha = torch.tensor([[0.1, 0.2], [0.6, 0.4], [0.9, 0.8]], dtype=torch.float64)
    maps = {"alpha_sink": alpha, "alpha_local": alpha, "sigma2": alpha, "importance": 1 - alpha}
    found = summary(maps, Heads())
    late = torch.tensor([0.4, 0.6, 0.1, 0.2], dtype=torch.float64)
    close([found["dormant"], found["depth_rank_correlation"], found["mean"]["alpha_sink"], found["importance_cv_late"]],
          [0.5, 1, 0.5, late.std(correction=0) / late.mean()], terms=4)
    same([found["early"], found["maps"]["alpha_sink"]], [1, alpha.tolist()])
    assert found["importance_cv"] == variation(1 - alpha) != found["importance_cv_late"]
    close(summary(maps, Heads(threshold=0.85))["dormant"], 1 / 6)
    assert summary(maps, Heads(early=3))["importance_cv_late"] is None


def test_equal_heads_do_not_vary_and_correlate_with_nothing():
    close(variation(torch.full((3, 4), 0.7, dtype=torch.float64)), 0, terms=4, size=1.0)
    assert variation(torch.zeros(3, 4)) is None and variation(torch.ones(1, 1)) is None
    assert correlation(torch.ones(2, 2), torch.rand(2, 2)) is None


def test_alpha_sink_of_two_data_sets_is_compared():
    a = torch.tensor([[0.1, 0.5], [0.9, 0.3]], dtype=torch.float64)
    found = compared(a, 0.5 * a + 0.1, "other")
    close([found[name] for name in ("correlation", "mean_difference")], [1, (0.05 + 0.15 + 0.35 + 0.05) / 4])
    close(torch.tensor(found["difference"], dtype=torch.float64), 0.5 * a - 0.1)
    close(compared(a, -a, "other")["correlation"], -1)


# ------------------------------------------------------------------------------------------------- the command

FEW = ("--device=cpu", "--windows=2")


def test_a_run_is_compared_on_another_data_set_and_its_heads_are_ablated(elastic_run, tmp_path, capsys):
    fox = write_data(tmp_path / "dogs", WORDS[7:3000], WORDS[3000:3400])
    eval_script.main(["heads", f"--out_dir={elastic_run}", *FEW, f"--against={fox}", "--cost", "--prune=0,50",
                      "--draws=2", "--json", f"--png={tmp_path}/x.png"])
    found = json.loads(capsys.readouterr().out)
    assert found["maps"].keys() == found["mean"].keys() == MEASURES.keys()
    assert found["windows"] == 2 and len(found["maps"]["sigma2"]) == 1 and len(found["maps"]["sigma2"][0]) == 2
    assert found["against"]["dataset"] == "dogs" and len(found["cost"]["changes"]) == 14
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_for_one_run_and_for_several(elastic_run, toy_run, capsys, tmp_path):
    eval_script.main(["heads", f"--out_dir={elastic_run}", *FEW])
    one = capsys.readouterr().out
    assert all(word in one for word in ("alpha_sink", "0 of 2", "last 8 keys", "rank correlation", "eq. 7"))
    eval_script.main(["heads", f"--out_dir={elastic_run},{toy_run}", *FEW, "--cost", f"--png={tmp_path}/x.png"])
    both = capsys.readouterr().out
    assert both.count("loss as it is") == 2 and both.count("2 windows of 16 tokens of") == 2
    assert both.count("in dormant heads: no head is above 0.5") == 2
    assert str(toy_run) in next(line for line in both.splitlines() if line.startswith("over all heads"))
    assert (tmp_path / "x.png").exists()
