"""data/tokens.py and coders.py: shards on disk, windows over them, tokenizers."""

import functools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import (
    ROOT,
    SPECIAL,
    TEXT,
    WORDS,
    assert_says,
    byte_pairs,
    write_data,
    write_tokenizer,
)
from hypothesis import example, given
from hypothesis import strategies as st

from common import files
from data import coders, tokens

GPT2_FILES = Path(
    os.environ.get("NANO_DATA", ROOT.parent / "shared/data"), "tokenizer/tiktoken_cache"
)


@given(
    st.data(), st.sampled_from([300, 65537]), st.lists(st.integers(1, 30), min_size=1, max_size=4)
)
def test_windows_run_over_the_borders_of_shards(tmp_path_factory, draw, vocab_size, sizes):
    """Headers are those of llm.c. A larger vocabulary has wider ids. An id outside the vocabulary
    is reported with its file. A shard that meta.json does not name is not read."""
    folder, end, rows = tmp_path_factory.mktemp("shards"), sum(sizes), {}
    ids = np.array(draw.draw(st.lists(st.integers(0, vocab_size - 1), min_size=end, max_size=end)))
    coder = SimpleNamespace(
        vocab_size=vocab_size, separator=-1, prefix=0, lengths=np.full(vocab_size, 3)
    )
    header, kind = ([20240801, 7], "<u4") if vocab_size > 1 << 16 else ([20240520, 1], "<u2")
    for n, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        name = f"train_{n:06d}.bin"
        rows[name] = tokens.write_shard(folder / name, np.array_split(part, 2), coder)
        raw = (folder / name).read_bytes()
        assert np.frombuffer(raw[:12], "<i4").tolist() == [*header, len(part)]
        assert np.frombuffer(raw[1024:], kind).tolist() == part.tolist()
    files.write_json(
        folder / "meta.json", {"tokenizer": "toy", "vocab_size": vocab_size, "shards": rows}
    )
    tokens.write_shard(folder / "train_000009.bin", [[0]])
    split, length = tokens.Tokens(folder, "train"), draw.draw(st.integers(1, end))
    starts = draw.draw(st.lists(st.integers(0, end - length), min_size=1, max_size=5))
    expected = np.stack([ids[start : start + length] for start in starts])
    assert len(split) == end
    assert (split.windows(starts, length, expected.max() + 1) == expected).all()
    with pytest.raises(
        ValueError, match=f"train: token id {expected.max()} near .* has {expected.max()} ids"
    ):
        split.windows(starts, length, expected.max())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A folder with a tokenizer as Llama 2 has: spaces are low lines, bytes are written as numbers,
    and a special token precedes each text. Truncation and padding in the file are to be ignored."""
    lib = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abé"]
    vocab, parts = {word: i for i, word in enumerate(words)}, lib.decoders
    coder = lib.Tokenizer(lib.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    coder.add_special_tokens(words[:3])
    coder.normalizer = lib.normalizers.Replace(" ", "\u2581")
    coder.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse()]
    )
    coder.post_processor = lib.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    coder.enable_truncation(3)
    coder.enable_padding(length=99)
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "llama", coder)


@pytest.fixture(scope="module")
def some_coders(toy, sentencepiece):
    return [tokens.tokenizer(name) for name in ("bytes", str(toy), str(sentencepiece))]


ODD = (
    "",
    " ",
    "the lazy dog",
    "<|end|> and<|im_end|>",
    "12345 6.78",
    "it's DON'T",
    "\u2028\u00a0",
    "x<|endoftext|><s>",
    "naïve  café\n\n\t  x",
    "漢字 😀\U0001f469\u200d\U0001f467 \0 end",
    "a   b    c\r\n",
)
PIECES = st.sampled_from([*ODD, *TEXT.split(), " the", "é", "<0x41>"])


@given(
    st.lists(
        PIECES | st.text(st.characters(codec="utf-8", exclude_characters="\u2581")), max_size=9
    ).map("".join)
)
@example("".join(ODD))
def test_ids_become_the_same_text_whose_bytes_are_counted(some_coders, text):
    """Special tokens that are spelled in a text are text."""
    for coder in some_coders:
        ids = coder.encode(text)
        assert coder.decode(ids) == coder.decode(ids.tolist()) == text
        assert coder.lengths[ids].sum() == len(text.encode())
        assert coder.lengths.shape == (coder.vocab_size,)


@given(
    st.lists(PIECES.filter(lambda text: text.lstrip(" ") == text != ""), max_size=5), st.booleans()
)
def test_a_space_that_a_tokenizer_adds_before_a_text_is_no_byte_of_it(
    some_coders, tmp_path_factory, texts, words
):
    """GPT-2's way to add it, and that of SentencePiece."""
    path, plain = tmp_path_factory.mktemp("data") / "train.bin", some_coders[2 if words else 1]
    described = json.loads(plain.exported) | (
        {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "\u2581",
                "split": False,
                "prepend_scheme": "first",
            },
        }
        if words
        else {
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        }
    )
    adding = coders.Tokenizer(json.dumps(described).encode(), "toy", "toy", separator=0)
    for coder, prefix in (plain, 0), (adding, 1):
        row = tokens.write_shard(path, tokens.encode_all(coder, texts), coder)
        assert coder.prefix == prefix and row["bytes"] == sum(len(text.encode()) for text in texts)


