"""The data scripts on real files. Tests of public files (Tiny Shakespeare, books, the GPT-2 tokenizer) look for them in
the folder NANO_DATA or in ../shared/data. They are skipped if the files are missing."""
import contextlib
import gzip
import io
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, byte_pairs, contents, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from data import tokens

PUBLIC = Path(os.environ.get("NANO_DATA", ROOT.parent / "shared" / "data"))
DOCUMENTS = [f"Document {i}: " + f"word{i % 7} é " * (i * 37 % 90) for i in range(300)]
needs_public = pytest.mark.skipif(not (PUBLIC / "tokenizer").exists(), reason="needs public data: set NANO_DATA")


def script(name, *flags):
    """Run a data script in this process. Returns what it prints to stdout."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [str(ROOT / "data" / f"{name}.py"), *map(str, flags)])
        runpy.run_path(sys.argv[0], run_name="__main__")
    return out.getvalue()


def ids(folder, *splits):
    """The ids of these splits of a data set, one after another."""
    found = [tokens.Tokens(folder, split) for split in splits]
    return np.concatenate([data.window(0, len(data)) for data in found])


def meta(folder):
    """meta.json, after a check that each shard has its hash and that the folder holds no other file but starts."""
    found = tokens.read_meta(folder)
    starts = {n[:-3] + "starts.bin" for n in found["shards"] if found["vocab_size"] - 1 in tokens.read_shard(folder/n)}
    assert {p.name for p in folder.iterdir()} == {"meta.json", *found["shards"], *starts}
    return found


def write(path, content):
    """Write text, bytes or a list of documents (.jsonl) to a file, gzipped if its name ends in .gz."""
    if isinstance(content, list):
        content = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(content))
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def documents(folder):
    """The documents of the two splits of a data set of bytes. They begin where the data set says."""
    for split in ("train", "val"):
        assert [0, *np.flatnonzero(ids(folder, split) == 256)] == [*tokens.Tokens(folder, split, docs=True).documents]
    return [[bytes(part[1:].astype(np.uint8)).decode() for part in np.split(found, np.flatnonzero(found == 256))[1:]]
            for found in (ids(folder, "train"), ids(folder, "val"))]


def test_stdlib_holds_out_whole_files_and_skips_tests(tmp_path):
    """As bytes. The order of files in a folder changes nothing. test_train.py reads Python's own library."""
    names, made = [f"package/module_{i}.py" for i in range(80)], []
    skipped = ["test/a.py", "package/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py"]
    for place, order in ((tmp_path / "a", names + skipped), (tmp_path / "b", skipped[::-1] + names[::-1])):
        for name in order:
            write(place / name, f"# {name}\n")
        out = place / "new" / "out"
        script("stdlib", "--source", place, "--out_dir", out)
        made.append(contents(out))
    train, val = documents(out)
    size = sum(map(len, val))
    assert meta(out)["shards"]["val.bin"].items() >= {"bytes": size, "tokens": size + len(val)}.items()
    assert made[0] == made[1] and train and val and sorted(train + val) == sorted(f"# {name}\n" for name in names)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"))


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_documents_come_back_from_every_kind_of_file(tmp_path_factory, texts):
    """Except those without text."""
    folder, expected = tmp_path_factory.mktemp("kinds"), [text for text in texts if text and not text.isspace()]
    rows = [write(folder / name, texts) for name in ("a.jsonl", "a.jsonl.gz")]
    with contextlib.suppress(ImportError):
        import pyarrow.parquet
        for name in ("text", "body"):
            pyarrow.parquet.write_table(pyarrow.table({name: texts}), folder / f"{name}.parquet", row_group_size=2)
        rows += [folder / "text.parquet"]
        for kind, value in ("int", 1), ("list", ["a"]), ("bytes", b"a"):
            pyarrow.parquet.write_table(pyarrow.table({"text": [None, value]}), folder / "kind.parquet")
            with pytest.raises(ValueError, match=f'kind.parquet cannot .*column "text" holds {kind}, not str.*: mend'):
                list(tokens.documents(folder / "kind.parquet"))
        for path, says in (folder / "body.parquet", 'no column "text"'), (write(folder / "a.parquet", b"PAR1"), "read"):
            with pytest.raises(ValueError, match=says):
                list(tokens.documents(path))
    assert all(list(tokens.documents(path)) == expected for path in rows)
    for name in ("a.txt", "a.md.gz"):
        for text in expected:
            assert list(tokens.documents(write(folder / name, text))) == [text]


