"""The code that instruments share: flags, an opened run, ways to watch and change its attention,
tables of text.

An instrument is one file in this folder, with

    a dataclass of flags    its fields are the command's flags; see common/flags.py and Windows
    command(args, run)      takes the filled dataclass, and an OpenedRun or None. Returns (numbers,
                            text): the same result as a dict for JSON and as a table for people. Its
                            docstring begins -h

and, if it needs them, functions of found = {out_dir: numbers} of one or several runs:

    draw(path, found)       draws the picture for --png; for a command that opens no run,
                            draw(path, numbers)
    page(path, found)       writes the page for --html, which is a flag of its own
    compare(found)          returns one text for several runs. Without it, eval.py prints their
                            texts one after another, and then their numbers side by side
    check(args, places, dataset)    raises ValueError on runs that cannot be compared, before the
                            first is opened

docs/add-your-own.md adds one, step by step. Its test is in tests/test_NAME.py.
"""

import contextlib
import glob
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import attention
import mixers
from axes.layer import Layer
from axes.options import constants
from axes.positions import POSITIONS
from common import files
from common.flags import Knobs, fields_of, knob
from common.machine import Machine
from common.resolve import resolve
from common.runs import (
    flags_to_finish,
    load_weights,
    output_of,
    process_of,
    read_run,
    read_weights,
    run_with,
    what_is_new,
)
from data import tokens
from model import GPT, GPTConfig


@dataclass
class Common(Knobs):
    """Flags of every command that looks at a run"""

    out_dir: str = knob("", "folder of the run; several runs: out/a,out/b or 'out/lab/*'")
    dataset: str = knob(
        "",
        "data set in the run's tokenizer: a name in data/ or the path of a folder; "
        "empty: the data set that the run was trained on",
    )
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best available")
    dtype: str = knob(
        "",
        "precision of matrix products; empty: float32, or auto for public weights; auto: the "
        "fastest",
        ("", "auto", "float32", "bfloat16", "float16"),
    )
    json: bool = knob(False, "print JSON instead of a table")
    attn: str = knob(
        "",
        "attention recipe in place of the run's own; several: softmax,elastic. With several, the "
        "flag of an axis or constant changes the recipes that set it; if none does, those that "
        "accept it",
    )


# the other knobs of GPTConfig that an instrument can change in a trained model
OVERRIDES = ("attn_args", "kernel", "rope_base", "rope_scaling", *mixers.DEFAULTS)


@dataclass
class Picture:
    """The picture"""

    png: str = knob("", "also draw a picture into this file")


LONG = 1024  # the longest window that a laptop reads quickly
LENGTH = f"tokens of a window; 0: block_size, but at most {LONG}"  # help of --length


@dataclass
class Windows(Knobs):
    """The fixed windows that an instrument reads. Its own flags inherit these and may have other
    defaults"""

    split: str = knob("val", "split of the data set", ("train", "val"))
    windows: int = knob(16, "fixed windows, spread evenly", least=1)
    length: int = knob(0, LENGTH)
    batch_size: int = knob(4, "windows per forward pass", least=1)


def runs_named(text):
    """The runs that --out_dir names: "out/a,out/b", or a pattern such as "out/lab/*". Raises
    ValueError on others."""
    places = {}
    for part in text.split(","):
        matching = sorted(str(Path(meta).parent) for meta in glob.glob(f"{part}/meta.json"))
        places |= dict.fromkeys(matching or [part])  # read_run complains about a missing one
    for place in places:
        read_run(place)
    return list(places)


