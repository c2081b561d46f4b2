"""The data scripts on real files. Tests of public files (Tiny Shakespeare, books, the GPT-2
tokenizer)
look for them in the folder NANO_DATA or in ../shared/data. They are skipped if the files are
missing."""

import contextlib
import gzip
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import close
from conftest import (
    ROOT,
    assert_says,
    byte_pairs,
    contents,
    data_script,
    tiny_config,
    write_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

from common.machine import Machine
from data import tokens
from evals.loss import mean_loss, window_losses
from model import GPT

PUBLIC = Path(os.environ.get("NANO_DATA", ROOT.parent / "shared" / "data"))
DOCUMENTS = [f"Document {i}: " + f"word{i % 7} é " * (i * 37 % 90) for i in range(300)]
needs_public = pytest.mark.skipif(
    not (PUBLIC / "tokenizer").exists(), reason="needs public data: set NANO_DATA"
)


def ids(folder, split):
    """All ids of one split."""
    found = tokens.Tokens(folder, split)
    return found.window(0, len(found))


def write(path, content):
    """Write text, bytes or a list of documents (.jsonl) to a file, gzipped if its name ends in
    .gz."""
    if isinstance(content, list):
        content = "".join(
            json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(content)
        )
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def documents(folder, *splits):
    """The documents of these splits of a data set of bytes, cut where the data set says that they
    begin."""
    found = [tokens.Tokens(folder, split, docs=True) for split in splits or ("train", "val")]
    cut = [np.split(split.window(0, len(split)), split.documents[1:]) for split in found]
    return [[bytes(part[1:].astype(np.uint8)).decode() for part in parts] for parts in cut]


def test_stdlib_holds_out_whole_files_and_skips_tests(tmp_path):
    """As bytes. test_train.py reads Python's own library."""
    names, out = [f"package/module_{i}.py" for i in range(80)], tmp_path / "new/out"
    for name in [
        *names,
        "test/a.py",
        "package/tests/b.py",
        "idlelib/idle_test/c.py",
        "site-packages/d.py",
    ]:
        write(tmp_path / name, f"# {name}\n")
    data_script("stdlib", "--source", tmp_path, "--out_dir", out)
    train, val = documents(out)
    assert train and val and sorted(train + val) == sorted(f"# {name}\n" for name in names)
    size = sum(map(len, val))
    assert (
        tokens.read_meta(out)["shards"]["val.bin"].items()
        >= {"bytes": size, "tokens": size + len(val)}.items()
    )


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"))


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_documents_come_back_from_every_kind_of_file(tmp_path_factory, texts):
    """Except those without text, and those of rows with null."""
    folder = tmp_path_factory.mktemp("kinds")
    expected = [text for text in texts if text and not text.isspace()]
    texts.append(None)
    rows = [write(folder / name, texts) for name in ("a.jsonl", "a.jsonl.gz")]
    with contextlib.suppress(ImportError):
        import pyarrow.parquet

        for name in ("text", "body"):
            pyarrow.parquet.write_table(
                pyarrow.table({name: texts}), folder / f"{name}.parquet", row_group_size=2
            )
        rows += [folder / "text.parquet"]
        pyarrow.parquet.write_table(pyarrow.table({"text": [None, 1]}), folder / "kind.parquet")
        for path, says in (
            (folder / "body.parquet", 'no column "text"'),
            (write(folder / "a.parquet", b"PAR1"), "read"),
            (folder / "kind.parquet", 'column "text" holds int, not str.*: mend'),
        ):
            with pytest.raises(ValueError, match=says):
                list(tokens.documents(path))
    assert all(list(tokens.documents(path)) == expected for path in rows)
    for name in ("a.txt", "a.md.gz"):
        for text in expected:
            assert list(tokens.documents(write(folder / name, text))) == [text]


def test_every_readable_file_of_a_folder_becomes_documents(tmp_path):
    folder, out = tmp_path / "library", tmp_path / "out"
    for name, content in (
        ("a.txt", "Alpha.\r\n"),
        ("sub/b.md", "# Bravo é\n"),
        ("sub/c.txt.gz", "Charlie\n"),
        ("d.jsonl", ["delta", "", "echo"]),
        ("picture.png", b"\x89PNG\0\0"),
        ("empty.txt", b""),
        ("latin1.txt", b"caf\xe9"),
        (".hidden/h.txt", "hidden"),
    ):
        write(folder / name, content)
    flags = ("--tokenizer=bytes", "--out_dir", out, "--source")
    said = data_script("text", *flags, folder, "--val", "a", "sub/b.md")
    assert "5 documents in 4 files" in said and "3 files without text" in said
    assert documents(out) == [["delta", "echo", "Charlie\n"], ["Alpha.\r\n", "# Bravo é\n"]]
    before = contents(out)
    with pytest.raises(SystemExit):
        data_script("text", *flags, tmp_path / "missing")
    assert contents(out) == before  # a failed command changes nothing


@torch.no_grad()
def test_only_responses_are_targets_of_the_loss(tmp_path):
    """And the separator after them. A row without a response is left out."""
    pairs = [(f"Why {i}? é", f" So {i * 'x'}.") for i in range(1, 20)]
    rows = [json.dumps({"q": q, "a": a}) + "\n" for q, a in (*pairs, ("Why?", ""))]
    source, out = write(tmp_path / "rows.jsonl", "".join(rows)), tmp_path / "out"
    flags = ("--source", source, "--tokenizer=bytes", "--out_dir", out)
    data_script("text", *flags, "--prompt=q", "--response=a")
    train, val = (tokens.Tokens(out, split, docs=True) for split in ("train", "val"))
    ids, targets = tokens.ids_and_targets(train.windows([0], len(train), 257)[0])
    texts = [f"{q}{a}" for q, a in pairs]
    for begin, end in itertools.pairwise([*train.documents, len(train)]):
        q, a = pairs[texts.index(bytes(ids[begin + 1 : end].tolist()).decode())]
        wanted = [256, *[-1] * len(q.encode()), *a.encode()]
        assert targets[begin:end].tolist() == wanted
    gpt, machine = GPT(tiny_config(vocab_size=257)).eval(), Machine("cpu", "float32")
    losses = window_losses(gpt, val, machine, 0, 2, 16)
    stored = torch.from_numpy(val.windows(tokens.fixed_windows(val, 16, 0), 17, 257))
    ids, targets = tokens.ids_and_targets(stored)
    starts = torch.from_numpy(val.first_keys(tokens.fixed_windows(val, 16, 0), 16))
    nats = -gpt(ids[:, :-1], starts=starts)[0].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    counted = targets[:, 1:] >= 0
    expected = nats[counted].mean()
    close(torch.tensor(losses.mean()), expected, terms=64)
    # a window whose targets all have the mean loss is no deviation, however many they are
    excess = ((nats - expected) * counted).sum(1) / counted.sum(1).float().mean()
    close(torch.tensor(losses - losses.mean()), excess, size=1, terms=64)
    close(torch.tensor(mean_loss(gpt, val, machine, 0, 2)), expected, terms=64)
    assert gpt(ids[:, :-1], torch.full_like(ids[:, 1:], -1))[1] == 0


@pytest.mark.parametrize(
    "texts, share, expected",
    [
        (["x" * 100 + "tail"], 0.02, ["ail"]),
        (["long document", "brief", "another long one"], 0.02, ["brief"]),
        (DOCUMENTS, 0.2, None),
    ],
)
def test_whole_documents_are_held_out_or_the_end_of_a_single_one(tmp_path, texts, share, expected):
    """The shortest document is held out if none fits into the share."""
    source = write(tmp_path / "some.jsonl.gz", texts)
    for out in (tmp_path / "a", tmp_path / "b"):
        data_script(
            "text",
            "--source",
            source,
            "--out_dir",
            out,
            "--tokenizer=bytes",
            f"--val_share={share}",
        )
    train, val = documents(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") and expected in (None, val)
    if expected is None:
        assert sorted(train + val) == sorted(texts)
        assert train == [text for text in texts if text in set(train)]
        assert 0.15 < sum(map(len, val)) / sum(map(len, texts)) <= share


def test_shards_hold_whole_documents_in_order_and_can_be_made_in_several_calls(tmp_path):
    pages, whole, out, size = tmp_path / "pages", tmp_path / "whole", tmp_path / "out", 30011
    flags = ("--tokenizer=bytes", f"--shard_tokens={size}", "--source", pages, "--out_dir")
    for name, content in (
        ("000.jsonl", DOCUMENTS[:100]),
        ("001.jsonl.gz", DOCUMENTS[100:200]),
        *((f"002/{i}.txt", text) for i, text in enumerate(DOCUMENTS[200:205])),
        ("003.jsonl", DOCUMENTS[205:]),
        ("README.md", "not part of it"),
    ):
        write(pages / name, content)
    data_script("fineweb_edu", *flags, whole)
    shards = tokens.read_meta(whole)["shards"]
    assert [*shards] == ["val_000000.bin", *(f"train_{i:06d}.bin" for i in range(len(shards) - 1))]
    assert all(row["tokens"] >= size for row in [*shards.values()][:-1]) and len(shards) > 4
    assert sum(row["bytes"] for row in shards.values()) == sum(
        len(text.encode()) for text in DOCUMENTS
    )
    assert sum(documents(whole, "val", "train"), []) == DOCUMENTS
    for count in [*range(1, len(shards)), 0]:
        written = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
        data_script("fineweb_edu", *flags, out, f"--train_shards={count}")
        # not written again
        assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    assert contents(out) == contents(whole)


def test_a_public_file_is_fetched_once_when_it_is_read(tmp_path, monkeypatch, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    asked = []

    def fetch(*file, local_dir=None, **_):
        asked.append(file)
        if len(asked) < 3:
            raise OSError("no network")
        (path := local_dir / file[1]).parent.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path)

    monkeypatch.setattr("urllib.request.urlopen", fetch)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fetch))
    for name in ("shakespeare", "fineweb_edu"):
        with pytest.raises(SystemExit):
            data_script(name, "--tokenizer=bytes", "--out_dir", tmp_path / name)
        says = "could not be fetched .no network.: run this again, or name a .* with --source"
        assert_says(says, capsys.readouterr().err)
    flags = "--tokenizer=bytes", "--shard_tokens=9000", "--out_dir", tmp_path / name
    for count in (1, 2):
        data_script(name, *flags, f"--train_shards={count}")
    assert asked[1:] == [("HuggingFaceFW/fineweb-edu", "sample/10BT/000_00000.parquet")] * 2
    found = sum(documents(tmp_path / name, "val", "train"), [])
    assert found == DOCUMENTS[: len(found)]


