"""The data scripts, run as real processes on real files. Tests of public files (Tiny Shakespeare, books, the GPT-2
tokenizer) look for them in the folder NANO_DATA or in ../shared/data. They are skipped if the files are missing."""
import gzip
import hashlib
import json
import json.decoder
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import unittest.case
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TEXT, byte_pairs, tiny_config, write_tokenizer

from common.runs import write_converted
from data import coders, tokens, weights
from model import GPT

PUBLIC = Path(os.environ.get("NANO_DATA", ROOT.parent / "shared" / "data"))
# no server listens on this port
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
DOCUMENTS = [f"Document {i}: " + f"word{i % 7} é " * (i * 37 % 90) for i in range(300)]

needs_public = pytest.mark.skipif(not (PUBLIC / "tokenizer").exists(), reason="needs public data: set NANO_DATA")


def argv(name, *flags):
    return [sys.executable, str(ROOT / "data" / f"{name}.py"), *map(str, flags)]


def script(name, *flags, ok=True, **env):
    done = subprocess.run(argv(name, *flags), capture_output=True, text=True, timeout=60, env=os.environ | env)
    assert not ok or done.returncode == 0, done.stderr
    return done


def prepare(source, out, *flags):
    """Make a data set of bytes from text."""
    return script("text", "--source", source, "--out_dir", out, "--tokenizer=bytes", *flags)


def fails(name, *flags, **env):
    """Run a script that must fail. Returns the one line that it prints."""
    done = script(name, *flags, ok=False, **env)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def ids(folder, split):
    data = tokens.Tokens(folder, split)
    return np.array(data.window(0, len(data)))


def meta(folder):
    """meta.json, after a check that each shard has its hash and that the folder holds no other file."""
    found = tokens.read_meta(folder)
    assert {p.name for p in folder.iterdir()} == {"meta.json", *found["shards"]}
    return found


def text_bytes(found):
    return sum(row["bytes"] for row in found["shards"].values())


def hashes(folder):
    return {name: row["sha256"] for name, row in meta(folder)["shards"].items()}


def byte_ids(texts):
    return np.concatenate([[256, *text.encode()] for text in texts])


def write(path, content):
    """Write text, bytes or a list of documents (.jsonl) to a file, gzipped if its name ends in .gz."""
    if isinstance(content, list):
        content = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(content))
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


# ------------------------------------------------------------------------------------------------------------- stdlib

@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    """The default data set, made by its script."""
    out = tmp_path_factory.mktemp("stdlib") / "stdlib"
    script("stdlib", "--out_dir", out)
    return out


def documents(folder, split):
    """The documents of a data set of bytes."""
    found = ids(folder, split)
    parts = np.split(found, np.flatnonzero(found == coders.Bytes.separator))[1:]
    return [part[1:].astype(np.uint8).tobytes() for part in parts]


@pytest.mark.xdist_group("stdlib")
def test_stdlib_is_self_consistent_and_large_enough(stdlib):
    found = meta(stdlib)
    assert found["vocab_size"] == 257 and found["tokenizer"] == "bytes"
    assert found["shards"].keys() == {"train.bin", "val.bin"}
    for split in ("train", "val"):
        shard, texts = found["shards"][f"{split}.bin"], documents(stdlib, split)
        assert shard["bytes"] == sum(map(len, texts)) == shard["tokens"] - len(texts)
        assert 0.9 < tokens.bytes_per_token(found, split) < 1
    assert found["shards"]["train.bin"]["tokens"] > 5e6 and found["shards"]["val.bin"]["tokens"] > 1e5


