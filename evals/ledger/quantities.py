"""The quantities of claims that are more than a column. A bound in a .toml file names one by its function.

Those of EACH take one run's array (seeds, ..) and return (seeds,). Those of TOGETHER take n, {column: {run: array}} of
a reading, and return an array (seeds,) or {name: (seeds,)}. nan means that it cannot be tested. If an error is read
over windows, arrays are (seeds, windows).
"""
import functools
import math
from itertools import pairwise

import numpy as np

# ---------------------------------------------------------------------------------------------------------- statistics

LEVEL = 0.025                                   # of a one-sided test. So a 95 % interval lies beyond a bound


@functools.cache
def tail(t, degrees):
    """The chance of a number above t, if it has Student's t distribution; with endless degrees it is normal."""
    if degrees == math.inf:
        return math.erfc(t / 2 ** 0.5) / 2

    def area(low):                              # t = sqrt(degrees) tan(angle) has the density cos(angle)^(degrees - 1)
        angles = low + (np.arange(10_000) + 0.5) / 10_000 * (np.pi / 2 - low)
        return np.mean(np.cos(angles) ** (degrees - 1)) * (np.pi / 2 - low)
    return area(np.arctan(t / degrees ** 0.5)) / area(-np.pi / 2)


@functools.cache
def quantile(degrees):
    """The t whose tail is LEVEL, by bisection: 12.7 with one degree of freedom, 1.96 with endless ones."""
    low, high = 0.0, 20.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees) > LEVEL else (low, middle)
    return low


def estimate(values, errors=None):
    """The mean, its standard error, and the degrees of freedom: over seeds, or from standard errors that are given. One
    value, or equal ones, have the error 0."""
    if errors is not None:
        return np.mean(values), np.sqrt(np.mean(np.square(errors)) / len(values)), math.inf
    spread = np.std(values, ddof=1) if len(values) > 1 and np.ptp(values) else 0.0
    return np.mean(values), spread / len(values) ** 0.5, max(1, len(values) - 1)


def interval(values, errors=None):
    """The 95 % interval of the mean, (low, high)."""
    mean, error, degrees = estimate(values, errors)
    return mean - quantile(degrees) * error, mean + quantile(degrees) * error


def holm(chances):
    """{name: level} of tests {name: chance that numbers like these come by luck}. If each is decided by its own level,
    one of them is wrong with a chance of LEVEL at most, however many there are (Holm 1979). Those that are not decided
    have the level 0."""
    levels, left = dict.fromkeys(chances, 0.0), len(chances)
    for name in sorted(chances, key=chances.get):
        if chances[name] > LEVEL / left:
            break
        levels[name], left = LEVEL / left, left - 1
    return levels


