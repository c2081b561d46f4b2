"""The claims of Focus, arXiv 2604.03260."""
import numpy as np

from evals.ledger.claim import Claim, Reading, below, decide, rank_correlation

TITLE = "[3] Focus"

# ------------------------------------------------------------------------------------------------------------- verdicts


def leaks(n):
    change = n["change"]["focus_leak"]
    return decide(change == 0, change > 1e-6)


def pruned(n):
    mass = n["mass"]["focus_gate"]
    return decide(mass < 0.01, mass > 0.10)


def small_router(n):
    """The losses are in nats, so 0.5 % of perplexity is a difference of 0.005."""
    loss = {name: np.mean(values) for name, values in n["loss"].items()}
    narrow, full = loss["focus-d16"], loss["focus-d512"]
    windows = [loss[f"focus-w{w}"] for w in (16, 64, 128, 256)]
    return decide(narrow <= full + 0.005 and windows == sorted(windows),
                  narrow > full + 0.01 and windows == sorted(windows, reverse=True),
                  by={"d_g 16 less full width": narrow - full, "by window": windows})


def by_construction(n):
    fit, difference = n["fit"]["smollm2"], n["difference"]["smollm2"]
    return decide((fit >= 0.98) & (difference <= 1e-4), difference > 1e-2)


def frozen_better(n):
    """Compares the causal gate and the top-2 mask with the frozen model itself. Standard errors are over windows."""
    base, error = n["frozen"]["focus-frozen"], 2 * n["error"]["focus-frozen"]
    honest = [n["causal gate"]["focus-frozen"], n["top-2"]["focus-frozen"]]
    better = [np.mean(loss) < np.mean(base - error) for loss in honest]
    return decide(any(better), not any(better),
                  by={"frozen": base, "2 standard errors": error, "causal gate": honest[0], "top-2": honest[1]})


def as_good_as_full(n):
    worse = below(n["full"]["softmax"], n["top-2"]["focus"])
    return decide(not worse, worse)


def gap_stays(n):
    near, far = (n[f"top-2 at {T}"]["focus-short"] - n[f"full at {T}"]["focus-short"] for T in (256, 512))
    slope, error = np.mean(far - near), 2 * np.mean(n["error"]["focus-short"])
    return decide(slope <= error, slope > error,
                  by={"gap at 256": near, "gap at 512": far, "2 standard errors": error})


def speeds_up(n):
    at = {int(column.split()[1]): np.mean(n[column]["focus-speed"]) for column in n if column.startswith("T ")}
    even = break_even(list(at), list(at.values()))
    return decide(4096 <= even <= 16_384 and at[262_144] >= 5, even > 32_768,
                  by={"even at T": even, "times as fast at 262144": at[262_144]})


def break_even(lengths, ratios):
    """The length at which the ratio reaches 1, interpolated on logarithmic scales. inf if it never does."""
    first = next((i for i, ratio in enumerate(ratios) if ratio >= 1), None)
    if not first:                               # never, or already at the shortest length
        return np.inf if first is None else lengths[0]
    around = slice(first - 1, first + 1)
    return float(np.exp(np.interp(0, np.log(ratios[around]), np.log(lengths[around]))))


def sparser_better(n):
    loss = {k: np.mean(n[f"top-{k}"]["focus-frozen"]) for k in (1, 2, 3, 4)}
    random, error = np.mean(n["random, top-2"]["focus-random"]), 2 * np.mean(n["error"]["focus-frozen"])
    falls = list(loss.values()) == sorted(loss.values(), reverse=True)
    return decide(loss[2] < loss[4] - error and loss[2] < random - error, falls,
                  by={"top-1 to top-4": list(loss.values()), "random, top-2": random, "2 standard errors": error})


def half_kept(n):
    kept = n["pairs kept"]["focus_topk"]
    return decide((kept >= 0.45) & (kept <= 0.75), kept >= 0.8)


