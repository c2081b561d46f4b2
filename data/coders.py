"""Tokenizers: text into ids and back. Each is a class with

    name, vocab_size, separator     separator: the id between two texts
    content                         content of the tokenizer.json that a run must store; None: its name is enough
    exported                        the tokenizer as a tokenizer.json; None: it cannot be one
    lengths                         bytes of text of each id, (vocab_size,)
    prefix                          bytes that encode adds before a text: 1 if it adds a space
    encode(text), decode(ids)       special tokens are neither parsed from text nor shown

Bytes, GPT-2's byte pairs, and the symbols of synthetic tasks have names. Any other tokenizer is a tokenizer.json: it
belongs to a public model, and to the runs and data sets made with it. The meta.json of a run or a data set names the
tokenizer of its ids. For a public model's tokenizer, the folder also holds its tokenizer.json, and meta.json names the
id between two texts ("separator").
"""
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from common import files
from data.downloads import download

# -------------------------------------------------------------------------------------------- the format tokenizer.json

END = "<|endoftext|>"                           # the separator of most tokenizers
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]       # bytes that are spelled as themselves
# {character: byte} of byte-level tokenizers; the other bytes are spelled by the characters from 256 on
BYTE_SPELLING = {chr(b if b in PRINTABLE else 256 + b - sum(p < b for p in PRINTABLE)): b for b in range(256)}


