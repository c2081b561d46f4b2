"""eval.py heads: the summary of its measures, and the command. test_measures.py tests the measures themselves."""
import torch
from bounds import close, same
from conftest import WORDS, write_data

from evals.heads import MEASURES, Heads, compared, correlation, summary, variation


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
    assert variation(torch.zeros(3, 4)) is None and correlation(torch.ones(2, 2), torch.rand(2, 2)) is None


def test_alpha_sink_of_two_data_sets_is_compared():
    a = torch.tensor([[0.1, 0.5], [0.9, 0.3]], dtype=torch.float64)
    found = compared(a, 0.5 * a + 0.1, "other")
    close([found["correlation"], found["mean_difference"]], [1, (0.05 + 0.15 + 0.35 + 0.05) / 4])
    close(torch.tensor(found["difference"], dtype=torch.float64), 0.5 * a - 0.1)
    close(compared(a, -a, "other")["correlation"], -1)


def test_a_run_is_compared_on_another_data_set_and_its_heads_are_ablated(elastic_run, tmp_path, evaluate):
    dogs = write_data(tmp_path / "dogs", WORDS[7:3000], WORDS[3000:3400])
    found = evaluate("heads", f"--out_dir={elastic_run}", "--windows=2", f"--against={dogs}", "--cost", "--prune=0,50",
                     "--draws=2", f"--png={tmp_path}/x.png")
    assert found["maps"].keys() == found["mean"].keys() == MEASURES.keys() and found["windows"] == 2
    assert found["against"]["dataset"] == "dogs" and len(found["cost"]["changes"]) == 14
