"""The board: every recipe on the same text, with the same model and the same number of tokens.

With a seed of its own, each recipe chooses its learning rate among several. With the other seeds it
is trained at that rate, and other commands measure these runs. Every finished run is a row of
results/board.json, or of a file of your own, and the command adds the missing ones. docs/board.md
explains the measurements, and results/board.md has the whole table.
"""

import itertools
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from attention import ATTENTIONS, pattern, recipe
from common import files
from common.flags import Knobs, knob
from common.runs import ROOT, output_of
from evals.instrument import (
    each_done,
    legend,
    markdown,
    mean_and_error,
    recipe_names,
    train_if_missing,
    whole_numbers,
)
from evals.measures import MEASURES
from evals.pictures import GREY, figure_of, frame

RECIPES = {  # flags of train.py under a name
    "hybrid": "--layers=gated_deltanet*3+softmax",
    "no-conv": "--attn=gated_deltanet --conv=off",
    "no-positions": "--attn=softmax --pos=none",
    "tda-0.3": "--attn=tda --attn_args=learn_beta=0,beta_init=0.3",
    "blind": "--attn=window --window=1",  # rows see only themselves
}
TRIAL = 1  # the seed that chooses the learning rate
SPEED = "speed --lengths=256 --memory= --n_head=4 --dtype=float32 --device=cpu".split()
CACHE = (
    "speed --decode --lengths=4096 --n_head=4 --n_embd=128 --dtype=float32 --device=cpu --repeats=1"
).split()
OF_META = "parameters", "seconds", "machine", "versions", "data_hash"
OF_REPORT = "val", "sink", "density", "sparsity", "empty_rows"
MEANINGS = {  # {column: its meaning}
    "family": "its colour in the picture",
    "rate": "the best of the learning rates",
    "runs": "number of seeds",
    "bits_per_byte": "of the validation split",
    "over softmax": "bits less softmax's of the same seed, 95 % interval",
    "2x": "bits more in windows twice as long as in training",
    "4x": "bits more in windows four times as long",
    "sink": MEASURES["sink"],
    "density": MEASURES["density"],
    "sparsity": MEASURES["sparsity"],
    "empty_rows": MEASURES["empty_rows"],
    "dispersion": f"{MEASURES['dispersion']}, in windows of 1,024",
    "channel_ratio": "largest channel of the hidden state with the largest norm, over the median, "
    "in windows of 1,024",
    "parameters": "of the model",
    "kib": "KiB that a new token reads of 4,096 others, in float32",
    "speed": "training steps a second on one thread of a CPU, relative to softmax",
}
MEANS = (
    "bits_per_byte 2x 4x sink density sparsity empty_rows dispersion channel_ratio parameters"
).split()
COLOURS = {
    "rows sum to 1": "#1f77b4",
    "rows of any sum": "#d62728",
    "a gate": "#2ca02c",
    "two views": "#9467bd",
    "a state": "#ff7f0e",
    "unknown": GREY,
}


@dataclass
class Board(Knobs):
    """Flags of board"""

    attn: str = knob("all", f"recipes, also {', '.join(RECIPES)}, separated by commas")
    seeds: str = knob("2,3,4", "seeds, separated by commas; empty: train nothing")
    rates: str = knob("2e-3,4e-3,8e-3", "learning rates to try, separated by commas")
    dataset: str = knob("", "data set of train.py; empty: the Python sources")
    train_args: str = knob("", "further flags of train.py, separated by spaces")
    workers: int = knob(0, "runs at a time; 0: two with one thread each, or one on a GPU")
    out_dir: str = knob("out/board", "folder of the runs")
    results: str = knob(
        "", "file of the rows; empty: OUT_DIR/board.json, beside those of results/board.json"
    )
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        super().__post_init__()
        for name in set(names_of(self)) - RECIPES.keys():
            recipe(name)  # raises ValueError
        if self.seeds and TRIAL in whole_numbers(self.seeds, "seeds"):
            raise ValueError(
                f"--seeds={self.seeds}: {TRIAL} only chooses the learning rate, so give others"
            )
        rates_of(self)
        if not is_own(self) and self.out_dir == Board.out_dir:
            raise ValueError(
                "--dataset and --train_args make other runs: give them a folder of "
                "their own with --out_dir"
            )


