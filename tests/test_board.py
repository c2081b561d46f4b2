"""eval.py board: rates, seeds, failures and rows that stay; what its tables say of rows that are known."""
import json
import re

import numpy as np
import pytest
from bounds import below
from conftest import ROOT, run

from attention import ATTENTIONS
from evals import board_page
from evals.board import FIGURES, Board, add_costs, check_text, runs_of


@pytest.mark.exhaustive
def test_each_recipe_takes_its_best_rate_and_a_failed_run_is_a_row_with_its_reason(tmp_path, data, monkeypatch):
    small = "--n_layer=1 --n_head=1 --n_embd=16 --max_iters=3 --eval_interval=3 --eval_iters=1 --batch_size=4"
    text = run("eval.py", "board", "--attn=softmax,diff", "--seeds=2", "--also=steps-500,ladder-208-lower", "--json",
               f"--out_dir={tmp_path}", f"--train_args={small} --dataset={data} --device=cpu").stdout
    lines, table = (tmp_path / "board.json").read_text().splitlines(), json.loads(text)["table"]
    rows = {(row["recipe"], row["setup"], row["seed"]): row for row in json.loads("".join(lines))}
    trials = {rate: rows["softmax", f"board-{rate}", 1]["val"] for rate in Board.rates.split(",")}
    best = min(trials, key=trials.get)
    found, place = rows["softmax", f"board-{best}", 2], tmp_path / f"softmax@board-{best}-2"
    assert len(lines) == len(rows) + 2 and all(isinstance(found[column], float) for column in FIGURES)
    loss = json.loads(run("eval.py", "loss", f"--out_dir={place}", "--json").stdout)["bits_per_byte"]
    assert found["bits"] == table["softmax"]["bits"] == float(f"{loss:.6g}") and found["steps"] == 3
    assert rows["softmax", "steps-500", 2]["rate"] == best
    assert float(rows["softmax", "ladder-208-lower", 2]["rate"]) < float(best)
    assert rows["softmax", "cost", 0]["speed"] == 1 and rows["diff", "cost", 0]["kib"] > 0
    assert "pairs heads" in rows["diff", "board-2e-3", 2]["failed"] and "diff" not in table      # it needs two
    monkeypatch.setitem(ATTENTIONS, "nothing", {})                      # known here, unknown to the command
    add_costs(["softmax", "nothing"], costs := {})                      # a recipe that fails stops no other
    assert costs["softmax", "cost", 0]["kib"] > 0 and "unknown" in costs["nothing", "cost", 0]["failed"]


def table_of(rows):
    return board_page.table_of(board_page.by_seed(rows, lambda name, setup: "4e-3"), rows)


def law(flops):                                 # bits of a made-up softmax
    return 3 * flops ** -0.1


@pytest.fixture
def rows():
    """Softmax follows a law of compute. A step of elastic takes twice as long, and does as much as two of softmax."""
    found = {}
    for setup, parameters, steps in (("board-4e-3", 8, 1000), ("steps-500", 8, 500), ("steps-2000", 8, 2000),
                                     ("ladder-48", 1, 100), ("ladder-80", 3, 400)):
        for seed in (2, 3):
            row = {"parameters": parameters, "steps": steps, "sink": 0.4, "density": 0.6, "rate": "4e-3"}
            found["softmax", setup, seed] = row | {"bits": law(parameters * steps) + seed}
            if not setup.startswith("steps"):
                found["elastic", setup, seed] = row | {"density": 0.1, "bits": law(2 * parameters * steps) + seed}
    costs = {("softmax", "cost", 0): {"speed": 1, "kib": 64}, ("elastic", "cost", 0): {"speed": 0.5, "kib": None}}
    ignored = {"bits": 0.0}                     # not its best rate; the seed that chose the rate
    return found | costs | {("elastic", "board-8e-3", 2): ignored, ("elastic", "board-4e-3", 1): ignored}


def test_differences_are_paired_by_seed_at_equal_tokens_and_at_equal_time(rows):
    table = table_of(rows)
    assert [*table] == ["elastic", "softmax"] and table["elastic"]["kib"] is None
    assert table["elastic"]["over softmax"] == pytest.approx([law(16_000) - law(8000)] * 2)
    assert table["elastic"]["equal time"] == pytest.approx([0, 0], abs=1e-9)
    assert [table[name]["family"] for name in ("softmax", "elastic")] == ["rows sum to 1", "rows of any sum"]
    assert board_page.softmax_after(2, {0.5: {1: 1}, 1: {0: 3, 1: 0}, 4: {0: 2, 1: 4}}) == pytest.approx({0: 2.5, 1: 1})
    slower = rows | {("elastic", "cost", 0): {"speed": 0.4, "kib": None}}               # 2,500 steps: nobody knows
    assert table_of(slower)["elastic"]["equal time"] is None
    elsewhere = {key: row | {"data_hash": "other"} if key[0] == "elastic" else row for key, row in rows.items()}
    assert [*table_of(elsewhere)] == ["softmax"]                        # another text, another question
    with pytest.raises(ValueError, match="elastic is on another text"):
        check_text([("elastic", "board-4e-3", 2)], rows | {("softmax", "board-4e-3", 2): {"data_hash": "ours"},
                                                           ("elastic", "board-4e-3", 2): {"data_hash": "other"}})
    alone = {("elastic", "board-4e-3", 4): rows["elastic", "board-4e-3", 2] | {"bits": 9}}
    assert table_of(rows | alone) == table  # softmax has no run of this seed
    assert [*table_of({("gone", *key[1:]): row for key, row in rows.items()} | rows)] == ["elastic", "softmax"]
    assert [board_page.family(name, {}) for name in ("hybrid", "tda-0.3")] == ["a state", "two views"]


