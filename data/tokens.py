"""From text to tokens on disk, and back into windows: shared by the data scripts, train.py and the instruments.

In the order of this file: a script reads text files, a tokenizer turns each text into ids, ids go into shards, shards
make a data set, and whoever trains or looks reads windows from it. A data set is a folder data/<name>/:

    train.bin, val.bin                      one shard a split, or
    train_000000.bin, train_000001.bin ...  several, read one after another as if they were one
    meta.json                               vocab_size, tokenizer; of each shard its tokens, bytes of text and sha256

A shard is 256 int32 of header (magic number, version, number of tokens), then the tokens as uint16: the layout of llm.c
and modded-nanogpt, which can read these files as they are. It describes itself and it can be memory-mapped.
"""
import argparse
import functools
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data import files

HERE = Path(__file__).parent

# --------------------------------------------------------------------------------------------------------- text files


class NotText(ValueError):
    """A file that is empty or binary: a mistake where it was named, passed over where a folder was."""


def source_files(source, endings=None):
    """The files of a --source in a fixed order: itself, or all below a folder but the hidden ones. endings: those
    wanted, .gz aside; None: all."""
    if not source.exists():
        raise ValueError(f"--source={source} does not exist: name a file or a folder")
    found = [source] if source.is_file() else [
        path for path in source.rglob("*") if path.is_file() and not hidden(path.relative_to(source))]
    wanted = sorted((p for p in found if endings is None or ending(p) in endings), key=lambda p: p.as_posix())
    if found and not wanted:
        raise ValueError(f"--source={source}: unknown source type, choose files that end in {' '.join(endings)} "
                         "(or these with .gz)")
    if not wanted:
        raise ValueError(f"--source={source}: there are no files in this folder")
    return wanted


def hidden(path):
    return any(part.startswith(".") for part in path.parts)


def ending(path):
    """What kind of file it is, packed or not: .jsonl for a.jsonl and for a.jsonl.gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def documents(path):
    """The texts of one source file: the "text" of each row of a .parquet or .jsonl, or else the whole file. Empty rows
    are left out."""
    texts = {".parquet": parquet_texts, ".jsonl": jsonl_texts}.get(ending(path), whole_text)
    try:
        yield from (text for text in texts(path) if text and not text.isspace())
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path} is damaged ({e}): fetch it again") from None


def parquet_texts(path):
    parquet = files.optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise ValueError(f'no column "text", only {", ".join(table.schema_arrow.names)}')
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                yield from batch["text"].to_pylist()
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} cannot be read as parquet ({e}): fetch it again") from None


def jsonl_texts(path):
    with unpacked(path) as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                    yield text.encode("utf-8", "replace").decode()      # JSON can hold half characters, UTF-8 cannot
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ValueError(f'{path}, line {number} is not a JSON object with a string "text": '
                                     "mend or remove it") from None


def whole_text(path):
    """The whole file as its one document."""
    yield read_text(path)


def read_text(path):
    """A file as one text. Raises NotText where it is empty, binary or in another encoding than UTF-8."""
    with unpacked(path) as f:
        content = f.read(1 << 16)
        if b"\0" not in content:                # a binary file is known by its beginning, and may be large
            content += f.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise NotText(f"{path} is not text in UTF-8 (it is binary, or in another encoding): "
                      "name a text file, or convert it with iconv")
    if not text or text.isspace():
        raise NotText(f"{path} is empty: name a file with text in it")
    return text


def unpacked(path):
    return gzip.open(path) if path.name.endswith(".gz") else open(path, "rb")


# --------------------------------------------------------------------------------------------------------- tokenizers


class Bytes:
    """One token per byte of UTF-8; id 256 separates documents."""
    name, vocab_size, separator = "bytes", 257, 256
    lengths = np.array([1] * 256 + [0])         # bytes of text behind each id

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2:
    """OpenAI's byte-pair encoding, through tiktoken; id 50256 separates documents."""
    name, vocab_size, separator = "gpt2", 50257, 50256
    ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    PARTS = {                                   # its two files: bytes and sha256
        "vocab.bpe": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "encoder.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}
    WORD_END = re.compile(r"(?<=\S)[ \n]")

    def __init__(self, folder=None):
        tiktoken = files.optional("tiktoken")
        # where tiktoken looks for a file: in this folder, under the hash of its address
        cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
                     or f"{tempfile.gettempdir()}/data-gym-cache")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
        for name in self.PARTS:
            self.put(cache / hashlib.sha1((self.ADDRESS + name).encode()).hexdigest(), name, folder)
        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as e:                  # a tiktoken that looks elsewhere downloads, and raises as requests does
            raise ValueError(f"the GPT-2 tokenizer could not be fetched by tiktoken ({type(e).__name__}): "
                             "run this again with network") from None

    def put(self, place, name, folder):
        """Put one of the two files where tiktoken looks for it, from a folder or from the network: tiktoken's own
        download has no time limit, and deletes what it does not know."""
        size, digest = self.PARTS[name]
        if place.exists() and files.sha256(place) == digest:
            return
        if not folder:
            return files.download(
                self.ADDRESS + name, place, size, digest, "the GPT-2 tokenizer", "name a folder that has it with "
                "TIKTOKEN_CACHE_DIR, or with a data script's --tokenizer_files")
        if not (folder / name).exists() or files.sha256(folder / name) != digest:
            raise ValueError(f"{folder / name} is missing or is not the GPT-2 tokenizer's: "
                             "name a folder with OpenAI's vocab.bpe and encoder.json")
        with files.replacing(place) as f:
            f.write((folder / name).read_bytes())

    @functools.cached_property
    def lengths(self):
        return np.array([len(self.bpe.decode_single_token_bytes(i)) for i in range(self.separator)] + [0])

    def encode(self, text):
        # a long text is cut where a word ends at a space or a line: the encoding never joins across that, so the ids
        # stay the same
        found = (self.WORD_END.search(text, i) for i in range(1 << 20, len(text), 1 << 20))
        cuts = sorted({match.start() for match in found if match})
        parts = (text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)]))
        return np.concatenate([np.array(self.bpe.encode_ordinary(part), dtype=np.uint16) for part in parts])

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i < self.separator])


