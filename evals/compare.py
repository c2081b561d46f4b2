"""Several runs side by side: their costs, their losses, and where their attention goes.

Runs that differ only in the seed become one row of means and sample standard deviations. Runs can be compared if they
have the same data, the same number of training tokens, and models of the same size.
"""
import math
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

import attention
import mixers
from common.flags import knob
from common.runs import read_run
from evals.instrument import Windows, first_line, legend, markdown, table
from evals.loss import bits_per_byte, loss_and_error
from evals.measures import MEASURES, printed
from evals.pictures import draw_recipes
from evals.probe import probe
from model import GPTConfig

LOSSES = {"loss": "{:.4f}", "perplexity": "{:.3f}", "bits per byte": "{:.4f}"}          # less is better
PROBED = ("sink", "share", "times_uniform", "density", "row_mass", "extra", "sparsity", "value_norm_ratio")
COSTS = {"parameters": "{:,.0f}", "tokens": "{:,.0f}"}
COLUMNS = LOSSES | dict.fromkeys(PROBED, "{:.3f}") | COSTS

PANELS = {                                      # of the picture, {column: title}
    "loss": "loss (nats per token)", "sink": "first token, all rows", "row_mass": "row sum",
    "value_norm_ratio": "norm of the first value over the others"}

# these may differ between the seeds of one recipe: the seed, and knobs that do not change the numbers
FREE = ("seed", "out_dir", "preset", "device", "dtype", "kernel", "compile", "eval_interval", "eval_iters",
        "log_interval")


@dataclass
class Compare(Windows):
    """Flags of compare"""
    windows: int = knob(0, "fixed windows for the losses, spread evenly; 0: as many as fit")
    probe_windows: int = knob(16, "fixed windows for the measures of attention", least=1)
    md: bool = knob(False, "print the table as markdown")
    anyway: bool = knob(False, "also compare runs with different data, budgets or sizes")


def command(args, run):
    """Losses, sinks, sizes and costs of several runs in one table; seeds of one recipe become a mean and a deviation.
    Runs with different data, budgets or sizes need --anyway."""
    split, length, config = run.split(args.split), run.window(args.length), run.model.config
    loss, error, windows = loss_and_error(run.model, split, run.machine, args.windows, args.batch_size, length)
    mean = probe(run.model, split, run.machine, args.probe_windows, args.batch_size, length, True)["mean"]
    tokens, began = budget(run.meta)
    knobs = run.meta["knobs"] | asdict(config) | {"init_from": began}                       # with --attn and other axes
    numbers = run.reads(args.split, windows, length) | {
        "probe_windows": args.probe_windows, "attn": config.attn,
        "knobs": {name: value for name, value in knobs.items() if name not in FREE},
        "seed": run.meta["knobs"].get("seed"), "loss": loss, "loss_error": error,
        "perplexity": math.exp(loss), "bits per byte": bits_per_byte(loss, run.data_meta, args.split),
        **{measure: mean[measure] for measure in PROBED}, "uniform": mean["uniform"], "has_weights": run.has_weights,
        "parameters": run.model.num_params(), "tokens": tokens, "seconds": run.meta.get("seconds")}
    return numbers, ""                          # `tell` writes one text for all runs


def check(args, places):
    """Raise ValueError, with the difference, if a run differs from the first in what all runs of a table share."""
    sizes = ("block_size", "vocab_size", "n_layer", "n_embd", "n_inner", "mlp")
    first, advice = None, "give --anyway to compare them all the same"
    for place in [] if args.anyway else places:
        meta = read_run(place)[0]
        tokens, began = budget(meta)
        terms = {"training data (hash)": meta.get("data_hash"), "tokenizer": meta.get("tokenizer"),
                 "tokens trained on": tokens, "--init_from": began,
                 **{name: meta["knobs"].get(name, getattr(GPTConfig, name)) for name in sizes}}
        first = first or terms
        for name in (name for name in terms if terms[name] != first[name]):
            if None in (terms[name], first[name]):
                raise ValueError(f"{places[0] if first[name] is None else place} was not trained here, so its data and "
                                 f"budget are unknown; {advice}")
            raise ValueError(f"{places[0]} and {place} differ in {name}: {first[name]} and {terms[name]}; {advice}")


