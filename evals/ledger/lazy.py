"""Lazy Attention."""
import numpy as np

from evals.ledger.claim import GPU_SOFTMAX_SINK, NOBOS_SOFTMAX_SINK, Bound, Claim, Reading, depth_correlation, thirds

TITLE = "[1] Lazy Attention"
CITED = "Attention Needs to Focus: A Unified Perspective on Attention Allocation, arXiv 2601.00919"

# ---------------------------------------------------------------------------- quantities that are more than a column


def median_of_layers(column):
    """The median over the layers after the first of a pair's ratio: that of the first token over the others'."""
    def value(n):
        pairs = n[column]["smollm2"]            # (1, layers, 2)
        return np.median(pairs[:, 1:, 0] / pairs[:, 1:, 1], 1)
    return value


def of_text(n):
    """The sink logit's mass on repeated tokens, over that on ordinary text."""
    return n["extra"]["sink-rope"] / n["extra on text"]["sink-rope"]


def difference_on_short_texts(n):
    (first_and_last,), (full,) = (n[f"short, {which}"].values() for which in ("first and last", "full"))
    return np.abs(first_and_last - full)


def states_apart(n):
    """The largest distance of the hidden states with relative positions, of trained and of untrained models."""
    return np.max([values for name, values in n["spread"].items() if name.startswith(("rope", "alibi"))], 0)


def change_by_bias(n):
    loss = n["loss"]
    return {"softmax": loss["rope+bias"] - loss["softmax"], "elastic": loss["lazy"] - loss["elastic"]}


