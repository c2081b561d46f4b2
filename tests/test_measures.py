"""evals/measures.py and evals/heads.py: measures that are summed block by block, against a definition of each one that
reads the whole weight matrix in float64, for drawn weights and for the models of all recipes."""
import math
from types import SimpleNamespace

import pytest
import torch
from bounds import close, dice
from conftest import enliven, examples, some_recipes, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import ATTENTIONS
from axes.outputs import sigmoid_gate
from axes.sight import Sight, visible
from evals.heads import HeadSums
from evals.instrument import instead
from evals.measures import MEASURES, Probe, mean_of
from layers import token_ids
from model import GPT


def defined(w, seen, extra=None, counted=None, k=1, eps=0.3, local=4):
    """Every measure of one head from its weights w (N, T, T) in N sequences, the mask seen (T, T), the weight on a key
    outside the sequence extra (N, T), and the rows that count, counted (N, T)."""
    w, n, T = w.double(), seen.sum(-1).double(), w.shape[-1]
    outside = torch.zeros(len(w), T) if extra is None else extra.double()
    c = torch.ones(len(w), T) if counted is None else counted.double()
    a, several = w.abs(), n > 1

    def mean(value, rows=c):                    # over the rows (N, T) that count
        return (rows * value).sum() / rows.sum()

    total = a.sum(-1) + outside + 1e-8
    share = a / total[..., None]
    p = a / a.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    found = {
        "sink": mean(w[..., 0]), "share": mean(share[..., 0]), "row_mass": mean(w.sum(-1)), "extra": mean(outside),
        "uniform": mean(seen[:, 0] / n), "density": mean(w[..., 1:].sum(-1)), "entropy": mean(entropy),
        "sparsity": mean(((w == 0) & seen).sum(-1)) / mean(n), "negative": mean((w < 0).sum(-1)) / mean(n),
        "empty_rows": mean((w == 0).all(-1)), "dead_heads": float((w[c > 0] == 0).all()),
        "dispersion": mean(entropy / n.log().clamp(min=0.1), c * several) if (c * several).any() else math.nan,
        "peak": (a * (c * several)[..., None]).max()}
    found["times_uniform"] = found["share"] / found["uniform"] if found["uniform"] else 0.0
    # of the first 64 queries, those that see token k: the mean share of this token, and of the key outside
    queries = min(64, T) - k + 1
    found["sink_eps"] = (share[:, :64, k - 1].sum(-1) / queries > eps).double().mean()
    found["extra_eps"] = math.nan if extra is None else (
        (outside / total)[:, :64].sum(-1) / queries > eps).double().mean()
    # those of evals/heads.py, which counts all rows and takes the key outside for the sink
    real = a / (a.sum(-1, keepdim=True) + 1e-8)
    spread = ((real - 1 / n[:, None]).square() * seen).sum(-1) / n
    near = torch.stack([w[:, i, max(0, i - local + 1):i + 1].sum(-1) for i in range(T)], 1)
    heads = {"alpha_sink": (w[..., 0] if extra is None else outside).mean(), "sigma2": spread.mean(),
             "importance": (a[..., 1:] if extra is None else a).sum(-1).mean()}
    return found, heads | ({"alpha_local": near[:, local - 1:].mean()} if T >= local else {})


@st.composite
def cases(draw):
    """Weights of one head in a few sequences: of either sign or not, with sinks, exact zeros and empty rows."""
    T, N = draw(st.integers(1, 12) | st.sampled_from([63, 64, 65, 80])), draw(st.integers(1, 3))
    random = dice(draw(st.integers(0, 999)))
    sight = Sight(window=draw(st.sampled_from([0, 0, 1, 4, 30])))
    i = torch.arange(T)
    seen = visible(i[:, None], i, sight)
    w = torch.randn(N, T, T, generator=random)
    w = w if draw(st.booleans()) else w.abs()
    for shape in ((N, T, T), (N, T, 1), (N, 1, 1)):                     # drop single weights, rows, sequences
        w = w * (torch.rand(shape, generator=random) >= draw(st.sampled_from([0, 0, 0.5, 1])))
    w[..., 0] += draw(st.sampled_from([0, 0, 0.3, 9.0]))
    w = w * seen * draw(st.sampled_from([1.0, 0.01]))
    extra = torch.rand(N, T, generator=random) if draw(st.booleans()) else None
    counted = (torch.rand(N, T, generator=random) > 0.5).float() if draw(st.booleans()) else None
    if counted is not None:
        counted[:, -1] = 1
    k = draw(st.sampled_from([1, 2, 64]).map(lambda k: min(k, T)))
    return w, seen, extra, counted, sight, {"k": k, "eps": draw(st.sampled_from([0.02, 0.3, 0.7]))}, draw(
        st.integers(1, T))


def watched(w, extra, sight, block, **traits):
    """A substitute for a layer, whose weights are w (B, heads, T, T), in blocks of rows."""
    w = w if extra is None else torch.cat([extra[:, None, :, None], w], -1)
    return SimpleNamespace(**{
        "weight_blocks": lambda q, k, x, table: w.split(block, 2), "view_blocks": lambda q, k, table: w.split(block, 2),
        "has_extra_key": extra is not None, "ahead": 0, "sight": sight,
        "choices": {"gate": SimpleNamespace(gated=None)}} | traits)