def byte_pairs(vocab, merges, special, cutting=(BYTE_LEVEL,)):
    """A tokenizer.json of byte pairs. vocab: {spelling: id}; merges: pairs "a b" in the order of merging; special:
    {spelling: id} of special tokens; cutting: pre-tokenizers that cut a text into words."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    described = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": token} | plain for token, i in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(cutting)}, "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": vocab, "merges": merges}}
    return json.dumps(described, ensure_ascii=False).encode()


SECONDS, MEMORY, IDS = 60, 4 << 30, 100         # limits of a trial: seconds, bytes, and ids of a single character
SAMPLE = "".join(map(chr, range(0x3100))) + "漢字 한국어 \U0001f600"       # alphabets of most languages


@functools.lru_cache
def fault_of(content):
    """What is wrong with a tokenizer.json, as one line; empty if nothing is. A damaged one can make the package
    tokenizers abort the whole process, and a malicious one can turn each character into megabytes. So a separate
    process tries it, once for each file, with limits on time and memory."""
    child = f"from data import coders; coders.try_tokenizer({MEMORY})"
    little = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    try:
        done = subprocess.run([sys.executable, "-c", child], input=content, capture_output=True, timeout=SECONDS,
                              cwd=Path(__file__).parents[1], env=os.environ | little | {"RUST_BACKTRACE": "0"})
    except subprocess.TimeoutExpired:
        return f"it takes more than {SECONDS} seconds for a page of text"
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line and not line.startswith("note:")]
    return (said or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def try_tokenizer(memory):
    """Use the tokenizer.json on stdin once, under limits. Fails with the reason as the last line on stderr."""
    import resource

    import tokenizers
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError):   # a stricter limit is in force
            resource.setrlimit(limit, (most, most))
    coder = tokenizers.Tokenizer.from_buffer(sys.stdin.buffer.read())
    for text in ("", *SAMPLE, SAMPLE):
        ids = coder.encode(text).ids
        if len(ids) > IDS * (len(text) + 1):
            sys.exit(f"it turns one character into more than {IDS} tokens")
    coder.decode(ids)


# ---------------------------------------------------------------------------------------------------------- tokenizers


class Bytes:
    """One token per byte of UTF-8; id 256 separates documents."""
    name, vocab_size, separator, prefix = "bytes", 257, 256, 0
    content, exported = None, byte_pairs(BYTE_SPELLING, [], {END: 256})            # without any merges
    lengths = np.array([1] * 256 + [0])

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Numbers:
    """Symbols of a synthetic task, which print as numbers."""
    name, separator, content, exported = "numbers", None, None, None

    def encode(self, text):
        words = text.split()
        if not all(word.isdecimal() and int(word) < 1 << 16 for word in words):
            raise ValueError(f"the tokens are symbols here: write a prompt as numbers and spaces, not {text!r}")
        return np.array([int(word) for word in words], dtype=np.uint16)

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


class Tokenizer:
    """What a tokenizer.json in Hugging Face's format describes, by the package tokenizers.

    content: of that file; path: its place, for error messages. id_hints: the model's other JSON files that may name
    the ids that begin and end a text (config.json, ...), as dicts. separator: the id between two texts. None: the first
    that exists of <|endoftext|>, the token that the tokenizer puts before a text, and those that begin or end a text
    according to id_hints."""

    def __init__(self, content, name, path, id_hints=(), separator=None):
        self.content = self.exported = content
        self.name = files.check_name(name, f"{path}: its folder or tokenizer")
        self.coder = files.optional("tokenizers").Tokenizer.from_buffer(content)
        self.coder.encode_special_tokens = True                         # special tokens spelled in a text are text
        self.coder.no_truncation()              # some files ask for truncation or padding
        self.coder.no_padding()
        self.vocab_size = max(self.coder.get_vocab().values(), default=0) + 1
        if separator is None:
            first = [{"bos_token": END}, {"bos_token_id": self.coder.encode("").ids[:1]}]
            found = self.special_ids([*first, *id_hints], "bos") + self.special_ids(id_hints, "eos")
            if not found:
                raise ValueError(f"{path} does not name the token between two texts: write "
                                 f'{{"eos_token": "..."}} into a tokenizer_config.json beside it')
            separator = found[0]
        if not (isinstance(separator, int) and 0 <= separator < self.vocab_size):
            raise ValueError(f"{path}: the separator {separator!r} is not an id below {self.vocab_size}: name the "
                             'right one as "separator" in the meta.json beside it')
        self.separator = separator
        self.byte_level = "ByteLevel" in json.dumps(files.parsed(content).get("decoder"))   # otherwise as SentencePiece

    def special_ids(self, id_hints, role):
        """The ids that begin (role "bos") or end ("eos") a text, as a list. config.json has one or several ids,
        tokenizer_config.json the spelling of one."""
        found = []
        for hints in id_hints:
            ids, token = hints.get(f"{role}_token_id"), hints.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            found += ids if isinstance(ids, list) else [ids]
            found += [self.coder.token_to_id(token)] if isinstance(token, str) else []
        return list(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < self.vocab_size))

    @functools.cached_property
    def lengths(self):
        """Bytes of text of each id, (vocab_size,): 0 for special tokens."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for spelling, i in self.coder.get_vocab().items():
            if self.byte_level:                 # one printable character for each byte
                lengths[i] = len(spelling)
            elif re.fullmatch("<0x[0-9A-F]{2}>", spelling):             # a byte by its number
                lengths[i] = 1
            else:
                lengths[i] = len(spelling.replace("\u2581", " ").encode())          # U+2581 means a space
        for i, token in self.coder.get_added_tokens_decoder().items():  # these are spelled literally
            lengths[i] = 0 if token.special else len(token.content.encode())
        lengths[self.separator] = 0
        return lengths

    @functools.cached_property
    def prefix(self):
        """Bytes that encode adds before a text. It adds no space before a space: the ids of such a text are often those
        of the text without its first space, which then is not counted."""
        return max(0, int(self.lengths[self.encode("a")].sum()) - 1)

    def encode(self, text):
        parts = cut(text) if self.byte_level else [text]                # SentencePiece's words may contain spaces
        found = (self.coder.encode_batch_fast([part], add_special_tokens=False)[0].ids for part in parts)
        return np.concatenate([np.array(ids, np.uint32) for ids in found])

    def decode(self, ids):
        return self.coder.decode([int(i) for i in ids if i != self.separator])      # without special tokens


