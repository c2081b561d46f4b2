"""data/: shards on disk, windows over them, the standard library as a data set, tokenizers."""
import hashlib
import json
import json.decoder
import os
import sysconfig
import unittest.case
from pathlib import Path

import numpy as np
import pytest
from conftest import TEXT, run, write_data

from data import files, tokens


def test_a_shard_comes_back_and_its_header_is_that_of_llm_c(tmp_path):
    ids = np.array([0, 1, 256, 65535], np.uint16)
    row = tokens.write_shard(tmp_path / "train.bin", ids)
    raw = (tmp_path / "train.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 4] + [0] * 253
    assert np.frombuffer(raw[1024:], "<u2").tolist() == ids.tolist() == tokens.read_shard(tmp_path / "train.bin").tolist()
    assert row == {"tokens": 4, "sha256": hashlib.sha256(raw).hexdigest()}


def test_windows_run_over_the_borders_of_shards(tmp_path):
    ids, cuts = np.arange(1000) % 300, (0, 7, 8, 500, 1000)
    for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
        tokens.write_shard(tmp_path / f"train_{i:06d}.bin", ids[a:b])
    split = tokens.Tokens(tmp_path, "train")
    assert len(split) == 1000
    starts = [0, 3, 6, 7, 8, 490, 499, 500, 980]
    rows = split.windows(starts, 20, 300)
    assert rows.dtype == np.int64 and (rows == np.stack([ids[s:s + 20] for s in starts])).all()
    assert (split.window(0, 1000) == ids).all()


def test_ids_outside_the_vocabulary_say_where(tmp_path):
    tokens.write_shard(tmp_path / "val.bin", np.array([1, 2, 3, 99, 4, 5]))
    split = tokens.Tokens(tmp_path, "val")
    assert split.windows([0], 3, 50).tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="val.*99.*50"):
        split.windows([0, 2], 3, 50)


def header(*numbers, length=256):
    return np.array(list(numbers) + [0] * (length - len(numbers)), "<i4").tobytes()


@pytest.mark.parametrize("content, says", [
    (b"", "wrong header"), (b"\0" * 5000, "wrong header"), (header(20240520, 7, 1) + b"ab", "wrong header"),
    (header(20240520, 1, 9) + b"ab", "damaged"), (header(20240520, 1, 0), "no tokens"),
    (header(20240520, 1, -1), "damaged"), (header(20240520, 1, 5, length=3), "damaged")])
def test_a_file_that_is_no_shard_is_refused(content, says, tmp_path):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"train.bin.*{says}"):
        tokens.Tokens(tmp_path, "train")


def test_meta_and_hash_follow_the_contents(data, tmp_path):
    meta = tokens.read_meta(data)
    assert (meta["vocab_size"], meta["tokenizer"]) == (257, "bytes") and meta["shards"]["val.bin"]["tokens"] == 4000
    other = tokens.read_meta(write_data(tmp_path / "other", [1, 2], [3]))
    assert tokens.data_hash(meta) == tokens.data_hash(tokens.read_meta(data)) != tokens.data_hash(other)
    assert tokens.bytes_per_token(meta, "val") == 1.0


