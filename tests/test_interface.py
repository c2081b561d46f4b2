"""pretrained/interface.py: our recipes under models of transformers that are not converted."""
import pytest
import torch
from bounds import close
from conftest import RECIPES

from attention import ATTENTIONS, Attention

transformers = pytest.importorskip("transformers")
from pretrained.interface import measures, recipes  # noqa: E402

# importing transformers takes seconds: one worker does it for all tests here
pytestmark = pytest.mark.xdist_group("transformers")
# another factor on scores; a window, biases of queries, keys and values
KINDS = {"granite": {"attention_multiplier": 0.3}, "starcoder2": {"sliding_window": 7}}


@pytest.fixture(params=KINDS)
def model(request):
    config = transformers.AutoConfig.for_model(
        request.param, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, eos_token_id=0, bos_token_id=0, pad_token_id=0, **KINDS[request.param])
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()


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
def test_the_output_is_weights_of_times_values_also_with_their_cache_and_the_probe_reads_them(attn, model, monkeypatch):
    model.set_attn_implementation(f"nano_{attn}")
    ids, seen, attend = token_ids(), [], Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda layer, *inputs: seen.append((layer, inputs, attend(
        layer, *inputs))) or seen[-1][2])
    logits = model(ids).logits
    layer, (q, k, v, x, table), found = seen[0]
    w = layer.weights_of(q, k, x, table)[..., layer.has_extra_key:]
    if layer.has_weights and attn != "kv_bias":                        # its extra key has a value as well
        close(found, layer.finished(w @ v.repeat_interleave(2, 1), x, v), terms=64)
    steps = model(ids[:, :13], use_cache=True)
    rest = model(ids[:, 13:], past_key_values=steps.past_key_values).logits
    close(rest, logits[:, 13:], terms=64)
    sink = measures(model, ids)["model.layers.0.self_attn"]["sink"]
    close(sink, w[..., 0].mean((0, 2)), terms=64)


def test_all_recipes_of_plain_queries_keys_and_values_are_offered():
    assert {"softmax", "softmax1", "elastic", "lazy", "softpick", "sigmoid", "tra", "entmax"} <= set(recipes())
    assert not {"tda", "gated", "focus", "gated_deltanet", "sink_token", "topk", "window"} & set(recipes())
    assert set(recipes()) < ATTENTIONS.keys()
