"""From text to tokens on disk, and back into windows: for the data scripts, train.py and eval.py.

In the order of this file: a script reads text files, a tokenizer (coders.py) turns each text into
ids, the ids are written to shards, the shards form a data set, and training and instruments read
windows from it. A data set is a folder data/<name>/:

    train.bin, val.bin                      one shard a split, or
    train_000000.bin, train_000001.bin ...  several, read one after another as if they were one
    meta.json                              vocab_size, tokenizer; each shard's tokens, bytes, sha256
    tokenizer.json                          the tokenizer itself, if a public model's

A shard is a header of 256 int32 (magic number, version, number of tokens), then the tokens as
uint16, or as uint32 for a larger vocabulary. llm.c and modded-nanogpt use the same layouts, so they
can read these files. A shard can be memory-mapped. Each document begins with a separator: the
vocabulary's last id, unless meta.json names it. A data set of prompts and responses has shards of
int32, and a prompt's token, which is no target of the loss, is stored as ~id (-1 - id).
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
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common import files
from common.flags import Parser
from data.coders import content_of, keep_tokenizer, tokenizer, tokenizer_name

HERE = Path(__file__).parent

# ------------------------------------------------------------------------------------- text files


class NotText(ValueError):
    """A file that is empty or binary: refused if --source names it, skipped in its folder."""


def source_files(source, endings=None):
    """The files of a --source in a fixed order: itself, or all in a folder except hidden ones.
    endings: the accepted ones, without .gz; None: all."""
    if not source.exists():
        raise ValueError(f"--source={source} does not exist: name a file or a folder")
    found = []
    for path in [source] if source.is_file() else source.rglob("*"):
        hidden = "/." in f"/{path.relative_to(source).as_posix()}" and path != source
        if path.is_file() and not hidden and (endings is None or ending(path) in endings):
            found.append(path)
    if not found:
        which = f" that end in {' '.join(endings)} (or these with .gz)" if endings else ""
        raise ValueError(f"--source={source} holds no files{which}: name another folder")
    return sorted(found, key=Path.as_posix)


def ending(path):
    """The kind of a file, compressed or not: .jsonl for a.jsonl and a.jsonl.gz."""
    return Path(path.name.removesuffix(".gz")).suffix


ROWS = ".parquet", ".jsonl"  # endings of files whose rows are documents


def documents(path, fields=("text",)):
    """The texts of one source file: the field "text" of each row of a .parquet or .jsonl, otherwise
    the whole file. Several fields: tuples of them. A row with an empty field is left out."""
    readers = dict(zip(ROWS, (parquet_rows, jsonl_rows), strict=True))
    for texts in readers.get(ending(path), lambda path, _: [(read_text(path),)])(path, fields):
        if all(text and not text.isspace() for text in texts):
            yield texts if len(fields) > 1 else texts[0]


def parquet_rows(path, fields):
    parquet = files.optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            for name in fields:
                if name not in (known := table.schema_arrow.names):
                    raise ValueError(f'no column "{name}", only {", ".join(known)}')
            for batch in table.iter_batches(batch_size=1024, columns=[*fields]):
                columns = {name: batch[name].to_pylist() for name in fields}
                for name, texts in columns.items():
                    if wrong := [text for text in texts if not isinstance(text, str | None)]:
                        kind = type(wrong[0]).__name__
                        raise ValueError(f'its column "{name}" holds {kind}, not str')
                yield from zip(*columns.values(), strict=True)
    except (ValueError, OSError) as e:
        raise ValueError(
            f"{path} cannot be read as parquet ({e}): mend it, or fetch it again"
        ) from None


def jsonl_rows(path, fields):
    with unpacked(path) as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:  # JSON can hold lone surrogates, UTF-8 cannot
                    row = files.parsed(line)
                    texts = [
                        None if row[name] is None else row[name].encode("utf-8", "replace").decode()
                        for name in fields
                    ]
                except (ValueError, KeyError, TypeError, AttributeError):
                    names = " and ".join(f'"{name}"' for name in fields)
                    raise ValueError(
                        f"{path}, line {number} is not a JSON object with a string "
                        f"{names}: mend it, or fetch the file again"
                    ) from None
                yield texts


def read_text(path):
    """A file as one text. Raises NotText if it is empty, binary or not in UTF-8."""
    with unpacked(path) as f:
        content = f.read(1 << 16)
        if b"\0" not in content:  # a binary file shows at its beginning
            content += f.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise NotText(
            f"{path} is not text in UTF-8 (it is binary, or in another encoding): "
            "name a text file, or convert it with iconv"
        )
    if not text or text.isspace():
        raise NotText(f"{path} is empty: name a file with text in it")
    return text


@contextlib.contextmanager
def unpacked(path):
    """Open a file to read its bytes, decompressed if its name ends in .gz."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(files.regular(path), "rb") as f:
            yield f
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path} is damaged ({e}): fetch it again") from None


