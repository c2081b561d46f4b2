"""Several runs side by side: their costs, their losses, and where their attention goes.

Runs that differ only in the seed become one row of means and sample standard deviations. Runs can be compared if they
have the same data, the same number of training tokens, and models of the same size.
"""
import math
from dataclasses import asdict, dataclass

import numpy as np

import attention
import mixers
from common.flags import at_least, knob
from common.runs import read_run
from evals.instrument import Windows, first_line, legend, markdown, marked, table
from evals.loss import bits_per_byte, loss_and_error
from evals.measures import MEASURES
from evals.pictures import draw_recipes
from evals.probe import probe
from model import GPTConfig

LOSSES = {"loss": "{:.4f}", "perplexity": "{:.3f}", "bits per byte": "{:.4f}"}          # less is better
PROBED = ("sink", "share", "times_uniform", "density", "row_mass", "extra", "sparsity", "value_norm_ratio")
COSTS = {"parameters": "{:,.0f}", "tokens": "{:,.0f}"}
COLUMNS = LOSSES | dict.fromkeys(PROBED, "{:.3f}") | COSTS

PANELS = {                                      # of the picture, {column: title}
    "loss": "loss (nats per token)", "sink": "weight on the first token", "row_mass": "sum of a row's weights",
    "value_norm_ratio": "norm of the first value over the others"}


# these may differ between the seeds of one recipe: the seed, and knobs that do not change the numbers
FREE = ("seed", "out_dir", "preset", "device", "dtype", "kernel", "compile", "eval_interval", "eval_iters",
        "log_interval")


@dataclass
class Compare(Windows):
    """Flags of compare"""
    windows: int = knob(0, "fixed windows for the losses, spread evenly; 0: as many as fit")
    probe_windows: int = knob(16, "fixed windows for the measures of attention")
    md: bool = knob(False, "print the table as markdown")
    anyway: bool = knob(False, "also compare runs with different data, budgets or sizes")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, probe_windows=1)


def command(args, run):
    """Losses, sinks, sizes and costs of several runs in one table; seeds of one recipe become a mean and a deviation.
    Runs with different data, budgets or sizes need --anyway."""
    split, length, config = run.split(args.split), run.window(args.length), run.model.config
    loss, error, windows = loss_and_error(run.model, split, run.machine, args.windows, args.batch_size, run.stride,
                                          length)
    mean = probe(run.model, split, run.machine, args.probe_windows, args.batch_size, run.stride, length, True)["mean"]
    knobs = run.meta["knobs"] | asdict(config) | {"init_from": begun_from(run.meta)}        # with --attn and other axes
    numbers = run.reads(args.split, windows, length) | {
        "probe_windows": args.probe_windows, "attn": config.attn,
        "knobs": {name: value for name, value in knobs.items() if name not in FREE},
        "seed": run.meta["knobs"].get("seed"), "loss": loss, "loss_error": error,
        "perplexity": math.exp(loss), "bits per byte": bits_per_byte(loss, run.data_meta, args.split),
        **{measure: mean[measure] for measure in PROBED}, "uniform": mean["uniform"], "has_weights": run.has_weights,
        "parameters": run.model.num_params(), "tokens": trained_on(run.meta), "seconds": run.meta.get("seconds")}
    return numbers, ""                          # `tell` writes one text for all runs


def check(args, places):
    """Raise a ValueError that names the first difference between a run and the first run in the properties that must be
    the same in all runs of a table."""
    sizes = ("block_size", "vocab_size", "n_layer", "n_embd", "n_inner", "mlp", "n_expert", "n_active")
    terms = {}
    for place in [] if args.anyway else places:
        meta = read_run(place)[0]
        terms[place] = {"training data (hash)": meta.get("data_hash"), "tokenizer": meta.get("tokenizer"),
                        "tokens trained on": trained_on(meta), "--init_from": begun_from(meta),
                        **{name: meta["knobs"].get(name, getattr(GPTConfig, name)) for name in sizes}}
        for name, value in terms[place].items():
            first = terms[places[0]][name]
            unknown = places[0] if first is None else place
            if value != first and None in (value, first):
                raise ValueError(f"{unknown} was not trained here, so its data and budget are unknown; give --anyway "
                                 "to compare them all the same")
            if value != first:
                raise ValueError(f"{places[0]} and {place} differ in {name}: {first} and {value}; give --anyway to "
                                 "compare them all the same")


