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
from evals.instrument import LENGTH, first_line, legend, markdown, marked, table
from evals.loss import bits_per_byte, loss_and_error
from evals.measures import MEASURES
from evals.pictures import frame, pyplot, save_figure
from evals.probe import probe
from model import GPTConfig

LOSSES = {"loss": "{:.4f}", "perplexity": "{:.3f}", "bits per byte": "{:.4f}"}          # less is better
PROBED = ("sink", "share", "times_uniform", "density", "row_mass", "extra", "sparsity", "value_norm_ratio")
COSTS = {"parameters": "{:,.0f}", "tokens": "{:,.0f}"}
COLUMNS = LOSSES | dict.fromkeys(PROBED, "{:.3f}") | COSTS

PANELS = {                                      # of the picture, {column: title}
    "loss": "loss (nats per token)", "sink": "weight on the first token", "row_mass": "sum of a row's weights",
    "value_norm_ratio": "norm of the first value over the others"}


@dataclass
class Compare:
    """Flags of compare"""
    split: str = knob("val", "split of the data set", ("train", "val"))
    windows: int = knob(0, "fixed windows for the losses, spread evenly; 0: as many as fit")
    probe_windows: int = knob(16, "fixed windows for the measures of attention")
    length: int = knob(0, LENGTH)
    batch_size: int = knob(4, "windows per forward pass")
    md: bool = knob(False, "print the table as markdown")
    anyway: bool = knob(False, "also compare runs with different data, budgets or sizes")

    def __post_init__(self):
        at_least(self, windows=0, probe_windows=1, length=0, batch_size=1)


def command(args, run):
    """Losses, sinks, sizes and costs of several runs in one table; seeds of one recipe become a mean and a deviation.
    Runs with different data, budgets or sizes need --anyway."""
    split, length = run.split(args.split), run.window(args.length)
    loss, error, windows = loss_and_error(run.model, split, run.machine, args.windows, args.batch_size, run.stride,
                                          length)
    mean = probe(run.model, split, run.machine, args.probe_windows, args.batch_size, run.stride, length, True)["mean"]
    numbers = run.reads(args.split, windows, length) | {
        "probe_windows": args.probe_windows,
        "attn": run.model.config.attn, "knobs": knobs_of(run), "seed": run.meta["knobs"].get("seed"),
        "loss": loss, "loss_error": error,
        "perplexity": math.exp(loss), "bits per byte": bits_per_byte(loss, run.data_meta, args.split),
        **{measure: mean[measure] for measure in PROBED}, "uniform": mean["uniform"], "has_weights": run.has_weights,
        "parameters": run.model.num_params(), "tokens": trained_on(run.meta), "seconds": run.meta.get("seconds")}
    return numbers, ""                          # `tell` writes one text for all runs


# ------------------------------------------------------------------------------------------- what makes runs comparable


def check(args, places):
    """Raise a ValueError that names the first difference between a run and the first run."""
    first, *others = [(place, terms_of(read_run(place)[0])) for place in places]
    for place, terms in others:
        for name, value in terms.items():
            if value != first[1][name] and not args.anyway:
                unknown = [which for which, of in ((first[0], first[1][name]), (place, value)) if of is None]
                if unknown:
                    raise ValueError(f"{unknown[0]} was not trained here, so its data and budget are unknown; give "
                                     "--anyway to compare them all the same")
                raise ValueError(f"{first[0]} and {place} differ in {name}: {first[1][name]} and {value}; "
                                 "give --anyway to compare them all the same")


def terms_of(meta):
    """The properties that must be the same in all runs of a table, {name: value}."""
    sizes = ("block_size", "vocab_size", "n_layer", "n_embd", "n_inner", "mlp", "n_expert", "n_active")
    return {"training data (hash)": meta.get("data_hash"), "tokenizer": meta.get("tokenizer"),
            "tokens trained on": trained_on(meta), "--init_from": begun_from(meta),
            **{name: meta["knobs"].get(name, getattr(GPTConfig, name)) for name in sizes}}


def trained_on(meta):
    """Tokens that a run was trained on up to its last evaluation; None for public weights."""
    knobs, step = meta["knobs"], meta["losses"].get("step")
    if step is not None:
        return step * knobs["batch_size"] * knobs["gradient_accumulation_steps"] * knobs["block_size"]


def begun_from(meta):
    """The weights that a run began with. A resumed run has no record of them and counts as from scratch."""
    began = meta["knobs"].get("init_from")
    return "scratch" if began == "resume" else began


# these may differ between the seeds of one recipe: the seed, and knobs that do not change the numbers
FREE = ("seed", "out_dir", "preset", "device", "dtype", "kernel", "compile", "eval_interval", "eval_iters",
        "log_interval")


def knobs_of(run):
    """The knobs that tell one recipe from another, with the overrides of this evaluation: all but FREE."""
    knobs = run.meta["knobs"] | asdict(run.model.config) | {"init_from": begun_from(run.meta)}
    return {name: value for name, value in knobs.items() if name not in FREE}


