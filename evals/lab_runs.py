"""The runs that the lab, its sweeps and the board share: lab_runs.toml has their names, and the flags of train.py that
make them.

A run is named RECIPE, or RECIPE@SETUP outside the plain lab. With a seed it has one folder, OUT_DIR/NAME-SEED. So it is
trained only once, even if several commands use it. One run takes

    lab         15 to 25 s on one core: Bigram-Backcopy, one layer, one head (evals/lab.py)
    board-..    4 minutes on one core: 4 layers, width 128, T = 256, the sources of Python's library in bytes
    steps-.., ladder-.., words  the same with other numbers of steps, other widths, or books in tokens (evals/board.py)
"""
import re
import sys
from pathlib import Path
from typing import NamedTuple

import attention

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEEDS = "2,3,4"                                 # of the lab, its sweeps and the board
OUT_DIR = "out/lab"


def expanded(text):
    """The texts for which one with braces stands: "at {64,128} = {0,1}" for "at 64 = 0" and "at 128 = 1"."""
    outside = re.split("{([^{}]*,[^{}]*)}", text)
    several = zip(*(inside.split(",") for inside in outside[1::2]), strict=True) if len(outside) > 1 else [()]
    return ["".join(part + value for part, value in zip(outside[0::2], (*values, ""), strict=True))
            for values in several]


def table_of(rows):
    """{name: text} of a table of lab_runs.toml, with its braces expanded."""
    lines = (line for name, text in rows.items() for line in expanded(f"{name}\n{text}"))
    return {name: " ".join(text.split()) for name, _, text in (line.partition("\n") for line in lines)}


def fields(text):
    return re.split(r" *\| *", text)


class Setup(NamedTuple):
    """A way to train every recipe. {data} and {books} become folders."""
    flags: str                                  # of train.py, before the recipe's own
    data: str = ""                              # the script that makes {data}/NAME, if the set-up has its own data set


FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RECIPES, COMMANDS, TIMED = (table_of(FILE[name]) for name in ("recipes", "commands", "timed"))
SETUPS = {name: Setup(*fields(text)) for name, text in table_of(FILE["setups"]).items()}
# our run, and the paper's figures: Sink* of the extra key and Sink_1 in percent, loss in nats a token
SWEEPS = {name: {what: (run, *(None if figure == "-" else float(figure) for figure in figures))
                 for what, text in table_of(rows).items() for run, *figures in [fields(text)]}
          for name, rows in FILE["sweeps"].items()}


def folder_of(run, seed, out_dir):
    return Path(out_dir) / f"{run}-{seed}"


def train_flags(run, seed, out_dir, more=""):
    """The flags of train.py that make a run, and `more`, a string. Raises ValueError if there is no such recipe."""
    recipe, _, setup = run.partition("@")
    if recipe in RECIPES:
        flags = RECIPES[recipe]
    else:
        axes, flags = attention.recipe(recipe), f"--attn={recipe}"
        # the recipe's own positions replace the set-up's
        if setup not in ("", "lab"):
            flags += f" --pos={axes['pos']}" if "pos" in axes else ""
        else:
            flags += " --window=16" * ("window" in axes)                # shorter than the lab's 64 tokens
            flags += " --n_head=2" * (axes.get("diff") == "v1")         # it pairs heads, and the lab has one head
            # with its own beta of 1 hardly any key passes the threshold at first, so q and k would get no gradient
            flags += " --attn_args=beta_init=0.1" * (axes["rule"] == "tra")
    fixed = SETUPS[setup or "lab"].flags.format(data=Path(out_dir) / "data")
    return f"{fixed} --seed={seed} --out_dir={folder_of(run, seed, out_dir)} {flags} {more}".split()
