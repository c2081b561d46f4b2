"""From text to tokens on disk, and back into windows: shared by the data scripts, train.py and the instruments.

In the order of this file: a script reads text files, a tokenizer turns each text into ids, ids go into shards, shards
make a data set, and whoever trains or looks reads windows from it. A data set is a folder data/<name>/:

    train.bin, val.bin                      one shard a split, or
    train_000000.bin, train_000001.bin ...  several, read one after another as if they were one
    meta.json                               vocab_size, tokenizer; of each shard its tokens, bytes of text and sha256
    tokenizer.json                          the tokenizer itself, where it is that of a public model

A shard is 256 int32 of header (magic number, version, number of tokens), then the tokens as uint16, or as uint32 where
the vocabulary is larger: the layouts of llm.c and modded-nanogpt, which can read these files as they are. It describes
itself and it can be memory-mapped.
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
import subprocess
import sys
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
    content = None                              # it needs no file
    lengths = np.array([1] * 256 + [0])         # bytes of text behind each id

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2:
    """OpenAI's byte-pair encoding, through tiktoken; id 50256 separates documents."""
    name, vocab_size, separator = "gpt2", 50257, 50256
    content = None                              # its two files are tiktoken's business
    ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    PARTS = {                                   # its two files: bytes and sha256
        "vocab.bpe": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "encoder.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}

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
        return np.concatenate([np.array(self.bpe.encode_ordinary(part), np.uint16) for part in cut(text)])

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i < self.separator])


WORD_END = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")                    # one space between two letters


def cut(text):
    """A long text in parts of about a million characters. Byte pairs of words that begin with their space are never
    joined across a WORD_END, so that the ids stay the same."""
    found = (WORD_END.search(text, i) for i in range(1 << 20, len(text), 1 << 20))
    cuts = sorted({match.start() for match in found if match})
    return (text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)]))


