"""The Attention Sink as Native MoE."""
from itertools import pairwise

import numpy as np

from evals.ledger.claim import GPU_SOFTMAX_SINK, Bound, Claim, Reading, depth_correlation, interval

TITLE = "[4] Attention Sink as Native MoE"
CITED = "Attention Is Not Always Needed: Attention Sink Forges a Native MoE in Attention Layers"

# ---------------------------------------------------------------------------- quantities that are more than a column


def median_of(layers):
    """The median ratio of the value norms in a slice of the layers, over seeds and heads."""
    def value(n):
        (ratio,) = n["|v0|/|v|"].values()       # (seeds, layers, heads)
        return np.median(ratio[:, layers])
    return value


def drained_layers(n):
    """The share of the layers after the first whose median ratio is at most 0.3."""
    (ratio,) = n["|v0|/|v|"].values()           # (seeds, layers, heads)
    return (np.median(ratio[:, 1:], 2) <= 0.3).mean(1)


def sink_and_depth(n):
    """The rank correlation of a layer's depth and its mean weight on the sink."""
    (alpha,) = n["sink"].values()               # (seeds, layers, heads)
    return depth_correlation(alpha.mean(2))


def first_layers(n):
    """The mean weight on the sink in the first tenth of the layers, at least in one, over that in all layers."""
    (alpha,) = n["sink"].values()
    return alpha[:, :max(1, round(alpha.shape[1] / 10))].mean((1, 2)) / alpha.mean((1, 2))


def growth(n):
    """By how much the share of dormant heads grows from each model to the next larger one."""
    shares = {name: np.mean(values) for name, values in n["dormant"].items()}
    return {f"{small} to {large}": shares[large] - shares[small] for small, large in pairwise(shares)}


def over_plain(name, figure):
    """A figure of the weights on the sink (seeds, layers, heads) after balancing, over that without balancing."""
    return lambda n: figure(n["sink"][name]) / figure(n["sink"]["heads-plain"])


def mean_weight(alpha):
    return alpha.mean((1, 2))


def variation(alpha):
    """The coefficient of variation of the use, 1 - the weight on the sink, of the heads that eq. 9 balances: those of
    layer 2 but the most used one."""
    used = np.sort(1 - alpha[:, 1])[:, :-1]     # (seeds, heads)
    return used.std(1) / used.mean(1)


def change_by_better_lambda(n):
    """The change of the loss with the lambda that lowers it most clearly, seed by seed."""
    changes = [loss - n["loss"]["softmax"] for name, loss in n["loss"].items() if name != "softmax"]
    return min(changes, key=lambda change: interval(change)[1])


# ------------------------------------------------------------------------------------------------------------- the rows

CHOOSERS = "softmax gated k_bias sink softmax1 softpick sigmoid"
LAB_ALONE = ("We test this only in the lab, because text models of these recipes would be trained for this claim "
             "alone.")
DRAINED_LATER = (Bound(what="median of layer 1", value=median_of(slice(0, 1)), agrees=">= 0.5"),
                 Bound(what="median of all later layers", value=median_of(slice(1, None)), agrees="<= 0.3"),
                 Bound(what="share of the later layers whose median is at most 0.3", value=drained_layers),
                 Bound(what="median of all layers", value=median_of(slice(None)), contradicts=">= 0.8"))
COSTS_OF_V0 = (Bound(what="zeroing the first value over hiding its key", column="zero", over="hide", agrees="<= 0.1",
                     contradicts=">= 0.5"),
               Bound(what="zeroing the first value", column="zero", agrees="<= 0.02"))
ZEROED = {"hide": "first key hidden, all heads", "another value zero": "value at 8 zero, all heads",
          "zero": "first value zero, all heads"}
SILENCED = {"most sink": "14 % of heads zero, most sink", "random": "14 % of heads zero, random",
            "least sink": "14 % of heads zero, least sink"}


def depth(heads, run):
    """The columns of early-layers-active."""
    return {column: (f"{heads}/maps/{name}", run)
            for column, name in (("sink", "alpha_sink"), ("local", "alpha_local"), ("sigma2", "sigma2"))}


