"""From text to tokens on disk, and back into windows: shared by the data scripts, train.py and the instruments.

In the order of this file: a script reads text files, a tokenizer (coders.py) turns each text into ids, the ids are
written to shards, the shards form a data set, and training and instruments read windows from it. A data set is a folder
data/<name>/:

    train.bin, val.bin                      one shard a split, or
    train_000000.bin, train_000001.bin ...  several, read one after another as if they were one
    train.starts.bin ...                    beside each shard, for train.py --docs=1: where its documents begin, uint64
    meta.json                               vocab_size, tokenizer; each shard's tokens, bytes of text and sha256
    tokenizer.json                          the tokenizer itself, if a public model's

A shard is a header of 256 int32 (magic number, version, number of tokens), then the tokens as uint16, or as uint32 for
a larger vocabulary. llm.c and modded-nanogpt use the same layouts, so they can read these files. A shard can be
memory-mapped.
"""
import contextlib
import gzip
import hashlib
import itertools
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

from common import files
from common.flags import Parser
from data.coders import content_of, identity, keep_tokenizer, meta_of, tokenizer, tokenizer_name

HERE = Path(__file__).parent

# --------------------------------------------------------------------------------------------------------- text files


class NotText(ValueError):
    """A file that is empty or binary: refused if --source names it, skipped if --source is its folder."""


def source_files(source, endings=None):
    """The files of a --source in a fixed order: the file itself, or all files below a folder except hidden ones.
    endings: the accepted ones, without .gz; None: all."""
    if not source.exists():
        raise ValueError(f"--source={source} does not exist: name a file or a folder")
    found = [source] if source.is_file() else [
        path for path in source.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)]
    wanted = sorted((p for p in found if endings is None or ending(p) in endings), key=Path.as_posix)
    if not wanted:
        which = f" that end in {' '.join(endings)} (or these with .gz)" if endings else ""
        raise ValueError(f"--source={source} holds no files{which}: name another folder")
    return wanted


def ending(path):
    """The kind of a file, compressed or not: .jsonl for a.jsonl and a.jsonl.gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def documents(path):
    """The texts of one source file: the "text" of each row of a .parquet or .jsonl, otherwise the whole file. Empty
    rows are left out."""
    match ending(path):
        case ".parquet":
            texts = parquet_texts(path)
        case ".jsonl":                          # JSON can hold lone surrogates, UTF-8 cannot
            texts = jsonl_rows(path, lambda row: row["text"].encode("utf-8", "replace").decode(),
                               'JSON object with a string "text"')
        case _:
            texts = [read_text(path)]
    yield from (text for text in texts if text and not text.isspace())


def parquet_texts(path):
    parquet = files.optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise ValueError(f'no column "text", only {", ".join(table.schema_arrow.names)}')
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                texts = batch["text"].to_pylist()
                if wrong := [text for text in texts if not isinstance(text, str | None)]:
                    raise ValueError(f'its column "text" holds {type(wrong[0]).__name__}, not str')
                yield from texts
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} cannot be read as parquet ({e}): mend it, or fetch it again") from None


LONGEST = 1 << 30                               # bytes of one text: a small .gz can hold a line that fills all memory


def jsonl_rows(path, read, what):
    """Yield read(value) of each line of a JSONL file, compressed or not, without empty lines. Raises ValueError on a
    line that is too long for memory, or that is not a `what`."""
    with unpacked(path) as f:
        for number, line in enumerate(iter(lambda: f.readline(LONGEST + 1), b""), 1):
            if len(line) > LONGEST:
                raise ValueError(f"{path}, line {number} is longer than {LONGEST:,} bytes: cut it into several")
            if line.strip():
                try:
                    yield read(files.parsed(line))
                except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
                    why = f"it lacks {e}" if isinstance(e, KeyError) else e
                    raise ValueError(f"{path}, line {number} is not a {what} ({why}): mend it, or fetch the "
                                     "file again") from None


def read_text(path):
    """A file as one text. Raises NotText if it is empty, binary or not in UTF-8."""
    with unpacked(path) as f:
        content = f.read(1 << 16)
        if b"\0" not in content:                # a binary file shows at its beginning; it may be large
            content += f.read(LONGEST)
    if len(content) > LONGEST:
        raise ValueError(f"{path} holds more than {LONGEST:,} bytes of text: cut it into several files")
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


@contextlib.contextmanager
def unpacked(path):
    """Open a file to read its bytes, decompressed if its name ends in .gz. Raises ValueError on a damaged .gz."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(files.regular(path), "rb") as f:
            yield f
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path} is damaged ({e}): fetch it again") from None


