"""The families of public models, one row each: sources.py and convert.py read them, export.py writes them.

A family is a model_type of transformers. Its row in FAMILIES translates its config.json to GPTConfig and the names of
its tensors to ours. In this folder, `their name` is a tensor's name in the public model.
"""
import dataclasses
import re
from typing import NamedTuple

import torch

from axes.positions import parse_rope_scaling
from model import GPTConfig, hidden_width, shapes_of


LLAMA_FIELDS = {                                # {field of GPTConfig: key of config.json}
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "head_dim": "head_dim", "n_inner": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
    "rope_base": "rope_theta"}
LLAMA_NAMES = {                                 # {our module: theirs}; modules of a block without the block's own name
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "transformer.h": "model.layers",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",                # three tensors there, one here
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_gate": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
NEOX_NAMES = {
    "transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
    "transformer.h": "gpt_neox.layers", "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "attention.query_key_value", "attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h"}
OPTIONAL = {                                    # {key that may be absent: the default of transformers}
    "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rope_theta": 10000.0}
NULLABLE = ["num_key_value_heads", "head_dim", "n_inner", "sliding_window"]             # null: derived, or none
ACTIVATIONS = {                                 # {theirs: ours}; of two names for one function, export writes the last
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
ROPE_NUMBERS = {                                # {rope_type: the numbers after the colon of --rope_scaling=}
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    "yarn": ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]}
ONLY = {                                        # {key: values that model.py can compute}; the key may be absent
    "hidden_act": ["silu"], "activation_function": ACTIVATIONS, "attention_bias": [False], "mlp_bias": [False],
    "partial_rotary_factor": [1.0], "rope_interleaved": [False], "use_mrope": [False], "use_sliding_window": [False],
    "layer_types": [[], ["full_attention"]],    # one period
    "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
    "use_parallel_residual": [True], "apply_residual_connection_post_layernorm": [False],
    "slow_but_exact": [False], "quantization_config": [None]}
ROPE_ONLY = {                                   # the same for keys of rope_parameters
    "rope_type": ROPE_NUMBERS, "truncate": [False], "attention_factor": [None], "mscale": [None],
    "mscale_all_dim": [None]}
ROPE_KEYS = {"type", "rope_theta", "partial_rotary_factor", *ROPE_ONLY, *sum(ROPE_NUMBERS.values(), [])}
ROPE_PLACES = ("rope_scaling", "rope_parameters")                       # its names in transformers 4 and 5
WITHOUT_EFFECT = set("""
    model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path tokenizer_class
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id is_decoder
    is_encoder_decoder chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task
    task_specific_params summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    predict_special_tokens output_attentions output_hidden_states output_past output_router_logits return_dict
    use_cache do_sample max_length temperature top_k top_p initializer_range gradient_checkpointing
    attention_dropout hidden_dropout classifier_dropout embd_pdrop resid_pdrop attn_pdrop router_aux_loss_coef
    pretraining_tp reorder_and_upcast_attn attention_softmax_in_fp32 masked_softmax_fusion
    bias_dropout_fusion skip_bias_add skip_bias_add_qkv offset_alibi n_ctx n_inner seq_length max_window_layers
    sliding_window experts_per_token initial_context_length is_llama_config transformers.js_config unsloth_version
    unsloth_fixed
    """.split())                                # keys on which no logit depends, unless they are a family's field
BOS_AND_EOS = ("bos_token_id", "eos_token_id")  # keys of config.json: the ids that begin and end a text
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "pos": "rope", "bias": False}


class Family(NamedTuple):
    """One model_type of transformers."""
    architecture: str                           # the name of its class there
    choices: dict = LLAMA                       # {field of GPTConfig: its value in this family}
    fields: dict = LLAMA_FIELDS                 # {field of GPTConfig: key of config.json}
    names: dict = LLAMA_NAMES                   # {our module or tensor: theirs}; empty: all names are equal
    optional: dict = OPTIONAL                   # {key of config.json that may be absent: its default}
    only: dict = ONLY                           # {key of config.json: values that model.py can compute}
    other: dict = {}                            # {another name of a key: the key}
    rope: dict = {}                             # rope_parameters if they are absent


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", {"norm": "layernorm", "pos": "learned", "bias": True}, names={},
        fields={"block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
                "n_embd": "n_embd", "n_inner": "n_inner", "norm_eps": "layer_norm_epsilon",
                "mlp": "activation_function", "tied": "tie_word_embeddings"},
        optional={"n_inner": None, "tie_word_embeddings": True},
        other={"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
               "num_hidden_layers": "n_layer"}),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM", fields=LLAMA_FIELDS | {"window": "sliding_window"},
        optional=OPTIONAL | {"num_key_value_heads": 8, "sliding_window": 4096},
        only=ONLY | {"layer_types": [[], ["sliding_attention"], ["full_attention"]]}),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA | {"qkv_bias": True}, optional=OPTIONAL | {"num_key_value_heads": 32}),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA | {"qk_norm": "head"},
                    optional=OPTIONAL | {"num_key_value_heads": 32, "head_dim": 128}),
    "olmo2": Family(
        "Olmo2ForCausalLM", LLAMA | {"qk_norm": "all", "norm_place": "out"},
        names=LLAMA_NAMES | {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", {"norm_place": "parallel", "pos": "rope", "bias": True}, names=NEOX_NAMES,
        fields={"block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size",
                "mlp": "hidden_act", "norm_eps": "layer_norm_eps", "rope_share": "rotary_pct",
                "rope_base": "rotary_emb_base", "tied": "tie_word_embeddings"},
        optional={"tie_word_embeddings": False, "rotary_pct": 0.25, "rotary_emb_base": 10000.0},
        only=ONLY | {"hidden_act": ACTIVATIONS, "attention_bias": [True]},
        other={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}),
    "bloom": Family(
        "BloomForCausalLM", {"embed_norm": True, "mlp": "gelu_tanh", "pos": "alibi", "bias": True},
        fields={"block_size": "seq_length", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
                "n_embd": "hidden_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"},
        names=NEOX_NAMES | {
            "transformer.wte": "transformer.word_embeddings", "transformer.ln_f": "transformer.ln_f",
            "transformer.ln_wte": "transformer.word_embeddings_layernorm", "transformer.h": "transformer.h",
            "lm_head": "lm_head", "attn.c_attn": "self_attention.query_key_value",
            "attn.c_proj": "self_attention.dense"},
        optional={"seq_length": 2048, "tie_word_embeddings": True},
        other={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}),
    "gpt_oss": Family(
        "GptOssForCausalLM", LLAMA | {"attn": "gpt_oss", "mlp": "moe", "bias": True},
        fields=LLAMA_FIELDS | {"n_expert": "num_local_experts", "n_active": "num_experts_per_tok",
                               "window": "sliding_window"},
        names=LLAMA_NAMES | {                   # some are names of tensors, not of modules
            "attn.sink_logit": "self_attn.sinks",
            "mlp.c_fc.weight": "mlp.experts.gate_up_proj", "mlp.c_fc.bias": "mlp.experts.gate_up_proj_bias",
            "mlp.c_proj.weight": "mlp.experts.down_proj", "mlp.c_proj.bias": "mlp.experts.down_proj_bias"},
        optional={"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False, "sliding_window": 128,
                  "rope_theta": 150000.0},
        only=ONLY | {"attention_bias": [True], "layer_types": [[], ["sliding_attention", "full_attention"]],
                     "swiglu_alpha": [1.702], "swiglu_limit": [7.0], "quantization_config": [None, "mxfp4"]},
        other={"num_experts": "num_local_experts"},
        rope={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
              "original_max_position_embeddings": 4096})}


