"""evals/measures.py and evals/heads.py: sums over blocks against definitions that read whole
weights in float64."""

import math
from types import SimpleNamespace

import torch
from bounds import close, dice
from conftest import examples, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import in_every_layer, token_ids

from evals.heads import compared, correlation, summary, variation
from evals.measures import Probe
from kernels import Mask, visible
from model import GPT


def defined(w, seen, extra=None, counted=None, k=1, eps=0.3, local=4):
    """Every measure of one head: weights w (N, T, T) of N sequences, the mask seen (T, T), the
    weight on a key outside the sequence extra (N, T), the rows that count (N, T)."""
    w, n, T = w.double(), seen.sum(-1).double(), w.shape[-1]
    outside = torch.zeros(len(w), T) if extra is None else extra.double()
    c = torch.ones(len(w), T) if counted is None else counted.double()
    a, several = w.abs(), n > 1

    def mean(value, rows=c):  # over the rows (N, T) that count
        return (rows * value).sum() / rows.sum()

    total = a.sum(-1) + outside + 1e-8
    share = a / total[..., None]
    p = a / a.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    found = {
        "sink": mean(w[..., 0]),
        "share": mean(share[..., 0]),
        "row_mass": mean(w.sum(-1)),
        "extra": mean(outside),
        "uniform": mean(seen[:, 0] / n),
        "density": mean(w[..., 1:].sum(-1)),
        "entropy": mean(entropy),
        "sparsity": mean(((w == 0) & seen).sum(-1)) / mean(n),
        "negative": mean((w < 0).sum(-1)) / mean(n),
        "empty_rows": mean((w == 0).all(-1)),
        "dead_heads": float((c * several).any() and (w[c * several > 0] == 0).all()),
        "dispersion": mean(entropy / n.log().clamp(min=0.1), c * several)
        if (c * several).any()
        else math.nan,
        "peak": (a * (c * several)[..., None]).max(),
    }
    found["times_uniform"] = found["share"] / found["uniform"] if found["uniform"] else 0.0
    live = c * several * (w != 0).any(-1)
    even = (live * seen[:, 0] / n).sum()
    found["times_live"] = (live * share[..., 0]).sum() / even if even else math.nan
    # of the first 64 queries, those that see token k: the mean share of this token, and of the key
    # outside
    queries = min(64, T) - k + 1
    found["sink_eps"] = (share[:, :64, k - 1].sum(-1) / queries > eps).double().mean()
    found["extra_eps"] = (
        math.nan
        if extra is None
        else ((outside / total)[:, :64].sum(-1) / queries > eps).double().mean()
    )
    # those of evals/heads.py, which counts all rows and takes the key outside for the sink
    real = a / (a.sum(-1, keepdim=True) + 1e-8)
    spread = ((real - 1 / n[:, None]).square() * seen).sum(-1) / n
    near = torch.stack([w[:, i, max(0, i - local + 1) : i + 1].sum(-1) for i in range(T)], 1)
    roles = {
        "alpha_sink": (w[..., 0] if extra is None else outside).mean(),
        "sigma2": spread.mean(),
        "sigma2_printed": (((w - 1 / n[:, None]).square() * seen).sum(-1) / n).mean(),
        "importance": (a[..., 1:] if extra is None else a).sum(-1).mean(),
    }
    return found, roles | ({"alpha_local": near[:, local - 1 :].mean()} if T >= local else {})


@st.composite
def cases(draw):
    """Weights of one head in a few sequences: of either sign or not, with sinks, exact zeros and
    empty rows."""
    T = draw(st.integers(1, 12) | st.sampled_from([63, 64, 65, 80]))
    N = draw(st.integers(1, 3))
    random = dice(draw(st.integers(0, 999)))
    mask = Mask(
        window=draw(st.sampled_from([0, 0, 1, 4, 30])), first=draw(st.sampled_from([0, 0, 2]))
    )
    i = torch.arange(T)
    seen = visible(i[:, None], i, mask)
    w = torch.randn(N, T, T, generator=random)
    w = w if draw(st.booleans()) else w.abs()
    for shape in ((N, T, T), (N, T, 1), (N, 1, 1)):  # drop single weights, rows, sequences
        w = w * (torch.rand(shape, generator=random) >= draw(st.sampled_from([0, 0, 0.5, 1])))
    w[..., 0] += draw(st.sampled_from([0, 0, 0.3, 9.0]))
    w = w * seen * draw(st.sampled_from([1.0, 0.01]))
    extra = torch.rand(N, T, generator=random) if draw(st.booleans()) else None
    counted = (torch.rand(N, T, generator=random) > 0.5).float() if draw(st.booleans()) else None
    if counted is not None:
        counted[:, -1] = 1
    knobs = {
        "k": min(T, draw(st.sampled_from([1, 2, 64]))),
        "eps": draw(st.sampled_from([0.02, 0.3, 0.7])),
    }
    return w, seen, extra, counted, mask, knobs, draw(st.integers(1, T))


