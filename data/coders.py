"""Tokenizers: text into ids and back. Each is a class with

    name, vocab_size, separator     separator: the id between two texts
    content                         of the tokenizer.json that a run must store; None: none
    exported                        the tokenizer as a tokenizer.json; None: it cannot be one
    lengths                         bytes of text of each id, (vocab_size,)
    prefix                          bytes that encode adds before a text: 1 if it adds a space
    encode(text), decode(ids)       special tokens are neither parsed from text nor shown

Bytes, GPT-2's byte pairs, and the symbols of synthetic tasks have names. Any other tokenizer is a
tokenizer.json: it belongs to a public model, and to the runs and data sets made with it. The
meta.json of a run or a data set names the tokenizer of its ids. For a public model's tokenizer, the
folder also holds its tokenizer.json, and meta.json names the id between two texts ("separator").
"""

import functools
import itertools
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np

from common import files

# -------------------------------------------------------------------- the format tokenizer.json

END = "<|endoftext|>"  # the separator of most tokenizers
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes spelled as themselves
# {character: byte} of byte-level tokenizers; other bytes are spelled by the characters from 256 on
BYTE_SPELLING = {
    chr(b if b in PRINTABLE else 256 + b - sum(p < b for p in PRINTABLE)): b for b in range(256)
}