@pytest.fixture
def gpt2(monkeypatch):
    """The folder with the files of GPT-2's tokenizer becomes that of tiktoken."""
    if not GPT2_FILES.exists():
        pytest.skip("needs public data: set NANO_DATA")
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_FILES))


@given(text=st.lists(PIECES | st.text(st.characters(codec="utf-8")), max_size=9).map("".join))
@pytest.mark.parametrize("name", ["gpt2", "gpt2-2048"])
def test_gpt2_has_the_same_ids_in_an_exported_tokenizer_json(name, text, gpt2, tmp_path_factory):
    """Also with only its first pairs. A special token that is spelled in a text is text."""
    ours, exported = exported_gpt2(name)
    ids = ours.encode(text)
    assert ids.tolist() == exported.encode(text).tolist()
    assert ours.decode([ours.separator, *ids]) == text
    assert ours.lengths[ids].sum() == exported.lengths[ids].sum() == len(text.encode())
    assert (ours.name, ours.vocab_size) == (
        name,
        len(ours.lengths),
    )
    assert exported.separator == ours.separator


@functools.cache
def exported_gpt2(name):
    coder = tokens.tokenizer(name)
    return coder, coders.Tokenizer(coder.exported, "exported", "tokenizer.json")


def test_without_a_network_the_folder_of_tiktoken_is_named(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        tiktoken, "get_encoding", mock.Mock(side_effect=ConnectionError("no network"))
    )
    with pytest.raises(
        ValueError, match=f"{tmp_path} does not hold GPT-2's tokenizer.*TIKTOKEN_CACHE_DIR=FOLDER"
    ):
        tokens.tokenizer("gpt2")


def test_a_long_text_is_cut_where_no_pair_of_tokens_is_merged(toy):
    coder = tokens.tokenizer(str(toy))
    long = "\n\n".join((TEXT * 40 + "x.\n", "... 12 34 -- ")) * 310
    assert len(list(coders.cut(long))) == 2
    assert coder.encode(long).tolist() == coder.coder.encode(long).ids


def test_special_tokens_are_not_shown(toy):
    coder, plain, numbers = map(tokens.tokenizer, (str(toy), "bytes", "numbers"))
    assert (
        coder.decode([0, *coder.encode("fox"), 1, 0, *coder.encode(" dog").tolist(), 299 + 7])
        == "fox dog"
    )
    assert plain.decode([256, 104, 105, 256]) == "hi" and plain.decode([255, 104]) == "\ufffdh"
    assert numbers.decode(numbers.encode("3 0 65535")) == "3 0 65535"


def test_the_separator_is_found_in_each_kind_of_file(tmp_path, sentencepiece):
    assert tokens.tokenizer(str(sentencepiece)).separator == 1  # it precedes each text
    folder = write_tokenizer(tmp_path / "model")
    for name, content, expected in (
        ("tokenizer_config", {"eos_token": SPECIAL[1]}, 1),
        ("tokenizer_config", {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[1]}, 0),
        # config.json overrides a spelling
        ("config", {"bos_token_id": 5, "eos_token_id": [6, 7]}, 5),
        ("meta", {"separator": 7}, 7),
    ):  # meta.json of a run overrides both
        files.write_json(folder / f"{name}.json", content)
        assert tokens.tokenizer(str(folder)).separator == expected
    write_tokenizer(folder, byte_pairs(specials=("<s>", "<|endoftext|>"))).joinpath(
        "meta.json"
    ).unlink()
    assert tokens.tokenizer(str(folder)).separator == 1  # <|endoftext|>, if it exists