def collapses(n):
    share = {name: np.max(values, 1) for name, values in n["largest group"].items()}                # over layers
    return decide([share["focus-softmax"] > 0.8, share["focus-sinkhorn"] < 0.3], share["focus-softmax"] < 0.4,
                  by={f"{name}, largest": values for name, values in share.items()})


def balances(n):
    """The worse of K = 4 and K = 8 decides."""
    ten = np.max([K * n[f"K {K}, N 10"]["focus_sinkhorn"] for K in (4, 8)], 0)
    three = np.min([n[f"K {K}, N 3"]["focus_sinkhorn"] for K in (4, 8)], 0)
    return decide([ten <= 1.5, three >= 0.5], ten > 2, by={"N = 10, times K": ten, "N = 3": three})


def linguistic(n):
    mutual, random = (n["mutual information"][name] for name in ("focus-k8", "focus-k8-random"))
    return decide((mutual >= 0.2) & (n["purity"]["focus-k8"] >= 0.8), mutual <= random + 0.02)


def balance_costs(r):
    return decide(r >= 0, r <= -0.5, by={"rank correlation": r})


def in_our_sweep(n):
    """Correlates the mean loss of each run with its mean dominance over layers."""
    loss, dominance = ([np.mean(values) for values in n[column].values()] for column in ("loss", "dominance"))
    return balance_costs(rank_correlation(loss, dominance))


def in_their_table(n):
    return balance_costs(n["correlation"]["focus_table"])


def merged(n):
    return decide([n["merge error"]["focus_merge"] <= 1e-5, n["subtract cosine"]["focus_merge"] < 0.95],
                  n["subtract cosine"]["focus_merge"] >= 0.999)


# ------------------------------------------------------------------------------------------------------------- the rows

AT_512 = "focus/lengths/1/forms"
SIZES = ("d8", "d16", "d64", "d512", "w16", "w64", "w128", "w256")      # router dimensions, then window sizes
SWEEP = " ".join(f"focus-n{count}@gpu" for count in (3, 5, 10, 20))     # numbers of Sinkhorn iterations


def sinkhorn_at(t):
    """The columns that focus-sinkhorn-balance reads at one temperature."""
    return {f"K {K}, N {N}": (f"K {K}, t {t}, N {N}", "focus_sinkhorn") for K in (4, 8) for N in (3, 5, 10, 20)}