class HuggingFace:
    """The tokenizer of a public model, from its tokenizer.json in Hugging Face's format.

    It belongs to a run, to a data set, or to a folder that was fetched. The name and the separator stand in the
    meta.json beside it; without one, the folder's name is its name.
    """

    def __init__(self, path):
        home, known = path.resolve().parent, meta_of(path.parent)
        self.content = path.read_bytes()        # what is copied, and what tells two tokenizers of one name apart
        library = files.optional("tokenizers")
        try:
            self.coder = library.Tokenizer.from_buffer(self.content)
        except ValueError as e:
            raise ValueError(f"{path} is no tokenizer.json that the package tokenizers can read ({e})") from None
        self.coder.encode_special_tokens = True                         # spelled in a text, they are text
        self.coder.no_truncation()              # some files ask for the one
        self.coder.no_padding()                 # or for the other
        self.name = known.get("tokenizer", home.name)
        self.vocab_size = max(self.coder.get_vocab().values()) + 1
        self.separator = known["separator"] if "separator" in known else self.find_separator(path)
        decoder = json.dumps(json.loads(self.content).get("decoder"))
        self.byte_level = "ByteLevel" in decoder                        # else it spells as SentencePiece does

    def find_separator(self, path):
        """What the tokenizer itself puts before a text; or else what the model knows as the end of one, or the
        beginning."""
        if before := self.coder.encode("", add_special_tokens=True).ids:
            return before[0]
        beside = path.with_name("tokenizer_config.json")
        config = files.read_json(beside) if beside.exists() else {}
        for token in (config.get("eos_token"), config.get("bos_token")):
            found = self.coder.token_to_id(token["content"] if isinstance(token, dict) else token or "")
            if found is not None:
                return found
        raise ValueError(f"{path} does not say which token goes between two texts: write "
                         f'{{"eos_token": "..."}} into a tokenizer_config.json beside it')

    @functools.cached_property
    def lengths(self):
        """Bytes of text behind each id, (vocab_size,): none behind special tokens."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for spelling, i in self.coder.get_vocab().items():
            lengths[i] = self.length(spelling)
        for i, token in self.coder.get_added_tokens_decoder().items():  # spelled as they are
            lengths[i] = 0 if token.special else len(token.content.encode())
        lengths[self.separator] = 0
        return lengths

    def length(self, spelling):
        if self.byte_level:                     # one printable character for each byte
            return len(spelling)
        if re.fullmatch("<0x[0-9A-F]{2}>", spelling):                   # a byte by its number
            return 1
        return len(spelling.replace("\u2581", " ").encode())            # a low line that stands for a space

    def encode(self, text):
        parts = cut(text) if self.byte_level else [text]                # SentencePiece's words may hold spaces
        found = (self.coder.encode_batch_fast([part], add_special_tokens=False)[0].ids for part in parts)
        return np.concatenate([np.array(ids, np.uint32) for ids in found])

    def decode(self, ids):
        return self.coder.decode([int(i) for i in ids if i != self.separator])      # leaves out special tokens


class Numbers:
    """No text at all: tokens are symbols of a synthetic task and print as numbers."""
    name, content = "numbers", None

    def encode(self, text):
        try:
            return np.array([int(word) for word in text.split()], dtype=np.uint16)
        except (ValueError, OverflowError):
            raise ValueError("the tokens of this data set are symbols, so a prompt is numbers separated by spaces, "
                             f"not {text!r}") from None

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}


def tokenizer(name, folder=None):
    """By a name of TOKENIZERS, by that of a run below out/, or by the path of a run, of a data set, or of any folder or
    file with a tokenizer.json. folder: where the GPT-2 tokenizer's two files are, if tiktoken does not have them yet.
    """
    if name in TOKENIZERS:
        return GPT2(folder) if name == "gpt2" else TOKENIZERS[name]()
    for place in (Path("out", name), Path(name)):
        if place.is_file() or content_of(place):
            return HuggingFace(place if place.is_file() else place / "tokenizer.json")
        if tokenizer_name(place) in TOKENIZERS:                         # of a run or a data set that needs no file
            return tokenizer(tokenizer_name(place), folder)
    raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}, or name a run below out/ "
                     "(python data/weights.py smollm2 makes one), or the path of a folder with a tokenizer.json")


def meta_of(folder):
    """What the meta.json of a run or a data set says; {} where there is none, or none that can be read."""
    try:
        found = files.read_json(Path(folder, "meta.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tokenizer_name(folder):
    """The name of a run's or a data set's tokenizer; None where its meta.json does not say it, as in older runs."""
    return meta_of(folder).get("tokenizer") if folder else None


def content_of(folder):
    """The tokenizer.json of a run, of a data set, or of a model that was fetched; None where none belongs to it: a
    meta.json that names a tokenizer without a separator means one that needs no file, whatever else lies there."""
    path, known = Path(folder, "tokenizer.json"), meta_of(folder)
    return path.read_bytes() if path.exists() and ("separator" in known or "tokenizer" not in known) else None


def keep_tokenizer(folder, content):
    """Put a tokenizer.json into the folder of a run or a data set, if it needs one."""
    if content:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(content)


def encode_all(coder, texts, separate=True, together=32):
    """The ids of each text, in order, some encoded at once (byte pairs are found outside Python's lock). separate: each
    begins with the separator."""
    texts = iter(texts)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(texts, together)):
            for ids in pool.map(coder.encode, group):
                yield np.insert(ids, 0, coder.separator) if separate else ids


# ------------------------------------------------------------------------------------------------------------- shards

HEADER = 256 * 4                                # bytes
LAYOUTS = {                                     # what a token is, and the magic number and version that say so
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7)}         # llm.c's, for Llama 3


def layout(vocab_size):
    """What a token of such a vocabulary is in a shard: the whole data set is of one kind, whichever ids occur."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def shard_header(kind, count):
    if count >= 1 << 31:
        raise ValueError("a shard holds less than 2**31 tokens: python data/fineweb_edu.py --source=... cuts a large "
                         "text into many")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = *LAYOUTS[kind], count
    return header.tobytes()


def write_shard(path, tokens, coder=None):
    """Write one shard from an array of ids, or from an iterator of arrays, of which it holds one at a time. coder: the
    tokenizer that they come from; without, they are no text. Returns its row of meta.json, with the bytes of text."""
    count, text, kind = 0, 0, layout(coder.vocab_size if coder else 1 << 16)
    with files.replacing(path) as f:
        f.write(shard_header(kind, 0))          # the number of tokens is known at the end
        for piece in tokens if hasattr(tokens, "__next__") else [tokens]:
            piece = np.asarray(piece)
            if piece.size and not (0 <= piece.min() and piece.max() <= np.iinfo(kind).max):
                raise ValueError(f"{path}: token ids must lie in 0..{np.iinfo(kind).max} to be stored as {kind}")
            f.write(piece.astype(kind).tobytes())
            count += piece.size
            text += int(coder.lengths[piece].sum()) if coder else 0
        f.seek(0)
        f.write(shard_header(kind, count))
    row = {"tokens": int(count)} | ({"bytes": text} if coder else {})
    return row | {"sha256": files.sha256(path)}


def read_shard(path):
    """Memory-map one shard, after checking that it is one and that it is whole."""
    path = Path(path)
    size = path.stat().st_size
    header = np.fromfile(path, dtype=np.int32, count=256)
    kind = next((kind for kind, marks in LAYOUTS.items() if tuple(header[:2]) == marks), None)
    if header.size < 3 or kind is None:
        raise ValueError(f"{path} is no token file of this project (wrong header): "
                         "delete it and run its data script again")
    promised = HEADER + kind.itemsize * int(header[2])
    if size != promised:
        raise ValueError(f"{path} is damaged: {size} bytes where its header promises {promised}: "
                         "run its data script again")
    if header[2] == 0:
        raise ValueError(f"{path} holds no tokens: run its data script again on a text that is not empty")
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER)