def costs(heads, run, ablations, figure="loss_change"):
    """Columns of loss increases, or of their standard errors. ablations: {column: what is ablated, in which heads}."""
    return {column: (f"{heads}/cost/changes/{ablation}/{figure}", run) for column, ablation in ablations.items()}


CLAIMS = [
    Claim(id="v0-norm-drain", place="2.1, figures 2, 7 to 9",
          says="The value norm of the first token is near zero, but without BOS not yet in the first layer.",
          theirs="only figures, for six models",
          cost="lab",
          tested="value norm of the first token over that of the others",
          reads={"with BOS": ("value_norm_ratio", "softmax"),
                 "no BOS, layer 1": ("probe/layers/0/value_norm_ratio/0", "two-layers@nobos"),
                 "no BOS, layer 2": ("probe/layers/1/value_norm_ratio/0", "two-layers@nobos"),
                 "no BOS, x uniform": ("probe/layers/1/times_uniform/0", "two-layers@nobos")},
          bounds=(Bound(what="layer 1 with BOS", column="with BOS", agrees="<= 0.3", contradicts=">= 0.8"),
                  Bound(what="layer 1 without BOS", column="no BOS, layer 1", agrees=">= 0.5",
                        sink="no BOS, x uniform"),
                  Bound(what="layer 2 without BOS", column="no BOS, layer 2", agrees="<= 0.3",
                        sink="no BOS, x uniform")),
          note="Without BOS the second layer must have a sink; otherwise this half cannot be tested.",
          elsewhere={"SmolLM2, no BOS": Reading(
                         reads={"|v0|/|v|": ("public-probe/layers/*/value_norm_ratio", "smollm2")},
                         bounds=DRAINED_LATER),
                     "gpu, no BOS": Reading(
                         reads={"|v0|/|v|": ("probe/layers/*/value_norm_ratio", "softmax@gpu")} | GPU_SOFTMAX_SINK,
                         bounds=DRAINED_LATER)}),
    Claim(id="zero-v0-harmless", place="table 1, 2.1",
          says="Setting the first token's value to zero does no harm.",
          theirs="The average of Qwen3-8B is 70.36. It is 64.10 with this value zeroed in all heads, and 70.38 with "
                 "it zeroed in heads with a strong sink; Qwen3-14B has 66.91, 65.90 and 67.09. The paper calls this "
                 "comparable, but with all heads of the 8B model MMLU falls from 75.42 to 50.27.",
          cost="lab",
          tested="increase of the loss",
          reads={"zero": ("zero_cost", "softmax"), "hide": ("hide_cost", "softmax"), "sink": ("sink_idle", "softmax")},
          bounds=COSTS_OF_V0 + (Bound(what="weight on the first token in idle rows", column="sink", needs="> 0.75"),),
          variations=("nobos", "nobias", "tied", "lr3e-3", "table2"),
          note="The paper has two conditions, all heads and heads with a strong sink, above 0.75 (table 1). The lab's "
               "one head must be such a head. In SmolLM2 as many random heads cost as little as the strong ones, so "
               "there the bound says little; heads with half a sink cost more than others.",
          elsewhere={"SmolLM2, strong heads": Reading(
                         reads=costs("public-heads", "smollm2", {"zero": "first value zero, most sink"})
                         | costs("public-heads", "smollm2", {"error": "first value zero, most sink"}, "standard_error")
                         | costs("public-heads", "smollm2", {"random heads": "first value zero, random"}),
                         bounds=(Bound(what="zeroing the first value in heads with a sink above 0.75", column="zero",
                                       agrees="clearly < 0.02", contradicts="clearly > 0.02", error="error"),
                                 Bound(what="the same in as many random heads", column="random heads"))),
                     "SmolLM2, half a sink": Reading(
                         reads=costs("public-half", "smollm2", {
                             "zero": "first value zero, most sink", "random heads": "first value zero, random",
                             "least sink": "first value zero, least sink"})
                         | costs("public-half", "smollm2", {"error": "first value zero, most sink"}, "standard_error"),
                         bounds=(Bound(what="zeroing the first value in heads with a sink above 0.5", column="zero",
                                       agrees="clearly < 0.02", contradicts="clearly > 0.02", error="error"),
                                 Bound(what="the same in as many random heads", column="random heads"),
                                 Bound(what="the same in the heads with the least sink", column="least sink"))),
                     "SmolLM2, all heads": Reading(reads=costs("public-heads", "smollm2", ZEROED), bounds=COSTS_OF_V0),
                     "gpu": Reading(reads=costs("heads-cost", "softmax@gpu", ZEROED) | GPU_SOFTMAX_SINK,
                                    bounds=COSTS_OF_V0)}),
    Claim(id="q-pinned-geometry", place="2.2, figure 3",
          says="A sink on the first token pins queries to its key and pushes other keys away, while a sink outside "
               "the sequence frees both.",
          theirs="Only a figure, for Qwen3-8B and GPT-OSS-20B.",
          cost="lab",
          tested="mean cosines with the first key",
          reads={"cos q": ("rows/cos_qk idle", "softmax sink softmax1"),
                 "cos k": ("rows/cos_kk", "softmax sink softmax1"), "outside": ("extra_idle", "sink softmax1")},
          bounds=(Bound(what="queries with softmax", column="cos q", of="softmax", agrees=">= 0.5"),
                  Bound(what="keys with softmax", column="cos k", of="softmax", agrees="<= -0.2"),
                  Bound(what="size of the queries' cosine with an outside sink", agrees="<= 0.2", contradicts=">= 0.4",
                        value=lambda n: {name: np.abs(n["cos q"][name]) for name in ("sink", "softmax1")}),
                  Bound(what="change of the keys by an outside sink", column="cos k", less="softmax",
                        agrees="> 0.1", contradicts="<= 0.1"),
                  Bound(what="weight on the outside sink", column="outside", needs=">= 0.5")),
          note="Queries that turn away from the first key are not free of it, so the size of their cosine counts. The "
               f"bounds are our choice. {LAB_ALONE}", variations=("nobos", "nobias")),
    Claim(id="sink-blurs-focus", place="2.2",
          says="The sink on the first token makes the choice of the right key less precise.",
          theirs="no numbers",
          cost="lab",
          tested="copy rows",
          reads={"copy loss": ("excess_copy", CHOOSERS), "right key": ("rows/right copy", CHOOSERS)},
          bounds=(Bound(what="weight on the right key with a gate or an outside sink, less softmax's",
                        column="right key", of="gated k_bias sink softmax1", less="softmax", agrees="> 0",
                        contradicts="<= 0"),
                  Bound(what="the same of other rules", column="right key", of="softpick sigmoid", less="softmax"),
                  Bound(what="excess loss over softmax's", column="copy loss", over="softmax")),
          note="With a gate, a key bias, a sink logit or a + 1 the weights are still those of a softmax, so they "
               "can be compared with it. We test this only in the lab, because text has no copy rows. The losses on "
               "text are under unnorm-loss and tda-loss-order."),
    Claim(id="sink-logit-moves-sink", place="2.2",
          says="A learned logit or a + 1 in the denominator takes the sink away from the first token.",
          theirs="only figure 4",
          cost="lab",
          tested="idle rows",
          reads={"virtual": ("extra_idle", "softmax1 sink"), "first": ("sink_idle", "softmax1 sink")},
          bounds=(Bound(what="weight on the key outside the sequence", column="virtual", agrees=">= 0.5",
                        contradicts="<= 0.05"),
                  Bound(what="weight on the first token", column="first", agrees="<= 0.05",
                        contradicts=">= 0.5")),
          note=LAB_ALONE, variations=("nobos", "nobias", "tied", "lr3e-3", "table2"),
          elsewhere={"logit learns x30": Reading(reads={"virtual": ("extra_idle", "sink-x30"),
                                                        "first": ("sink_idle", "sink-x30")})}),
    Claim(id="gated-no-sink", place="2.2, A.4",
          says="An output gate removes the sink on the first token and takes over its role.",
          theirs="No numbers. Appendix A.4 says that gating consistently improves, while table 2 of [2] has 3.1489 "
                 "for gated and 3.1196 for softmax.",
          cost="lab",
          reads={"x uniform": ("times_uniform_idle", "gated"), "raw": ("sink_idle", "gated"),
                 "effective": ("rows/effective idle", "gated"),
                 "gate on idle": ("rows/gate idle", "gated"), "gate on copy": ("rows/gate copy", "gated"),
                 "loss": ("excess_loss", "gated softmax")},
          bounds=(Bound(what="weight on the first token in idle rows, over uniform", column="x uniform",
                        agrees="<= 2.5", contradicts=">= 5"),
                  Bound(what="the same times the gate", column="effective", agrees="<= 2.5", contradicts=">= 5"),
                  Bound(what="mean gate on copy rows, less that on idle rows", column="gate on copy",
                        less="gate on idle", agrees=">= 0.5")),
          note="The paper's measure is the raw weight. Under a gate that is shut a weight does nothing, so the weight "
               "times the gate could hardly be large. We test this only in the lab, because text has no copy rows on "
               "which the gate could open.",
          variations=("nobos", "table2")),
    Claim(id="gate-identity", place="3.1, eq. 4",
          grade="identity",
          says="Sink attention is (1 - sink weight) x softmax, and so is vanilla attention if the first value is zero.",
          theirs="an exact identity",
          cost="lab",
          tested="the largest error for sink attention; the mean error for vanilla attention whose first value has "
                 "0, a tenth or three tenths of the norm of the others, relative to the norm of the output",
          reads={"sink attention": ("sink", "gate_identity"),
                 **{f"drained to {share}": (f"drained to {share}", "gate_identity") for share in (0, 0.1, 0.3)}},
          fails="any",
          bounds=(Bound(what="error for sink attention", column="sink attention", agrees="<= 1e-12",
                        contradicts="> 1e-12"),
                  Bound(what="error for vanilla attention, first value 0", column="drained to 0", agrees="<= 1e-12",
                        contradicts="> 1e-12"),
                  Bound(what="the same, a tenth", column="drained to 0.1"),
                  Bound(what="the same, three tenths", column="drained to 0.3")),
          note="The lab's first value has 5 to 8 % of the norm of the others, and SmolLM2's has 23 % (v0-norm-drain). "
               "So for trained models the identity is a rough approximation."),
    Claim(id="early-layers-active", place="3.2, figures 5, 10, 11, appendix C",
          says="The first layers have little sink, and sinks grow with depth.",
          theirs="Only figures. The text cites figure 3 for figure 4, and it does not say how many keys are recent.",
          cost="gpu-minutes",
          reads=depth("heads", "softmax@gpu") | GPU_SOFTMAX_SINK,
          bounds=(Bound(what="rank correlation of depth and weight on the sink", value=sink_and_depth, agrees=">= 0.5",
                        contradicts="<= -0.5"),
                  Bound(what="weight on the sink in the first tenth of the layers, over the mean", value=first_layers,
                        agrees="<= 0.5")),
          note="The paper also says that maps of the first layers are flat and that active heads attend near and far "
               "at once. The local weight and the spread are measured, but have no bounds.",
          elsewhere={"SmolLM2": Reading(reads=depth("public-heads", "smollm2"))}, seeds=1),
    Claim(id="heads-fixed", place="4.1, figure 6",
          says="The same heads are dormant on every kind of text, and they become so early in training.",
          theirs="The differences between GSM8K and C-Eval are close to zero.",
          cost="gpu-minutes",
          tested="weight of each head on the sink, on two texts; the difference is the mean size over heads",
          reads={"correlation": ("heads-against/against/correlation", "softmax@gpu"),
                 "difference": ("heads-against/against/mean_difference", "softmax@gpu"), **GPU_SOFTMAX_SINK},
          bounds=(Bound(what="correlation", column="correlation", agrees=">= 0.9", contradicts="<= 0.6"),
                  Bound(what="mean difference", column="difference", agrees="<= 0.05")),
          note="The two texts are novels and Python sources. Wealth of Nations is not used, because the model is "
               "trained on it. When the ranks settle is not measured: it would need checkpoints by step, which a run "
               "does not keep.",
          elsewhere={"SmolLM2": Reading(reads={"correlation": ("public-against/against/correlation", "smollm2"),
                                               "difference": ("public-against/against/mean_difference", "smollm2")})},
          seeds=1),
    Claim(id="bigger-more-dormant", place="4.1, figure 4",
          says="Larger models have a larger share of dormant heads.",
          theirs="only a figure",
          cost="public-weights",
          tested="share of heads with more than half of their weight on the first token, from GPT-2 small to XL",
          reads={"dormant": ("public-dormant/dormant", "gpt2 gpt2-medium gpt2-large gpt2-xl")},
          bounds=(Bound(what="growth from every model to the next larger one", value=growth, agrees=">= 0",
                        contradicts="<= 0"),),
          note="The weights of GPT-2 cannot be downloaded on the machine of this ledger. On another machine, run "
               "python data/weights.py for gpt2, gpt2-medium, gpt2-large, gpt2-xl."),
    Claim(id="dormant-prunable", place="3.2, A.5",
          says="Dormant heads contribute nothing and can be zeroed.",
          theirs="More than 14 % of the heads, cited from other work.",
          cost="gpu-minutes",
          tested="increase of the loss when 14 % of the heads are zeroed",
          reads=costs("heads-cost", "softmax@gpu", SILENCED) | GPU_SOFTMAX_SINK,
          bounds=(Bound(what="heads with the largest sinks", column="most sink", agrees="<= 0.02", contradicts="> 0.1"),
                  Bound(what="the same over that of random heads", column="most sink", over="random")),
          note="\"Nothing\" is asked as in zero-v0-harmless. The random heads are a mean of three draws.",
          elsewhere={"SmolLM2": Reading(reads=costs("public-heads", "smollm2", SILENCED))},
          seeds=1),
    Claim(id="head-pinning", place="4.2, appendix D, figure 12",
          says="Balancing all heads in fine-tuning (eq. 8) lowers the sink everywhere, while leaving out early layers "
               "and top heads (eq. 9) does not.",
          theirs="Only a figure. Lambda is 0.01 in section 4.2 but 0.001 in appendix E.",
          cost="lab",
          tested="ratios to a model without balancing, after 250 steps, in 2 layers of 4 heads",
          reads={"sink": ("heads/maps/alpha_sink", "heads-plain heads-eq8 heads-eq9"),
                 "loss": ("excess_loss", "heads-plain heads-eq8 heads-eq9")},
          bounds=(Bound(what="mean weight on the sink with eq. 8", value=over_plain("heads-eq8", mean_weight),
                        agrees="<= 0.7", contradicts=">= 0.9"),
                  Bound(what="mean weight on the sink with eq. 9", value=over_plain("heads-eq9", mean_weight),
                        agrees=">= 0.9"),
                  Bound(what="variation of the use of the heads that eq. 9 balances",
                        value=over_plain("heads-eq9", variation), agrees="< 1")),
          note="Lambda is 0.01. Eq. 9 leaves out layer 1 and one of the four heads of layer 2. In the paper's "
               "models the early layers have little sink; here layer 1 has most of it, so the bound on eq. 9 could "
               "hardly fail. In SmolLM2 the mean weight falls from 0.40 to 0.23 with eq. 8 and to 0.36 with eq. 9 "
               "(docs/smollm2.md). We test this only in the lab, because text models would be tuned for this claim "
               "alone. For training from scratch with both lambdas, see aux-helps."),
    Claim(id="aux-helps", place="table 2",
          says="The balancing loss improves accuracy, more so in larger models, and would help pre-training.",
          theirs="+0.51 (4B), +1.70 (8B), +2.47 (LLaMA 8B). Each is the best of three sampled runs.",
          cost="out of reach",
          tested="needs fine-tuning of models with 4 to 8B parameters. In their place we train small models from "
                 "scratch with and without eq. 9",
          bounds=(Bound(what="change of the loss with the better lambda", value=change_by_better_lambda,
                        agrees="clearly < 0"),
                  Bound(what="change of the loss with each lambda", column="loss", less="softmax",
                        contradicts="clearly > 0")),
          note="Lambda is 0.001 and 0.01. The first layer of 8 is left out of the balancing, as 7 of 36 are in the "
               "paper.",
          elsewhere={where: Reading(reads={"loss": ("best", f"softmax@{where} balanced-0.001@{where} "
                                                            f"balanced-0.01@{where}")}) for where in ("gpu", "text")}),
]