WORD_END = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")                    # one space between two letters


def cut(text):
    """A long text in parts of about a million characters. The cuts are at WORD_END, which no merge crosses, because a
    word begins with its space: the ids are those of the whole text."""
    found = (WORD_END.search(text, i) for i in range(1 << 20, len(text), 1 << 20))
    cuts = sorted({match.start() for match in found if match})
    return (text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)]))


class GPT2(Tokenizer):
    """OpenAI's byte-pair encoding; the last id separates documents. Its two files are kept in tiktoken's folder.

    parts: {name: content} of the files; None: fetch those that the folder lacks. ids: their number; fewer than SIZE
    are the bytes, the first pairs and the separator. Raises ValueError if the files differ from OpenAI's."""
    SIZE = 50257
    ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    PARTS = {                                   # {name: (size in bytes, sha256)}
        "vocab.bpe": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "encoder.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}

    def __init__(self, parts=None, ids=SIZE):
        if not 257 <= ids <= self.SIZE:
            raise ValueError(f"--tokenizer=gpt2-{ids} must have 257 to {self.SIZE} ids")
        files.optional("tokenizers")            # fail before a download
        cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
                     or f"{tempfile.gettempdir()}/data-gym-cache")
        found = []
        for name, (size, digest) in self.PARTS.items():
            if parts and hashlib.sha256(parts[name]).hexdigest() != digest:
                raise ValueError(f"{name} is missing or is not the GPT-2 tokenizer's: give --tokenizer_files=FOLDER "
                                 "with OpenAI's vocab.bpe and encoder.json")
            place = cache / hashlib.sha1((self.ADDRESS + name).encode()).hexdigest()         # tiktoken's name for it
            is_cached = place.exists() and files.sha256(place) == digest
            if parts and not is_cached:
                with files.replacing(place) as f:
                    f.write(parts[name])
            elif not is_cached:
                download(self.ADDRESS + name, place, size, digest, "the GPT-2 tokenizer", "name a folder that has it "
                         "with TIKTOKEN_CACHE_DIR, or with a data script's --tokenizer_files")
            found.append(place.read_text(encoding="utf-8"))
        merges, vocab = found[0].split("\n")[1:-1], json.loads(found[1])                    # the first line: version
        last, name = ids - 1, "gpt2" if ids == self.SIZE else f"gpt2-{ids}"
        # ids are the bytes, then the pairs in the order of merging
        vocab = {spelling: i for spelling, i in vocab.items() if i < last} | {END: last}
        super().__init__(byte_pairs(vocab, merges[:last - 256], {END: last}), name, cache, separator=last)
        self.content = None if name == "gpt2" else self.content


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}         # those with a name

# ---------------------------------------------------------------------------------------------------- find a tokenizer


def tokenizer(name, folder=None):
    """A tokenizer by its name in TOKENIZERS, by the name of a run below out/, or by the path of a run, a data set, or
    any folder or file with a tokenizer.json. gpt2-2048 is that of GPT-2 with only 2,048 ids. folder: holds the GPT-2
    tokenizer's two files, if no cache does.

    The meta.json beside a tokenizer.json holds its name and its separator; without one, the folder's name is its name.
    """
    if found := re.fullmatch("gpt2(?:-([0-9]+))?", name):
        paths = {part: folder / part for part in GPT2.PARTS if folder}
        parts = {part: path.read_bytes() if path.exists() else b"" for part, path in paths.items()}
        return GPT2(parts, int(found[1] or GPT2.SIZE))
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    for place in (Path("out", name), Path(name)):
        if place.is_file() or content_of(place):
            path = place if place.is_file() else place / "tokenizer.json"
            home, separator = path.resolve().parent, meta_of(path.parent).get("separator")
            id_hints = id_hints_in(home) if separator is None else []
            known_as = tokenizer_name(path.parent) or home.name
            return from_content(files.regular(path).read_bytes(), known_as, path, id_hints, separator)
        if tokenizer_name(place) in TOKENIZERS:                         # a run or a data set that needs no file
            return tokenizer(tokenizer_name(place), folder)
    raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}, or name a run below out/ "
                     "(python data/weights.py smollm2 makes one), or the path of a folder with a tokenizer.json")


