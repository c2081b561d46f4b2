"""evals/measures.py: measures of known weight matrices, and streamed measures of every recipe against its whole weight
matrix."""
import math
from types import SimpleNamespace

import bounds
import pytest
import torch
from bounds import close, same
from conftest import enliven, tiny_config

from attention import ATTENTIONS
from axes.sight import Sight, visible
from evals.instrument import instead
from evals.measures import MEASURES, Probe, mean_of
from model import GPT


def shown(*sequences, block=None, sight=None, counted=None, outside=False, views=None, **knobs):
    """A Probe that has seen hand-made weights: each sequence (T, T) or (T, 1 + T) of one head, in blocks of rows."""
    probe, sight = Probe(**knobs), sight or Sight()
    for w in sequences:
        w = torch.as_tensor(w, dtype=torch.float32)[None, None]
        T = w.shape[2]
        anything = torch.ones(1, 1, T, 4)
        module = SimpleNamespace(weight_blocks=lambda q, k, x, table, w=w: w.split(block or len(w[0, 0]), 2),
                                 has_extra_key=outside, ahead=0, sight=sight)
        probe.see(module, anything, anything, anything, None, counted=counted)
        if views is not None:                   # (2, T, T)
            module.view_blocks = lambda q, k, table: views[None].split(block or len(views[0]), 2)
            probe.see_views(module, anything, anything)
    return probe


def measure(*sequences, **choices):
    return {name: value.item() for name, value in shown(*sequences, **choices).result().items()}


def assert_measures(found, **expected):
    """Weights are float32, sums over rows are float64. No summand is larger than 1 or than the measure itself."""
    for name, value in expected.items():
        if math.isnan(value):
            same(found[name], value)
        else:
            close(found[name], value, terms=8, size=max(1, abs(value)), dtype=torch.float32)


def even_rows(T):
    return torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]


def on_first(T):
    return torch.eye(T)[:1].repeat(T, 1)


MEAN_OF_20 = sum(1 / n for n in range(1, 21)) / 20      # the mean of 1 / n over 20 rows

# ----------------------------------------------------------------------------------------------------- known matrices


@pytest.mark.parametrize("block", [None, 3, 7])
def test_even_rows(block):
    assert_measures(measure(even_rows(20), block=block), sink=MEAN_OF_20, uniform=MEAN_OF_20, share=MEAN_OF_20,
                    times_uniform=1, density=1 - MEAN_OF_20, row_mass=1, sparsity=0, empty_rows=0, sink_eps=0,
                    entropy=math.log(math.factorial(20)) / 20, dispersion=1, peak=0.5, negative=0, dead_heads=0)


def test_all_weight_on_the_first_token():
    assert_measures(measure(on_first(20), block=6), sink=1, uniform=MEAN_OF_20, share=1, times_uniform=1 / MEAN_OF_20,
                    density=0, row_mass=1, sparsity=190 / 210, empty_rows=0, sink_eps=1, entropy=0, peak=1)
    assert measure(on_first(20))["dispersion"] == 0


def test_all_weight_on_the_token_itself():
    assert_measures(measure(torch.eye(10)), sink=0.1, share=0.1, density=0.9, row_mass=1, sparsity=45 / 55, sink_eps=0,
                    dispersion=0)


def test_signed_weights_and_rows_that_sum_to_nothing():
    w = [[1.0, 0, 0], [-1, 1, 0], [0.5, -1, -0.5]]
    uniform = (1 + 1 / 2 + 1 / 3) / 3
    entropies = 0, math.log(2), 1.5 * math.log(2)       # of the shares 1; 1/2, 1/2; 1/4, 1/2, 1/4
    assert_measures(measure(w), sink=0.5 / 3, share=1.75 / 3, times_uniform=1.75 / 3 / uniform, row_mass=0,
                    density=-0.5 / 3, sparsity=0, empty_rows=0, negative=3 / 6, peak=1, entropy=sum(entropies) / 3,
                    dispersion=(1 + entropies[2] / math.log(3)) / 2)


