"""The claims of Threshold Differential Attention, arXiv 2601.12145."""
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
    """Does any mean exceed its bound by more than 3 standard errors, at any length? The arrays are (seeds, LENGTHS)."""
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
    """The columns "at T" are ordered from the shortest length to the longest."""
    softmax, tda = ([group[name] for column, group in n.items() if column.startswith("at ")]
                    for name in ("softmax", "tda"))
    most = np.max(tda, 0)                       # the largest over lengths
    return decide([softmax[-1] >= 4, softmax[-1] > softmax[0], most <= 1.5], most > 4,
                  by={"softmax, shortest": softmax[0], "longest": softmax[-1], "TDA, largest": most})


THEIR_ORDER = {"tda": 3.1190, "softmax": 3.1196, "diff_rela": 3.1294, "tra": 3.1320, "dex": 3.1349, "ssmax": 3.1369,
               "gated": 3.1489, "rela": 3.1657, "lssar": 3.1676, "entmax": 3.1941, "diff": 3.1941}


def lowest_loss(n):
    """If seeds differ by more than mechanisms do, the order cannot be tested."""
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
    """The columns are "gain at T" and "error at T"."""
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
    """Is TRA faster than torch, and does its lead grow with T? The columns "TRA at T" and "torch at T" hold speeds
    relative to our softmax."""
    ours, torch = (np.array([np.mean(list(group.values())) for column, group in n.items() if column.startswith(name)])
                   for name in ("TRA", "torch"))
    ratio = ours / torch
    return decide([ratio > 1, np.diff(ratio) > 0], ratio <= 1, by={"times as fast, by T": ratio})


# ------------------------------------------------------------------------------------------------------------- the rows

RECTIFIED = "rela tra tda relu softpick"
BETAS = "tda-0.3 tda-0.5 tda-0.8 tda-1"
ELEVEN = " ".join(f"{name}@gpu" for name in THEIR_ORDER)


def race_of(run, rival):
    """The columns that tda-kernel reads: the speeds of TRA and of one of torch's kernels, relative to our softmax."""
    return {f"{name} at {T}": (f"sizes/width 64, T {T}/{kernel}/both_ratio", run)
            for T in (1024, 4096, 16_384) for name, kernel in (("TRA", "tra"), ("torch", rival))}


BETA = "TRA and TDA start at beta = 0.1, because with the paper's beta of 1 they learn nothing here (see tda-beta)."