def test_every_readable_file_of_a_folder_becomes_documents(tmp_path):
    folder, out = tmp_path / "library", tmp_path / "out"
    for name, content in (("a.txt", "Alpha.\r\n"), ("sub/b.md", "# Bravo é\n"), ("sub/c.txt.gz", "Charlie\n"),
                          ("d.jsonl", ["delta", "", "echo"]), ("picture.png", b"\x89PNG\0\0"), ("empty.txt", b""),
                          ("latin1.txt", b"caf\xe9"), (".hidden/h.txt", "hidden")):
        write(folder / name, content)
    many, flags = write(tmp_path / "many.jsonl", DOCUMENTS), ("--tokenizer=bytes", "--out_dir", out, "--source")
    script("fineweb_edu", *flags, many, "--shard_tokens=20000")
    first = meta(out)
    with pytest.raises(SystemExit):
        script("text", *flags, tmp_path / "missing")
    assert meta(out) == first                   # a failed command changes nothing
    (out / f".train.bin.{1 << 22}.tmp").write_bytes(b"left by a killed run")        # no process has this id
    said = script("text", *flags, folder, "--val", "a", "sub/b.md")
    assert "5 documents in 4 files" in said and "3 files without text" in said
    assert documents(out) == [["delta", "echo", "Charlie\n"], ["Alpha.\r\n", "# Bravo é\n"]]
    assert meta(out)["shards"].keys() == {"train.bin", "val.bin"}


@pytest.mark.parametrize("texts, share, expected", [
    (["x" * 100 + "tail"], 0.02, ["ail"]), (["long document", "brief", "another long one"], 0.02, ["brief"]),
    (DOCUMENTS, 0.2, None)])
def test_whole_documents_are_held_out_or_the_end_of_a_single_one(tmp_path, texts, share, expected):
    """The shortest document is held out if none fits into the share."""
    source = write(tmp_path / "some.jsonl.gz", texts)
    for out in (tmp_path / "a", tmp_path / "b"):
        script("text", "--source", source, "--out_dir", out, "--tokenizer=bytes", f"--val_share={share}")
    train, val = documents(tmp_path / "a")
    assert meta(tmp_path / "a") == meta(tmp_path / "b") and expected in (None, val)
    if expected is None:
        assert sorted(train + val) == sorted(texts) and train == [text for text in texts if text in set(train)]
        assert 0.15 < sum(map(len, val)) / sum(map(len, texts)) <= share