CLAIMS = [
    Claim("focus-leak", "section 2, a premise",
          "Training with Sinkhorn over the tokens of a sequence respects causality.",
          "No numbers; the paper does not discuss it.", "lab",
          "largest change of earlier tokens' group shares when the last token changes: agrees: it is 0; contradicts: "
          "it is above 1e-6",
          Reading({"change": ("sinkhorn", "focus_leak"), "with potentials": ("potential", "focus_leak")}, leaks),
          note="Potentials, which are carried from batch to batch, are the causal form of this repository. The plan's "
               "second condition, a loss below the entropy of random text, is not needed once the shares change."),
    Claim("focus-gate-prunes", "eq. 2", "The gate drives the scores between groups to 0, which prunes these pairs.",
          "no numbers", "lab",
          "share of a row's mass on pairs whose gate is shut: agrees: it is below 1 %; contradicts: it is above 10 %",
          Reading({"mass": ("score", "focus_gate"), "with log gate": ("log", "focus_gate"),
                   "pairs that are shut": ("shut pairs", "focus_gate")}, pruned),
          note="A score of 0 still has the weight exp(0) = 1. The scores are drawn from N(0, 1), with 4 random groups "
               "and 256 tokens. The log gate computes s + log sigmoid(z)."),
    Claim("focus-small-router", "section 2, appendix B",
          "16 dimensions are enough for routing, and a small local window is best.",
          "Perplexity with d_g = 16, 32, 128, 768: 34.5, 34.5, 34.5, 34.8. A window of w = 16 is 0.8 better than 128, "
          "and w >= 512 is 3.7 worse. But in table 9 the window has little effect, and after fine-tuning 512 is best.",
          "gpu-minutes",
          "perplexity beside a frozen model: agrees: with d_g = 16 it is within 0.5 % of that with full width, and it "
          "rises with w = 16, 64, 128, 256; contradicts: with d_g = 16 it is worse by more than 1 %, and it falls "
          "with w",
          Reading({"loss": ("loss/loss", " ".join(f"focus-{x}@gpu" for x in SIZES))}, small_router), seeds=1),
    Claim("focus-zero-degradation", "tables 1 to 4 and 10, 3.2",
          "Centroids beside frozen weights leave all benchmarks unchanged, where LoRA of equal size harms them.",
          "GPT-2 has 31.1, 39.5, 62.5, 32.6 before and after. LoRA loses 0.4, 1.6, 0.5, 2.1, but it reaches a "
          "perplexity of 31.6 against 34.2. GSM8K has 39.3 against 40.6.", "cpu-minutes",
          "agrees: by construction, since at least 98 % of the requests fit into the window of 128, and random "
          "centroids leave the logits of such texts unchanged (to 1e-4); contradicts: the logits change by more than "
          "1e-2",
          Reading({"fit": ("within_window/fit", "smollm2"), "difference": ("within_window/difference", "smollm2")},
                  by_construction),
          note="If the rule agrees, the claim says nothing about Focus, because nothing is routed. The requests are "
               "counted in SmolLM2's tokens. Run python data/benchmarks.py first."),
    Claim("focus-frozen-ppl", "tables 1, 2, 3, 7, 9",
          "Training centroids alone improves the perplexity of a frozen small model.",
          "The perplexity falls from 42.8, but five tables differ: 36.2, 34.2, 34.5, 36.8 to 42.4, and 41.3 with the "
          "mask. The 100K parameters fit no formula.", "gpu-minutes",
          "loss after 1000 steps beside a frozen model: agrees: the causal gate or the top-2 mask is below the frozen "
          "model by more than 2 standard errors; contradicts: neither is, even if Sinkhorn over the sequence is",
          Reading({"frozen": (f"{AT_512}/full/loss", "focus-frozen@gpu"),
                   "error": (f"{AT_512}/full/loss_error", "focus-frozen@gpu"),
                   "causal gate": (f"{AT_512}/soft/loss", "focus-frozen@gpu"),
                   "top-2": (f"{AT_512}/k=2/loss", "focus-frozen@gpu"),
                   "sinkhorn gate": (f"{AT_512}/soft/loss", "focus-frozen-sinkhorn@gpu")},
                  frozen_better),
          seeds=1),
    Claim("focus-ft-beats-full", "table 5, 3.4",
          "If all weights are trained, sparse Focus beats full attention at 124M and matches it in larger models and "
          "from scratch.",
          "Perplexity is 30.3 against 31.4 at 124M, 20.7/20.4 and 19.7/19.3 in larger models, and 13.82/13.89 from "
          "scratch. Full fine-tuning has 36.4 in table 1.", "gpu-minutes",
          "loss after training from scratch, with the mask of inference: agrees: it is at most that of full attention "
          "+ 2 SD; contradicts: it is higher",
          Reading({"full": ("loss/loss", "softmax@gpu"), "gate": ("loss/loss", "focus@gpu"),
                   "top-2": ("loss-top2/loss", "focus@gpu")},
                  as_good_as_full)),
    Claim("focus-long-gap", "3.5",
          "Centroids trained at 1024 work up to 8192, and the cost of top-2 does not grow with the length.",
          "The gaps are 0.26, 0.29, 0.31, 0.47, so they grow. The base Mistral has a perplexity of 6.13 here but 10.8 "
          "in tables 2 and 7.", "gpu-minutes",
          "gap in loss to full attention: agrees: it is larger at the longer length by at most 2 standard errors; "
          "contradicts: by more",
          Reading({**{f"{name} at {T}": (f"focus/lengths/{i}/forms/{form}/loss", "focus-short@gpu")
                      for i, T in enumerate((256, 512)) for name, form in (("full", "full"), ("top-2", "k=2"))},
                   "error": (f"{AT_512}/k=2/loss_error", "focus-short@gpu")},
                  gap_stays),
          note="The centroids are trained at 256 beside a model trained at 512, and tested at both lengths. Beyond "
               "512 the model itself would fail.",
          seeds=1),
    Claim("focus-speed", "tables 6 and 7, 3.6, section 7",
          "Two flash-attention calls are up to 8.6 times as fast as full attention at 1M tokens, and no faster below "
          "4k to 16k.",
          "Speed-up with K = 8: 0.2, 0.6, 1.8, 3.1, 4.7, 7.6, 8.6 at 1k to 1M tokens. The last is above the bound K. "
          "Table 7 has 2.0 to 4.0 at 1,024 tokens.", "gpu-minutes",
          "speed-up with K = 8 and top-1, sorting included: agrees: it reaches 1 between 4k and 16k, and is at least "
          "5 at 256k; contradicts: it reaches 1 only above 32k",
          Reading({f"{what} {T}": (f"lengths/{T}/sparse/{case}/ratio", "focus-speed")
                   for case, what in ((2, "T"), (3, "top-2, T"))
                   for T in (1024, 4096, 8192, 16_384, 32_768, 65_536, 262_144)},
                  speeds_up),
          note="The length at which the speed-up reaches 1 is interpolated on logarithmic scales.",
          seeds=1),
    Claim("focus-sparser-better", "table 7, 3.6",
          "Fewer groups per token are better: top-2 beats top-3, top-4 and the pretrained model, but top-1 is too "
          "few.",
          "Perplexity with top-1 to top-4: GPT-2 has 82.9, 41.3, 47.2, 47.2, and 42.8 as pretrained. Mistral has "
          "16.2, 11.6, 10.8, 10.8, so there sparser is worse.", "gpu-minutes",
          "agrees: the loss with top-2 is below the losses with top-4 and with random groups by more than 2 standard "
          "errors; contradicts: the loss falls with k",
          Reading({**{f"top-{k}": (f"{AT_512}/k={k}/loss", "focus-frozen@gpu") for k in (1, 2, 3, 4)},
                   "full": (f"{AT_512}/full/loss", "focus-frozen@gpu"),
                   "random, top-2": (f"{AT_512}/k=2/loss", "focus-random@gpu"),
                   "error": (f"{AT_512}/k=2/loss_error", "focus-frozen@gpu"),
                   "window alone": ("loss-window128/loss", "softmax@gpu")},
                  sparser_better),
          seeds=1),
    Claim("focus-topk-share", "1, table 7, 3.2, 3.5",
          "Top-2 of 4 groups keeps half of the distant pairs, and top-3 restores the pretrained model, so routing "
          "loses nothing.",
          "Half in the text, 60 % (GPT-2), 73 % (Mistral). k = 3 equals k = 4, but both have 47.2 against 42.8 for "
          "the pretrained GPT-2.", "lab",
          "distant pairs kept with random balanced groups: agrees: 45 to 75 % are kept; contradicts: at least 80 % "
          "are kept",
          Reading({"pairs kept": ("pairs, top-2", "focus_topk"), "top-3": ("pairs, top-3", "focus_topk"),
                   "top-3 against full": ("difference, top-3", "focus_topk")}, half_kept),
          note="Two sets of 3 out of 4 groups always overlap, so top-3 is full attention. The second half is true but "
               "empty."),
    Claim("focus-collapse", "section 4, table 8",
          "Routing by softmax collapses into one group, but routing by Sinkhorn does not.",
          "With K = 8, softmax has 99.4 % and Sinkhorn 15.9 % after full fine-tuning. Softmax collapses by step 600.",
          "cpu-minutes",
          "share of the largest group in any layer, with every seed, after training all weights: agrees: it is above "
          "80 % with softmax and below 30 % with Sinkhorn; contradicts: it is below 40 % with softmax",
          Reading({"largest group": ("groups/layers/*/dominance",
                                     "focus-softmax@text focus-entropy@text focus-sinkhorn@text")},
                  collapses),
          note="We read the share at the end, after 600 steps, instead of every 50. The rule first took the largest "
               "share of all seeds, and the verdict was \"agrees\". Now every seed must pass, as in the other rules."),
    Claim("focus-sinkhorn-balance", "sections 2 and 4, table 9",
          "Ten iterations of Sinkhorn balance the groups by construction, but three do not.",
          "Largest group with N = 3, 5, 10, 20: 95 / 97, 69 / \"5\", 21 / 20, 14 / 14 %. With K = 8 a share below "
          "12.5 % is impossible. The same setting also has 24 / 23, 26 / 23, 21 / 20 and 14.6 / 15.9 %.", "lab",
          "share of the largest group with K = 4 and 8: agrees: it is at most 1.5 / K with N = 10 and at least 50 % "
          "with N = 3; contradicts: it is above 2 / K with N = 10",
          Reading(sinkhorn_at(0.1), balances),
          note="t = 0.1, as in the paper. The scores of 1,024 tokens are Gaussian (SD 0.25), 0.5 higher for one "
               "group, and divided by t.",
          elsewhere={"t = 0.5": Reading(sinkhorn_at(0.5), balances)}),
    Claim("focus-groups-linguistic", "section 5", "The groups are linguistic classes.",
          "Punctuation is 96 % pure, the confidence is 0.89, and each group has 10 to 16 % of tokens.", "gpu-minutes",
          "adjusted mutual information with classes, K = 8: agrees: it is at least 0.2, and punctuation is at least "
          "80 % pure; contradicts: it is no more than that of random groups + 0.02",
          Reading({column: (f"classes/{column}", "focus-k8@gpu focus-k8-random@gpu")
                   for column in ("mutual information", "purity")},
                  linguistic),
          note="We use the layer with the highest mutual information. A byte is punctuation, a digit, a space, or has "
               "the class of its word: article, preposition, capitalised, other. Purity is the share of punctuation "
               "in the group that has most of it. \"Adjusted\" means minus the value of chance groups of the same "
               "sizes. The random groups of the rule have random centroids. Token frequency is left out, because for "
               "bytes it is the class.",
          seeds=1),
    Claim("focus-balance-costs", "table 9, appendix A", "Sparser and more balanced routing is what improves quality.",
          "With frozen weights, the perplexity is 35.8 at 95 % dominance and 42.4 at 21 %. After fine-tuning, 97 % is "
          "best. The text concedes only N = 3.", "gpu-minutes",
          "rank correlation of perplexity and the share of the largest group: agrees: it is at least 0; contradicts: "
          "it is at most -0.5",
          Reading({"loss": ("loss/loss", SWEEP), "dominance": ("groups/layers/*/dominance", SWEEP)}, in_our_sweep),
          note="We train centroids beside a frozen model, with N = 3, 5, 10, 20. In the paper's own 16 rows, high "
               "dominance (a large share of the largest group) goes with low perplexity.",
          elsewhere={"their table 9": Reading({"correlation": ("correlation", "focus_table")}, in_their_table)},
          seeds=1),
    Claim("focus-disjoint", "appendix D",
          "Same-group pairs and near pairs of other groups can be merged exactly, while subtracting the overlap "
          "instead is catastrophic.", "a cosine of 1.0000 against 0.79", "lab",
          "agrees: merging is exact to within 1e-5, and subtracting has a cosine below 0.95; contradicts: subtracting "
          "has a cosine of at least 0.999 (second half of the claim)",
          Reading({"merge error": ("merge float32 error", "focus_merge"),
                   "subtract cosine": ("subtract float16 cosine", "focus_merge"),
                   "in float32": ("subtract float32 cosine", "focus_merge")}, merged),
          note="Subtraction is tested in float16, its worst case, and merging is tested in float32."),
]