def encode_all(coder, texts):
    """The ids of each text after a separator, 32 texts at a time in threads: tokenizers release Python's lock."""
    texts = iter(texts)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(texts, 32)):
            for ids in pool.map(coder.encode, group):
                yield np.insert(ids, 0, coder.separator)


# ------------------------------------------------------------------------------------------------------------- shards

HEADER = 256 * 4                                # bytes
SHARD = re.compile(r"(train|val)(_\d{6})?\.bin")                         # names of shards
VERIFY_BELOW = 1 << 30                          # bytes: larger data sets are not hashed at every start
LAYOUTS = {                                     # {type of a token: magic number and version in the header}
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7)}         # llm.c's, for Llama 3


def shard_header(kind, count):
    if count >= 1 << 31:
        raise ValueError("a shard holds less than 2**31 tokens: cut the text with data/fineweb_edu.py --source=...")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = *LAYOUTS[kind], count
    return header.tobytes()


def write_shard(path, tokens, coder=None):
    """Write one shard from an array of ids, or from an iterator of arrays, one at a time in memory. coder: the
    tokenizer of the ids; None: they are not text. Returns the shard's row of meta.json, with the bytes of text. An
    array that begins with the separator begins a document: a file beside the shard records where."""
    # the vocabulary alone decides, so all shards of a data set have the same type
    kind = np.dtype(np.uint32 if coder and coder.vocab_size > 1 << 16 else np.uint16)
    count, text, starts = 0, 0, []
    with files.replacing(path) as f:
        f.write(shard_header(kind, 0))          # the number of tokens follows at the end
        for piece in map(np.asarray, tokens if hasattr(tokens, "__next__") else [tokens]):
            if piece.size and not (0 <= piece.min() and piece.max() <= np.iinfo(kind).max):
                raise ValueError(f"{path}: token ids must lie in 0..{np.iinfo(kind).max} to be stored as {kind}")
            f.write(piece.astype(kind).tobytes())
            text += int(coder.lengths[piece].sum()) if coder else 0
            if coder and piece.size and piece[0] == coder.separator:
                starts.append(count)
                text -= coder.prefix
            count += piece.size
        f.seek(0)
        f.write(shard_header(kind, count))
    beside = path.with_suffix(".starts.bin")
    beside.unlink(missing_ok=True)
    if starts:
        np.array(starts, np.uint64).tofile(beside)
    return {"tokens": count} | ({"bytes": text} if coder else {}) | {"sha256": files.sha256(path)}


def read_shard(path):
    """Memory-map one shard, after checking its header and its size."""
    path, again = files.regular(Path(path)), "run its data script again"
    size, header = path.stat().st_size, np.fromfile(path, dtype=np.int32, count=256)
    kind = next((kind for kind, magic in LAYOUTS.items() if tuple(header[:2]) == magic), None)
    if header.size < 3 or kind is None:
        raise ValueError(f"{path} is not a token file of this project (wrong header): delete it and {again}")
    promised = HEADER + kind.itemsize * int(header[2])
    if size != promised:
        raise ValueError(f"{path} is damaged: {size} bytes where its header promises {promised}: {again}")
    if header[2] == 0:
        raise ValueError(f"{path} holds no tokens: {again} on a text that is not empty")
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER)


def read_starts(path, count):
    """Where documents begin in a shard of `count` tokens, int64. Raises ValueError if the shard does not tell."""
    path, again = path.with_suffix(".starts.bin"), f"run {script_of(path.parent)} again, or leave out --docs"
    if not path.exists():
        raise ValueError(f"{path} is missing: the data are one piece, or were made before --docs: {again}")
    starts = np.fromfile(files.regular(path), np.uint64)
    if path.stat().st_size % 8 or not (np.append(starts[1:], np.uint64(count)) > starts).all():
        raise ValueError(f"{path} is damaged: its {starts.size} places must ascend and lie below {count}: {again}")
    return starts.astype(np.int64)


