"""Which value of a knob wins: that of a flag, recipe, stored run, or preset, or else the default.

train.py and the instruments resolve all knobs here, before a dataclass checks any of them."""

from pathlib import Path

import attention
import mixers
from common.flags import fields_of
from common.presets import PRESETS
from common.runs import read_run
from model import GPTConfig


def resolve(sources, flags):
    """Decide the knobs of a run: {knob: value}, and {knob: the name of the source of its value}.

    sources: {name: {knob: value}}, such as a preset and a stored run; flags: {knob: value}, those
    given. Later beats earlier: the sources in their order, the recipe of a given --attn, the flags.
    A knob that nobody names keeps its default. Raises ValueError if --attn is not the first
    recipe of --layers."""
    if flags.get("layers"):
        first = attention.pattern(flags["layers"])[0][0]
        flags = {"attn": first} | flags
        if flags["attn"] != first:
            raise ValueError(
                f"--layers={flags['layers']} begins with {first}: leave out --attn={flags['attn']}"
            )
    knobs, origins = {}, {}

    def take(source, values):
        knobs.update(values)
        origins.update(dict.fromkeys(values, source))

    for source, values in sources.items():
        take(source, values)
    if "attn" in flags:
        # A stored run has a value for every axis. The new recipe removes those that the run's own
        # recipe has set (None: see GPTConfig), but not those that its flags have changed
        old = attention.ATTENTIONS.get(knobs.get("attn"), {})
        removed = [axis for axis, value in old.items() if knobs.get(axis) == value]
        take("default", dict.fromkeys(removed))  # None: GPTConfig fills it in
        base = {axis: knobs.get(axis) for axis in mixers.DEFAULTS}
        new = {"attn_args": "", "layers": ""} | attention.recipe(flags["attn"])
        if flags["attn"] == knobs.get("attn") and not (knobs.get("layers") or "layers" in flags):
            del new["attn_args"]  # the run keeps its constants as well
        take(f"recipe {flags['attn']}", new)
    if flags.get("layers"):  # what the sources set holds in layers whose own recipe does not set it
        flags["layers"] = with_axes(flags["layers"], base)
    take("flag", flags)
    axes = "".join(f",{axis}={flags[axis]}" for axis in mixers.DEFAULTS if axis in flags)
    if axes and knobs.get("layers"):  # they hold in all layers: the last value of an axis wins
        layers = attention.layers_of(knobs["layers"])
        take("flag", {"layers": "+".join(layer + axes for layer in layers)})
    return knobs, origins


def with_axes(layers, base):
    """The text of --layers in which each layer names its values of the axes that `base` changes."""
    parts = []
    for part in attention.layers_of(layers):
        name, *own = part.split(",")
        axes = base | attention.ATTENTIONS.get(name.partition("*")[0], {})
        changed = (
            axis for axis, default in mixers.DEFAULTS.items() if base[axis] not in (None, default)
        )
        parts.append(",".join([name, *(f"{axis}={axes[axis]}" for axis in changed), *own]))
    return "+".join(parts)


def resolve_run(flags, Train):
    """The same for train.py, from the flags given and the dataclass of its knobs. Returns {knob:
    value}, {knob: its source}, and meta.json of the run to resume, or None."""
    init_from = flags.get("init_from", "scratch")
    name = flags.get("preset", Train.preset)
    if init_from == "resume":
        return resolve_resumed(flags, PRESETS[name], Train)
    run = {}
    if init_from != "scratch":  # the model and the data of another run
        meta, checkpoint = read_run(init_from)
        stored = meta["knobs"]
        run[f"run {init_from}"] = fields_of(GPTConfig, stored) | {"dataset": stored["dataset"]}
        flags = flags | {"init_from": str(checkpoint)}
        # public weights, and runs that began with them, have contexts too long for most machines:
        # tune has a short one
        if "source" in meta or stored.get("preset") == "tune":
            name = flags.get("preset", "tune")
    preset = {f"preset {name}": PRESETS[name] | {"preset": name}}
    # tune is made to change a stored run. Other presets give way to it
    sources = run | preset if name == "tune" else preset | run
    return *resolve(sources, flags), None


# knobs that may change on resume: model, data and batches stay. Another device, dtype or kernel
# rounds differently. Another max_iters also moves the end of the cosine (unless --lr_decay_iters is
# given) and of the layers' schedules
MAY_CHANGE = (
    "out_dir device dtype compile shard kernel max_iters eval_interval log_interval wandb".split()
)


def resolve_resumed(flags, preset, Train):
    """The same for a run to resume, whose folder is given or follows from the other flags. Flags
    may repeat its knobs, or change those in MAY_CHANGE."""
    given, _ = resolve({"preset": preset}, flags)
    recipe = flags.get("layers") or given.get("attn", GPTConfig.attn)
    out_dir = flags.get("out_dir") or default_out_dir(given.get("dataset", Train.dataset), recipe)
    meta, _ = read_run(out_dir)
    stored = meta["knobs"]
    for name in flags:
        value = given[name]
        # 0: "decide for me", as the run did
        decided = value == 0 and name in ("n_kv_head", "vocab_size")
        if name in (*MAY_CHANGE, "init_from") or decided:
            continue
        repeated = value == stored.get(name, value)
        if name == "layers" and stored["layers"]:
            repeated = repeats(flags[name], stored["layers"])
        if not repeated:
            raise ValueError(
                f"{out_dir} was trained with {name}={stored[name]}, so it cannot resume with "
                f"{name}={value}: leave out the flag, or start a new run with another --out_dir"
            )
    # init_from is then that of the stored run: only its meta.json tells that this run resumes it
    changed = {name: value for name, value in flags.items() if name in MAY_CHANGE}
    return *resolve({f"run {out_dir}": stored}, changed | {"out_dir": out_dir}), meta


def repeats(layers, stored):
    """Do these --layers name the recipes of the stored ones, with some of their axes?"""
    given, stored = attention.pattern(layers), attention.pattern(stored)
    return len(given) == len(stored) and all(
        attn == other and own.items() <= axes.items()
        for (attn, own), (other, axes) in zip(given, stored, strict=True)
    )


def default_out_dir(dataset, recipe):
    """The folder of a run of this recipe or these --layers."""
    return f"out/{Path(dataset).name}-{recipe.translate(str.maketrans(',=', '--', '*'))}"