class Numbers:
    """No text at all: tokens are symbols of a synthetic task and print as numbers."""

    def encode(self, text):
        try:
            return np.array([int(word) for word in text.split()], dtype=np.uint16)
        except (ValueError, OverflowError):
            raise ValueError("the tokens of this data set are symbols, so a prompt is numbers separated by spaces, "
                             f"not {text!r}") from None

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}


@functools.lru_cache
def tokenizer(name, folder=None):
    """folder: where the GPT-2 tokenizer's two files are, if tiktoken does not have them yet."""
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}")
    return GPT2(folder) if name == "gpt2" else TOKENIZERS[name]()


def encode_all(coder, texts, separate=True, together=32):
    """The ids of each text, in order, some encoded at once (tiktoken works outside Python's lock). separate: each
    begins with the separator."""
    head, texts = np.array([coder.separator] * separate, np.uint16), iter(texts)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(texts, together)):
            for ids in pool.map(coder.encode, group):
                yield np.concatenate([head, ids])


# ------------------------------------------------------------------------------------------------------------- shards

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4   # HEADER in bytes


def shard_header(count):
    if count >= 1 << 31:
        raise ValueError("a shard holds less than 2**31 tokens: python data/fineweb_edu.py --source=... cuts a large "
                         "text into many")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, count
    return header.tobytes()


def write_shard(path, tokens, lengths=None):
    """Write one shard from an array of ids, or from an iterator of arrays, of which it holds one at a time. Returns its
    row of meta.json, with the bytes of text where `lengths` says how many stand behind each id."""
    count, text = 0, 0
    with files.replacing(path) as f:
        f.write(shard_header(0))                # the number of tokens is known at the end
        for piece in tokens if hasattr(tokens, "__next__") else [tokens]:
            piece = np.asarray(piece)
            if piece.size and not (0 <= piece.min() and piece.max() < 1 << 16):
                raise ValueError(f"{path}: token ids must lie in 0..65535 to be stored as uint16")
            f.write(piece.astype(np.uint16).tobytes())
            count += piece.size
            text += int(lengths[piece].sum()) if lengths is not None else 0
        f.seek(0)
        f.write(shard_header(count))
    row = {"tokens": int(count)} | ({"bytes": text} if lengths is not None else {})
    return row | {"sha256": files.sha256(path)}