# ------------------------------------------------------------------------------------------------------------ data sets


def write_data_set(out, coder, splits, **entries):
    """Write a data set of one shard per split. splits: {split: its ids}. ids and coder: those of write_shard. entries:
    more of meta.json."""
    begin(out, coder)
    shards = {f"{split}.bin": write_shard(out / f"{split}.bin", ids, coder) for split, ids in splits.items()}
    finish(out, entries | (described(coder) if coder else {}) | {"shards": shards})


def described(coder):
    """The entries of meta.json on a tokenizer."""
    found = {"tokenizer": coder.name, "vocab_size": coder.vocab_size}
    return found | ({"separator": coder.separator} if coder.content else {})


def begin(out, coder=None):
    """Prepare a folder for a new data set. Delete meta.json, without which a data set is incomplete, and the temporary
    files of killed processes."""
    out.mkdir(parents=True, exist_ok=True)
    files.delete_leftovers(out, rf"{SHARD.pattern}|(?:meta|progress|tokenizer)\.json")
    earlier = [out / "tokenizer.json"] if "separator" in meta_of(out) else []
    for path in [*earlier, out / "meta.json"]:
        path.unlink(missing_ok=True)
    keep_tokenizer(out, coder and coder.content)


def finish(out, meta):
    """After all shards are written: delete those of an earlier data set, and write meta.json."""
    for path in out.glob("*.bin"):
        if SHARD.fullmatch(name := path.name.replace(".starts", "")) and name not in meta["shards"]:
            path.unlink()
    files.write_json(out / "meta.json", meta)
    train, val = (sum(shard["tokens"] for shard in shards_of(meta, split)) for split in ("train", "val"))
    print(f"data: {meta['dataset']}, {meta['tokenizer']}: {train:,} tokens to train on, {val:,} held out, in {out}")


def shards_of(meta, split):
    return [row for name, row in meta["shards"].items() if name.startswith(split)]


def data_hash(meta):
    """One short hash of a data set's whole content."""
    digests = "".join(row["sha256"] for _, row in sorted(meta["shards"].items()))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def read_meta(folder, verify=True):
    """meta.json of a data set. verify: also check every shard's hash, if the data set is smaller than VERIFY_BELOW.
    Raises ValueError if something is missing or damaged."""
    folder = Path(folder)
    path, make_it = folder / "meta.json", f"make the data set with {script_of(folder)}"
    if not path.exists():
        raise ValueError(f"{path} is missing: {make_it}")
    meta = files.read_json(path)
    whole = {"stride": 1, "separator": 0} | (meta if isinstance(meta, dict) else {})
    if not (files.has(whole, vocab_size=int, tokenizer=str, stride=int, separator=int) and has_shards(whole)
            and whole["stride"] > 0 and 0 <= whole["separator"] < whole["vocab_size"] <= 1 << 32):
        raise ValueError(f"{path} lacks vocab_size, tokenizer or shards: {make_it}")
    for name in meta["shards"]:
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: {make_it}")
    if verify and sum((folder / name).stat().st_size for name in meta["shards"]) < VERIFY_BELOW:
        for name, row in meta["shards"].items():
            check_shard(folder / name, row["sha256"], meta["vocab_size"])
    return meta


def has_shards(meta):
    """Has every shard in meta.json a shard's name and a row with all required entries? Only text has bytes."""
    return files.has(meta, shards=dict) and all(
        SHARD.fullmatch(name) and files.has(row, tokens=int, sha256=str) and isinstance(row.get("bytes"), int | None)
        for name, row in meta["shards"].items())


def check_shard(path, digest, vocab_size):
    """Check the hash and the ids of a whole shard. Raises ValueError."""
    highest, again = read_shard(path).max(), f"run {script_of(path.parent)} again"
    if files.sha256(path) != digest:
        raise ValueError(f"{path} is not the file that meta.json describes (sha256 differs): {again}")
    if highest >= vocab_size:
        raise ValueError(f"{path} holds the token id {highest}, but meta.json says vocab_size={vocab_size}: {again}")


# ------------------------------------------------------------------------------------------------ data sets: for a run

DATA_SETS = ("backcopy", "fineweb_edu", "shakespeare", "stdlib", "text")          # those with a script here
OFFLINE = {"stdlib": "bytes", "backcopy": "numbers"}                    # {name: tokenizer}, made without network


