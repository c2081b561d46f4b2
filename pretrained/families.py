"""The families of public models, one row each: sources.py and convert.py read them, export.py writes them.

A family is a model_type of transformers. Its row in FAMILIES translates its config.json to GPTConfig and the names of
its tensors to ours. In this folder, `their name` is a tensor's name in the public model.
"""
import dataclasses
import re
from types import SimpleNamespace
from typing import NamedTuple

from axes.positions import alibi_slopes, parse_rope_scaling
from model import GPTConfig, shapes_of

# ----------------------------------------------------------------------------------------------------------- the tables

LLAMA_FIELDS = {                                # {field of GPTConfig: key of config.json}
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "head_dim": "head_dim", "n_inner": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
GPT_OSS_FIELDS = LLAMA_FIELDS | {
    "n_expert": "num_local_experts", "n_active": "num_experts_per_tok", "window": "sliding_window"}
GPT2_FIELDS = {
    "block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
    "n_embd": "n_embd", "n_inner": "n_inner", "norm_eps": "layer_norm_epsilon", "mlp": "activation_function",
    "tied": "tie_word_embeddings"}
OPTIONAL = {                                    # {key that may be absent: the default of transformers}
    "num_key_value_heads": None, "head_dim": None, "n_inner": None, "tie_word_embeddings": False,
    "sliding_window": 4096}
ACTIVATIONS = {                                 # {theirs: ours}; of two names for one function, export writes the last
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
ROPE_NUMBERS = {                                # {rope_type: the numbers after the colon of --rope_scaling=}
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    "yarn": ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]}
ONLY = {                                        # {key: values that model.py can compute}; absent and null are accepted
    "hidden_act": ["silu"], "activation_function": ACTIVATIONS, "rope_type": ROPE_NUMBERS,
    "attention_bias": [False], "mlp_bias": [False], "partial_rotary_factor": [1.0],
    "use_sliding_window": [False], "layer_types": [[], ["full_attention"]],             # see `period`
    "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
    "use_parallel_residual": [True], "apply_residual_connection_post_layernorm": [False],
    "truncate": [False], "attention_factor": [], "mscale": [], "mscale_all_dim": [],    # of YaRN
    "quantization_config": []}
GPT_OSS_ONLY = ONLY | {
    "attention_bias": [True], "layer_types": [[], ["sliding_attention", "full_attention"]],
    "swiglu_alpha": [1.702], "swiglu_limit": [7.0], "quantization_config": ["mxfp4"]}

LLAMA_NAMES = {                                 # {our module: theirs}; modules of a block without the block's own name
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "transformer.h": "model.layers",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",                # three tensors there, one here
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_gate": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
GPT_OSS_NAMES = LLAMA_NAMES | {                 # some are names of tensors, not of modules
    "attn.sink_logit": "self_attn.sinks",
    "mlp.c_fc.weight": "mlp.experts.gate_up_proj", "mlp.c_fc.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.c_proj.weight": "mlp.experts.down_proj", "mlp.c_proj.bias": "mlp.experts.down_proj_bias"}
OLMO2_NAMES = LLAMA_NAMES | {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
NEOX_FIELDS = {
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size", "mlp": "hidden_act",
    "norm_eps": "layer_norm_eps", "rope_share": "partial_rotary_factor", "tied": "tie_word_embeddings"}
NEOX_ONLY = {key: values for key, values in ONLY.items() if key != "partial_rotary_factor"} | {
    "hidden_act": ACTIVATIONS, "attention_bias": [True]}
NEOX_NAMES = {
    "transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
    "transformer.h": "gpt_neox.layers", "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "attention.query_key_value", "attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h"}
BLOOM_FIELDS = {
    "block_size": "seq_length", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
    "n_embd": "hidden_size", "n_inner": "n_inner", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"}
BLOOM_NAMES = NEOX_NAMES | {
    "transformer.wte": "transformer.word_embeddings", "transformer.ln_wte": "transformer.word_embeddings_layernorm",
    "transformer.ln_f": "transformer.ln_f", "transformer.h": "transformer.h", "lm_head": "lm_head",
    "attn.c_attn": "self_attention.query_key_value", "attn.c_proj": "self_attention.dense"}
OLDER = {                                       # {key in published files: in transformers 5}
    "n_embed": "hidden_size", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


class Family(NamedTuple):
    """One model_type of transformers."""
    architecture: str                           # the name of its class there
    choices: dict                               # {field of GPTConfig: its value in this family}
    fields: dict = LLAMA_FIELDS                 # {field of GPTConfig: key of config.json}
    names: dict = LLAMA_NAMES                   # {our module or tensor: theirs}; empty: all names are equal
    optional: dict = OPTIONAL                   # {key of config.json that may be absent: its default}
    only: dict = ONLY                           # {key of config.json: values that model.py can compute}


BOS_AND_EOS = ("bos_token_id", "eos_token_id")  # keys of config.json: the ids that begin and end a text
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "pos": "rope", "bias": False}
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", {"norm": "layernorm", "pos": "learned", "bias": True}, GPT2_FIELDS,
                   {}, OPTIONAL | {"tie_word_embeddings": True}),
    "llama": Family("LlamaForCausalLM", LLAMA),
    "mistral": Family("MistralForCausalLM", LLAMA, LLAMA_FIELDS | {"window": "sliding_window"}),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA | {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA | {"qk_norm": "head"}, optional=OPTIONAL | {"head_dim": 128}),
    "olmo2": Family("Olmo2ForCausalLM", LLAMA | {"qk_norm": "all", "norm_place": "out"}, names=OLMO2_NAMES),
    "gpt_neox": Family("GPTNeoXForCausalLM", {"norm_place": "parallel", "pos": "rope", "bias": True}, NEOX_FIELDS,
                       NEOX_NAMES, OPTIONAL | {"partial_rotary_factor": 0.25}, NEOX_ONLY),
    "bloom": Family("BloomForCausalLM", {"embed_norm": True, "mlp": "gelu_tanh", "pos": "alibi", "bias": True},
                    BLOOM_FIELDS, BLOOM_NAMES, OPTIONAL | {"seq_length": 2048, "tie_word_embeddings": True}),
    "gpt_oss": Family("GptOssForCausalLM", LLAMA | {"attn": "gpt_oss", "mlp": "moe", "bias": True}, GPT_OSS_FIELDS,
                      GPT_OSS_NAMES, OPTIONAL | {"sliding_window": 128, "head_dim": 64}, GPT_OSS_ONLY),
}


# ----------------------------------------------------------------------------------------------- config.json, both ways


def config_from(config_json, path):
    """The GPTConfig that a config.json describes. Raises ValueError on what model.py cannot compute."""
    try:
        return read_config(config_json, path)
    except (AttributeError, TypeError) as e:    # an entry of another type
        raise ValueError(f"{path} describes no model: {e}") from None


def read_config(config_json, path):
    """config_from for entries of the right types."""
    config_json = {new: config_json[old] for old, new in OLDER.items() if old in config_json} | config_json
    check_computable(config_json, path)
    family, rope = FAMILIES[config_json["model_type"]], rope_parameters(config_json)
    found = {field: (config_json | rope).get(key, family.optional.get(key)) for field, key in family.fields.items()}
    found = {field: 0 if value is None else value for field, value in found.items()}    # 0: derived from other sizes
    if "mlp" in found:
        found["mlp"] = ACTIVATIONS.get(found["mlp"], found["mlp"])
    if family.choices["pos"] == "rope":
        found |= {"rope_base": float(rope["rope_theta"]), "rope_scaling": rope_scaling(rope)}
    try:
        return GPTConfig(**family.choices, **found)
    except ValueError as e:
        raise ValueError(f"{path} describes no model: {e}") from None


def check_computable(config_json, path):
    """Raise ValueError if a config.json lacks a key or has a value that model.py cannot compute."""
    kind, rope = config_json.get("model_type"), rope_parameters(config_json)
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type {kind} is not among those that can be read: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    lacking = [key for key in family.fields.values() if key not in config_json and key not in family.optional]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}: fetch it again")
    found = config_json | rope | {"rope_type": rope_type(rope), "layer_types": period(config_json.get("layer_types"))}
    if "quant_method" in (found.get("quantization_config") or ()):
        found["quantization_config"] = found["quantization_config"]["quant_method"]
    for key, right in family.only.items():
        if key in found and found[key] is not None and found[key] not in right:
            raise ValueError(f"{path}: model.py cannot compute {key}={found[key]}, only "
                             f"{' or '.join(map(str, right))}")
    needed = ["rope_theta", *ROPE_NUMBERS[found["rope_type"]], *["truncate"] * (found["rope_type"] == "yarn")]
    if not rope.keys() >= set(needed):
        raise ValueError(f"{path}: rope_type={found['rope_type']} needs {', '.join(needed)}")


def period(layer_types):
    """The shortest list that repeated gives the types of all layers: [sliding, full] for [sliding, full, sliding]."""
    types = layer_types or []
    return next((types[:n] for n in range(1, len(types)) if types[n:] == types[:-n]), types)


def rope_parameters(config_json):
    """{rope_theta, rope_type, factor, ...}: one entry of config.json in transformers 5, two entries before."""
    base = {"rope_theta": config_json.get("rope_theta") or 10000.0}
    return base | (config_json.get("rope_scaling") or {}) | (config_json.get("rope_parameters") or {})


def rope_type(rope):
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_scaling(rope):
    """The value of GPTConfig's rope_scaling: linear:2.0, for example; "" for none."""
    how = rope_type(rope)
    if how == "default":
        return ""
    return f"{how}:" + ",".join(str(rope[key]) for key in ROPE_NUMBERS[how])


def config_for(config, kind):
    """The config.json of a GPTConfig as a model of this family, spelled so that transformers 4 and 5 read it."""
    family, values = FAMILIES[kind], dataclasses.asdict(config)
    values |= {"head_dim": config.head_width, "window": config.window or None,
               "mlp": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.mlp, config.mlp)}
    config_json = {"model_type": kind, "architectures": [family.architecture]} | {
        key: values[field] for field, key in family.fields.items()}
    if family.choices["pos"] != "rope":
        return config_json
    if "rope_share" in family.fields:
        config_json |= {"rotary_pct": config.rope_share, "rotary_emb_base": config.rope_base}
    how, numbers = parse_rope_scaling(config.rope_scaling)
    numbers = [int(x) if x.is_integer() else x for x in numbers]        # transformers requires integers for positions
    scaling = {"rope_type": how} | dict(zip(ROPE_NUMBERS[how], numbers, strict=True)) if how else None
    if how == "yarn":
        scaling["truncate"] = False             # transformers' default is True
    return {"hidden_act": "silu"} | config_json | {"rope_theta": config.rope_base, "rope_scaling": scaling}


# ---------------------------------------------------------------------------------------- their tensors and our tensors


def pieces(name, shape, config, names):
    """[(their name, its shape)] of the tensors that make up one of ours: three where a family stores q, k and v apart,
    otherwise one. names: the family's {our module or tensor: theirs}; empty for GPT-2."""
    found = their_names(name, names)
    shapes = [shape]
    if len(found) > 1:                          # q, k and v, whose rows we stack
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        shapes = [(n * config.head_width, *shape[1:]) for n in heads]
    if is_turned(name, shape, names):
        shapes = [(*part[:-2], part[-1], part[-2]) for part in shapes]
    return list(zip(found, shapes, strict=True))


def their_names(name, names):
    """The family's names for one of our tensors, one or three. A Llama's for transformer.h.3.mlp.c_fc.weight is
    [model.layers.3.mlp.up_proj.weight]."""
    module, kind = name.rsplit(".", 1)          # weight or bias
    above = ""
    if block := re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module):
        above, module = f"{names.get('transformer.h', 'transformer.h')}.{block[1]}.", block[2]
    if tensor := names.get(f"{module}.{kind}"):                         # GPT-OSS names some tensors apart
        return [f"{above}{tensor}"]
    return [f"{above}{part}.{kind}" for part in names.get(module, module).split()]


