"""eval.py compare: seeds share a row, losses are ranked, and --anyway compares runs of different budgets."""
import math
import shutil

import pytest
import torch
from bounds import close, same
from conftest import meta, train_here

import eval as eval_script
from common import files
from evals import compare
from evals.compare import COLUMNS, Compare, groups_of, tell

READ = {"dataset": "books", "split": "val", "windows": 4, "length": 16, "uniform": 0.1}


def numbers(attn="softmax", seed=0, loss=2.0, **other):
    """The figures that the command reads from a run. other: its knobs."""
    found = dict.fromkeys(COLUMNS, 0.5) | READ | {"loss": loss, "perplexity": math.exp(loss), "parameters": 1000.0,
                                                  "has_weights": attn != "ttt"}
    return found | {"attn": attn, "seed": seed, "knobs": {"attn": attn, **other}}


def test_runs_that_differ_in_the_seed_alone_are_one_recipe_named_with_the_flags_that_changed_it():
    found = [numbers(seed=0, window=0), numbers(seed=1, window=0), numbers(seed=0, window=4),
             numbers("lazy", gate="head", pos="rope+bias", rule="elastic", n_embd=64),
             numbers("tra", attn_args="kappa=2", gate="none", pos="learned", rule="tra", n_embd=64), numbers("ttt")]
    assert {name: len(group) for name, group in groups_of(dict(enumerate(found))).items()} == {
        "softmax --window=0": 2, "softmax --window=4": 1, "lazy --gate=head": 1, "tra --attn_args=kappa=2": 1,
        "ttt (derivatives)": 1}


@pytest.mark.parametrize("losses, says, shown", [
    ([(2.0, 2.01, 2.02), (2.01, 2.02, 2.03), (9.0,) * 3], "closer than two",
     ["2.0100 ± 0.0100 **", "2.0200 ± 0.0100 * ", "9.0000 ± 0.0000   "]),
    ([(2.0, 2.001, 2.002), (2.3, 2.301, 2.302)], None, ["2.0010 ± 0.0010 **", "2.3010 ± 0.0010 * "]),
    ([(2.0,) * 3, (2.3, 2.31)], "fewer than three", ["2.0000 ± 0.0000", "2.3050"]), ([(2.0,)], None, ["2.0000"])])
def test_losses_are_ranked_and_the_text_says_whether_the_seeds_separate_the_best_two(losses, says, shown):
    recipes = ("elastic", "softmax", "lazy")[:len(losses)]
    text = tell(Compare(), {(attn, seed): numbers(attn, seed, loss) for attn, group in [*zip(
        recipes, losses, strict=True)][::-1] for seed, loss in enumerate(group)})
    for sentence in ("closer than two", "fewer than three"):
        assert (sentence in text) == (sentence == says)
    for line, attn, loss in zip(text.splitlines()[1:], recipes, shown, strict=False):
        assert line.split()[0] == attn and loss in line and line.count("*") == loss.count("*") * 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Two seeds of softmax, one of elastic, and a run that seems to have half of the budget."""
    out = tmp_path_factory.mktemp("compare")
    for attn, seed in (("softmax", 0), ("softmax", 1), ("elastic", 0)):
        train_here(f"--dataset={data}", f"--out_dir={out / attn}-{seed}", f"--attn={attn}", f"--seed={seed}")
    short, about = shutil.copytree(out / "elastic-0", out / "short"), meta(out / "elastic-0")
    files.write_json(short / "meta.json", about | {
        "losses": about["losses"] | {"step": 4}, "knobs": about["knobs"] | {"max_iters": 4}})
    return out


def test_two_seeds_of_one_recipe_share_a_row_and_with_anyway_budgets_may_differ(runs, capsys):
    eval_script.main(["compare", "--device=cpu", "--windows=4", f"--out_dir={runs}/*", "--anyway", "--md"])
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = {line.split(" | ")[0]: line for line in said[2:5]}
    assert rows.keys() == {"| softmax", "| elastic --max_iters=8", "| elastic --max_iters=4"}
    assert said[0].startswith("| recipe | runs | loss |") and f" {8 * 4 * 16:,} |" in rows["| elastic --max_iters=8"]
    assert rows["| softmax"].startswith("| softmax | 2 |") and "±" in rows["| softmax"]
    assert "**" not in said[2] and said[-1].startswith("first token, all rows: weight on the first token")


def test_its_numbers_equal_those_of_loss_and_probe(runs, evaluate):
    found, loss, probed = (evaluate(*words.split(), f"--out_dir={runs}/softmax-1") for words in (
        "compare --windows=4 --probe_windows=2", "loss --windows=4", "probe --windows=2"))
    expected = {name: probed["mean"][name] for name in (*compare.PROBED, "uniform")} | {
        "loss": loss["loss"], "bits per byte": loss["bits_per_byte"], "perplexity": math.exp(loss["loss"])}
    close({name: found[name] for name in expected}, expected, dtype=torch.float32)
    same([found[name] for name in ("seed", "tokens", "parameters")], [1, 512, meta(runs / "softmax-1")["parameters"]])