# ----------------------------------------------------------------------------------------------- config.json, both ways


def config_from(config_json, path):
    """The GPTConfig that a config.json describes. Raises ValueError on what model.py cannot compute."""
    try:
        config = GPTConfig(**fields_from(config_json))
    except (AttributeError, TypeError, ValueError) as e:                # the first two if an entry has another type
        raise ValueError(f"{path}: {e}") from None
    check_rotation(config, path)
    return config


def check_rotation(config, path):
    """Raise ValueError if transformers rotates the channels of a head in another way than axes/positions.py."""
    width = int(config.head_width * config.rope_share)
    if config.pos == "rope" and width % 2:
        raise ValueError(f"{path} rotates {width} channels of a head: transformers pairs an odd number in another way")
    if config.rope_share < 1 and config.rope_scaling.startswith("yarn"):
        raise ValueError(f"{path} has YaRN and rotates a part of the channels: transformers scales only that part")


def fields_from(config_json):
    """{field of GPTConfig: value} of a config.json. Raises ValueError if a key is missing or has a value that model.py
    cannot compute."""
    entries = entries_of(config_json)
    family = FAMILIES[entries["model_type"]]
    if lacking := [key for key in family.fields.values() if key not in entries]:
        raise ValueError(f"it lacks {', '.join(lacking)}: fetch it again")
    if null := [key for key in family.fields.values() if entries[key] is None and key not in NULLABLE]:
        raise ValueError(f"{', '.join(null)} must not be null: write a value there")
    for key, right in (family.only | ROPE_ONLY).items():
        if key in entries and entries[key] not in right:
            raise ValueError(f"model.py computes {key} {' or '.join(map(str, right))}, not {entries[key]}")
    found = {field: 0 if entries[key] is None else entries[key] for field, key in family.fields.items()}
    if "mlp" in found:
        found["mlp"] = ACTIVATIONS[found["mlp"]]
    if "window" in found and entries["layer_types"] == ["full_attention"]:
        found["window"] = 0
    if family.choices["pos"] == "rope":
        how = entries["rope_type"]
        needed = [*ROPE_NUMBERS[how], *["truncate"] * (how == "yarn")]
        if not entries.keys() >= set(needed):
            raise ValueError(f"rope_type={how} needs {', '.join(needed)}")
        numbers = ",".join(str(entries[key]) for key in ROPE_NUMBERS[how])
        found |= {"rope_base": float(found["rope_base"]), "rope_scaling": f"{how}:{numbers}" if numbers else ""}
    return family.choices | found


