"""Threshold Differential Attention, arXiv 2601.12145."""
import numpy as np

from evals.ledger.checks import LENGTHS
from evals.ledger.claim import GPU_GATE, Claim, Reading, below, decide, layer_means, rank_correlation, thirds

TITLE = "[2] Threshold Differential Attention"

# ------------------------------------------------------------------------------------------------------------- verdicts


def sums_vary(n):
    return decide(n["spread"]["fixed_sum"] > 1e-3, n["spread"]["fixed_sum"] <= 1e-5)


def no_sink(n):
    named = [(times, n["cost of zero v0"][name]) for name, times in n["x uniform"].items()]
    return decide([(times <= 2) & (cost < 0.005) for times, cost in named],
                  any(np.all((times >= 4) | (cost > 0.02)) for times, cost in named))


def keeps_sink(n):
    return decide([raw >= 0.5 for raw in n["raw"].values()], [raw <= 0.1 for raw in n["raw"].values()])


def bounded(n):
    """Arrays (seeds, LENGTHS). More than 3 standard errors above its bound, at any length?"""
    def above(what, kappa, bound):
        mean, error = (n[f"{column}, kappa {kappa}"]["survivors"].mean(0) for column in (what, f"{what} error"))
        return np.any(mean - 3 * error > bound)
    both = np.array(LENGTHS, float)
    broken = [above("survivors", kappa, kappa) or above("overlap", kappa, kappa ** 2 / both) for kappa in (1, 4)]
    return decide(not any(broken), any(broken))


def concentrates(n):
    tra, softmax = (n[name]["survivors"].mean(0) for name in ("tra", "softmax"))        # (LENGTHS,)
    return decide(tra[-1] < tra[0] and tra[-1] <= softmax[-1] / 2, tra[-1] > tra[0],
                  by={"TRA, by n": tra, "softmax, by n": softmax})


def dips(n):
    first, middle, last = thirds(layer_means(n["at 512"]["tda"]))
    return decide(middle <= min(first, last) - 0.05, middle >= max(first, last),
                  by={"zeros in the first, middle and last third": [first, middle, last]})


def smaller_peaks(n):
    a, b, both, share = (n[column]["tda"] for column in ("view 1", "view 2", "difference", "lambda"))
    share = share.reshape(len(both), -1).mean(1)
    smaller, larger = np.minimum(a, b), np.maximum(a, share * b)
    return decide(both < 0.8 * smaller, both >= 0.95 * larger,
                  by={"over the smaller view": both / smaller, "over the larger, lambda counted": both / larger})


def grows(n):
    """Columns "at T", from the shortest length to the longest."""
    softmax, tda = ([group[name] for column, group in n.items() if column.startswith("at ")]
                    for name in ("softmax", "tda"))
    most = np.max(tda, 0)                       # over lengths
    return decide([softmax[-1] >= 4, softmax[-1] > softmax[0], most <= 1.5], most > 4,
                  by={"softmax, shortest": softmax[0], "longest": softmax[-1], "TDA, largest": most})


THEIR_ORDER = {"tda": 3.1190, "softmax": 3.1196, "diff_rela": 3.1294, "tra": 3.1320, "dex": 3.1349, "ssmax": 3.1369,
               "gated": 3.1489, "rela": 3.1657, "lssar": 3.1676, "entmax": 3.1941, "diff": 3.1941}


def lowest_loss(n):
    """Where seeds are farther apart than mechanisms are, there is no order to ask for."""
    loss = {name: np.mean(n["loss"][name]) for name in THEIR_ORDER}
    r = rank_correlation(list(loss.values()), list(THEIR_ORDER.values()))
    noise = np.mean([np.std(values, ddof=1) for values in n["loss"].values() if len(values) > 1] or [0])
    gap, worse = np.median(np.diff(sorted(loss.values()))), below(n["loss"]["softmax"], n["loss"]["tda"])
    return decide(not worse and r >= 0.5, worse, testable=worse or noise <= gap,
                  by={"TDA": loss["tda"], "softmax": loss["softmax"], "rank correlation": r, "SD": noise, "gap": gap})


