"""The mixers: attention, and layers that replace it with the same interface (attend, weights_of, causal, cached).

A mixer is a class with a table of its axes. A recipe of attention.ATTENTIONS names its mixer. All mixers are listed
here: a new mixer is a row of MIXERS. A new axis also needs a row of MEANINGS and a field of model.GPTConfig.
"""
import attention
from axes.options import check_axes as check_axes_of
from mixers.focus import Focus
from mixers.performer import Performer
from mixers.recurrent import Recurrent
from mixers.routing import Routing
from mixers.selection import Selection

MIXERS = {                                      # the first is the default
    "attention": attention.Attention, "focus": Focus, "routing": Routing, "performer": Performer,
    "recurrent": Recurrent, "selection": Selection}
# {axis: the values that any mixer accepts}. Each mixer lists only the axes it supports
AXES = {"mixer": MIXERS}
for _mixer in MIXERS.values():
    AXES |= {axis: AXES.get(axis, {}) | values for axis, values in _mixer.axes.items()}
NUMBERS = {name: number for mixer in MIXERS.values() for name, number in mixer.numbers.items()}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
DEFAULTS |= {name: number.default for name, number in NUMBERS.items()}
ADDED = {name for mixer in MIXERS.values() for name in mixer.added}     # to plain attention
RETROFITS = tuple(name for name, mixer in MIXERS.items() if mixer.retrofit)             # for --train_only

MEANINGS = {                                    # {axis: its help text}
    "mixer": "layer that mixes tokens: attention; focus: distant pairs need a common group; routing: all pairs need a "
             "common cluster; recurrent: every token changes and reads a state; performer: such a state that "
             "approximates softmax; selection: each query selects a few keys of a model trained with softmax",
    "rule": "how scores become attention weights; for a state: how a token changes it",
    "forget": "what a state loses at each token: nothing, a fixed share, or a share computed from the token",
    "write": "how much of its value a token writes into the state",
    "conv": "a convolution over 4 tokens, then silu, on the queries, keys and values of a state",
    "balance": "how a token's scores become its shares of Focus' groups",
    "affinity": "how Focus' gate acts on the score of a distant pair: its logarithm is added (log), or it multiplies "
                "the score (score)",
    "select": "how a query selects keys: the highest scores (topk), the highest scores in its largest components "
              "(sparq), pages by a bound (quest), or colliding hashes (magicpig)",
    "topk": "how many keys a query selects, 0: all; with Focus how many groups a token belongs to when the model is "
            "evaluated, 0: soft gates",
    "pos": "positions: rotary; none; an embedding of each position, fixed or learned; or a bias on the score: a slope "
           "(alibi), T5's learned buckets, the bucket numbers themselves (a negative control), or a learned bias per "
           "head and distance, also with rotary",
    "qk_norm": "norm of queries and keys: unit length (l2); unit mean square (rms); or RMSNorm with learned weights "
               "of each head or of all heads together",
    "feature": "feature map applied to queries and keys: elu + 1, or a small MLP",
    "scale": "factor on q.k: 1/sqrt(d); 1; or 1/sqrt(d) times a factor that grows with log n (SSMax, ASEntmax)",
    "normalize": "divisor of a row whose rule has no normaliser: 1, the row's sum, its length, or max(|sum|, 1)",
    "sink": "an extra key with score 0 (one), a learned score (logit), a learned key, or a learned key and value; or a "
            "learned token before the sequence (token)",
    "diff": "a second view, which is subtracted from the first: with shared values, or as in Differential "
            "Transformer's versions 1 and 2",
    "value_bias": "a learned vector added to each head's output",
    "dex": "Dex's learned correction of each head's output",
    "out_norm": "RMSNorm on the output of each head, or of all heads together; gated: the latter with ReLA's gate; "
                "layer: LayerNorm, for a state",
    "gate": "sigmoid gate on the output, computed from the layer's input: one per head, or one per element; for a "
            "state also silu, after or before the norm",
    "window": "number of keys that a row sees, its own included; 0: all earlier keys. Focus: keys that it sees "
              "whatever their group",
    "window_every": "N: only layers 0, N, 2N, ... have the window",
    "first": "number of first keys that stay visible beyond the window, as in StreamingLLM",
}


def layer_of(config, layer):
    """The mixer of one block. layer: the block's number, which decides whether it has a window."""
    return MIXERS[config.mixer](config, layer)


def trained_recipes():
    """The recipes that can be trained, a list. The others change a model that was trained with softmax."""
    return [name for name, axes in attention.ATTENTIONS.items() if MIXERS[axes.get("mixer", "attention")].trains]


def has_weights(recipe):
    """Is a recipe linear in its values? Only then it has attention weights."""
    return AXES["rule"][attention.recipe(recipe)["rule"]].linear


def check_axes(config):
    """Raise ValueError, with the reason, if a mixer does not accept a choice, or choices cannot be combined."""
    mixer = MIXERS[config.mixer]
    for axis, default in DEFAULTS.items():
        value, known = getattr(config, axis), (mixer.axes | {"mixer": MIXERS}).get(axis, [default])
        if value in known or axis in mixer.numbers:
            continue
        others = [name for name, other in MIXERS.items() if value in other.axes.get(axis, ()) or axis in other.numbers]
        why = mixer.refused.get(axis) or (f"it accepts {', '.join(map(str, known))}" if axis in mixer.axes else
                                          f"only mixer {' or '.join(others)} has it")
        raise ValueError(f"--{axis}={value} cannot be used with --attn={config.attn} (mixer {config.mixer}): {why}")
    check_axes_of(config, mixer.axes, mixer.numbers)


def choose_kernel(config, device):
    """Which code computes a recipe on a device: "triton", "sdpa" or "torch". Raises ValueError if an explicit
    --kernel cannot run."""
    return attention.choose_kernel(config, device, MIXERS[config.mixer].obstacles)
