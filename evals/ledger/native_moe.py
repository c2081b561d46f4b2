"""The claims of The Attention Sink as Native Mixture-of-Experts."""
import numpy as np

from evals.ledger.claim import GPU_GATE, Claim, Reading, below, decide, layer_means, rank_correlation

TITLE = "[4] Attention Sink as Native MoE"

# ------------------------------------------------------------------------------------------------------------- verdicts


def drained(n):
    """Reads the first layer of a model with BOS, and the first and second layers of one without BOS."""
    with_bos = n["with BOS"]["softmax"]
    first, second = (n[f"no BOS, layer {layer}"]["two-layers"] for layer in (1, 2))
    return decide([with_bos <= 0.3, first >= 0.5, second <= 0.3], with_bos >= 0.8)


def drained_in_depth(n):
    """For text models without BOS: compares the median of the first layer with that of all later layers."""
    (ratio,) = n["|v0|/|v|"].values()           # (seeds, layers, heads)
    first, later = np.median(ratio[:, 0]), np.median(ratio[:, 1:])
    return decide(first >= 0.5 and later <= 0.3, np.median(ratio) >= 0.8,
                  by={"median of layer 1": first, "of all later": later})


def harmless(n):
    zero, hide = n["zero"], n["hide"]
    return decide([(zero[name] <= 0.1 * hide[name]) & (zero[name] <= 0.02) for name in zero],
                  [zero[name] >= 0.5 * hide[name] for name in zero])


def pinned(n):
    queries, keys = n["cos q"], n["cos k"]
    outside = ("sink", "softmax1")
    freed = [(queries[name] < queries["softmax"] - 0.1) & (keys[name] > keys["softmax"] + 0.1) for name in outside]
    alike = [(np.abs(queries[name] - queries["softmax"]) <= 0.1) & (np.abs(keys[name] - keys["softmax"]) <= 0.1)
             for name in outside]
    return decide([queries["softmax"] >= 0.5, keys["softmax"] <= -0.2, *freed], alike)


def blurs(n):
    left = {f"{name} over softmax": n["copy loss"][name] / n["copy loss"]["softmax"]
            for name in ("gated", "softpick", "k_bias", "sigmoid")}
    sharper = [name for name, ratio in left.items() if np.all(ratio <= 0.5)]
    return decide(len(sharper) == 4, len(sharper) < 2, by=left)


def moved(n):
    pairs = [(n["virtual"][name], n["first"][name]) for name in n["virtual"]]
    return decide([(virtual >= 0.5) & (first <= 0.05) for virtual, first in pairs],
                  [(first >= 0.5) & (virtual <= 0.05) for virtual, first in pairs])


def gate_for_sink(n):
    times, gap = n["x uniform"]["gated"], n["gate on copy"]["gated"] - n["gate on idle"]["gated"]
    return decide((times <= 2.5) & (gap >= 0.5), times >= 5, by={"x uniform": times, "gate further open by": gap})


def identical(n):
    exact, near = n["sink attention"]["gate_identity"], n["drained to 0.1"]["gate_identity"]
    return decide((exact <= 1e-12) & (near <= 0.1), (exact > 1e-12) | (near > 0.1))


def grows_with_depth(n):
    (alpha,) = n["sink"].values()                                       # (seeds, layers, heads)
    means = layer_means(alpha)
    r = rank_correlation(range(len(means)), means)
    return decide(r >= 0.5, r <= -0.5, by={"rank correlation of depth and weight on the sink": r})


def same_heads(n):
    (r,), (apart,) = n["correlation"].values(), n["difference"].values()
    return decide((r >= 0.9) & (apart <= 0.05), r <= 0.6)


def larger_more(n):
    shares = [np.mean(values) for values in n["dormant"].values()]
    return decide(shares == sorted(shares), shares == sorted(shares, reverse=True))


def prunable(n):
    (most,), (chance,) = n["most sink"].values(), n["random"].values()
    return decide(most <= chance / 3, most >= chance, by={"over random ones": most / chance})


