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
from evals.ledger.quantities import interval
from evals.measures import MEASURES, printed
from evals.pictures import GREY, figure_of, frame, save_page

STEPS, TOKENS = 1000, 2048                      # of a run of the base table, and of a step
MEANINGS = {                                    # {column: its meaning}
    "family": "its colour in the picture; whether rows sum to 1 is measured",
    "rate": "learning rate: the best of three with one more seed", "runs": "seeds",
    "bits": "bits per byte of the validation split, in windows of 256",
    "over softmax": "bits less softmax's of the same seed, 95 % interval",
    "equal time": "the same, with softmax trained for as long as this recipe takes",
    "2x": "nats a byte more in windows of 512", "4x": "the same of 1,024",
    "sink": MEASURES["sink"], "density": MEASURES["density"], "sparsity": MEASURES["sparsity"],
    "empty_rows": MEASURES["empty_rows"], "dispersion": f"{MEASURES['dispersion']}, in windows of 1,024",
    "massive": "norm of the first token's hidden state over the others'", "parameters": "of the model",
    "kib": "keys and values, or the state, of 4,096 tokens, in float32", "speed": "of a training step, over softmax's"}
FIRST = "bits", "over softmax", "equal time", "sink", "sparsity", "speed"      # columns in the README
COLOURS = {"rows sum to 1": "#1f77b4", "rows may spend less": "#d62728", "a gate": "#2ca02c", "two views": "#9467bd",
           "a state": "#ff7f0e"}
WIDTHS = {"ladder-48": "0.1M", "ladder-80": "0.3M", "board": "0.8M", "ladder-208": "2.1M"}      # {set-up: parameters}


def table_of(rows, best):
    """The base table of rows {(recipe, setup, seed): row}. best(recipe): its learning rate."""
    runs = by_seed(rows, best)
    softmax, found = {seed: row["bits"] for seed, row in runs.get(("softmax", "board"), {}).items()}, {}
    budgets = {STEPS: softmax} | {int(setup[6:]): {seed: row["bits"] for seed, row in group.items()}
                                  for (_, setup), group in runs.items() if setup.startswith("steps-")}
    for name in (name for name, setup in runs if setup == "board"):
        group, cost = runs[name, "board"], rows.get((name, "cost", 0), {})
        columns = {key: [row[key] for row in group.values()] for key in MEANINGS if key in next(iter(group.values()))}
        row = {key: None if None in values else fmean(values) for key, values in columns.items() if key != "rate"}
        equal = softmax_after(STEPS / cost["speed"], budgets) if cost else {}
        found[name] = row | cost | {
            "rate": best(name), "runs": len(group), "family": family(name, row),
            "over softmax": None if name == "softmax" else less(group, softmax),
            "equal time": None if name == "softmax" else less(group, equal)}
    return {name: {key: found[name].get(key) for key in MEANINGS}
            for name in sorted(found, key=lambda name: found[name]["bits"])}


def by_seed(rows, best):
    """{(recipe, set-up): {seed: row}} of all measured runs; "board" is the base table's set-up with the best rate."""
    found = {}
    for (name, setup, seed), row in rows.items():
        if "bits" in row and (not setup.startswith("board-") or setup == f"board-{best(name)}"):
            found.setdefault((name, setup.partition("-")[0] if setup.startswith("board-") else setup), {})[seed] = row
    return found


def less(group, others):
    """The 95 % interval of the bits of runs {seed: row} less those of others {seed: bits}; None without two seeds."""
    over = [row["bits"] - others[seed] for seed, row in group.items() if seed in others]
    return interval(over) if len(over) > 1 else None


def softmax_after(steps, budgets):
    """{seed: softmax's bits after so many steps}, between those of budgets {steps: {seed: bits}}; {} outside them."""
    counts = sorted(budgets)
    seeds = set.intersection(*(set(budgets[count]) for count in counts))
    return {seed: float(np.interp(math.log(steps), np.log(counts), [budgets[count][seed] for count in counts]))
            for seed in seeds} if counts[0] <= steps <= counts[-1] else {}


def family(name, row):
    axes = ATTENTIONS.get(name, {"mixer": "recurrent"})                 # the hybrid
    if axes.get("mixer") == "recurrent":
        return "a state"
    if "diff" in axes or "dex" in axes:
        return "two views"
    if "gate" in axes:
        return "a gate"
    return "rows sum to 1" if abs(row["sink"] + row["density"] - 1) < 0.01 else "rows may spend less"