CLAIMS = [
    Claim("diff-fixed-sum", "table 1", "The row sums of differential softmax are not fixed.", "a tick in the table",
          "lab",
          "row sums of one head: agrees: they vary by more than 1e-3; contradicts: they are all the same (1 - lambda) "
          "to within 1e-5",
          Reading({"spread": ("diff/spread", "fixed_sum"), "spread of V2": ("diff2/spread", "fixed_sum"),
                   "share on the first": ("share_idle", "diff diff2"), "|v0|/|v|": ("value_norm_ratio", "diff diff2")},
                  sums_vary),
          note="The rule concerns the Differential Transformer that the paper names. In its second version each token "
               "has its own lambda, and therefore its own row sum."),
    Claim("rela-sink-free", "1, 2, table 1", "Rectified attention without a fixed row sum has no sink.", "no numbers",
          "lab",
          "idle rows of ReLA, TRA and TDA (each with its output norm), relu / n and softpick: agrees: the share on "
          "the first token is at most 2 times uniform, and zeroing its value costs less than 0.005; contradicts: one "
          "of them has, with every seed, at least 4 times uniform or a cost above 0.02",
          Reading({"x uniform": ("times_uniform_idle", RECTIFIED), "cost of zero v0": ("zero_cost", RECTIFIED),
                   "raw": ("sink_idle", RECTIFIED), "mass": ("row_mass_idle", RECTIFIED),
                   "|v0|/|v|": ("value_norm_ratio", RECTIFIED)}, no_sink),
          note=BETA),
    Claim("entmax-keeps-sink", "1, 2", "Sparse projections whose rows still sum to one do not remove the sink.",
          "no numbers", "lab",
          "raw weight on the first token: agrees: both entmax and sparsemax have at least 0.5; contradicts: both have "
          "at most 0.1",
          Reading({"raw": ("sink_idle", "entmax sparsemax"), "cost of hiding it": ("hide_cost", "entmax sparsemax")},
                  keeps_sink),
          variations=("nobos",)),
    Claim("thm-survivors", "theorems 4.3 and 4.6",
          "On average at most kappa keys of a row pass the threshold by chance, and at most kappa^2 / n keys pass in "
          "both views.", "the two bounds", "lab",
          "means over seeds on random directions, with d = 64, n up to 65,536, kappa 1 and 4: agrees: no mean exceeds "
          "its bound by more than 3 standard errors; contradicts: a mean does",
          Reading({f"{what}, kappa {kappa}": (f"kappa {kappa}/{what}", "survivors") for kappa in (1, 4)
                   for what in ("survivors", "survivors error", "overlap", "overlap error")}, bounded),
          note="We draw 4 million pairs at each n. At n = 4,096 and 65,536 almost none of them passes in both views, "
               "so there the second bound holds but could hardly fail."),
    Claim("nondispersive", "theorems 4.4 and 4.7",
          "The entropy divided by log n tends to 0 for TRA and TDA, but not for softmax.", "the limit of 0", "lab",
          "mean entropy / log n on random directions, with kappa 1, from n = 64 to 65,536: agrees: it falls for TRA, "
          "to at most half of softmax's value; contradicts: it rises for TRA",
          Reading({what: (f"kappa 1/{what}", "survivors") for what in ("tra", "tda", "softmax", "empty")},
                  concentrates),
          note="Hardly any random key passes the threshold, so most rows are empty. An empty row has entropy 0 at "
               "every length, so nothing can fall. The theorems allow for relevant keys; therefore a second reading "
               "adds 4 relevant keys to each row. Trained models are not tested.",
          elsewhere={"4 relevant keys a row": Reading(
              {what: (f"kappa 1/{what}, relevant keys", "survivors") for what in ("tra", "tda", "softmax")},
              concentrates)}),
    Claim("tda-depth-profile", "5, figure 1a",
          "Nearly all weights are zero in the early and late layers, but only about half of them in the middle "
          "layers.", "50 %, in one sentence of 9 words. Table 2 gives 99 % as the average over layers.", "gpu-minutes",
          "share of zeros at T = 512: agrees: it is lower in the middle third of the layers than in both other "
          "thirds, by at least 5 points; contradicts: it is at least as high there as in both",
          Reading({"at 10": ("probe-10/layers/*/sparsity", "tda@gpu"),
                   "at 512": ("probe-512/layers/*/sparsity", "tda@gpu")},
                  dips),
          seeds=1),
    Claim("tda-signed-peaks", "5, figures 1b and 2",
          "The difference of the two views has much smaller peaks than either view, and some of its weights are "
          "negative.", "only figures", "lab",
          "largest absolute weight: agrees: the difference has less than 0.8 times that of the smaller view; "
          "contradicts: it has at least 0.95 times the larger one of view 1 and lambda times view 2",
          Reading({"view 1": ("probe/mean/peak_a", "tda"), "view 2": ("probe/mean/peak_b", "tda"),
                   "difference": ("probe/mean/peak", "tda"), "lambda": ("params/figures/lambda/now", "tda"),
                   "negative": ("probe/mean/negative", "tda")}, smaller_peaks),
          note=f"{BETA} The gpu numbers are means over layers.",
          elsewhere={"gpu": Reading({"view 1": ("probe/mean/peak_a", "tda@gpu"),
                                     "view 2": ("probe/mean/peak_b", "tda@gpu"),
                                     "difference": ("probe/mean/peak", "tda@gpu"),
                                     "lambda": ("params/figures/lambda/now", "tda@gpu")}, smaller_peaks)}),
    Claim("tda-sink-growth", "5, figure 1c",
          "The weight on the first token relative to uniform rises with the length for softmax and stays near 1 for "
          "TDA.", "Only a figure, for GPT-2 with 162M parameters.", "lab",
          "times uniform at 64, 128 and 256 tokens: agrees: softmax rises and reaches at least 4, and TDA has at most "
          "1.5 at every length and with every seed; contradicts: TDA has more than 4 at some length, with every seed",
          Reading({**{f"at {T}": (f"probe-lengths/lengths/{i}/times_uniform", "softmax@long tda@long")
                      for i, T in enumerate((64, 128, 256))},
                   **{f"share at {T}": (f"probe-lengths/lengths/{i}/share", "softmax@long tda@long")
                      for i, T in enumerate((64, 128, 256))}}, grows),
          note="The models are trained on sequences of 256. A constant share makes the ratio rise like n / log n. "
               f"{BETA}",
          elsewhere={"gpu": Reading({f"at {T}": (f"probe-far/lengths/{i}/times_uniform", "softmax@gpu tda@gpu")
                                     for i, T in enumerate((64, 128, 256, 512, 1024, 2048))}
                                    | GPU_GATE, grows)}),
    Claim("tda-loss-order", "table 2, 6.1", "TDA has the lowest validation loss of eleven mechanisms.",
          "TDA has 3.1190 and softmax 3.1196. Then follow diff_rela, tra, dex, ssmax, gated, rela, lssar, and last "
          "entmax and diff with 3.1941 each. These are single runs, and the baseline called strongest has the worst "
          "loss.", "gpu-minutes",
          "mean losses: agrees: TDA is at most softmax + 2 SD, and the rank correlation with the paper's order is at "
          "least 0.5; contradicts: TDA is above softmax + 2 SD; not testable: the SD is larger than the gaps in the "
          "order",
          Reading({"loss": ("best", ELEVEN)}, lowest_loss),
          note="For \"not testable\", the SD is a mean over mechanisms, and the gap is the median difference between "
               "one mean loss and the next."),
    Claim("tda-sparsity", "table 2, appendix D.1, table 1",
          "The share of weights that are zero is 99 % for TDA, 96 % for Diff ReLA, 94 % for ReLA, 92 % for TRA, 43 % "
          "for entmax and 0 % for all others.",
          "The numbers are those of the claim. But a difference is zero only where both views are zero, and LSSAR (0 "
          "%) has a ReLU.", "lab",
          "agrees: TDA has at least 90 % zeros, more than entmax and no fewer than TRA, and Diff ReLA has no fewer "
          "than ReLA; contradicts: TDA has fewer than TRA, or Diff ReLA has fewer than ReLA",
          Reading({"zeros": ("sparsity", "tda diff_rela rela tra entmax lssar softmax"),
                   "view 1": ("probe/mean/sparsity_a", "tda diff_rela"),
                   "view 2": ("probe/mean/sparsity_b", "tda diff_rela"),
                   "random, by n": ("kappa 1/sparsity", "survivors")}, sparse),
          note=BETA,
          elsewhere={"gpu": Reading({"zeros": ("sparsity", "tda@gpu diff_rela@gpu rela@gpu tra@gpu entmax@gpu")},
                                    sparse)}),
    Claim("tra-closes-gap", "6.1",
          "A threshold repairs the loss that ReLA suffers from accumulated noise, above all at long range.",
          "Loss: ReLA 3.1657, TRA 3.1320, softmax 3.1196.", "gpu-minutes",
          "agrees: the loss of TRA is below that of ReLA by more than 2 SD, and ReLA's mean gap to softmax grows with "
          "the position; contradicts: the loss of TRA is above that of ReLA by more than 2 SD",
          Reading({"loss": ("best", "rela@gpu tra@gpu softmax@gpu"),
                   "by place": ("lengths/lengths/0/by_position/*/loss", "rela@gpu softmax@gpu")}, closes_gap),
          note="The lab has no long range and cannot test this. \"Grows\" means a positive rank correlation."),
    Claim("tda-long-context", "table 3, figure 3",
          "TDA finds passkeys better than softmax at every length, and TRA and TDA come second to entmax on SCROLLS.",
          "15 against 6 of 100 passkeys at 4000 tokens. On SCROLLS: 9.37 entmax, 9.34 TRA, 9.31 TDA, 7.54 softmax.",
          "out of reach",
          "the paper's numbers need models of 162M parameters trained on 100B tokens. In their place we measure with "
          "models of 30M how much likelier the key is than another key, at 512, 1024 and 2048 tokens: agrees: TDA is "
          "ahead of softmax by 2 standard errors at all lengths; contradicts: it is behind by as much at all lengths",
          None,
          note="Texts of 256 bytes are too short for the prompt. Another key replaces the plan's comparison, the same "
               "prompt without the key.",
          elsewhere={"gpu": Reading({f"{what} at {T}": (f"passkey/lengths/{i}/{name}", "softmax@gpu tda@gpu")
                                     for i, T in enumerate((512, 1024, 2048))
                                     for what, name in (("gain", "gain"), ("error", "gain_error"))}, finds_better)},
          seeds=1),
    Claim("tda-power", "table 4a, 6.4", "The power p = 2 is best, and p = 1 is clearly worst.",
          "Loss with p = 1, 2, 3, 5: 3.2068, 3.1190, 3.1408, 3.1412.", "gpu-minutes",
          "mean losses over seeds: agrees: p = 2 is within 1 SD of the best, and p = 1 is the worst; contradicts: p = "
          "1 is the best by more than 2 SD",
          Reading({"loss": ("best", "tda-p1@gpu tda@gpu tda-p3@gpu tda-p5@gpu")}, second_power), seeds=2),
    Claim("tda-beta", "table 4b, 6.4",
          "The results hardly depend on the scale beta of the threshold, and beta = 1 is best.",
          "Loss with beta = 1, 0.8, 0.5: 3.1190, 3.1140, 3.1288. The text says that 1 is best, but in its table 0.8 "
          "is best.", "lab",
          "mean losses with beta = 0.3, 0.5, 0.8 and 1: agrees: they are within 2 SD of each other; contradicts: they "
          "are farther apart",
          Reading({"loss": ("excess_loss", f"{BETAS}"), "empty rows": ("empty_rows", f"{BETAS} tda"),
                   "share on the first": ("share_idle", f"{BETAS} tda"), "on copy": ("excess_copy", f"{BETAS} tda")},
                  any_beta),
          note="The recipe tda, shown beside them, learns its beta and starts at 0.1. We test this only in the lab, "
               "because text models of these betas would be trained for this claim alone."),
    Claim("dead-heads", "limitations",
          "A threshold that is too high leaves heads without surviving keys, above all in the first and last layers.",
          "no numbers", "lab",
          "mean share over seeds of rows without surviving keys: agrees: it rises with beta (0.3, 0.5, 0.8, 1); "
          "contradicts: it is flat to within 5 points",
          Reading({"empty": ("empty_rows", BETAS), "idle": ("rows/empty idle", BETAS),
                   "copy": ("rows/empty copy", BETAS), "random, by n": ("kappa 1/empty", "survivors")}, dead_rows),
          note="The lab's model has only one layer, so we do not test which layers have most: text models of these "
               "betas would be trained for this claim alone. The 5 points for \"flat\" are our choice. Single seeds "
               "may fall although the mean rises."),
    Claim("tda-kernel", "1, appendix B, figure 4",
          "The fused TRA kernel is faster than torch's attention at every length, and its lead grows with the length.",
          "Up to 57 % less time and 35 % less memory, in FP32 on an A100. FlashAttention was left out.", "gpu-minutes",
          "forward and backward in FP32, compared with torch's memory-efficient backend, its fastest in FP32, at T = "
          "1k, 4k, 16k: agrees: TRA is faster at every length, and its lead grows with the length; contradicts: TRA "
          "is faster at no length",
          Reading(race_of("kernels-float32", "sdpa efficient"), faster),
          note="The plan does not say what contradicts this claim; \"at no length\" is our choice. The forward and "
               "the backward pass are timed separately and added up. Memory is not measured.",
          elsewhere={"bf16, over flash": Reading(race_of("kernels", "sdpa flash"), faster),
                     "bf16, over cuDNN": Reading(race_of("kernels", "sdpa cudnn"), faster)},
          seeds=1),
]