def rank_correlation(a, b):
    """Spearman's rank correlation of two lists. Equal values share their mean rank. 0 if a list is constant."""
    a, b = ((x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (np.ravel(a), np.ravel(b)))
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0


def thirds(layers):
    """The means of the first, middle and last third of layers (seeds, layers), seed by seed; nan for an empty third."""
    return [part.mean(1) if part.size else np.full(len(part), np.nan) for part in np.array_split(layers, 3, 1)]


def by_depth(layers):
    """The rank correlation of depth and a layer's number, seed by seed. layers (seeds, layers)."""
    return np.array([rank_correlation(range(len(seed)), seed) for seed in layers])


# --------------------------------------------------------------------------------------------------------- of one array


def decay(bias):
    """The decay of each layer's mean bias, (seeds, layers): its mean at distances 1 to 8, less that beyond a quarter of
    all distances. bias (seeds, layers, heads, W)."""
    curve = bias.mean(2)                        # (seeds, layers, W)
    return curve[..., 1:9].mean(-1) - curve[..., curve.shape[-1] // 4 + 1:].mean(-1)


def tails(bias):
    """The mean size of each bias in the last quarter of the distances, over its largest."""
    sizes = np.abs(bias)
    return sizes[..., -(sizes.shape[-1] // 4):].mean(-1) / sizes.max(-1)


def reach(bias):
    """The distance beyond which the smoothed bias stays below a tenth of its largest, a median over heads. nan for a
    bias that does not fade: in the last quarter of the distances its mean is above a tenth of its largest."""
    curves = np.abs(bias).reshape(-1, bias.shape[-1])
    if np.median(tails(curves)) > 0.1:
        return np.nan
    smooth = np.array([np.convolve(curve, np.ones(5) / 5, "same") for curve in curves])
    return np.median([np.flatnonzero(curve >= curve.max() / 10)[-1] for curve in smooth])


EACH = {                                        # alpha: each head's weight on the sink, v0: its ratio of value norms
    "size": np.abs,
    "inverse": lambda x: 1 / x,
    "removed": lambda mass: 1 - mass,
    "most": lambda layers: np.max(layers, 1),
    "growth": lambda lengths: lengths[:, -1] - lengths[:, 0],
    "decay_by_depth": lambda bias: by_depth(decay(bias)),
    "middle_over_first": lambda bias: thirds(decay(bias))[1] / decay(bias)[:, 0],
    "last_over_first": lambda bias: thirds(decay(bias))[2] / decay(bias)[:, 0],
    "layers": lambda x: x.shape[1],
    "reach": reach,
    "last_quarter": lambda bias: np.median(tails(bias), (1, 2)),
    # the mean tau of layer 1, less the largest of the layers up to two thirds, or the smallest of all others
    "first_over_largest": lambda tau: tau[:, 0].mean(1) - tau[
        :, 1:max(2, 1 + (tau.shape[1] - 1) * 2 // 3)].mean(2).max(1),
    "first_over_smallest": lambda tau: tau[:, 0].mean(1) - tau[:, 1:].mean(2).min(1),
    # the deviation over heads in the upper third of the layers, over that in the middle third
    "deviation_on_top": lambda tau: thirds(tau.std(2))[2] / thirds(tau.std(2))[1],
    # pairs (1, layers, 2) of the first token and the others: the median over the layers after the first
    "first_over_others": lambda pairs: np.median(pairs[:, 1:, 0] / pairs[:, 1:, 1], 1),
    "median": np.median,
    "median_in_first": lambda v0: np.median(v0[:, :1]),
    "median_in_later": lambda v0: np.median(v0[:, 1:]),
    "drained_later": lambda v0: (np.median(v0[:, 1:], 2) <= 0.3).mean(1),
    "sink_by_depth": lambda alpha: by_depth(alpha.mean(2)),
    "sink_in_first_tenth": lambda alpha: alpha[:, :max(1, round(alpha.shape[1] / 10))].mean((1, 2))
    / alpha.mean((1, 2)),
    "mean_weight": lambda alpha: alpha.mean((1, 2)),
    # the coefficient of variation of 1 - alpha, of the heads that eq. 9 balances: in layer 2, all but the most used
    "use_variation": lambda alpha: np.sort(1 - alpha[:, 1])[:, :-1].std(1) / np.sort(1 - alpha[:, 1])[:, :-1].mean(1),
    # gap (seeds, bins): that in the second half of the window, less that in the second quarter; the first lacks context
    "gap_along_window": lambda gap: gap[:, gap.shape[1] // 2:].mean(1) - gap[
        :, gap.shape[1] // 4:gap.shape[1] // 2].mean(1),
}

# ------------------------------------------------------------------------------------------------------ of several runs


def means(n, column):
    return {run: np.mean(values) for run, values in n[column].items()}


def noise(n, column):
    """The mean over runs of the SD over seeds; nan with one seed."""
    return np.mean([values.std(ddof=1) for values in n[column].values() if len(values) > 1] or [np.nan])


def range_of_means(n, column, left_out=""):
    """The largest mean less the smallest, without one run."""
    return np.ptp([mean for run, mean in means(n, column).items() if run != left_out])


def growths(found):
    """The growth from each of these to the next, {"one to next": growth}."""
    return {f"{one} to {following}": found[following] - found[one] for one, following in pairwise(found)}


def inhibiting(n, condition=""):
    """The shares of the upper half's heads that meet each of three conditions, and all of them; or one of these."""
    curves = n["bias"]["lazy"][:, n["bias"]["lazy"].shape[1] // 2:]     # (seeds, layers, heads, W)
    lowest, near = curves[..., 1:].argmin(-1) + 1, curves[..., 2:11].mean(-1)
    signs, place = (curves[..., 1] > 0) & (near < 0), (lowest >= 2) & (lowest <= 30)
    back = np.abs(curves[..., 101:].mean(-1)) < 0.5 * np.abs(near)
    met = {"all three": signs & place & back, "signs": signs, "place of the lowest": place, "recovered": back}
    found = {name: heads.mean((1, 2)) for name, heads in met.items()}
    return found[condition] if condition else found


def increase(n, one, sign, other):
    """The increase of the loss of one of (softmax, elastic, lazy), over or less that of another, by length."""
    found = {}
    for column, group in n.items():
        more = dict(zip(("softmax", "elastic", "lazy"), group.values(), strict=True))
        found[column] = more[one] / more[other] if sign == "over" else more[one] - more[other]
    return found


def over_theorem(n, column):
    """The largest over lengths, by kappa: the mean over seeds less 3 standard errors of one seed, over the theorem's
    bound, kappa "survivors" or an "overlap" of kappa^2 / n."""
    found, lengths = {}, np.array([64, 512, 4096, 65_536])              # those of checks.survivors
    for kappa in (1, 4):
        mean, error = (n[f"{name}, kappa {kappa}"]["survivors"].mean(0) for name in (column, f"{column} error"))
        theirs = kappa if column == "survivors" else kappa ** 2 / lengths
        found[f"kappa {kappa}"] = np.max((mean - 3 * error) / theirs)
    return found


def middle_less_others(n, column):
    """The zeros in the middle third of the layers, less those in the first and in the last third."""
    first, middle, last = thirds(n[column]["tda"].mean(2))
    return {"first": middle - first, "last": middle - last}


def over_lengths(n, run, which):
    """Of a run's columns "at T", by rising length: the "last", its "growth" over the first, or the "largest"."""
    lengths = np.array([group[run] for column, group in n.items() if column.startswith("at ")])         # (T, seeds)
    return {"last": lengths[-1], "growth": lengths[-1] - lengths[0], "largest": lengths.max(0)}[which]


def noise_less_gap(n, tda):
    """The noise of the order, less the median gap in it; 0 if TDA, which is this run, is clearly above softmax."""
    gap = np.median(np.diff(sorted(means(n, "loss").values())))
    return 0 if interval(n["loss"][tda] - n["loss"]["softmax"])[0] > 0 else np.nan_to_num(noise(n, "loss")) - gap


def lead_in_errors(n):
    """TDA's mean lead over softmax, over its mean standard error, by length."""
    def mean(combine, column):
        return np.mean(combine(n[column]["tda"], n[column]["softmax"]))
    return {T: mean(np.subtract, f"gain at {T}") / mean(np.hypot, f"error at {T}") for T in (512, 1024, 2048)}


def of_one_run(n):
    """{column: array}, of a reading with one run in each column."""
    return {column: next(iter(group.values())) for column, group in n.items()}


def speedup(n):
    """TRA's speed divided by torch's, by length."""
    return {T: of_one_run(n)[f"TRA at {T}"] / of_one_run(n)[f"torch at {T}"] for T in (1024, 4096, 16_384)}


def better_form_less(n, rival):
    """The loss of the better of the two causal forms, gate and top-2, less that of a rival, window by window. rival: a
    column, or "untrained" for the same form without training."""
    losses = of_one_run(n)                      # (seeds, windows)
    form = min(("gate", "top-2"), key=lambda name: np.mean(losses[name]))
    return losses[form] - losses[f"untrained {form}" if rival == "untrained" else rival]


SUM_TO_ONE = "softmax v_bias gated entmax sparsemax lssar sigmoid_norm elu_norm linear diff".split()


def share_with_sink(n, measure, rows):
    """The share of the recipes with a sink, among those whose rows have a fixed sum ("sum to one") or need not.
    measure: "shares" asks for 3 times the uniform share of a row, "weights" for a raw weight of 0.1 as well."""
    return np.mean([(n["x uniform"][name] >= 3) & ((n["raw"][name] >= 0.1) | (measure == "shares"))
                    for name in n["raw"] if (name in SUM_TO_ONE) == (rows == "sum to one")], 0)


def step_back(n):
    """The largest step of either weight in the wrong direction, over all norms."""
    bias, first = (np.diff([n[column][f"value-norm-{norm}"] for norm in (0, 1, 5, 20)], axis=0)
                   for column in ("bias", "first"))
    return np.maximum(bias.max(0), -first.min(0))                       # (seeds,)


THEIR_ORDER = {"tda": 3.1190, "softmax": 3.1196, "diff_rela": 3.1294, "tra": 3.1320, "dex": 3.1349, "ssmax": 3.1369,
               "gated": 3.1489, "rela": 3.1657, "lssar": 3.1676, "entmax": 3.1941, "diff": 3.1941}
# of focus-frozen: a router of 16 dimensions, a window of 128
WINDOWS = {16: "focus-w16", 64: "focus-w64", 128: "focus-frozen", 256: "focus-w256"}

TOGETHER = {function.__name__: function for function in (
    range_of_means, inhibiting, increase, over_theorem, middle_less_others, over_lengths, noise_less_gap,
    lead_in_errors, speedup, better_form_less, share_with_sink, step_back)} | {
    "over_largest": lambda n, column, run: n[column][run] - np.max(
        [values for name, values in n[column].items() if name != run], 0),
    "over_lowest_in_sd": lambda n, column, run: (
        n[column][run].mean() - min(means(n, column).values())) / noise(n, column),
    "range_in_sd": lambda n, column: range_of_means(n, column) / noise(n, column),
    # how many runs have a lower mean than this one
    "count_below": lambda n, column, run: sum(mean < means(n, column)[run] for mean in means(n, column).values()),
    "less_each": lambda n, column, run, others: {name: n[column][run] - n[column][name] for name in others.split()},
    "extreme": lambda n, which, column, runs: getattr(np, which)([n[column][run] for run in runs.split()], 0),
    # [1] Lazy Attention
    "zeros_less_removed": lambda n: n["zeros"]["elastic"] + n["mass"]["elastic"] - 1,
    # of the fixed token over the first token, over its places
    "largest_lead": lambda n: np.max([n[column]["softmax"] - n[column.replace("fixed", "first")]["softmax"]
                                      for column in n if column.startswith("fixed")], 0),
    # the largest distance of the hidden states with relative positions, of trained and of untrained models
    "states_apart": lambda n: np.max([values for name, values in n["spread"].items()
                                      if name.startswith(("rope", "alibi"))], 0),
    "change_by_bias": lambda n: {"softmax": n["loss"]["rope+bias"] - n["loss"]["softmax"],
                                 "elastic": n["loss"]["lazy"] - n["loss"]["elastic"]},
    "change_of_slopes": lambda n: np.mean(np.abs(
        n["slopes"]["alibi-learned"] - n["slopes at first"]["alibi-learned"]) / n["slopes at first"]["alibi-learned"]),
    # [2] TDA: the peak of the difference, over the larger of view 1 and lambda times view 2
    "over_larger_view": lambda n: n["difference"]["tda"] / np.maximum(n["view 1"]["tda"], n["view 2"]["tda"] * n[
        "lambda"]["tda"].reshape(len(n["lambda"]["tda"]), -1).mean(1)),
    # the rank correlation of our mean losses with the paper's losses. tda: the run that counts as TDA
    "order_of_losses": lambda n, tda: rank_correlation(
        [n["loss"][tda if name == "tda" else name].mean() for name in THEIR_ORDER], [*THEIR_ORDER.values()]),
    # TRA's entropy at the longest length, over that of softmax
    "entropy_over_softmax": lambda n: n["tra"]["survivors"][:, -1] / n["softmax"]["survivors"][:, -1].mean(),
    "growth_of_speedup": lambda n: growths(speedup(n)),
    # [3] Focus: from each window size that was run to the next
    "increase_with_window": lambda n: growths(
        {width: n["loss"][run] for width, run in WINDOWS.items() if run in n["loss"]}),
    # by how much more top-2 loses at 512 tokens than at 256, by windows in about the same places
    "growth_of_gap": lambda n: np.subtract(*(n[f"top-2 at {T}"]["focus-short"] - n[f"full at {T}"]["focus-short"]
                                             for T in (512, 256))),
    # the rank correlation of a run's mean loss and its mean dominance over layers
    "loss_and_dominance": lambda n: rank_correlation(
        *([*means(n, column).values()] for column in ("loss", "dominance"))),
    # [4] Native MoE: of the share of dormant heads, from each model to the next larger one
    "growth_of_share": lambda n: growths(means(n, "dormant")),
    # [5] When Attention Sink Emerges: by how much larger the share of recipes with a sink is where rows sum to one
    "by_a_sum_of_one": lambda n: {measure: share_with_sink(n, measure, "sum to one") - share_with_sink(
        n, measure, "need not") for measure in ("shares", "weights")},
}
