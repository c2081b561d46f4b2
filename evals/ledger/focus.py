"""Focus, arXiv 2604.03260."""
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
    """Losses in nats: 0.5 % of perplexity are 0.005."""
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
    """The causal gate or the mask, against the frozen model itself; standard errors over windows."""
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
    """The length at which the ratio gets to 1, between two of these on logarithmic scales; inf if it does not."""
    first = next((i for i, ratio in enumerate(ratios) if ratio >= 1), None)
    if not first:                               # never, or from the shortest on
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
    """Of K = 4 and 8 the worse."""
    ten = np.max([K * n[f"K {K}, N 10"]["focus_sinkhorn"] for K in (4, 8)], 0)
    three = np.min([n[f"K {K}, N 3"]["focus_sinkhorn"] for K in (4, 8)], 0)
    return decide([ten <= 1.5, three >= 0.5], ten > 2, by={"N = 10, times K": ten, "N = 3": three})


def linguistic(n):
    mutual, random = (n["mutual information"][name] for name in ("focus-k8", "focus-k8-random"))
    return decide((mutual >= 0.2) & (n["purity"]["focus-k8"] >= 0.8), mutual <= random + 0.02)


def balance_costs(r):
    return decide(r >= 0, r <= -0.5, by={"rank correlation": r})


def in_our_sweep(n):
    """Of the means of each run, of dominance over its layers."""
    loss, dominance = ([np.mean(values) for values in n[column].values()] for column in ("loss", "dominance"))
    return balance_costs(rank_correlation(loss, dominance))


def in_their_table(n):
    return balance_costs(n["correlation"]["focus_table"])


def merged(n):
    return decide([n["merge error"]["focus_merge"] <= 1e-5, n["subtract cosine"]["focus_merge"] < 0.95],
                  n["subtract cosine"]["focus_merge"] >= 0.999)


# ------------------------------------------------------------------------------------------------------------- the rows

AT_512 = "focus/lengths/1/forms"
SIZES = ("d8", "d16", "d64", "d512", "w16", "w64", "w128", "w256")      # of the router, of the window
SWEEP = " ".join(f"focus-n{count}@gpu" for count in (3, 5, 10, 20))     # iterations of Sinkhorn


def sinkhorn_at(t):
    """What focus-sinkhorn-balance reads at this temperature."""
    return {f"K {K}, N {N}": (f"K {K}, t {t}, N {N}", "focus_sinkhorn") for K in (4, 8) for N in (3, 5, 10, 20)}


