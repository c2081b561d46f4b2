"""Tokens on disk: the reader and writer of .bin shards and the tokenizers, shared by the data scripts, train.py and eval.py.

A data set is a folder data/<name>/ with shards of each split and one meta.json:

    train.bin, val.bin                     one shard a split, or
    train_000000.bin, train_000001.bin ... several, read one after another as if they were one
    meta.json                              vocab_size, tokenizer, and of every shard its tokens, bytes of text and sha256

A shard is 256 int32 of header (magic number, version, number of tokens), then the tokens as uint16: the layout of llm.c and
modded-nanogpt, which can read these files as they are. It describes itself and it can be memory-mapped.
"""
import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4   # HEADER in bytes
VERIFY_BELOW = 1 << 30                          # bytes: larger data sets are not hashed again at every start (sha256 takes about a second per GB)


# -------------------------------------------------------------------------------------------------------------------- files

@contextlib.contextmanager
def replacing(path, mode="wb"):
    """Write a file under a temporary name and rename it when all is written: a reader never meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with replacing(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not valid JSON ({e}): delete it and make it again") from None


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------------- shards

def write_shard(path, tokens):
    """Write one shard from a uint16 array. Returns its row of meta.json, still without the bytes of text."""
    tokens = np.asarray(tokens)
    if tokens.size and not (0 <= tokens.min() and tokens.max() < 1 << 16):
        raise ValueError(f"{path}: token ids must lie in 0..65535 to be stored as uint16")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, tokens.size
    with replacing(path) as f:
        f.write(header.tobytes())
        f.write(tokens.astype(np.uint16).tobytes())
    return {"tokens": int(tokens.size), "sha256": sha256(path)}


def read_shard(path):
    """Memory-map one shard as a uint16 array, after checking that it is one and that it is whole."""
    path = Path(path)
    size = path.stat().st_size
    header = np.fromfile(path, dtype=np.int32, count=256)
    if header.size < 3 or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is no token file of this project (wrong header): delete it and run its data script again")
    if size != HEADER + 2 * int(header[2]):
        raise ValueError(f"{path} is damaged: {size} bytes where its header promises {HEADER + 2 * int(header[2])}: run its data script again")
    if header[2] == 0:
        raise ValueError(f"{path} holds no tokens: run its data script again on a text that is not empty")
    return np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER)


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
            raise ValueError(f"{self.name}: token id {rows[row].max()} near token {starts[row]}, but the vocabulary has {vocab_size} ids: "
                             "wrong file, or wrong --vocab_size")
        return rows


def script_of(folder):
    """What to run to make this data set, for error messages."""
    name = Path(folder).name
    script = Path(__file__).with_name(f"{name}.py")
    return f"python data/{name}.py" if script.exists() else "a data script: " + ", ".join(data_sets())


def data_sets():
    """Names of the data sets that have a script here."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("tokens", "benchmarks", "__init__"))


def read_meta(folder, verify=True):
    """meta.json of a data set. verify: compare every shard's hash too, where the set is small enough to do so at each start."""
    folder = Path(folder)
    if not (folder / "meta.json").exists():
        raise ValueError(f"{folder / 'meta.json'} is missing: make the data set with {script_of(folder)}")
    meta = read_json(folder / "meta.json")
    if not {"vocab_size", "tokenizer", "shards"} <= meta.keys():
        raise ValueError(f"{folder / 'meta.json'} lacks vocab_size, tokenizer or shards: make the data set with {script_of(folder)}")
    for name, shard in meta["shards"].items():
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: run {script_of(folder)} again")
        if verify and 2 * sum(s["tokens"] for s in meta["shards"].values()) < VERIFY_BELOW:
            read_shard(folder / name)           # a header that is wrong says more than a hash that is
            if sha256(folder / name) != shard["sha256"]:
                raise ValueError(f"{folder / name} is not the file that meta.json describes (sha256 differs): run {script_of(folder)} again")
    return meta


def data_hash(meta):
    """One short name for all of a data set's contents."""
    return hashlib.sha256("".join(s["sha256"] for _, s in sorted(meta["shards"].items())).encode()).hexdigest()[:16]


def bytes_per_token(meta, split):
    """Bytes of text behind one token, to turn a loss in nats per token into bits per byte; None where no text is behind it."""
    shards = [s for name, s in meta["shards"].items() if name.startswith(split)]
    bytes_, tokens = (sum(s.get(key) or 0 for s in shards) for key in ("bytes", "tokens"))
    return bytes_ / tokens if bytes_ and tokens else None


# --------------------------------------------------------------------------------------------------------------- tokenizers

class Bytes:
    """One token per byte of UTF-8; id 256 separates documents."""
    vocab_size, separator = 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2:
    """OpenAI's byte-pair encoding, through tiktoken; id 50256 separates documents."""
    vocab_size, separator = 50257, 50256

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as e:                  # tiktoken downloads two files once; without network it raises what requests raises
            raise ValueError("the GPT-2 tokenizer could not be fetched; with network once, or with TIKTOKEN_CACHE_DIR naming a folder "
                             f"that holds its two files, this works ({type(e).__name__})") from None

    def encode(self, text):
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i < self.separator])


class Numbers:
    """No text at all: tokens are symbols of a synthetic task and print as numbers."""
    separator = 0

    def encode(self, text):
        try:
            return np.array([int(word) for word in text.split()], dtype=np.uint16)
        except (ValueError, OverflowError):
            raise ValueError(f"the tokens of this data set are symbols, so a prompt is numbers separated by spaces, not {text!r}") from None

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}


@functools.lru_cache
def tokenizer(name):
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


# ------------------------------------------------------------------------------------------------------------------- errors

@contextlib.contextmanager
def one_line_errors():
    """A mistake in the input or on the disk ends a command with one clear sentence instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, KeyboardInterrupt) as e:
        if os.environ.get("TRACEBACK"):         # TRACEBACK=1 python train.py ... shows where it came from
            raise
        what = "interrupted" if isinstance(e, KeyboardInterrupt) else f"error: {' '.join(str(e).split())}"
        rank = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
        print(f"{Path(sys.argv[0]).name}{rank}: {what}", file=sys.stderr, flush=True)
        sys.exit(130 if isinstance(e, KeyboardInterrupt) else 1)
