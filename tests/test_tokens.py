"""data/tokens.py: shards on disk, windows over them, damaged data sets, tokenizers."""
import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import WORDS, assert_says, write_data

from data import tokens

# --------------------------------------------------------------------------------------------------- shards and windows


def test_a_shard_comes_back_and_its_header_is_that_of_llm_c(tmp_path):
    ids = np.array([0, 1, 256, 65535], np.uint16)
    row = tokens.write_shard(tmp_path / "train.bin", ids)
    raw = (tmp_path / "train.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 4] + [0] * 253
    assert np.frombuffer(raw[1024:], "<u2").tolist() == ids.tolist()
    assert tokens.read_shard(tmp_path / "train.bin").tolist() == ids.tolist()
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


def test_shards_are_mapped_not_read(tmp_path):
    folder = write_data(tmp_path, np.zeros(1000), np.zeros(100))
    assert all(isinstance(shard, np.memmap) for shard in tokens.Tokens(folder, "train").shards)


def test_token_files_refuse_what_uint16_cannot_hold(tmp_path):
    for ids in ([0, 70000], [-1, 5]):
        with pytest.raises(ValueError, match="0..65535"):
            tokens.write_shard(tmp_path / "x.bin", np.array(ids))
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- damaged data sets

def rewrite(name, change):
    """Damage one file of a data set: change(bytes) -> bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def meta_without(key):
    def leave_out(text):
        return json.dumps({k: v for k, v in json.loads(text).items() if k != key}).encode()
    return rewrite("meta.json", leave_out)


DAMAGE = {                                      # name: (what happened to a good data set, what the message must hold)
    "shard missing": (lambda folder: (folder / "train.bin").unlink(), "train.bin is missing.*(run|make)"),
    "meta missing": (lambda folder: (folder / "meta.json").unlink(), "meta.json is missing.*make"),
    "shard of no bytes": (rewrite("train.bin", lambda b: b""), "train.bin.*run"),
    "header only": (rewrite("val.bin", lambda b: b[:1024]), "val.bin.*damaged.*run"),
    "truncated": (rewrite("val.bin", lambda b: b[:-100]), "val.bin.*damaged.*run"),
    "too long": (rewrite("val.bin", lambda b: b + b"xx"), "val.bin.*damaged.*run"),
    "foreign": (rewrite("train.bin", lambda b: b"PNG" * 1000), "train.bin.*no token file.*run"),
    "raw nanoGPT file": (rewrite("train.bin", lambda b: b[1024:]), "train.bin.*no token file.*run"),
    "one token changed": (rewrite("train.bin", lambda b: b[:-2] + b"\x01\x00"), "train.bin.*sha256.*run"),
    "meta cut": (rewrite("meta.json", lambda b: b[:50]), "meta.json.*make"),
    "meta of no bytes": (rewrite("meta.json", lambda b: b""), "meta.json.*make"),
    "meta no text": (rewrite("meta.json", lambda b: bytes(range(128, 256))), "meta.json.*make"),
    "meta a list": (rewrite("meta.json", lambda b: b"[1, 2]"), "meta.json.*make"),
    "meta without shards": (meta_without("shards"), "meta.json.*shards.*make"),
    "meta without vocabulary": (meta_without("vocab_size"), "meta.json.*vocab_size.*make"),
    "train too short": (lambda folder: write_data(folder, WORDS[:16], WORDS), "train.*block_size"),
    "val too short": (lambda folder: write_data(folder, WORDS, WORDS[:16]), "val.*block_size"),
    "train of no tokens": (lambda folder: write_data(folder, WORDS[:0], WORDS), "train.*no tokens.*run"),
    "train ids outside the vocabulary": (
        lambda folder: write_data(folder, WORDS.astype(int) + 200, WORDS), "train.*token id.*vocab"),
    "val ids outside the vocabulary": (
        lambda folder: write_data(folder, WORDS, WORDS.astype(int) + 200), "val.*token id.*vocab"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_is_refused_before_any_work(damage, data, tmp_path, train_fails):
    folder = shutil.copytree(data, tmp_path / "fox")
    do, says = DAMAGE[damage]
    do(folder)
    assert_says(says, train_fails(f"--dataset={folder}")[1])


# ---------------------------------------------------------------------------------------------------------- tokenizers

def test_bytes_round_trip_and_stay_within_their_vocabulary():
    coder, text = tokens.tokenizer("bytes"), "naïve\n\t€ 漢字 😀\0"
    ids = coder.encode(text)
    assert ids.dtype == np.uint16 and ids.max() < coder.separator < coder.vocab_size
    assert coder.decode(ids) == coder.decode(ids.tolist()) == text
    assert coder.decode([256, 104, 105, 256]) == "hi" and coder.decode([255, 104]) == "\ufffdh"
    assert len(coder.encode("")) == 0


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
