"""What the rows of evals/board.py say: its tables, its pictures, and its page for a browser.

A table is {recipe: {column: a number, the ends [low, high] of a 95 % interval, or None}}, the fewest bits first."""
import math
import re
from statistics import fmean

import numpy as np

from attention import ATTENTIONS
from common import files
from common.runs import ROOT
from evals.instrument import legend, markdown
from evals.lab_runs import RECIPES
from evals.ledger.quantities import interval
from evals.measures import MEASURES, printed
from evals.pictures import GREY, figure_of, frame, save_page

STEPS, TOKENS, TRIAL = 1000, 2048, 1            # of a run of the base table, of a step; the seed that chooses the rate
MEANINGS = {                                    # {column: its meaning}
    "family": "its colour in the picture", "rate": "the best of three learning rates", "runs": "number of seeds",
    "bits": "bits per byte of the validation split, in windows of 256",
    "over softmax": "bits less softmax's of the same seed, 95 % interval",
    "equal time": "bits less those of softmax if it trains for as long as this recipe takes, 95 % interval",
    "2x": "bits more per byte in windows of 512 than of 256", "4x": "bits more in windows of 1,024",
    "sink": MEASURES["sink"], "density": MEASURES["density"], "sparsity": MEASURES["sparsity"],
    "empty_rows": MEASURES["empty_rows"], "dispersion": f"{MEASURES['dispersion']}, in windows of 1,024",
    "massive": "largest channel of the hidden state with the largest norm, over the median of all channels",
    "parameters": "of the model", "kib": "KiB that a new token reads of 4,096 others, in float32",
    "speed": "training steps a second on one thread, relative to softmax"}
README_COLUMNS = "bits", "over softmax", "sink", "sparsity", "speed"
COLOURS = {"rows sum to 1": "#1f77b4", "rows of any sum": "#d62728", "a gate": "#2ca02c", "two views": "#9467bd",
           "a state": "#ff7f0e", "unknown": GREY}
SIZES = {"ladder-48": "0.1M", "ladder-80": "0.3M", "board": "0.8M", "ladder-208": "2.1M"}       # {set-up: parameters}


def by_seed(rows, best):
    """All measured runs of rows {(recipe, set-up, seed): row}, as {(recipe, set-up): {(seed, hash of the data): row}}.
    "board" is the base table's set-up with the learning rate best(recipe)."""
    found = {}
    for (name, setup, seed), row in rows.items():
        setup = "board" if setup == f"board-{best(name)}" else setup
        if row.get("bits") is not None and seed != TRIAL:
            found.setdefault((name, setup), {})[seed, row.get("data_hash")] = row
    return found


def table_of(runs, rows):
    """The base table, of the runs from by_seed and the costs among the rows."""
    softmax, found = {key: run["bits"] for key, run in runs.get(("softmax", "board"), {}).items()}, {}
    budgets = {STEPS: softmax} | {int(setup[6:]): {key: run["bits"] for key, run in group.items()}
                                  for (_, setup), group in runs.items() if setup.startswith("steps-")}
    for name in (name for name, setup in runs if setup == "board"):
        group, cost = runs[name, "board"], rows.get((name, "cost", 0), {})
        columns = {key: [run.get(key) for run in group.values()] for key in MEANINGS}
        row = {key: None if None in values else fmean(values) for key, values in columns.items() if key != "rate"}
        equal = softmax_after(STEPS / cost["speed"], budgets) if cost else {}
        found[name] = row | {key: cost.get(key) for key in ("speed", "kib")} | {
            "rate": next(iter(group.values()))["rate"], "runs": len(group), "family": family(name, row),
            "over softmax": None if name == "softmax" else paired_difference(group, softmax),
            "equal time": None if name == "softmax" else paired_difference(group, equal)}
    return {name: {key: found[name][key] for key in MEANINGS}
            for name in sorted(found, key=lambda name: found[name]["bits"])}


def paired_difference(group, others):
    """The 95 % interval of the bits of runs {key: run} less those of others {key: bits}; None without two keys."""
    over = [run["bits"] - others[key] for key, run in group.items() if key in others]
    return interval(over) if len(over) > 1 else None


def softmax_after(steps, budgets):
    """{key: softmax's bits after so many steps}, on a line over log steps between budgets {steps: {key: bits}}; {}
    outside them."""
    counts = sorted(budgets)
    shared = set.intersection(*(set(budgets[count]) for count in counts))
    return {key: float(np.interp(math.log(steps), np.log(counts), [budgets[count][key] for count in counts]))
            for key in shared} if counts[0] <= steps <= counts[-1] else {}


def family(name, row):
    axes = ATTENTIONS[re.search(r"--(?:attn|layers)=(\w+)", RECIPES.get(name, f"--attn={name}"))[1]]
    if axes.get("mixer") == "recurrent":
        return "a state"
    if "diff" in axes or "dex" in axes:
        return "two views"
    if "gate" in axes:
        return "a gate"
    if row["sink"] is None:
        return "unknown"
    return "rows sum to 1" if abs(row["sink"] + row["density"] - 1) < 0.01 else "rows of any sum"