def sparse(n):
    zeros = n["zeros"]
    order = np.all(zeros["tda"] >= zeros["tra"]) and np.all(zeros["diff_rela"] >= zeros["rela"])
    level = np.all(zeros["tda"] >= 0.9) and np.all(zeros["tda"] > zeros["entmax"])
    return decide(level and order, not order,
                  by={name: zeros[name] for name in ("tda", "tra", "diff_rela", "rela", "entmax")})


def closes_gap(n):
    loss, late = n["loss"], n["by place"]
    gap = (late["rela"] - late["softmax"]).mean(0)                      # (bins,)
    r = rank_correlation(range(len(gap)), gap)
    return decide(below(loss["tra"], loss["rela"]) and r > 0, below(loss["rela"], loss["tra"]),
                  by={"TRA": loss["tra"], "ReLA": loss["rela"], "rank correlation of gap and place": r})


def finds_better(n):
    """Columns "gain at T" and "error at T"."""
    lead = [np.mean(group["tda"] - group["softmax"]) for column, group in n.items() if column.startswith("gain")]
    error = [2 * np.mean(np.hypot(group["tda"], group["softmax"])) for column, group in n.items()
             if column.startswith("error")]
    return decide(np.greater(lead, error), np.less(lead, np.negative(error)),
                  by={"TDA's lead, by T": lead, "2 standard errors": error})


def second_power(n):
    loss = {name: np.mean(values) for name, values in n["loss"].items()}
    best, spread = min(loss.values()), np.mean([np.std(values, ddof=1) for values in n["loss"].values()])
    return decide(loss["tda"] <= best + spread and max(loss, key=loss.get) == "tda-p1",
                  all(below(n["loss"]["tda-p1"], values) for name, values in n["loss"].items() if name != "tda-p1"),
                  by=loss | {"SD": spread})


def any_beta(n):
    values = np.array(list(n["loss"].values()))                         # (betas, seeds)
    spread, noise = np.ptp(values.mean(1)), values.std(1, ddof=1).mean()
    return decide(spread <= 2 * noise, spread > 2 * noise, by={"spread over beta": spread, "2 SD": 2 * noise})


def dead_rows(n):
    empty = [np.mean(values) for values in n["empty"].values()]
    rises = empty == sorted(empty) and empty[-1] > empty[0] + 0.05
    return decide(rises, not rises and np.ptp(empty) <= 0.05, by={"empty rows, by beta": empty})


def faster(n):
    """Columns "TRA at T" and "torch at T", speeds over our softmax: is TRA ahead, and the farther the longer?"""
    ours, torch = (np.array([np.mean(list(group.values())) for column, group in n.items() if column.startswith(name)])
                   for name in ("TRA", "torch"))
    ratio = ours / torch
    return decide([ratio > 1, np.diff(ratio) > 0], ratio <= 1, by={"times as fast, by T": ratio})


# ------------------------------------------------------------------------------------------------------------- the rows

RECTIFIED = "rela tra tda relu softpick"
BETAS = "tda-0.3 tda-0.5 tda-0.8 tda-1"
ELEVEN = " ".join(f"{name}@gpu" for name in THEIR_ORDER)


def race_of(run, rival):
    """What tda-kernel reads of TRA and of one of torch's kernels, both over our softmax."""
    return {f"{name} at {T}": (f"sizes/width 64, T {T}/{kernel}/both_ratio", run)
            for T in (1024, 4096, 16_384) for name, kernel in (("TRA", "tra"), ("torch", rival))}


BETA = "TRA and TDA start at beta 0.1: at their beta of 1 nothing is learned here (claim tda-beta)."

