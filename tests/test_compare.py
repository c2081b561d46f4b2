"""eval.py compare: seeds share a row, losses are ranked, and --anyway compares runs of different budgets."""
import math
import shutil

import pytest
import torch
from bounds import close, same
from conftest import complain, meta, train_here

import eval as eval_script
from common import files
from evals import compare
from evals.compare import COLUMNS, Compare, cell, groups_of, mark, tell

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


def test_a_cell_shows_the_mean_and_the_sample_standard_deviation():
    group = [numbers(loss=loss) for loss in (1.0, 2.0, 4.0)]
    assert cell("loss", group) == f"{7 / 3:.4f} ± {math.sqrt(7 / 3):.4f}"              # the variance is 7 / 3 as well
    assert cell("loss", group[:1]) == "1.0000" and cell("parameters", group) == "1,000"
    for found in group:
        found["bits per byte"] = None
    assert cell("bits per byte", group) == "-"


@pytest.mark.parametrize("md, best, second, other", [(True, "**1**", "<u>2</u>", "3"), (False, "1 **", "2 * ", "3   ")])
def test_the_best_and_the_second_best_loss_are_marked(md, best, second, other):
    rows, alone = [["a", "1", "1", "x"], ["b", "1", "2", "x"], ["c", "1", "3", "x"]], [["a", "1", "1"]]
    mark(rows, ["loss", "sink"], md)
    assert rows == [["a", "1", best, "x"], ["b", "1", second, "x"], ["c", "1", other, "x"]]
    mark(alone, ["loss"], md)
    assert alone == [["a", "1", "1"]]


@pytest.mark.parametrize("losses, says", [
    ([(2.0, 2.02), (2.01, 2.03)], "closer than two standard deviations"), ([(2.0, 2.001), (2.3, 2.301)], None),
    ([(2.0,), (2.3,)], "one seed says little")])
def test_the_text_says_whether_the_seeds_separate_the_recipes(losses, says):
    text = tell(Compare(), {(attn, seed): numbers(attn, seed, loss) for attn, group in zip(
        ("elastic", "softmax"), losses, strict=True) for seed, loss in enumerate(group)})
    for sentence in ("closer than two standard deviations", "one seed says little"):
        assert (sentence in text) == (sentence == says)
    assert text.index("elastic") < text.index("softmax")                # the best is first


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Two seeds of softmax and one of elastic."""
    out = tmp_path_factory.mktemp("compare")
    for name, flags in (("softmax-0", ["--attn=softmax", "--seed=0"]), ("softmax-1", ["--attn=softmax", "--seed=1"]),
                        ("elastic", ["--attn=elastic", "--seed=0"])):
        train_here(f"--dataset={data}", f"--out_dir={out / name}", *flags)
    return out


def call(*flags):
    eval_script.main(["compare", "--device=cpu", "--windows=4", "--probe_windows=2", *map(str, flags)])


def test_two_seeds_of_one_recipe_share_a_row(runs, capsys):
    call(f"--out_dir={runs}/*", "--md")
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line for line in said[2:4]}
    assert said[0].startswith("| recipe | runs | loss |") and rows.keys() == {"softmax", "elastic"}
    assert rows["softmax"].startswith("| softmax | 2 |") and "±" in rows["softmax"]
    assert f"{8 * 4 * 16:,}" in said[2] and "one seed says little" in "\n".join(said)
    assert "**" in said[2] and "<u>" in said[3] and said[-1].startswith("sink: weight on the first token")


def test_its_numbers_equal_those_of_loss_and_probe(runs, evaluate):
    flags = (f"--out_dir={runs}/softmax-1",)
    found = evaluate("compare", *flags, "--windows=4", "--probe_windows=2")
    loss, probed = evaluate("loss", *flags, "--windows=4"), evaluate("probe", *flags, "--windows=2")["mean"]
    close([found[name] for name in ("loss", "bits per byte", "perplexity")],
          [loss["loss"], loss["bits_per_byte"], math.exp(loss["loss"])], dtype=torch.float32)
    for name in (*compare.PROBED, "uniform"):
        close(found[name], probed[name], dtype=torch.float32)
    same([found[name] for name in ("seed", "tokens", "parameters")], [1, 512, meta(runs / "softmax-1")["parameters"]])


def test_runs_of_different_budgets_are_compared_with_anyway_alone(runs, tmp_path, capsys):
    other, changed = shutil.copytree(runs / "softmax-0", tmp_path / "other"), meta(runs / "softmax-0")
    files.write_json(other / "meta.json", changed | {
        "losses": changed["losses"] | {"step": 4}, "knobs": changed["knobs"] | {"max_iters": 4}})
    flags = f"--out_dir={runs}/softmax-0,{other}"
    assert "--anyway" in complain(eval_script.main, capsys, "compare", flags, "--device=cpu")[1]
    call(flags, "--anyway")
    assert "softmax --max_iters=4" in capsys.readouterr().out
