"""Turn a run into a folder that transformers can load.

    python data/weights.py export out/RUN FOLDER

It can export plain softmax recipes with Llama's blocks (--norm=rmsnorm --mlp=swiglu) or GPT-2's
(--pos=learned --bias=1), and refuses all others with the reason. Data in symbols has no tokenizer
to write. It needs transformers: pip install transformers
"""

import dataclasses
import os
import shutil
from pathlib import Path

import torch

from axes.positions import parse_rope_scaling
from common import files
from common.flags import Parser, fields_of
from common.runs import load_weights, read_run, read_weights
from data import coders
from model import GPT, GPTConfig, hidden_width
from pretrained.families import config_for, config_from, state_for

BOS_AND_EOS = ("bos_token_id", "eos_token_id")  # the ids that begin and end a text


def export(run, folder):
    """Write a run as a folder that transformers can load; returns its config."""
    transformers = files.optional("transformers")
    transformers.logging.set_verbosity_error()  # ids beyond the vocabulary, which are set below
    meta, path = read_run(run)
    config = GPTConfig(**fields_of(GPTConfig, meta["knobs"]))
    their_config = exported_config(config)
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder")
    tokenizer, separator = coders.content_of(path.parent), meta.get("separator")
    if not tokenizer:  # bytes and GPT-2 have one, symbols have none
        coder = coders.tokenizer(meta.get("tokenizer") or "numbers")
        tokenizer, separator = coder.exported, coder.separator
    for key in BOS_AND_EOS:
        setattr(their_config, key, meta.get("source", {}).get(key, separator))
    with torch.device("meta"):
        ours, theirs = GPT(config), transformers.AutoModelForCausalLM.from_config(their_config)
    load_weights(ours, read_weights(path), path, copy=False)
    state = state_for(ours.state_dict(), config, their_config.model_type)
    theirs.load_state_dict(state, assign=True)
    theirs.tie_weights()
    theirs.config.dtype = theirs.dtype
    part = folder.with_name(f".{folder.name}.part")  # renamed when it is complete
    shutil.rmtree(part, ignore_errors=True)
    theirs.save_pretrained(part)
    if tokenizer:
        coders.keep_tokenizer(part, tokenizer)
        reader = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files.write_json(part / "tokenizer_config.json", reader)
    os.replace(part, folder)
    return their_config


def exported_config(config):
    """The config of transformers that gives the same model as a GPTConfig."""
    wanted, differing = decisive(config), {}  # differing: {model_type: fields that differ}
    for kind in ("llama", "gpt2"):
        try:
            their_config = config_for(config, kind)
            back = decisive(config_from(their_config))
        except ValueError:  # such as GPT-2 with SwiGLU
            continue
        differing[kind] = [
            f"{field}={value}" for field, value in wanted.items() if back.get(field, value) != value
        ]
        if not differing[kind]:
            return their_config
    kind = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(
        f"this run cannot be exported, because a {kind} has no "
        f"{', '.join(differing[kind])}. Train a Llama (--norm=rmsnorm "
        "--mlp=swiglu) or a GPT-2 (--pos=learned --bias=1)"
    )


def decisive(config):
    """{field: value} of the fields of a config that affect the logits, in one spelling."""
    ignored = ["attn", "kernel", "dropout", "bias_range"]
    ignored += [] if config.pos == "rope" else ["rope_base"]
    values = dataclasses.asdict(config) | {
        "head_dim": config.head_width,
        "n_inner": hidden_width(config),
        "qkv_bias": config.bias or config.qkv_bias,
        "rope_scaling": parse_rope_scaling(config.rope_scaling),
    }
    return {field: value for field, value in values.items() if field not in ignored}


def main(argv):
    """python data/weights.py export RUN FOLDER"""
    parser = Parser(prog="weights.py export", description=__doc__)
    parser.usage = "python data/weights.py export RUN FOLDER"
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    with files.one_line_errors():
        their_config = export(args.run, args.folder)
        speaks = "with its" if (args.folder / "tokenizer.json").exists() else "without a"
        print(f"{args.folder}: a {their_config.model_type} for transformers, {speaks} tokenizer")