def is_turned(name, shape, names):
    """Is this a matrix of GPT-2's blocks, or of experts (E, out, in)? Their files have out and in the other way round.
    """
    return len(shape) == 3 or not names and len(shape) == 2 and name.startswith("transformer.h.")


def is_by_head(name, names):
    """Does this tensor hold q, k and v head by head? Ours hold all heads of q first, then k, then v."""
    return ".attn.c_attn." in name and names.get("attn.c_attn", "").endswith("query_key_value")


def regrouped(rows, groups):
    """Rows (a b D, ..) in groups (a, b), in the order (b, a): from (heads, 3) to (3, heads), or back."""
    return rows.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)


def own_shapes(config):
    """{name: shape} of a model's parameters. A tied lm_head is left out: it is wte. So are ALiBi's slopes: see
    `slopes_of`."""
    return {name: shape for name, shape in shapes_of(config).items()
            if not (config.tied and name == "lm_head.weight" or name.endswith(".attn.alibi"))}


def slopes_of(config):
    """{name: value} of ALiBi's slopes, which a run stores and a public model does not."""
    if config.pos != "alibi":
        return {}
    heads = SimpleNamespace(heads=config.n_head, score_heads=config.n_head)
    return {f"transformer.h.{layer}.attn.{name}": value for layer in range(config.n_layer)
            for name, value in alibi_slopes(heads).items()}
