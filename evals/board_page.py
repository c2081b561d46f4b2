"""What the rows of evals/board.py say: its tables and its pictures.

A table is {recipe: {column: a number, the ends [low, high] of a 95 % interval, or None}}, the fewest bits first."""
import math
import re
from functools import cache
from statistics import fmean, mode

import numpy as np

from attention import ATTENTIONS, pattern
from common import files
from common.runs import ROOT
from evals.instrument import legend, markdown
from evals.lab_runs import RECIPES
from evals.measures import MEASURES, printed
from evals.pictures import GREY, figure_of, frame

STEPS, TOKENS, TRIAL = 1000, 2048, 1            # of a run of the base table, of a step; the seed that chooses the rate
MEANINGS = {                                    # {column: its meaning}
    "family": "its colour in the picture", "rate": "the best of three learning rates", "runs": "number of seeds",
    "bits": "bits per byte of the validation split",
    "over softmax": "bits less softmax's of the same seed, 95 % interval",
    "equal time": "bits less those of softmax if it trains for as long as this recipe takes, 95 % interval",
    "2x": "bits more in windows twice as long as in training", "4x": "bits more in windows four times as long",
    "sink": MEASURES["sink"], "density": MEASURES["density"], "sparsity": MEASURES["sparsity"],
    "empty_rows": MEASURES["empty_rows"], "dispersion": f"{MEASURES['dispersion']}, in windows of 1,024",
    "massive": "largest channel of the hidden state with the largest norm, over the median, in windows of 1,024",
    "parameters": "of the model", "kib": "KiB that a new token reads of 4,096 others, in float32",
    "speed": "training steps a second on one thread of a CPU, relative to softmax"}
TITLES = {key: (printed(key), meaning) for key, meaning in MEANINGS.items()}
README_COLUMNS = "bits", "over softmax", "sink", "sparsity", "speed"
COLOURS = {"rows sum to 1": "#1f77b4", "rows of any sum": "#d62728", "a gate": "#2ca02c", "two views": "#9467bd",
           "a state": "#ff7f0e", "unknown": GREY}
PLAIN = r"--(?:attn|layers)=(\S+)"
NAME_PLACES = sorted(((x, y) for x in (5, -5, 20, -20, 40, -40) for y in range(-60, 61, 6)),
                     key=lambda place: math.hypot(*place))              # of names in the picture, in points
SIZES = {"ladder-48": "0.1M", "ladder-80": "0.3M", "board": "0.8M", "ladder-208": "2.1M"}       # {set-up: parameters}
LADDER_COLUMNS = "rate", "slope", "slope over softmax"


def by_seed(rows, best):
    """The runs of rows {(recipe, set-up, seed): row} to compare, as {(recipe, set-up): {seed: row}}: those with the
    learning rate best(recipe, set-up), of recipes that still exist, on the text of most of softmax's. "board" is the
    base table's set-up."""
    found, texts = {}, {}
    for (name, setup, seed), row in rows.items():
        if row.get("bits") is not None and seed != TRIAL and row.get("rate") == best(name, setup) and (
                name in ATTENTIONS or name in RECIPES):
            setup = "board" if setup.startswith("board-") else setup
            found.setdefault((name, setup), {})[seed] = row
            texts.setdefault(setup, []).extend([row.get("data_hash")] * (name == "softmax"))
    found = {(name, setup): {seed: row for seed, row in group.items()
                             if not texts[setup] or row.get("data_hash") == mode(texts[setup])}
             for (name, setup), group in found.items()}
    return {key: group for key, group in found.items() if group}