def names_of(args):
    """The recipes. Runs that are not the board's own are compared with their own softmax."""
    if args.attn == "all":
        return [*recipe_names("all"), "hybrid"]
    names = args.attn.split(",")
    return names if is_own(args) or "softmax" in names else ["softmax", *names]


def is_own(args):
    """Are the model and the text those of the board?"""
    return not (args.dataset or args.train_args)


def rates_of(args):
    try:
        rates = [float(rate) for rate in args.rates.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"--rates={args.rates} must be numbers above 0 separated by commas")
    return rates


def command(args, run):
    """Train every recipe on the same text, each at the best of several learning rates, and compare
    them."""
    file = Path(args.results or f"{args.out_dir}/board.json")
    others = {} if args.results or not is_own(args) else read_rows(ROOT / "results/board.json")
    rows = others | (read_rows(file) if file.exists() else {})

    def save():  # one line a run
        lines = [json.dumps(row) for key, row in rows.items() if others.get(key) != row]
        with files.replacing(file, "w") as f:
            f.write("[\n" + ",\n".join(lines) + "\n]\n")

    if args.seeds:
        add_missing(args, rows, save)
    table = table_of(rows)
    if not table:
        raise ValueError(f"{file} has no finished run: give --seeds, and see the errors above")
    lines = [[f"`{name}`", *map(cell, row.values())] for name, row in table.items()]
    text = markdown(lines, ["recipe", *MEANINGS])
    return {"runs": [*rows.values()], "table": table}, f"{text}\n\n{legend(MEANINGS)}"


def read_rows(file):
    """{(recipe, rate, seed): row}; a recipe's costs have neither rate nor seed."""
    rows = files.read_json(file)
    return {(row["recipe"], row.get("rate"), row.get("seed")): row for row in rows}


# ---------------------------------------------------------------------------------------- measuring


def add_missing(args, rows, save):
    """Add the rows that the flags ask for: costs, then trials, then the runs that count. save() is
    called after each. Raises ValueError if a recipe was trained on another text than softmax."""
    names = names_of(args)
    workers = args.workers or (1 if torch.cuda.is_available() else 2)

    def add(work, jobs, workers):
        missing = [job for job in dict.fromkeys(jobs) if job not in rows]
        for job, row in each_done(work, missing, workers):
            rows[job] = row
            save()

    # costs first: other work on the machine would disturb them. They are those of the board's model
    layers = itertools.chain.from_iterable(map(layers_of, names if is_own(args) else []))
    add(cost_row, [(layer, None, None) for layer in layers], 1)
    train = partial(run_row, args)
    add(train, list(itertools.product(names, rates_of(args), [TRIAL])), workers)
    compared = [row for row in rows.values() if row["recipe"] in ("softmax", *names)]
    texts = {row["data_hash"] for row in compared if row.get("seed") == TRIAL}
    if len(texts) > 1:
        raise ValueError(
            "these recipes and softmax have different texts, since versions of Python have "
            "different sources: train all on yours, with --attn=softmax,... --results=out/own.json"
        )
    best = [(name, best_rate(name, rows)) for name in names]
    for seed in whole_numbers(args.seeds, "seeds"):
        add(train, [(name, rate, seed) for name, rate in best if rate], workers)


def cost_row(name, *_):
    """The speed of a recipe's training steps relative to softmax, and the KiB of keys, values or
    state that a new token reads after 4,096 others: four times those of one layer, or None if the
    recipe cannot be decoded."""
    step = numbers_of(*SPEED, f"--attn=softmax,{name}")
    cache = numbers_of(*CACHE, f"--attn={name}")
    rows = step["lengths"]["256"]
    read = cache["lengths"]["4096"].get(name)
    return {
        "recipe": name,
        "speed": round(rows[name]["step"] / rows["softmax"]["step"], 3),
        "kib": read and 4 * read["bytes"] / 1024,
        "machine": step["machine"],
    }


