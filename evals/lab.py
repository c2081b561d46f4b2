"""The sink lab: what every recipe does with rows that need no attention, on a task whose best
possible loss is known.

The data comes from data/backcopy.py: after a trigger symbol, the symbol before it is repeated;
everywhere else a bigram table decides. So queries at triggers (*copy* rows) have something to find,
and all others (*idle* rows) do not.

The command starts train.py once for each recipe and seed. At its end, train.py measures its own run
(evals/report.py) and writes the figures to meta.json. The command collects them in a table, a JSON
file and a picture.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import attention
import mixers
from common import files
from common.flags import knob
from common.runs import ROOT
from evals.board import RECIPES
from evals.instrument import (
    each_done,
    markdown,
    recipe_names,
    table,
    train_if_missing,
    whole_numbers,
)
from evals.pictures import draw_recipes

# The tables of When Attention Sink Emerges (2410.10781, section 7): {table: {row: our flags of
# train.py, and the paper's Sink*, Sink_1 and loss if it has them}}.
#
# The paper's models have 60M parameters, 10 blocks of 8 heads and T = 2048, trained on 5B tokens of
# the Pile. It reports Sink_1^0.3 as a share of heads and sequences (there in percent), the same for
# the extra key (Sink*), and the validation loss in nats a token. Our models have the lab's one
# layer with one head, and our loss is the excess over the true process. So only the order of rows
# can be compared.
SWEEPS = {
    "pos": {  # table 3
        "none": ("--attn=softmax --pos=none", None, 0.2035, 3.81),
        "sinusoidal": ("--attn=softmax --pos=sinusoidal", None, 0.3273, 3.74),
        "learned": ("--attn=softmax", None, 0.3313, 3.79),
        # "relative" in their code
        "t5_index": ("--attn=softmax --pos=t5_index", None, 0.3553, 5.45),
        "t5": ("--attn=softmax --pos=t5",),
        "alibi": ("--attn=softmax --pos=alibi", None, 0.2078, 3.71),
        "rope": ("--attn=softmax --pos=rope", None, 0.1818, 3.73),
    },
    "norm_place": {  # section 7.2
        "pre": ("--attn=softmax", None, 0.1818, 3.73),
        "post": ("--attn=softmax --norm_place=post", None, 0.1354, None),
        "out": ("--attn=softmax --norm_place=out",),
        # as in OLMo 2
        "out, queries and keys normed": ("--attn=softmax --norm_place=out --qk_norm=all",),
    },
    "bias": {  # table 4, and the questions of tables 12 and 13
        "softmax": ("--attn=softmax", None, 0.1818, 3.73),
        "sink_token": ("--attn=sink_token", 0.7412, 0.0, 3.72),
        "kv_bias": ("--attn=kv_bias", 0.7276, 0.0004, 3.72),
        "k_bias": ("--attn=k_bias", 0.7334, 0.0, 3.72),
        "v_bias": ("--attn=v_bias", None, 0.1753, 3.73),
        "k_bias, 1 channel": ("--attn=k_bias --attn_args=bias_dims=1",),
        "k_bias, 4 channels": ("--attn=k_bias --attn_args=bias_dims=4",),
        "4 heads": ("--attn=softmax --n_head=4",),
        "4 heads, k_bias": ("--attn=k_bias --n_head=4",),
        "4 heads, kv_bias": ("--attn=kv_bias --n_head=4",),
        "4 heads, one k_bias": ("--attn=k_bias --n_head=4 --attn_args=bias_shared=1",),
        "4 heads, one kv_bias": ("--attn=kv_bias --n_head=4 --attn_args=bias_shared=1",),
    },
    "value_norm": {  # table 5
        "0": ("--attn=kv_bias --attn_args=value_norm=0,value_even=1", 0.7334, 0.0, 3.72),
        "1 on an axis": (
            "--attn=kv_bias --attn_args=value_norm=1,value_even=0",
            0.7003,
            0.0006,
            3.72,
        ),
        "5 on an axis": (
            "--attn=kv_bias --attn_args=value_norm=5,value_even=0",
            0.4443,
            0.0371,
            3.72,
        ),
        "20 on an axis": (
            "--attn=kv_bias --attn_args=value_norm=20,value_even=0",
            0.0151,
            0.2588,
            3.71,
        ),
        "1 evenly": ("--attn=kv_bias --attn_args=value_norm=1,value_even=1", 0.6974, 0.0215, 3.72),
        "5 evenly": ("--attn=kv_bias --attn_args=value_norm=5,value_even=1", 0.2799, 0.0593, 3.72),
        "20 evenly": ("--attn=kv_bias --attn_args=value_norm=20,value_even=1", 0.0, 0.1121, 3.73),
    },
    "rule": {  # table 6; its sinks are shares of the row's sum
        "softmax": ("--attn=softmax", None, 0.1818, 3.73),
        "sigmoid_raw": ("--attn=sigmoid_raw", None, 0.0044, 3.7),
        "sigmoid_norm": ("--attn=sigmoid_norm", None, 0.3024, 3.74),
        "elu": ("--attn=elu", None, 0.008, 3.69),
        "linear": ("--attn=linear", None, 0.5365, 4.19),
        "identity": ("--attn=identity", None, 0.0, 3.99),
        "mlp_norm": ("--attn=mlp_norm", None, 0.0019, 3.85),
        "mlp": ("--attn=mlp", None, 0.0074, 3.91),
    },
}
# columns of the tables: figures of lab_figures.py
COLUMNS = (
    "excess_loss excess_copy excess_idle sink_idle sink_copy share_idle times_uniform_idle "
    "row_mass_idle extra_idle sparsity empty_rows value_norm_ratio zero_cost hide_cost "
    "parameters seconds"
).split()
SWEEP_COLUMNS = (
    "extra_eps sink_eps sink_idle share_idle extra_idle value_norm_ratio zero_cost excess_loss "
    "excess_copy"
).split()
PANELS = {  # {figure: (title, ends of the axis)}
    "sink_idle": ("sink_idle\nweight on the first token", 0, 1.05),
    "value_norm_ratio": ("value_norm_ratio\nfirst value over the others", 0, 2.5),
    "row_mass_idle": ("row_mass_idle\nsum of the weights", -0.5, 1.5),
    "excess_copy": ("excess_copy\nexcess loss, nats", 0, None),
}


@dataclass
class Lab:
    """Flags of lab"""

    attn: str = knob("all", "recipes, separated by commas")
    sweep: str = knob(
        "", "instead of recipes, repeat this table of When Attention Sink Emerges", ("", *SWEEPS)
    )
    seeds: str = knob("2,3,4", "seeds, separated by commas")
    out_dir: str = knob(
        "out/lab", "folder of the runs, a subfolder each; finished runs are not trained again"
    )
    results: str = knob(
        "",
        "save the table, the figures and the picture as this name with .md, "
        ".json and .png; empty: results/lab, or OUT_DIR/lab if this is not the "
        "whole lab",
    )
    train_args: str = knob("", "further flags of train.py, separated by spaces")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run):
    """Train every recipe in the sink lab, on the same data with the same seeds, and compare
    them."""
    recipes, seeds = recipe_names(args.attn), whole_numbers(args.seeds, "seeds")
    if args.sweep:
        models = {row: flags for row, (flags, *_) in SWEEPS[args.sweep].items()}
    else:
        models = {name: lab_flags(name) for name in recipes} | {"blind": RECIPES["blind"]}

    def trained(seed, row):
        # models of sweeps are named by their flags: those of several tables are trained once
        name = folder_name(models[row]) if args.sweep else row
        folder = Path(args.out_dir) / f"{name}-{seed}"
        flags = ["--preset=lab", f"--seed={seed}", f"--out_dir={folder}", *models[row].split()]
        return train_if_missing(folder, [*flags, *args.train_args.split()], quiet=True)

    # seed by seed: an interrupted lab has all models of its first seeds
    jobs = list(itertools.product(seeds, models))
    metas = dict(each_done(trained, jobs))
    if failed := [f"{row} with seed {seed}" for seed, row in jobs if (seed, row) not in metas]:
        raise ValueError(
            f"not finished: {', '.join(failed)}. Read the errors above, and change "
            "flags with --train_args"
        )
    runs = {row: [] for row in models}
    for (_, row), meta in metas.items():
        runs[row].append({key: meta[key] for key in ("parameters", "seconds")} | meta["report"])
    machine = {key: meta[key] for key in ("machine", "versions")}
    numbers = {"flags": dataclasses.asdict(args), **machine, "runs": runs}
    # only a whole lab may replace the committed results
    whole = set(recipes) == set(recipe_names("all")) and not args.train_args and len(seeds) >= 3
    name = f"lab-{args.sweep}" if args.sweep else "lab"
    place = args.results or (ROOT / "results" / name if whole else f"{args.out_dir}/{name}")
    files.write_json(f"{place}.json", numbers)
    rows, header = rows_of(runs, args.sweep)
    with files.replacing(f"{place}.md", "w") as f:
        f.write(markdown(rows, header) + "\n")
    draw_recipes(f"{place}.png", runs, PANELS)
    saved = f"means over seeds {args.seeds}; saved as {place}.md, .json and .png"
    return numbers, f"{table(rows, header)}\n\n{saved}"


def lab_flags(recipe):
    """The flags of a recipe in the lab, which has one head and sequences of 64 tokens."""
    axes, flags = attention.recipe(recipe), f"--attn={recipe}"
    if "window" in axes:
        flags += " --window=16"
    if axes.get("diff") == "v1":  # it pairs heads
        flags += " --n_head=2"
    # with its own beta of 1 hardly any key passes the threshold, so q and k would get no gradient
    if axes["rule"] == "tra":
        flags += " --attn_args=beta_init=0.1"
    return flags


def folder_name(flags):
    """The name of the run with these flags: "softmax-pos=none". A plain recipe has its own name."""
    return flags.removeprefix("--attn=").replace(" --", "-").replace(",", "-")


def rows_of(runs, sweep=""):
    """A row for each of runs, {name: [the figures of each seed]}, and the names of the columns.

    Figures are means over seeds. In a sweep the paper's figures come before ours, and "apart" is
    the range of sink_idle over seeds."""
    rows, columns = [], SWEEP_COLUMNS if sweep else COLUMNS
    for name, group in runs.items():
        cells = []
        for key in columns:
            values = [figures.get(key) for figures in group]
            digits = 0 if key in ("parameters", "seconds") else 3
            cells.append("-" if None in values else f"{np.mean(values):.{digits}f}")
        if sweep:
            _, *found = SWEEPS[sweep][name]
            theirs = ["-" if value is None else f"{value:g}" for value in found or [None] * 3]
            sinks = [figures["sink_idle"] for figures in group]
            rows.append([name, *theirs, *cells, f"{max(sinks) - min(sinks):.3f}"])
        else:
            exact = name not in attention.ATTENTIONS or mixers.has_weights(name)
            rows.append([name if exact else f"{name} (derivatives)", *cells])
    if sweep:
        return rows, ["", "their Sink*", "their Sink_1", "their loss", *columns, "apart"]
    return rows, ["recipe", *columns]