def close_measures(found, expected):
    """Weights and shares are float32, sums over rows float64. A mean is as exact as its largest summand, 10 or less."""
    found, expected = ({name: torch.as_tensor(value[name]).double() for name in expected if value[name] is not None}
                       for value in (found, expected))
    for name, value in expected.items():
        assert value.isnan().equal(found[name].reshape(value.shape).isnan()), name
        close(found[name].reshape(value.shape).nan_to_num(), value.nan_to_num(), terms=64,
              size=max(1.0, value.nan_to_num().abs().max().item()), dtype=torch.float32)


@settings(max_examples=examples(60))
@given(cases())
def test_measures_of_drawn_weights_equal_their_definitions(case):
    w, seen, extra, counted, sight, knobs, block = case
    probe, sums, v = Probe(**knobs), HeadSums(local=4), torch.ones(1, 1, w.shape[1], 4)
    for i in range(len(w)):
        one = watched(w[i, None, None], None if extra is None else extra[i, None], sight, block)
        probe.see(one, v, v, v, None, counted=None if counted is None else counted[i, None])
        sums.see(one, v, v, v, None)
    expected, of_heads = defined(w, seen, extra, counted, **knobs)
    close_measures(probe.result(), expected)
    close_measures(sums.result(), of_heads)


@given(cases(), cases())
def test_views_are_measured_before_their_subtraction(one, other):
    size = min(one[0].shape[1], other[0].shape[1])
    seen, block = one[1][:size, :size], min(one[6], size)
    views = torch.stack([case[0][0, :size, :size] * seen for case in (one, other)])
    probe, v = Probe(), torch.ones(1, 1, size, 4)
    probe.see(watched(views[None, :1] - views[None, 1:], None, one[4], block), v, v, v, None)
    assert all(probe.result()[f"{name}_{view}"].isnan() for name in ("peak", "sparsity") for view in "ab")
    probe.see_views(watched(views[None], None, one[4], block), v, v)
    for view, w in zip("ab", views, strict=True):
        expected, _ = defined(w[None], seen)
        close_measures(probe.result(), {f"{name}_{view}": expected[name] for name in ("peak", "sparsity")})


@pytest.mark.parametrize("attn", some_recipes(
    "softmax", "sink", "sink_token", "gpt_oss", "streaming", "diff", "elastic", "gated", "identity", "retnet",
    among=tuple(ATTENTIONS)))
def test_measures_of_a_model_equal_those_of_its_whole_weights(attn):
    """The model has large random weights. 150 rows are two blocks."""
    few = {"window": 20} if ATTENTIONS[attn].get("window") else {}
    gpt = GPT(tiny_config(attn=attn, block_size=150, **few)).eval()
    enliven(gpt)
    probe, sums, i, found = Probe(), HeadSums(local=4), torch.arange(150), {}

    def look(attend, layer, module, q, k, v, x, table):
        probe.see(module, q, k, v, x, table)
        sums.see(module, q, k, v, x, table)
        w, seen = module.weights_of(q, k, x, table)[:, :, module.ahead:], visible(
            i[:, None] + module.ahead, i + module.ahead, module.sight)
        extra = w[..., 0] if module.has_extra_key or module.ahead else [None] * module.heads
        found["heads"] = [defined(w[:, h, :, -150:], seen, extra[:, h] if isinstance(extra, torch.Tensor) else None)
                          for h in range(module.heads)]
        gate = module.choices["gate"].gated is sigmoid_gate
        found["gate"] = torch.sigmoid(module.gate(x)).mean((0, 1)).view(module.heads, -1).mean(1) if gate else None
        return attend(q, k, v, x, table)

    with instead(gpt, look), torch.no_grad():
        gpt(token_ids(2, 150))
    for result, part in ((probe.result(), 0), (sums.result(), 1)):
        expected = {name: torch.tensor([float(head[part][name]) for head in found["heads"]], dtype=torch.float64)
                    for name in found["heads"][0][part]}
        if found["gate"] is not None and "importance" in expected:
            expected["importance"] = found["gate"]
        if attn in ("tra", "tda", "diff_rela", "ttt", "titans"):        # rounding decides which weights are exactly 0
            expected.pop("sparsity", None)
        close_measures(result, expected)


def test_means_are_over_layers_and_heads_and_values_have_norms():
    probes = [Probe(), Probe()]
    for probe, w in zip(probes, (torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None], torch.eye(8)[:1].repeat(8, 1)),
                        strict=True):
        v = torch.ones(1, 1, 8, 4)
        v[:, :, 0] = 0.5
        probe.see(watched(w[None, None], None, Sight(), 8), v, v, v, None)
    mean = mean_of(probes)
    assert mean.keys() == MEASURES.keys() and math.isnan(mean["extra_eps"])
    close([mean["dispersion"], mean["value_norm_ratio"]], [0.5, 0.5], dtype=torch.float32)
