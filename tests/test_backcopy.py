"""data/backcopy.py, the sink lab's data: sequences follow the stored tables, and the seed
determines them."""

import numpy as np
import torch
from bounds import below, close
from conftest import data_script, meta

from data import tokens


def make(folder, *flags):
    """Make a small data set of the task in this folder."""
    data_script(
        "backcopy", f"--out_dir={folder}", "--sequences=3000", "--val_sequences=300", *flags
    )
    return folder


def sequences(folder, split="train"):
    """(N, length + 1) ids."""
    ids = np.array(tokens.read_shard(folder / f"{split}.bin")).astype(np.int64)
    return ids.reshape(-1, meta(folder)["stride"])


def test_sequences_begin_with_bos_triggers_copy_and_all_other_tokens_follow_the_table(tmp_path):
    folder = make(tmp_path / "backcopy")
    x = sequences(folder)
    table = np.array(meta(folder)["bigrams"])
    triggers = meta(folder)["triggers"]
    assert x.shape == (3000, 65) and len(set(triggers)) == 5
    assert (x[:, 0] == 64).all() and x[:, 1:].max() < 64
    close(table.sum(1), np.ones(66))
    copies = np.isin(x[:, 1:-1], triggers) & (x[:, :-2] < 64)
    below(0.03, copies.mean())
    assert (x[:, 2:][copies] == x[:, :-2][copies]).all()
    counts = np.zeros((66, 64))
    np.add.at(counts, (x[:, 0], x[:, 1]), 1)
    np.add.at(counts, (x[:, 1:-1][~copies], x[:, 2:][~copies]), 1)
    expected = table * counts.sum(1, keepdims=True)
    large = expected > 20  # nearly normal counts: allow ten standard errors
    assert large.sum() > 500
    error = np.abs(counts - expected)[large]
    below(torch.tensor(error), torch.tensor(10 * np.sqrt(expected * (1 - table))[large]))


def test_the_seed_determines_the_sequences_also_without_bos_and_with_a_fixed_token(tmp_path):
    flags = ("--length=20", "--no_bos", "--fixed_at=4", "--sequences=50", "--val_sequences=50")
    a = make(tmp_path / "a", "--seed=1", *flags)
    b = make(tmp_path / "b", "--seed=1", *flags)
    c = make(tmp_path / "c", "--seed=2", *flags)
    x = sequences(a)
    assert meta(a)["shards"] == meta(b)["shards"]
    assert (x != sequences(c)).any() and (x != sequences(a, "val")).any()
    assert x.shape == (50, 21) and (x[:, 4] == 65).all()
    assert np.delete(x, 4, 1).max() < 64 and len(set(x[:, 0])) > 10