def run_row(args, name, rate, seed):
    """The row of a run, which is trained if it is missing. The seed TRIAL needs only its loss."""
    folder = Path(args.out_dir) / f"{name}-{rate:g}-{seed}"
    words = f"--preset=tiny --dtype=float32 --learning_rate={rate:g} --seed={seed}".split()
    data = [f"--dataset={args.dataset}"] if args.dataset else []
    flags = [*words, f"--out_dir={folder}", *flags_of(name), *data, *args.train_args.split()]
    meta = train_if_missing(folder, flags, quiet=True)
    row = {"recipe": name, "rate": rate, "seed": seed} | {key: meta[key] for key in OF_META}
    report = meta["report"]
    if seed == TRIAL:
        return row | {"val": report["val"]}
    row |= {key: report.get(key) for key in OF_REPORT}
    run = f"--out_dir={folder}"
    row["bits_per_byte"] = numbers_of("loss", run)["bits_per_byte"]
    try:
        _, twice, four_times = numbers_of("lengths", run)["lengths"]
        probed = numbers_of("probe", "--lengths=1024", "--windows=16", run)
    except ValueError:  # some positions have no longer windows
        return row
    row["2x"] = twice["more"] / math.log(2)
    row["4x"] = four_times["more"] / math.log(2)
    row["dispersion"] = probed["lengths"][0]["dispersion"]
    # in each layer, the largest channel: its number, its value, and this over the median
    row["channel_ratio"] = max(place["channels"][0][2] for place in probed["stream"])
    return row


def numbers_of(*words):
    return json.loads(output_of("eval.py", *words, "--json", OMP_NUM_THREADS="1"))


def flags_of(name):
    return RECIPES.get(name, f"--attn={name}").split()


def layers_of(name):
    """The recipe of each layer: several if its flags have --layers."""
    return [layer for layer, _ in pattern(flags_of(name)[0].partition("=")[2])]


# -------------------------------------------------------------------------------- table and picture


def best_rate(name, rows):
    """The learning rate whose trial has the lowest validation loss; None without a trial."""
    trials = {
        rate: row["val"]
        for (other, rate, seed), row in rows.items()
        if (other, seed) == (name, TRIAL)
    }
    return min(trials, key=trials.get, default=None)


def table_of(rows):
    """{recipe: {column: a number, the ends (low, high) of a 95 % interval, or None}}, the fewest
    bits first. Only runs with the recipe's best rate count, and only recipes that still exist."""
    groups, found = {}, {}
    for (name, rate, seed), row in rows.items():
        known = name in RECIPES or name in ATTENTIONS
        if known and row.get("bits_per_byte") and rate == best_rate(name, rows):
            groups.setdefault(name, {})[seed] = row
    softmax = groups.get("softmax", {})
    for name, group in groups.items():
        row = dict.fromkeys(MEANINGS) | {"rate": best_rate(name, rows), "runs": len(group)}
        for key in MEANS:
            values = [run.get(key) for run in group.values()]
            row[key] = None if None in values else fmean(values)
        bits = {seed: run["bits_per_byte"] for seed, run in group.items()}
        over = [bits[seed] - softmax[seed]["bits_per_byte"] for seed in bits if seed in softmax]
        if len(over) > 1 and name != "softmax":
            row["over softmax"] = interval(over)
        found[name] = row | {"family": family(name, row)} | cost_of(name, rows)
    return dict(sorted(found.items(), key=lambda item: item[1]["bits_per_byte"]))


def interval(values):
    """The 95 % interval of the mean of at least two values, (low, high)."""
    mean, error = mean_and_error(values)
    reach = error * quantile(len(values) - 1)
    return mean - reach, mean + reach


