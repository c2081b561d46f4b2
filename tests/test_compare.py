"""eval.py compare: seeds share a row, losses are ranked, and --anyway compares runs of different budgets."""
import json
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

# ------------------------------------------------------------------------------------------------------ known numbers


READ = {"dataset": "books", "split": "val", "windows": 4, "length": 16, "uniform": 0.1}


def numbers(attn="softmax", seed=0, loss=2.0, **other):
    """The figures that the command reads from a run. other: its knobs."""
    found = dict.fromkeys(COLUMNS, 0.5) | READ | {"loss": loss, "perplexity": math.exp(loss), "parameters": 1000.0,
                                                  "has_weights": attn != "ttt"}
    return found | {"attn": attn, "seed": seed, "knobs": {"attn": attn, **other}}


def test_runs_that_differ_in_the_seed_alone_are_one_recipe():
    found = {"a": numbers(seed=0), "b": numbers(seed=1)}
    found |= {f"window {width}": numbers("elastic", window=width) for width in (0, 4, 8)}
    groups = groups_of(found)
    assert list(groups) == ["softmax", "elastic --window=0", "elastic --window=4", "elastic --window=8"]
    assert [n["seed"] for n in groups["softmax"]] == [0, 1]


def test_a_recipe_is_named_with_the_flags_that_changed_it():
    found = {"a": numbers("lazy", gate="head", pos="rope+bias", rule="elastic", n_embd=64),
             "b": numbers("tra", attn_args="kappa=2", gate="none", pos="learned", rule="tra", n_embd=64),
             "c": numbers("ttt")}
    assert list(groups_of(found)) == ["lazy --gate=head", "tra --attn_args=kappa=2", "ttt (derivatives)"]


def test_a_cell_shows_the_mean_and_the_sample_standard_deviation():
    group = [numbers(loss=loss) for loss in (1.0, 2.0, 4.0)]
    assert cell("loss", group) == f"{7 / 3:.4f} ± {math.sqrt(7 / 3):.4f}"              # the variance is 7 / 3 as well
    assert cell("loss", group[:1]) == "1.0000" and cell("parameters", group) == "1,000"
    for found in group:
        found["bits per byte"] = None
    assert cell("bits per byte", group) == "-"


@pytest.mark.parametrize("md, best, second, other", [(True, "**1**", "<u>2</u>", "3"), (False, "1 **", "2 * ", "3   ")])
def test_the_best_and_the_second_best_loss_are_marked(md, best, second, other):
    rows = [["a", "1", "1", "x"], ["b", "1", "2", "x"], ["c", "1", "3", "x"]]
    mark(rows, ["loss", "sink"], md)
    assert rows == [["a", "1", best, "x"], ["b", "1", second, "x"], ["c", "1", other, "x"]]
    alone = [["a", "1", "1"]]
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


# --------------------------------------------------------------------------------------------------------------- runs


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


def test_two_seeds_of_one_recipe_share_a_row(runs, tmp_path, capsys):
    call(f"--out_dir={runs}/*", f"--png={tmp_path}/x.png")
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in said[1:3]}
    assert rows.keys() == {"softmax", "elastic"} and rows["softmax"][1] == "2" and "±" in rows["softmax"]
    assert f"{8 * 4 * 16:,}" in said[1] and "one seed says little" in "\n".join(said)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    call(f"--out_dir={runs}/*", "--md")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("| recipe | runs | loss |") and "**" in said[2] and "<u>" in said[3]
    assert said[5].startswith("4 windows of 16 tokens of ") and said[-1].startswith("sink: weight on the first token")


def test_its_numbers_equal_those_of_loss_and_probe(runs, capsys):
    call(f"--out_dir={runs}/*", "--json")
    found = json.loads(capsys.readouterr().out)[f"{runs}/softmax-1"]
    for command, pairs in (("loss", {"loss": "loss", "bits per byte": "bits_per_byte"}),
                           ("probe", {name: name for name in (*compare.PROBED, "uniform")})):
        windows = {"loss": 4, "probe": 2}[command]
        eval_script.main([command, f"--out_dir={runs}/softmax-1", "--device=cpu", "--json", f"--windows={windows}"])
        other = json.loads(capsys.readouterr().out)
        other = other.get("mean", other)
        close([found[name] for name in pairs], [other[key] for key in pairs.values()], dtype=torch.float32)
    close(found["perplexity"], math.exp(found["loss"]))
    same([found[name] for name in ("seed", "tokens", "parameters")], [1, 512, meta(runs / "softmax-1")["parameters"]])


def test_runs_of_different_budgets_are_compared_with_anyway_alone(runs, tmp_path, capsys):
    other, changed = shutil.copytree(runs / "softmax-0", tmp_path / "other"), meta(runs / "softmax-0")
    files.write_json(other / "meta.json", changed | {
        "losses": changed["losses"] | {"step": 4}, "knobs": changed["knobs"] | {"max_iters": 4}})
    flags = f"--out_dir={runs}/softmax-0,{other}"
    assert "--anyway" in complain(eval_script.main, capsys, "compare", flags, "--device=cpu")[1]
    call(flags, "--anyway")
    assert "softmax --max_iters=4" in capsys.readouterr().out