def budget(meta):
    """Tokens that a run was trained on up to its last evaluation, None for public weights; and the weights that it
    began with. A resumed run has no record of these and counts as from scratch."""
    knobs, step, tokens = meta["knobs"], meta["losses"].get("step"), None
    if step is not None:
        tokens = step * knobs["batch_size"] * knobs["gradient_accumulation_steps"] * knobs["block_size"]
    return tokens, "scratch" if knobs.get("init_from") == "resume" else knobs.get("init_from")


def groups_of(found):
    """The runs of {place: numbers} grouped by recipe: {name: [numbers]}, the best first. The name has the flags that
    changed the recipe, and those that tell it from other runs with that --attn."""
    groups, by_flags = {}, {}
    for numbers in found.values():
        groups.setdefault(str(numbers["knobs"]), []).append(numbers)
    for group in sorted(groups.values(), key=lambda group: fmean(numbers["loss"] for numbers in group)):
        attn, knobs = group[0]["attn"], group[0]["knobs"]
        alike = [other[0]["knobs"] for other in groups.values() if other[0]["attn"] == attn]
        axes = mixers.DEFAULTS | attention.recipe(attn) | {"attn_args": "", "layers": ""}
        flags = [f"--{name}={value}" for name, value in knobs.items()
                 if any(other.get(name) != value for other in alike)
                 or (name in axes and name != "pos" and value != axes[name])]
        flags += [] if group[0]["has_weights"] else ["(derivatives)"]
        by_flags[" ".join([attn, *flags])] = group
    return by_flags


def tell(args, found):
    """One row for each recipe, the best first. If all recipes have three seeds, the best and the second best loss are
    marked. Below: the meaning of the marks, and whether seeds separate the two."""
    groups = groups_of(found)
    columns = [column for column in COLUMNS if any(n[column] is not None for n in found.values())]
    marks = ("**{}**", "<u>{}</u>", "{}") if args.md else ("{} **", "{} * ", "{}   ")
    rows, ranked = [], len(groups) > 1 and min(map(len, groups.values())) >= 3
    for number, (name, group) in enumerate(groups.items()):
        rows.append([name, str(len(group))])
        for column in columns:
            values = [numbers[column] for numbers in group if numbers[column] is not None]
            shown = [fmean(values)] if values else []
            if len(values) > 1 and column not in COSTS:
                shown.append(stdev(values))
            cell = " ± ".join(map(COLUMNS[column].format, shown)) or "-"
            rows[-1].append(marks[min(number, 2)].format(cell) if ranked and column in LOSSES else cell)
    said = [*dict.fromkeys(map(first_line, found.values())), "± is the standard deviation over seeds"]
    if ranked:
        said[-1] += "" if args.md else "; ** the best, * the second best"
        (first, a), (second, b) = [(name, [run["loss"] for run in group]) for name, group in groups.items()][:2]
        if fmean(b) - fmean(a) <= 2 * max(stdev(a), stdev(b)):
            said.append(f"{first} and {second} are closer than two standard deviations: the seeds alone may explain it")
    elif len(groups) > 1:
        said.append("fewer than three seeds say little about small differences: train more with --seed")
    meant = {printed(name): MEASURES[name] for name in columns if name in PROBED} | {
        "tokens": "tokens read in training"}
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in meant.items()) if args.md else legend(meant)
    header = ["recipe", "runs", *map(printed, columns)]
    return "\n".join([(markdown if args.md else table)(rows, header), "", *said, "", meanings])


def draw(path, found):
    """Draw the PANELS side by side, a line for each recipe. The loss begins near that of the best run."""
    least = min(numbers["loss"] for numbers in found.values())
    panels = {column: (title, 0.95 * least if column == "loss" else None, None) for column, title in PANELS.items()}
    draw_recipes(path, groups_of(found), panels, even={"sink": "uniform"})