def script_of(folder):
    """The command that makes this data set, for error messages."""
    name = Path(folder).name
    return f"python data/{name}.py" if name in DATA_SETS else "a data script: " + ", ".join(DATA_SETS)


def home(dataset, name, content):
    """The folder for a data set in some tokenizer: data/<dataset>, or data/<dataset>-<name>, so that one data set can
    exist in several tokenizers. content: of the tokenizer's file, if it needs one."""
    usual = OFFLINE.get(dataset)                # train.py makes data/stdlib by itself, in this tokenizer
    symbols = "numbers" in (name, usual)        # they have no other tokenizer
    plain = symbols or (name == usual if usual else not content)
    return HERE / (dataset if plain else f"{dataset}-{name}")


def data_folder(dataset, run=None):
    """A data set's folder: any path, or data/<dataset>. run: a run whose tokenizer the data set must use. If
    data/<dataset> uses another one, the result is a folder data/<dataset>-..., whatever the tokenizer's name there."""
    if os.sep in dataset or "/" in dataset:
        return Path(dataset)
    plain, name = HERE / files.check_name(dataset, "--dataset"), tokenizer_name(run)
    if name is None:
        return plain
    beside = (path for path in sorted(HERE.glob(f"{dataset}-*")) if meta_of(path).get("dataset") == dataset)
    fitting = (path for path in (plain, *beside) if identity(path) == identity(run))
    return next(fitting, home(dataset, name, content_of(run)))


def data_for(run, dataset, machine):
    """The folder and the meta.json of a data set in the tokenizer of a run. run: its folder; None: any tokenizer. A
    missing data set that needs no network is made, by one rank of each machine. Raises ValueError if the data set is
    missing, damaged, or in another tokenizer."""
    folder, name = data_folder(dataset, run), tokenizer_name(run)
    as_flag = f"--tokenizer={run if name and content_of(run) else name}"
    if machine.local_rank == 0 and dataset in OFFLINE and not (folder / "meta.json").exists():
        make(dataset, folder, [] if folder == HERE / dataset else [as_flag])
    machine.wait()
    if name and not ((folder / "meta.json").exists() and identity(folder) == identity(run)):
        script = f"python data/{dataset}.py" if dataset in ("fineweb_edu", "shakespeare", "stdlib") else (
            f"python data/text.py --source=... --name={Path(dataset).name}")
        command = "python data/backcopy.py" if name == "numbers" else f"{script} {as_flag}"
        raise ValueError(f"{folder} is not a data set in the tokenizer of {run} ({name}): make one with {command}")
    return folder, read_meta(folder, verify=machine.main)


