"""data/tokens.py, coders.py and lookup.py: shards on disk, windows over them, tokenizers."""
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SPECIAL, TEXT, WORDS, byte_pairs, write_data, write_tokenizer

from common import files
from data import coders, lookup, tokens

# --------------------------------------------------------------------------------------------------- shards and windows


def test_every_script_that_makes_a_data_set_is_known():
    assert tokens.data_sets() == ["backcopy", "fineweb_edu", "shakespeare", "stdlib", "text"]


def test_a_shard_is_read_back_and_its_header_is_that_of_llm_c(tmp_path):
    ids = np.array([0, 1, 256, 65535], np.uint16)
    row = tokens.write_shard(tmp_path / "train.bin", ids)
    raw = (tmp_path / "train.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 4] + [0] * 253
    assert np.frombuffer(raw[1024:], "<u2").tolist() == ids.tolist()
    assert tokens.read_shard(tmp_path / "train.bin").tolist() == ids.tolist()
    assert row == {"tokens": 4, "sha256": hashlib.sha256(raw).hexdigest()}


def test_a_large_vocabulary_has_wider_shards_for_any_ids(tmp_path):
    narrow, wide = ("<u2", [20240520, 1]), ("<u4", [20240801, 7])
    for vocab_size, ids, (kind, marks) in ((65536, [0, 65535], narrow), (65537, [5, 6], wide),
                                           (128256, [0, 128255], wide)):
        coder = SimpleNamespace(vocab_size=vocab_size, lengths=np.full(vocab_size, 3))
        row = tokens.write_shard(tmp_path / "train.bin", np.array(ids), coder)
        raw = (tmp_path / "train.bin").read_bytes()
        assert np.frombuffer(raw[:1024], "<i4").tolist() == [*marks, 2] + [0] * 253
        assert np.frombuffer(raw[1024:], kind).tolist() == ids and row["bytes"] == 6
        rows = tokens.Tokens(tmp_path, "train").windows([0], 2, vocab_size)
        assert rows.dtype == np.int64 and rows.tolist() == [ids]


def test_shards_of_two_sizes_are_refused(tmp_path):
    tokens.write_shard(tmp_path / "train_000000.bin", np.array([1, 2]))
    tokens.write_shard(tmp_path / "train_000001.bin", np.array([1, 2]),
                       SimpleNamespace(vocab_size=70000, lengths=np.ones(3, int)))
    with pytest.raises(ValueError, match="train_.*two sizes.*run"):
        tokens.Tokens(tmp_path, "train")


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


def test_an_id_outside_the_vocabulary_is_reported_with_its_file(tmp_path):
    tokens.write_shard(tmp_path / "val.bin", np.array([1, 2, 3, 99, 4, 5]))
    split = tokens.Tokens(tmp_path, "val")
    assert split.windows([0], 3, 50).tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="val.*99.*50"):
        split.windows([0, 2], 3, 50)


def test_meta_and_hash_follow_the_contents(data, tmp_path):
    meta = tokens.read_meta(data)
    assert (meta["vocab_size"], meta["tokenizer"]) == (257, "bytes") and meta["shards"]["val.bin"]["tokens"] == 4000
    other = tokens.read_meta(write_data(tmp_path / "other", [1, 2], [3]))
    assert tokens.data_hash(meta) == tokens.data_hash(tokens.read_meta(data)) != tokens.data_hash(other)
    assert tokens.bytes_per_token(meta, "val") == 1.0


def test_shards_are_mapped_not_read(tmp_path):
    folder = write_data(tmp_path, np.zeros(1000), np.zeros(100))
    assert all(isinstance(shard, np.memmap) for shard in tokens.Tokens(folder, "train").shards)


# ---------------------------------------------------------------------------------------------------------- tokenizers