def watched(w, extra, mask, block, ahead=0):
    """A layer whose weights are w (B, heads, T, T), in blocks of rows. ahead: the outer key is a
    token with a row."""
    w = w if extra is None else torch.cat([extra[:, None, :, None], w], -1)
    w = torch.cat([torch.ones_like(w[:, :, :ahead]), w], 2)
    return SimpleNamespace(
        weight_blocks=lambda *inputs: w.split(block, 2),
        view_blocks=lambda *inputs: w.split(block, 2),
        sink_tokens=ahead,
        has_extra_key=extra is not None and not ahead,
        mask=mask,
        choices={"gate": SimpleNamespace(gated=None)},
    )


def close_measures(found, expected):
    """Weights and shares are float32, sums over rows float64. A mean is as exact as its largest
    summand, 10 or less."""
    for name in expected:
        value, own = (torch.as_tensor(one[name]).double().flatten() for one in (expected, found))
        assert value.isnan().equal(own.isnan()), name
        value, own = value.nan_to_num(), own.nan_to_num()
        close(own, value, terms=64, size=max(1.0, value.abs().max().item()), dtype=torch.float32)


@settings(max_examples=examples(60))
@given(cases())
def test_measures_of_drawn_weights_equal_their_definitions(case):
    w, seen, extra, counted, mask, knobs, block = case
    ahead = int(extra is not None and mask.first == 0 and block % 2 == 0)
    probe = Probe(**knobs)
    sums = Probe(local=4)
    values = torch.rand(len(w), 1, ahead + w.shape[1], 4)
    for i, v in enumerate(values.split(1)):
        one = watched(
            w[i, None, None], None if extra is None else extra[i, None], mask, block, ahead
        )
        probe.see(one, v, v, v, None, counted=None if counted is None else counted[i, None])
        sums.see(one, v, v, v, None)
    expected, of_heads = defined(w, seen, extra, counted, **knobs)
    first, *others = values[:, :, ahead:].double().norm(dim=-1).mean((0, 1))
    expected["value_norm_ratio"] = first * len(others) / sum(others) if others else math.nan
    close_measures(probe.result(), expected)
    close_measures(sums.result(), of_heads)


@given(cases())
def test_views_are_measured_before_their_subtraction(case):
    w, seen, *_, mask, _, block = case
    views = w[[0, -1]]
    probe = Probe()
    v = torch.ones(1, 1, len(seen), 4)
    probe.see(watched(views[None, :1] - views[None, 1:], None, mask, block), v, v, v, None)
    assert all(
        probe.result()[f"{name}_{view}"].isnan() for name in ("peak", "sparsity") for view in "ab"
    )
    probe.see_views(watched(views[None], None, mask, block), v, v)
    for view, one in zip("ab", views, strict=True):
        expected, _ = defined(one[None], seen)
        close_measures(
            probe.result(), {f"{name}_{view}": expected[name] for name in ("peak", "sparsity")}
        )


def test_the_importance_of_a_gated_head_is_its_mean_gate():
    sums = Probe(local=4)

    def look(module, q, k, v, x, table):
        sums.see(module, q, k, v, x, table)
        return torch.sigmoid(module.gate(x)).mean((0, 1)).view(module.heads, -1).mean(1)

    (gate,) = in_every_layer(look, GPT(tiny_config(attn="gated")).eval(), token_ids(2, 16))
    close(sums.result()["importance"], gate, dtype=torch.float32)


def test_the_summary_of_the_measures_and_their_comparison():
    alpha = torch.tensor([[0.1, 0.2], [0.6, 0.4], [0.9, 0.8]], dtype=torch.float64)
    maps = {"alpha_sink": alpha, "alpha_local": alpha, "sigma2": alpha, "importance": 1 - alpha}
    found = summary(maps, 0.5)
    late = 1 - alpha[1:]
    close(
        [
            found["dormant"],
            found["depth_rank_correlation"],
            found["mean"]["alpha_sink"],
            found["importance_cv_late"],
        ],
        [0.5, 1, 0.5, late.std(correction=0) / late.mean()],
        terms=4,
    )
    one = {name: values[:1] for name, values in maps.items()}  # no layer is late
    assert summary(one, 0.5)["importance_cv_late"] is None
    assert (
        variation(torch.zeros(3, 4)) is None
        and correlation(torch.ones(2, 2), torch.rand(2, 2)) is None
    )
    found = compared(alpha, 0.3 - alpha, "other")
    more = 2 * alpha - 0.3  # of two data sets
    close([found["correlation"], found["mean_difference"]], [-1, more.abs().mean()], terms=4)
    close(torch.tensor(found["difference"], dtype=torch.float64), more)