CLAIMS = [
    Claim("diff-fixed-sum", "table 1", "Differential softmax is free of a fixed row sum.", "a tick in the table",
          "lab",
          "row sums of one head: agrees: they vary by more than 1e-3; contradicts: all the same to 1e-5 (1 - lambda)",
          Reading({"spread": ("diff/spread", "fixed_sum"), "spread of V2": ("diff2/spread", "fixed_sum"),
                   "share on the first": ("share_idle", "diff diff2"), "|v0|/|v|": ("value_norm_ratio", "diff diff2")},
                  sums_vary),
          note="Of the Differential Transformer that it names; in the second version lambda, and so the sum, is each "
               "token's own."),
    Claim("rela-sink-free", "1, 2, table 1", "Rectified attention without a fixed row sum has no sink.", "none", "lab",
          "ReLA, TRA, TDA, each with its output norm, relu / n and softpick, idle rows: agrees: share on the first "
          "token <= 2 x uniform and zeroing its value costs < 0.005; contradicts: one of them has >= 4 x, or a cost > "
          "0.02, with every seed",
          Reading({"x uniform": ("times_uniform_idle", RECTIFIED), "cost of zero v0": ("zero_cost", RECTIFIED),
                   "raw": ("sink_idle", RECTIFIED), "mass": ("row_mass_idle", RECTIFIED),
                   "|v0|/|v|": ("value_norm_ratio", RECTIFIED)}, no_sink),
          note=BETA),
    Claim("entmax-keeps-sink", "1, 2", "Projections that are sparse but normalised keep the sink.", "none", "lab",
          "raw weight on the first token: agrees: >= 0.5; contradicts: <= 0.1",
          Reading({"raw": ("sink_idle", "entmax sparsemax"), "cost of hiding it": ("hide_cost", "entmax sparsemax")},
                  keeps_sink),
          variations=("nobos",)),
    Claim("thm-survivors", "theorems 4.3 and 4.6",
          "At most kappa keys of a row pass by chance; in both views kappa^2 / n do.", "the bounds", "lab",
          "random directions, d = 64, n up to 65,536, kappa 1 and 4, means over seeds: agrees: both under the bound "
          "within 3 standard errors; contradicts: above",
          Reading({f"{what}, kappa {kappa}": (f"kappa {kappa}/{what}", "survivors") for kappa in (1, 4)
                   for what in ("survivors", "survivors error", "overlap", "overlap error")}, bounded),
          note="4 million pairs at each n. Of these next to none passes in both views at n = 4,096 and 65,536: there "
               "the second bound holds, and could hardly fail."),
    Claim("nondispersive", "theorems 4.4 and 4.7",
          "The entropy of TRA and TDA over log n tends to 0, that of softmax does not.", "a limit", "lab",
          "random directions, kappa 1, from n = 64 to 65,536, means: agrees: TRA falls, to half of softmax or less; "
          "contradicts: it rises",
          Reading({what: (f"kappa 1/{what}", "survivors") for what in ("tra", "tda", "softmax", "empty")},
                  concentrates),
          note="Of strangers hardly any passes: most rows are empty, and have entropy 0 at every length, so nothing "
               "can fall. The theorems allow for relevant keys, hence the second reading. Trained models are not "
               "asked.",
          elsewhere={"4 relevant keys a row": Reading(
              {what: (f"kappa 1/{what}, relevant keys", "survivors") for what in ("tra", "tda", "softmax")},
              concentrates)}),
    Claim("tda-depth-profile", "5, figure 1a",
          "Nearly all weights are zero in early and late layers, about half in the middle ones.",
          "50 %, one sentence of 9 words; an average over layers of 99 % in table 2", "gpu-minutes",
          "zeros at T = 512: agrees: the middle third of layers lower than both ends by 5 points or more; "
          "contradicts: lower than neither",
          Reading({"at 10": ("probe-10/layers/*/sparsity", "tda@gpu"),
                   "at 512": ("probe-512/layers/*/sparsity", "tda@gpu")},
                  dips),
          seeds=1),
    Claim("tda-signed-peaks", "5, figures 1b and 2",
          "The difference of the views has much smaller peaks than either; weights become negative.", "figures", "lab",
          "largest absolute weight: agrees: the difference < 0.8 x the smaller view; contradicts: >= 0.95 x the "
          "larger of view 1 and lambda view 2",
          Reading({"view 1": ("probe/mean/peak_a", "tda"), "view 2": ("probe/mean/peak_b", "tda"),
                   "difference": ("probe/mean/peak", "tda"), "lambda": ("params/figures/lambda/now", "tda"),
                   "negative": ("probe/mean/negative", "tda")}, smaller_peaks),
          note=f"{BETA} gpu: means over layers.",
          elsewhere={"gpu": Reading({"view 1": ("probe/mean/peak_a", "tda@gpu"),
                                     "view 2": ("probe/mean/peak_b", "tda@gpu"),
                                     "difference": ("probe/mean/peak", "tda@gpu"),
                                     "lambda": ("params/figures/lambda/now", "tda@gpu")}, smaller_peaks)}),
    Claim("tda-sink-growth", "5, figure 1c",
          "The weight on the first token over uniform rises with the length in softmax, and stays near 1 in TDA.",
          "a figure, GPT-2 162M", "lab",
          "at 64, 128 and 256 tokens: agrees: softmax >= 4 and rising, TDA <= 1.5 at every length and seed; "
          "contradicts: TDA > 4 at some length with every seed",
          Reading({**{f"at {T}": (f"probe-lengths/lengths/{i}/times_uniform", "softmax@long tda@long")
                      for i, T in enumerate((64, 128, 256))},
                   **{f"share at {T}": (f"probe-lengths/lengths/{i}/share", "softmax@long tda@long")
                      for i, T in enumerate((64, 128, 256))}}, grows),
          note=f"Trained on sequences of 256. A constant share makes the ratio rise like n / log n. {BETA}",
          elsewhere={"gpu": Reading({f"at {T}": (f"probe-far/lengths/{i}/times_uniform", "softmax@gpu tda@gpu")
                                     for i, T in enumerate((64, 128, 256, 512, 1024, 2048))}
                                    | GPU_GATE, grows)}),
    Claim("tda-loss-order", "table 2, 6.1", "TDA has the lowest validation loss of eleven mechanisms.",
          "3.1190, softmax 3.1196, then diff_rela, tra, dex, ssmax, gated, rela, lssar, entmax = diff 3.1941; single "
          "runs, and the baseline called strongest has the worst loss",
          "gpu-minutes",
          "agrees: TDA <= softmax + 2 SD, and rank correlation with their order >= 0.5, of means; contradicts: TDA > "
          "softmax + 2 SD; not testable: SD beyond the gaps of the order",
          Reading({"loss": ("best", ELEVEN)}, lowest_loss),
          note="SD: a mean over mechanisms. Gap: the median of those between one mean and the next."),
    Claim("tda-sparsity", "table 2, appendix D.1, table 1",
          "Of the weights TDA has 99 % zeros, Diff ReLA 96, ReLA 94, TRA 92, entmax 43, all others none.",
          "as said; but a difference is zero only where both views are, and LSSAR (0 %) has a ReLU", "lab",
          "agrees: TDA >= 90 % and above entmax, in their order; contradicts: TDA below TRA, or Diff ReLA below ReLA",
          Reading({"zeros": ("sparsity", "tda diff_rela rela tra entmax lssar softmax"),
                   "view 1": ("probe/mean/sparsity_a", "tda diff_rela"),
                   "view 2": ("probe/mean/sparsity_b", "tda diff_rela"),
                   "random, by n": ("kappa 1/sparsity", "survivors")}, sparse),
          note=BETA,
          elsewhere={"gpu": Reading({"zeros": ("sparsity", "tda@gpu diff_rela@gpu rela@gpu tra@gpu entmax@gpu")},
                                    sparse)}),
    Claim("tra-closes-gap", "6.1",
          "A threshold repairs the loss that ReLA suffers from accumulated noise, most of all at long range.",
          "ReLA 3.1657, TRA 3.1320, softmax 3.1196", "gpu-minutes",
          "agrees: TRA below ReLA beyond 2 SD, and ReLA's mean gap to softmax grows with the place; contradicts: TRA "
          "above ReLA beyond 2 SD",
          Reading({"loss": ("best", "rela@gpu tra@gpu softmax@gpu"),
                   "by place": ("lengths/lengths/0/by_position/*/loss", "rela@gpu softmax@gpu")}, closes_gap),
          note="The lab is not asked: its sequences have no long range. Grows: by rank."),
    Claim("tda-long-context", "table 3, figure 3",
          "TDA finds passkeys better than softmax at every length; TRA and TDA come second to entmax on SCROLLS.",
          "15 against 6 of 100 at 4000 tokens; 9.37 entmax, 9.34 TRA, 9.31 TDA, 7.54 softmax", "out of reach",
          "their figures: 162M parameters on 100B tokens. In their place, at 30M, how much likelier the key is than "
          "another one at 512, 1024 and 2048 tokens: agrees: TDA more than softmax by 2 standard errors at all "
          "lengths; contradicts: less",
          None,
          note="256 bytes hold no prompt. Another key stands for the same prompt without the key.",
          elsewhere={"gpu": Reading({f"{what} at {T}": (f"passkey/lengths/{i}/{name}", "softmax@gpu tda@gpu")
                                     for i, T in enumerate((512, 1024, 2048))
                                     for what, name in (("gain", "gain"), ("error", "gain_error"))}, finds_better)},
          seeds=1),
    Claim("tda-power", "table 4a, 6.4", "A power of 2 is best, 1 clearly worst.",
          "p = 1, 2, 3, 5: 3.2068, 3.1190, 3.1408, 3.1412", "gpu-minutes",
          "means over seeds: agrees: 2 within 1 SD of the best and 1 worst; contradicts: 1 best beyond 2 SD",
          Reading({"loss": ("best", "tda-p1@gpu tda@gpu tda-p3@gpu tda-p5@gpu")}, second_power), seeds=2),
    Claim("tda-beta", "table 4b, 6.4", "Results hardly depend on the scale of the threshold; beta = 1 is best.",
          "beta 1, 0.8, 0.5: 3.1190, 3.1140, 3.1288: the text says that 1 is best, its table 0.8", "lab",
          "means over beta 0.3, 0.5, 0.8 and 1: agrees: within 2 SD of each other; contradicts: beyond",
          Reading({"loss": ("excess_loss", f"{BETAS}"), "empty rows": ("empty_rows", f"{BETAS} tda"),
                   "share on the first": ("share_idle", f"{BETAS} tda"), "on copy": ("excess_copy", f"{BETAS} tda")},
                  any_beta),
          note="tda beside them learns its beta, from 0.1. The lab alone: text models of these betas would be trained "
               "for this row only."),
    Claim("dead-heads", "limitations",
          "Too high a threshold leaves heads without survivors, most of them in the first and last layers.", "none",
          "lab",
          "agrees: rows without survivors rise with beta (0.3, 0.5, 0.8, 1), means over seeds; contradicts: flat, "
          "within 5 points",
          Reading({"empty": ("empty_rows", BETAS), "idle": ("rows/empty idle", BETAS),
                   "copy": ("rows/empty copy", BETAS), "random, by n": ("kappa 1/empty", "survivors")}, dead_rows),
          note="One layer has no ends, so which layers have most is not asked: text models of these betas would be "
               "trained for this row only. 5 points was our number for flat. Single seeds may fall where "
               "the mean rises."),
    Claim("tda-kernel", "1, appendix B, figure 4",
          "The fused TRA kernel beats torch's attention at every length, the more the longer.",
          "up to 57 % less time and 35 % less memory, FP32, A100; FlashAttention was left out", "gpu-minutes",
          "forward and backward, FP32, over torch's memory-efficient backend, its fastest in FP32, at T = 1k, 4k, "
          "16k: agrees: faster at all, the more the longer; contradicts: at none",
          Reading(race_of("kernels-float32", "sdpa efficient"), faster),
          note="The sheet has no rule for a contradiction: at none is ours. Both are timed apart and added up; memory "
               "is not taken.",
          elsewhere={"bf16, over flash": Reading(race_of("kernels", "sdpa flash"), faster),
                     "bf16, over cuDNN": Reading(race_of("kernels", "sdpa cudnn"), faster)},
          seeds=1),
]