def pinning(n):
    alpha = {name: values.mean((1, 2)) for name, values in n["sink"].items()}
    used = {name: 1 - values for name, values in n["sink"].items()}
    cv = {name: values.std((1, 2)) / values.mean((1, 2)) for name, values in used.items()}
    plain, all_heads, routed = "heads-plain", "heads-eq8", "heads-eq9"
    lowered, left = alpha[all_heads] / alpha[plain], alpha[routed] / alpha[plain]
    return decide([lowered <= 0.7, left >= 0.9, cv[routed] < cv[plain]], lowered >= 0.9,
                  by={"weight on the sink, eq. 8 over none": lowered, "eq. 9 over none": left,
                      "variation, eq. 9 over none": cv[routed] / cv[plain]})


def balanced_is_better(n):
    loss = n["loss"]
    return decide(any(below(loss[name], loss["softmax"]) for name in loss if name != "softmax"),
                  all(below(loss["softmax"], loss[name]) for name in loss if name != "softmax"))


# ------------------------------------------------------------------------------------------------------------- the rows

FOUR = "softmax gated softpick k_bias sigmoid"
LAB_ALONE = ("We test this only in the lab, because text models of these recipes would be trained for this claim "
             "alone.")
DEPTH = {"sink": ("heads/maps/alpha_sink", "softmax@gpu"), "local": ("heads/maps/alpha_local", "softmax@gpu"),
         "sigma2": ("heads/maps/sigma2", "softmax@gpu"), **GPU_GATE}
SMOLLM2_DEPTH = {column: (f"public-heads/maps/{name}", "smollm2")
                 for column, name in (("sink", "alpha_sink"), ("local", "alpha_local"), ("sigma2", "sigma2"))}

