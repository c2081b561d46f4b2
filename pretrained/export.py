"""Turn a run into a folder that transformers can load.

    python data/weights.py export out/RUN FOLDER

It writes config.json, model.safetensors and the tokenizer. It can export plain softmax recipes with GPT-2's blocks
(learned positions, LayerNorm, biases) or Llama's (rotary positions, RMSNorm, SwiGLU), the latter also as mistral,
qwen2, qwen3 or olmo2, and recipes with the blocks of gpt_neox or bloom. It refuses all others with the reason. Data in
symbols has no tokenizer to write.
"""
import dataclasses
from pathlib import Path

from axes.positions import parse_rope_scaling
from common import files
from common.flags import Parser, fields_of
from common.runs import read_run, read_weights
from data import coders
from model import GPTConfig, hidden_width
from pretrained.families import (
    BOS_AND_EOS, FAMILIES, check_rotation, config_for, config_from, own_shapes, to_theirs)


def export(run, folder):
    """Write a run as a folder that transformers can load; returns its config.json."""
    meta, path = read_run(run)
    config = GPTConfig(**fields_of(GPTConfig, meta["knobs"]))
    config_json = exported_config(config)
    tokenizer, separator = coders.content_of(path.parent), meta.get("separator")
    if not tokenizer:                           # one made for bytes and GPT-2; none for symbols, or an older run's
        coder = coders.TOKENIZERS.get(meta.get("tokenizer"), coders.Numbers)()
        tokenizer, separator = coder.exported, coder.separator
    public = meta.get("source", {})             # runs converted by older versions lack these ids
    config_json |= {key: public.get(key, separator) for key in BOS_AND_EOS}
    parts = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")            # config.json is the last
    free = not folder.exists() or folder.is_dir() and all(              # an interrupted export continues
        path.name in parts or path.name.startswith(".") and path.suffix == ".tmp" for path in folder.iterdir())
    if not free:
        raise ValueError(f"{folder} exists and is not empty: name a new folder")
    safetensors = files.optional("safetensors.torch")
    tensors = their_tensors(read_weights(path), config, FAMILIES[config_json["model_type"]].names, path)
    with files.replacing(folder / "model.safetensors") as f:
        f.write(safetensors.save(tensors, metadata={"format": "pt"}))
    if tokenizer:
        coders.keep_tokenizer(folder, tokenizer)
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    files.write_json(folder / "config.json", config_json)
    return config_json


def their_tensors(state, config, names, path):
    """{their name: tensor} of our weights: the inverse of convert.read_state."""
    tensors = {}
    for name, shape in own_shapes(config).items():
        if name not in state or state[name].shape != shape:
            raise ValueError(f"{path} is not the model that its meta.json describes: {name} should be {shape}")
        tensors |= to_theirs(name, state[name], config, names)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def exported_config(config):
    """The config.json of the first family that can express a config: read back, it gives the same model."""
    check_rotation(config, "this run")
    wanted, differing = decisive(config), {}                            # differing: {model_type: fields that differ}
    for kind in FAMILIES:
        config_json = config_for(config, kind)
        try:
            back = decisive(config_from(config_json, kind))
        except ValueError:                      # such as GPT-2 with SwiGLU
            continue
        differing[kind] = [f"{field}={value}" for field, value in wanted.items() if back.get(field, value) != value]
        if not differing[kind]:
            return config_json
    kind = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(f"this run cannot be exported, because no family has {', '.join(differing[kind])}; the nearest is "
                     f"{kind}. Train a Llama (--norm=rmsnorm --mlp=swiglu) or a GPT-2 (--pos=learned --bias=1)")


def decisive(config):
    """{field: value} of the fields of a config that affect the logits, in one spelling."""
    ignored = ["attn", "kernel", "dropout", "bias_range"]
    ignored += [] if config.pos == "rope" else ["rope_base", "rope_share"]
    ignored += [] if config.mlp == "moe" else ["n_expert", "n_active"]
    values = dataclasses.asdict(config) | {
        "head_dim": config.head_width, "n_inner": hidden_width(config), "qkv_bias": config.bias or config.qkv_bias,
        "rope_scaling": parse_rope_scaling(config.rope_scaling)}
    return {field: value for field, value in values.items() if field not in ignored}


def main(argv):
    """python data/weights.py export RUN FOLDER"""
    parser = Parser(prog="weights.py export", description=__doc__)
    parser.usage = "python data/weights.py export RUN FOLDER"
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    with files.one_line_errors():
        config_json = export(args.run, args.folder)
        speaks = "with its" if (args.folder / "tokenizer.json").exists() else "without a"
        print(f"{args.folder}: a {config_json['model_type']} for transformers, {speaks} tokenizer")