def table_of(runs, rows):
    """The base table, of the runs from by_seed and the costs among the rows."""
    softmax, found = {key: run["bits"] for key, run in runs.get(("softmax", "board"), {}).items()}, {}
    budgets = {STEPS: softmax} | {int(setup[6:]): {key: run["bits"] for key, run in group.items()}
                                  for (_, setup), group in runs.items() if setup.startswith("steps-")}
    for name in (name for name, setup in runs if setup == "board"):
        group, cost = runs[name, "board"], cost_of(name, rows)
        group = {seed: run for seed, run in group.items() if seed in softmax} or group  # bits and differences agree
        columns = {key: [run.get(key) for run in group.values()] for key in MEANINGS}
        row = {key: None if None in values else fmean(values) for key, values in columns.items() if key != "rate"}
        equal = softmax_after(STEPS / cost["speed"], budgets) if cost else {}
        found[name] = row | {key: cost.get(key) for key in ("speed", "kib")} | {
            "rate": next(iter(group.values()))["rate"], "runs": len(group), "family": family(name, row),
            "over softmax": None if name == "softmax" else paired_difference(group, softmax),
            "equal time": None if name == "softmax" else paired_difference(group, equal)}
    return {name: {key: found[name][key] for key in MEANINGS}
            for name in sorted(found, key=lambda name: found[name]["bits"])}


@cache
def quantile(degrees):
    """The t that Student's distribution exceeds with a chance of 2.5 %: 12.7 with one degree of freedom."""
    angles = np.linspace(0, np.pi / 2, 100_001)                         # t = sqrt(degrees) tan(angle)
    density = np.cos(angles) ** (degrees - 1)
    area = np.cumsum(density[1:] + density[:-1])
    return degrees ** 0.5 * np.tan(np.interp(0.95, area / area[-1], angles[1:]))


def interval(values):
    """The 95 % interval of the mean of at least two values, (low, high)."""
    reach = quantile(len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return np.mean(values) - reach, np.mean(values) + reach


def paired_difference(group, others):
    """The 95 % interval of the bits of runs {seed: run} less those of others {seed: bits}; None without two seeds."""
    over = [run["bits"] - others[seed] for seed, run in group.items() if seed in others]
    return interval(over) if len(over) > 1 else None


def softmax_after(steps, budgets):
    """{seed: softmax's bits after so many steps}, on the polynomial in log steps through budgets {steps: {seed: bits}},
    for the seeds whose budgets enclose them."""
    found = {}
    for seed in set().union(*budgets.values()):
        counts, bits = zip(*sorted((count, runs[seed]) for count, runs in budgets.items() if seed in runs), strict=True)
        if counts[0] <= steps <= counts[-1]:
            found[seed] = float(np.polyval(np.polyfit(np.log(counts), bits, len(counts) - 1), math.log(steps)))
    return found


def cost_of(name, rows):
    """{"speed", "kib"} of a recipe, means of time and KiB over the recipes of its layers; {} if it is not known."""
    costs = [rows.get((layer, "cost", 0), {}) for layer in layers_of(name)]
    if not all("speed" in cost for cost in costs) or not re.fullmatch(f"{PLAIN}(?: --attn_args=\\S+)?", flags_of(name)):
        return {}                               # other flags, such as those of positions, take time
    caches = [cost["kib"] for cost in costs]
    return {"speed": fmean(1 / cost["speed"] for cost in costs) ** -1,
            "kib": None if None in caches else fmean(caches)}


def flags_of(name):
    return RECIPES.get(name, f"--attn={name}")


def layers_of(name):
    """The recipes of its layers: several for one of lab_runs.toml that has --layers."""
    return [layer for layer, _ in pattern(re.match(PLAIN, flags_of(name))[1])]


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


def ladder_of(runs):
    """{recipe: {size: (compute in TFLOP, bits, bits over softmax) or None, "rate": that of the largest size, "slope":
    interval, "slope over softmax": interval}}: slopes of log bits over log compute, which is 6 x parameters x tokens.
    If a size has two learning rates, both with the same seeds of the recipe and softmax, the better of each counts."""
    found = {}
    for name in dict.fromkeys(name for name, setup in runs if setup.startswith("ladder-")):
        row, groups, bases = dict.fromkeys((*SIZES.values(), *LADDER_COLUMNS)), [], []
        for setup, size in SIZES.items():
            pairs = [[runs.get((recipe, place), {}) for place in (setup, f"{setup}-lower")]
                     for recipe in (name, "softmax")]
            both = all(group.keys() == lower.keys() for group, lower in pairs)
            group, base = (min(pair[:1 + both], key=lambda group: sum(run["bits"] for run in group.values()))
                           for pair in pairs)
            if seeds := group.keys() & base.keys():
                groups.append(group)
                bases.append(base)
                row["rate"] = next(iter(group.values()))["rate"]
                row[size] = (6e-12 * TOKENS * fmean(group[seed]["parameters"] * group[seed]["steps"] for seed in seeds),
                             fmean(group[seed]["bits"] for seed in seeds),
                             fmean(group[seed]["bits"] - base[seed]["bits"] for seed in seeds))
        slopes, others = slopes_of(groups), slopes_of(bases)
        row["slope"] = interval([*slopes.values()]) if len(slopes) > 1 else None
        over = [slopes[seed] - others[seed] for seed in slopes.keys() & others.keys()]
        row["slope over softmax"] = interval(over) if len(over) > 1 and name != "softmax" else None
        found |= {name: row} if groups else {}
    return found


def slopes_of(groups):
    """{seed: slope of log bits over log compute} of groups [{seed: run} of each size]; {} if there is only one size."""
    return {seed: np.polyfit(*np.log([(group[seed]["parameters"] * group[seed]["steps"], group[seed]["bits"])
                                      for group in groups]).T, 1)[0]
            for seed in set.intersection(*map(set, groups))} if len(groups) > 1 else {}


def words_of(runs, table):
    """{recipe: bits per byte and its difference from softmax on the set-up words, and the difference on bytes}."""
    groups = {name: group for (name, setup), group in runs.items() if setup == "words"}
    softmax = {key: run["bits"] for key, run in groups.get("softmax", {}).items()}
    found = {name: {"bits": fmean(run["bits"] for run in group.values()),
                    "over softmax": None if name == "softmax" else paired_difference(group, softmax),
                    "over softmax in bytes": table.get(name, {}).get("over softmax")}
             for name, group in groups.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: found[name]["bits"])}