def entries_of(config_json):
    """{key: value} as transformers understands a config.json: one name for each key, the keys of rope_parameters among
    the others, the family's defaults. Raises ValueError on unknown keys and on two values for one key."""
    kind = config_json.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind} is not among those that can be read: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    known, rope = {*family.fields.values(), *family.only, *family.other, *WITHOUT_EFFECT}, {}
    if family.choices["pos"] == "rope":
        known |= {*ROPE_PLACES, "original_max_position_embeddings"}
        older, newer = (config_json.get(place) for place in ROPE_PLACES)
        if family.rope and older is newer is None and config_json.keys() & set(ROPE_PLACES):
            raise ValueError("transformers 4 reads a rope_scaling of null as none, transformers 5 as YaRN: write "
                             '{"rope_type": "default"}, or delete it for YaRN')
        if older and newer and older != newer:
            raise ValueError("rope_scaling and rope_parameters differ: delete one of them")
        rope = older or (family.rope if newer is None else newer)
        rope = {"rope_type": rope.get("type", "default")} | rope
    if unknown := config_json.keys() - known | rope.keys() - ROPE_KEYS:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}: delete those that do not change a logit")
    name = {key: family.other.get(key, key) for key in [*config_json, *rope]}
    # in rising priority: another name of a key, the default, the key itself, rope_parameters
    found = {name[key]: value for key, value in config_json.items()} | family.optional
    found |= {key: value for key, value in config_json.items() if key == name[key]}
    found |= {name[key]: value for key, value in rope.items()}
    for key, value in config_json.items():
        if found[name[key]] != value:
            raise ValueError(f"{key}={value} contradicts {name[key]}={found[name[key]]}, given or by default: make "
                             "them agree")
    types = found.get("layer_types") or []      # the shortest list that repeated gives the types of all layers
    found["layer_types"] = next((types[:n] for n in range(1, len(types)) if types[n:] == types[:-n]), types)
    if "quant_method" in (found.get("quantization_config") or ()):
        found["quantization_config"] = found["quantization_config"]["quant_method"]
    return found


