"""The log of the ledger: which bounds were changed after numbers had been seen, and what that did to the verdicts.

All bounds were to be fixed before the first run. The first complete run, with seeds 2, 3 and 4, is commit 49b8a29.
Every change since then is a line here, and makes a new version of its claim. Numbers older than a change say so.
"""
from typing import NamedTuple


class Change(NamedTuple):
    """One change of a claim's words or bounds, before and after. verdicts: of the claim, before and after, on the same
    numbers unless `why` says otherwise."""
    claim: str
    date: str
    before: str
    after: str
    verdicts: tuple[str, str]
    why: str


BOS = ("nobos, or without BOS: judged like every other set-up", "not testable if softmax has no sink there",
       "The same condition already held for runs on a GPU.")

LOG = (
    Change("repeat-tokens", "2026-11-22", "BOS is repeated", "an ordinary token is repeated; BOS is a second reading",
           ("contradicts", "mixed"), "A repeated BOS has a sink's key at every position, which is another question. "
           "Measured again with the new input."),
    Change("nondispersive", "2026-11-22", "64 queries at each length, every seed",
           "4 million pairs at each length, means over seeds", ("mixed", "agrees"),
           "With 64 queries the entropies were noise. Measured again with the new number of pairs."),
    Change("tda-sink-growth", "2026-11-22", "contradicts: TDA > 4", "contradicts: TDA > 4 with every seed",
           ("contradicts", "mixed"), "All other bounds ask every seed."),
    Change("focus-balance-costs", "2026-11-22", "the paper's table 9 decides",
           "our sweep decides; table 9 is a second reading", ("contradicts", "not run here"),
           "The first list of claims had the sweep first."),
    Change("focus-collapse", "2026-11-22", "the largest of all seeds and layers",
           "the largest layer, with every seed", ("agrees", "mixed"), "All other bounds ask every seed."),
    Change("fixed-token-16", "2026-11-22", *BOS[:2], ("contradicts", "not testable"), f"The lab without BOS. {BOS[2]}"),
    *(Change(row, "2026-11-22", *BOS[:2], verdicts, f"The variation nobos. {BOS[2]}") for row, *verdicts in (
        ("entmax-keeps-sink", "contradicts", "not testable"), ("zero-v0-harmless", "contradicts", "not testable"),
        ("q-pinned-geometry", "mixed", "not testable"), ("sink-logit-moves-sink", "agrees", "not testable"),
        ("gated-no-sink", "mixed", "not testable"))),
    Change("rela-sink-free", "2026-11-22", "ReLA, TRA and TDA", "ReLA, TRA, TDA, relu / n and softpick",
           ("mixed", "mixed"), "The first list of claims has all five."),
    # An audit of all rows against the papers. Verdicts after it are on new runs (seeds 2, 3, 4) where there are any
    Change("elastic-removed-mass", "2026-11-22", "the lab decides", "small models on text decide",
           ("mixed", "agrees"), "The bounds were meant for text. In the lab nine rows in ten are idle."),
    Change("tda-sink-growth", "2026-11-22", "agrees: softmax >= 4", "not testable: softmax < 4",
           ("mixed", "not testable"), "In two of three seeds softmax has no sink that could grow."),
    Change("focus-collapse", "2026-11-22", "softmax without a balance loss", "softmax with a balance loss",
           ("mixed", "contradicts"), "The paper's 99.4 % is of softmax with a balance loss."),
    Change("focus-sinkhorn-balance", "2026-11-22", "scores of SD 0.25", "scores of SD 1, as a new router has them",
           ("mixed", "mixed"), "Small scores are balanced by any method."),
    Change("focus-zero-degradation", "2026-11-22", "requests of all nine tasks", "requests of the paper's four tasks",
           ("mixed", "agrees"), "BoolQ, which the paper does not use, has half of the long requests."),
    Change("focus-ft-beats-full", "2026-11-22", "agrees: not above full attention by 2 SD",
           "agrees: clearly less than 0.01 nats above it", ("not run here", "not run here"), "Noise must not agree."),
    Change("focus-long-gap", "2026-11-22", "agrees: no growth beyond 2 standard errors",
           "agrees: growth clearly below 0.01 nats", ("not run here", "not run here"), "Noise must not agree."),
    Change("zero-v0-harmless", "2026-11-22", "SmolLM2: all heads",
           "SmolLM2: heads with a sink above 0.75; all heads are a second reading", ("agrees", "agrees"),
           "The reading SmolLM2 alone. The paper's condition is heads with a strong sink. With all heads its models "
           "lose as well."),
    Change("gated-no-sink", "2026-11-22", "the weight on the first token", "this weight times the gate",
           ("contradicts", "agrees"), "A weight under a gate that is shut does nothing."),
    Change("sink-blurs-focus", "2026-11-22", "loss on copy rows at most half of softmax's",
           "more weight on the right key than softmax", ("contradicts", "agrees"),
           "The claim is about the right key, and \"not halved\" is no contradiction."),
    Change("head-pinning", "2026-11-22", "variation over all heads", "variation over the heads that eq. 9 balances",
           ("mixed", "mixed"), "Eq. 9 cannot even out heads that it leaves out."),
    Change("v0-norm-drain", "2026-11-22", "the half without BOS always counts",
           "it cannot be tested if the second layer has no sink", ("mixed", "mixed"),
           "A first token without a sink has no reason to be small."),
    Change("pe-all-sink", "2026-11-22", "one head decides", "eight heads decide", ("agrees", "contradicts"),
           "The one head's ALiBi slope is next to nothing."),
    Change("kbias-shift", "2026-11-22", "key biases", "key biases and the sink token", ("agrees", "mixed"),
           "Table 4 has the sink token as well."),
    Change("sigmoid-none", "2026-11-22", "raw weight", "raw weight over the row's sum where that is above 1",
           ("mixed", "mixed"), "Rows that sum to 3 have larger weights."),
    Change("linear-norm-sink", "2026-11-22", "a sink, and a loss above softmax's by 2 SD",
           "also a larger sink than softmax and normalised sigmoid; the loss clearly above softmax's",
           ("agrees", "mixed"), "The claim says that it is the strongest."),
    Change("sum-dependence", "2026-11-22", "a sink if, and only if, rows sum to one", "no sink without a sum of one",
           ("contradicts", "mixed"), "The paper says \"at least partially\"."),
    *(Change(row, "2026-11-22", "lower means: by 2 SD over seeds", "lower means: the 95 % interval lies below 0",
             ("not run here", "not run here"), "With three seeds, 2 SD are a one-sided p of 0.037, with two of 0.11.")
      for row in ("lazy-ablation", "elastic-offset-order", "tda-loss-order", "tra-closes-gap", "tda-power",
                  "aux-helps")),
    *(Change(row, "2026-11-23", "clearly: by the standard error of one loss",
             "clearly: by that of the differences, window by window", ("not run here", "not run here"),
             "Windows differ much more from each other than two forms of one model do.")
      for row in ("focus-frozen-ppl", "focus-sparser-better", "focus-long-gap")),
    *(Change(row, "2026-11-23", "one number of all seeds together", "a number of each seed", verdicts,
             f"All other bounds ask every seed.{more}")
      for row, verdicts, more in (
          ("tau-by-depth", ("contradicts", "mixed"), " Head 2 of one seed has nothing to do with head 2 of another."),
          ("bias-by-depth", ("agrees", "agrees"), " The bound \"its size >= 0.5\" repeated the first one."),
          ("ior-shape", ("contradicts", "contradicts"), ""), ("tda-depth-profile", ("mixed", "mixed"), ""),
          ("early-layers-active", ("agrees", "agrees"), ""))),
    # A second audit of all rows against the papers, by the same convention
    Change("focus-disjoint", "2026-11-23", "contradicts: subtracting is exact", "also: merging is not",
           ("contradicts", "mixed"), "Half of the claim holds. Measured again, in log-sum-exps as in appendix D, "
                                     "with the same result."),
    Change("focus-collapse", "2026-11-23", "contradicts: softmax with a balance loss does not collapse",
           "also: softmax alone does not, and Sinkhorn does", ("contradicts", "mixed"), "Half of the claim holds."),
    Change("repeat-tokens", "2026-11-23", "RoPE and ALiBi always count", "only if they have a sink on the text as it "
                                                                         "is",
           ("agrees", "mixed"), "The control, the same text without repetition, is new. Measured again with it."),
    Change("lazy-ablation", "2026-11-23", "Elastic-Softmax does not help, with or without the bias",
           "it clearly harms beside the bias", ("mixed", "mixed"),
           "Without the bias the paper's own table has the opposite, and noise must not agree."),
    Change("bias-by-depth", "2026-11-23", "deeper layers decay less", "also: the last third decays by a quarter at "
                                                                      "most",
           ("agrees", "mixed"), "The claim says \"not at all in the top layers\"."),
    Change("ior-shape", "2026-11-23", "recovered: small beyond 100, next to the lowest value",
           "next to the mean at 2 to 10", ("contradicts", "contradicts"), "Nothing had to recover."),
    Change("elastic-offset-order", "2026-11-23", "contradicts: plain tau not clearly above the best",
           "contradicts: plain tau 0.02 below the worst", ("not run here", "not run here"),
           "With two seeds noise would contradict. Three seeds."),
    Change("elastic-offset-order", "2026-11-23", "not testable without a sink in softmax",
           "then only the half about the sink is not", ("not testable", "contradicts"), "An order of losses needs "
                                                                                        "no sink."),
    Change("bias-range", "2026-11-23", "any bias has a reach", "only one that is small at the largest distances",
           ("not run here", "not run here"), "A bias that is noise everywhere would have the largest reach."),
    Change("bias-range", "2026-11-23", "not testable if a bias does not fade",
           "then only the half about its reach is not; contradicts: the slopes double", ("not testable", "contradicts"),
           "The slopes of ALiBi need no bias."),
    Change("streaming-ppl", "2026-11-23", "contradicts: the first tokens do not matter",
           "contradicts: a streaming cache does no harm", ("agrees", "agrees"), "The second is what the claim says."),
    Change("nondispersive", "2026-11-23", "TRA alone", "TRA, TDA and softmax", ("agrees", "agrees"),
           "The claim names all three."),
    Change("tda-depth-profile", "2026-11-23", "at the training length", "in the first 10 tokens", ("mixed", "mixed"),
           "The paper's half is of a sentence of nine words. At full length hardly any weight is left."),
    Change("tda-sink-growth", "2026-11-23", "not testable without a sink in softmax",
           "then only the half about softmax is not", ("not testable", "mixed"),
           "That TDA stays near uniform needs no softmax."),
    Change("tda-loss-order", "2026-11-23", "agrees: TDA not clearly above softmax", "agrees: none below TDA",
           ("not run here", "not run here"), "Noise must not agree."),
    Change("tda-power", "2026-11-23", "agrees: the mean with p = 1 is the highest", "agrees: clearly the highest",
           ("not run here", "not run here"), "Noise must not agree."),
    Change("tda-sparsity", "2026-11-23", "contradicts: the smallest of two differences, over seeds",
           "contradicts: one of them with every seed", ("contradicts", "contradicts"), "All other bounds ask every "
                                                                                       "seed."),
    Change("tra-closes-gap", "2026-11-23", "ReLA's gap grows along the window",
           "its gaps to softmax and to TRA are larger in the second half than in the second quarter",
           ("mixed", "mixed"), "The claim is about the threshold, and the first quarter has little context. Measured "
           "again with TRA by place."),
    Change("focus-frozen-ppl", "2026-11-23", "agrees: clearly below the frozen model",
           "agrees: by 0.01 nats, and below an untrained router and near pairs alone", ("agrees", "contradicts"),
           "0.002 nats of a router that routes nothing agreed. Measured again with the printed gate and a smaller "
           "window."),
    Change("focus-sparser-better", "2026-11-23", "top-2 below top-4 and random groups", "also below top-1",
           ("mixed", "mixed"), "The claim says that top-1 is too few. Measured again with the printed gate and a "
           "smaller window."),
    Change("focus-ft-beats-full", "2026-11-23", "from scratch, top-2 of 4", "fine-tuned, top-1 of 8",
           ("not run here", "not run here"), "These are the paper's models. From scratch is a second reading."),
    Change("focus-balance-costs", "2026-11-23", "table 9: the frozen column", "table 9: both columns",
           ("contradicts", "mixed"), "The claim is about models of which all weights were trained as well."),
    Change("zero-v0-harmless", "2026-11-23", "any head of the lab", "a head with a sink above 0.75",
           ("agrees", "agrees"), "The paper's condition. The lab has no such head without biases or at a third of the "
           "learning rate, nor with every seed of the second table."),
    Change("q-pinned-geometry", "2026-11-23", "queries: an outside sink changes their cosine",
           "queries: the size of their cosine is small", ("agrees", "mixed"),
           "Queries that point the other way are not free."),
    Change("sink-blurs-focus", "2026-11-23", "a gate and a key bias", "also a sink logit and a + 1",
           ("agrees", "agrees"), "They are the paper's own examples. Measured again with them."),
    Change("gated-no-sink", "2026-11-23", "the weight times the gate", "this, and the weight itself",
           ("agrees", "mixed"), "The paper's measure is the weight. Times a gate that is shut it could not be large."),
    Change("gate-identity", "2026-11-23", "error for a first value of a tenth, over the other values",
           "error for a first value of 0", ("agrees", "agrees"), "The claim is about a value of zero. Errors are now "
           "over the norm of the output; those of a tenth and three tenths are shown."),
    Change("early-layers-active", "2026-11-23", "sinks grow with depth", "also: the first layers have little sink",
           ("agrees", "agrees"), "The claim says so."),
    Change("dormant-prunable", "2026-11-23", "cost over that of random heads", "cost in nats",
           ("mixed", "contradicts"), "The claim is \"nothing\", not \"less than others\"."),
    Change("pe-all-sink", "2026-11-23", "relative trains worse than all others", "also: all others train alike",
           ("contradicts", "contradicts"), "The claim says \"only\"."),
    Change("sigmoid-none", "2026-11-23", "weights, and the cost of a zero value", "shares of a row",
           ("mixed", "agrees"), "The paper's measure, for rows of any sum."),
    *(Change(row, "2026-11-23", "norm ratios at most 2", after, ("not run here", "not run here"), why)
      for row, after, why in (
          ("bias-massive", "also: softmax at least 3, or not testable", "Noise must not contradict."),
          ("massive-iff-norm", "a third of softmax's ratio", "The paper's own 6 at 1B would have failed."))),
    Change("sum-dependence", "2026-11-23", "number of exceptions", "share of recipes with a sink, against all others",
           ("mixed", "agrees"), "\"At least partially\" allows for exceptions, and diff_rela's mean weight decided."),
    Change("focus-sparser-better", "2026-11-23", "contradicts: also top-4 less top-3 <= 0", "top-3 less top-2 alone",
           ("mixed", "mixed"), "Top-3 of 4 groups is full attention, as top-4 is, so rounding would decide."),
    Change("focus-small-router", "2026-11-24", "one loss less another",
           "clearly, window by window, and not testable if training the router gains less than 0.01 nats",
           ("not run here", "not run here"), "Windows differ much more from each other than two routers do. If "
           "training changes nothing, size cannot."),
)


def changes_of(claim):
    """The changes of one claim, by its id, oldest first."""
    return [change for change in LOG if change.claim == claim]


def version_of(claim):
    """The version of a claim's bounds: 1, and 1 more for each change."""
    return 1 + len(changes_of(claim))
