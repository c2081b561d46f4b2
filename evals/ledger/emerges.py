"""The claims of When Attention Sink Emerges in Language Models, section 7, arXiv 2410.10781."""
import numpy as np

from evals.ledger.claim import GPU_GATE, Claim, Reading, below, decide, every

TITLE = "[5] When Attention Sink Emerges"

# ------------------------------------------------------------------------------------------------------------- verdicts


def everywhere(n):
    times, loss = n["x uniform"], {name: np.mean(values) for name, values in n["loss"].items()}
    ahead = loss["t5-index"] - max(value for name, value in loss.items() if name != "t5-index")
    return decide(every(times, lambda t: t >= 3) and ahead > 0.5, any(np.all(t <= 1.5) for t in times.values()),
                  by={f"{name}, x uniform": values for name, values in times.items()} | {"t5-index worst by": ahead})


def survives_postnorm(n):
    times = n["x uniform"]["postnorm"]
    return decide(times >= 3, times <= 1.5)


def absorbed(n):
    keys = [name for name in n["bias"] if name != "v_bias"]
    bias, first, loss = n["bias"], n["first"], n["loss"]
    apart = any(below(loss[name], loss["softmax"]) or below(loss["softmax"], loss[name]) for name in loss)
    return decide([*[(bias[name] >= 0.5) & (first[name] <= 0.05) for name in keys],
                   np.abs(first["v_bias"] - first["softmax"]) <= 0.2 * first["softmax"], not apart,
                   n["deletion"]["k_bias"] >= 0.05], first["k_bias"] >= 0.5)


def returns_with_norm(n):
    bias, first = ([n[column][f"value-norm-{m}"] for m in (0, 1, 5, 20)] for column in ("bias", "first"))
    monotone = np.all(np.diff(bias, axis=0) <= 0.01) and np.all(np.diff(first, axis=0) >= -0.01)
    ends = [bias[0] >= 0.9, bias[3] <= 0.1, first[0] <= 0.1, first[3] >= 0.9]
    return decide([monotone, *ends], not monotone)


def none(n):
    raw, cost = n["raw"], n["cost of zero v0"]
    return decide([(raw[name] <= 0.05) & (cost[name] <= 0.005) for name in raw],
                  [value >= 0.3 for value in raw.values()])


def back(n):
    times = n["x uniform"]["sigmoid_norm"]
    return decide(times >= 3, times <= 1.5)


def strongest_and_worst(n):
    times = n["x uniform"]["linear"]
    return decide([times >= 5, below(n["loss"]["softmax"], n["loss"]["linear"])], times <= 1.5)


def as_well(n):
    gaps = {name: n["loss"][name] - n["loss"]["softmax"] for name in ("sigmoid_raw", "sigmoid")}
    return decide([np.abs(gap) <= 0.05 for gap in gaps.values()], [gap > 0.1 for gap in gaps.values()],
                  by={f"{name} less softmax": gap for name, gap in gaps.items()})


def largest(values):
    """The norm of the first token over that of the others: the largest over layers. values (seeds, layers + 1)."""
    return np.max(values, 1)


def removed(n):
    ratio = {name: largest(values) for name, values in n["massive"].items()}
    gone = [ratio[name] <= 2 for name in ("k_bias", "kv_bias")]
    kept = [ratio[name] >= 5 for name in ("softmax", "v_bias")]
    return decide([*gone, *kept], ratio["k_bias"] >= ratio["softmax"], by=ratio)


def only_normalised(n):
    ratio = {name: largest(values) for name, values in n["massive"].items()}
    free = [ratio[name] for name in ("sigmoid", "softpick", "elastic")]
    return decide([ratio["softmax"] >= 5, *[values <= 2 for values in free]], ratio["sigmoid"] >= ratio["softmax"],
                  testable=ratio["softmax"] >= 3, by=ratio)


def exceptions(n):
    """The recipes that have a sink without a sum of one, or a sum of one without a sink."""
    sinks = {name: np.mean(raw) >= 0.1 and np.mean(n["x uniform"][name]) >= 3 for name, raw in n["raw"].items()}
    return sorted(name for name, sink in sinks.items() if sink != (name in SUM_TO_ONE))


def with_the_sum(n):
    found = exceptions(n)
    return decide(not found, len(found) >= 2, by={"exceptions": ", ".join(found) or "none"})


# ------------------------------------------------------------------------------------------------------------- the rows

POSITIONS = "softmax sinusoidal rope alibi no-positions t5-index"
SUM_TO_ONE = ("softmax", "v_bias", "gated", "entmax", "sparsemax", "lssar", "sigmoid_norm", "elu_norm", "linear")
OTHERS = ("softmax1", "sink", "k_bias", "kv_bias", "diff", "diff2", "elastic", "lazy", "softpick", "relu", "rela",
          "tra", "tda", "diff_rela", "sigmoid", "sigmoid_raw", "elu", "identity", "mlp")