class OpenedRun:
    """A trained run: its model on this machine, its tokenizer, and a data set, which is opened at
    its first use. common: a Common. overrides: {config field: value}, which replace the run's own.
    Raises ValueError if the weights or the data do not fit the model."""

    def __init__(self, common, overrides):
        meta, checkpoint = read_run(common.out_dir)
        self.machine = Machine(
            common.device, common.dtype or ("auto" if "source" in meta else "float32")
        )
        self.model, self.meta = load_run(
            common.out_dir, self.machine.device, overrides, self.machine.dtype
        )
        self.out_dir, self.overrides = checkpoint.parent, overrides
        self.dataset = common.dataset or self.meta["knobs"]["dataset"]
        # without attention weights, derivatives of outputs by values replace them
        self.has_weights = all(block.attn.has_weights for block in self.model.transformer.h)
        if not self.has_weights:
            self.note(
                f"--attn={self.model.config.attn} has no attention weights, since it is not linear "
                "in its values: the weights shown are derivatives of outputs by values"
            )

    def note(self, text):
        if self.machine.main:
            print(f"note: {text}", file=sys.stderr)

    def data_of(self, dataset):
        """The folder of a data set in the run's tokenizer, and its meta.json."""
        folder, meta = tokens.data_for(dataset, self.out_dir, self.machine)
        tokens.check_vocabulary(self.model.config, meta, folder)
        return folder, meta

    @cached_property
    def data(self):
        return self.data_of(self.dataset)

    data_meta = property(lambda self: self.data[1])

    @cached_property
    def tokenizer(self):
        """The run's tokenizer, or the data's if an older run does not name one."""
        return tokens.tokenizer(str(self.out_dir if "tokenizer" in self.meta else self.data[0]))

    def beside(self, out_dir, overrides=None):
        """Another run, opened on the same data and machine."""
        common = Common(str(out_dir), self.dataset, str(self.machine.device), self.machine.dtype)
        return OpenedRun(common, overrides or {})

    def split(self, name):
        """A split of the data set. With --docs=1, the run's own data is read as in training."""
        knobs = self.meta["knobs"]
        docs = knobs.get("docs", False) and self.dataset == knobs["dataset"]
        return tokens.Tokens(self.data[0], name, docs)

    @property
    def positions(self):
        """How many tokens the model can read."""
        return self.model.config.block_size if POSITIONS[self.model.config.pos].embeds else math.inf

    def check_positions(self, length, flag="length"):
        """Raise ValueError if the model cannot read the `length` tokens that this flag asks for."""
        if length > self.positions:
            raise ValueError(
                f"--{flag}={length}, but --pos={self.model.config.pos} knows only its "
                f"block_size={self.positions} positions: give a smaller --{flag}"
            )

    def window(self, length, flag="length"):
        """The number of tokens in a window, from the value of this flag. Prints a note if --window
        is not smaller."""
        config = self.model.config
        self.check_positions(length, flag)
        if length >= self.data_meta.get("stride", math.inf):
            raise ValueError(
                f"--{flag}={length}, but the sequences of {self.data[0]} have "
                f"{self.data_meta['stride'] - 1} tokens: give a smaller --{flag}"
            )
        length = length or min(config.block_size, LONG)
        if length <= config.window:
            self.note(
                f"the model reads {length} tokens at a time, so --window={config.window} hides "
                f"none of them: give a larger --{flag}, or a smaller --window"
            )
        return length

    def reads(self, split, windows, length):
        """What an instrument read, with the same names in all instruments' numbers."""
        return {"dataset": self.dataset, "split": split, "windows": windows, "length": length}


def first_line(reads):
    """The first line of a text: what an instrument read, from its numbers."""
    return "{windows} windows of {length} tokens of {dataset} ({split})".format(**reads)


def load_run(out_dir, device, overrides=None, dtype="float32"):
    """A run's model on a device, in eval mode, and its meta.json. Parameters that overrides add
    have their initial values. Memory holds the weights once; on a CPU, float32 weights stay mapped
    to the file. Matrices that serve only in products (not a tied embedding) get the type dtype:
    else autocast would convert them in every pass."""
    meta, path = read_run(out_dir)
    config = model_config(meta["knobs"], overrides or {})  # chooses the kernel for this machine
    new = new_parameters(out_dir, overrides) if overrides else []
    # only new parameters need initial values; without them, shapes are enough
    with contextlib.nullcontext() if new else torch.device("meta"):
        model = GPT(config)
    large = ["c_attn.weight", "c_proj.weight", "c_fc.weight", "c_gate.weight"]
    if not config.tied:
        large.append("lm_head.weight")
    state = read_weights(path)
    for name, value in state.items():
        state[name] = value.to(
            getattr(torch, dtype) if name.endswith(tuple(large)) else torch.float32
        )
    load_weights(model, state, path, new, copy=False)
    if new:
        print(what_is_new(new, path), file=sys.stderr)
    return model.to(device).eval(), meta


def new_parameters(out_dir, overrides):
    """The names of the parameters that overrides add to a run. Raises ValueError if the run's own
    do not fit. It compares shapes, and does not read the weights."""
    meta, path = read_run(out_dir)
    with torch.device("meta"):
        model = GPT(model_config(meta["knobs"], overrides))
        own = GPT(model_config(meta["knobs"], {}))
    new = model.additions_to(own.config)
    load_weights(model, own.state_dict(), path, new, copy=False)
    return new


def model_config(stored, given):
    """The GPTConfig of a run's stored knobs; the given flags, and the recipe of a given --attn,
    override them."""
    knobs, _ = resolve({"run": stored}, given)
    return GPTConfig(**fields_of(GPTConfig, knobs))


