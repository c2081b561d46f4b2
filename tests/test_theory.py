"""eval.py theory: a verdict changes if the condition of its statement is broken."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evals import theory
from mixers import focus

OVERLAP_COUNTED_TWICE = {"same group": 1, "near": 1}
CASES = {  # {statement: (its verdict, what breaks it)}
    "one view": ("holds", {"beta": 0.5}),
    "two views": ("holds", {"beta": 0.5}),
    "TRA is focused": ("holds", {"beta": 0.5}),
    "TDA is focused": ("holds", {"beta": 0.5}),
    "free sum": ("fails", {"attn": "diff2"}),
    "causal": ("fails", {"balance": "potential"}),
    "pruning gate": ("fails", {"gate": focus.log_gate}),
    "top-2 of 4": ("fails", {"K": 8}),
    "top-3 of 4": ("holds", {"count": 2}),
    "10 iterations": ("holds", {"iterations": 0}),
    "3 iterations": ("fails", {"iterations": 0, "lead": 4}),
    "merging": ("holds", {"parts": OVERLAP_COUNTED_TWICE}),
    "subtracting": ("fails", {"parts": OVERLAP_COUNTED_TWICE}),
    "sink as gate": ("holds", {"value": 1e-9}),
    "token as gate": ("fails", {"value": 0.01}),
}


@pytest.mark.parametrize("name", theory.STATEMENTS)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_a_verdict_changes_if_the_condition_of_its_statement_is_broken(name, seed):
    statement, (expected, broken) = theory.STATEMENTS[name], CASES[name]
    verdicts = []
    for condition in ({}, broken):
        number = statement.check(torch.Generator().manual_seed(seed), **condition)
        verdicts.append(theory.verdict(statement, number))
    assert verdicts == [expected, {"holds": "fails", "fails": "holds"}[expected]]


def test_the_command_prints_a_line_for_each_statement():
    found, said = theory.command(SimpleNamespace(seed=1337))
    assert {name: row["verdict"] for name, row in found["statements"].items()} == {
        name: expected for name, (expected, _) in CASES.items()
    }
    for name, row in found["statements"].items():
        assert f"{row['number']:.3g}" in said and row["meaning"] in said
        assert theory.verdict(theory.STATEMENTS[name], float("nan")) == "fails"