@pytest.mark.parametrize("first", [0, 70_000])
def test_a_data_set_stores_the_public_models_tokenizer_that_it_uses(first, tmp_path, capsys):
    """Ids beyond 65535 are stored as well. Pages cannot be continued in another tokenizer of the
    same name."""
    model = write_tokenizer(
        tmp_path / "toy", byte_pairs(first=first), tokenizer="toy", separator=first
    )
    source, out = write(tmp_path / "many.jsonl", DOCUMENTS), tmp_path / "out"
    flags = ("--source", source, "--out_dir", out, "--shard_tokens=9000", "--tokenizer")
    data_script("fineweb_edu", *flags, model, "--train_shards=1")
    write_tokenizer(model, byte_pairs("sphinx of black quartz"), tokenizer="toy", separator=0)
    with pytest.raises(SystemExit):
        data_script("fineweb_edu", *flags, model)
    assert "other flags" in capsys.readouterr().err
    data_script("fineweb_edu", *flags, out)
    whole, coder = np.concatenate([ids(out, "val"), ids(out, "train")]), tokens.tokenizer(str(out))
    texts = [coder.decode(part[1:]) for part in np.split(whole, np.flatnonzero(whole == first))[1:]]
    assert texts == DOCUMENTS and whole.dtype == (np.uint32 if first else np.uint16)
    # tokenizer.json is left over
    data_script("text", "--source", source, "--out_dir", out, "--tokenizer=bytes")
    assert tokens.tokenizer(str(out)).name == "bytes"
    assert sorted(sum(documents(out), [])) == sorted(DOCUMENTS)


@needs_public
def test_shakespeare_has_as_many_tokens_of_gpt2_as_in_nanogpt(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(PUBLIC / "tokenizer/tiktoken_cache"))
    data_script(
        "shakespeare",
        "--source",
        PUBLIC / "text/tinyshakespeare.txt.gz",
        "--tokenizer=gpt2",
        "--out_dir",
        tmp_path,
    )
    assert [len(ids(tmp_path, split)) for split in ("train", "val")] == [301966, 36059]
    assert sum(row["bytes"] for row in tokens.read_meta(tmp_path)["shards"].values()) == 1115394