def quantile(degrees):
    """The t that Student's distribution exceeds with a chance of 2.5 %: 12.7 with one degree."""
    angles = np.linspace(0, np.pi / 2, 100_001)  # t = sqrt(degrees) tan(angle)
    density = np.cos(angles) ** (degrees - 1)
    area = np.cumsum(density[1:] + density[:-1])
    return degrees**0.5 * np.tan(np.interp(0.95, area / area[-1], angles[1:]))


def cost_of(name, rows):
    """{"speed", "kib"} of a recipe, means of time and of KiB over its layers; {} if they are
    unknown, such as those of flags of other axes."""
    costs = [rows.get((layer, None, None)) for layer in layers_of(name)]
    further = [flag for flag in flags_of(name)[1:] if not flag.startswith("--attn_args=")]
    if None in costs or further:
        return {}
    caches = [cost["kib"] for cost in costs]
    return {
        "speed": fmean(1 / cost["speed"] for cost in costs) ** -1,
        "kib": None if None in caches else fmean(caches),
    }


def family(name, row):
    axes = ATTENTIONS[layers_of(name)[0]]
    if axes.get("mixer") == "recurrent":
        return "a state"
    if "diff" in axes or "dex" in axes:
        return "two views"
    if "gate" in axes:
        return "a gate"
    if row["sink"] is None:
        return "unknown"
    return "rows sum to 1" if abs(row["sink"] + row["density"] - 1) < 0.01 else "rows of any sum"


def cell(value):
    """A number, an interval, a word or None as a cell of the table."""
    if isinstance(value, tuple):
        return f"{sum(value) / 2:+.3f} ±{(value[1] - value[0]) / 2:.3f}"
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 10 or isinstance(value, int) else f"{value:.3f}"


def draw(path, numbers):
    """Draw bits over softmax against the speed of a step. Lines are 95 % intervals."""
    points = {
        name: row
        for name, row in numbers["table"].items()
        if row["speed"] and (row["over softmax"] or name == "softmax")
    }
    if not points:
        raise ValueError("only rows of the board's own model have speeds to draw: leave out --png")
    # names of recipes about as fast as softmax are listed at the right, in the order of their bits
    listed = [name for name, row in points.items() if row["speed"] > 0.85]
    with figure_of(path, [8], [8.4], subplot_kw={"xmargin": 0.1}) as ((ax,),):
        ax.set_yscale("symlog", linthresh=0.02)  # most lie near 0, a few far above
        ticks = (-0.2, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
        ax.set_yticks(ticks, map(str, ticks))
        ax.axhline(0, color=GREY, linestyle=":", linewidth=1)
        for name, row in points.items():
            low, high = row["over softmax"] or (0, 0)
            x, y, colour = row["speed"], (low + high) / 2, COLOURS[row["family"]]
            ax.errorbar(
                x, y, (high - low) / 2, fmt="o", markersize=4, color=colour, ecolor=(colour, 0.4)
            )
            side, place, unit = "right", (-6, 0), "offset points"
            if name in listed:
                height = 0.2 + 0.8 * listed.index(name) / len(listed)
                side, place, unit = "left", (1.05, height), "axes fraction"
            ax.annotate(
                name,
                (x, y),
                place,
                textcoords=unit,
                ha=side,
                va="center",
                fontsize=7,
                weight="bold" if name == "softmax" else "normal",
                arrowprops={
                    "arrowstyle": "-",
                    "color": colour,
                    "linewidth": 0.4,
                    "relpos": (0, 0.5),
                },
            )
        for family in dict.fromkeys(row["family"] for row in points.values()):
            ax.plot([], "o", markersize=4, color=COLOURS[family], label=family)
        frame(
            ax,
            xlabel="speed of a training step (softmax: 1)",
            ylabel="bits per byte over softmax (lower is better)",
        )
        ax.legend(frameon=False, fontsize=8, loc="upper left")