CLAIMS = [
    Claim("focus-leak", "section 2, a premise",
          "Training with Sinkhorn over the tokens of a sequence respects causality.",
          "none; the paper does not discuss it", "lab",
          "largest change of earlier tokens' groups when the last token changes: agrees: 0; contradicts: > 1e-6",
          Reading({"change": ("sinkhorn", "focus_leak"), "with potentials": ("potential", "focus_leak")}, leaks),
          note="Potentials, carried from batch to batch, are this repository's causal form. The other half of the "
               "rule, a loss below the entropy of random text, is not needed once shares change."),
    Claim("focus-gate-prunes", "eq. 2", "The gate drives scores across groups to 0, which prunes these pairs.", "none",
          "lab", "share of rows' mass on shut pairs: agrees: < 1 %; contradicts: > 10 %",
          Reading({"mass": ("score", "focus_gate"), "with log gate": ("log", "focus_gate"),
                   "pairs that are shut": ("shut pairs", "focus_gate")}, pruned),
          note="A score of 0 weighs exp(0) = 1. Scores N(0, 1), 4 random groups, 256 tokens; log gate: s + log "
               "sigmoid(z)."),
    Claim("focus-small-router", "section 2, appendix B",
          "16 dimensions are enough for routing, and a small local window is best.",
          "d_g 16, 32, 128, 768: 34.5, 34.5, 34.5, 34.8; w = 16 is 0.8 better than 128, w >= 512 3.7 worse; yet "
          "table 9 is flat in w and best at 512 after fine-tuning",
          "gpu-minutes",
          "perplexity with a frozen model: agrees: d_g = 16 within 0.5 % of full width, and rising with w = 16, 64, "
          "128, 256; contradicts: worse by > 1 %, and falling with w",
          Reading({"loss": ("loss/loss", " ".join(f"focus-{x}@gpu" for x in SIZES))}, small_router), seeds=1),
    Claim("focus-zero-degradation", "tables 1 to 4 and 10, 3.2",
          "Centroids beside frozen weights leave all benchmarks as they were, where LoRA of equal size harms them.",
          "31.1, 39.5, 62.5, 32.6 before and after; LoRA loses 0.4, 1.6, 0.5, 2.1 but reaches perplexity 31.6 "
          "against 34.2; GSM8K 39.3 against 40.6",
          "cpu-minutes",
          "agrees, by construction: 98 % of the requests or more fit into the window of 128, and logits of such "
          "texts are unchanged by random centroids (1e-4); contradicts: they change by more than 1e-2",
          Reading({"fit": ("within_window/fit", "smollm2"), "difference": ("within_window/difference", "smollm2")},
                  by_construction),
          note="Where it agrees, the claim says nothing about Focus: nothing is routed. SmolLM2's tokens; needs "
               "python data/benchmarks.py."),
    Claim("focus-frozen-ppl", "tables 1, 2, 3, 7, 9",
          "Centroids alone improve the perplexity of a frozen small model.",
          "42.8 -> 36.2, 34.2, 34.5, 36.8 to 42.4, or 41.3 with the mask: five tables; 100K parameters fit no "
          "formula",
          "gpu-minutes",
          "1000 steps on a frozen model: agrees: causal gate or top-2 mask below it beyond 2 standard errors; "
          "contradicts: none, or Sinkhorn over the sequence alone",
          Reading({"frozen": (f"{AT_512}/full/loss", "focus-frozen@gpu"),
                   "error": (f"{AT_512}/full/loss_error", "focus-frozen@gpu"),
                   "causal gate": (f"{AT_512}/soft/loss", "focus-frozen@gpu"),
                   "top-2": (f"{AT_512}/k=2/loss", "focus-frozen@gpu"),
                   "sinkhorn gate": (f"{AT_512}/soft/loss", "focus-frozen-sinkhorn@gpu")},
                  frozen_better),
          seeds=1),
    Claim("focus-ft-beats-full", "table 5, 3.4",
          "Trained fully, sparse Focus beats full attention at 124M, and matches it above and from scratch.",
          "30.3 against 31.4, 20.7/20.4, 19.7/19.3; from scratch 13.82/13.89; full fine-tuning is 36.4 in table 1",
          "gpu-minutes",
          "from scratch, with the mask of inference: agrees: <= full + 2 SD; contradicts: worse beyond 2 SD",
          Reading({"full": ("loss/loss", "softmax@gpu"), "gate": ("loss/loss", "focus@gpu"),
                   "top-2": ("loss-top2/loss", "focus@gpu")},
                  as_good_as_full)),
    Claim("focus-long-gap", "3.5", "Centroids trained at 1024 serve to 8192: what top-2 costs does not grow.",
          "gaps of 0.26, 0.29, 0.31, 0.47, which grow; base Mistral is 6.13 here, 10.8 in tables 2 and 7",
          "gpu-minutes",
          "gap to full attention: agrees: no more at the longer length within 2 standard errors; contradicts: more",
          Reading({**{f"{name} at {T}": (f"focus/lengths/{i}/forms/{form}/loss", "focus-short@gpu")
                      for i, T in enumerate((256, 512)) for name, form in (("full", "full"), ("top-2", "k=2"))},
                   "error": (f"{AT_512}/k=2/loss_error", "focus-short@gpu")},
                  gap_stays),
          note="Centroids trained at 256 beside a model of 512, tested at both: beyond 512 the model itself would "
               "fail.",
          seeds=1),
    Claim("focus-speed", "tables 6 and 7, 3.6, section 7",
          "Two flash calls are up to 8.6 times as fast at 1M tokens, and no faster below 4k to 16k.",
          "K = 8: 0.2, 0.6, 1.8, 3.1, 4.7, 7.6, 8.6 at 1k to 1M; above the bound K; table 7 has 2.0 to 4.0 at 1,024 "
          "tokens",
          "gpu-minutes",
          "K = 8, top-1, sorting included: agrees: even between 4k and 16k and >= 5 x at 256k; contradicts: even "
          "above 32k only",
          Reading({f"{what} {T}": (f"lengths/{T}/sparse/{case}/ratio", "focus-speed")
                   for case, what in ((2, "T"), (3, "top-2, T"))
                   for T in (1024, 4096, 8192, 16_384, 32_768, 65_536, 262_144)},
                  speeds_up),
          note="Even: between two lengths by interpolation of logarithms.",
          seeds=1),
    Claim("focus-sparser-better", "table 7, 3.6",
          "Fewer groups a token are better: top-2 beats 3, 4 and the pretrained model; 1 is too few.",
          "GPT-2, 1 to 4: 82.9, 41.3, 47.2, 47.2, base 42.8; Mistral 16.2, 11.6, 10.8, 10.8, where sparser is worse",
          "gpu-minutes",
          "agrees: top-2 below top-4 and below random groups, beyond 2 standard errors; contradicts: loss falls with "
          "k",
          Reading({**{f"top-{k}": (f"{AT_512}/k={k}/loss", "focus-frozen@gpu") for k in (1, 2, 3, 4)},
                   "full": (f"{AT_512}/full/loss", "focus-frozen@gpu"),
                   "random, top-2": (f"{AT_512}/k=2/loss", "focus-random@gpu"),
                   "error": (f"{AT_512}/k=2/loss_error", "focus-frozen@gpu"),
                   "window alone": ("loss-window128/loss", "softmax@gpu")},
                  sparser_better),
          seeds=1),
    Claim("focus-topk-share", "1, table 7, 3.2, 3.5",
          "Top-2 of 4 groups keeps half of the distant pairs; top-3 restores the pretrained model, so routing loses "
          "nothing.",
          "half, 60 % (GPT-2), 73 % (Mistral); k = 3 equals k = 4, but 47.2 against 42.8 pretrained", "lab",
          "random balanced groups: agrees: 45 to 75 % kept; contradicts: >= 80 %",
          Reading({"pairs kept": ("pairs, top-2", "focus_topk"), "top-3": ("pairs, top-3", "focus_topk"),
                   "top-3 against full": ("difference, top-3", "focus_topk")}, half_kept),
          note="Two sets of 3 of 4 always meet, so top-3 is full attention: true, and empty."),
    Claim("focus-collapse", "section 4, table 8",
          "Routing by softmax collapses into one group, by Sinkhorn it does not.",
          "K = 8: 99.4 against 15.9 % after full fine-tuning; by step 600", "cpu-minutes",
          "largest group's share in any layer, with every seed, all weights trained: agrees: softmax > 80 % and "
          "Sinkhorn < 30 %; contradicts: softmax < 40 %",
          Reading({"largest group": ("groups/layers/*/dominance",
                                     "focus-softmax@text focus-entropy@text focus-sinkhorn@text")},
                  collapses),
          note="Read at the end, after 600 steps, instead of every 50. Until it was seen that other rules ask every "
               "seed and this one the largest of all, it counted as agreeing."),
    Claim("focus-sinkhorn-balance", "sections 2 and 4, table 9",
          "Ten iterations of Sinkhorn balance the groups by construction, three do not.",
          "N = 3, 5, 10, 20: 95 / 97, 69 / \"5\", 21 / 20, 14 / 14 % (K = 8: below 12.5 is impossible); the same "
          "setting has 24 / 23, 26 / 23, 21 / 20 and 14.6 / 15.9",
          "lab", "largest group, K = 4 and 8: agrees: N = 10 <= 1.5 / K and N = 3 >= 50 %; contradicts: N = 10 > 2 / K",
          Reading(sinkhorn_at(0.1), balances),
          note="t = 0.1, as printed. Scores N(0, 0.25), one group's 0.5 higher, over t; 1,024 tokens.",
          elsewhere={"t = 0.5": Reading(sinkhorn_at(0.5), balances)}),
    Claim("focus-groups-linguistic", "section 5", "Groups are linguistic classes.",
          "punctuation 96 % pure, confidence 0.89, groups of 10 to 16 %", "gpu-minutes",
          "K = 8: agrees: adjusted mutual information with classes by rule >= 0.2 and punctuation >= 80 % pure; "
          "contradicts: no more than random groups + 0.02",
          Reading({column: (f"classes/{column}", "focus-k8@gpu focus-k8-random@gpu")
                   for column in ("mutual information", "purity")},
                  linguistic),
          note="The most telling layer. Classes of a byte: punctuation, digit, space, or of its word: article, "
               "preposition, capitalised, other. Purity: of the group that has most of the punctuation. Adjusted by "
               "groups of the same sizes by chance; random groups have random centroids. Token frequency is left "
               "out: of bytes it is the class.",
          seeds=1),
    Claim("focus-balance-costs", "table 9, appendix A", "Sparser, balanced routing is what improves quality.",
          "frozen 35.8 at 95 % dominance, 42.4 at 21 %; fine-tuned best at 97 %; the text concedes N = 3 alone",
          "gpu-minutes",
          "rank correlation of perplexity and the largest group's share: agrees: >= 0; contradicts: <= -0.5",
          Reading({"loss": ("loss/loss", SWEEP), "dominance": ("groups/layers/*/dominance", SWEEP)}, in_our_sweep),
          note="Centroids beside a frozen model, N = 3, 5, 10, 20. In their own 16 rows dominance and low perplexity "
               "go together.",
          elsewhere={"their table 9": Reading({"correlation": ("correlation", "focus_table")}, in_their_table)},
          seeds=1),
    Claim("focus-disjoint", "appendix D",
          "Same-group pairs and near pairs of other groups merge exactly; to subtract the overlap instead is "
          "catastrophic.",
          "cosine 1.0000 against 0.79", "lab",
          "agrees: merge exact to 1e-5 and subtraction's cosine < 0.95; contradicts, of the second half: >= 0.999",
          Reading({"merge error": ("merge float32 error", "focus_merge"),
                   "subtract cosine": ("subtract float16 cosine", "focus_merge"),
                   "in float32": ("subtract float32 cosine", "focus_merge")}, merged),
          note="float16 stands for the worst case of subtraction, float32 for the merge."),
]