def decay(n):
    """The decay of each layer's mean bias, (seeds, layers): its mean at distances 1 to 8, less that beyond a quarter of
    all distances."""
    curve = n["bias"]["lazy"].mean(2)           # (seeds, layers, W)
    return curve[..., 1:9].mean(-1) - curve[..., curve.shape[-1] // 4 + 1:].mean(-1)


def decay_over_first(third):
    """The decay in a third of the layers (0, 1, 2), over that of the first layer."""
    return lambda n: thirds(decay(n))[third] / decay(n)[:, 0]


def inhibiting(n):
    """The shares of the upper half's heads that meet each of three conditions, and all of them."""
    curves = n["bias"]["lazy"][:, n["bias"]["lazy"].shape[1] // 2:]     # (seeds, layers, heads, W)
    lowest = curves[..., 1:].argmin(-1) + 1
    signs = (curves[..., 1] > 0) & (curves[..., 2:11].mean(-1) < 0)
    place = (lowest >= 2) & (lowest <= 30)
    back = np.abs(curves[..., 101:].mean(-1)) < 0.5 * np.abs(curves[..., 2:11].mean(-1))
    met = {"all three": signs & place & back, "signs": signs, "place of the lowest": place, "recovered": back}
    return {name: heads.mean((1, 2)) for name, heads in met.items()}


def first_tau_over(extreme):
    """The mean tau of layer 1, less the largest of the layers up to two thirds, or the smallest of all others."""
    def value(n):
        (tau,) = n["tau"].values()              # (seeds, layers, heads)
        first, *others = tau.mean(2).T          # each (seeds,)
        return first - extreme(others[:max(1, len(others) * 2 // 3)] if extreme is np.max else others, 0)
    return value


def deviation_on_top(n):
    """The deviation of tau over heads in the upper third of the layers, over that in the middle third."""
    (tau,) = n["tau"].values()
    _, middle, upper = thirds(tau.std(2))
    return upper / middle


def increase(first, second, ratio):
    """The increase of the loss of one of (softmax, elastic, lazy), over or less that of another, by length."""
    def value(n):
        found = {column: list(group.values()) for column, group in n.items()}
        return {T: more[first] / more[second] if ratio else more[first] - more[second] for T, more in found.items()}
    return value


def plain_over_worst(n):
    """The mean loss of plain tau, less the largest of the other forms."""
    loss = {name: values.mean() for name, values in n["loss"].items()}
    return loss.pop("tau-plain") - max(loss.values())


def place_of_its_sink(n):
    """How many forms have a smaller mean sink than tau/n started at 1."""
    sink = {name: values.mean() for name, values in n["sink"].items()}
    return sum(value < sink["elastic"] for value in sink.values())


def reach(curves):
    """The distance beyond which the smoothed bias stays below a tenth of its largest, a median over heads. nan for a
    bias that does not fade: in the last quarter of the distances its mean is above a tenth of its largest."""
    curves = np.abs(curves).reshape(-1, curves.shape[-1])
    if np.median(tails(curves)) > 0.1:
        return np.nan
    smooth = np.array([np.convolve(curve, np.ones(5) / 5, "same") for curve in curves])
    return np.median([np.flatnonzero(curve >= curve.max() / 10)[-1] for curve in smooth])


def tails(curves):
    """The mean size of each bias in the last quarter of the distances, over its largest."""
    size = np.abs(curves)
    return size[..., -(size.shape[-1] // 4):].mean(-1) / size.max(-1)


def change_of_slopes(n):
    before, after = (n[column]["alibi-learned"] for column in ("slopes at first", "slopes"))
    return np.mean(np.abs(after - before) / before)


# ------------------------------------------------------------------------------------------------------------- the rows

SINK = {"raw": ("sink_idle", "softmax elastic lazy"), "share": ("share_idle", "softmax elastic lazy"),
        "mass": ("row_mass_idle", "softmax elastic lazy")}


def fixed_at(places, setup):
    """The columns of fixed-token-16: the weight on the fixed and on the first token."""
    return {f"{who} at {p}": (f"fixed/on {who}", f"softmax@{setup}{p}") for p in places for who in ("fixed", "first")}


def fixed_bounds(places):
    """The fixed token wins at early places alone."""
    def best(n):
        return max(np.mean(n[f"fixed at {p}"]["softmax"] - n[f"first at {p}"]["softmax"]) for p in places)
    return (*(Bound(what=f"weight on the token fixed at {p}, less that on the first", column=f"fixed at {p}",
                    less=f"first at {p}", agrees="> 0" if p <= 8 else "<= 0" if p >= 32 else "",
                    contradicts="> 0" if p == 64 else "", means=True) for p in places),
            Bound(what="the largest of these", value=best, contradicts="<= 0"))


def variances(look):
    """The columns of sink-low-variance."""
    return {"|v0|": (f"{look}/stream/*/value_norm", "smollm2"), "var of h": (f"{look}/stream/*/hidden_var", "smollm2"),
            "after the norm": (f"{look}/stream/*/input_var", "smollm2")}


def streamed(run):
    """The columns of streaming-ppl."""
    return {"full": ("loss/loss", run), "first and last": ("loss-streaming/loss", run),
            "last": ("loss-window/loss", run), "short, full": ("loss-short/loss", run),
            "short, first and last": ("loss-short-streaming/loss", run)}


def repeat_of(look, control):
    """The columns of repeat-tokens for one kind of repeated text. control: the look at the text as it is."""
    learned, untrained = "softmax sinusoidal rope alibi", "learned-untrained sinusoidal-untrained"
    return {"x uniform": (f"{look}/mean/times_uniform", f"{learned} {untrained}"),
            "not repeated": (f"{control}/mean/times_uniform", learned),
            "spread": (f"{look}/stream/1/spread", f"{learned} {untrained} rope-untrained alibi-untrained"),
            "extra": (f"{look}/mean/extra", "sink-rope"), "extra on text": ("probe/mean/extra", "sink-rope")}


CLAIMS = [
    Claim(id="elastic-removed-mass", place="abstract, 5.2, 5.6, eq. 5",
          says="Elastic-Softmax reaches 59.58 % sparsity, and at tau = 1 it switches off a row whose scores are all "
               "equal.",
          theirs="59.58 %. This is 100 - 40.24 - 0.18 from table 2, so it is the mass removed, not the share of "
                 "zeros. The models there have T = 512.",
          cost="cpu-minutes",
          reads={"mass": ("row_mass", "elastic@text"), "zeros": ("sparsity", "elastic@text")},
          bounds=(Bound(what="mass removed", value=lambda n: 1 - n["mass"]["elastic"], agrees="0.4 to 0.8",
                        contradicts="< 0.2"),
                  Bound(what="exact zeros", column="zeros"),
                  Bound(what="exact zeros less mass removed",
                        value=lambda n: n["zeros"]["elastic"] + n["mass"]["elastic"] - 1)),
          note="In the lab nine rows in ten are idle, so more is removed. Random scores of SD 1 lose 0.62, as much as "
               "the paper's trained model, so the size alone shows no training. That a row of equal scores is switched "
               "off follows from the definition. Where zeros and mass differ, sparsity is the wrong word.",
          elsewhere={"gpu": Reading(reads={"mass": ("row_mass", "elastic@gpu"), "zeros": ("sparsity", "elastic@gpu")}),
                     "lab": Reading(reads={
                         "mass": ("probe/mean/row_mass", "elastic"), "zeros": ("probe/mean/sparsity", "elastic"),
                         **{f"{what}, scores of {d}": (f"sd {d}/{what}", "random_scores")
                            for what in ("removed", "zeros") for d in (0.02, 0.5, 1, 2)}})}),
    Claim(id="fixed-token-16", place="3.1, figure 2a",
          says="A fixed token early in every training text takes over the sink, but if it comes more than 16 tokens "
               "in, the first token keeps the sink.",
          theirs="The threshold is 16 tokens. The set-up is not given.",
          cost="gpu-minutes",
          tested="mean weights of the queries after the fixed token",
          reads=fixed_at((4, 8, 16, 32, 64), "gpu-fixed") | GPU_SOFTMAX_SINK, fails="any",
          bounds=fixed_bounds((4, 8, 16, 32, 64)),
          note="The texts have no BOS. In the lab they have 64 tokens, too few for a fixed token at 64.",
          elsewhere={"lab without BOS": Reading(reads=fixed_at((4, 32), "fixed") | NOBOS_SOFTMAX_SINK,
                                                bounds=fixed_bounds((4, 32)))},
          seeds=1),
    Claim(id="sink-low-variance", place="3.1, appendix G, tables 4 to 7",
          says="The sink token has a tiny value vector and a hidden state of abnormal variance.",
          theirs="In Qwen3-4B the norm of the value is 0.461 against 2.6 to 4.75, and the variance is 0.0202 against "
                 "0.078 to 0.122. Section 3.1 says that the variance is much greater, but appendix G calls it "
                 "markedly smaller.",
          cost="public-weights",
          tested="first token divided by the others, median of the layers after the first",
          reads=variances("public-probe"),
          bounds=(Bound(what="norm of the value", value=median_of_layers("|v0|"), agrees="<= 0.5", contradicts="> 0.8"),
                  Bound(what="variance of the hidden state", value=median_of_layers("var of h"), agrees=">= 10"),
                  Bound(what="variance after the norm", value=median_of_layers("after the norm"), agrees="<= 1")),
          note="We use SmolLM2 instead of the paper's Qwen3-4B and BLOOM. That 10 times is \"abnormal\" is our choice.",
          elsewhere={"separator first": Reading(reads=variances("public-bos")),
                     "lab, values alone": Reading(
                         reads={"|v0|/|v|": ("value_norm_ratio", "softmax")},
                         bounds=(Bound(what="norm of the value", column="|v0|/|v|", agrees="<= 0.5",
                                       contradicts="> 0.8"),))}),
    Claim(id="repeat-tokens", place="3.2, figure 3b, appendix G",
          says="If one token is repeated, absolute positions keep the sink, RoPE and ALiBi lose it because all hidden "
               "states coincide, and a sink logit keeps it.",
          theirs="The norms of all positions agree within 0.5 % in Qwen3-4B and within 0.1 % in BLOOM. "
                 "Appendix G: \"every position behaves like a sink token\".",
          cost="lab",
          tested="weight on the first token over uniform",
          reads=repeat_of("repeat", "probe-nobos"), fails="any",
          bounds=(Bound(what="learned and sinusoidal positions", column="x uniform", of="softmax sinusoidal",
                        agrees=">= 3"),
                  Bound(what="the larger of these", value=lambda n: max(
                      n["x uniform"]["softmax"].max(), n["x uniform"]["sinusoidal"].max()), contradicts="< 3"),
                  Bound(what="RoPE and ALiBi", column="x uniform", of="rope alibi", agrees="<= 1.7",
                        sink="not repeated/rope"),
                  Bound(what="the smaller of these", value=lambda n: min(
                      n["x uniform"]["rope"].min(), n["x uniform"]["alibi"].min()), contradicts="> 1.7",
                        sink="not repeated/rope"),
                  Bound(what="the same text without repetition", column="not repeated"),
                  Bound(what="largest distance of the hidden states with RoPE and ALiBi", value=states_apart,
                        agrees="<= 1e-5", contradicts="> 1e-5"),
                  Bound(what="the sink logit's mass over that on ordinary text", value=of_text, agrees=">= 0.5",
                        contradicts="< 0.5")),
          note="The repeated token is the first symbol of a text without BOS. On such a text RoPE and ALiBi have no "
               "sink in the lab that repetition could remove; SmolLM2 has one. With one layer and relative positions "
               "it follows from the definition that all states coincide. If BOS is repeated, every position has a "
               "sink's key. Half of the mass is our bound. Untrained models have no sink, so only their hidden "
               "states count. GPT-2 is left to users.",
          elsewhere={"BOS repeated": Reading(reads=repeat_of("repeat-bos", "probe")),
                     "SmolLM2": Reading(
                         reads={"x uniform": ("public-repeat/mean/times_uniform", "smollm2"),
                                "spread": ("public-repeat/stream/1/spread", "smollm2")},
                         bounds=(Bound(what="RoPE", column="x uniform", agrees="<= 1.7", contradicts="> 1.7"),
                                 Bound(what="largest distance of the hidden states", column="spread",
                                       agrees="<= 1e-5", contradicts="> 1e-5")))}),
    Claim(id="lazy-vs-recurrent", place="table 1, 5.2",
          says="Of all architectures Lazy Attention has the best average at 340M parameters, and at 760M it nearly "
               "reaches that of Titans.",
          theirs="At 340M: 48.01 against 47.68 (Gated DeltaNet) and 47.54 (Titans), and 48.39 for its own form without "
                 "Elastic-Softmax. At 760M: 51.53 against 51.56. The paper says that it outperforms all, but its "
                 "perplexity is worse (25.32 against 24.90 and 25.07). TTT's printed average is 47.32, but its row "
                 "averages 49.37.",
          cost="out of reach", tested="needs models of 340M parameters trained on 15B tokens"),
    Claim(id="streaming-ppl", place="table 1",
          says="A streaming cache, which keeps only the first and last keys, harms perplexity on long text and "
               "nothing else.",
          theirs="Perplexity rises from 25.76 to 35.52 at T = 4096. LAMBADA and the averages are unchanged.",
          cost="gpu-minutes",
          tested="loss in nats, by the keys that a row sees",
          reads=streamed("softmax@gpu"), elsewhere={"SmolLM2": Reading(reads=streamed("smollm2"))},
          bounds=(Bound(what="first 4 and last 64, less all keys", column="first and last", less="full", agrees="> 0",
                        contradicts="<= 0"),
                  Bound(what="last 64 alone, less first 4 and last 64", column="last", less="first and last"),
                  Bound(what="difference on texts shorter than 64", value=difference_on_short_texts,
                        agrees="<= 1e-5")),
          note="\"Nothing else\" is tested with texts that fit into the cache, where nothing can change. Benchmarks "
               "are not tested.",
          seeds=1),
    Claim(id="lazy-ablation", place="table 1, 5.2",
          says="Removing Elastic-Softmax makes the model better, and removing the learned distance bias makes it "
               "worse.",
          theirs="Perplexity is 25.32 for the full model, 24.59 without Elastic-Softmax and 25.58 without the bias. "
                 "Softmax without the bias has 25.76, so there Elastic-Softmax helps; in table 2 it harms (2.64 "
                 "against 2.62). The text calls the full model consistently better than the one without the bias and "
                 "names WinoGrande, where it is worse.",
          cost="gpu-minutes",
          tested="change of the validation loss",
          reads={"loss": ("best", "softmax@gpu rope+bias@gpu elastic@gpu lazy@gpu")}, fails="any",
          bounds=(Bound(what="by the bias", value=change_by_bias, agrees="clearly < 0", contradicts="clearly > 0"),
                  Bound(what="by Elastic-Softmax beside the bias", column="loss", of="lazy", less="rope+bias",
                        agrees="clearly > 0", contradicts="clearly < 0"),
                  Bound(what="by Elastic-Softmax alone", column="loss", of="elastic", less="softmax")),
          note="Their tables differ about Elastic-Softmax without the bias, so it has no say.",
          variations=("text",)),
    Claim(id="bias-by-depth", place="5.3, figure 4",
          says="The learned distance bias decays like ALiBi in the first layer, half as much in the middle layers, "
               "and not at all in the top layers.",
          theirs="The decay is about 50 % lower in the middle layers. The model has 24 layers.",
          cost="gpu-minutes",
          reads={"bias": ("params/distance_bias/now", "lazy@gpu")},
          bounds=(Bound(what="rank correlation of depth and decay", value=lambda n: depth_correlation(decay(n)),
                        agrees="<= -0.5", contradicts=">= 0.5"),
                  Bound(what="decay of the middle third, over that of the first layer", value=decay_over_first(1)),
                  Bound(what="decay of the last third, over that of the first layer", value=decay_over_first(2),
                        agrees="<= 1/4"),
                  Bound(what="number of layers", value=lambda n: n["bias"]["lazy"].shape[1], needs=">= 6")),
          note="\"Not at all\" is asked as a quarter at most. The middle layers, and what \"like ALiBi\" means, have "
               "no bound.",
          variations=("text6",), seeds=1),
    Claim(id="ior-shape", place="5.3, figure 4",
          says="The bias of the upper layers favours the next neighbour, falls below zero up to distance 10, and is "
               "back at zero beyond 100.",
          theirs="The paper names three ranges of distances.",
          cost="gpu-minutes",
          tested="a bias that is positive at distance 1 and negative on average at 2 to 10 (signs), is lowest within 2 "
                 "to 30, and beyond 100 is on average less than half as large as at 2 to 10 (recovered)",
          reads={"bias": ("params/distance_bias/now", "lazy@gpu")},
          bounds=(Bound(what="share of the heads in the upper half", value=lambda n: inhibiting(n)["all three"],
                        agrees="> 0.5", contradicts="< 0.2"),
                  Bound(what="share that meets", value=inhibiting)),
          variations=("text6",), seeds=1),
    Claim(id="tau-by-depth", place="5.4, figures 5 and 10, appendix E",
          says="The learned tau is extreme in the first layer, steady in the middle layers, and spread out over heads "
               "in the top layers.",
          theirs="The plotted offset, -tau, is about -1.0 in layers 2 to 17. Appendix E says that tau falls in the "
                 "middle layers.",
          note="The bounds ask for a tau that is higher in the first layer, by however little. That it is steady in "
               "the middle layers has no bound.",
          cost="gpu-minutes",
          reads={"tau": ("params/figures/tau/now", "elastic@gpu")}, fails="any",
          bounds=(Bound(what="tau of layer 1, less the largest of the middle layers", value=first_tau_over(np.max),
                        agrees="> 0"),
                  Bound(what="tau of layer 1, less the smallest of all others", value=first_tau_over(np.min),
                        contradicts="<= 0"),
                  Bound(what="deviation over heads in the upper third, over that in the middle third",
                        value=deviation_on_top, agrees=">= 1.5", contradicts="< 1")),
          variations=("text6",),
          elsewhere={"gpu, tau learns x30": Reading(reads={"tau": ("params/figures/tau/now", "elastic-x30@gpu")})},
          seeds=1),
    Claim(id="lazy-extrapolates", place="5.5, figure 6",
          says="Beyond the training length Lazy Attention degrades far less than softmax, but only with its distance "
               "bias.",
          theirs="Only a figure, for models trained at 512 and tested at 1024 and 2048.",
          cost="lab",
          tested="increase of the loss at 2 and 4 times the training length, all with RoPE",
          reads={T: (f"far/{T}", "rope elastic-rope lazy") for T in ("65-128", "129-256")},
          bounds=(Bound(what="lazy over softmax", value=increase(2, 0, ratio=True), agrees="< 0.5", contradicts=">= 1"),
                  Bound(what="elastic less lazy", value=increase(1, 2, ratio=False), agrees="> 0")),
          note="In the lab we measure the excess loss by position in sequences of 256, after training on sequences of "
               "64. Models on text (gpu too) are read at twice and four times the length of their training.",
          elsewhere={setup: Reading(reads={f"at {T}": (f"{look}/lengths/{i}/more",
                                                       f"softmax@{setup} elastic@{setup} lazy@{setup}")
                                           for i, T in ((1, 2 * length), (2, 4 * length))})
                     for setup, look, length in (("text", "lengths-text", 256), ("gpu", "lengths-far", 512))}),
    Claim(id="elastic-offset-order", place="table 2",
          says="Softmax has the lowest loss, followed by tau/n started at 1, tau/n started at 0, fixed 1/n and plain "
               "tau, and tau/n started at 1 has the smallest sink.",
          theirs="In this order, the loss is 2.62, 2.64, 2.65, 2.67, 2.75 and the sink 5.46, 0.18, 4.15, 0.54, 1.66 "
                 "%. The text calls plain tau fixed, but in the table it is learned.",
          cost="gpu-minutes",
          reads={column: (figure, "elastic@gpu tau-from-0@gpu tau-fixed@gpu tau-plain@gpu softmax@gpu")
                 for column, figure in (("loss", "best"), ("sink", "sink"), ("mass", "row_mass"))}
          | {"softmax, x uniform": ("times_uniform", "softmax@gpu")},
          fails="any",
          bounds=(Bound(what="mean loss of plain tau, less the largest of the others", value=plain_over_worst,
                        agrees="> 0", contradicts="< -0.02"),
                  Bound(what="forms with a smaller sink than tau/n started at 1", value=place_of_its_sink,
                        agrees="== 0", contradicts=">= 2", sink="softmax, x uniform")),
          note="Of the order only its end is tested. 0.02 nats is our bound for \"not the worst\".",
          variations=("text",)),
    Claim(id="lazy-sink-gone", place="table 2, figure 7, 5.6",
          says="Elastic-Softmax with a learned tau that starts at 1 removes the sink on the first token.",
          theirs="The sink falls from 5.46 to 0.18 %. Uniform rows would have 1.33 %.",
          cost="lab",
          tested="idle rows",
          reads=SINK,
          bounds=(Bound(what="weight on the first token over softmax's", column="raw", of="elastic lazy",
                        over="softmax", agrees="<= 1/10", contradicts=">= 1/3"),),
          variations=("lr3e-3", "table2"),
          elsewhere={"gpu": Reading(reads={"raw": ("sink", "softmax@gpu elastic@gpu lazy@gpu"),
                                           "mass": ("row_mass", "elastic@gpu lazy@gpu"), **GPU_SOFTMAX_SINK})}),
    Claim(id="bias-range", place="appendix D, figures 8 and 9",
          says="The bias is useful over about 100 tokens alone and over 20 beside RoPE or ALiBi, and ALiBi's slopes "
               "hardly move in training.",
          theirs="100 and 20 tokens. But the proposed model combines RoPE with the bias, and section 5.3 reports "
                 "structure up to 100.",
          cost="gpu-minutes",
          tested="reach: the distance beyond which the bias stays below a tenth of its maximum",
          reads={"bias": ("params/distance_bias/now", "bias-alone@gpu rope+bias@gpu"),
                 "slopes": ("params/figures/alibi/now", "alibi-learned@gpu"),
                 "slopes at first": ("params/figures/alibi/start", "alibi-learned@gpu")},
          bounds=(Bound(what="reach alone over reach with RoPE",
                        value=lambda n: reach(n["bias"]["bias-alone"]) / reach(n["bias"]["rope+bias"]),
                        agrees=">= 2", contradicts="<= 1"),
                  Bound(what="bias in the last quarter of the distances, over its maximum",
                        value=lambda n: {run: np.median(tails(bias), (1, 2)) for run, bias in n["bias"].items()}),
                  Bound(what="relative change of the slopes", value=change_of_slopes, agrees="< 0.2",
                        contradicts=">= 1")),
          note="This repository does not offer ALiBi together with the bias, so that part is left out. A bias that is "
               "not small at the largest distances has no reach.",
          variations=("text",), seeds=1),
    Claim(id="elastic-two-pass", place="appendix F",
          says="Elastic-Softmax takes two exact passes with O(n) memory and little extra time.",
          theirs="No numbers. One paragraph calls the computation both linear in the length and O(n^2) in time.",
          cost="gpu-minutes",
          tested="time over that of our softmax kernel, at T = 16k, bf16, width 64",
          reads={"forward": ("sizes/width 64, T 16384/elastic/forward_ratio", "kernels"),
                 "forward and backward": ("sizes/width 64, T 16384/elastic/both_ratio", "kernels")},
          fails="any",
          bounds=(Bound(what="forward", value=lambda n: 1 / n["forward"]["kernels"],
                        agrees="<= 2.0", contradicts="> 2.0"),
                  Bound(what="forward and backward", value=lambda n: 1 / n["forward and backward"]["kernels"],
                        agrees="<= 1.6", contradicts="> 1.6")),
          note="\"Little extra time\" is asked as twice the forward pass at most, because the kernel makes two. Only "
               "the longest T counts. The forward and the backward pass are timed separately and added up. The tests "
               "of the kernels cover the memory, which should at most double with T.",
          seeds=1),
]