def test_a_tokenizer_is_found_by_several_names(toy, toy_data, tmp_path, monkeypatch):
    """A leftover file is ignored: if meta.json names a tokenizer without a separator, this
    tokenizer needs no file."""
    monkeypatch.chdir(tmp_path)
    smol = shutil.copytree(toy, tmp_path / "out" / "smol")
    for name in ("smol", "out/smol", str(toy), str(toy_data)):
        assert tokens.tokenizer(name).name == "toy" and tokens.tokenizer(name).encode("fox").size
    files.write_json(smol / "meta.json", {"separator": 0})
    assert tokens.tokenizer("smol").name == "smol"  # the folder, if nothing else names it
    files.write_json(smol / "meta.json", {"tokenizer": "bytes"})
    assert tokens.tokenizer("smol").name == "bytes"
    (smol / "meta.json").unlink()
    (smol / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}')
    with pytest.raises(ValueError, match="smol/tokenizer.json is not a tokenizer.json that"):
        tokens.tokenizer("smol")


MACHINE = SimpleNamespace(main=True, local_rank=0, wait=lambda: None)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """An empty data/, whose stdlib.py makes a small data set."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stdlib.py").write_text(f"""
import sys
sys.path.insert(0, {str(tokens.HERE.parent)!r})
from data import tokens
coder = tokens.tokenizer_of(args := tokens.flags("", "stdlib", "bytes").parse_args(), "stdlib")
ids = dict(train=[coder.encode("one")], val=[coder.encode("two")])
tokens.write_data_set(args.out_dir, coder, ids, dataset="stdlib")
""")
    monkeypatch.setattr(tokens, "HERE", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def test_stdlib_is_made_in_the_tokenizer_of_a_run(toy, shelf, capfd):
    assert tokens.data_for("stdlib", None, MACHINE)[0] == shelf / "stdlib"
    folder, meta = tokens.data_for("stdlib", toy, MACHINE)
    out, err = capfd.readouterr()
    assert out == ""
    assert f"making {shelf}/stdlib-toy: python data/stdlib.py --tokenizer={toy}" in err
    assert folder == shelf / "stdlib-toy" and (meta["tokenizer"], meta["separator"]) == ("toy", 0)
    (shelf / "stdlib.py").write_text("raise SystemExit(1)")
    assert tokens.data_for("stdlib", toy, MACHINE) == (folder, meta)  # it is not made again
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="stdlib.py failed"):
        tokens.data_for("stdlib", toy, MACHINE)


FIT = [  # (run, data set, the folder found or what is refused)
    *((run, "books", "data/books$") for run in (None, "older", "bytes")),
    ("numbers", "./lab", "^lab$"),
    ("toy", "books", "data/books-toy$"),
    *((run, "./foxes", "^foxes$") for run in ("toy", "older")),
    (
        "toy",
        "plays",
        "tokenizer of toy .toy.: .* python data/text.py --source=... --name=plays --tokenizer=toy$",
    ),
    ("bytes", "./foxes", "not a data set .*--tokenizer=bytes$"),
    ("namesake", "books", "books-toy is not a data set"),
    ("other", "books", "books is not a data set .*--tokenizer=other$"),
    (None, "plays", "plays/meta.json is missing"),
]


def test_a_data_set_must_be_in_the_tokenizer_of_a_run(toy, toy_data, shelf, tmp_path, backcopy):
    """An older run names none. A namesake has other ids."""
    for name, meta in (
        ("older", {}),
        *((name, {"tokenizer": name}) for name in ("bytes", "numbers")),
    ):
        files.write_json(tmp_path / name / "meta.json", meta)
    write_tokenizer(tmp_path / "other", tokenizer="other", separator=1)
    write_tokenizer(
        tmp_path / "namesake", byte_pairs("sphinx of black quartz"), tokenizer="toy", separator=0
    )
    for source, place in (
        (toy, "toy"),
        (toy_data, "foxes"),
        (backcopy, "lab"),
        (toy_data, shelf / "books-toy"),
    ):
        shutil.copytree(source, tmp_path / place)
    write_data(shelf / "books", WORDS[:99], WORDS[:99])
    for run, dataset, expected in FIT:
        try:
            found, _ = tokens.data_for(dataset, run and Path(run), MACHINE)
        except ValueError as e:
            found = e
        assert_says(expected, str(found))