def ladder_of(rows, best):
    """{recipe: {size: (compute in TFLOP, bits, bits over softmax) or None, "slope": interval}}: the slope of log bits
    over log compute, a line for each seed. Compute is 6 x parameters x tokens."""
    runs, found = by_seed(rows, best), {}
    for name in dict.fromkeys(name for name, setup in runs if setup.startswith("ladder-")):
        seeds = set().union(*(runs.get((name, setup), ()) for setup in WIDTHS if setup != "board"))
        points = {}                             # {seed: [(compute, bits) of each size]}
        found[name] = row = dict.fromkeys((*WIDTHS.values(), "slope"))
        for setup, size in WIDTHS.items():
            base = runs.get(("softmax", setup), {})
            group = {seed: run for seed, run in runs.get((name, setup), {}).items() if seed in seeds & base.keys()}
            for seed, run in group.items():
                compute = 6e-12 * run["parameters"] * run["steps"] * TOKENS
                points.setdefault(seed, []).append((compute, run["bits"]))
            if group:
                over = fmean(run["bits"] - base[seed]["bits"] for seed, run in group.items())
                row[size] = compute, fmean(run["bits"] for run in group.values()), over
        slopes = [np.polyfit(*np.log(line).T, 1)[0] for line in points.values() if len(line) > 1]
        row["slope"] = interval(slopes) if len(slopes) > 1 else None
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
    sizes = {f"{title} {size}": {name: row[size] and row[size][i] for name, row in ladder.items()}
             for i, title in ((1, "bits,"), (2, "over softmax,")) for size in WIDTHS.values()}
    sizes["slope"] = {name: row["slope"] for name, row in ladder.items()}
    first = {name: row for i, (name, row) in enumerate(table.items()) if i < 5 or name == "softmax"}
    put("docs/board.md", "the base table", lines_of(table))
    by_name = {name: {title: column[name] for title, column in sizes.items()} for name in ladder}
    put("docs/board.md", "the ladder", lines_of(by_name, [*sizes]))
    put("README.md", "the board", lines_of(first, FIRST))
    draw_board(ROOT / "results/board.png", table)
    if ladder:
        draw_ladder(ROOT / "results/board-ladder.png", ladder)
    titles = {"recipe": ("recipe", "the value of --attn")} | {key: (printed(key), MEANINGS[key]) for key in MEANINGS}
    board = [{key: (fmean(value) if isinstance(value, tuple) else value, cell(value)) for key, value in (
        {"recipe": name} | row).items()} for name, row in table.items()]
    save_page(ROOT / "docs/board.html", {"board": board, "titles": titles})


def put(page, mark, lines):
    """Replace the table below the comment of a page that begins with this mark."""
    text = (ROOT / page).read_text(encoding="utf-8")
    with files.replacing(ROOT / page, "w") as f:
        f.write(re.sub(rf"(<!-- {mark}.*-->\n\n)(?:\|.*\n)+", lambda found: f"{found[1]}{lines}\n", text))


def draw_board(path, table):
    """Draw bits over softmax against the speed of a step, and against the weight on the first token."""
    with figure_of(path, [4.6], [6.4, 6.4], sharey=True) as axes:
        for ax, key, label in zip(axes[0], ("speed", "sink"), (
                "speed of a training step (softmax: 1)", "weight on the first token"), strict=True):
            for colour in (name for name in COLOURS if name in {row["family"] for row in table.values()}):
                points = {name: row for name, row in table.items() if row["family"] == colour and row[key] is not None}
                middle = [fmean(row["over softmax"] or (0, 0)) for row in points.values()]
                half = [np.diff(row["over softmax"] or (0, 0))[0] / 2 for row in points.values()]
                ax.errorbar([row[key] for row in points.values()], middle, half, fmt="o", markersize=4, capsize=2,
                            color=COLOURS[colour], label=colour)
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
            points = {size: row[size] for size in WIDTHS.values() if row[size]}
            axes[0].plot(*zip(*(point[:2] for point in points.values()), strict=True), "o-", markersize=4, label=name)
            axes[1].plot([*points], [point[2] for point in points.values()], "o-", markersize=4)
        axes[0].set(xscale="log", yscale="log")
        axes[0].yaxis.set_minor_formatter("{x:g}")
        frame(axes[0], "", "compute, TFLOP", "bits per byte")
        frame(axes[1], "", "parameters of softmax's model, tokens in proportion", "bits per byte over softmax")
        axes[0].legend(frameon=False, fontsize=8)