def test_a_changed_shard_no_longer_matches_its_hash(tmp_path):
    folder = write_data(tmp_path, [1, 2, 3], [4, 5])
    raw = bytearray((folder / "val.bin").read_bytes())
    raw[-1] ^= 1
    (folder / "val.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="val.bin.*sha256"):
        tokens.read_meta(folder)


def test_a_file_is_renamed_into_place_only_when_complete(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path, "w") as f:
        f.write("half")
        f.flush()
        assert path.read_text() == "before"
        raise KeyboardInterrupt
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.txt"]
    with files.replacing(path, "w") as f:
        f.write("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["a.txt"]


# --------------------------------------------------------------------------------------------------------- the standard library

@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    """The default data set, made by its script."""
    out = tmp_path_factory.mktemp("stdlib") / "stdlib"
    run("data/stdlib.py", f"--out_dir={out}")
    return out


def documents(folder, split):
    ids = tokens.Tokens(folder, split).window(0, len(tokens.Tokens(folder, split)))
    return ["".join(map(chr, part[1:])) for part in np.split(ids, np.flatnonzero(ids == 256))[1:]]


def test_stdlib_is_self_consistent_and_large_enough(stdlib):
    meta = tokens.read_meta(stdlib)
    assert meta["vocab_size"] == 257 and meta["tokenizer"] == "bytes" and meta["shards"].keys() == {"train.bin", "val.bin"}
    for split in ("train", "val"):
        shard, texts = meta["shards"][f"{split}.bin"], documents(stdlib, split)
        assert shard["bytes"] == sum(map(len, texts)) == shard["tokens"] - len(texts)
        assert 0.9 < tokens.bytes_per_token(meta, split) < 1
    assert meta["shards"]["train.bin"]["tokens"] > 5e6 and meta["shards"]["val.bin"]["tokens"] > 1e5


def test_stdlib_holds_whole_files_out_and_leaves_tests_alone(stdlib):
    train, val = set(documents(stdlib, "train")), set(documents(stdlib, "val"))
    for module in (json.decoder, unittest.case):
        text = Path(module.__file__).read_bytes().decode("latin-1")
        assert (text in train) + (text in val) == 1
    assert not {text for text in train & val if len(text) > 200}        # near-empty files may be alike
    for path in (Path(sysconfig.get_paths()["stdlib"]) / "test").glob("test_[a-e]*.py"):         # some systems leave them out
        assert path.read_bytes().decode("latin-1") not in train | val


def sources(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n{TEXT}")
    return folder


def test_stdlib_is_deterministic_and_skips_tests(tmp_path):
    names = [f"package/module_{i}.py" for i in range(80)]
    skipped = ["test/a.py", "package/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "lib2to3/tests/data/e.py"]
    made = []
    for place, order in (("a", names + skipped), ("b", skipped[::-1] + names[::-1])):
        folder = sources(tmp_path / place, order)
        run("data/stdlib.py", f"--source={folder}", f"--out_dir={tmp_path / place / 'out'}")
        made.append([(tmp_path / place / "out" / name).read_bytes() for name in ("train.bin", "val.bin", "meta.json")])
    assert made[0] == made[1]
    texts = [documents(tmp_path / "a" / "out", split) for split in ("train", "val")]
    assert sorted(text.split("\n")[0][2:] for part in texts for text in part) == sorted(names) and all(texts)


def test_stdlib_of_no_sources_says_so(tmp_path):
    done = run("data/stdlib.py", f"--source={tmp_path}", f"--out_dir={tmp_path / 'out'}", ok=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--source" in done.stderr and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------------ tokenizers

def test_bytes_round_trip_and_stay_within_their_vocabulary():
    coder, text = tokens.tokenizer("bytes"), "naïve\n\t€ 漢字 😀\0"
    ids = coder.encode(text)
    assert ids.dtype == np.uint16 and ids.max() < coder.separator < coder.vocab_size
    assert coder.decode(ids) == coder.decode(ids.tolist()) == text
    assert coder.decode([256, 104, 105, 256]) == "hi" and coder.decode([255, 104]) == "\ufffdh" and len(coder.encode("")) == 0


def test_numbers_round_trip_and_refuse_words():
    coder = tokens.tokenizer("numbers")
    assert coder.decode(coder.encode("3 0 65535")) == "3 0 65535"
    for wrong in ("three", "1.5", "-1", "70000"):
        with pytest.raises(ValueError, match="numbers"):
            coder.encode(wrong)


def test_unknown_tokenizer_names_those_that_exist():
    with pytest.raises(ValueError, match="bytes.*gpt2"):
        tokens.tokenizer("nonsense")


def test_meta_is_plain_json(data):
    assert json.loads((data / "meta.json").read_text())["dataset"] == "fox"
