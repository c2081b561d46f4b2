"""The report that train.py prints at the end. meta.json stores the same figures."""
import math

import pytest
from bounds import below
from conftest import meta, tiny_config

from common.machine import Machine
from evals.probe import MEASURES
from evals.report import report
from model import GPT

OF_SOME = ("extra_eps", "peak_a", "peak_b", "sparsity_a", "sparsity_b")         # only other recipes have them
LOOK = [name for name in MEASURES if name not in OF_SOME]


@pytest.mark.parametrize("mlp", ["gelu", "moe"])
def test_the_report_prints_losses_measures_a_sample_and_the_load_of_experts_on_the_main_rank(mlp, data, capsys):
    machine, model = Machine("cpu", "float32"), GPT(tiny_config(vocab_size=257, n_layer=2, mlp=mlp, n_expert=5)).eval()
    found, said = report(model, machine, str(data), 4, 4), capsys.readouterr().out
    assert list(found) == ["train", "val", *["least_used_expert", "most_used_expert"] * (mlp == "moe"), *LOOK]
    below(abs(found["val"] - math.log(257)), 0.5)                       # nothing is learned yet
    assert f"{found['val']:.4f}" in said and f"{found['val'] / math.log(2):.4f}" in said        # 1 byte a token
    assert f"sink ratio {found['sink']:.4f}" in said and f"density {found['density']:.4f}" in said
    assert len(said.split("sparsity")[1]) > 200
    if mlp == "moe":                            # 0.5: every token chooses this expert
        assert 0 <= found["least_used_expert"] < 0.2 < found["most_used_expert"] <= 0.5
        assert "layer  least used expert  most used\n" in said and "an even load gives each expert 0.2000" in said
    machine.rank = 1
    assert report(model, machine, str(data), 4, 4) == {} and capsys.readouterr().out == ""


def test_a_finished_run_stores_its_figures(elastic_run):
    assert list(meta(elastic_run)["report"]) == ["train", "val", *LOOK]
    assert all(map(math.isfinite, meta(elastic_run)["report"].values()))