def encode_all(coder, texts):
    """The ids of each text after a separator, 32 texts at a time in threads: tokenizers release
    Python's lock. A text may be a pair, of a prompt, whose tokens become ~id, and its response."""
    texts = iter(texts)

    def ids_of(text):
        if isinstance(text, str):
            ids = coder.encode(text)
        else:
            prompt, response = map(coder.encode, text)
            ids = np.concatenate([~prompt.astype(np.int64), response])
        return np.insert(ids, 0, coder.separator)

    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(texts, 32)):
            yield from pool.map(ids_of, group)


# ----------------------------------------------------------------------------------------- shards

HEADER = 256 * 4  # bytes
SHARD = re.compile(r"(train|val)(_\d{6})?\.bin")  # names of shards
# {type of a token: magic number and version}; the second is llm.c's for Llama 3
LAYOUTS = {
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
    np.dtype(np.int32): (20240801, 8),  # ours, of prompts and responses
}


def shard_header(kind, count):
    if count >= 1 << 31:
        raise ValueError(
            "a shard holds less than 2**31 tokens: cut the text with "
            "data/fineweb_edu.py --source=..."
        )
    header = np.zeros(256, dtype=np.int32)
    header[:3] = *LAYOUTS[kind], count
    return header.tobytes()


def write_shard(path, pieces, coder=None, prompts=False):
    """Write one shard from arrays of ids, one at a time in memory. coder: the tokenizer of the ids;
    None: they are not text. prompts: some are ~id. Returns the shard's row of meta.json, with the
    bytes of text, unless the loss counts only a part of it."""
    # no piece decides, so all shards of a data set have the same type
    kind = np.dtype(np.uint32 if coder and coder.vocab_size > 1 << 16 else np.uint16)
    kind = np.dtype(np.int32) if prompts else kind
    count, text, counted = 0, 0, coder and not prompts
    with files.replacing(path) as f:
        f.write(shard_header(kind, 0))  # the number of tokens follows at the end
        for piece in map(np.asarray, pieces):
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
            if piece.size and not low <= piece.min() <= piece.max() <= high:
                raise ValueError(
                    f"{path}: token ids must lie in {low}..{high} to be stored as {kind}"
                )
            f.write(piece.astype(kind).tobytes())
            count += piece.size
            if counted:
                text += int(coder.lengths[piece].sum())
                text -= coder.prefix * bool(piece.size and piece[0] == coder.separator)
        f.seek(0)
        f.write(shard_header(kind, count))
    return {"tokens": count} | ({"bytes": text} if counted else {}) | {"sha256": files.sha256(path)}


def read_shard(path):
    """Memory-map one shard, after checking its header and its size."""
    path = files.regular(Path(path))
    again = f"make the data set with {script_of(path.parent)}"
    if not path.exists():
        raise ValueError(f"{path} is missing: {again}")
    size, header = path.stat().st_size, np.fromfile(path, dtype=np.int32, count=256)
    kind = next((kind for kind, magic in LAYOUTS.items() if tuple(header[:2]) == magic), None)
    if header.size < 3 or kind is None:
        raise ValueError(f"{path} is not a token file of this project (wrong header): {again}")
    promised = HEADER + kind.itemsize * int(header[2])
    if size != promised:
        raise ValueError(
            f"{path} is damaged: {size} bytes where its header promises {promised}: {again}"
        )
    if header[2] == 0:
        raise ValueError(f"{path} holds no tokens: {again} from a text that is not empty")
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER)


