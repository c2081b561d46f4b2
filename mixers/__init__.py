"""What mixes the tokens of a block: attention, or something else with its face (attend, weights_of, causal, cached).

A mixer is a class with a table of its axes, and a recipe of attention.ATTENTIONS names it. This is the one place that
knows them all: a new mixer is a row of MIXERS. An axis of its own needs a row of MEANINGS and a field of
model.GPTConfig.
"""
import attention
from axes.options import check_axes as check_axes_of
from mixers.focus import Focus
from mixers.performer import Performer
from mixers.recurrent import Recurrent
from mixers.routing import Routing

MIXERS = {                                      # the first is the default
    "attention": attention.Attention, "focus": Focus, "routing": Routing, "performer": Performer,
    "recurrent": Recurrent}
# axis: the values that some mixer knows. An axis that a mixer has nothing to say about is not in its own table
AXES = {"mixer": MIXERS}
for _mixer in MIXERS.values():
    AXES |= {axis: AXES.get(axis, {}) | values for axis, values in _mixer.axes.items()}
NUMBERS = {name: number for mixer in MIXERS.values() for name, number in mixer.numbers.items()}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()} | attention.DEFAULTS
DEFAULTS |= {name: number.default for name, number in NUMBERS.items()}
ADDED = {name for mixer in MIXERS.values() for name in mixer.added}     # to what plain attention has
RETROFITS = tuple(name for name, mixer in MIXERS.items() if mixer.retrofit)             # for --train_only

MEANINGS = {                                    # axis: what -h says about it
    "mixer": "what mixes tokens: attention; attention whose distant pairs need a common group (focus) or a common "
             "cluster (routing); or a state that every token changes and reads, which may approximate softmax "
             "(performer)",
    "rule": "from scores to attention weights; of a state: how a token changes it",
    "forget": "what a state loses at each token: nothing, a fixed share, or a share that the token decides",
    "write": "how much of its value a token writes into the state",
    "conv": "a convolution over 4 tokens, then silu, on the queries, keys and values of a state",
    "balance": "how a token's scores become its shares of Focus' groups",
    "affinity": "what Focus' gate does to a distant pair: its logarithm is added to the score, or the score is "
                "multiplied by it",
    "topk": "how many of Focus' groups a token belongs to when the model is evaluated; 0: soft gates",
    "pos": "positions: rotary; none; an embedding of each position, fixed or learned; or a bias added to the score: a "
           "slope (ALiBi), T5's learned buckets, their bare numbers (a negative control), a learned bias per head and "
           "distance, also together with rotary",
    "qk_norm": "queries and keys scaled to unit length, or to unit mean square; with learned weights, for each head or "
               "for all heads together",
    "feature": "feature map applied to queries and keys: elu + 1, or a small MLP",
    "scale": "factor on q.k: 1/sqrt(d); 1; or 1/sqrt(d) times a factor that grows with log n (SSMax, ASEntmax)",
    "normalize": "divisor of a row whose rule has no normaliser: 1, the row's sum, its length, or max(|sum|, 1)",
    "sink": "an extra key: of score 0 (one), of a learned score (logit), a learned key, a learned key and value, or a "
            "learned token",
    "diff": "a second view, which is subtracted from the first: with shared values, or as in Differential "
            "Transformer's first and second version",
    "value_bias": "a learned vector added to each head's output",
    "dex": "Dex's learned correction of each head's output",
    "out_norm": "RMSNorm on the output of each head, of all heads together, or the latter with ReLA's gate",
    "gate": "sigmoid gate on the output, computed from the layer's input: one per head, or one per element; of a "
            "state also silu, after or before the norm",
    "window": "keys that a row sees, itself included; 0: all earlier keys. Of Focus: keys that it sees whatever their "
              "group",
    "window_every": "N: the window is in layers 0, N, 2N, ...",
    "first": "first keys that stay visible beyond the window, as in StreamingLLM",
}


def layer_of(config, layer):
    """The mixer of one block. The layer's number decides on its window."""
    return MIXERS[config.mixer](config, layer)


def has_weights(recipe):
    """Is a recipe linear in its values, so that there are weights to look at?"""
    return AXES["rule"][attention.recipe(recipe)["rule"]].linear


def check_axes(config):
    """Raise ValueError, with the reason, on choices that mean nothing to a config's mixer, or not together."""
    mixer = MIXERS[config.mixer]
    for axis, default in DEFAULTS.items():
        value, known = getattr(config, axis), (mixer.axes | {"mixer": MIXERS}).get(axis, [default])
        if value in known or axis in mixer.numbers:
            continue
        others = [name for name, other in MIXERS.items() if value in other.axes.get(axis, ())]
        why = mixer.refused.get(axis) or (f"it knows {', '.join(map(str, known))}" if axis in mixer.axes else
                                          f"it is of mixer {' or '.join(others)}")
        raise ValueError(f"--{axis}={value} means nothing to mixer {config.mixer} of --attn={config.attn}: {why}")
    check_axes_of(config, mixer.axes, mixer.numbers)


def choose_kernel(config, device):
    """Which code computes a recipe on a device: "triton", "sdpa" or "torch". Raises ValueError where an explicit
    --kernel cannot be."""
    return attention.choose_kernel(config, device, MIXERS[config.mixer].obstacles)
