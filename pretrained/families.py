"""The families of public models that can be converted: their configs and tensors, and ours.

A family is a model_type of transformers. In this folder, "their" config, key, name or tensor is one
of transformers.
"""

import dataclasses
import re
from types import SimpleNamespace
from typing import NamedTuple

import torch

from axes.positions import alibi_slopes, parse_rope_scaling
from common import files
from model import GPTConfig, hidden_width, shapes_of

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "pos": "rope", "bias": False}
LLAMA_NAMES = {  # {our module: theirs}
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h": "model.layers",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",  # from here on in a block
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_gate": "mlp.gate_proj",
    "mlp.c_proj": "mlp.down_proj",
}
LLAMA_FIELDS = {  # {field of GPTConfig: their key}
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "n_inner": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


class Family(NamedTuple):
    """One model_type of transformers."""

    choices: dict = LLAMA  # {field of GPTConfig: its value in this family}
    names: dict = LLAMA_NAMES  # {our module: theirs}; a missing one has our name
    fields: dict = LLAMA_FIELDS  # {field of GPTConfig: their key}


FAMILIES = {
    "llama": Family(),
    "gpt2": Family(
        {"norm": "layernorm", "pos": "learned", "bias": True},
        names={},
        fields={
            "block_size": "n_positions",
            "vocab_size": "vocab_size",
            "n_layer": "n_layer",
            "n_head": "n_head",
            "n_embd": "n_embd",
            "n_inner": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "mlp": "activation_function",
            "tied": "tie_word_embeddings",
        },
    ),
    "mistral": Family(fields=LLAMA_FIELDS | {"window": "sliding_window"}),
    "qwen2": Family(LLAMA | {"qkv_bias": True}),
    "qwen3": Family(LLAMA | {"qk_norm": "head"}),
    "olmo2": Family(
        LLAMA | {"qk_norm": "all", "norm_place": "out"},
        LLAMA_NAMES | {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"},
    ),
    "bloom": Family(
        {"embed_norm": True, "mlp": "gelu_tanh", "pos": "alibi", "bias": True},
        {
            "transformer.wte": "transformer.word_embeddings",
            "transformer.ln_wte": "transformer.word_embeddings_layernorm",
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "self_attention.query_key_value",
            "attn.c_proj": "self_attention.dense",
            "mlp.c_fc": "mlp.dense_h_to_4h",
            "mlp.c_proj": "mlp.dense_4h_to_h",
        },
        {
            "block_size": "seq_length",
            "vocab_size": "vocab_size",
            "n_layer": "n_layer",
            "n_head": "n_head",
            "n_embd": "hidden_size",
            "norm_eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings",
        },
    ),
}
ACTIVATIONS = {  # {theirs: ours}; the last of two is exported
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
ROPE_NUMBERS = {  # {rope_type: the numbers of --rope_scaling}
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}
# keys on which no logit depends. Any other key must be a family's field, or have its default value
WITHOUT_EFFECT = set(
    """
    architectures transformers_version torch_dtype dtype _name_or_path _model_name_or_path
    name_or_path tokenizer_class bos_token_id eos_token_id pad_token_id unk_token_id id2label
    label2id num_labels problem_type finetuning_task task_specific_params summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    predict_special_tokens use_cache output_attentions output_hidden_states output_past
    return_dict do_sample max_length temperature top_k top_p initializer_range
    gradient_checkpointing attention_dropout hidden_dropout classifier_dropout embd_pdrop
    resid_pdrop attn_pdrop pretraining_tp reorder_and_upcast_attn attention_softmax_in_fp32
    masked_softmax_fusion bias_dropout_fusion skip_bias_add skip_bias_add_qkv offset_alibi n_ctx
    seq_length max_window_layers is_llama_config _num_labels transformers.js_config
    unsloth_version unsloth_fixed
    """.split()
)
FOREIGN = {"use_mrope": False, "rope_interleaved": False}  # keys that transformers lacks

# ------------------------------------------------------------------------------------ their config


def config_from(theirs):
    """The GPTConfig of a config of transformers.

    Raises ValueError that names a key which may change the logits and which model.py lacks."""
    kind, values = theirs.model_type, theirs.to_dict()
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type {kind} is not among {', '.join(FAMILIES)}: look at it "
            "through pretrained/interface.py instead"
        )
    family = FAMILIES[kind]
    usual = FOREIGN | type(theirs)().to_dict()
    carried = {*family.fields.values(), "rope_parameters"}
    for key, value in values.items():  # those of the file before those that follow from them
        if key in carried | WITHOUT_EFFECT:
            continue
        right = usual.get(key)
        if key == "layer_types" and right:  # one entry a layer
            value, right = {*value}, {*right}
        if value != right:
            raise ValueError(
                f"{key}={value} may change the logits: model.py computes a {kind} "
                f"with {right} there. Delete the key if no logit depends on it"
            )
    found = {
        field: 0 if values.get(key) is None else values[key] for field, key in family.fields.items()
    }
    found["norm_eps"] = float(f"{found['norm_eps']:.6g}")  # a GGUF rounds 1e-5 to a float32
    if kind == "bloom":
        found["block_size"] = values.get("seq_length", 2048)
    if "mlp" in found:
        if found["mlp"] not in ACTIVATIONS:
            raise ValueError(
                f"activation_function={found['mlp']} is not among {', '.join(ACTIVATIONS)}"
            )
        found["mlp"] = ACTIVATIONS[found["mlp"]]
    if family.choices["pos"] == "rope":
        found |= rope_from(values["rope_parameters"])
    return GPTConfig(**family.choices | found)


def rope_from(rope):
    """{field of GPTConfig: value} of their rope_parameters. Raises ValueError on kinds of RoPE that
    axes/positions.py lacks."""
    how = rope.get("rope_type", "default")
    names = ROPE_NUMBERS.get(how, [])
    known = {"rope_type", "type", "rope_theta", *names}
    odd = [key for key, value in rope.items() if key not in known and value is not None]
    if how not in ROPE_NUMBERS or odd:
        raise ValueError(
            f"rope_type={how} with {', '.join(odd) or 'no numbers'} is not among "
            f"those that model.py computes: {ROPE_NUMBERS}"
        )
    numbers = ",".join(str(rope[name]) for name in names)
    return {
        "rope_base": float(rope["rope_theta"]),
        "rope_scaling": f"{how}:{numbers}" if numbers else "",
    }


def config_for(config, kind):
    """The config of transformers for a GPTConfig, as a model of a family. It may lack choices of
    the GPTConfig: compare it with what `config_from` returns."""
    theirs = {ours: name for name, ours in ACTIVATIONS.items()}
    values = dataclasses.asdict(config) | {
        "head_dim": config.head_width,
        "n_inner": hidden_width(config),
        "mlp": theirs.get(config.mlp, config.mlp),
    }
    found = {key: values[field] for field, key in FAMILIES[kind].fields.items()}
    if FAMILIES[kind].choices["pos"] == "rope":
        how, numbers = parse_rope_scaling(config.rope_scaling)
        numbers = [int(x) if x.is_integer() else x for x in numbers]  # positions must be integers
        names = ROPE_NUMBERS.get(how, [])  # ntk is lost: no family has it
        found["rope_parameters"] = dict(zip(names, numbers, strict=False)) | {
            "rope_type": how if names else "default",
            "rope_theta": config.rope_base,
        }
    return files.optional("transformers").AutoConfig.for_model(kind, **found)


# ----------------------------------------------------------------------------------- their tensors


def state_from(theirs, config, kind):
    """Our state_dict, made of {their name: tensor} of a model with this GPTConfig."""
    state = {}
    for name in shapes_of(config):
        if name.endswith(".attn.alibi"):  # a run stores the slopes, a public model does not
            heads = SimpleNamespace(heads=config.n_head, score_heads=config.n_head)
            state[name] = alibi_slopes(heads)["alibi"]
            continue
        parts = [theirs[part] for part in their_names(name, kind)]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]  # no copy of a large one
        if kind == "bloom" and ".c_attn." in name:  # (heads, 3, D, ..) there
            value = value.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        state[name] = value.mT.contiguous() if is_transposed(name, value, kind) else value
    return state


def state_for(state, config, kind):
    """{their name: tensor} of our state_dict: the inverse of `state_from`, for llama and gpt2."""
    heads = [config.n_head, config.n_kv_head, config.n_kv_head]
    theirs = {}
    for name, value in state.items():
        names = their_names(name, kind)
        value = value.mT.contiguous() if is_transposed(name, value, kind) else value
        sizes = [len(value)] if len(names) == 1 else [config.head_width * n for n in heads]
        theirs |= dict(zip(names, value.split(sizes), strict=True))
    return theirs


def their_names(name, kind):
    """The names of their tensors, one or three, that make up one of ours: for a Llama,
    transformer.h.3.mlp.c_fc.weight is [model.layers.3.mlp.up_proj.weight]."""
    names = FAMILIES[kind].names
    module, suffix = name.rsplit(".", 1)  # weight or bias
    above = ""
    if block := re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module):
        above, module = f"{names.get('transformer.h', 'transformer.h')}.{block[1]}.", block[2]
    return [f"{above}{part}.{suffix}" for part in names.get(module, module).split()]


def is_transposed(name, value, kind):
    """Does the family store this tensor as (in, out)? GPT-2 does so inside its blocks."""
    return kind == "gpt2" and ".h." in name and value.ndim == 2