def byte_pairs(vocab, merges, separator):
    """A tokenizer.json of byte pairs. vocab: {spelling: id}; merges: pairs "a b" in their order."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "added_tokens": [plain | {"id": separator, "content": END, "special": True}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        },
        ensure_ascii=False,
    ).encode()


# ------------------------------------------------------------------------------------ tokenizers


class Bytes:
    """One token per byte of UTF-8; id 256 separates documents."""

    name, vocab_size, separator, prefix = "bytes", 257, 256, 0
    content, exported = None, byte_pairs(BYTE_SPELLING, [], 256)  # without any merges
    lengths = np.array([1] * 256 + [0])

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Numbers:
    """Symbols of a synthetic task, which print as numbers."""

    name, separator, content, exported = "numbers", None, None, None

    def encode(self, text):
        try:
            return np.array([int(word) for word in text.split()], dtype=np.uint16)
        except (ValueError, OverflowError):
            raise ValueError(
                f"the tokens are symbols here: write a prompt as numbers and spaces, not {text!r}"
            ) from None

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


class GPT2:
    """OpenAI's byte-pair encoding, by tiktoken; the last id separates documents.

    ids: their number. Fewer than SIZE are the bytes, the first pairs and the separator. Raises
    ValueError if tiktoken is not installed or cannot fetch its files."""

    SIZE, content, prefix = 50257, None, 0
    MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"

    def __init__(self, ids=SIZE):
        if not 257 <= ids <= self.SIZE:
            raise ValueError(f"--tokenizer=gpt2-{ids} must have 257 to {self.SIZE} ids")
        tiktoken = files.optional("tiktoken")
        try:
            whole = tiktoken.get_encoding("gpt2")
        except OSError as e:  # such as the errors of its package requests
            cache = os.environ.get("TIKTOKEN_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
            raise ValueError(
                f"{cache} does not hold GPT-2's tokenizer, and tiktoken could not fetch it "
                f"({type(e).__name__}): run this again with a network, or name a folder in which "
                "tiktoken has stored it with TIKTOKEN_CACHE_DIR=FOLDER"
            ) from None
        self.name = "gpt2" if ids == self.SIZE else f"gpt2-{ids}"
        self.vocab_size, self.separator = ids, ids - 1
        # ids are the bytes, then the pairs in the order of merging
        ranks = whole._mergeable_ranks
        self.pieces = {piece: i for piece, i in ranks.items() if i < self.separator}
        self.coder = tiktoken.Encoding(
            self.name,
            pat_str=whole._pat_str,
            mergeable_ranks=self.pieces,
            special_tokens={END: self.separator},
        )
        in_order = sorted(self.pieces, key=self.pieces.get)
        self.lengths = np.array([*map(len, in_order), 0])

    @property
    def exported(self):
        content = files.optional("tiktoken.load").read_file_cached(self.MERGES).decode()
        merges = content.split("\n")[1:-1]  # the first line is a version
        spelling = {byte: character for character, byte in BYTE_SPELLING.items()}
        vocab = {"".join(spelling[byte] for byte in piece): i for piece, i in self.pieces.items()}
        return byte_pairs(vocab, merges[: self.separator - 256], self.separator)

    def encode(self, text):
        return self.coder.encode_to_numpy(text, disallowed_special=())  # special tokens are text

    def decode(self, ids):
        return self.coder.decode([int(i) for i in ids if i < self.separator])


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}  # those with a name


class Tokenizer:
    """What a tokenizer.json in Hugging Face's format describes, by the package tokenizers.

    content: of that file; path: its place, for error messages. id_hints: the model's other JSON
    files that may name the ids that begin and end a text (config.json, ...), as dicts. separator:
    the id between two texts. None: the first that exists of <|endoftext|>, the token that the
    tokenizer puts before a text, and those that begin or end a text according to id_hints."""

    def __init__(self, content, name, path, id_hints=(), separator=None):
        self.content = self.exported = content
        self.name = files.check_name(name, f"{path}: its folder or tokenizer")
        library = files.optional("tokenizers")
        try:
            self.coder = library.Tokenizer.from_buffer(content)
            before_a_text = self.coder.encode("").ids[:1]
            decoder = json.loads(content).get("decoder")
        except Exception as e:  # the package raises this very class
            raise ValueError(
                f"{path} is not a tokenizer.json that the package tokenizers can use "
                f"({e}): fetch it again, or name another tokenizer"
            ) from None
        self.byte_level = "ByteLevel" in json.dumps(decoder)  # otherwise as SentencePiece
        self.coder.encode_special_tokens = True  # spelled in a text, they are text
        self.coder.no_truncation()  # some files ask for truncation or padding
        self.coder.no_padding()
        self.vocab_size = max(self.coder.get_vocab().values(), default=0) + 1
        if separator is None:
            first = [{"bos_token": END}, {"bos_token_id": before_a_text}]
            found = self.special_ids([*first, *id_hints], "bos") + self.special_ids(id_hints, "eos")
            if not found:
                raise ValueError(
                    f"{path} does not name the token between two texts: write "
                    f'{{"eos_token": "..."}} into a tokenizer_config.json beside it'
                )
            separator = found[0]
        if not (isinstance(separator, int) and 0 <= separator < self.vocab_size):
            raise ValueError(
                f"{path}: the separator {separator!r} is not an id below {self.vocab_size}: "
                'name the right one as "separator" in the meta.json beside it'
            )
        self.separator = separator

    def special_ids(self, id_hints, role):
        """The ids that begin (role "bos") or end ("eos") a text, as a list. config.json has one or
        several ids, tokenizer_config.json the spelling of one."""
        found = []
        for hints in id_hints:
            ids, token = hints.get(f"{role}_token_id"), hints.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            found += ids if isinstance(ids, list) else [ids]
            found += [self.coder.token_to_id(token)] if isinstance(token, str) else []
        found = [i for i in found if isinstance(i, int) and 0 <= i < self.vocab_size]
        return list(dict.fromkeys(found))

    @functools.cached_property
    def lengths(self):
        """Bytes of text of each id, (vocab_size,): 0 for special tokens."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for spelling, i in self.coder.get_vocab().items():
            if self.byte_level:  # one printable character for each byte
                lengths[i] = len(spelling)
            elif re.fullmatch("<0x[0-9A-F]{2}>", spelling):  # a byte by its number
                lengths[i] = 1
            else:
                lengths[i] = len(spelling.replace("\u2581", " ").encode())  # U+2581 means a space
        for i, token in self.coder.get_added_tokens_decoder().items():  # spelled literally
            lengths[i] = 0 if token.special else len(token.content.encode())
        lengths[self.separator] = 0
        return lengths

    @functools.cached_property
    def prefix(self):
        """Bytes that encode adds before a text. It adds no space before a space: the ids of such a
        text are often those of the text without its first space, which then is not counted."""
        return max(0, int(self.lengths[self.encode("a")].sum()) - 1)

    def encode(self, text):
        found = []  # SentencePiece's words may contain spaces: not cut
        for part in cut(text) if self.byte_level else [text]:
            (encoded,) = self.coder.encode_batch_fast([part], add_special_tokens=False)
            found.append(np.array(encoded.ids, np.uint32))
        return np.concatenate(found)

    def decode(self, ids):  # special tokens are left out
        return self.coder.decode([int(i) for i in ids if i != self.separator])