def read_shard(path):
    """Memory-map one shard as a uint16 array, after checking that it is one and that it is whole."""
    path = Path(path)
    size = path.stat().st_size
    header = np.fromfile(path, dtype=np.int32, count=256)
    if header.size < 3 or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is no token file of this project (wrong header): "
                         "delete it and run its data script again")
    promised = HEADER + 2 * int(header[2])
    if size != promised:
        raise ValueError(f"{path} is damaged: {size} bytes where its header promises {promised}: "
                         "run its data script again")
    if header[2] == 0:
        raise ValueError(f"{path} holds no tokens: run its data script again on a text that is not empty")
    return np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER)


# ------------------------------------------------------------------------------------------------- data sets: written


def write_data_set(out, coder, splits, separate=True, **about):
    """A data set of one shard a split. splits: the texts of "train" and of "val", encoded and written as they come."""
    begin(out)
    shards = {f"{split}.bin": write_shard(out / f"{split}.bin", encode_all(coder, texts, separate), coder.lengths)
              for split, texts in splits.items()}
    finish(out, about | {"tokenizer": coder.name, "vocab_size": coder.vocab_size, "shards": shards})


def begin(out):
    """A data set is about to be written here: without meta.json it counts as incomplete, and what a killed run left
    behind goes."""
    out.mkdir(parents=True, exist_ok=True)
    for path in [out / "meta.json", *out.glob(".*.bin.*.tmp"), *out.glob(".*.json.*.tmp")]:
        path.unlink(missing_ok=True)


def finish(out, meta):
    """All shards are written: those of an earlier data set go, since Tokens would read them too, and meta.json comes
    last."""
    for path in out.glob("*.bin"):
        if path.name not in meta["shards"] and re.fullmatch(r"(train|val)(_\d{6})?\.bin", path.name):
            path.unlink()
    files.write_json(out / "meta.json", meta)
    train, val = (sum(shard["tokens"] for shard in shards_of(meta, split)) for split in ("train", "val"))
    print(f"data: {meta['dataset']}, {meta['tokenizer']}: {train:,} tokens to train on, {val:,} held out, in {out}")


def shards_of(meta, split):
    """The rows of meta.json on the shards of one split."""
    return [shard for name, shard in meta["shards"].items() if name.startswith(split)]


# --------------------------------------------------------------------------------------------------- data sets: known

VERIFY_BELOW = 1 << 30                          # bytes: more is not hashed at every start (about a second per GB)
NO_DATA_SET = ("files", "tokens", "benchmarks", "__init__")             # what else stands in data/


def data_folder(dataset):
    """A data set's folder: data/<name>, or any folder named by its path."""
    return Path(dataset) if os.sep in dataset or "/" in dataset else Path(__file__).with_name(dataset)