@pytest.mark.xdist_group("stdlib")
def test_stdlib_holds_out_whole_files_and_skips_tests(stdlib):
    train, val = set(documents(stdlib, "train")), set(documents(stdlib, "val"))
    for module in (json.decoder, unittest.case):
        text = Path(module.__file__).read_bytes()
        assert (text in train) + (text in val) == 1
    assert not {text for text in train & val if len(text) > 200}        # near-empty files may be equal
    tests = Path(sysconfig.get_paths()["stdlib"]) / "test"              # some systems do not install them
    for path in tests.glob("test_[a-e]*.py"):
        assert path.read_bytes() not in train | val


def sources(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n{TEXT}")
    return folder


def test_stdlib_is_deterministic_and_skips_tests(tmp_path):
    names = [f"package/module_{i}.py" for i in range(80)]
    skipped = ["test/a.py", "package/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py",
               "lib2to3/tests/data/e.py"]
    made = []
    for place, order in (("a", names + skipped), ("b", skipped[::-1] + names[::-1])):
        folder = sources(tmp_path / place, order)
        script("stdlib", "--source", folder, "--out_dir", tmp_path / place / "out")
        made.append([(tmp_path / place / "out" / name).read_bytes() for name in ("train.bin", "val.bin", "meta.json")])
    assert made[0] == made[1]
    texts = [documents(tmp_path / "a" / "out", split) for split in ("train", "val")]
    assert sorted(text.decode().split("\n")[0][2:] for part in texts for text in part) == sorted(names) and all(texts)


# --------------------------------------------------------------------------------------------------------------- text

@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    write(folder / "a.txt", "Alpha.\r\n")
    write(folder / "sub" / "b.md", "# Bravo é\n")
    write(folder / "sub" / "c.txt.gz", "Charlie\n")
    write(folder / "d.jsonl", ["delta", "", "echo"])
    write(folder / "picture.png", b"\x89PNG\0\0")
    write(folder / "latin1.txt", b"caf\xe9")
    write(folder / "empty.txt", b"")
    write(folder / ".hidden" / "h.txt", "hidden")
    return folder


def test_every_readable_file_of_a_folder_becomes_documents(library, tmp_path):
    done = prepare(library, tmp_path / "out", "--val", "a", "sub/b.md")
    assert "5 documents in 4 files" in done.stdout and "3 files without text" in done.stdout
    found = meta(tmp_path / "out")
    assert ids(tmp_path / "out", "val").tolist() == byte_ids(["Alpha.\r\n", "# Bravo é\n"]).tolist()
    assert ids(tmp_path / "out", "train").tolist() == byte_ids(["delta", "echo", "Charlie\n"]).tolist()
    assert (found["vocab_size"], found["tokenizer"]) == (257, "bytes")
    assert found["shards"]["val.bin"] | {"sha256": ""} == {"tokens": 21, "bytes": 19, "sha256": ""}
    assert tokens.bytes_per_token(found, "val") == 19 / 21


def test_whole_documents_are_held_out(tmp_path):
    source, out, first = write(tmp_path / "many.jsonl.gz", DOCUMENTS), tmp_path / "out", None
    for _ in range(2):
        prepare(source, out, "--val_share=0.2")
        assert first in (None, hashes(out))
        first = hashes(out)
    train, val = ([text.decode() for text in documents(out, split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(DOCUMENTS) and train == [text for text in DOCUMENTS if text in set(train)]
    assert 0.15 < sum(map(len, val)) / sum(map(len, DOCUMENTS)) <= 0.2


@pytest.mark.parametrize("texts, expected", [
    (["x" * 100 + "tail"], "ail"), (["long document", "brief", "another long one"], "brief")])
def test_the_end_of_a_single_document_or_the_shortest_of_a_few_is_held_out(tmp_path, texts, expected):
    """The shortest document is held out if none fits into the share."""
    prepare(write(tmp_path / "few.jsonl", texts), tmp_path / "out", "--val_share=0.02")
    assert ids(tmp_path / "out", "val").tolist() == byte_ids([expected]).tolist()


def test_fixed_at_puts_one_token_into_every_sequence(library, tmp_path):
    """The other tokens stay the same. Windows begin where sequences do."""
    flags = ("text", "--source", library, "--tokenizer=bytes", "--val", "a", "sub/b.md", "--out_dir")
    script(*flags, tmp_path / "plain")
    script(*flags, tmp_path / "fixed", "--fixed_at=3", "--length=6")
    for split in ("train", "val"):
        plain, found = ids(tmp_path / "plain", split), ids(tmp_path / "fixed", split)
        assert len(found) == len(plain) // 7 * 7 > 0
        found, plain = found.reshape(-1, 7), plain[:len(found)].reshape(-1, 7)
        assert (found[:, 3] == 256).all() and (np.delete(found, 3, 1) == np.delete(plain, 3, 1)).all()
    assert meta(tmp_path / "fixed")["stride"] == 7 and "stride" not in meta(tmp_path / "plain")


def test_a_data_set_survives_a_failed_command_and_is_replaced_as_a_whole(library, tmp_path):
    out = tmp_path / "out"
    fineweb(write(tmp_path / "many.jsonl", DOCUMENTS), out, "--shard_tokens=20000")
    first = hashes(out)
    fails("text", "--source", tmp_path / "missing", "--tokenizer=bytes", "--out_dir", out)
    assert hashes(out) == first
    (out / ".train.bin.123.tmp").write_bytes(b"left by a killed run")
    script("text", "--source", library, "--tokenizer=bytes", "--out_dir", out)
    assert set(hashes(out)) == {"train.bin", "val.bin"}


# -------------------------------------------------------------------------------------------------------- fineweb_edu

@pytest.fixture
def pages(tmp_path):
    folder = tmp_path / "pages"
    write(folder / "000.jsonl", DOCUMENTS[:100])
    write(folder / "001.jsonl.gz", DOCUMENTS[100:200])
    for i, text in enumerate(DOCUMENTS[200:205]):
        write(folder / "002" / f"{i}.txt", text)
    write(folder / "003.jsonl", DOCUMENTS[205:])
    write(folder / "README.md", "not part of it")
    return folder


def fineweb(source, out, *flags, **kwargs):
    return script("fineweb_edu", "--source", source, "--out_dir", out, "--tokenizer=bytes", *flags, **kwargs)


def test_shards_are_the_stream_cut_into_pieces(pages, tmp_path):
    stream, size = byte_ids(DOCUMENTS), 7001
    done = fineweb(pages, tmp_path / "out", f"--shard_tokens={size}")
    names = list(meta(tmp_path / "out")["shards"])
    assert names == ["val_000000.bin", *(f"train_{i:06d}.bin" for i in range(-(-len(stream) // size) - 1))]
    assert (ids(tmp_path / "out", "val") == stream[:size]).all()
    assert (ids(tmp_path / "out", "train") == stream[size:]).all()
    assert "this is normal" in done.stdout
    assert text_bytes(meta(tmp_path / "out")) == sum(len(text.encode()) for text in DOCUMENTS)


def test_a_full_last_shard_is_written(tmp_path):
    done = fineweb(write(tmp_path / "even.jsonl", ["x" * 99] * 30), tmp_path / "out", "--shard_tokens=1000")
    assert len(hashes(tmp_path / "out")) == 3 and "normal" not in done.stdout


def test_a_run_killed_twice_restarts_and_writes_the_same_files(tmp_path):
    """Each kill -9 comes in the middle. Finished shards are not written again."""
    for i in range(4):
        write(tmp_path / "pages" / f"{i}.jsonl.gz", DOCUMENTS * 5)
    whole, out, flags = tmp_path / "whole", tmp_path / "out", ("--shard_tokens=25013",)
    fineweb(tmp_path / "pages", whole, *flags)
    count, finished = len(hashes(whole)), {}
    for share in (0.2, 0.6):
        process = subprocess.Popen(argv("fineweb_edu", "--source", tmp_path / "pages", "--out_dir", out,
                                        "--tokenizer=bytes", *flags), stdout=subprocess.DEVNULL)
        while len(list(out.glob("*.bin"))) < share * count:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "meta.json").exists()
        listed = json.loads((out / "progress.json").read_text())["shards"]
        assert share * count - 2 <= len(listed) < count
        assert all((out / name).stat().st_mtime_ns == when for name, when in finished.items())
        finished = {name: (out / name).stat().st_mtime_ns for name in listed}
        for name, row in listed.items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == row["sha256"]
    fineweb(tmp_path / "pages", out, *flags)
    assert hashes(out) == hashes(whole)
    assert all((out / name).stat().st_mtime_ns == when for name, when in finished.items())


def test_stopping_after_any_shard_and_continuing_writes_the_same_files(pages, tmp_path):
    fineweb(pages, tmp_path / "whole", "--shard_tokens=30011")
    for count in range(1, len(hashes(tmp_path / "whole"))):
        fineweb(pages, tmp_path / "out", "--shard_tokens=30011", f"--train_shards={count}")
        assert len(hashes(tmp_path / "out")) == count + 1
    fineweb(pages, tmp_path / "out", "--shard_tokens=30011")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def has_pyarrow():
    return subprocess.run([sys.executable, "-c", "import pyarrow.parquet"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_pyarrow(), reason="needs pyarrow")
def test_parquet_files_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet
    for name, rows in (("a", DOCUMENTS[:150]), ("b", DOCUMENTS[150:])):
        table = pyarrow.table({"id": range(len(rows)), "text": rows})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=40)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "c.parquet2")
    fineweb(tmp_path, tmp_path / "out", "--shard_tokens=20000")
    assert (np.concatenate([ids(tmp_path / "out", "val"), ids(tmp_path / "out", "train")]) == byte_ids(DOCUMENTS)).all()
    os.rename(tmp_path / "c.parquet2", tmp_path / "c.parquet")
    assert 'no column "text"' in fails("fineweb_edu", "--source", tmp_path / "c.parquet", "--out_dir", tmp_path / "c",
                                       "--tokenizer=bytes")
    assert "cannot be read as parquet" in fails("fineweb_edu", "--source", write(tmp_path / "x.parquet", b"PAR1"),
                                                "--out_dir", tmp_path / "x", "--tokenizer=bytes")


# ------------------------------------------------------------------------------------- the tokenizer of a public model

def test_a_data_set_stores_the_public_models_tokenizer_that_it_uses(toy, tmp_path):
    """The data set needs only its own folder. Made again with bytes, it has no tokenizer.json."""
    source, out = write(tmp_path / "many.jsonl", DOCUMENTS), tmp_path / "out"
    model = shutil.copytree(toy, tmp_path / "model")
    flags = ("text", "--source", source, "--val_share=0.2", "--out_dir", out)
    script(*flags, "--tokenizer", model)
    shutil.rmtree(model)
    found, coder = tokens.read_meta(out), tokens.tokenizer(str(out))
    assert (found["tokenizer"], found["separator"], found["vocab_size"]) == ("toy", 0, 300)
    texts = [coder.decode(part[1:]) for split in ("train", "val")
             for part in np.split(ids(out, split), np.flatnonzero(ids(out, split) == 0))[1:]]
    assert sorted(texts) == sorted(DOCUMENTS) and text_bytes(found) == sum(len(text.encode()) for text in DOCUMENTS)
    assert tokens.bytes_per_token(found, "val") > 1.0
    script(*flags, "--tokenizer=bytes")
    assert meta(out)["tokenizer"] == "bytes"    # this also checks for other files


def test_ids_beyond_65535_are_stored_and_read_back(tmp_path):
    """This also holds for a data set of many shards."""
    model = write_tokenizer(tmp_path / "wide", byte_pairs(first=70_000), separator=70_000)
    pages = write(tmp_path / "pages" / "a.jsonl", DOCUMENTS).parent
    for flags in (("text",), ("fineweb_edu", "--shard_tokens=9001")):
        script(*flags, "--source", pages, "--out_dir", tmp_path / flags[0], "--tokenizer", model)
        stream = np.concatenate([ids(tmp_path / flags[0], split) for split in ("val", "train")])
        assert stream.min() == 70_000 and stream.dtype == np.uint32 and (stream == 70_000).sum() == len(DOCUMENTS)
        assert text_bytes(tokens.read_meta(tmp_path / flags[0])) == sum(len(text.encode()) for text in DOCUMENTS)


def test_pages_in_a_public_models_tokenizer_can_be_continued(pages, toy, tmp_path):
    flags = ("fineweb_edu", "--source", pages, "--shard_tokens=9000")
    script(*flags, "--out_dir", tmp_path / "whole", "--tokenizer", toy)
    script(*flags, "--out_dir", tmp_path / "out", "--tokenizer", toy, "--train_shards=1")
    other = write_tokenizer(tmp_path / "toy", byte_pairs("sphinx of black quartz"), tokenizer="toy", separator=0)
    assert "other flags" in fails(*flags, "--out_dir", tmp_path / "out", "--tokenizer", other)
    script(*flags, "--out_dir", tmp_path / "out", "--tokenizer", toy)
    whole, out = (tokens.read_meta(tmp_path / name) for name in ("whole", "out"))
    assert whole["shards"] == out["shards"] and len(out["shards"]) > 3 and out["separator"] == 0
    assert tokens.content_of(tmp_path / "out") == tokens.content_of(toy)


@pytest.mark.parametrize("dataset, tokenizer, folder", [
    ("stdlib", "bytes", "stdlib"), ("stdlib", "toy", "stdlib-toy"), ("shakespeare", "bytes", "shakespeare"),
    ("books", "bytes", "books"), ("books", "toy", "books-toy")])
def test_a_data_set_has_a_folder_for_each_tokenizer(dataset, tokenizer, folder, toy):
    args = tokens.flags("", dataset, "bytes").parse_args(["--tokenizer", str(toy) if tokenizer == "toy" else tokenizer])
    assert tokens.settle(args, dataset).name == tokenizer and args.out_dir == ROOT / "data" / folder


@needs_public
@pytest.mark.exhaustive
def test_a_book_is_encoded_as_by_the_package_tokenizers(toy):
    text = gzip.open(PUBLIC / "books" / "les-miserables.txt.gz", "rt", encoding="utf-8-sig", newline="").read()
    coder = tokens.tokenizer(str(toy))
    assert coder.encode(text).tolist() == coder.coder.encode(text, add_special_tokens=False).ids
    assert coder.lengths[coder.encode(text)].sum() == len(text.encode())


# ------------------------------------------------------------------------------------------------------- public files

@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A copy of tiktoken's cache, because tiktoken deletes files that it does not recognise."""
    folder = tmp_path_factory.mktemp("bpe") / "cache"
    return {"TIKTOKEN_CACHE_DIR": str(shutil.copytree(PUBLIC / "tokenizer" / "tiktoken_cache", folder))}


@needs_public
@pytest.mark.parametrize("tokenizer, counts", [("bytes", (1003854, 111540)), ("gpt2", (301966, 36059))])
def test_shakespeare_has_as_many_tokens_as_in_nanogpt(tmp_path, cache, tokenizer, counts):
    """Our bytes are as many as nanoGPT's characters. The GPT-2 tokens are as many as there."""
    script("shakespeare", "--source", PUBLIC / "text", "--tokenizer", tokenizer, "--out_dir", tmp_path / "out", **cache)
    assert (len(ids(tmp_path / "out", "train")), len(ids(tmp_path / "out", "val"))) == counts
    assert text_bytes(meta(tmp_path / "out")) == 1115394


@needs_public
def test_a_long_book_encoded_in_parts_has_the_ids_of_one_piece(tmp_path, cache, monkeypatch):
    import tiktoken
    out, folder = tmp_path / "out", tmp_path / "books"
    folder.mkdir()
    for name in ("les-miserables.txt.gz", "moby-dick.txt.gz"):
        shutil.copy(PUBLIC / "books" / name, folder)
    script("text", "--source", folder, "--val", "moby-dick", "--out_dir", out, **cache)
    text = gzip.open(folder / "les-miserables.txt.gz", "rt", encoding="utf-8-sig", newline="").read()
    for name, value in cache.items():
        monkeypatch.setenv(name, value)
    assert ids(out, "train").tolist() == [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]
    assert meta(out)["shards"]["train.bin"]["bytes"] == len(text.encode())


@needs_public
def test_tokenizer_files_are_needed_only_once(tmp_path):
    """The first call reads OpenAI's two files from a folder. Later calls find them in tiktoken's cache."""
    source = write(tmp_path / "t.jsonl", ["Hello world", "Hello"])
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache")} | NO_NETWORK
    flags = ("--source", source, "--out_dir", tmp_path / "out")
    script("text", *flags, "--tokenizer_files", PUBLIC / "tokenizer", **env)
    script("text", *flags, **env)
    assert ids(tmp_path / "out", "train").tolist() == [50256, 15496, 995]


@needs_public
def test_gpt2s_tokenizer_is_exported_and_read_back(tmp_path, cache, monkeypatch, capsys):
    """The exported file gives the same ids in tokenizers as in tiktoken. It is recognised as GPT-2's tokenizer without
    network and with an empty cache. Without the file, the tokenizer must be in the cache."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache["TIKTOKEN_CACHE_DIR"])
    model = GPT(tiny_config(vocab_size=50257, n_embd=2, n_head=1, pos="learned", bias=True))
    run, back, again = tmp_path / "run", tmp_path / "back", tmp_path / "again"
    knobs = vars(model.config) | {"dataset": "none"}
    write_converted(run, {"tokenizer": "gpt2", "knobs": knobs}, model.state_dict(), None)
    weights.main(["export", str(run), str(back)])

    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(back / "tokenizer.json"))
    ours, book = tokens.tokenizer("gpt2"), tokens.read_text(PUBLIC / "books" / "moby-dick.txt.gz")
    for text in (book[:300_000], "", "  naïve\n\n 漢字 😀\t12345  it's", "\u2028\u00a0 x"):
        assert theirs.encode(text).ids == ours.encode(text).tolist() and theirs.decode(ours.encode(text)) == text
    assert theirs.token_to_id("<|endoftext|>") == ours.separator

    for name, value in {"TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), **NO_NETWORK}.items():
        monkeypatch.setenv(name, value)
    weights.main([str(back), f"--out={again}"])
    found = json.loads((again / "meta.json").read_text())
    assert [found[key] for key in ("tokenizer", "separator", "ends")] == ["gpt2", 50256, [50256]]
    assert not (again / "tokenizer.json").exists()
    (back / "tokenizer.json").unlink()
    weights.main([str(back), f"--out={again}"])                         # the tokenizer is in the cache now


@needs_public
def test_fineweb_in_gpt2s_tokenizer_begins_each_page_with_its_separator(pages, tmp_path, cache):
    script("fineweb_edu", "--source", pages, "--shard_tokens=9000", "--out_dir", tmp_path / "out", **cache)
    found = meta(tmp_path / "out")
    assert (found["vocab_size"], ids(tmp_path / "out", "val")[0]) == (50257, 50256)
    stream = np.concatenate([ids(tmp_path / "out", split) for split in ("val", "train")])
    assert (stream == 50256).sum() == len(DOCUMENTS)
    assert text_bytes(found) == sum(len(text.encode()) for text in DOCUMENTS)
