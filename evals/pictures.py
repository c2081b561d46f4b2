"""Drawing functions that the instruments share: a figure, a heat map, a panel of lines, and
colours."""

import contextlib
from pathlib import Path

import numpy as np

from common import files

SHARES = {"cmap": "Blues", "vmin": 0, "vmax": 1}  # colours of weights: dark is much, in every map
GREY = "#999999"  # reference lines


def signed(most):
    """Colours from -most to most: blue is above 0, red below, white is 0."""
    return {"cmap": "RdBu", "vmin": -most, "vmax": most}


def pyplot():
    """matplotlib.pyplot, imported only by commands that draw. Raises ValueError if it is
    missing."""
    files.optional("matplotlib").use("Agg")  # draws without a screen
    return files.optional("matplotlib.pyplot")


@contextlib.contextmanager
def figure_of(path, heights, widths, **how):
    """Yield the panels of a new figure, an array (rows, columns), and save it as PNG afterwards.
    heights, widths: those of its rows and columns, in inches."""
    figure, axes = pyplot().subplots(
        len(heights),
        len(widths),
        squeeze=False,
        figsize=(sum(widths), sum(heights)),
        height_ratios=heights,
        width_ratios=widths,
        layout="constrained",
        **how,
    )
    yield axes
    with files.replacing(path) as f:
        figure.savefig(f, format="png", dpi=110)
    pyplot().close(figure)


def draw_rows(path, rows, least=(1, 1)):
    """Draw {run: [functions that draw on a panel]}, a row for each run. The largest map, or `least`
    (layers, heads), decides the size."""
    with figure_of(path, [1] * len(rows), [1] * max(map(len, rows.values()))) as axes:
        for (run, panels), line in zip(rows.items(), axes, strict=True):
            for ax, draw in zip(line, panels, strict=False):
                draw(ax)
            for ax in line[len(panels) :]:  # other runs have more
                ax.set_axis_off()
            if len(rows) > 1:
                line[0].set_title(f"{Path(run).name}\n{line[0].get_title()}", fontsize=10)
        shapes = [image.get_array().shape for ax in axes.flat for image in ax.images]
        layers, heads = np.max([least, *shapes], 0)
        axes[0, 0].figure.set_size_inches(
            axes.shape[1] * min(12, max(4, 1.2 + 0.45 * heads)),
            axes.shape[0] * min(12, max(3.2, 1.2 + 0.27 * layers)),
        )


def heat_map(
    ax,
    cells,  # (rows, columns)
    colours,
    numbers=None,  # (rows, columns)
    xlabel="head",
    ylabel="layer",
    title="",
    bar=None,
):
    """Draw cells as colours, with a number in each cell if `numbers` are given. None in either
    stays empty. bar: the label of a colour bar, None for no bar. Returns the image."""
    cells = np.array(cells, float)  # None becomes nan
    image = ax.imshow(cells, aspect="auto", **colours)
    if numbers is None:
        whole_ticks(ax.xaxis)
        whole_ticks(ax.yaxis)
    else:
        for place, number in np.ndenumerate(np.array(numbers, float)):
            if not np.isnan(number):
                ax.text(
                    *place[::-1],
                    f"{number:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if abs(cells[place]) > 0.6 * image.norm.vmax else "black",
                )
        ax.set_xticks(range(cells.shape[1]))
        ax.set_yticks(range(cells.shape[0]))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=10)
    if bar is not None:
        ax.figure.colorbar(image, ax=ax, label=bar)
    return image


def line_panel(ax, curves, title, xlabel, marks=(), legend=True):
    """Draw {label: (x, y) or (x, y, standard errors)} as lines with dots, and dotted vertical lines
    at `marks`."""
    for label, (x, y, *errors) in curves.items():
        errors = ([error or 0 for error in part] for part in errors)
        ax.errorbar(x, y, *errors, fmt="o-", markersize=4, capsize=3, label=label)
    for x in marks:
        ax.axvline(x, color=GREY, linestyle=":", linewidth=1)
    if legend:
        ax.legend(frameon=False, fontsize=8)
    frame(ax, title, xlabel)


def draw_recipes(path, groups, panels):
    """Draw panels {figure: (title, low, high)} side by side, a line for each recipe of groups
    {name: [{figure: value} of each run]}: a dot for each run, and a bar for their mean. low, high:
    ends of the axis, or None."""
    with figure_of(path, [1.2 + 0.3 * len(groups)], [3.3] * len(panels), sharey=True) as axes:
        for ax, (key, (title, low, high)) in zip(axes[0], panels.items(), strict=True):
            for y, group in enumerate(groups.values()):
                values = [figures[key] for figures in group if figures[key] is not None] or [np.nan]
                mean = np.mean(values)
                ax.barh(y, mean, color="#9ecae1")
                dots = np.clip(values, low, high)
                ax.plot(dots, [y] * len(dots), "o", color="#08519c", markersize=3.5, clip_on=False)
                if high and mean > high:  # rules without a normaliser have row sums of any size
                    ax.text(high, y, f"{mean:.3g} ", ha="right", va="center", fontsize=8)
            ax.set_xlim(low, high)
            ax.locator_params(axis="x", nbins=5)
            frame(ax, title)
        ax.set_yticks(range(len(groups)), groups)
        ax.set_ylim(len(groups) - 0.4, -0.6)  # the first on top
        ax.figure.supxlabel(
            "a bar is the mean over runs, a dot one run; a dot at the edge lies there or beyond; "
            "a cut-off bar has its value beside it",
            fontsize=9,
        )


def frame(ax, title="", xlabel="", ylabel=""):
    """Set a panel's title and labels, and keep only its left and bottom axes."""
    ax.set_title(title, fontsize=10)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)


def whole_ticks(axis):
    """Put ticks at whole numbers only, such as layers and heads."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def powers_of_two(axis):
    """Give an axis a scale for lengths: 64, 128, 256."""
    axis.axes.set_xscale("log", base=2)
    axis.set_major_formatter(lambda x, place: f"{x:g}")