def data_sets():
    """Names of the data sets that have a script here."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_DATA_SET)


def script_of(folder):
    """What to run to make this data set, for error messages."""
    name = Path(folder).name
    known = (HERE / f"{name}.py").exists()
    return f"python data/{name}.py" if known else "a data script: " + ", ".join(data_sets())


def read_meta(folder, verify=True):
    """meta.json of a data set. verify: compare every shard's hash too, where the set is small enough to do so at each
    start. Raises ValueError where something is missing or damaged."""
    folder = Path(folder)
    if not (folder / "meta.json").exists():
        raise ValueError(f"{folder / 'meta.json'} is missing: make the data set with {script_of(folder)}")
    meta = files.read_json(folder / "meta.json")
    if not is_whole(meta):
        raise ValueError(f"{folder / 'meta.json'} lacks vocab_size, tokenizer or shards: "
                         f"make the data set with {script_of(folder)}")
    small = 2 * sum(shard["tokens"] for shard in meta["shards"].values()) < VERIFY_BELOW
    for name, shard in meta["shards"].items():
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: run {script_of(folder)} again")
        if verify and small:
            check_shard(folder / name, shard["sha256"], meta["vocab_size"])
    return meta


def is_whole(meta):
    """Does meta.json say what everybody relies on?"""
    try:
        rows = meta["shards"].values()
        return {"vocab_size", "tokenizer"} <= meta.keys() and all({"tokens", "sha256"} <= row.keys() for row in rows)
    except (AttributeError, KeyError, TypeError):
        return False


def check_shard(path, digest, vocab_size):
    """Read a whole shard once, before any work rests on it."""
    ids, again = read_shard(path), f"run {script_of(path.parent)} again"
    if files.sha256(path) != digest:
        raise ValueError(f"{path} is not the file that meta.json describes (sha256 differs): {again}")
    if ids.max() >= vocab_size:
        raise ValueError(f"{path} holds the token id {ids.max()}, but its meta.json says "
                         f"vocab_size={vocab_size}: {again}")


def check_vocabulary(config, meta, dataset):
    """Do the token ids of a data set fit a model, and its sequences its windows? Raises ValueError if not."""
    if config.block_size >= meta.get("stride", math.inf):
        raise ValueError(f"block_size={config.block_size}, but the sequences of {dataset} have {meta['stride'] - 1} "
                         "tokens: lower --block_size, or make longer sequences (--length)")
    if meta["vocab_size"] > config.vocab_size:
        raise ValueError(f"the model's vocabulary has vocab_size={config.vocab_size} ids, "
                         f"the data set {dataset} needs {meta['vocab_size']}")


def data_hash(meta):
    """One short name for all of a data set's contents."""
    digests = (shard["sha256"] for _, shard in sorted(meta["shards"].items()))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def bytes_per_token(meta, split):
    """Bytes of text behind one token, to turn a loss in nats per token into bits per byte; None without text."""
    size, tokens = (sum(shard.get(key) or 0 for shard in shards_of(meta, split)) for key in ("bytes", "tokens"))
    return size / tokens if size and tokens else None


# ------------------------------------------------------------------------------------------------------------ windows


class Tokens:
    """The shards of one split, read as one long array that may be larger than memory. len() counts its tokens."""

    def __init__(self, folder, split):
        folder = Path(folder)
        paths = sorted(folder.glob(f"{split}_*.bin")) or [folder / f"{split}.bin"]
        if not paths[0].exists():
            raise ValueError(f"{paths[0]} is missing: make it with {script_of(folder)}")
        self.name = str(folder / split)
        self.shards = [read_shard(p) for p in paths]
        self.ends = np.cumsum([len(s) for s in self.shards])

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """Tokens start .. start+length-1 as uint16; a window may run over the border of two shards."""
        pieces, i = [], int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            offset = start - (self.ends[i] - len(self.shards[i]))
            pieces.append(self.shards[i][offset:offset + length])
            start, length, i = start + len(pieces[-1]), length - len(pieces[-1]), i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def windows(self, starts, length, vocab_size):
        """The windows at these starts as one int64 array (len(starts), length), ids checked against the vocabulary."""
        rows = np.stack([self.window(int(s), length) for s in starts]).astype(np.int64)
        if rows.max() >= vocab_size:
            row = int((rows >= vocab_size).any(1).argmax())
            raise ValueError(f"{self.name}: token id {rows[row].max()} near token {starts[row]}, but the vocabulary "
                             f"has {vocab_size} ids: wrong file, or wrong --vocab_size")
        return rows


def fixed_windows(split, length, count, stride=1):
    """Starts of `count` windows of length+1 tokens (0: as many as fit side by side), spread evenly over a split, the
    same at every call; fewer if the split is short."""
    last = (len(split) - length - 1) // stride
    if last < 0:
        raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of block_size={length}: "
                         "lower --block_size or add data")
    fit = max(1, (len(split) - 1) // length)
    return np.linspace(0, last, min(count, fit) if count else fit).astype(np.int64) * stride


# ------------------------------------------------------------------------------------------ flags of the data scripts


def flags(doc, folder, tokenizer):
    """The argument parser of a data script, with the flags that all of them share. Its errors are one line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--out_dir", type=Path, default=HERE / folder,
                        help="where the data set goes (its folder in data/)")
    parser.add_argument("--source", type=Path, help="local file or folder to read")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default=tokenizer, help="default: %(default)s")
    parser.add_argument("--tokenizer_files", type=Path,
                        help="folder with vocab.bpe and encoder.json, for gpt2 without network")
    return parser
