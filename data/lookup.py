"""Which tokenizer (of coders.py) is meant: by a name on the command line, or by what lies in a folder.

A run and a data set each say in their meta.json which tokenizer their ids are of. Where that is a public model's, a
tokenizer.json lies beside it, and the meta.json says which id goes between two texts ("separator").
"""
import json
from pathlib import Path

from common import files
from data.coders import GPT2, TOKENIZERS, Bytes, HuggingFace

# ----------------------------------------------------------------------------------------------------- by name, by path


def tokenizer(name, folder=None):
    """By a name of TOKENIZERS, by that of a run below out/, or by the path of a run, of a data set, or of any folder or
    file with a tokenizer.json. folder: where the GPT-2 tokenizer's two files are, if tiktoken does not have them yet.
    """
    if name in TOKENIZERS:
        return GPT2.in_folder(folder) if name == "gpt2" and folder else TOKENIZERS[name]()
    for place in (Path("out", name), Path(name)):
        if place.is_file() or content_of(place):
            return from_file(place if place.is_file() else place / "tokenizer.json")
        if tokenizer_name(place) in TOKENIZERS:                         # of a run or a data set that needs no file
            return tokenizer(tokenizer_name(place), folder)
    raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(TOKENIZERS)}, or name a run below out/ "
                     "(python data/weights.py smollm2 makes one), or the path of a folder with a tokenizer.json")


def from_file(path):
    """The tokenizer of a run, of a data set, or of a folder that was fetched. Its name and the separator stand in the
    meta.json beside it; without one, the folder's name is its name."""
    meta, home = meta_of(path.parent), path.resolve().parent
    id_hints = [] if "separator" in meta else id_hints_in(home)
    return from_content(path.read_bytes(), meta.get("tokenizer", home.name), path, id_hints, meta.get("separator"))


def from_content(content, *about):
    """The tokenizer that a tokenizer.json describes. about: as HuggingFace takes it."""
    return without_file(content) or HuggingFace(content, *about)


def without_file(content):
    """Bytes or GPT2, where a tokenizer.json describes what they do, under whatever name; else None."""
    described = described_by(content)
    if described == described_by(Bytes().exported()):
        return Bytes()
    parts = GPT2.parts_of(described)
    return GPT2(parts) if parts else None


def described_by(content):
    """A tokenizer.json as a dict, empty where it is damaged: whoever has to read it says so."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def id_hints_in(folder):
    """The files in a model's folder that may say which ids begin and end a text, as dicts, config.json first."""
    paths = (Path(folder, name) for name in ("config.json", "generation_config.json", "tokenizer_config.json"))
    return [files.read_json(path) for path in paths if path.exists()]


# ---------------------------------------------------------------------------------------------- of a run, of a data set


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
    """The tokenizer.json of a run, of a data set, or of a model that was fetched; None where none belongs to it."""
    path, meta = Path(folder, "tokenizer.json"), meta_of(folder)
    if "tokenizer" in meta and "separator" not in meta:                 # it names one that needs no file: a
        return None                                                     # tokenizer.json is from something else
    return path.read_bytes() if path.exists() else None


def identity(folder):
    """Equal for two folders (runs or data sets) exactly where they are in the same tokenizer, whatever it is called
    there: the name of one that needs no file, or else what its file says on ids, and the separator. None of an older
    run, which does not say."""
    content, meta = content_of(folder), meta_of(folder)
    if not content:
        return meta.get("tokenizer")
    if coder := without_file(content):
        return coder.name
    around = ("version", "truncation", "padding", "post_processor")     # which change no id of a text
    return {key: value for key, value in described_by(content).items() if key not in around}, meta.get("separator")


def keep_tokenizer(folder, content):
    """Put a tokenizer.json into the folder of a run or a data set, if it needs one."""
    if content:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(content)
