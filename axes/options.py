"""The choices of one layer: the value of each axis, the constants of --attn_args, and which choices
exclude others."""

import math
from collections.abc import Callable
from typing import NamedTuple

from axes.outputs import DEXES, EXCLUSIONS, GATES, OUT_NORMS, VALUE_BIASES
from axes.positions import POSITIONS
from axes.queries_keys import FEATURES, QK_NORMS, SCALES
from axes.rows import DIFFERENCES, NORMALIZERS, SINKS

AXES = {  # axis: its values, the default first; attention.py adds the axis rule
    "pos": POSITIONS,
    "qk_norm": QK_NORMS,
    "feature": FEATURES,
    "scale": SCALES,
    "normalize": NORMALIZERS,
    "sink": SINKS,
    "diff": DIFFERENCES,
    "value_bias": VALUE_BIASES,
    "dex": DEXES,
    "exclude": EXCLUSIONS,
    "out_norm": OUT_NORMS,
    "gate": GATES,
}


def wrong_window(config, args, choices):
    if not config.window:
        return (
            f"--window_every={config.window_every} and --first={config.first} change a window: "
            "add --window=N"
        )
    if config.first and choices["pos"].rotates and config.feature == "elu":
        return (
            f"--first with --pos={config.pos} gives first and recent keys channels of their own, "
            "and --feature=elu makes the unused ones 1 instead of 0: use another --feature or --pos"
        )


class Number(NamedTuple):
    """An axis whose value is a whole number."""

    default: int  # also the smallest value
    refuse: Callable | None = None  # config, args, choices -> why another value is refused, or None


# kernels.Mask says what they do
NUMBERS = {
    "window": Number(0),
    "window_every": Number(1, wrong_window),
    "first": Number(0, wrong_window),
}


def chosen(config, axes):
    """{axis: the row of its value} for a config. axes: those of its mixer."""
    return {axis: values[getattr(config, axis)] for axis, values in axes.items()}


def constants(config, axes):
    """{name: value} of every constant of a config. --attn_args "name=value,name=value" beats the
    recipe's own `args`, which beat the defaults. Raises ValueError on an unknown name or a wrong
    value."""
    known = {}
    for choice in chosen(config, axes).values():
        known |= choice.args
    args = {name: constant.default for name, constant in known.items()}
    args |= {name: value for name, value in config.recipe.get("args", {}).items() if name in known}
    for part in filter(None, config.attn_args.split(",")):
        name, _, text = part.partition("=")
        if name not in known:
            raise ValueError(
                f"unknown --attn_args key {name!r}: --attn={config.attn} accepts "
                f"{', '.join(known) or 'none'}"
            )
        args[name] = parse_value(name, text, known[name])
    return args


def parse_value(name, text, constant):
    """The value of a constant from its text. Raises ValueError that says what is allowed."""
    default, low, high, word = constant
    if text == word:
        return text
    switch, whole = isinstance(default, bool), isinstance(default, int)
    switches = {"true": True, "1": True, "false": False, "0": False}
    try:
        value = switches[text.lower()] if switch else float(text)
    except (KeyError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high and not (whole and value % 1)):
        between = f" from {low:g} to {high:g}" if math.isfinite(low) else ""
        allowed = "1 or 0" if switch else f"a {'whole ' * whole}number{between}"
        allowed += f", or {word}" if word else ""
        raise ValueError(f"--attn_args {name}={text}: use {allowed}")
    return type(default)(value) if whole else value
