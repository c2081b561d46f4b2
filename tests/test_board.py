"""eval.py board: rates, seeds, failures, and rows that stay."""
import json

import pytest
from conftest import run

from evals.board import FIGURES, RATES


@pytest.mark.exhaustive
def test_each_recipe_takes_its_best_rate_and_a_failed_run_is_a_row_with_its_reason(tmp_path, data):
    small = "--n_layer=1 --n_head=1 --n_embd=16 --max_iters=3 --eval_interval=3 --eval_iters=1 --batch_size=4"
    text = run("eval.py", "board", "--attn=softmax,diff", "--seeds=2", f"--out_dir={tmp_path}",
               f"--train_args={small} --dataset={data} --device=cpu").stdout
    lines = (tmp_path / "board.json").read_text().splitlines()
    rows = {(row["recipe"], row["rate"], row["seed"]): row for row in json.loads("".join(lines))}
    trials = {rate: rows["softmax", rate, 1]["val"] for rate in RATES}
    best = min(trials, key=trials.get)
    found, place = rows["softmax", best, 2], tmp_path / f"softmax@board-{best}-2"
    assert len(lines) == len(rows) + 2 and all(isinstance(found[column], float) for column in FIGURES)
    loss = json.loads(run("eval.py", "loss", f"--out_dir={place}", "--json").stdout)["bits_per_byte"]
    assert found["bits"] == float(f"{loss:.6g}") and f"{loss:.4f}" in text
    assert "pairs heads" in rows["diff", RATES[0], 2]["failed"] and "pairs heads" in text       # it needs two
