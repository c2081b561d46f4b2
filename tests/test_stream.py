"""evals/stream.py, the residual stream: known hidden states, and those of models against plain hooks in float64."""
from types import SimpleNamespace

import pytest
import torch
from bounds import below, close
from conftest import RECIPES, tiny_config
from layers import in_every_layer, token_ids
from torch.nn import functional as F

from evals.instrument import instead
from evals.stream import FIRST, Stream, watching
from model import GPT


def seen(*hidden, ahead=0):
    stream = Stream()
    for h in hidden:
        stream.see_hidden(torch.as_tensor(h, dtype=torch.float32), ahead)
    return stream.result()


def close_means(found, **expected):
    """Compare means of float32 numbers, which have seven digits."""
    close({name: found[name] for name in expected}, expected, terms=4, dtype=torch.float32)


def plain_layer():
    """A substitute for an attention layer that does not change queries and keys."""
    return SimpleNamespace(ahead=0, width=4, featured=lambda x: x, for_score_heads=lambda x, axis: x)


# ------------------------------------------------------------------------------------------------------ known answers


def test_one_channel_of_the_first_token_is_massive():
    h = torch.ones(2, 5, 100)                           # norms of 10
    h[0, 0, 7], h[1, 0, 7] = -1000, -3000
    h[:, 0, 30] = 40
    found = seen(h)
    norms = [(99 - 1 + 40 ** 2 + big ** 2) ** 0.5 for big in (1000, 3000)]
    close_means(found, massive=sum(norms) / 2 / 10, largest=sum(norms) / 2 / 10, at=0, at_share=1, median=1,
                hidden_norm=[sum(norms) / 2, 10], hidden_var=[h[:, 0].double().var(-1, correction=0).mean(), 0])
    close(found["channels"][:2], [[7, -2000, 2000], [30, 40, 40]], terms=4, dtype=torch.float32)


def test_another_token_may_be_the_largest():
    h = torch.ones(4, 6, 10)
    h[:3, 2], h[3, 5] = 5, 4                            # all other tokens have entries of 1
    found = seen(h[:2], h[2:])
    close_means(found, at=2, at_share=0.75, largest=(3 * 5 + 4) / 4)
    close(found["channels"][0][1], (3 * 5 + 4) / 4, terms=4, dtype=torch.float32)
    assert found["massive"] < 1


def test_a_sink_token_may_be_the_largest_but_is_not_the_first_token():
    h = torch.ones(1, 5, 10)
    h[:, 0], h[:, 1] = 9, 3
    found = seen(h, ahead=1)
    close_means(found, at=-1, massive=3, largest=9 / 1.5, spread=2 / 1.5)
    assert len(found["positions"]["hidden_norm"]) == 4


def test_equal_states_have_no_spread():
    assert seen(torch.ones(2, 7, 3))["spread"] == 0
    close_means(seen([[[3.0, 0], [3, 0], [0, 3]]]), spread=2 ** 0.5)


def test_only_the_first_positions_are_listed():
    h = torch.arange(1.0, 41)[None, :, None].repeat(3, 1, 4) / 2        # norms 1, 2, ...
    found = seen(h)
    close_means(found["positions"], hidden_norm=list(range(1, FIRST + 1)))
    close_means(found, hidden_norm=[1, sum(range(2, 41)) / 39])


def test_queries_on_the_first_key_and_keys_opposite_to_it():
    first = torch.tensor([1.0, 0, 0, 0])
    q, k = 2 * first.repeat(1, 2, 6, 1), -3 * first.repeat(1, 2, 6, 1)
    k[:, :, 0] = 0.5 * first
    q[:, :, 0] = 7                                      # the first query is not one of the later queries
    stream = Stream()
    stream.see_hidden(torch.ones(1, 6, 8), 0)
    stream.see(plain_layer(), q, k, torch.ones(1, 2, 6, 4), torch.ones(1, 6, 8))
    close_means(stream.result(), cos_qk=1, cos_kk=-1, query_norm=[14, 2], key_norm=[0.5, 3], value_norm=[2, 2],
                key_var=[0.25 * 3 / 16, 9 * 3 / 16])


# -------------------------------------------------------------------------------------------------------------- models


