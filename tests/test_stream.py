"""evals/stream.py, the residual stream: known hidden states, and those of models against plain
hooks in float64."""

from types import SimpleNamespace

import pytest
import torch
from bounds import close, dice
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from layers import token_ids

from evals.instrument import instead
from evals.stream import FIRST, Stream, watching
from model import GPT


@st.composite
def hidden_states(draw):
    """States (B, ahead + T, C), in which some tokens and channels are massive, and how many tokens
    are ahead."""
    B, T, C, ahead = (draw(st.integers(*ends)) for ends in ((1, 4), (2, 40), (1, 20), (0, 1)))
    h = torch.randn(B, ahead + T, C, generator=dice(draw(st.integers(0, 999))))
    h[:, draw(st.integers(0, ahead + T - 1))] *= draw(st.sampled_from([1, 30]))
    h[0, draw(st.integers(0, ahead + T - 1)), draw(st.integers(0, C - 1))] += draw(
        st.sampled_from([0, -500])
    )
    return h, ahead


@given(hidden_states(), st.integers(1, 3))
def test_a_stream_equals_its_definition_sequence_by_sequence(drawn, batch_size):
    h, ahead = drawn
    stream = Stream()
    rows = []
    for part in h.split(batch_size):
        stream.see_hidden(part, ahead)
    for one in h.double():  # (ahead + T, C)
        norm, real = one.norm(dim=-1), one[ahead:]
        at = int(norm.argmax())
        rows.append(
            {
                "massive": norm[ahead] / norm[ahead + 1 :].mean(),
                "at": at - ahead,
                "carrier": one[at],
                "largest": norm[at] / torch.cat([norm[:at], norm[at + 1 :]]).mean(),
                "spread": (real - real[0]).norm(dim=-1).max() / norm[ahead:].mean(),
                "median": one.float().abs().median().double(),
                "norm": norm[ahead:],
                "var": ((real - real.mean(-1, keepdim=True)) ** 2).mean(-1),
            }
        )
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    found = stream.result()
    places = [row["at"] for row in rows]
    assert (
        places.count(found["at"]) == max(map(places.count, places)) == found["at_share"] * len(rows)
    )

    def check(values, expected, size):
        close(values, expected, terms=64, size=size.item(), dtype=torch.float32)

    # largest: a difference of norms in its divisor
    for name in ("massive", "largest", "spread", "median"):
        size = max(row[name] for row in rows)
        check(found[name], mean[name], size * size.clamp(min=1) if name == "largest" else size)
    for kind in ("norm", "var"):
        expected = [*mean[kind][:FIRST], mean[kind][0], mean[kind][1:].mean()]
        values = found["positions"][f"hidden_{kind}"] + found[f"hidden_{kind}"]
        check(values, expected, mean[kind].max())
    largest = mean["carrier"].abs().sort(descending=True)[0][:3]
    for (channel, value, ratio), size in zip(found["channels"], largest, strict=True):
        expected = [mean["carrier"][channel], size, size]
        check([value, abs(value), ratio * mean["median"]], expected, h.abs().max())


def test_queries_on_the_first_key_and_keys_opposite_to_it():
    first = torch.tensor([1.0, 0, 0, 0])
    q, k = 2 * first.repeat(1, 2, 6, 1), -3 * first.repeat(1, 2, 6, 1)
    k[:, :, 0] = 0.5 * first
    q[:, :, 0] = 7  # the first query is not one of the later queries
    stream = Stream()
    stream.see_hidden(torch.ones(1, 6, 8), 0)
    plain = SimpleNamespace(
        sink_tokens=0, width=4, featured=lambda x: x, for_score_heads=lambda x, axis: x
    )
    stream.see(plain, q, k, torch.ones(1, 2, 6, 4), torch.ones(1, 6, 8))
    expected = {
        "cos_qk": 1,
        "cos_kk": -1,
        "query_norm": [14, 2],
        "key_norm": [0.5, 3],
        "value_norm": [2, 2],
        "key_var": [0.25 * 3 / 16, 9 * 3 / 16],
    }
    close(
        {name: stream.result()[name] for name in expected}, expected, terms=4, dtype=torch.float32
    )


@pytest.mark.parametrize("pos, norm_place", [("learned", "pre"), ("rope", "out")])
@torch.no_grad()
def test_hidden_norms_equal_those_of_plain_hooks_in_float64(pos, norm_place):
    gpt = GPT(tiny_config(pos=pos, n_layer=3, norm_place=norm_place)).eval()
    streams = [Stream() for _ in range(4)]
    entering, after_norm = [], []
    for module in (*gpt.double().transformer.h, gpt.transformer.ln_f):
        module.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    for block in gpt.transformer.h:
        block.attn.register_forward_pre_hook(lambda module, inputs: after_norm.append(inputs[0]))

    def look(attend, layer, module, q, k, v, x, table):
        streams[layer].see(module, q, k, v, x)
        return attend(q, k, v, x, table)

    with instead(gpt, look), watching(gpt, lambda l, h: streams[l].see_hidden(h, gpt.sink_tokens)):
        gpt(token_ids(3, 16))
    found = [stream.result()["positions"] for stream in streams]
    for name, inputs, places in (
        ("hidden_norm", entering, found),
        ("input_norm", after_norm, found[:3]),
    ):
        for place, x in zip(places, inputs, strict=True):
            close(torch.tensor(place[name]), x.norm(dim=-1).mean(0), terms=16, dtype=torch.float32)
    assert list(found[-1]) == ["hidden_norm", "hidden_var"]


@torch.no_grad()
def test_the_norms_of_a_post_norm_layer_read_the_stream_with_the_branch_added():
    gpt = GPT(tiny_config(pos="learned", norm_place="post")).eval().double()
    streams, entering = [Stream() for _ in range(gpt.config.n_layer + 1)], []

    def see(l, h):
        entering.append(h)
        streams[l].see_hidden(h, 0)

    with watching(gpt, see, lambda l, name, h: streams[l].see_first(name, h, 0)):
        gpt(token_ids(3, 16))
    for stream, block, h in zip(streams, gpt.transformer.h, entering, strict=False):
        first = h + block.attn(h)
        h = block.ln_1(first)
        for name, read in ("ln_1", first), ("ln_2", h + block.mlp(h)):
            norm = read.norm(dim=-1)
            ratio = (norm[:, 0] / norm[:, 1:].mean(1)).mean()
            close(stream.result()[name], ratio, terms=64, size=1.0, dtype=torch.float32)
    assert "ln_1" not in streams[-1].result()
