"""The report that train.py prints at the end. meta.json stores the same figures."""
import math

from bounds import below
from conftest import meta, tiny_config

from common.machine import Machine
from evals.probe import MEASURES
from evals.report import report
from model import GPT

LOSSES = ("train", "val")
OF_SOME = ("extra_eps", "peak_a", "peak_b", "sparsity_a", "sparsity_b")         # only other recipes have them
FIGURES = [*LOSSES, *(name for name in MEASURES if name not in OF_SOME)]


def test_the_report_prints_losses_measures_and_a_sample(data, capsys):
    found = report(GPT(tiny_config(vocab_size=257)).eval(), Machine("cpu", "float32"), str(data), 4, 4)
    said = capsys.readouterr().out
    assert list(found) == FIGURES
    below(abs(found["val"] - math.log(257)), 0.5)                       # nothing is learned yet
    assert f"{found['val']:.4f}" in said and f"{found['val'] / math.log(2):.4f}" in said        # 1 byte a token
    assert f"sink ratio {found['sink']:.4f}" in said and f"density {found['density']:.4f}" in said
    assert len(said.split("sparsity")[1]) > 200


def test_the_report_of_a_mixture_of_experts_shows_its_load(data, capsys):
    model = GPT(tiny_config(vocab_size=257, mlp="moe", n_layer=2, n_expert=5)).eval()
    found = report(model, Machine("cpu", "float32"), str(data), 4, 4)
    said = capsys.readouterr().out
    assert list(found) == [*LOSSES, "least_used_expert", "most_used_expert", *FIGURES[2:]]
    assert 0 <= found["least_used_expert"] < 0.2 < found["most_used_expert"] <= 0.5     # 0.5: every token chooses it
    assert "layer  least used expert  most used\n" in said and "an even load gives each expert 0.2000" in said


def test_ranks_other_than_the_main_one_print_nothing(data, capsys):
    machine = Machine("cpu", "float32")
    machine.rank = 1
    assert report(GPT(tiny_config(vocab_size=257)).eval(), machine, str(data), 4, 4) == {}
    assert capsys.readouterr().out == ""


def test_a_finished_run_stores_its_figures(elastic_run):
    assert list(meta(elastic_run)["report"]) == FIGURES
    assert all(map(math.isfinite, meta(elastic_run)["report"].values()))