def from_content(content, name, path, id_hints=(), separator=None):
    """The tokenizer that a foreign tokenizer.json describes. The arguments are those of Tokenizer."""
    if coder := without_file(content):
        return coder
    files.optional("tokenizers")
    if fault := fault_of(content):
        raise ValueError(f"{path} is not a tokenizer.json that the package tokenizers can use ({fault}): fetch "
                         "it again, or name another tokenizer")
    return Tokenizer(content, name, path, id_hints, separator)


def without_file(content):
    """Bytes or GPT2, if a tokenizer.json describes the same tokenizer under any name; otherwise None."""
    described = dict_or_empty(files.parsed, content)
    if described == files.parsed(Bytes.exported):
        return Bytes()
    try:
        model, before = described["model"], described["pre_tokenizer"]
        steps = before.get("pretokenizers", [before])
        plain = len(steps) == 1 and BYTE_LEVEL | steps[0] == BYTE_LEVEL
        plain = plain and {token["id"] for token in described["added_tokens"]} <= {50256}
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
        parts = {"vocab.bpe": "\n".join(["#version: 0.2", *merges, ""]).encode(),           # byte for byte
                 "encoder.json": json.dumps(vocab).encode()}
        return GPT2(parts) if plain else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None                             # another tokenizer


def identity(folder):
    """Equal for two folders (runs or data sets) if and only if they use the same tokenizer, whatever its name there. It
    is the name of a tokenizer that needs no file; otherwise the parts of its file that affect ids, and the separator.
    None for an older run, which does not name its tokenizer."""
    content, meta = content_of(folder), meta_of(folder)
    if not content:
        return meta.get("tokenizer")
    if coder := without_file(content):
        return coder.name
    around = ("version", "truncation", "padding", "post_processor")     # these do not affect the ids of a text
    described = dict_or_empty(files.parsed, content)
    return {key: value for key, value in described.items() if key not in around}, meta.get("separator")


def dict_or_empty(read, source):
    """The dict that is read from a source; {} if it is missing, damaged, or something else."""
    try:
        found = read(source)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def meta_of(folder):
    """The meta.json of a run or a data set; {} if it is missing or cannot be read."""
    return dict_or_empty(files.read_json, Path(folder, "meta.json"))


def id_hints_in(folder):
    """The JSON files in a model's folder that may name the ids that begin and end a text, as dicts."""
    paths = (Path(folder, name) for name in ("config.json", "generation_config.json", "tokenizer_config.json"))
    found = [files.read_json(path) for path in paths if path.exists()]
    return [hints for hints in found if isinstance(hints, dict)]


def tokenizer_name(folder):
    """The name of a run's or a data set's tokenizer; None if its meta.json does not name it, as in older runs. Raises
    ValueError if it cannot be part of a folder's name."""
    name = meta_of(folder).get("tokenizer") if folder else None
    return files.check_name(name, f"{Path(folder, 'meta.json')}: tokenizer") if isinstance(name, str) else None


def content_of(folder):
    """The content of the tokenizer.json of a run, a data set, or a fetched model; None if it has none."""
    path, meta = Path(folder, "tokenizer.json"), meta_of(folder)
    if "tokenizer" in meta and "separator" not in meta:                 # a tokenizer that needs no file: if there is
        return None                                                     # a tokenizer.json, it is a leftover
    return files.regular(path).read_bytes() if path.exists() else None


def keep_tokenizer(folder, content):
    """Write the tokenizer.json of a run or a data set. content None: it needs none."""
    if content:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(content)