def ladder_of(runs):
    """{recipe: {size: (compute in TFLOP, bits, bits over softmax) or None, "slope": interval}}: the slope of log bits
    over log compute, a line for each seed that has all sizes. Compute is 6 x parameters x tokens."""
    found = {}
    for name in dict.fromkeys(name for name, setup in runs if setup.startswith("ladder-")):
        groups = {size: (runs.get((name, setup)), runs.get(("softmax", setup), {})) for setup, size in SIZES.items()}
        groups = {size: (group, base) for size, (group, base) in groups.items() if group}
        seeds = set.intersection(*(group.keys() & base.keys() for group, base in groups.values()))
        if not seeds:                           # softmax is missing
            continue
        found[name] = row = dict.fromkeys((*SIZES.values(), "slope"))
        for size, (group, base) in groups.items():
            row[size] = (6e-12 * TOKENS * fmean(group[key]["parameters"] * group[key]["steps"] for key in seeds),
                         fmean(group[key]["bits"] for key in seeds),
                         fmean(group[key]["bits"] - base[key]["bits"] for key in seeds))
        flops = np.log([row[size][0] for size in groups])
        lines = [[math.log(group[key]["bits"]) for group, _ in groups.values()] for key in seeds]
        slopes = [np.polyfit(flops, line, 1)[0] for line in lines]
        row["slope"] = interval(slopes) if len(slopes) > 1 and len(flops) > 1 else None
    return found


def cell(value):
    """A number, an interval or None as a cell of a table."""
    if isinstance(value, tuple):
        return f"{sum(value) / 2:+.3f} ±{(value[1] - value[0]) / 2:.3f}"
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 10 or isinstance(value, int) else f"{value:.3f}"


def text_of(table, rows):
    """The base table, what its columns mean, and the reasons of failures."""
    failures = [f"{recipe} ({setup}), seed {seed}: {row['failed']}" for (recipe, setup, seed), row in rows.items()
                if "failed" in row]
    meanings = {printed(key): meaning for key, meaning in MEANINGS.items()}
    return "\n\n".join([lines_of(table), legend(meanings), *failures])


def lines_of(table, columns=tuple(MEANINGS)):
    return markdown([[f"`{name}`", *(cell(row[key]) for key in columns)] for name, row in table.items()],
                    ["recipe", *map(printed, columns)])


def write_pages(table, ladder):
    """Write the tables into docs/board.md and README.md, below the comments that mark their places; draw the pictures,
    and make docs/board.html."""
    sizes = {name: {f"{title}, {size}": row[size] and row[size][i]
                    for i, title in ((1, "bits"), (2, "over softmax")) for size in SIZES.values()}
             | {"slope": row["slope"]} for name, row in ladder.items()}
    first = {name: row for i, (name, row) in enumerate(table.items()) if i < 5 or name == "softmax"}
    put("docs/board.md", "the base table of python eval.py board", lines_of(table))
    put("README.md", "the first rows of python eval.py board", lines_of(first, README_COLUMNS))
    draw_board(ROOT / "results/board.png", table)
    if ladder:
        put("docs/board.md", "the ladder of python eval.py board", lines_of(sizes, [*next(iter(sizes.values()))]))
        draw_ladder(ROOT / "results/board-ladder.png", ladder)
    titles = {"recipe": ("recipe", "the value of --attn")} | {key: (printed(key), MEANINGS[key]) for key in MEANINGS}
    board = [{key: (fmean(value) if isinstance(value, tuple) else value, cell(value)) for key, value in (
        {"recipe": name} | row).items()} for name, row in table.items()]
    save_page(ROOT / "docs/board.html", {"board": board, "titles": titles})


def put(page, mark, lines):
    """Replace the table below this comment of a page. Its columns need not be aligned there."""
    lines = re.sub(" +", " ", re.sub(" -{3,} ", "---", lines))
    before, comment, rest = (ROOT / page).read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n\n")
    with files.replacing(ROOT / page, "w") as f:
        f.write(f"{before}{comment}{lines}\n" + re.sub(r"^(?:[|].*\n)*", "", rest))


def draw_board(path, table):
    """Draw bits over softmax against the speed of a step, and against the weight on the first token."""
    with figure_of(path, [4.6], [6.4, 6.4], sharey=True) as axes:
        for ax, key, label in zip(axes[0], ("speed", "sink"), (
                "speed of a training step (softmax: 1)", "weight on the first token"), strict=True):
            for colour in (name for name in COLOURS if name in {row["family"] for row in table.values()}):
                points = {name: row for name, row in table.items() if row["family"] == colour and row[key] is not None
                          and (row["over softmax"] or name == "softmax")}
                ends = np.reshape([row["over softmax"] or (0, 0) for row in points.values()], (-1, 2))
                middle = ends.mean(1)
                ax.errorbar([row[key] for row in points.values()], middle, np.ptp(ends, 1) / 2, fmt="o", markersize=4,
                            capsize=2, color=COLOURS[colour], label=colour)
                for (name, row), y in zip(points.items(), middle, strict=True):
                    ax.annotate(name, (row[key], y), (4, 3), textcoords="offset points", fontsize=7)
            ax.axhline(0, color=GREY, linestyle=":", linewidth=1)
            frame(ax, "", label)
        axes[0, 0].set_ylabel("bits per byte over softmax (lower is better)")
        axes[0, 1].legend(frameon=False, fontsize=8)


def draw_ladder(path, ladder):
    """Draw bits against compute, and bits over softmax against the size of the model."""
    with figure_of(path, [4.2], [6.4, 6.4]) as (axes,):
        for name, row in ladder.items():
            points = {size: row[size] for size in SIZES.values() if row[size]}
            axes[0].plot(*zip(*(point[:2] for point in points.values()), strict=True), "o-", markersize=4, label=name)
            axes[1].plot([*points], [point[2] for point in points.values()], "o-", markersize=4)
        axes[0].set(xscale="log", yscale="log")
        axes[0].yaxis.set_minor_formatter("{x:g}")
        frame(axes[0], "", "compute, TFLOP", "bits per byte")
        frame(axes[1], "", "parameters of softmax's model, tokens in proportion", "bits per byte over softmax")
        axes[0].legend(frameon=False, fontsize=8)