def make(dataset, folder, flags):
    """Run the script of a data set. Its output goes to stderr, because eval.py's stdout may be JSON. The files are
    written elsewhere and moved when complete, meta.json last: two runs that begin together may both make them."""
    print(f"making {folder}: {' '.join(['python', f'data/{dataset}.py', *flags])}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as scratch:
        made = Path(scratch) / folder.name
        done = subprocess.run([sys.executable, HERE / f"{dataset}.py", *flags, f"--out_dir={made}"],
                              stdout=subprocess.PIPE, text=True)
        print(done.stdout.replace(str(made), str(folder)), end="", file=sys.stderr)
        if done.returncode:
            raise ValueError(f"data/{dataset}.py failed: see the line above")
        for path in sorted(made.iterdir(), key=lambda path: path.name == "meta.json"):
            os.replace(path, folder / path.name)


def check_vocabulary(config, meta, dataset):
    """Raise ValueError if the token ids or the sequences of a data set do not fit a model."""
    if config.block_size >= meta.get("stride", math.inf):
        raise ValueError(f"block_size={config.block_size}, but the sequences of {dataset} have {meta['stride'] - 1} "
                         "tokens: lower --block_size, or make longer sequences (--length)")
    if meta["vocab_size"] > config.vocab_size:
        raise ValueError(f"the model's vocabulary has vocab_size={config.vocab_size} ids, "
                         f"the data set {dataset} needs {meta['vocab_size']}: raise --vocab_size or change --dataset")


# ------------------------------------------------------------------------------------------------------------ windows


class Tokens:
    """The shards of one split as one long array, which may be larger than memory. len() is its number of tokens.
    Windows begin at multiples of its stride: the length of a stored sequence, or 1. docs: also read where documents
    begin."""

    def __init__(self, folder, split, docs=False):
        folder = Path(folder)
        paths = sorted(path for path in folder.glob(f"{split}_*.bin") if SHARD.fullmatch(path.name))
        paths = paths or [folder / f"{split}.bin"]
        if not paths[0].exists():
            raise ValueError(f"{paths[0]} is missing: make it with {script_of(folder)}")
        self.name = str(folder / split)
        self.shards = [read_shard(p) for p in paths]
        if len({shard.dtype for shard in self.shards}) > 1:
            raise ValueError(f"{self.name}_*.bin come from two data sets (their tokens have two sizes): delete "
                             f"them and run {script_of(folder)} again")
        self.ends = np.cumsum([len(s) for s in self.shards])
        self.stride = meta_of(folder).get("stride", 1)
        self.documents = np.concatenate([[0], *(                        # where they begin, in the whole array
            read_starts(path, len(shard)) + end - len(shard)
            for path, shard, end in zip(paths, self.shards, self.ends, strict=True))]) if docs else None

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """Tokens start .. start+length-1, which may span several shards."""
        pieces, i = [], int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            offset = start - (self.ends[i] - len(self.shards[i]))
            pieces.append(self.shards[i][offset:offset + length])
            start, length, i = start + len(pieces[-1]), length - len(pieces[-1]), i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def windows(self, starts, length, vocab_size):
        """The windows at these starts, int64 (len(starts), length). Raises ValueError on ids outside the vocabulary."""
        rows = np.stack([self.window(int(s), length) for s in starts]).astype(np.int64)
        if rows.max() >= vocab_size:
            row = int((rows >= vocab_size).any(1).argmax())
            raise ValueError(f"{self.name}: token id {rows[row].max()} near token {starts[row]}, but the vocabulary "
                             f"has {vocab_size} ids: wrong file, or wrong --vocab_size")
        return rows

    def first_keys(self, starts, length):
        """For each token of the windows at these starts, where in the window its document begins: int64 (len(starts),
        length), as GPT.forward takes it. A document that began earlier begins with the window."""
        places = starts[:, None] + np.arange(length)
        began = self.documents[np.searchsorted(self.documents, places, side="right") - 1]
        return np.maximum(began - starts[:, None], 0)


def fixed_windows(split, length, count):
    """Starts of `count` windows of length+1 tokens, spread evenly over a split, the same at every call; fewer if the
    split is short. count 0: as many as fit side by side, and at most one for each multiple of the stride."""
    last = (len(split) - length - 1) // split.stride
    if last < 0:
        raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of {length}: "
                         "lower --block_size (in eval.py --length), or add data")
    fit = min(last + 1, (len(split) - 1) // length)
    return np.linspace(0, last, min(count, fit) if count else fit).astype(np.int64) * split.stride


# ------------------------------------------------------------------------------------------ flags of the data scripts


def flags(doc, dataset, tokenizer):
    """The argument parser of a data script, with the flags that all of them share."""
    parser = Parser(description=doc)
    parser.add_argument("--out_dir", type=Path,
                        help=f"folder of the data set (default: data/{dataset}; in a public model's tokenizer "
                             f"data/{dataset}-TOKENIZER, so it can exist in several)")
    parser.add_argument("--source", type=Path, help="local file or folder to read")
    parser.add_argument("--tokenizer", default=tokenizer,
                        help="bytes; gpt2; gpt2-2048 (only its first 2,047 ids, and a separator); the name of a run "
                             "below out/ that came with a tokenizer (smollm2); or the path of a folder or file with a "
                             "tokenizer.json (default: %(default)s)")
    parser.add_argument("--tokenizer_files", type=Path,
                        help="folder with vocab.bpe and encoder.json, for gpt2 without network")
    return parser


def settle(args, dataset):
    """The tokenizer that the flags name. Also sets args.out_dir if it was not given."""
    coder = tokenizer(args.tokenizer, args.tokenizer_files)
    if coder.name == "numbers":
        raise ValueError(f"--tokenizer={args.tokenizer} is for symbols, not for text: choose bytes or gpt2")
    args.out_dir = args.out_dir or home(dataset, coder.name, coder.content)
    return coder
