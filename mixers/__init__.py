"""The mixers: attention, and layers that replace it with the same interface (attend, weight_blocks,
causal, cached; see axes.layer.Layer).

A mixer is a class with a table of its axes. A recipe of attention.ATTENTIONS names its mixer. All
mixers are listed here: a new mixer is a row of MIXERS. A new axis also needs a field of
model.GPTConfig.
"""

import torch

import attention
from axes import options
from axes.positions import POSITIONS
from mixers.focus import Focus
from mixers.performer import Performer
from mixers.recurrent import Recurrent
from mixers.routing import Routing
from mixers.selection import Selection

MIXERS = {  # the first is the default
    "attention": attention.Attention,
    "focus": Focus,
    "routing": Routing,
    "performer": Performer,
    "recurrent": Recurrent,
    "selection": Selection,
}
# {axis: the values that any mixer accepts}. Each mixer lists only the axes it supports
AXES = {"mixer": MIXERS}
for _mixer in MIXERS.values():
    AXES |= {axis: AXES.get(axis, {}) | values for axis, values in _mixer.axes.items()}
NUMBERS = {name: number for mixer in MIXERS.values() for name, number in mixer.numbers.items()}
DEFAULTS = {axis: next(iter(values)) for axis, values in AXES.items()}
DEFAULTS |= {name: number.default for name, number in NUMBERS.items()}
ADDED = {name for mixer in MIXERS.values() for name in mixer.added}  # to plain attention
RETROFITS = tuple(name for name, mixer in MIXERS.items() if mixer.retrofit)  # for --train_only


def layer_of(config, depth):
    """The mixer of one block. depth: the block's number, which decides whether it has a window."""
    mixer = MIXERS[config.mixer]
    if mixer is attention.Attention and config.first and POSITIONS[config.pos].rotates:
        mixer = attention.Streaming
    return mixer(config, depth)


def trained_recipes():
    """The recipes that can be trained, a list. The others change a model that was trained with
    softmax."""
    return [
        name
        for name, axes in attention.ATTENTIONS.items()
        if MIXERS[axes.get("mixer", "attention")].trains
    ]


def has_weights(recipe):
    """Is a recipe's output linear in the values? Only then does it have attention weights."""
    return AXES["rule"][attention.recipe(recipe)["rule"]].has_weights


def check_axes(config):
    """Raise ValueError, with the reason, if a mixer does not accept a choice, or if choices do not
    combine."""
    mixer = MIXERS[config.mixer]
    for axis, default in DEFAULTS.items():
        value = getattr(config, axis)
        known = mixer.axes.get(axis, [default])
        if value in known or axis in mixer.numbers or axis == "mixer":
            continue
        why = mixer.refused.get(axis)
        if not why and axis in mixer.axes:
            why = f"it accepts {', '.join(known)}"
        elif not why:
            others = [
                name
                for name, other in MIXERS.items()
                if value in other.axes.get(axis, ()) or axis in other.numbers
            ]
            why = f"only mixer {' or '.join(others)} has it"
        raise ValueError(
            f"--{axis}={value} cannot be used with --attn={config.attn} (mixer {config.mixer}): "
            f"{why}"
        )
    args = options.constants(config, mixer.axes)
    choices = options.chosen(config, mixer.axes)
    changed = [
        number for name, number in mixer.numbers.items() if getattr(config, name) != number.default
    ]
    for choice in [*choices.values(), *changed, mixer]:
        if choice.refuse and (reason := choice.refuse(config, args, choices)):
            raise ValueError(reason)


# what the values of an axis must have in common for layers of one model (--layers)
SHARED_BY_LAYERS = {
    "pos": lambda row: row.embeds,  # the embedding of positions
    "sink": lambda row: row.tokens,  # the number of sink tokens
    "diff": lambda row: row.heads(2, 2, 1)[2],  # the number of heads
}


def check_layers(config):
    """Raise ValueError if the layers of --layers do not combine."""
    layers = config.layer_configs
    if len(layers) > config.n_layer:
        raise ValueError(
            f"--layers={config.layers} names {len(layers)} layers, and n_layer={config.n_layer}: "
            "raise it"
        )
    for axis, part in SHARED_BY_LAYERS.items():
        value, rows = getattr(config, axis), AXES[axis]
        alike = [name for name, row in rows.items() if part(row) == part(rows[value])]
        values = dict.fromkeys(getattr(layer, axis) for layer in layers)
        if wrong := [name for name in values if name not in alike]:
            raise ValueError(
                f"--layers={config.layers}: {axis}={value}, from the preset, the first recipe or "
                f"the default, does not combine with a layer's {axis}={' or '.join(wrong)}: add "
                f"--{axis}=VALUE to have one in all layers, or give each layer "
                f"{axis}={' or '.join(alike)}"
            )


def check_packs(config):
    """Raise ValueError if a layer cannot keep packed documents (--docs) apart. Only attention
    can."""
    if config.mixer != "attention":
        raise ValueError(
            f"--docs=1 needs attention, and --attn={config.attn} is of mixer {config.mixer}, which "
            "does not keep documents apart: leave out --docs"
        )
    if config.sink == "token":
        raise ValueError(
            "--docs=1 cannot be used with --sink=token, which precedes the first document only: "
            "use --sink=key_value"
        )


def choose_kernel(config, device, importance=False):
    """Which code computes a recipe on a device: "triton", "cpp", "sdpa" or "torch"; with --layers
    perhaps "torch and sdpa". If auto passes cpp over on a CPU, the reason follows. importance:
    whether head importance is measured. Without a gate this takes a row's log-sum-exp, which sdpa
    does not return. Raises ValueError if an explicit --kernel cannot run."""
    found = []
    for one in config.layer_configs:
        with torch.device("meta"):
            layer = layer_of(one, 0)
        kernel = layer.kernel_on(device)
        if kernel == "sdpa" and importance and one.gate == "none":
            if config.kernel == "sdpa":
                raise ValueError(
                    "--kernel=sdpa: --head_balance needs the log-sum-exp of each row, which "
                    "torch's fused softmax does not return; use auto or torch"
                )
            kernel = "torch"
        if device == "cpu" and config.kernel == "auto" and kernel != "cpp":
            kernel += f" (not cpp: {layer.obstacles_by_kernel(device)['cpp']})"
        if one.mixer == "focus" and kernel != "torch":
            kernel = f"torch ({kernel} in evaluation, where gates are hard)"
        found.append(kernel)
    return " and ".join(dict.fromkeys(found))