# -------------------------------------------------------------------------------------- data sets


def write_data_set(out, coder, splits, **entries):
    """Write a data set of one shard per split. splits: {split: pieces}; pieces and coder: those of
    write_shard. entries: more of meta.json."""
    begin(out, coder)
    meta = entries | (tokenizer_entries(coder) if coder else {}) | {"shards": {}}
    for split, pieces in splits.items():
        path = out / f"{split}.bin"
        meta["shards"][path.name] = write_shard(path, pieces, coder, prompts="prompt" in entries)
    files.write_json(out / "meta.json", meta)
    summarize(out, meta)


def tokenizer_entries(coder):
    """The entries of meta.json that describe a tokenizer."""
    found = {"tokenizer": coder.name, "vocab_size": coder.vocab_size}
    return found | ({"separator": coder.separator} if coder.content else {})


def begin(out, coder=None):
    """Prepare a folder for a new data set, which is incomplete without meta.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "meta.json").unlink(missing_ok=True)
    keep_tokenizer(out, coder and coder.content)


def summarize(out, meta):
    """Print how many tokens a data set has."""
    train, val = (sum(row["tokens"] for row in shards_of(meta, name)) for name in ("train", "val"))
    print(
        f"data: {meta['dataset']}, {meta['tokenizer']}: {train:,} tokens to train on, {val:,} held "
        f"out, in {out}"
    )


def shards_of(meta, split):
    return [row for name, row in meta["shards"].items() if name.startswith(split)]


def data_hash(meta):
    """One short hash of a data set's whole content."""
    digests = "".join(row["sha256"] for _, row in sorted(meta["shards"].items()))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def read_meta(folder):
    """meta.json of a data set. Raises ValueError if it is missing or damaged."""
    path = Path(folder, "meta.json")
    make_it = f"make the data set with {script_of(folder)}"
    if not path.exists():
        raise ValueError(f"{path} is missing: {make_it}")
    meta = files.read_json(path)
    whole = {"stride": 1, "separator": 0} | (meta if isinstance(meta, dict) else {})
    types = {"vocab_size": int, "tokenizer": str, "stride": int, "separator": int}
    if not (
        files.has(whole, **types)
        and has_shards(whole)
        and whole["stride"] > 0
        and 0 <= whole["separator"] < whole["vocab_size"] <= 1 << 32
    ):
        raise ValueError(f"{path} lacks vocab_size, tokenizer or shards: {make_it}")
    return meta


def has_shards(meta):
    """Has every shard in meta.json a shard's name and a complete row? Only text has bytes."""
    return files.has(meta, shards=dict) and all(
        SHARD.fullmatch(name)
        and files.has(row, tokens=int, sha256=str)
        and isinstance(row.get("bytes"), int | None)
        for name, row in meta["shards"].items()
    )


# --------------------------------------------------------------------------- data sets: for a run

DATA_SETS = ("backcopy", "fineweb_edu", "shakespeare", "stdlib", "text")  # with a script here
MADE_HERE = {"stdlib": "bytes", "backcopy": "numbers"}  # {name: tokenizer}, made when needed


def script_of(folder):
    """The command that makes this data set, for error messages."""
    name = Path(folder).name
    known = next((known for known in DATA_SETS if f"{name}-".startswith(f"{known}-")), None)
    return f"python data/{known}.py" if known else f"python data/text.py --source=... --name={name}"


def default_folder(dataset, tokenizer, public):
    """The folder that a script writes: data/<dataset>-<tokenizer> for a public model's tokenizer,
    otherwise data/<dataset>. data/stdlib is in bytes, because train.py makes it by itself."""
    usual = MADE_HERE.get(dataset)
    plain = tokenizer == usual if usual else not public
    return HERE / (dataset if plain else f"{dataset}-{tokenizer}")