def of_model(gpt, idx):
    """The results of a model's streams, for each layer and after the last."""
    streams = [Stream() for _ in range(len(gpt.transformer.h) + 1)]

    def look(attend, layer, module, q, k, v, x, table):
        streams[layer].see(module, q, k, v, x)
        return attend(q, k, v, x, table)

    with instead(gpt, look), watching(gpt, lambda l, h: streams[l].see_hidden(h, gpt.ahead)), torch.no_grad():
        gpt(idx)
    return [stream.result() for stream in streams]


@pytest.mark.parametrize("pos, norm_place", [("learned", "pre"), ("rope", "out")])
def test_hidden_norms_equal_those_of_plain_hooks_in_float64(pos, norm_place):
    gpt = GPT(tiny_config(pos=pos, n_layer=3, norm_place=norm_place)).eval()
    found = of_model(gpt, token_ids(3, 16))
    gpt, entering, after_norm = gpt.double(), [], []
    for block in gpt.transformer.h:
        block.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
        block.attn.register_forward_pre_hook(lambda module, inputs: after_norm.append(inputs[0]))
    gpt.transformer.ln_f.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    with torch.no_grad():
        gpt(token_ids(3, 16))
    assert len(found) == len(entering) == 4
    for place, h in zip(found, entering, strict=True):
        norm, variance = h.norm(dim=-1), h.var(-1, correction=0)
        close(torch.tensor(place["positions"]["hidden_norm"]), norm.mean(0), terms=16)
        close([place["massive"], place["hidden_var"][1]],
              [(norm[:, 0] / norm[:, 1:].mean(1)).mean(), variance[:, 1:].mean()], terms=16, dtype=torch.float32)
    for place, x in zip(found, after_norm, strict=False):
        close(torch.tensor(place["positions"]["input_norm"]), x.norm(dim=-1).mean(0), terms=16)
    assert "cos_qk" not in found[-1] and list(found[-1]["positions"]) == ["hidden_norm", "hidden_var"]


def test_only_absolute_positions_tell_repeated_tokens_apart():
    repeated = token_ids(3, 1).expand(-1, 16)
    spread = {pos: of_model(GPT(tiny_config(pos=pos, n_layer=2)).eval(), repeated)[-1]["spread"]
              for pos in ("learned", "rope", "rope+bias", "none")}
    below(0.1, spread.pop("learned"))
    close(list(spread.values()), [0, 0, 0], terms=16, size=1.0, dtype=torch.float32)


@pytest.mark.parametrize("attn", RECIPES)
def test_every_recipe_has_a_stream(attn):
    found = of_model(GPT(tiny_config(attn=attn, n_layer=2, n_head=4, n_kv_head=2)).eval(), token_ids(3, 40))
    assert len(found) == 3
    for layer in found[:2]:
        assert abs(layer["cos_qk"]) < 1.0001 and abs(layer["cos_kk"]) < 1.0001
        assert all(value > 0 for name in ("query", "key", "value") for value in layer[f"{name}_norm"])
        assert len(layer["positions"]) == 10 and all(len(values) == FIRST for values in layer["positions"].values())


def test_the_cosines_of_streaming_are_those_of_plain_keys():
    """Streaming's queries and keys are twice as wide. Recent keys use the first half, first keys the second half."""
    gpt, idx = GPT(tiny_config(attn="streaming", window=6, first=2)).eval(), token_ids(3, 16)
    (q, k), = in_every_layer(lambda module, q, k, *_: (q, k), gpt, idx)
    assert q.shape[-1] == 16                            # twice the width of 8
    first = F.cosine_similarity(q[:, :, 1:, 8:], k[:, :, :1, 8:], -1).mean().item()
    keys = k[..., :8] + k[..., 8:]
    later = F.cosine_similarity(keys[:, :, 1:], keys[:, :, :1], -1).mean().item()
    found = of_model(gpt, idx)[0]
    close([found["cos_qk"], found["cos_kk"]], [first, later], terms=8, size=1.0, dtype=torch.float32)


def test_an_error_leaves_no_hook_behind():
    gpt = GPT(tiny_config()).eval()
    with pytest.raises(ZeroDivisionError), watching(gpt, lambda l, h: 1 / 0):
        gpt(token_ids(3, 4))
    assert not any(place._forward_hooks for place in (gpt.transformer.drop, *gpt.transformer.h))
