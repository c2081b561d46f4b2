"""Tokenizers: text into ids and back. Each is a class with

    name, vocab_size, separator     separator: the id between two texts
    content                         content of its tokenizer.json; None: it needs no file
    lengths                         bytes of text of each id, (vocab_size,)
    encode(text), decode(ids)       special tokens are neither parsed from text nor shown
    ends(id_hints)                  the ids that end the text of a model with this tokenizer
    exported()                      the tokenizer as a tokenizer.json, or None

Bytes, GPT-2's byte pairs, and the symbols of synthetic tasks have names. Any other tokenizer is a tokenizer.json: it
belongs to a public model, and to the runs and data sets made with it. lookup.py finds the tokenizer of a name, a run or
a data set.
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

# ---------------------------------------------------------------------------------------------------- named tokenizers


class Bytes:
    """One token per byte of UTF-8; id 256 separates documents."""
    name, vocab_size, separator = "bytes", 257, 256
    content = None
    lengths = np.array([1] * 256 + [0])

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def ends(self, id_hints):
        return [self.separator]

    def exported(self):
        """The tokenizer as a tokenizer.json: byte pairs without any merges."""
        return byte_pairs(BYTE_SPELLING, [], {END: self.separator})


class Numbers:
    """Symbols of a synthetic task, which print as numbers."""
    name, separator, content = "numbers", None, None

    def encode(self, text):
        words = text.split()
        if not all(word.isdecimal() and int(word) < 1 << 16 for word in words):
            raise ValueError(f"the tokens are symbols here: write a prompt as numbers and spaces, not {text!r}")
        return np.array([int(word) for word in words], dtype=np.uint16)

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)

    def exported(self):
        return None


# -------------------------------------------------------------------------------------------- through a tokenizer.json

SECONDS, MEMORY, IDS = 60, 4 << 30, 100         # limits of a trial: seconds, bytes, and ids of a single character
SAMPLE = "".join(map(chr, range(0x3100))) + "漢字 한국어 \U0001f600"       # alphabets of most languages


@functools.lru_cache
def fault_of(content):
    """What is wrong with a tokenizer.json, as one line; empty if nothing is. A damaged one can make the package
    tokenizers abort the whole process, and a malicious one can turn each character into megabytes. So a process of its
    own tries it, once for each file, with limits on time and memory."""
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


class Tokenizer:
    """What a tokenizer.json in Hugging Face's format describes, by the package tokenizers.

    content: of that file; path: its place, for error messages. id_hints: the model's other JSON files that may name
    the ids that begin and end a text (config.json, ...), as dicts. separator: the id between two texts; None: find it.
    """

    def __init__(self, content, name, path, id_hints=(), separator=None):
        self.content, self.name = content, files.check_name(name, f"{path}: its folder or tokenizer")
        self.coder = files.optional("tokenizers").Tokenizer.from_buffer(content)
        self.coder.encode_special_tokens = True                         # special tokens spelled in a text are text
        self.coder.no_truncation()              # some files ask for truncation or padding
        self.coder.no_padding()
        self.vocab_size = max(self.coder.get_vocab().values(), default=0) + 1
        self.separator = self.find_separator(id_hints, path) if separator is None else separator
        if not (isinstance(self.separator, int) and 0 <= self.separator < self.vocab_size):
            raise ValueError(f"{path}: the separator {self.separator!r} is no id below {self.vocab_size}: name the "
                             'right one as "separator" in the meta.json beside it')
        decoder = json.dumps(files.parsed(content).get("decoder"))
        self.byte_level = "ByteLevel" in decoder                        # otherwise as in SentencePiece

    def find_separator(self, id_hints, path):
        """The first that exists: <|endoftext|>; the token that the tokenizer puts before a text; the token that begins
        a text, or ends it, according to the model's files."""
        put_before = self.coder.encode("", add_special_tokens=True).ids[:1]
        begins, ends = self.special_ids(id_hints, "bos"), self.special_ids(id_hints, "eos")
        if candidates := [*self.ids_of(END), *put_before, *begins, *ends]:
            return candidates[0]
        raise ValueError(f"{path} does not name the token between two texts: write "
                         f'{{"eos_token": "..."}} into a tokenizer_config.json beside it')

    def special_ids(self, id_hints, role):
        """The ids that begin (role "bos") or end ("eos") a text. config.json has one or several ids,
        tokenizer_config.json the spelling of one."""
        found = []
        for hints in id_hints:
            ids, token = hints.get(f"{role}_token_id"), hints.get(f"{role}_token")
            found += ids if isinstance(ids, list) else [ids]
            found += self.ids_of(token.get("content") if isinstance(token, dict) else token)
        return list(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < self.vocab_size))

    def ids_of(self, token):
        """The id of one token by its spelling, as a list; empty if it does not exist."""
        found = self.coder.token_to_id(token if isinstance(token, str) else "")
        return [] if found is None else [found]

    def ends(self, id_hints):
        """The ids that end a model's text: those in its files, and the end of a turn in a conversation."""
        return list(dict.fromkeys(self.special_ids(id_hints, "eos") + self.ids_of("<|im_end|>")))

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
    """OpenAI's byte-pair encoding; id 50256 separates documents. Its two files are fetched once, to the folder in which
    tiktoken keeps them too."""
    ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    PARTS = {                                   # its two files: size in bytes and sha256
        "vocab.bpe": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "encoder.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}

    def __init__(self, parts=None):
        """parts: {name: content} of the two files; None: from that folder or the network."""
        files.optional("tokenizers")            # fail before a download
        cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
                     or f"{tempfile.gettempdir()}/data-gym-cache")
        found = []
        for name, (size, digest) in self.PARTS.items():
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
        self.described = byte_pairs(vocab, merges, {END: 50256})
        super().__init__(self.described, "gpt2", cache, separator=50256)
        self.content = None                     # a run and a data set store its name only

    @classmethod
    def in_folder(cls, folder):
        """The tokenizer from a folder with OpenAI's two files."""
        for name, (_, digest) in cls.PARTS.items():
            if not ((folder / name).exists() and files.sha256(folder / name) == digest):
                raise ValueError(f"{folder / name} is missing or is not the GPT-2 tokenizer's: "
                                 "name a folder with OpenAI's vocab.bpe and encoder.json")
        return cls({name: (folder / name).read_bytes() for name in cls.PARTS})

    @classmethod
    def parts_of(cls, described):
        """OpenAI's two files, byte for byte, from a parsed tokenizer.json; None if it is another tokenizer's."""
        try:
            model, before = described["model"], described["pre_tokenizer"]
            steps = before.get("pretokenizers", [before])
            plain = len(steps) == 1 and BYTE_LEVEL | steps[0] == BYTE_LEVEL
            added = {token["id"] for token in described["added_tokens"]} <= {50256}
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
            vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
            parts = {"vocab.bpe": "\n".join(["#version: 0.2", *merges, ""]).encode(),
                     "encoder.json": json.dumps(vocab).encode()}
        except (AttributeError, KeyError, TypeError):
            return None                         # another kind of tokenizer
        equal = all(hashlib.sha256(parts[name]).hexdigest() == digest for name, (_, digest) in cls.PARTS.items())
        return parts if plain and added and equal else None

    def ends(self, id_hints):
        return [self.separator]

    def exported(self):
        return self.described


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2, "numbers": Numbers}         # those with a name

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
