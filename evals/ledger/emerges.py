"""When Attention Sink Emerges, section 7."""
import numpy as np

from evals.ledger.claim import GPU_SOFTMAX_SINK, Bound, Claim, Reading

TITLE = "[5] When Attention Sink Emerges"
CITED = "When Attention Sink Emerges in Language Models: An Empirical View, arXiv 2410.10781"

# ---------------------------------------------------------------------------- quantities that are more than a column


def excess_of_relative(n):
    """The mean loss of t5-index, less the largest of the other encodings; and this largest, less the smallest."""
    loss = {name: values.mean() for name, values in n["loss"].items()}
    relative, others = loss.pop("t5-index"), loss.values()
    return relative - max(others), max(others) - min(others)


def step_back(n):
    """The largest step of either weight in the wrong direction, over all norms and seeds."""
    bias, first = (np.diff([n[column][run] for run in NORMS.split()], axis=0) for column in ("bias", "first"))
    return max(bias.max(), -first.min())


def largest(runs):
    """The norm ratio of these runs: the norm of the first token over that of the others, largest over layers."""
    return lambda n: {name: np.max(n["massive"][name], 1) for name in runs.split()}


def over_softmax(runs):
    """The norm ratio of these runs, over that of softmax."""
    return lambda n: {name: np.max(n["massive"][name], 1) / np.max(n["massive"]["softmax"], 1)
                      for name in runs.split()}


def share_with_sink(measure, sum_to_one):
    """The share of the recipes with a sink, among those whose rows sum to one or need not. measure: "shares" asks for 3
    times the uniform share of a row, "weights" for a raw weight of 0.1 as well."""
    def value(n):
        found = [n["x uniform"][name].mean() >= 3 and (measure == "shares" or n["raw"][name].mean() >= 0.1)
                 for name in n["raw"] if (name in SUM_TO_ONE) == sum_to_one]
        return np.mean(found)
    return value


def by_a_sum_of_one(n):
    """By how much larger the share of recipes with a sink is where rows sum to one, by both measures."""
    return {measure: share_with_sink(measure, True)(n) - share_with_sink(measure, False)(n)
            for measure in ("shares", "weights")}


# ------------------------------------------------------------------------------------------------------------- the rows