def test_empty_rows_have_no_share_no_entropy_and_all_zeros():
    w = torch.zeros(4, 4)
    w[3, 1] = 0.25
    assert_measures(measure(w), sink=0, share=0, row_mass=0.25 / 4, density=0.25 / 4, sparsity=9 / 10, empty_rows=3 / 4,
                    sink_eps=0, entropy=0, dispersion=0, peak=0.25, dead_heads=0)


def test_a_head_is_dead_if_all_of_its_rows_are_empty_in_all_sequences():
    assert measure(torch.zeros(5, 5), torch.zeros(5, 5))["dead_heads"] == 1
    assert measure(torch.zeros(5, 5), 1e-20 * torch.eye(5))["dead_heads"] == 0


def test_rows_of_small_sums_are_not_rescaled():
    assert_measures(measure(0.1 * on_first(8)), sink=0.1, share=1, density=0, row_mass=0.1, sink_eps=1, peak=0.1)
    assert_measures(measure(1e-6 * even_rows(8)), dispersion=1, entropy=math.log(math.factorial(8)) / 8)


def test_dispersion_and_sparsity_count_only_keys_inside_the_window():
    seen = visible(torch.arange(30)[:, None], torch.arange(30), Sight(window=4)).float()
    assert_measures(measure(seen / seen.sum(1, keepdim=True), sight=Sight(window=4)), dispersion=1, sparsity=0,
                    entropy=(math.log(2) + math.log(3) + 27 * math.log(4)) / 30)


def test_rows_that_see_themselves_alone_have_no_dispersion():
    assert_measures(measure(torch.eye(6), sight=Sight(window=1)), dispersion=math.nan, entropy=0, peak=0)


def test_only_counted_rows_are_measured():
    w = torch.cat([on_first(10)[:5], torch.eye(10)[5:]])
    counted = (torch.arange(10) >= 5).float()[None]
    assert_measures(measure(w, counted=counted), sink=0, dispersion=0, peak=1, sparsity=1 - 5 / 40)


# ------------------------------------------------------------------------------------------------------- Sink_k^eps


def test_sink_eps_counts_sequences_and_looks_at_the_first_64_queries_only():
    late = torch.cat([torch.eye(100)[:64], on_first(100)[64:]])         # a sink only after query 64
    early = torch.cat([on_first(100)[:64], torch.eye(100)[64:]])
    assert_measures(measure(late, early, early, block=10), sink_eps=2 / 3)
    weak = torch.cat([on_first(64)[:19], torch.eye(64)[19:]])           # 19 of 64 queries: 0.297; one more: above 0.3
    strong = torch.cat([on_first(64)[:20], torch.eye(64)[20:]])
    assert_measures(measure(weak), sink_eps=0)
    assert_measures(measure(strong), sink_eps=1)


@pytest.mark.parametrize("eps, is_sink", [(0.1, 1), (0.26, 1), (0.27, 0), (0.9, 0)])
def test_eps_is_the_share_that_makes_a_sink(eps, is_sink):
    w = 0.75 * torch.eye(64) + 0.25 * on_first(64)      # the first row has all its weight there: a mean of 0.2617
    assert measure(w, eps=eps)["sink_eps"] == is_sink


@pytest.mark.parametrize("k", [1, 2, 5, 60, 64])
def test_token_k_is_measured_over_the_queries_that_see_it(k):
    w = torch.zeros(80, 80)
    w[k - 1:64, k - 1] = 1
    assert measure(w, eps=0.99, k=k, block=9)["sink_eps"] == 1
    w[k - 1:64:2] = 0                                   # every second query from the first on looks elsewhere
    assert measure(w, eps=0.3, k=k)["sink_eps"] == (k < 64)
    assert measure(w, eps=0.51, k=k)["sink_eps"] == 0
    assert measure(on_first(80), eps=0.01, k=k)["sink_eps"] == (k == 1)