# ------------------------------------------------------------------------------------------------- data sets: written


def write_data_set(out, coder, splits, separate=True, **about):
    """A data set of one shard a split. splits: the texts of "train" and of "val", encoded and written as they come."""
    begin(out, coder)
    shards = {f"{split}.bin": write_shard(out / f"{split}.bin", encode_all(coder, texts, separate), coder)
              for split, texts in splits.items()}
    finish(out, about | described(coder) | {"shards": shards})


def described(coder):
    """What a meta.json says of a tokenizer."""
    found = {"tokenizer": coder.name, "vocab_size": coder.vocab_size}
    return found | ({"separator": coder.separator} if coder.content else {})


def begin(out, coder=None):
    """A data set is about to be written here: without meta.json it counts as incomplete, and what a killed run left
    behind goes."""
    out.mkdir(parents=True, exist_ok=True)
    earlier = [out / "tokenizer.json"] if "separator" in meta_of(out) else []
    for path in [*earlier, out / "meta.json", *out.glob(".*.bin.*.tmp"), *out.glob(".*.json.*.tmp")]:
        path.unlink(missing_ok=True)
    keep_tokenizer(out, coder and coder.content)


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

OFFLINE = {"stdlib": "bytes", "backcopy": "numbers"}                    # these need no network; their own tokenizers
VERIFY_BELOW = 1 << 30                          # bytes: more is not hashed at every start (about a second per GB)
NO_DATA_SET = ("files", "tokens", "weights", "benchmarks", "__init__")  # what else stands in data/


def data_folder(dataset, name=None):
    """A data set's folder: data/<dataset>, or any folder named by its path. name: the tokenizer that it must be in;
    where data/<dataset> is in another one, data/<dataset>-<name> stands beside it."""
    if os.sep in dataset or "/" in dataset:
        return Path(dataset)
    plain = HERE / dataset
    own = tokenizer_name(plain) or OFFLINE.get(dataset)
    if name in (None, own) or "numbers" in (name, own) or not own and name in TOKENIZERS:
        return plain                            # symbols are in no other tokenizer
    return HERE / f"{dataset}-{name}"


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
    for name in meta["shards"]:
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: run {script_of(folder)} again")
    if verify and sum((folder / name).stat().st_size for name in meta["shards"]) < VERIFY_BELOW:
        for name, shard in meta["shards"].items():
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


# ------------------------------------------------------------------------------------------------ data sets: for a run