def test_bytes_round_trip_and_stay_within_their_vocabulary():
    coder, text = tokens.tokenizer("bytes"), "naïve\n\t€ 漢字 😀\0"
    ids = coder.encode(text)
    assert ids.dtype == np.uint16 and ids.max() < coder.separator < coder.vocab_size
    assert coder.decode(ids) == coder.decode(ids.tolist()) == text
    assert coder.decode([256, 104, 105, 256]) == "hi" and coder.decode([255, 104]) == "\ufffdh"
    assert len(coder.encode("")) == 0


def test_numbers_round_trip():
    coder = tokens.tokenizer("numbers")
    assert coder.decode(coder.encode("3 0 65535")) == "3 0 65535"


# ------------------------------------------------------------------------------------- the tokenizer of a public model

ODD = ["", " ", "the lazy dog", "<|end|> and<|im_end|>", "12345 6.78", "it's DON'T", "\u2028\u00a0",
       "naïve  café\n\n\t  x", "漢字 😀\U0001f469\u200d\U0001f467 \0 end", "a   b    c\r\n"]


def test_ids_equal_those_of_the_package_tokenizers_and_special_tokens_are_text(toy):
    """The texts are odd characters and Python's own library: English, code and some other alphabets."""
    coder, described = tokens.tokenizer(str(toy)), json.loads((toy / "tokenizer.json").read_text())
    assert (coder.name, coder.vocab_size, coder.separator) == ("toy", 300, 0)
    assert coder.lengths.shape == (300,) and coder.lengths[:2].tolist() == [0, 0]
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_str(json.dumps(described))
    bare = theirs.from_str(json.dumps(described | {"added_tokens": []}))                # without special tokens
    library = [path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:10]]
    for text in [*ODD, TEXT, *library]:
        ids = coder.encode(text)
        assert ids.tolist() == bare.encode(text).ids
        assert coder.decode(ids) == coder.decode(ids.tolist()) == text
        assert coder.lengths[ids].sum() == len(text.encode())
    assert theirs.encode("x<|end|>").ids[-1] == 0 and coder.encode("x<|end|>")[-1] != 0


def test_special_tokens_and_the_separator_are_not_shown(toy):
    coder = tokens.tokenizer(str(toy))
    assert coder.decode([0, *coder.encode("fox"), 1, 0, *coder.encode(" dog"), 299 + 7]) == "fox dog"


def test_the_spelling_of_sentencepiece_is_decoded(tmp_path):
    """As in Llama 2, spaces are low lines, bytes are written as numbers, and a special token precedes each text."""
    lib = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abé"]
    coder = lib.Tokenizer(lib.models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>",
                                         byte_fallback=True))
    coder.add_special_tokens(words[:3])
    coder.normalizer = lib.normalizers.Replace(" ", "\u2581")
    coder.decoder = lib.decoders.Sequence([
        lib.decoders.Replace("\u2581", " "), lib.decoders.ByteFallback(), lib.decoders.Fuse()])
    coder.post_processor = lib.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ours = tokens.tokenizer(str(write_tokenizer(tmp_path / "llama", coder)))
    assert (ours.name, ours.separator, ours.lengths[:3].sum()) == ("llama", 1, 0)
    for text in ("ab é a", "  ", "\n漢b"):
        assert ours.lengths[ours.encode(text)].sum() == len(text.encode()) and ours.decode(ours.encode(text)) == text


def test_a_long_text_is_cut_where_it_makes_no_difference(toy):
    coder, text = tokens.tokenizer(str(toy)), "\n\n".join((TEXT * 40 + "x.\n", "... 12 34 -- ")) * 330
    assert len(text) > 1 << 20 and len(list(coders.cut(text))) == 2 and "".join(coders.cut(text)) == text
    assert coder.encode(text).tolist() == coder.coder.encode(text, add_special_tokens=False).ids
    assert coder.lengths[coder.encode(text)].sum() == len(text.encode())


def test_truncation_and_padding_in_a_tokenizer_file_are_ignored(tmp_path):
    coder = byte_pairs()
    coder.enable_truncation(3)
    coder.enable_padding(length=99)
    ours = tokens.tokenizer(str(write_tokenizer(tmp_path / "short", coder, separator=1)))
    assert ours.decode(ours.encode(TEXT)) == TEXT and len(ours.encode("fox")) < 4