def train_if_missing(folder, flags, quiet=False):
    """The meta.json of a run in this folder with these flags of train.py. It is trained first, in a
    separate process, unless the folder has a finished run with these flags that is newer than the
    run of --init_from. A stopped run continues from its last checkpoint. quiet: the run shows no
    bar and has one thread, because it is one of many."""
    meta = run_with(folder, flags)
    outdated = "report" not in meta  # or an older base than that of today
    for flag in flags:
        name, _, base = flag.partition("=")
        weights = Path(base, "ckpt.pt")
        if not outdated and name == "--init_from" and weights.exists():
            outdated = weights.stat().st_mtime > (folder / "ckpt.pt").stat().st_mtime
    if not outdated:
        return meta
    words = flags_to_finish(folder, flags)
    if quiet:
        output_of("train.py", *words, OMP_NUM_THREADS="1")
        return files.read_json(folder / "meta.json")
    print(f"training {folder}: python train.py {' '.join(words)}", file=sys.stderr, flush=True)
    # its bar and errors go to stderr as they come; its report is in meta.json
    if process_of("train.py", *words, stdout=subprocess.DEVNULL).returncode:
        raise ValueError(
            f"{folder} was not finished: read the error above; --train_args changes its flags"
        )
    return files.read_json(folder / "meta.json")


def each_done(work, jobs, workers=1):
    """Yield (job, work(*job)) for each of a list of tuples, in their order, while `workers` of them
    run at a time. A job that fails prints its error and yields nothing; the others go on."""

    def tried(job):
        try:
            return work(*job)
        except (ValueError, OSError, RuntimeError) as e:
            tqdm.write(f"{' '.join(map(str, job))}: {e}", file=sys.stderr)

    with ThreadPoolExecutor(workers) as pool:
        results = (pool.map if workers > 1 else map)(tried, jobs)
        bar = tqdm(zip(jobs, results, strict=True), total=len(jobs), unit="run", delay=3)
        for job, result in bar:
            if result is not None:
                yield job, result


# ---------------------------------------------------------------------- windows, watching attention


def batches(run, args, length):
    """The windows of `length` tokens that the flags of Windows name, in batches (B, length + 1)."""
    return window_batches(
        run.model, run.split(args.split), run.machine, length, args.windows, args.batch_size, True
    )


def window_batches(
    model,
    split,
    machine,
    length,
    count,
    batch_size,
    bar=False,
    share=False,
    packed=False,
):
    """Yield fixed windows of a split in batches (B, length + 1), on the machine's device; the last
    token is only a target. The windows are spread evenly over the split, and every call yields the
    same ones. count: how many windows, 0 for as many as fit. bar: show the progress. share: the
    ranks share the windows; then a rank may have none. packed: yield such a batch, and the
    `targets` and `starts` of GPT.forward, None if the split was opened without documents."""
    starts = tokens.fixed_windows(split, length, count)
    if share:
        starts = starts[machine.rank :: machine.world]
    for i in progress(range(0, len(starts), batch_size), bar and machine.main):
        batch = starts[i : i + batch_size]
        stored = torch.from_numpy(split.windows(batch, length + 1, model.config.vocab_size))
        rows, targets = tokens.ids_and_targets(stored.to(machine.device))
        if not packed:
            yield rows
            continue
        first = None
        if split.documents is not None:
            first = torch.from_numpy(split.first_keys(batch, length)).to(machine.device)
        yield rows, targets[:, 1:], first


def progress(steps, shown):
    """The same steps, with a progress bar on stderr after three seconds."""
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(steps, disable=not shown, delay=3, leave=False, unit="batch", mininterval=interval)


@torch.no_grad()
def watch(model, see, idx, machine, starts=None):
    """The model reads tokens idx (B, T), and every layer calls see(layer, module, q, k, v, x,
    table) before it attends. `layer` counts the blocks from 0, `module` is the block's attention,
    the rest are the arguments of its attend. starts: see GPT.forward."""
    with instead(model, seeing(see)), machine.autocast():
        model(idx, starts=starts)


def seeing(see):
    """A `replacement` for `instead` that calls see and leaves attention unchanged."""

    def see_and_attend(attend, *inputs):
        see(*inputs)
        return attend(*inputs[2:])

    return see_and_attend


def hook_of(replacement, layer, module):
    """The Layer.hook that calls a `replacement` for `instead`."""
    return lambda attend, *inputs, **cached: replacement(attend, layer, module, *inputs, **cached)


@contextlib.contextmanager
def instead(model, replacement):
    """Inside this context every attention layer of a model calls replacement(attend, layer, module,
    q, k, v, x, table) instead of its own attend(q, k, v, x, table), to change its inputs or its
    output."""
    modules = [module for module in model.modules() if isinstance(module, Layer)]
    for layer, module in enumerate(modules):
        module.hook = hook_of(replacement, layer, module)
    try:
        yield
    finally:
        for module in modules:
            module.hook = None