def test_an_extra_key_has_measures_of_its_own():
    inside = 0.25 * even_rows(30)
    w = torch.cat([torch.full((30, 1), 0.75), inside], 1)
    assert_measures(measure(w, outside=True, block=8), extra=0.75, extra_eps=1, sink_eps=0, row_mass=0.25, dispersion=1,
                    share=0.25 * sum(1 / n for n in range(1, 31)) / 30, sparsity=0)
    assert_measures(measure(w, outside=True, eps=0.8), extra_eps=0)
    assert_measures(measure(inside), extra=0, extra_eps=math.nan)


# ----------------------------------------------------------------------------------------------------------- two views


def test_weights_that_both_views_share_cancel():
    """Both views have their peak on the first token, where their difference is small."""
    first, second = 0.8 * on_first(12), 0.7 * on_first(12) - 0.05 * torch.eye(12)
    found = measure(first - second, views=torch.stack([first, second]), block=5)
    assert_measures(found, peak_a=0.8, peak_b=0.7, peak=0.1, sparsity_a=66 / 78, sparsity_b=55 / 78, negative=0)
    assert_measures(measure(first), peak_a=math.nan, peak_b=math.nan, sparsity_a=math.nan, sparsity_b=math.nan)


def test_peaks_are_the_largest_of_all_sequences_and_blocks():
    assert_measures(measure(0.1 * torch.eye(9), -0.4 * torch.eye(9), 0.2 * torch.eye(9), block=2), peak=0.4)


# ------------------------------------------------------------------------------------------------------- every recipe


def dense(w, seen):
    """The measures of whole weights (B, H, T, T) in float64, written a second time."""
    a, n = w.abs().double(), seen.sum(-1).double()
    p = a / a.sum(-1, keepdim=True).clamp(min=1e-30)
    H = -(p * p.clamp(min=1e-300).log()).sum(-1)                        # (B, H, T)
    pairs = len(w) * n.sum()
    more = n > 1
    return {"entropy": H.mean((0, 2)), "dispersion": (H[..., more] / n[more].log()).mean((0, 2)),
            "negative": ((w < 0) & seen).sum((0, 2, 3)) / pairs, "peak": a[:, :, more].amax((0, 2, 3)),
            "sparsity": ((w == 0) & seen).sum((0, 2, 3)) / pairs}


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_streamed_measures_equal_those_of_the_whole_matrix(attn):
    """The model has large random weights. A block has 128 of 150 rows."""
    gpt = GPT(tiny_config(attn=attn, block_size=150), bounds.SEED).eval()
    enliven(gpt)
    probe, whole, i = Probe(), {}, torch.arange(150)

    def look(attend, layer, module, q, k, v, x, table):
        probe.see(module, q, k, v, x, table)
        whole[""] = module.weights_of(q, k, x, table)
        seen = visible(i[:, None], i, module.sight)
        if module.score_heads > module.heads:
            probe.see_views(module, q, k, table)
            whole["_a"], whole["_b"] = module.views_of(q, k, x, table)
        whole.update({view: dense(w[:, :, -150:, -150:], seen) for view, w in whole.items()})
        return attend(q, k, v, x, table)

    with instead(gpt, look), torch.no_grad():
        gpt(torch.randint(31, (2, 150), generator=bounds.dice()))
    found = probe.result()
    for view, measures in whole.items():
        for name in ("peak", "sparsity") if view else measures:
            close(found[name + view], measures[name], terms=8, dtype=torch.float32)


def test_means_are_over_layers_and_heads():
    mean = mean_of([shown(even_rows(8)), shown(on_first(8))])
    assert mean.keys() == MEASURES.keys()
    assert_measures(mean, dispersion=0.5, extra_eps=math.nan)