def data_folder(dataset, run=None):
    """A data set's folder: any path, or data/<dataset>-<tokenizer of the run> if this exists or can
    be made, or data/<dataset>. run: the folder of a run."""
    if os.sep in dataset or "/" in dataset:
        return Path(dataset)
    files.check_name(dataset, "--dataset")
    name = tokenizer_name(run) or MADE_HERE.get(dataset)
    found = default_folder(dataset, name, run and content_of(run))
    return found if found.exists() or dataset in MADE_HERE else HERE / dataset


def data_for(dataset, run, machine):
    """The folder and the meta.json of a data set in the tokenizer of a run. run: its folder; None:
    any tokenizer. A missing data set that needs no network is made, by one rank of each machine.
    Raises ValueError if the data set is missing, damaged, or in another tokenizer."""
    folder, name = data_folder(dataset, run), tokenizer_name(run)
    as_flag = f"--tokenizer={run if name and content_of(run) else name}"
    if machine.local_rank == 0 and dataset in MADE_HERE and not (folder / "meta.json").exists():
        make(dataset, folder, [] if folder == HERE / dataset else [as_flag])
    machine.wait()
    # the same tokenizer has the same name, and the same tokenizer.json if both folders have one
    contents = {content_of(folder), content_of(run)} - {None} if name else set()
    if name and (name != tokenizer_name(folder) or len(contents) > 1):
        command = f"{script_of(HERE / dataset)} {as_flag}"
        if name == "numbers":
            command = "python data/backcopy.py"
        raise ValueError(
            f"{folder} is not a data set in the tokenizer of {run} ({name}): "
            f"make one with {command}"
        )
    return folder, read_meta(folder)


def make(dataset, folder, flags):
    """Run the script of a data set. Its output goes to stderr, because eval.py's stdout may be
    JSON."""
    command = " ".join([f"python data/{dataset}.py", *flags])
    print(f"making {folder}: {command}", file=sys.stderr, flush=True)
    script = [sys.executable, HERE / f"{dataset}.py", *flags, f"--out_dir={folder}"]
    if subprocess.run(script, stdout=2).returncode:  # 2: the file descriptor of stderr
        raise ValueError(f"data/{dataset}.py failed: see the line above")


def check_vocabulary(config, meta, dataset):
    """Raise ValueError if the token ids or the sequences of a data set do not fit a model."""
    if config.block_size >= meta.get("stride", math.inf):
        raise ValueError(
            f"block_size={config.block_size}, but the sequences of {dataset} have "
            f"{meta['stride'] - 1} tokens: lower --block_size, or make longer sequences "
            "(--length)"
        )
    if meta["vocab_size"] > config.vocab_size:
        raise ValueError(
            f"the model's vocabulary has vocab_size={config.vocab_size} ids, the data set "
            f"{dataset} needs {meta['vocab_size']}: raise --vocab_size or change --dataset"
        )


# ---------------------------------------------------------------------------------------- windows