def config_for(config, kind):
    """The config.json of a GPTConfig as a model of this family, spelled so that transformers 4 and 5 read it."""
    family, values = FAMILIES[kind], dataclasses.asdict(config)
    values |= {"head_dim": config.head_width, "window": config.window or None, "n_inner": hidden_width(config),
               "mlp": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.mlp, config.mlp)}
    config_json = {"model_type": kind, "architectures": [family.architecture]} | {
        key: values[field] for field, key in family.fields.items()}
    if family.choices["pos"] != "rope":
        return config_json
    how, numbers = parse_rope_scaling(config.rope_scaling)
    how = how if how in ROPE_NUMBERS else "default"                     # ntk is lost: no family has it
    numbers = [int(x) if x.is_integer() else x for x in numbers]        # transformers requires integers for positions
    scaling = {"rope_type": how} | dict(zip(ROPE_NUMBERS[how], numbers, strict=False))
    if how == "yarn":
        scaling["truncate"] = False             # transformers' default is True
    if how == "default" and not family.rope:
        scaling = None                          # the first versions with RoPE do not know the type "default"
    return {"hidden_act": "silu"} | config_json | {"rope_scaling": scaling}


# ---------------------------------------------------------------------------------------- their tensors and our tensors


def own_shapes(config):
    """{name: shape} of a model's parameters. A tied lm_head is left out: it is wte. So are ALiBi's slopes, which a run
    stores and a public model does not."""
    return {name: shape for name, shape in shapes_of(config).items()
            if not (config.tied and name == "lm_head.weight" or name.endswith(".attn.alibi"))}


def to_theirs(name, value, config, names):
    """{their name: tensor} of one of our tensors: three where a family stores q, k and v apart, otherwise one. names:
    the family's {our module or tensor: theirs}; empty for GPT-2."""
    found, is_turned, is_by_head = layout(name, value.ndim, names)
    value = value.mT if is_turned else value
    if is_by_head:                              # (3, heads, D, ..) to (heads, 3, D, ..)
        value = value.unflatten(0, (3, config.n_head, -1)).transpose(0, 1).flatten(0, 2)
    sizes = [len(value)]
    if len(found) > 1:
        sizes = [heads * config.head_width for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    return dict(zip(found, value.split(sizes), strict=True))


def to_ours(name, parts, config, names):
    """Our tensor from its parts in the public model: the inverse of to_theirs."""
    value = torch.cat(parts) if len(parts) > 1 else parts[0]            # no copy of a large one
    _, is_turned, is_by_head = layout(name, value.ndim, names)
    if is_by_head:
        value = value.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return value.mT.contiguous() if is_turned else value


def layout(name, ndim, names):
    """(the family's names for one of our tensors, one or three; is it stored with out and in the other way round; are
    q, k and v stored head by head). Ours hold all heads of q first, then k, then v. A Llama's names for
    transformer.h.3.mlp.c_fc.weight are [model.layers.3.mlp.up_proj.weight]."""
    module, kind = name.rsplit(".", 1)          # weight or bias
    above = ""
    if block := re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module):
        above, module = f"{names.get('transformer.h', 'transformer.h')}.{block[1]}.", block[2]
    theirs = names.get(module, module)
    found = [f"{above}{part}.{kind}" for part in theirs.split()]
    if tensor := names.get(f"{module}.{kind}"):                         # GPT-OSS names some tensors apart
        found = [f"{above}{tensor}"]
    is_turned = ndim == 3 or not names and ndim == 2 and bool(above)    # experts (E, out, in), GPT-2's blocks
    return found, is_turned, theirs.endswith("query_key_value")