def test_how_the_separator_is_found(tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    for config, expected in (({"eos_token": SPECIAL[1]}, 1), ({"bos_token": SPECIAL[0]}, 0),
                             ({"bos_token": {"content": SPECIAL[1]}, "eos_token": SPECIAL[0]}, 1)):
        files.write_json(folder / "tokenizer_config.json", config)
        assert tokens.tokenizer(str(folder)).separator == expected
    files.write_json(folder / "config.json", {"bos_token_id": 5, "eos_token_id": [6, 7]})
    assert tokens.tokenizer(str(folder)).separator == 5                 # config.json overrides a spelling
    files.write_json(folder / "meta.json", {"separator": 7})            # meta.json of a run overrides both
    assert tokens.tokenizer(str(folder)).separator == 7


def test_endoftext_is_the_separator_if_it_exists(tmp_path):
    folder = write_tokenizer(tmp_path / "model", byte_pairs(specials=("<s>", "<|endoftext|>")))
    files.write_json(folder / "config.json", {"bos_token_id": 0, "eos_token_id": 0})
    assert tokens.tokenizer(str(folder)).separator == 1


def test_a_tokenizer_is_found_by_several_names(toy, toy_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy, tmp_path / "out" / "smol")
    shutil.copy(toy / "tokenizer.json", tmp_path / "my.json")
    for name in ("smol", "out/smol", "out/smol/tokenizer.json", str(toy), str(toy_data)):
        assert tokens.tokenizer(name).name == "toy" and tokens.tokenizer(name).encode("fox").size
    files.write_json(tmp_path / "out" / "small" / "meta.json", {"tokenizer": "bytes"})
    assert tokens.tokenizer("small").name == "bytes"                    # a run that needs no file
    files.write_json(tmp_path / "meta.json", {"separator": 0})
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "my.json").read_bytes())
    assert tokens.tokenizer("tokenizer.json").name == tmp_path.name     # the folder, if nothing else names it


def test_a_leftover_tokenizer_file_is_ignored(toy, tmp_path):
    """If meta.json names a tokenizer without a separator, this tokenizer needs no file."""
    folder = shutil.copytree(toy, tmp_path / "run")
    assert tokens.content_of(folder) == tokens.content_of(toy) and tokens.content_of(toy)
    files.write_json(folder / "meta.json", {"tokenizer": "bytes"})
    assert tokens.content_of(folder) is None and tokens.tokenizer(str(folder)).name == "bytes"


# ---------------------------------------------------------------------------------- data sets in a run's tokenizer

MACHINE = SimpleNamespace(main=True, local_rank=0, wait=lambda: None)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """An empty data/, whose stdlib.py makes a small data set."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stdlib.py").write_text(f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(tokens.HERE.parent)!r})
from data import tokens
tokens.HERE = Path(__file__).parent
args = tokens.flags("", "stdlib", "bytes").parse_args()
coder = tokens.settle(args, "stdlib")
tokens.write_data_set(args.out_dir, coder, dict(train=["one"], val=["two"]), dataset="stdlib")
""")
    monkeypatch.setattr(tokens, "HERE", tmp_path / "data")
    return tmp_path / "data"


def test_stdlib_is_made_in_the_tokenizer_of_a_run(toy, shelf, capfd):
    assert tokens.data_for(None, "stdlib", MACHINE)[0] == shelf / "stdlib"
    folder, meta = tokens.data_for(toy, "stdlib", MACHINE)
    out, err = capfd.readouterr()
    assert out == "" and f"making {folder}: python data/stdlib.py --tokenizer={toy}" in err
    assert folder == shelf / "stdlib-toy" and (meta["tokenizer"], meta["separator"]) == ("toy", 0)
    assert tokens.tokenizer_name(shelf / "stdlib") == "bytes"           # this one does not change
    assert tokens.data_for(toy, "stdlib", MACHINE)[1] == meta and capfd.readouterr() == ("", "")
    (shelf / "stdlib.py").write_text("raise SystemExit(1)")
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="stdlib.py failed"):
        tokens.data_for(toy, "stdlib", MACHINE)


