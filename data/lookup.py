"""Find a tokenizer (coders.py) by a name on the command line, or by the files in a folder.

The meta.json of a run or a data set names the tokenizer of its ids. For a public model's tokenizer, the folder also
holds its tokenizer.json, and meta.json names the id between two texts ("separator").
"""
from pathlib import Path

from common import files
from data.coders import GPT2, TOKENIZERS, Bytes, Tokenizer, fault_of


def tokenizer(name, folder=None):
    """A tokenizer by its name in TOKENIZERS, by the name of a run below out/, or by the path of a run, a data set, or
    any folder or file with a tokenizer.json. folder: holds the GPT-2 tokenizer's two files, if no cache does.

    The meta.json beside a tokenizer.json holds its name and its separator; without one, the folder's name is its name.
    """
    if name in TOKENIZERS:
        return GPT2.in_folder(folder) if name == "gpt2" and folder else TOKENIZERS[name]()
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
        raise ValueError(f"{path} is no tokenizer.json that the package tokenizers can use ({fault}): fetch it again, "
                         "or name another tokenizer")
    return Tokenizer(content, name, path, id_hints, separator)


def without_file(content):
    """Bytes or GPT2, if a tokenizer.json describes the same tokenizer under any name; otherwise None."""
    described = dict_or_empty(files.parsed, content)
    if described == files.parsed(Bytes().exported()):
        return Bytes()
    parts = GPT2.parts_of(described)
    return GPT2(parts) if parts else None


def dict_or_empty(read, source):
    """The dict that is read from a source; {} if it is missing, damaged, or something else."""
    try:
        found = read(source)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def id_hints_in(folder):
    """The JSON files in a model's folder that may name the ids that begin and end a text, as dicts, config.json first.
    """
    paths = (Path(folder, name) for name in ("config.json", "generation_config.json", "tokenizer_config.json"))
    found = [files.read_json(path) for path in paths if path.exists()]
    return [hints for hints in found if isinstance(hints, dict)]


def meta_of(folder):
    """The meta.json of a run or a data set; {} if it is missing or cannot be read."""
    return dict_or_empty(files.read_json, Path(folder, "meta.json"))


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


def identity(folder):
    """Equal for two folders (runs or data sets) if and only if they use the same tokenizer, whatever its name there.

    It is the name of a tokenizer that needs no file; otherwise the parts of its file that affect ids, and the
    separator. None for an older run, which does not name its tokenizer."""
    content, meta = content_of(folder), meta_of(folder)
    if not content:
        return meta.get("tokenizer")
    if coder := without_file(content):
        return coder.name
    around = ("version", "truncation", "padding", "post_processor")     # these do not affect the ids of a text
    described = dict_or_empty(files.parsed, content)
    return {key: value for key, value in described.items() if key not in around}, meta.get("separator")


def keep_tokenizer(folder, content):
    """Write the tokenizer.json of a run or a data set. content None: it needs none."""
    if content:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(content)