def test_shards_are_the_stream_cut_into_pieces_and_can_be_made_in_several_calls(tmp_path):
    pages, whole, size = tmp_path / "pages", np.concatenate([[256, *text.encode()] for text in DOCUMENTS]), 30011
    flags = ("--tokenizer=bytes", f"--shard_tokens={size}", "--source", pages, "--out_dir")
    for name, content in (("000.jsonl", DOCUMENTS[:100]), ("001.jsonl.gz", DOCUMENTS[100:200]),
                          *((f"002/{i}.txt", text) for i, text in enumerate(DOCUMENTS[200:205])),
                          ("003.jsonl", DOCUMENTS[205:]), ("README.md", "not part of it")):
        write(pages / name, content)
    assert "this is normal" in script("fineweb_edu", *flags, tmp_path / "whole")
    found = meta(tmp_path / "whole")["shards"]
    assert list(found) == ["val_000000.bin", *(f"train_{i:06d}.bin" for i in range((len(whole) - 1) // size))]
    assert found["val_000000.bin"]["tokens"] == size
    assert sum(row["bytes"] for row in found.values()) == sum(len(text.encode()) for text in DOCUMENTS)
    assert (ids(tmp_path / "whole", "val", "train") == whole).all()
    documents(tmp_path / "whole")               # checks where they begin; some continue in the next shard
    split, places = tokens.Tokens(tmp_path / "whole", "train", docs=True), np.array([0, 5, size - 9])
    for place, row in zip(places, split.first_keys(places, 3000), strict=True):
        seen = np.where(whole[size + place:][:3000] == 256, np.arange(3000), 0)
        assert (row == np.maximum.accumulate(seen)).all()
    for count in [*range(1, len(found)), 0]:
        written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
        script("fineweb_edu", *flags, tmp_path / "out", f"--train_shards={count}")
        assert len(meta(tmp_path / "out")["shards"]) == (count + 1 if count else len(found))
        assert all(path.stat().st_mtime_ns == when for path, when in written.items())        # not written again
    assert meta(tmp_path / "out")["shards"] == found


@pytest.mark.parametrize("first", [0, 70_000])
def test_a_data_set_stores_the_public_models_tokenizer_that_it_uses(first, tmp_path, capsys):
    """It needs only its own folder. Ids beyond 65535 are stored as well. Pages can be continued, but not in another
    tokenizer of the same name. Made again with bytes, it has no tokenizer.json."""
    model = write_tokenizer(tmp_path / "toy", byte_pairs(first=first), tokenizer="toy", separator=first)
    source, out = write(tmp_path / "many.jsonl", DOCUMENTS), tmp_path / "out"
    flags = ("--source", source, "--out_dir", out, "--shard_tokens=9000", "--tokenizer")
    script("fineweb_edu", *flags, model, "--train_shards=1")
    write_tokenizer(model, byte_pairs("sphinx of black quartz"), tokenizer="toy", separator=0)
    with pytest.raises(SystemExit):
        script("fineweb_edu", *flags, model)
    assert "other flags" in capsys.readouterr().err
    script("fineweb_edu", *flags, out)
    found, coder, all_ids = tokens.read_meta(out), tokens.tokenizer(str(out)), ids(out, "val", "train")
    assert (found["tokenizer"], found["separator"]) == ("toy", first)
    texts = [coder.decode(part[1:]) for part in np.split(all_ids, np.flatnonzero(all_ids == first))[1:]]
    assert texts == DOCUMENTS and all_ids.dtype == (np.uint32 if first else np.uint16)
    script("text", "--source", source, "--out_dir", out, "--tokenizer=bytes")
    assert meta(out)["tokenizer"] == "bytes"    # this also checks for other files


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No network, and an empty cache of tiktoken."""
    nobody = "http://127.0.0.1:9"               # no server listens on this port
    env = {"TIKTOKEN_CACHE_DIR": tmp_path / "new", "http_proxy": nobody, "https_proxy": nobody, "no_proxy": ""}
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))


@needs_public
@pytest.mark.parametrize("tokenizer, counts", [("bytes", (1003854, 111540)), ("gpt2", (301966, 36059))])
def test_shakespeare_has_as_many_tokens_as_in_nanogpt(tmp_path, offline, tokenizer, counts):
    """Our bytes are as many as nanoGPT's characters. The GPT-2 tokens are as many as there."""
    script("shakespeare", "--source", PUBLIC / "text", "--tokenizer", tokenizer, "--tokenizer_files",
           PUBLIC / "tokenizer", "--out_dir", tmp_path / "out")
    assert tuple(len(ids(tmp_path / "out", split)) for split in ("train", "val")) == counts
    assert sum(row["bytes"] for row in meta(tmp_path / "out")["shards"].values()) == 1115394


@needs_public
def test_gpt2s_tokenizer_is_cached_and_a_long_book_encoded_in_parts_has_the_ids_of_one_piece(tmp_path, offline):
    """Also with only its first pairs."""
    tiktoken = pytest.importorskip("tiktoken")
    short, out = write(tmp_path / "t.jsonl", ["Hello world", "Hello"]), tmp_path / "out"
    for more in ("--tokenizer_files", PUBLIC / "tokenizer"), ():
        script("text", "--source", short, "--out_dir", out, *more)
        assert ids(out, "train").tolist() == [50256, 15496, 995]
    ours, book = tokens.tokenizer("gpt2"), tokens.read_text(PUBLIC / "books" / "les-miserables.txt.gz")
    found = ours.encode(book)
    assert found.tolist() == tiktoken.get_encoding("gpt2").encode_ordinary(book)
    assert ours.lengths[found].sum() == len(book.encode())
    small, whole = tokens.tokenizer("gpt2-2048"), tiktoken.get_encoding("gpt2")
    pairs = {piece: i for piece, i in whole._mergeable_ranks.items() if i < 2047}
    first = tiktoken.Encoding("first", pat_str=whole._pat_str, mergeable_ranks=pairs, special_tokens={})
    found = small.encode(book)
    assert found.tolist() == first.encode_ordinary(book) and small.decode(found) == book
    assert small.lengths[found].sum() == len(book.encode()) and small.vocab_size == 2048 == small.separator + 1
