"""When Attention Sink Emerges in Language Models, section 7, arXiv 2410.10781."""
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
    """The largest norm of the first token over the others', over the layers. values (seeds, layers + 1)."""
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
    """Recipes whose sink is not where their sum is."""
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
LAB_ALONE = "The lab alone: text models of these recipes would be trained for this row only."
UNNORMALISED = "sigmoid_raw elu identity mlp"
NORMS = " ".join(f"value-norm-{m}" for m in (0, 1, 5, 20))
MASSIVE = "probe/stream/*/massive"

CLAIMS = [
    Claim("pe-all-sink", "table 3, 7.1",
          "Sinks appear with every position encoding and with none; only the one called relative trains badly.",
          "none 20.35, sinusoidal 32.73, learned 33.13, relative 35.53, ALiBi 20.78, RoPE 18.18 %; loss 3.81, 3.74, "
          "3.79, 5.45, 3.71, 3.73",
          "lab",
          "agrees: all >= 3 x uniform, and relative the worst mean loss by more than 0.5; contradicts: any <= 1.5 x",
          Reading({"x uniform": ("times_uniform_idle", POSITIONS), "raw": ("sink_idle", POSITIONS),
                   "loss": ("excess_copy", POSITIONS)}, everywhere),
          note="Their relative code is the bare number of T5's bucket (t5-index). Loss is that on copy rows, one in "
               "ten, as the others need no positions. One head has next to no slope of ALiBi, eight have all "
               "(heads8; results/lab-pos-8-heads.md). On a GPU softmax has RoPE. Sink(.3) is not in the rule.",
          variations=("heads8",),
          elsewhere={"gpu": Reading({"x uniform": ("times_uniform", GPU_POSITIONS), "loss": ("best", GPU_POSITIONS),
                                     **GPU_GATE}, everywhere)}),
    Claim("postnorm", "7.2, figure 7", "Post-norm keeps the sink; activations are massive before its norm only.",
          "13.54 %, pre-norm 18.18 %; ratios of about 80 before and 10 after", "lab",
          "idle rows: agrees: >= 3 x uniform; contradicts: <= 1.5 x",
          Reading({"x uniform": ("times_uniform_idle", "postnorm"), "raw": ("sink_idle", "postnorm softmax")},
                  survives_postnorm),
          note="One layer has no massive activations, so the second half of the rule (before >= 3 x after) is not "
               "asked; nor on a GPU, as the probe sees the stream where it enters a layer, there after the norm."),
    Claim("kbias-shift", "table 4, 7.3",
          "A learned key, with a value or without, absorbs the sink at equal loss; a value bias changes nothing; "
          "deleting the key later hurts.",
          "on the key 72.76 and 73.34, on the first token 0.04 and 0.00 %; with a value bias 17.53, without 18.18",
          "lab",
          "idle rows: agrees: key >= 0.5 and first <= 0.05, value bias within 20 % of softmax, losses within 2 SD, "
          "deletion >= 0.05; contradicts: first >= 0.5 with a key bias",
          Reading({"bias": ("extra_idle", "k_bias kv_bias"), "first": ("sink_idle", "k_bias kv_bias v_bias softmax"),
                   "loss": ("excess_loss", "k_bias kv_bias v_bias softmax"),
                   "deletion": ("rows/deletion", "k_bias kv_bias")}, absorbed),
          note="The lab alone: what deletion costs is not measured on text. bias-massive has these models.",
          variations=("nobias",)),
    Claim("bias-value-norm", "table 5",
          "The larger the fixed value of the bias key, the more of the sink returns to the first token.",
          "norm 0, 1, 5, 20: on the key 73.34, 69.74, 27.99, 0.00, on the first 0.00, 2.15, 5.93, 11.21 %", "lab",
          "agrees: monotone, key >= 0.9 at 0 and <= 0.1 at 20, the first token the reverse; contradicts: not "
          "monotone",
          Reading({"bias": ("extra_idle", NORMS), "first": ("sink_idle", NORMS)}, returns_with_norm),
          note="Steps below 0.01 against the order count as none."),
    Claim("bias-massive", "figure 7",
          "A key bias removes massive activations; a sink token, a value bias or a large fixed value does not.",
          "a figure", "gpu-minutes",
          "first token's norm over the others', largest over layers: agrees: key biases <= 2, softmax and value bias "
          ">= 5; contradicts: key bias as large as softmax",
          Reading({"massive": (MASSIVE, "softmax@gpu k_bias@gpu kv_bias@gpu v_bias@gpu sink_token@gpu")}, removed),
          seeds=1),
    Claim("sigmoid-none", "table 6",
          "Without normalisation (sigmoid, elu + 1, identity, MLP kernel) there is no sink.",
          "0.44, 0.80, 0.00, 0.74 %; loss 3.70, 3.69, 3.99, 3.91", "lab",
          "idle rows: agrees: raw <= 0.05 and zeroing the first value costs <= 0.005; contradicts: raw >= 0.3",
          Reading({"raw": ("sink_idle", UNNORMALISED), "mass": ("row_mass_idle", UNNORMALISED),
                   "share": ("share_idle", UNNORMALISED), "cost of zero v0": ("zero_cost", UNNORMALISED)}, none),
          note=LAB_ALONE),
    Claim("sigmoid-norm-sink", "table 6", "Normalising sigmoid brings the sink back.", "30.24 %, softmax 18.18 %",
          "lab", "idle rows: agrees: >= 3 x uniform; contradicts: <= 1.5 x",
          Reading({"x uniform": ("times_uniform_idle", "sigmoid_norm softmax"),
                   "raw": ("sink_idle", "sigmoid_norm softmax")}, back),
          note=LAB_ALONE),
    Claim("linear-norm-sink", "table 6",
          "Normalised linear attention (elu + 1) has the strongest sink and a clearly worse loss.",
          "53.65 %, loss 4.19; marked as divided by its sum, though its rows sum to one", "lab",
          "agrees: >= 5 x uniform, and a loss above softmax beyond 2 SD; contradicts: <= 1.5 x",
          Reading({"x uniform": ("times_uniform_idle", "linear"), "raw": ("sink_idle", "linear"),
                   "loss": ("excess_loss", "linear softmax")}, strongest_and_worst),
          note=LAB_ALONE),
    Claim("unnorm-loss", "table 6, 7.4",
          "Unnormalised sigmoid trains as well as softmax: better at 60M, slightly worse at 1B, without the sink.",
          "3.70 against 3.73; 1B 3.10 against 3.07, sink 45.11 -> 2.46 %. [1] has it worse at 340M: 26.65 against "
          "25.76",
          "gpu-minutes",
          "validation loss, without a bias (theirs) and with one of -log T: agrees: both within 0.05 of softmax; "
          "contradicts: both worse by more than 0.1",
          Reading({"loss": ("best", "sigmoid@gpu sigmoid_raw@gpu softmax@gpu")}, as_well),
          note="A run that diverges ends with an error, and leaves the row not run; spikes are not counted."),
    Claim("massive-iff-norm", "figure 8",
          "Activations are massive only with weights that are not negative and sum to one.",
          "peaks of about 30 (softmax) and 20 (normalised sigmoid), 1.0 to 1.8 without; 1B 22 against 6",
          "gpu-minutes",
          "first token's norm over the others', largest over layers: agrees: softmax >= 5, un-normalised <= 2; "
          "contradicts: sigmoid as large as softmax; not testable: softmax < 3",
          Reading({"massive": (MASSIVE, "softmax@gpu sigmoid@gpu gated@gpu softpick@gpu elastic@gpu")},
                  only_normalised),
          seeds=1),
    Claim("sum-dependence", "7.4, takeaway 3",
          "A sink arises when, and only when, scores depend on each other through a sum of one.", "in words", "lab",
          "a sink: raw >= 0.1 and share >= 3 x uniform, means over seeds, idle rows. Agrees: exactly those whose "
          "weights on tokens sum to one have one; contradicts: two exceptions or more",
          Reading({"raw": ("sink_idle", ALL), "x uniform": ("times_uniform_idle", ALL)}, with_the_sum),
          note=f"Sum to one: {', '.join(SUM_TO_ONE)}. diff_rela's weights are signed and without bounds: of its "
               "mean one seed decides. Left out: the same rules with other scales, windows or gates (ssmax, asentmax, "
               "window, streaming, gpt_oss, gated_elementwise, rela_gated, linear_raw, dex), a sink token, which is a "
               "first token itself, sums held by a maximum (identity_norm, mlp_norm), and mixers."),
]