def cell(value):
    """A number, an interval or None as a cell of a table."""
    if isinstance(value, tuple):
        return f"{sum(value) / 2:+.3f} ±{(value[1] - value[0]) / 2:.3f}"
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 10 or isinstance(value, int) else f"{value:.3f}"


def text_of(table, ladder, words, rows):
    """All tables, what the columns mean, and the reasons of failures."""
    failures = [f"{recipe} ({setup}), seed {seed}: {row['failed']}" for (recipe, setup, seed), row in rows.items()
                if "failed" in row]
    measured = dict.fromkeys(name for name, setup, seed in rows if setup.startswith("board-") and seed > TRIAL)
    if missing := [name for name in measured if name not in table]:
        failures += [f"without a row: {', '.join(missing)}. Their runs failed, or are on another text than softmax's"]
    more = [lines_of(part) for part in (sizes_of(ladder), words) if part]
    return "\n\n".join([lines_of(table), legend(dict(TITLES.values())), *more, *failures])


def sizes_of(ladder):
    return {name: {f"{title}, {size}": row[size] and row[size][i]
                   for i, title in ((1, "bits"), (2, "over softmax")) for size in SIZES.values()}
            | {key: row[key] for key in LADDER_COLUMNS} for name, row in ladder.items()}


def lines_of(table, columns=None):
    columns = columns or next(iter(table.values()), MEANINGS)           # those of its rows
    return markdown([[f"`{name}`", *(cell(row[key]) for key in columns)] for name, row in table.items()],
                    ["recipe", *map(printed, columns)])


