"""eval.py board: rates and runs that count, tables of known rows, the pages' tables."""

import json

import pytest
from bounds import below
from conftest import ROOT, meta

import eval as eval_script
from evals import board
from evals.board import cell, cost_of, draw, interval, quantile, read_rows, table_of


@pytest.mark.exhaustive
def test_each_recipe_takes_its_best_rate_and_a_failure_stops_no_other(
    tmp_path, data, monkeypatch, capsys, evaluate
):
    small = (
        "--n_layer=1 --n_head=1 --n_embd=16 --max_iters=3 --eval_interval=3 "
        "--eval_iters=1 --device=cpu"
    )
    flags = [
        "board",
        "--attn=diff",  # and softmax, to compare with
        "--seeds=2",
        "--rates=2e-3,0.9",
        "--json",
        f"--out_dir={tmp_path}",
        f"--dataset={data}",
        f"--train_args={small}",
    ]
    eval_script.main(flags)
    said, rows = capsys.readouterr(), read_rows(tmp_path / "board.json")
    table = json.loads(said.out)["table"]
    assert "pairs heads" in said.err and [*table] == ["softmax"]  # diff needs two
    best = min((0.002, 0.9), key=lambda rate: rows["softmax", rate, 1]["val"])
    assert [key for key in rows if key[2]] == [
        ("softmax", 0.002, 1),
        ("softmax", 0.9, 1),
        ("softmax", best, 2),
    ]
    found, folder = rows["softmax", best, 2], tmp_path / f"softmax-{best:g}-2"
    bits = evaluate("loss", f"--out_dir={folder}")["bits_per_byte"]
    assert found["bits_per_byte"] == table["softmax"]["bits_per_byte"] == bits
    assert (
        found["sink"] == meta(folder)["report"]["sink"] and found["4x"] and found["channel_ratio"]
    )
    assert ("softmax", None, None) not in rows  # the costs of another model say nothing here
    monkeypatch.setattr(board, "SPEED", (*board.SPEED, "--repeats=1"))
    assert board.cost_row("softmax")["speed"] == 1 and board.cost_row("diff")["kib"] > 0
    monkeypatch.setattr(board, "train_if_missing", None)  # nothing is trained again
    eval_script.main([*flags, "--attn=softmax"])
    assert json.loads(capsys.readouterr().out)["table"] == table


@pytest.fixture
def rows():
    """Rows of two recipes, and rows that do not count: other rates, and recipes that are gone."""
    found = {}
    for name, bits, density, speed, kib in (
        ("softmax", 2, 0.6, 1, 64),
        ("elastic", 1.5, 0.1, 0.5, None),
        ("gone", 0, 0.6, 1, 1),
    ):
        for seed in (2, 3):
            found[name, 0.004, seed] = {
                "bits_per_byte": bits + seed,
                "sink": 0.4,
                "density": density,
                "2x": None,
            }
        found[name, 0.008, 2] = {"bits_per_byte": 0.5}
        found |= {(name, 0.004, 1): {"val": 1.0}, (name, 0.008, 1): {"val": 1.5}}
        found[name, None, None] = {"speed": speed, "kib": kib}
    return found | {("gated_deltanet", None, None): {"speed": 0.25, "kib": 16}}


def test_a_table_compares_the_runs_of_the_best_rate_by_seed(rows, tmp_path):
    table = table_of(rows)
    assert [*table] == ["elastic", "softmax"]
    assert table["elastic"] == table["elastic"] | {
        "family": "rows of any sum",
        "rate": 0.004,
        "runs": 2,
        "bits_per_byte": 4.0,
        "over softmax": (-0.5, -0.5),
        "2x": None,
        "speed": 0.5,
        "kib": None,
    }
    assert table["softmax"]["family"] == "rows sum to 1"
    rows["elastic", 0.004, 4] = rows["elastic", 0.004, 2]  # softmax has no such run
    assert table_of(rows)["elastic"]["over softmax"] == (-0.5, -0.5)
    draw(tmp_path / "board.png", {"table": table})
    assert (tmp_path / "board.png").exists()


def test_times_of_different_layers_add_up(rows):
    # three layers of hybrid take four times as long as softmax's, one as long
    assert cost_of("hybrid", rows) == pytest.approx({"speed": 4 / 13, "kib": 28})
    rows["tda", None, None] = {"speed": 0.5, "kib": 1}
    assert cost_of("tda-0.3", rows) == {"speed": 0.5, "kib": 1}
    assert cost_of("no-positions", rows) == cost_of("window", rows) == {}


def test_students_t_is_that_of_the_tables():
    for degrees, t in ((1, 12.70620), (2, 4.30265), (30, 2.04227)):
        below(abs(quantile(degrees) - t), 2e-5)
    assert interval([3, 5]) == pytest.approx((4 - 12.70620, 4 + 12.70620), rel=1e-5)


def rows_of(page, mark):
    """[(recipe, {column: cell})] of the table below a comment in a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text.split(f"<!-- {mark} python eval.py board -->\n\n")[1]
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split("\n\n")[0].splitlines()
    )
    return [
        (recipe.split("`")[1], dict(zip(head[1:], line, strict=True))) for recipe, *line in lines
    ]


@pytest.mark.parametrize(
    "page, mark, count",
    [
        ("README.md", "the first rows of", 5),
        ("docs/board.md", "some rows of", 10),
        ("results/board.md", "the base table of", None),
    ],
)
def test_the_pages_have_the_numbers_of_the_rows(page, mark, count):
    """results/board.md has all rows. The command does not compute its equal time, so the others
    must have the same."""
    table = table_of(read_rows(ROOT / "results/board.json"))
    whole = dict(rows_of("results/board.md", "the base table of"))
    rows = rows_of(page, mark)
    assert len(dict(rows)) == len(rows) == (count or len(table))
    for recipe, row in rows:
        assert row.items() <= whole[recipe].items()
        for title, shown in row.items():
            if title in table[recipe]:
                assert shown == cell(table[recipe][title]), (recipe, title)