def groups_of(found):
    """The runs of {place: numbers} grouped by recipe, {name of the recipe: [numbers]}."""
    groups = {}
    for numbers in found.values():
        groups.setdefault(str(numbers["knobs"]), []).append(numbers)
    firsts = [group[0] for group in groups.values()]
    return {marked(name_of(group[0], [other for other in firsts if other["attn"] == group[0]["attn"]]),
                   group[0]["has_weights"]): group for group in groups.values()}


def name_of(numbers, alike):
    """A recipe's name with the flags that changed it, and the flags that tell it from other runs with that --attn."""
    knobs, axes = numbers["knobs"], mixers.DEFAULTS | attention.recipe(numbers["attn"]) | {"attn_args": ""}
    flags = [f"--{name}={value}" for name, value in knobs.items()
             if any(other["knobs"].get(name) != value for other in alike)
             or (name in axes and name != "pos" and value != axes[name])]
    return " ".join([numbers["attn"], *flags])


# ------------------------------------------------------------------------------------------------------------ the table


def tell(args, found):
    """One row for each recipe, the best first. The best and the second best loss are marked."""
    groups = dict(sorted(groups_of(found).items(), key=lambda item: mean_and_deviation(item[1], "loss")[0]))
    columns = [column for column in COLUMNS if any(n[column] is not None for group in groups.values() for n in group)]
    rows = [[name, str(len(group))] + [cell(column, group) for column in columns] for name, group in groups.items()]
    mark(rows, columns, args.md)
    header = ["recipe", "runs", *columns]
    text = markdown(rows, header) if args.md else table(rows, header)
    meant = {name: MEASURES[name] for name in columns if name in PROBED} | {"tokens": "tokens read in training"}
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in meant.items()) if args.md else legend(meant)
    return "\n".join([text, "", *remarks(groups, args), "", meanings])


def mean_and_deviation(group, column):
    """Mean and sample deviation of a column over the runs of a recipe. The deviation of one run is None. Both are None
    if the column is undefined."""
    values = [numbers[column] for numbers in group if numbers[column] is not None]
    if not values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def cell(column, group):
    mean, deviation = mean_and_deviation(group, column)
    if mean is None:
        return "-"
    spread = "" if deviation is None or column in COSTS else f" ± {COLUMNS[column].format(deviation)}"
    return COLUMNS[column].format(mean) + spread


def mark(rows, columns, md):
    """Mark the losses of the first two rows, which are sorted: bold and underlined, in plain text ** and *."""
    first, second, other = ("**{}**", "<u>{}</u>", "{}") if md else ("{} **", "{} * ", "{}   ")
    for place, row in enumerate(rows if len(rows) > 1 else []):
        for i, column in enumerate(columns, 2):                         # name and runs come first
            if column in LOSSES:
                row[i] = (first, second, other)[min(place, 2)].format(row[i])


def remarks(groups, args):
    """The lines below the table: the meaning of the marks, and whether seeds separate the best from the second best."""
    runs = [numbers for group in groups.values() for numbers in group]
    said = [*dict.fromkeys(map(first_line, runs)), "± is the standard deviation over seeds"]
    if len(groups) > 1:
        said[-1] += "" if args.md else "; ** the best, * the second best"
        (first, (a, da)), (second, (b, db)) = [(name, mean_and_deviation(group, "loss"))
                                               for name, group in groups.items()][:2]
        if da is not None and db is not None and b - a <= 2 * max(da, db):
            said.append(f"{first} and {second} are closer than two standard deviations: the seeds alone may explain it")
        if da is None or db is None:
            said.append("one seed says little about small differences: train more with --seed")
    return said


# ---------------------------------------------------------------------------------------------------------- the picture


def draw(path, found):
    """Draw the PANELS side by side, a line for each recipe: a dot for each run, and a bar at their mean. A grey bar in
    the panel of the sink is the weight of an even spread."""
    groups = groups_of(found)
    names = sorted(groups, key=lambda name: -mean_and_deviation(groups[name], "loss")[0])      # the best on top
    figure, axes = pyplot().subplots(1, len(PANELS), figsize=(13, 1.5 + 0.35 * len(names)), sharey=True)
    for ax, (column, title) in zip(axes, PANELS.items(), strict=True):
        for y, name in enumerate(names):
            ax.plot([numbers[column] for numbers in groups[name]], [y] * len(groups[name]), "o", color="#6baed6")
            ax.plot(mean_and_deviation(groups[name], column)[0], y, "|", color="#08306b", markersize=18, mew=2.5)
            if column == "sink":
                ax.plot(groups[name][0]["uniform"], y, "|", color="0.6", markersize=24, mew=1.5, zorder=0)
        ax.grid(axis="x", color="0.9")
        ax.margins(x=0.12)
        ax.locator_params(axis="x", nbins=4)
        frame(ax, title)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(-0.6, len(names) - 0.4)
    figure.supxlabel("a dot is one run, the bar their mean; grey: an even spread over the keys", fontsize=9)
    figure.tight_layout(w_pad=2)
    save_figure(figure, path)