def test_a_data_set_in_another_tokenizer_is_refused_with_the_command(toy, toy_data, shelf, tmp_path, data):
    books = write_data(shelf / "books", WORDS[:99], WORDS[:99])
    older = tmp_path / "older"
    files.write_json(older / "meta.json", {"knobs": {}})                # names no tokenizer
    of_bytes = tmp_path / "of_bytes"
    files.write_json(of_bytes / "meta.json", {"tokenizer": "bytes"})
    for run, dataset in ((None, "books"), (older, "books"), (of_bytes, "books"), (of_bytes, str(data)),
                         (toy, str(toy_data)), (older, str(toy_data))):
        tokens.data_for(run, dataset, MACHINE)
    for run, dataset, name in ((toy, "books", "books"), (toy, str(data), "fox")):
        with pytest.raises(ValueError, match=f"{name}.* no data set in the tokenizer of .*toy.* python data/text.py "
                                             f"--source=... --name={name} --tokenizer={toy}"):
            tokens.data_for(run, dataset, MACHINE)
    with pytest.raises(ValueError, match="--tokenizer=bytes"):
        tokens.data_for(of_bytes, str(toy_data), MACHINE)
    shutil.copytree(toy_data, shelf / "books-toy")
    assert tokens.data_for(toy, "books", MACHINE)[0] == shelf / "books-toy" != books
    other = write_tokenizer(tmp_path / "other", byte_pairs("sphinx of black quartz"), tokenizer="toy", separator=0)
    with pytest.raises(ValueError, match=f"books-toy is no data set .*--tokenizer={other}"):        # same name
        tokens.data_for(other, "books", MACHINE)


def test_the_same_tokenizer_under_two_names_is_recognised(toy, toy_data, shelf, tmp_path):
    """It may have been saved again by another program. Truncation makes no difference, but another separator does."""
    books = shutil.copytree(toy_data, shelf / "books-toy")
    files.write_json(books / "meta.json", files.read_json(books / "meta.json") | {"dataset": "books"})
    described = json.loads((toy / "tokenizer.json").read_text())
    for name, separator in (("twin", 0), ("other", 1)):
        run = tmp_path / name
        files.write_json(run / "tokenizer.json", dict(reversed(described.items())) | {"truncation": {"max_length": 9}})
        files.write_json(run / "meta.json", {"tokenizer": name, "separator": separator})
    assert tokens.data_for(tmp_path / "twin", "books", MACHINE)[0] == books
    assert tokens.data_for(tmp_path / "twin", str(toy_data), MACHINE)[0] == toy_data
    with pytest.raises(ValueError, match=f"books-other is no data set .*--tokenizer={tmp_path / 'other'}"):
        tokens.data_for(tmp_path / "other", "books", MACHINE)
    french = shutil.copytree(toy_data, shelf / "books-french")          # another data set, not these books
    shutil.rmtree(books)
    assert tokens.data_folder("books", tmp_path / "twin") == shelf / "books-twin" != french


def test_a_file_with_the_byte_tokenizer_is_recognised(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(coders.Bytes().exported())
    assert tokens.tokenizer(str(folder)).name == lookup.identity(folder) == "bytes"
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ODD:
        assert theirs.encode(text).ids == tokens.tokenizer("bytes").encode(text).tolist()
        assert theirs.decode(theirs.encode(text).ids) == text


def test_a_run_on_symbols_accepts_only_data_of_symbols(tmp_path, shelf, backcopy, data):
    run = tmp_path / "lab"
    files.write_json(run / "meta.json", {"tokenizer": "numbers"})
    assert tokens.data_for(run, str(backcopy), MACHINE)[1]["vocab_size"] == 66
    with pytest.raises(ValueError, match="python data/backcopy.py"):
        tokens.data_for(run, "stdlib", MACHINE)