WORD_END = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")  # one space between two letters


def cut(text):
    """A long text in parts of about a million characters, each of which takes about 140 bytes of
    memory. The cuts are at WORD_END, which no merge crosses, because a word begins with its space:
    the ids are those of the whole text."""
    found = (WORD_END.search(text, i) for i in range(1 << 20, len(text), 1 << 20))
    cuts = sorted({match.start() for match in found if match})
    return (text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)]))


# ----------------------------------------------------------------------------- find a tokenizer


def tokenizer(name):
    """A tokenizer by its name (bytes, gpt2, gpt2-2048, numbers), by the name of a run below out/,
    or by the path of a run, a data set, or any folder with a tokenizer.json.

    The meta.json beside a tokenizer.json holds its name and its separator; without one, the
    folder's name is its name."""
    if coder := with_name(name):
        return coder
    for folder in (Path("out", name), Path(name)):
        if content := content_of(folder):
            known_as = tokenizer_name(folder) or folder.resolve().name
            separator = meta_of(folder).get("separator")
            path, hints = folder / "tokenizer.json", id_hints_in(folder)
            return Tokenizer(content, known_as, path, hints, separator)
        if coder := with_name(tokenizer_name(folder)):  # of a run or a data set
            return coder
    raise ValueError(
        f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}, or name a run "
        "below out/ (python data/weights.py smollm2 makes one), or the path of a folder "
        "with a tokenizer.json"
    )


def with_name(name):
    """A tokenizer that needs no file; None if there is none of this name."""
    if found := re.fullmatch("gpt2-([0-9]+)", name or ""):
        return GPT2(int(found[1]))
    return TOKENIZERS[name]() if name in TOKENIZERS else None


# ------------------------------------------------------------ what a folder says of its tokenizer


def meta_of(folder):
    """The meta.json of a run or a data set; {} if it is missing or cannot be read."""
    try:
        found = files.read_json(Path(folder, "meta.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def id_hints_in(folder):
    """The JSON files in a model's folder that may name the ids that begin or end a text, as
    dicts."""
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    paths = (Path(folder, name) for name in names)
    found = [files.read_json(path) for path in paths if path.exists()]
    return [hints for hints in found if isinstance(hints, dict)]


def tokenizer_name(folder):
    """The name of a run's or a data set's tokenizer; None if its meta.json does not name it, as in
    older runs. Raises ValueError if it cannot be part of a folder's name."""
    name = meta_of(folder).get("tokenizer") if folder else None
    if isinstance(name, str):
        return files.check_name(name, f"{Path(folder, 'meta.json')}: tokenizer")
    return None


def content_of(folder):
    """The content of the tokenizer.json of a run, a data set, or a public model; None: it has
    none."""
    path, meta = Path(folder, "tokenizer.json"), meta_of(folder)
    if "tokenizer" in meta and "separator" not in meta:  # the file is a leftover
        return None
    return files.regular(path).read_bytes() if path.exists() else None


def keep_tokenizer(folder, content):
    """Write the tokenizer.json of a run or a data set. content None: it needs none."""
    if content:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(content)