def write_pages(table, ladder, words):
    """Write the tables into docs/board.md and README.md, below the comments that mark their places, and draw the
    pictures."""
    # the best four recipes; those of lab_runs.toml that lack a part, such as no-conv, have no speed
    best = [name for name, row in table.items() if row["speed"] and name != "softmax"][:4]
    first = {name: row for name, row in table.items() if name in (*best, "softmax")}
    put("docs/board.md", "the base table of python eval.py board", lines_of(table))
    put("docs/board.md", "the columns of python eval.py board", markdown(TITLES.values(), ["column", "meaning"]))
    put("README.md", "the first rows of python eval.py board", lines_of(first, README_COLUMNS))
    for part, mark in (sizes_of(ladder), "ladder"), (words, "words"):
        if part:
            put("docs/board.md", f"the {mark} of python eval.py board", lines_of(part))
    draw_board(table)
    if ladder:
        draw_ladder(ROOT / "results/board-ladder.png", ladder)


def put(page, mark, lines):
    """Replace the table below this comment of a page. Its columns need not be aligned there."""
    lines = re.sub(" +", " ", re.sub(" -{3,} ", "---", lines))
    before, rest = (ROOT / page).read_text(encoding="utf-8").split(f"<!-- {mark} -->\n\n")
    with files.replacing(ROOT / page, "w") as f:
        f.write(f"{before}<!-- {mark} -->\n\n{lines}\n\n" + re.sub(r"^(?:[|].*\n)*\n*", "", rest))


def draw_board(table):
    """Draw bits over softmax against the speed of a step, and against the first token's share of a row's weights."""
    for picture, label, x_of in (
            ("board.png", "speed of a training step (softmax: 1)", lambda row: row["speed"]),
            ("board-sink.png", "first token's share of what a row spends", lambda row:
             None if (row["sink"] or 0) < 0 else row["sink"] and row["sink"] / (row["sink"] + row["density"]))):
        points = {name: (x_of(row), *np.reshape(row["over softmax"] or (0, 0), 2), row["family"])
                  for name, row in sorted(table.items(), key=lambda item: item[0] != "softmax")
                  if x_of(row) is not None and (row["over softmax"] or name == "softmax")}
        with figure_of(ROOT / "results" / picture, [6.4], [8.4], subplot_kw={"xmargin": 0.1}) as ((ax,),):   # for names
            ax.set_yscale("symlog", linthresh=0.1)                      # most lie near 0, a few far above
            ax.set_yticks((-0.2, -0.1, 0, 0.1, 0.2, 0.5, 1, 2), "-0.2 -0.1 0 0.1 0.2 0.5 1 2".split())
            for colour in COLOURS:
                if group := [point[:3] for point in points.values() if point[3] == colour]:
                    x, low, high = np.transpose(group)
                    ax.errorbar(x, (low + high) / 2, (high - low) / 2, fmt="o", markersize=4, color=COLOURS[colour],
                                ecolor=(COLOURS[colour], 0.4), label=colour)
            ax.axhline(0, color=GREY, linestyle=":", linewidth=1)
            frame(ax, "", label, "bits per byte over softmax (lower is better)")
            put_names(ax, {name: (x, (low + high) / 2) for name, (x, low, high, _) in points.items()})
            ax.legend(frameon=False, fontsize=8)


def put_names(ax, points):
    """Write names beside their points {name: (x, y)} or, where they would cover something, further away with a line."""
    ax.figure.draw_without_rendering()          # the places of points become final
    markers, taken = ax.transData.transform([*points.values()]), []
    for name, point in points.items():
        for place in NAME_PLACES:
            text = ax.annotate(name, point, place, textcoords="offset points", fontsize=7, va="center",
                               weight="bold" if name == "softmax" else "normal", ha="left" if place[0] > 0 else "right",
                               bbox={"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0})
            box = text.get_window_extent()
            if ax.bbox.count_contains(box.corners()) == 4 and not box.padded(4).count_contains(markers) and not any(
                    map(box.padded(4).overlaps, taken)):
                taken.append(box)
                ax.annotate("", point, place, textcoords="offset points", arrowprops={"arrowstyle": "-", "color": GREY})
                break
            text.remove()


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