class Tokens:
    """The shards of one split as one long array, which may be larger than memory. len() is its
    number of tokens. Windows begin at multiples of its stride: the length of a stored sequence, or
    1. docs: also find where documents begin."""

    def __init__(self, folder, split, docs=False):
        folder, meta = Path(folder), read_meta(folder)
        paths = [folder / name for name in sorted(meta["shards"]) if name.startswith(split)]
        if not paths:
            raise ValueError(f"{folder} has no shard of the split {split}: run {script_of(folder)}")
        self.name = str(folder / split)
        self.shards = [read_shard(path) for path in paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards])
        self.stride, self.documents = meta.get("stride", 1), None
        if docs:
            separator = meta.get("separator", meta["vocab_size"] - 1)
            places = []  # of the separators, in the whole array
            for shard, end in zip(self.shards, self.ends, strict=True):
                places.append(np.flatnonzero(shard == separator) + end - len(shard))
            self.documents = np.concatenate(places)
            if 0 not in self.documents[:1]:
                raise ValueError(
                    f"{self.name} does not begin with a document's separator, so it is one "
                    "piece, or no text: leave out --docs, or change --dataset"
                )

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, length):
        """Tokens start .. start+length-1 as they are stored, from one shard or several."""
        pieces, i = [], int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            offset = start - (self.ends[i] - len(self.shards[i]))
            pieces.append(self.shards[i][offset : offset + length])
            start, length, i = start + len(pieces[-1]), length - len(pieces[-1]), i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def windows(self, starts, length, vocab_size):
        """The windows at these starts as they are stored, int64 (len(starts), length). Raises
        ValueError on ids outside the vocabulary."""
        stored = np.stack([self.window(int(s), length) for s in starts]).astype(np.int64)
        rows, _ = ids_and_targets(stored)
        if rows.max() >= vocab_size:
            row = int((rows >= vocab_size).any(1).argmax())
            raise ValueError(
                f"{self.name}: token id {rows[row].max()} near token {starts[row]}, but the "
                f"vocabulary has {vocab_size} ids: wrong file, or wrong --vocab_size"
            )
        return stored

    def count_targets(self, starts, length):
        """How many targets of the loss the window of length + 1 tokens at each start has: int64
        (len(starts),). The first token of a window is no target."""
        if self.shards[0].dtype != np.int32:  # it holds no prompts, so there is nothing to read
            return np.full(len(starts), length)
        return np.array([(self.window(int(s) + 1, length) >= 0).sum() for s in starts])

    def first_keys(self, starts, length):
        """For each token of the windows at these starts, where in the window its document begins:
        int64 (len(starts), length), as GPT.forward takes it. A document that began earlier begins
        with the window."""
        places = starts[:, None] + np.arange(length)
        began = self.documents[np.searchsorted(self.documents, places, side="right") - 1]
        return np.maximum(began - starts[:, None], 0)


def ids_and_targets(stored):
    """The ids of stored tokens, an array or tensor of int64, and their targets of the loss: the
    same ids, but -1 for a prompt's token, which is stored as ~id."""
    return stored.clip(0) + (~stored).clip(0), stored.clip(-1)  # a summand of the ids is 0


def fixed_windows(split, length, count):
    """Starts of `count` windows of length+1 tokens, spread evenly over a split, the same at every
    call; fewer if the split is short. count 0: as many as fit side by side, and at most one for
    each multiple of the stride."""
    last = (len(split) - length - 1) // split.stride
    if last < 0:
        raise ValueError(
            f"{split.name} holds {len(split)} tokens, too few for one window of "
            f"{length}: lower --block_size (in eval.py --length), or add data"
        )
    fit = min(last + 1, (len(split) - 1) // length)
    return np.linspace(0, last, min(count, fit) if count else fit).astype(np.int64) * split.stride


# ---------------------------------------------------------------------- flags of the data scripts


def flags(doc, dataset, tokenizer):
    """The argument parser of a data script, with the flags that all of them share."""
    parser = Parser(description=doc)
    parser.add_argument(
        "--out_dir",
        type=Path,
        help=f"folder of the data set (default: data/{dataset}; in a public model's "
        f"tokenizer data/{dataset}-TOKENIZER, so it can exist in several)",
    )
    parser.add_argument("--source", type=Path, help="local file or folder to read")
    parser.add_argument(
        "--tokenizer",
        default=tokenizer,
        help="bytes; gpt2, by the package tiktoken; gpt2-2048 (only its first 2,047 "
        "ids, and a separator); the name of a run below out/ that came with a "
        "tokenizer (smollm2); or the path of a folder with a tokenizer.json "
        "(default: %(default)s)",
    )
    return parser


def tokenizer_of(args, dataset):
    """The tokenizer that the flags name. Also sets args.out_dir if it was not given."""
    coder = tokenizer(args.tokenizer)
    if coder.name == "numbers":
        raise ValueError(
            f"--tokenizer={args.tokenizer} is for symbols, not for text: choose bytes or gpt2"
        )
    args.out_dir = args.out_dir or default_folder(dataset, coder.name, coder.content)
    return coder