ALL = " ".join((*SUM_TO_ONE, *OTHERS))
GPU_POSITIONS = "softmax@gpu learned@gpu sinusoidal@gpu alibi@gpu no-positions@gpu t5@gpu t5-index@gpu"
LAB_ALONE = ("We test this only in the lab, because text models of these recipes would be trained for this claim "
             "alone.")
UNNORMALISED = "sigmoid_raw elu identity mlp"
NORMS = " ".join(f"value-norm-{m}" for m in (0, 1, 5, 20))
MASSIVE = "probe/stream/*/massive"

CLAIMS = [
    Claim("pe-all-sink", "table 3, 7.1",
          "Sinks appear with every position encoding and with none, and only the encoding called relative trains "
          "badly.",
          "Sink: none 20.35, sinusoidal 32.73, learned 33.13, relative 35.53, ALiBi 20.78, RoPE 18.18 %. Loss, in the "
          "same order: 3.81, 3.74, 3.79, 5.45, 3.71, 3.73.", "lab",
          "agrees: every encoding gives the first token at least 3 times the uniform weight, and relative has the "
          "worst mean loss by more than 0.5; contradicts: any encoding gives at most 1.5 times",
          Reading({"x uniform": ("times_uniform_idle", POSITIONS), "raw": ("sink_idle", POSITIONS),
                   "loss": ("excess_copy", POSITIONS)}, everywhere),
          note="The paper's code for relative adds the bare number of T5's bucket (t5-index). The loss is that on "
               "copy rows, which are one row in ten, because the other rows need no positions. With one head, ALiBi's "
               "slope is close to zero; with eight heads it has all its slopes (heads8; results/lab-pos-8-heads.md). "
               "On a GPU, the run softmax uses RoPE. The rule does not use Sink(.3).",
          variations=("heads8",),
          elsewhere={"gpu": Reading({"x uniform": ("times_uniform", GPU_POSITIONS), "loss": ("best", GPU_POSITIONS),
                                     **GPU_GATE}, everywhere)}),
    Claim("postnorm", "7.2, figure 7", "Post-norm keeps the sink, but activations are massive only before its norm.",
          "The sink is 13.54 %, with pre-norm 18.18 %. The norm ratio is about 80 before the norm and 10 after it.",
          "lab",
          "idle rows: agrees: the first token has at least 3 times the uniform weight; contradicts: it has at most "
          "1.5 times",
          Reading({"x uniform": ("times_uniform_idle", "postnorm"), "raw": ("sink_idle", "postnorm softmax")},
                  survives_postnorm),
          note="A model of one layer has no massive activations, so the plan's second condition (a ratio at least 3 "
               "times as large before the norm as after it) is not tested. It is not tested on a GPU either: the "
               "probe sees the residual stream where it enters a layer, and with post-norm that is after the norm."),
    Claim("kbias-shift", "table 4, 7.3",
          "A learned extra key, with or without a value, absorbs the sink at equal loss, a value bias changes "
          "nothing, and deleting the key later hurts.",
          "The key has 72.76 % with a value and 73.34 % without, and the first token has 0.04 and 0.00 %. With a "
          "value bias the first token has 17.53 %, without it 18.18 %.", "lab",
          "weights in idle rows: agrees: the key has at least 0.5 and the first token at most 0.05, the value bias is "
          "within 20 % of softmax, the losses are within 2 SD of it, and deleting the key costs at least 0.05; "
          "contradicts: the first token has at least 0.5 with a key bias",
          Reading({"bias": ("extra_idle", "k_bias kv_bias"), "first": ("sink_idle", "k_bias kv_bias v_bias softmax"),
                   "loss": ("excess_loss", "k_bias kv_bias v_bias softmax"),
                   "deletion": ("rows/deletion", "k_bias kv_bias")}, absorbed),
          note="We test this only in the lab, because the cost of deletion is not measured on text. bias-massive has "
               "text models of these recipes.",
          variations=("nobias",)),
    Claim("bias-value-norm", "table 5",
          "The larger the fixed value of the bias key, the more of the sink returns to the first token.",
          "With norm 0, 1, 5, 20, the key has 73.34, 69.74, 27.99, 0.00 % and the first token 0.00, 2.15, 5.93, 11.21 "
          "%.", "lab",
          "agrees: both weights are monotone in the norm, the key has at least 0.9 at 0 and at most 0.1 at 20, and "
          "the first token has the reverse; contradicts: they are not monotone",
          Reading({"bias": ("extra_idle", NORMS), "first": ("sink_idle", NORMS)}, returns_with_norm),
          note="Steps of less than 0.01 in the wrong direction do not count."),
    Claim("bias-massive", "figure 7",
          "A key bias removes massive activations, but a sink token, a value bias or a large fixed value does not.",
          "only a figure", "gpu-minutes",
          "norm of the first token divided by that of the others, largest over layers: agrees: it is at most 2 with "
          "key biases and at least 5 with softmax and a value bias; contradicts: it is at least as large with a key "
          "bias as with softmax",
          Reading({"massive": (MASSIVE, "softmax@gpu k_bias@gpu kv_bias@gpu v_bias@gpu sink_token@gpu")}, removed),
          seeds=1),
    Claim("sigmoid-none", "table 6", "Without normalisation (sigmoid, elu + 1, identity, MLP kernel) there is no sink.",
          "In this order: sink 0.44, 0.80, 0.00, 0.74 %; loss 3.70, 3.69, 3.99, 3.91.", "lab",
          "idle rows: agrees: the raw weight on the first token is at most 0.05, and zeroing its value costs at most "
          "0.005; contradicts: the raw weight is at least 0.3",
          Reading({"raw": ("sink_idle", UNNORMALISED), "mass": ("row_mass_idle", UNNORMALISED),
                   "share": ("share_idle", UNNORMALISED), "cost of zero v0": ("zero_cost", UNNORMALISED)}, none),
          note=LAB_ALONE),
    Claim("sigmoid-norm-sink", "table 6", "Normalising sigmoid brings the sink back.",
          "Sink: 30.24 %, with softmax 18.18 %.", "lab",
          "idle rows: agrees: the first token has at least 3 times the uniform weight; contradicts: it has at most "
          "1.5 times",
          Reading({"x uniform": ("times_uniform_idle", "sigmoid_norm softmax"),
                   "raw": ("sink_idle", "sigmoid_norm softmax")}, back),
          note=LAB_ALONE),
    Claim("linear-norm-sink", "table 6",
          "Normalised linear attention (elu + 1) has the strongest sink and a clearly worse loss.",
          "The sink is 53.65 % and the loss 4.19. The table marks the sink as divided by the row sum, but the rows "
          "already sum to one.", "lab",
          "agrees: the first token has at least 5 times the uniform weight, and the loss is above that of softmax by "
          "more than 2 SD; contradicts: the first token has at most 1.5 times",
          Reading({"x uniform": ("times_uniform_idle", "linear"), "raw": ("sink_idle", "linear"),
                   "loss": ("excess_loss", "linear softmax")}, strongest_and_worst),
          note=LAB_ALONE),
    Claim("unnorm-loss", "table 6, 7.4",
          "Unnormalised sigmoid trains as well as softmax: better at 60M and slightly worse at 1B, without the sink.",
          "At 60M the loss is 3.70 against 3.73. At 1B it is 3.10 against 3.07, and the sink falls from 45.11 to 2.46 "
          "%. In [1] sigmoid is worse at 340M, with a perplexity of 26.65 against 25.76.", "gpu-minutes",
          "validation loss of sigmoid without a bias (as in the paper) and with a bias of -log T: agrees: both are "
          "within 0.05 of softmax; contradicts: both are worse by more than 0.1",
          Reading({"loss": ("best", "sigmoid@gpu sigmoid_raw@gpu softmax@gpu")}, as_well),
          note="A run that diverges ends with an error, and the claim then stays not run. Loss spikes are not "
               "counted."),
    Claim("massive-iff-norm", "figure 8",
          "Activations become massive only if the attention weights are non-negative and sum to one.",
          "The peaks are about 30 (softmax) and 20 (normalised sigmoid), and 1.0 to 1.8 without normalisation. At 1B "
          "they are 22 against 6.", "gpu-minutes",
          "norm of the first token divided by that of the others, largest over layers: agrees: it is at least 5 with "
          "softmax and at most 2 without normalisation; contradicts: it is at least as large with sigmoid as with "
          "softmax; not testable: it is below 3 with softmax",
          Reading({"massive": (MASSIVE, "softmax@gpu sigmoid@gpu gated@gpu softpick@gpu elastic@gpu")},
                  only_normalised),
          seeds=1),
    Claim("sum-dependence", "7.4, takeaway 3",
          "A sink arises if, and only if, the attention weights depend on each other through a sum of one.",
          "The paper says this only in words.", "lab",
          "idle rows, means over seeds; a recipe has a sink if the first token has a raw weight of at least 0.1 and a "
          "share of at least 3 times uniform: agrees: exactly the recipes whose weights on tokens sum to one have a "
          "sink; contradicts: there are two exceptions or more",
          Reading({"raw": ("sink_idle", ALL), "x uniform": ("times_uniform_idle", ALL)}, with_the_sum),
          note=f"These recipes have weights that sum to one: {', '.join(SUM_TO_ONE)}. The weights of diff_rela are "
               "signed and unbounded, so one seed decides their mean. Left out are the same rules with other scales, "
               "windows or gates (ssmax, asentmax, window, streaming, gpt_oss, gated_elementwise, rela_gated, "
               "linear_raw, dex), a sink token, which is itself a first token, recipes that divide by max(|row sum|, "
               "1) (identity_norm, mlp_norm), and mixers."),
]