def test_words_stand_beside_bytes_and_the_times_of_different_layers_add_up(rows):
    words = {(name, "words", seed): {"bits": bits + seed, "rate": "4e-3"}
             for name, bits in (("softmax", 1.5), ("elastic", 1.25)) for seed in (2, 3)}
    found = board_page.words_of(board_page.by_seed(rows | words, lambda name, setup: "4e-3"), table_of(rows))
    assert [*found] == ["elastic", "softmax"] and found["elastic"]["over softmax"] == (-0.25, -0.25)
    assert found["elastic"]["over softmax in bytes"] == table_of(rows)["elastic"]["over softmax"]
    rows["gated_deltanet", "cost", 0] = {"setup": "cost", "seed": 0, "speed": 0.25, "kib": 16}
    # three of its layers take four times as long as softmax's, one as long
    assert board_page.cost_of("hybrid", rows) == pytest.approx({"speed": 4 / 13, "kib": 28})
    assert board_page.cost_of("t5-index", rows) == board_page.cost_of("t5", rows) == {}


def test_the_ladder_finds_the_exponent_of_a_power_law(rows):
    exact = {key: row | {"bits": law(row["parameters"] * row["steps"])} for key, row in rows.items() if "steps" in row}
    ladder = board_page.ladder_of(board_page.by_seed(exact, lambda name, setup: "4e-3"))
    assert ladder["softmax"]["slope"] == pytest.approx([-0.1, -0.1]) and ladder["softmax"]["2.1M"] is None
    assert ladder["elastic"]["slope over softmax"] == pytest.approx([0, 0])
    compute, bits, over = ladder["elastic"]["0.3M"]
    assert (compute, bits, over) == pytest.approx((6e-12 * 3 * 400 * 2048, law(1200), 0))
    small = {key: row for key, row in exact.items() if key[1].startswith("ladder-")}
    lower = {(name, "ladder-80-lower", seed): rows[name, "ladder-80", seed] | {"bits": bits, "rate": "2e-3"}
             for seed in (2, 3) for name, bits in (("softmax", 9), ("elastic", 0.5))}
    for group, bits, rate in (lower, 0.5, "2e-3"), (dict([*lower.items()][:-1]), law(1200), "4e-3"):    # all or nothing
        row = board_page.ladder_of(board_page.by_seed(small | group, lambda name, setup: (
            "2e-3" if setup.endswith("-lower") else "4e-3")))["elastic"]
        assert row["0.3M"][1:] == pytest.approx((bits, bits - law(1200))) and row["rate"] == rate


def test_students_t_is_that_of_the_tables():
    for degrees, t in ((1, 12.70620), (2, 4.30265), (9, 2.26216), (30, 2.04227)):
        below(abs(board_page.quantile(degrees) - t), 2e-5)
    assert board_page.interval([3, 5]) == pytest.approx((4 - 12.70620, 4 + 12.70620), rel=1e-5)


def test_words_are_for_softmax_and_ten_others():
    names = [*"abc", "softmax", *"defghijkl"]
    assert [name for name, _, _ in runs_of("words", names, names, [2])] == ["softmax", *"abcdefghij"]


def test_the_pages_get_their_tables_and_pictures(rows, tmp_path, monkeypatch):
    for page in ("README.md", "docs/board.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        marks = re.findall("<!-- .* -->\n\n", (ROOT / page).read_text())
        (tmp_path / page).write_text("end\n".join(f"{mark}|old|\n\n" for mark in marks) + "end\n")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(board_page, "ROOT", tmp_path)
    full = {key: dict.fromkeys(board_page.MEANINGS, 0.5) | row if "bits" in row else row for key, row in rows.items()}
    runs = board_page.by_seed(full, lambda name, setup: "4e-3")
    board_page.write_pages(table_of(full), board_page.ladder_of(runs), board_page.words_of(runs, {}))
    readme = (tmp_path / "README.md").read_text()
    assert "old" not in readme and readme.index("`elastic`") < readme.index("`softmax`") < readme.index("end")
    assert np.all([image.stat().st_size > 10_000 for image in (tmp_path / "results").glob("*.png")])
