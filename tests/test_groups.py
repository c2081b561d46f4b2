"""eval.py groups: measures of a run's groups, agreement of labellings, printed text and
pictures."""

import itertools

import numpy as np
import pytest
import torch
from bounds import close
from conftest import train_here
from hypothesis import given
from hypothesis import strategies as st
from layers import in_every_layer

import eval as eval_script
from data import tokens
from evals.groups import agreement
from evals.instrument import load_run


@pytest.fixture(scope="module")
def focus_run(tmp_path_factory, data):
    out = tmp_path_factory.mktemp("runs") / "focus"
    train_here(f"--dataset={data}", f"--out_dir={out}", "--attn=focus", "--window=4", "--n_layer=2")
    return out


@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 999))
def test_agreement_is_the_largest_share_that_a_renaming_of_the_groups_makes_equal(K, T, seed):
    dice = np.random.default_rng(seed)
    one = dice.integers(K, size=(2, T))
    other = np.where(
        dice.random((2, T)) < 0.6, dice.permutation(K)[one], dice.integers(K, size=(2, T))
    )
    names = map(np.array, itertools.permutations(range(K)))
    close(agreement(one, other, K), max((name[one] == other).mean() for name in names))


def test_the_numbers_equal_those_from_each_layers_shares(
    evaluate, focus_run, data, tmp_path, capsys
):
    """Compared with itself, a run has stability 1."""
    flags = (
        "groups",
        f"--out_dir={focus_run}",
        f"--against={focus_run}",
        "--windows=5",
        "--batch_size=2",
    )
    found = evaluate(*flags)
    split = tokens.Tokens(data, "val")
    idx = torch.from_numpy(split.windows(tokens.fixed_windows(split, 16, 5), 16, 257))
    each = in_every_layer(
        lambda module, q, k, v, x, table: module.assign(x), load_run(focus_run, "cpu")[0], idx
    )
    far = torch.ones(16, 16, dtype=torch.bool).tril(-4)
    for layer, g in zip(found["layers"], each, strict=True):
        shares = torch.bincount(g.argmax(-1).flatten(), minlength=4).double() / (5 * 16)
        close([*layer["shares"], layer["dominance"]], [*shares.tolist(), shares.max().item()])
        assert layer["stability"] == 1
        close(layer["evenness"], -shares.xlogy(shares).sum() / np.log(4))
        close(layer["confidence"], g.double().amax(-1).mean(), dtype=torch.float32)
        for k, kept in layer["kept"].items():  # the share of distant pairs with a group in common
            member = torch.zeros_like(g).scatter(2, g.topk(int(k)).indices, 1)
            close(kept, (member @ member.mT > 0)[:, far].double().mean())
    close(found["mean"]["dominance"], np.mean([layer["dominance"] for layer in found["layers"]]))
    shown = found["shown"]
    assert sum(count for _, count, _ in shown["tokens"][0]) <= round(
        found["layers"][shown["layer"]]["shares"][0] * 80
    )
    eval_script.main([*flags, f"--png={tmp_path / 'x.png'}", "--device=cpu"])
    assert "the most frequent tokens" in capsys.readouterr().out and (tmp_path / "x.png").exists()