def encodings(setup):
    """The columns of pe-all-sink in one set-up."""
    runs = " ".join(f"{run}{setup}" for run in "softmax sinusoidal rope alibi no-positions t5-index".split())
    return {"x uniform": ("times_uniform_idle", runs), "raw": ("sink_idle", runs), "loss": ("excess_copy", runs)}


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
    Claim(id="pe-all-sink", place="table 3, 7.1",
          says="Sinks appear with every position encoding and with none, and only the encoding called relative trains "
               "badly.",
          theirs="Sink: none 20.35, sinusoidal 32.73, learned 33.13, relative 35.53, ALiBi 20.78, RoPE 18.18 %. Loss, "
                 "in the same order: 3.81, 3.74, 3.79, 5.45, 3.71, 3.73.",
          cost="lab",
          tested="eight heads, so that ALiBi has all its slopes",
          reads=encodings("@heads8"),
          fails="any",
          bounds=(Bound(what="weight on the first token over uniform with any encoding", column="x uniform",
                        agrees=">= 3", contradicts="<= 1.5"),
                  Bound(what="mean loss of relative, less the largest of the others",
                        value=lambda n: excess_of_relative(n)[0], agrees="> 0.5"),
                  Bound(what="the largest of the others, less the smallest", agrees="<= 0.1",
                        value=lambda n: excess_of_relative(n)[1])),
          note="In the lab the run softmax has learned positions, on a GPU RoPE. The paper's code for relative adds "
               "the bare number of T5's bucket (t5-index). The loss is that on copy rows, which are one row in ten, "
               "because the other rows need no positions. With one head, ALiBi's slope is close to zero. The bounds "
               "do not use Sink(.3).",
          elsewhere={"gpu": Reading(
                         reads={"x uniform": ("times_uniform", GPU_POSITIONS), "loss": ("best", GPU_POSITIONS)}
                         | GPU_SOFTMAX_SINK),
                     "one head": Reading(reads=encodings(""))}),
    Claim(id="postnorm", place="7.2, figure 7",
          says="Post-norm keeps the sink.",
          theirs="The sink is 13.54 %, with pre-norm 18.18 %.",
          cost="lab",
          tested="idle rows",
          reads={"x uniform": ("times_uniform_idle", "postnorm"), "raw": ("sink_idle", "postnorm softmax")},
          bounds=(Bound(what="weight on the first token over uniform", column="x uniform", agrees=">= 3",
                        contradicts="<= 1.5"),),
          note="The paper adds that activations are massive only before the norm (a ratio of about 80, and 10 after "
               "it). This is not tested, because the probe sees the stream where it enters a layer, after the norm."),
    Claim(id="kbias-shift", place="table 4, 7.3",
          says="A learned extra key, with or without a value, or a sink token absorbs the sink at equal loss, a value "
               "bias changes nothing, and deleting the key later hurts.",
          theirs="The key has 72.76 % with a value and 73.34 % without, a sink token 74.12 %, and the first token has "
                 "0.04, 0.00 and 0.00 %. With a value bias the first token has 17.53 %, without it 18.18 %.",
          cost="lab",
          tested="weights in idle rows",
          reads={"bias": ("extra_idle", "k_bias kv_bias sink_token"),
                 "first": ("sink_idle", "k_bias kv_bias sink_token v_bias softmax"),
                 "loss": ("excess_loss", "k_bias kv_bias v_bias softmax"),
                 "deletion": ("rows/deletion", "k_bias kv_bias")},
          bounds=(Bound(what="weight on the key or the sink token", column="bias", agrees=">= 0.5"),
                  Bound(what="weight on the first token beside it", column="first", of="k_bias kv_bias sink_token",
                        agrees="<= 0.05"),
                  Bound(what="weight on the first token with a key bias without value", column="first", of="k_bias",
                        contradicts=">= 0.5"),
                  Bound(what="weight on the first token with a value bias, over softmax's", column="first",
                        of="v_bias", over="softmax", agrees="0.8 to 1.2"),
                  Bound(what="loss less softmax's", column="loss", less="softmax", agrees="could be 0"),
                  Bound(what="cost of deleting the key without value", column="deletion", of="k_bias",
                        agrees=">= 0.05")),
          note="In the lab BOS is a token of its own that competes with the sink token; in the paper the first token "
               "is any. The loss with a sink token is not compared. We test this only in the lab, because the cost of "
               "deletion is not measured on text. bias-massive has text models of these recipes.",
          variations=("nobias",)),
    Claim(id="bias-value-norm", place="table 5",
          says="The larger the fixed value of the bias key, the more of the sink returns to the first token.",
          theirs="With norm 0, 1, 5, 20, the key has 73.34, 69.74, 27.99, 0.00 % and the first token 0.00, 2.15, "
                 "5.93, 11.21 %.",
          cost="lab",
          reads={"bias": ("extra_idle", NORMS), "first": ("sink_idle", NORMS)},
          bounds=(Bound(what="largest step of either weight in the wrong direction", value=step_back,
                        agrees="<= 0.01", contradicts="> 0.01"),
                  Bound(what="weight on the key at norm 0", column="bias", of="value-norm-0", agrees=">= 0.9"),
                  Bound(what="weight on the key at norm 20", column="bias", of="value-norm-20", agrees="<= 0.1"),
                  Bound(what="weight on the first token at norm 0", column="first", of="value-norm-0",
                        agrees="<= 0.1"),
                  Bound(what="weight on the first token at norm 20", column="first", of="value-norm-20",
                        agrees=">= 0.9")),
          note="Steps of less than 0.01 in the wrong direction do not count."),
    Claim(id="bias-massive", place="figure 7",
          says="A key bias removes massive activations, but a sink token, a value bias or a large fixed value does "
               "not.",
          theirs="only a figure",
          cost="gpu-minutes",
          tested="norm ratio: that of the first token over the others, largest over layers",
          reads={"massive": (MASSIVE, "softmax@gpu k_bias@gpu kv_bias@gpu v_bias@gpu sink_token@gpu "
                                      "value-norm-20@gpu")},
          bounds=(Bound(what="norm ratio with softmax", value=largest("softmax"), needs=">= 3"),
                  Bound(what="norm ratio with a value bias, a sink token or a fixed value",
                        value=largest("v_bias sink_token value-norm-20"), agrees=">= 5"),
                  Bound(what="norm ratio with key biases", value=largest("k_bias kv_bias"), agrees="<= 2"),
                  Bound(what="norm ratio with a key bias without value, over softmax's", value=over_softmax("k_bias"),
                        contradicts=">= 1")),
          seeds=1),
    Claim(id="sigmoid-none", place="table 6",
          says="Without normalisation (sigmoid, elu + 1, identity, MLP kernel) there is no sink.",
          theirs="In this order: sink 0.44, 0.80, 0.00, 0.74 %; loss 3.70, 3.69, 3.99, 3.91.",
          cost="lab",
          reads={"raw": ("sink_idle", UNNORMALISED), "mass": ("row_mass_idle", UNNORMALISED),
                 "share": ("share_idle", UNNORMALISED), "cost of zero v0": ("zero_cost", UNNORMALISED)},
          bounds=(Bound(what="share of the first token in idle rows", column="share", agrees="<= 0.1",
                        contradicts=">= 0.3"),
                  Bound(what="increase of the loss when the first value is set to zero", column="cost of zero v0")),
          note="The paper divides each weight by the row's sum of sizes, as we do. An even share is 0.036. The rule "
               f"mlp trains badly here, with most rows empty, and identity copies badly. {LAB_ALONE}"),
    Claim(id="sigmoid-norm-sink", place="table 6",
          says="Normalising sigmoid brings the sink back.",
          theirs="Sink: 30.24 %, with softmax 18.18 %.",
          cost="lab",
          tested="idle rows",
          reads={"x uniform": ("times_uniform_idle", "sigmoid_norm softmax"),
                 "raw": ("sink_idle", "sigmoid_norm softmax")},
          bounds=(Bound(what="weight on the first token over uniform", column="x uniform", of="sigmoid_norm",
                        agrees=">= 3", contradicts="<= 1.5"),),
          note=LAB_ALONE),
    Claim(id="linear-norm-sink", place="table 6",
          says="Normalised linear attention (elu + 1) has the strongest sink and a clearly worse loss.",
          theirs="The sink is 53.65 % and the loss 4.19. The table marks the sink as divided by the row sum, but the "
                 "rows already sum to one.",
          cost="lab",
          reads={"x uniform": ("times_uniform_idle", "linear softmax sigmoid_norm"), "raw": ("sink_idle", "linear"),
                 "loss": ("excess_loss", "linear softmax")},
          bounds=(Bound(what="weight on the first token in idle rows, over uniform", column="x uniform", of="linear",
                        agrees=">= 5", contradicts="<= 1.5"),
                  Bound(what="the same less that of softmax and of normalised sigmoid", agrees="> 0",
                        value=lambda n: {name: n["x uniform"]["linear"] - n["x uniform"][name]
                                         for name in ("softmax", "sigmoid_norm")}),
                  Bound(what="loss less softmax's", column="loss", less="softmax", agrees="clearly > 0")),
          note=LAB_ALONE),
    Claim(id="unnorm-loss", place="table 6, 7.4",
          says="Unnormalised sigmoid trains as well as softmax: better at 60M and slightly worse at 1B, without the "
               "sink.",
          theirs="At 60M the loss is 3.70 against 3.73. At 1B it is 3.10 against 3.07, and the sink falls from 45.11 "
                 "to 2.46 %. In [1] sigmoid is worse at 340M, with a perplexity of 26.65 against 25.76.",
          cost="gpu-minutes",
          tested="sigmoid without a bias (as in the paper) and with a bias of -log T",
          reads={"loss": ("best", "sigmoid@gpu sigmoid_raw@gpu softmax@gpu")},
          bounds=(Bound(what="validation loss less softmax's", column="loss", less="softmax", agrees="-0.05 to 0.05",
                        contradicts="> 0.1"),),
          note="A run that diverges ends with an error, and the claim then stays not run. Loss spikes do not count.",
          variations=("text",)),
    Claim(id="massive-iff-norm", place="figure 8",
          says="Activations become massive only if the attention weights are non-negative and sum to one.",
          theirs="The peaks are about 30 (softmax) and 20 (normalised sigmoid), and 1.0 to 1.8 without normalisation. "
                 "At 1B they are 22 against 6.",
          cost="gpu-minutes",
          tested="norm ratio: that of the first token over the others, largest over layers",
          reads={"massive": (MASSIVE, "softmax@gpu sigmoid_raw@gpu gated@gpu softpick@gpu elastic@gpu")},
          bounds=(Bound(what="norm ratio with softmax", value=largest("softmax"), agrees=">= 5", needs=">= 3"),
                  Bound(what="norm ratio of rules whose rows need not sum to one, over softmax's",
                        value=over_softmax("sigmoid_raw softpick elastic"), agrees="<= 1/3", contradicts=">= 1"),
                  Bound(what="norm ratio with a gate", value=largest("gated"))),
          note="A third of softmax's ratio is our bound; the paper's own at 1B is 6 over 22.",
          seeds=1),
    Claim(id="sum-dependence", place="7.4, takeaway 3",
          says="A sink arises at least partially from attention weights that depend on each other through a sum of "
               "one.",
          theirs="The paper says this only in words.",
          cost="lab",
          tested="idle rows, means over seeds; a recipe has a sink if the first token has at least 3 times its uniform "
                 "share of the row (shares), or also a raw weight of at least 0.1 (weights)",
          reads={"raw": ("sink_idle", ALL), "x uniform": ("times_uniform_idle", ALL)},
          bounds=(Bound(what="share of the recipes with a sink if rows sum to one, less that of all others",
                        value=by_a_sum_of_one, agrees=">= 1/2", contradicts="<= 0"),
                  *(Bound(what=f"this share, by {measure}, if rows {'' if one else 'need not '}sum to one",
                          value=share_with_sink(measure, one)) for measure in ("shares", "weights")
                    for one in (True, False))),
          elsewhere={"without biases": Reading(
              reads={"raw": ("sink_idle", "softmax@nobias softmax1@nobias sink@nobias"),
                     "x uniform": ("times_uniform_idle", "softmax@nobias softmax1@nobias sink@nobias")})},
          note=f"These recipes have weights on tokens that sum to one: {', '.join(SUM_TO_ONE)}. With an extra key they "
               "need not. \"At least partially\" allows for exceptions, so shares of recipes decide. By shares diff2, "
               "diff_rela and sigmoid have a sink although their rows need not sum to one, and sigmoid_norm and "
               "elu_norm have none although theirs do. Left out are the same rules with other scales, "
               "windows or gates (ssmax, asentmax, window, streaming, gpt_oss, gated_elementwise, rela_gated, "
               "linear_raw, dex), a sink token, which is itself a first token, recipes that divide by max(|row sum|, "
               "1) (identity_norm, mlp_norm), and mixers."),
]
