"""What mixes the tokens of a block: attention, or something else with its face (attend, weights_of, causal, cached).

A mixer is a class with a table of its axes, and a recipe of attention.ATTENTIONS names it. This is the one place that
knows them all: a new mixer is a row of MIXERS, and what it has to choose of its own are fields of model.GPTConfig.
"""
import attention
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
    attention.check_axes(config, mixer.axes, mixer.numbers)


def choose_kernel(config, device):
    """Which code computes a recipe on a device: "triton", "sdpa" or "torch". Raises ValueError where an explicit
    --kernel cannot be."""
    return attention.choose_kernel(config, device, MIXERS[config.mixer].obstacles)