# --------------------------------------------------------------------------------- lists and tables


def whole_numbers(text, flag="", least=0):
    """The list in "256,1024", the value of this flag. Raises ValueError on anything else and on
    less than `least`."""
    numbers = text.split(",")
    if all(number.isdecimal() and int(number) >= least for number in numbers):
        return [int(number) for number in numbers]
    bound = f" of at least {least}" if least else ""
    given = f"--{flag}={text!r}" if flag else repr(text)
    raise ValueError(f"{given} must be whole numbers{bound} separated by commas")


def recipe_names(text):
    """The list in "softmax,elastic"; for "all", every recipe that can be trained. Raises ValueError
    on unknown ones."""
    names = mixers.trained_recipes() if text == "all" else text.split(",")
    for name in names:
        attention.recipe(name)
    return names


def overrides_of(recipes, given):
    """{recipe: the overrides that it gets of the given ones}. An axis reaches the recipes whose row
    in ATTENTIONS sets it; if none does, those whose mixer accepts it. A constant of --attn_args
    reaches those that have it. What no recipe has, and any other flag, reaches all."""
    sets, accepts, constants_of = {}, {}, {}  # of each recipe
    for attn in recipes:
        config = GPTConfig(attn=attn)
        mixer = mixers.MIXERS[config.mixer]
        sets[attn] = set(config.recipe)
        accepts[attn] = {*mixer.axes, *mixer.numbers}
        constants_of[attn] = set(constants(config, mixer.axes))

    def reached(name, *havings):
        """The recipes that the first of these {recipe: names} gives this name."""
        found = ([attn for attn in recipes if name in having[attn]] for having in havings)
        return next(filter(None, found), recipes)

    given = dict(given)
    pairs = [pair for pair in given.pop("attn_args", "").split(",") if pair]
    found = {}
    for attn in recipes:
        changed = {name: given[name] for name in given if attn in reached(name, sets, accepts)}
        args = [pair for pair in pairs if attn in reached(pair.split("=")[0], constants_of)]
        if args:
            changed["attn_args"] = ",".join(args)
        found[attn] = changed | {"attn": attn}
    return found


def table(rows, header):
    """Right-aligned columns as text. A cell is a string, a number, or None if there is no value."""
    cells = [[number(cell, ".4f") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)


def table_of_lines(lines, first, columns=()):
    """lines {name: {column: value}} as a table. first: the title of the names. columns: those that
    are shown; empty: all of the first line."""
    columns = columns or next(iter(lines.values()))
    rows = [[name, *map(line.get, columns)] for name, line in lines.items()]
    return table(rows, [first, *columns])


def number(value, form=".4g"):
    """A number as text, if it has a fraction in this format; a string as it is, and "-" for
    None."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return f"{value:,}" if isinstance(value, int) else format(value, form)


def markdown(rows, header):
    """A table in markdown whose columns are also aligned in a terminal. Every cell is a string."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells)


def legend(meanings, figures=()):
    """{name: meaning} as lines below a table. figures: {name: value}, which come before the
    meanings; then a name without a figure is left out."""
    names = [name for name in meanings if not figures or name in figures]
    width = max(map(len, names))
    lines = []
    for name in names:
        value = f"{figures[name]:7.4f}  " if figures else ""
        lines.append(f"{name:>{width}}  {value}{meanings[name]}")
    return "\n".join(lines)


def explained(lines, meanings, first):
    """lines {name: {column: value}} as a table, and below it the meanings {column: meaning}.
    Columns without a value are left out. first: the title of the names."""
    used = {}
    for column, meaning in meanings.items():
        if any(line.get(column) is not None for line in lines.values()):
            used[column] = meaning
    return f"{table_of_lines(lines, first, used)}\n\n{legend(used)}"


def side_by_side(found):
    """Yield the numbers of several runs {run: numbers} as a table with a column for each, also
    those of numbers["mean"] and numbers["lab"]; nothing if they have none."""
    lines = {}  # {name of a number: {run: value}}
    for run, numbers in found.items():
        for name, value in (numbers.get("lab", {}) | numbers.get("mean", {}) | numbers).items():
            if isinstance(value, float):
                lines.setdefault(name, {})[run] = value
    if lines:
        yield table_of_lines(lines, "", found)


def mean_and_error(values):
    """The mean, and its standard error: sample deviation / sqrt(n), or None for a single value."""
    values = np.asarray(values, np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error
