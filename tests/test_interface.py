"""pretrained/interface.py: our recipes under models of transformers that are not converted."""

import pytest
import reference
import torch
from bounds import close, same
from conftest import RECIPES, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import normal

from attention import Attention

transformers = pytest.importorskip("transformers")
from pretrained.interface import measures, recipes  # noqa: E402

# importing transformers takes seconds: one worker does it for all tests here
pytestmark = [
    pytest.mark.xdist_group("transformers"),
    pytest.mark.filterwarnings("ignore:nano_.* begins with its initial values"),
]
# another factor on scores; a window, biases of queries, keys and values
KINDS = {"granite": {"attention_multiplier": 0.3}, "starcoder2": {"sliding_window": 7}}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}


def small(kind, attn, **choices):
    config = transformers.AutoConfig.for_model(kind, **SMALL | choices)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()


@pytest.fixture(params=KINDS)
def model(request):
    return small(request.param, "sdpa", **KINDS[request.param]).double()


def token_ids(rows=2, tokens=20):
    return torch.randint(1, 50, (rows, tokens))


def test_softmax_has_the_logits_of_transformers_and_a_mask_is_refused(model):
    ids = token_ids()
    expected = model(ids).logits
    model.set_attn_implementation("nano_softmax")
    close(model(ids).logits, expected, terms=64)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    with pytest.raises(ValueError, match="nano_softmax reads whole sequences: without padding"):
        model(ids, attention_mask=padded)


@pytest.mark.parametrize("attn", [p for p in RECIPES if p.values[0] in recipes()])
def test_caches_do_not_change_the_logits_and_the_probe_reads_the_weights(attn, model, monkeypatch):
    model.set_attn_implementation(f"nano_{attn}")
    ids = token_ids()
    attend = Attention.attend
    seen = []
    monkeypatch.setattr(Attention, "attend", lambda *inputs: seen.append(inputs) or attend(*inputs))
    logits = model(ids).logits
    layer, q, k, _, x, table = seen[0]
    static = transformers.StaticCache(config=model.config, max_cache_len=30)
    for cache in (transformers.DynamicCache(), static):
        steps = [model(part, past_key_values=cache).logits for part in ids.split([12, 1, 7], 1)]
        close(torch.cat(steps, 1), logits, terms=64)
    w = layer.weights_of(q, k, x, table)[..., int(layer.has_extra_key)]
    close(measures(model, ids)["model.layers.0.self_attn"]["sink"], w.mean((0, 2)), terms=64)


def test_all_recipes_of_plain_queries_keys_and_values_are_offered():
    assert {"softmax", "softmax1", "elastic", "lazy", "softpick", "sigmoid", "tra"} <= {*recipes()}
    others = {"tda", "gated", "focus", "gated_deltanet", "sink_token", "topk", "window"}
    assert not others & {*recipes()}


@settings(max_examples=examples(20))
@given(names=st.lists(st.sampled_from(recipes()), min_size=2, max_size=4))
def test_each_name_computes_its_own_recipe_with_its_own_parameters(names):
    functions = transformers.AttentionInterface()
    q = normal(2, 4, 9, 8)
    k, v = (normal(2, 2, 9, 8, stream=n) for n in (1, 2))
    layers = [torch.nn.Module() for _ in names]
    for layer in layers:
        layer.config = None
    # again after all others, and then another recipe in each layer
    for name, layer in zip(3 * names, 2 * layers + layers[1:] + layers[:1], strict=True):
        found = functions[f"nano_{name}"](layer, q, k, v, None)[0].transpose(1, 2)
        assert layer.nano.layer.config.attn == name
        close(found, reference.attend(layer.nano.layer, q, k, v, q.new_empty(2, 9, 0)), terms=64)
    learned = [p for layer in layers for p in layer.nano.parameters()]
    assert len(set(learned)) == len(learned)


@pytest.mark.parametrize("attn", ["elastic", "kv_bias", "mlp", "tra"])
def test_what_a_recipe_learns_is_made_by_loading_saved_and_loaded_in_float32(attn, tmp_path):
    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=f"nano_{attn}", dtype=torch.bfloat16
        )

    small("granite", "sdpa").save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base")
    start = small("granite", f"nano_{attn}").state_dict()
    learned = {name: p.data for name, p in model.named_parameters() if ".nano." in name}
    if attn in ("elastic", "tra"):  # the others start at random values
        same(learned, {name: start[name] for name in learned})
    for p in learned.values():
        p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path / "trained")
    again = load(tmp_path / "trained")
    ids = token_ids()
    same(again.state_dict(), model.state_dict())
    same(again(ids).logits, model(ids).logits)
    late = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    late.set_attn_implementation(f"nano_{attn}")
    with pytest.warns(UserWarning, match=f"nano_{attn} begins with its initial values"):
        late(ids)
    model.bfloat16()  # the next call casts what it learns back
    model(ids)
    assert {p.dtype for name, p in model.named_parameters() if ".nano." in name} == {torch.float32}


@pytest.mark.parametrize("kind", ["Bloom", "Falcon", "Mpt", "Mamba"])
def test_a_model_that_ignores_a_recipe_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"{kind}Model ignores nano_elastic"):
        small(kind.lower(), "nano_elastic")(token_ids())
    late = small(kind.lower(), None)
    late.set_attn_implementation("nano_elastic")
    if late.config._attn_implementation == "nano_elastic":  # of the others, transformers says no
        with pytest.raises(ValueError, match=f"{kind}Model ignores nano_elastic"):
            late(token_ids())
    model = small("gpt2", "nano_elastic")
    model.set_attn_implementation("sdpa")
    model(token_ids())  # no longer asks for the recipe


@pytest.mark.parametrize("attn", ["softmax", "sink"])
def test_gpt_oss_keeps_its_sinks_and_the_probe_reads_them(attn):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = small("gpt_oss", "eager", head_dim=8, sliding_window=7, **experts).double()
    ids = token_ids()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
        layer.self_attn.q_proj.weight.data.mul_(30)
    expected = model(ids, output_attentions=True)
    model.set_attn_implementation(f"nano_{attn}")
    # its norms are in float32
    close(model(ids).logits, expected.logits, terms=64, dtype=torch.float32)
    for found, w in zip(measures(model, ids).values(), expected.attentions, strict=True):
        close(found["sink"], w[..., 0].mean((0, 2)), terms=64, dtype=torch.float32)
        close(found["extra"], 1 - w.sum(-1).mean((0, 2)), terms=64, dtype=torch.float32)
    with pytest.raises(ValueError, match="GptOssAttention needs s_aux"):
        model.set_attn_implementation("nano_elastic")
        model(ids)