def data_for(run, dataset, machine):
    """The folder and the meta.json of a data set in the tokenizer of a run. run: its folder, or None, which takes the
    data set as it is. One that needs no network is made if it is missing, by one rank of each machine. Raises
    ValueError where it is missing, damaged, or in another tokenizer."""
    name = tokenizer_name(run)
    folder = data_folder(dataset, name)
    if machine.local_rank == 0 and dataset in OFFLINE and not (folder / "meta.json").exists():
        make(dataset, folder, run)
    machine.wait()
    missing = folder.name == f"{dataset}-{name}" and not (folder / "meta.json").exists()
    meta = None if missing else read_meta(folder, verify=machine.main)
    if run and (missing or not same_tokenizer(run, folder)):
        raise ValueError(f"{folder} is no data set in the tokenizer of {run} ({name}): "
                         f"make one with {command_for(run, dataset)}")
    return folder, meta


def make(dataset, folder, run):
    """Run the script of a data set. What it says goes to stderr, for eval.py's stdout may be JSON."""
    flags = [] if folder == HERE / dataset else [f"--tokenizer={reference(run)}"]
    print(f"making {folder}: {' '.join(['python', f'data/{dataset}.py', *flags])}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, HERE / f"{dataset}.py", *flags], stdout=2).returncode:
        raise ValueError(f"data/{dataset}.py failed: see the line above")


def command_for(run, dataset):
    """What makes a data set in a run's tokenizer."""
    if tokenizer_name(run) == "numbers":
        return "python data/backcopy.py"
    scripted = dataset in data_sets() and dataset != "text" and OFFLINE.get(dataset) != "numbers"
    script = f"{dataset}.py" if scripted else f"text.py --source=... --name={Path(dataset).name}"
    return f"python data/{script} --tokenizer={reference(run)}"


def reference(run):
    """What --tokenizer calls the tokenizer of a run."""
    return run if content_of(run) else tokenizer_name(run)


def same_tokenizer(run, folder):
    """Do a run and a data set have the same one? True of an older run, which does not say."""
    ours, theirs = content_of(run), content_of(folder)
    if ours and theirs:
        return ours == theirs
    return tokenizer_name(run) in (None, tokenizer_name(folder))


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
        if len({shard.dtype for shard in self.shards}) > 1:
            raise ValueError(f"{self.name}_*.bin are of two data sets (their tokens have two sizes): delete them "
                             f"and run {script_of(folder)} again")
        self.ends = np.cumsum([len(s) for s in self.shards])

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """Tokens start .. start+length-1; a window may run over the border of two shards."""
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
        raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of {length}: "
                         "lower --block_size (in eval.py --length), or add data")
    fit = max(1, (len(split) - 1) // length)
    return np.linspace(0, last, min(count, fit) if count else fit).astype(np.int64) * stride


# ------------------------------------------------------------------------------------------ flags of the data scripts


def flags(doc, dataset, tokenizer):
    """The argument parser of a data script, with the flags that all of them share. Its errors are one line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--out_dir", type=Path,
                        help=f"where the data set goes (default: data/{dataset}; in a public model's tokenizer "
                             f"data/{dataset}-TOKENIZER, so that it can be there in several)")
    parser.add_argument("--source", type=Path, help="local file or folder to read")
    parser.add_argument("--tokenizer", default=tokenizer,
                        help="bytes; gpt2; the name of a run below out/ that came with a tokenizer (smollm2); or the "
                             "path of a folder or file with a tokenizer.json (default: %(default)s)")
    parser.add_argument("--tokenizer_files", type=Path,
                        help="folder with vocab.bpe and encoder.json, for gpt2 without network")
    return parser


def settle(args, dataset):
    """The tokenizer that the flags name; and where the data set goes, if they do not say it."""
    coder = tokenizer(args.tokenizer, args.tokenizer_files)
    if coder.name == "numbers":
        raise ValueError(f"--tokenizer={args.tokenizer} is for symbols, not for text: choose bytes or gpt2")
    # train.py makes data/stdlib by itself, and relies on what it is in
    plain = coder.name == OFFLINE[dataset] if dataset in OFFLINE else coder.name in TOKENIZERS
    args.out_dir = args.out_dir or HERE / (dataset if plain else f"{dataset}-{coder.name}")
    return coder