def trained_on(meta):
    """Tokens that a run was trained on up to its last evaluation; None for public weights."""
    knobs, step = meta["knobs"], meta["losses"].get("step")
    if step is not None:
        return step * knobs["batch_size"] * knobs["gradient_accumulation_steps"] * knobs["block_size"]


def begun_from(meta):
    """The weights that a run began with. A resumed run has no record of them and counts as from scratch."""
    began = meta["knobs"].get("init_from")
    return "scratch" if began == "resume" else began


def groups_of(found):
    """The runs of {place: numbers} grouped by recipe: {name: [numbers]}, the best first. The name has the flags that
    changed the recipe, and those that tell it from other runs with that --attn."""
    groups = {}
    for numbers in found.values():
        groups.setdefault(str(numbers["knobs"]), []).append(numbers)
    named = {}
    for group in sorted(groups.values(), key=lambda group: mean_and_deviation(group, "loss")[0]):
        attn, knobs = group[0]["attn"], group[0]["knobs"]
        alike = [other[0]["knobs"] for other in groups.values() if other[0]["attn"] == attn]
        axes = mixers.DEFAULTS | attention.recipe(attn) | {"attn_args": ""}
        flags = [f"--{name}={value}" for name, value in knobs.items()
                 if any(other.get(name) != value for other in alike)
                 or (name in axes and name != "pos" and value != axes[name])]
        named[marked(" ".join([attn, *flags]), group[0]["has_weights"])] = group
    return named


def tell(args, found):
    """One row for each recipe, the best first. The best and the second best loss are marked. Below: the meaning of the
    marks, and whether seeds separate the two."""
    groups = groups_of(found)
    columns = [column for column in COLUMNS if any(n[column] is not None for n in found.values())]
    rows = [[name, str(len(group))] + [cell(column, group) for column in columns] for name, group in groups.items()]
    mark(rows, columns, args.md)
    header = ["recipe", "runs", *columns]
    said = [*dict.fromkeys(map(first_line, found.values())), "± is the standard deviation over seeds"]
    if len(groups) > 1:
        said[-1] += "" if args.md else "; ** the best, * the second best"
        first, second, *_ = groups
        (a, da), (b, db) = (mean_and_deviation(groups[name], "loss") for name in (first, second))
        if None in (da, db):
            said.append("one seed says little about small differences: train more with --seed")
        elif b - a <= 2 * max(da, db):
            said.append(f"{first} and {second} are closer than two standard deviations: the seeds alone may explain it")
    meant = {name: MEASURES[name] for name in columns if name in PROBED} | {"tokens": "tokens read in training"}
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in meant.items()) if args.md else legend(meant)
    return "\n".join([(markdown if args.md else table)(rows, header), "", *said, "", meanings])


def mean_and_deviation(group, column):
    """Mean and sample deviation of a column over the runs of a recipe. The deviation of one run is None. Both are None
    if the column is undefined."""
    values = [numbers[column] for numbers in group if numbers[column] is not None]
    if not values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def cell(column, group):
    mean, deviation = mean_and_deviation(group, column)
    shown = [mean] if deviation is None or column in COSTS else [mean, deviation]
    return "-" if mean is None else " ± ".join(map(COLUMNS[column].format, shown))


def mark(rows, columns, md):
    """Mark the losses of the first two rows, which are sorted: bold and underlined, in plain text ** and *."""
    first, second, other = ("**{}**", "<u>{}</u>", "{}") if md else ("{} **", "{} * ", "{}   ")
    for place, row in enumerate(rows if len(rows) > 1 else []):
        for i, column in enumerate(columns, 2):                         # name and runs come first
            if column in LOSSES:
                row[i] = (first, second, other)[min(place, 2)].format(row[i])


def draw(path, found):
    """Draw the PANELS side by side, a line for each recipe. The loss begins near that of the best run."""
    least = min(numbers["loss"] for numbers in found.values())
    panels = {column: (title, 0.95 * least if column == "loss" else None, None) for column, title in PANELS.items()}
    draw_recipes(path, groups_of(found), panels, even={"sink": "uniform"})