CLAIMS = [
    Claim("v0-norm-drain", "2.1, figures 2, 7 to 9",
          "The value norm of the first token is near zero, but without BOS not yet in the first layer.",
          "only figures, for six models", "lab",
          "value norm of the first token divided by that of the others: agrees: with BOS it is at most 0.3 in layer "
          "1, and without BOS it is at least 0.5 in layer 1 and at most 0.3 later; contradicts: with BOS it is at "
          "least 0.8",
          Reading({"with BOS": ("value_norm_ratio", "softmax"),
                   "no BOS, layer 1": ("probe/layers/0/value_norm_ratio/0", "two-layers@nobos"),
                   "no BOS, layer 2": ("probe/layers/1/value_norm_ratio/0", "two-layers@nobos")},
                  drained),
          elsewhere={"SmolLM2, no BOS": Reading({"|v0|/|v|": ("public-probe/layers/*/value_norm_ratio", "smollm2")},
                                                drained_in_depth),
                     "gpu, no BOS": Reading({"|v0|/|v|": ("probe/layers/*/value_norm_ratio", "softmax@gpu")} | GPU_GATE,
                                            drained_in_depth)}),
    Claim("zero-v0-harmless", "table 1, 2.1", "Setting the first token's value to zero does no harm.",
          "The average of Qwen3-8B is 70.36. It is 64.10 with this value zeroed in all heads, and 70.38 with it "
          "zeroed in heads with a strong sink. The paper calls this comparable, but with all heads MMLU falls from "
          "75.42 to 50.27.", "lab",
          "increase of the loss: agrees: it is at most 10 % of the cost of hiding the first key, and at most 0.02; "
          "contradicts: it is at least 50 % of that cost",
          Reading({"zero": ("zero_cost", "softmax"), "hide": ("hide_cost", "softmax")}, harmless),
          variations=("nobos", "nobias", "tied", "lr3e-3"),
          elsewhere={"SmolLM2": Reading({"hide": ("public-heads/cost/changes/0/loss_change", "smollm2"),
                                         "another value zero": ("public-heads/cost/changes/1/loss_change", "smollm2"),
                                         "zero": ("public-heads/cost/changes/2/loss_change", "smollm2")}, harmless),
                     "gpu": Reading({"hide": ("heads-cost/cost/changes/0/loss_change", "softmax@gpu"),
                                     "another value zero": ("heads-cost/cost/changes/1/loss_change", "softmax@gpu"),
                                     "zero": ("heads-cost/cost/changes/2/loss_change", "softmax@gpu"), **GPU_GATE},
                                    harmless)}),
    Claim("q-pinned-geometry", "2.2, figure 3",
          "A sink on the first token pins queries to its key and pushes other keys away, while a sink outside the "
          "sequence frees both.", "Only a figure, for Qwen3-8B and GPT-OSS-20B.", "lab",
          "mean cosines with the first key: agrees: with softmax they are at least 0.5 for queries and at most -0.2 "
          "for keys, and an outside sink moves both by more than 0.1 towards 0 or beyond; contradicts: with an "
          "outside sink both are within 0.1 of softmax",
          Reading({"cos q": ("rows/cos_qk idle", "softmax sink softmax1"),
                   "cos k": ("rows/cos_kk", "softmax sink softmax1")}, pinned),
          note=f"The bound of 0.1 for a difference is our choice. {LAB_ALONE}", variations=("nobos", "nobias")),
    Claim("sink-blurs-focus", "2.2", "The sink on the first token makes the choice of the right key less precise.",
          "no numbers", "lab",
          "excess loss on copy rows, with every seed: agrees: gated, softpick, K bias and sigmoid have at most half "
          "of softmax's loss; contradicts: this holds for fewer than two of them",
          Reading({"copy loss": ("excess_copy", FOUR), "weight on the right key": ("rows/right copy", FOUR)}, blurs),
          note="We test this only in the lab, because text has no copy rows. The losses on text are under unnorm-loss "
               "and tda-loss-order."),
    Claim("sink-logit-moves-sink", "2.2",
          "A learned logit or a + 1 in the denominator takes the sink away from the first token.", "only figure 4",
          "lab",
          "weights in idle rows: agrees: the key outside the sequence has at least 0.5 and the first token at most "
          "0.05; contradicts: the first token has at least 0.5 and the outside key at most 0.05",
          Reading({"virtual": ("extra_idle", "softmax1 sink"), "first": ("sink_idle", "softmax1 sink")}, moved),
          note=LAB_ALONE, variations=("nobos", "nobias", "tied", "lr3e-3"),
          elsewhere={"logit learns x30": Reading({"virtual": ("extra_idle", "sink-x30"),
                                                  "first": ("sink_idle", "sink-x30")}, moved)}),
    Claim("gated-no-sink", "2.2, A.4", "An output gate removes the sink on the first token and takes over its role.",
          "No numbers. Appendix A.4 says that gating consistently improves, while table 2 of [2] has 3.1489 for gated "
          "and 3.1196 for softmax.", "lab",
          "idle rows: agrees: the first token has at most 2.5 times the uniform weight, and the gate is more open on "
          "copy rows, by at least 0.5; contradicts: the first token has at least 5 times",
          Reading({"x uniform": ("times_uniform_idle", "gated"), "raw": ("sink_idle", "gated"),
                   "gate on idle": ("rows/gate idle", "gated"), "gate on copy": ("rows/gate copy", "gated"),
                   "loss": ("excess_loss", "gated softmax")}, gate_for_sink),
          note="We test this only in the lab, because text has no copy rows on which the gate could open.",
          variations=("nobos",)),
    Claim("gate-identity", "3.1, eq. 4",
          "Sink attention is (1 - sink weight) x softmax, and so is vanilla attention if the first value is zero.",
          "an exact identity", "lab",
          "agrees: the identity holds to within 1e-12 for sink attention, and to within 0.1 of a value's norm for "
          "vanilla attention whose first value has a tenth of the norm of the others; contradicts: otherwise",
          Reading({"sink attention": ("sink", "gate_identity"),
                   **{f"drained to {share}": (f"drained to {share}", "gate_identity") for share in (0, 0.1, 0.3)}},
                  identical),
          note="We use a tenth because the lab shows such a small first value (v0-norm-drain)."),
    Claim("early-layers-active", "3.2, figures 5, 10, 11, appendix C",
          "The first layers have little sink and flat maps, sinks grow with depth, and active heads attend near and "
          "far at once.",
          "Only figures. The text cites figure 3 for figure 4, and it does not say how many keys are recent.",
          "gpu-minutes",
          "rank correlation of depth and the weight on the sink: agrees: it is at least 0.5; contradicts: it is at "
          "most -0.5",
          Reading(DEPTH, grows_with_depth),
          note="The rule uses only the sink and the depth. The local weight and the spread are shown beside them.",
          elsewhere={"SmolLM2": Reading(SMOLLM2_DEPTH, grows_with_depth)}, seeds=1),
    Claim("heads-fixed", "4.1, figure 6",
          "The same heads are dormant on every kind of text, and they become so early in training.",
          "The differences between GSM8K and C-Eval are close to zero.", "gpu-minutes",
          "weight on the sink (alpha_sink) of each head, on two texts: agrees: the correlation is at least 0.9 and "
          "the mean difference at most 0.05; contradicts: the correlation is at most 0.6",
          Reading({"correlation": ("heads-against/against/correlation", "softmax@gpu"),
                   "difference": ("heads-against/against/mean_difference", "softmax@gpu"), **GPU_GATE}, same_heads),
          note="The two texts are novels and Python sources. Wealth of Nations is not used, because the model is "
               "trained on it. When the ranks settle is not measured: it would need checkpoints by step, which a run "
               "does not keep.",
          elsewhere={"SmolLM2": Reading({"correlation": ("public-against/against/correlation", "smollm2"),
                                         "difference": ("public-against/against/mean_difference", "smollm2")},
                                        same_heads)},
          seeds=1),
    Claim("bigger-more-dormant", "4.1, figure 4", "Larger models have a larger share of dormant heads.",
          "only a figure", "public-weights",
          "share of heads with more than half of their weight on the first token, from GPT-2 small to XL: agrees: it "
          "rises over all four models; contradicts: it falls over all four",
          Reading({"dormant": ("public-dormant/dormant", "gpt2 gpt2-medium gpt2-large gpt2-xl")}, larger_more),
          note="The weights of GPT-2 cannot be downloaded on the machine of this ledger. On another machine, run "
               "python data/weights.py for gpt2, gpt2-medium, gpt2-large, gpt2-xl."),
    Claim("dormant-prunable", "3.2, A.5", "Dormant heads contribute nothing and can be zeroed.",
          "More than 14 % of the heads, cited from other work.", "gpu-minutes",
          "increase of the loss when 14 % of the heads are zeroed: agrees: the heads with the largest sinks cost at "
          "most 1/3 of random heads; contradicts: they cost at least as much",
          Reading({"most sink": ("heads-cost/cost/changes/-5/loss_change", "softmax@gpu"),
                   "random": ("heads-cost/cost/changes/-4/loss_change", "softmax@gpu"), **GPU_GATE}, prunable),
          elsewhere={"SmolLM2": Reading({"most sink": ("public-heads/cost/changes/-5/loss_change", "smollm2"),
                                         "random": ("public-heads/cost/changes/-4/loss_change", "smollm2"),
                                         "least sink": ("public-heads/cost/changes/-3/loss_change", "smollm2")},
                                        prunable)},
          seeds=1),
    Claim("head-pinning", "4.2, appendix D, figure 12",
          "Balancing all heads in fine-tuning (eq. 8) lowers the sink everywhere, while leaving out early layers and "
          "top heads (eq. 9) does not.", "Only a figure. Lambda is 0.01 in section 4.2 but 0.001 in appendix E.", "lab",
          "mean weight on the sink divided by that without balancing, after 250 steps, in 2 layers of 4 heads: "
          "agrees: it is at most 0.7 with eq. 8 and at least 0.9 with eq. 9, and with eq. 9 the heads' use varies "
          "less; contradicts: it is at least 0.9 with eq. 8",
          Reading({"sink": ("heads/maps/alpha_sink", "heads-plain heads-eq8 heads-eq9"),
                   "loss": ("excess_loss", "heads-plain heads-eq8 heads-eq9")}, pinning),
          note="Lambda is 0.01. We test this only in the lab, because text models would be tuned for this claim "
               "alone. For training from scratch with both lambdas, see aux-helps."),
    Claim("aux-helps", "table 2",
          "The balancing loss improves accuracy, more so in larger models, and would help pre-training.",
          "+0.51 (4B), +1.70 (8B), +2.47 (LLaMA 8B). Each is the best of three sampled runs.", "out of reach",
          "the paper's numbers need fine-tuning of models with 4 to 8B parameters. In their place we train models of "
          "30M from scratch: agrees: with eq. 9 the loss is lower by more than 2 SD; contradicts: it is higher by "
          "more than 2 SD",
          None,
          note="Lambda is 0.001 and 0.01. The verdict is \"agrees\" if either is better, and \"contradicts\" if both "
               "are worse. The first layer of 8 is left out of the balancing, as 7 of 36 are in the paper.",
          elsewhere={"gpu": Reading({"loss": ("best", "softmax@gpu balanced-0.001@gpu balanced-0.01@gpu")},
                                    balanced_is_better)}),
]
