"""Focus compared with full attention, and Focus with other settings of its routers (arXiv
2604.03260).

    python eval.py routers --out_dir=A_FOCUS_RUN [--k=1,2,3,4] [--lengths=512,1024,2048]
    [--rivals=window,performer,routing]
        The forms of a Focus run, all with the same weights: full attention; other recipes, such as
        near pairs alone; soft gates, as in training; and hard groups, where distant tokens must
        share one of their k largest groups (tables 1 and 7, section 3.5, figure 1)
    python eval.py routers --out_dir=A_BASE --sweep=groups (or window, temperature, iterations,
    route_dim, all) [--finetune=200]
        Routers trained on a run of plain attention, one knob at a time (table 9, and section 2's
        table of d_g). Each is a run in the folder OUT_DIR-focus-KNOB-VALUE, which is trained once.
        With --finetune, all weights are trained after that, in the folder ...-all.

With --balance=sinkhorn, as in the paper, the groups depend on later tokens: perplexities are not of
a causal model.
"""

import dataclasses
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch

import attention
import mixers
from common.flags import Knobs, knob
from common.runs import load_weights, what_is_new
from evals import groups
from evals.instrument import (
    batches,
    legend,
    recipe_names,
    table,
    train_if_missing,
    whole_numbers,
    window_batches,
)
from evals.loss import figures_of, token_losses
from evals.pictures import figure_of, frame, line_panel
from model import GPT

SWEEPS = {  # {knob: the paper's values}; sizes are shares of ours
    "groups": ("4", "8", "16", "32"),
    "window": ("1/16", "1/8", "1/4", "1/2"),  # of block_size; the paper: 64 to 512 of 1024
    "temperature": ("0.05", "0.1", "0.2", "0.5"),
    "iterations": ("3", "5", "10", "20"),
    "route_dim": ("16", "32", "128", "1/1"),  # d_g; the last is n_embd
}
DEFAULTS = {
    "groups": "8",
    "window": "1/8",
    "temperature": "0.1",
    "iterations": "10",
    "route_dim": "16",
}


@dataclass
class Routers(Knobs):
    """Flags of routers"""

    k: str = knob(
        "",
        "numbers of groups that a token belongs to, separated by commas; empty: 1,2,3,4 or fewer",
    )
    lengths: str = knob("", "tokens of a window, separated by commas; empty: block_size")
    rivals: str = knob(
        "window",
        "recipes to compare with, under the run's weights and, where they have one, with its "
        "window: window,performer,routing",
    )
    split: str = knob("val", "split of the data set", ("train", "val"))
    windows: int = knob(16, "fixed windows, spread evenly; 0: as many as fit")
    batch_size: int = knob(4, "windows per forward pass", least=1)
    repeats: int = knob(5, "timed rounds over all forms; the result is the median", least=1)
    sweep: str = knob(
        "",
        "on a run of plain attention, train routers with several values of this knob, or of all",
        ("", *SWEEPS, "all"),
    )
    steps: int = knob(200, "with --sweep: training steps of each router (the paper: 4000)", least=1)
    finetune: int = knob(
        0, "with --sweep: steps that train all weights from each trained router on", least=0
    )
    train_args: str = knob("", "with --sweep: further flags of train.py, separated by spaces")

    def __post_init__(self):
        super().__post_init__()
        whole_numbers(self.k or "0", "k")  # raises ValueError, as the next lines do
        whole_numbers(self.lengths or "0", "lengths")
        recipe_names(self.rivals)


def command(args, run):
    """Compare Focus with full attention, for several numbers k of groups per token: loss,
    perplexity, share of distant pairs kept, speed. With --sweep, train and compare routers with
    other settings."""
    if not args.sweep:
        numbers = compared(args, run)
        return numbers, in_words(numbers)
    if any(kind.mixer != "attention" for kind in run.model.config.layer_configs):
        raise ValueError(
            f"--sweep trains routers on a run of plain attention, but {run.out_dir} has --attn="
            f"{run.model.config.attn}: name its base"
        )
    names = SWEEPS if args.sweep == "all" else [args.sweep]
    rows = {name: [router(args, run, name, value) for value in SWEEPS[name]] for name in names}
    numbers = {"dataset": run.dataset, "split": args.split, "steps": args.steps, "sweep": rows}
    header = "knob value parameters full soft k=2 kept dominance evenness confidence".split()
    header += ["all: soft", "all: dominance"] if args.finetune else []
    cells = []
    for name in names:
        for row in rows[name]:
            cells.append([name, *row.values()])
    more = f"; all: after {args.finetune} more steps of all weights" if args.finetune else ""
    return numbers, (
        f"routers after {args.steps} steps on {run.dataset}, --balance=sinkhorn; "
        f"perplexity on {args.split}{more}\n\n{table(cells, header)}"
    )


def compared(args, run):
    """The figures of each form at each length: {"lengths": [{"length", "forms": {form: its
    figures}}]}."""
    groups.focus_of(run)  # raises ValueError
    K, window = run.model.transformer.h[0].attn.groups, run.model.config.window
    ks = whole_numbers(args.k, "k") if args.k else range(1, min(groups.MOST, K) + 1)
    if min(ks) < 1 or max(ks) > K:
        raise ValueError(f"--k={args.k}, but a token can have 1 to {K} groups: change --k")
    lengths = whole_numbers(args.lengths or "0", "lengths")
    lengths = sorted({run.window(T, "lengths") for T in lengths})
    run.model = in_form(run.model, topk=0)  # of which groups.look reads the groups
    plain = {axis: mixers.DEFAULTS[axis] for axis in ("mixer", "balance", "affinity", "topk")}
    full = in_form(run.model, window=0, attn="softmax", attn_args="", **plain)  # over all pairs
    forms = {"full": full}
    for name in recipe_names(args.rivals):
        axes = {axis: value for axis, value in attention.recipe(name).items() if axis != "args"}
        axes |= {"window": window} if "window" in axes else {}
        forms[name] = in_form(full, attn=name, **axes)
    forms["soft"] = run.model
    for k in ks:
        forms[f"k={k}"] = in_form(run.model, topk=k)
    return {
        "dataset": run.dataset,
        "split": args.split,
        "groups": K,
        "window": window,
        "rivals": args.rivals,
        "training_length": run.meta["knobs"]["block_size"],
        "lengths": [at_length(args, run, forms, T) for T in lengths],
    }


def in_form(model, **changes):
    """A model with the same weights, in which these fields of the config are changed. What they add
    to attention has its initial values, and is printed."""
    config = dataclasses.replace(model.config, **changes)
    with torch.device("meta"):  # shapes are enough if nothing is added
        other = GPT(config)
    if new := other.additions_to(model.config):
        other = GPT(config).to(model.lm_head.weight.device)
        print(f"--attn={config.attn}: {what_is_new(new, 'the run')}", file=sys.stderr)
    load_weights(other, model.state_dict(), "the run", new, copy=False)
    return other.eval()


@torch.no_grad()
def at_length(args, run, forms, T):
    """The figures of every form, {name: model}, in windows of T tokens."""
    machine = run.machine
    losses = {form: [] for form in forms}
    found = {}
    mean = groups.mean_of(groups.look(args, run, T)[2])
    (one,) = window_batches(run.model, run.split(args.split), machine, T, 1, 1)

    calls = {form: partial(token_losses, model, one, machine) for form, model in forms.items()}
    seconds = machine.race(calls, args.repeats)
    for rows in batches(run, args, T):
        for form, model in forms.items():  # the loss of each window
            losses[form] += token_losses(model, rows, machine).double().mean(1).tolist()
    for form in forms:
        found[form] = figures_of(losses[form], np.subtract(losses[form], losses["full"]))
        found[form] |= {
            "kept": mean["kept"].get(form.removeprefix("k=")),
            "speed": seconds["full"] / seconds[form],
            "losses": losses[form],
        }
    return {"length": T, "windows": len(losses["full"]), "mean": mean, "forms": found}


def router(args, run, name, value):
    """Train one router on the run if it is missing: the run's own weights stay frozen. With
    --finetune, then train all weights. Returns the router's size, its perplexities in the soft form
    and with two groups a token, and how even its groups are."""
    constants = DEFAULTS | {name: value}
    config = run.model.config
    # all sweeps share the run with the default values
    ending = "default" if constants == DEFAULTS else f"{name}-{value.replace('/', '-')}"
    folder = Path(f"{Path(run.out_dir).resolve()}-focus-{ending}")
    for size, whole in (("window", config.block_size), ("route_dim", config.n_embd)):
        if "/" in constants[size]:  # "1/8" is a share, "8" the number itself
            constants[size] = max(1, int(whole * Fraction(constants[size])))
    window = constants.pop("window")
    flags = f"--attn=focus --train_only=focus --balance=sinkhorn --window={window}".split()
    flags += [
        f"--attn_args={','.join(f'{name}={value}' for name, value in constants.items())}",
        f"--init_from={run.out_dir}",
    ]
    row = {"value": value} | trained(args, run, folder, args.steps, flags)
    if args.finetune:
        whole = folder.with_name(f"{folder.name}-all")
        tuned = trained(args, run, whole, args.finetune, [f"--init_from={folder}"])
        row |= {f"tuned_{name}": tuned[name] for name in ("soft", "dominance")}
    return row


def trained(args, run, folder, steps, flags):
    """The figures of a Focus run in this folder, which is trained first if it is missing. run: the
    base of the sweep."""
    flags = [
        *flags,
        f"--dataset={run.dataset}",
        f"--max_iters={steps}",
        f"--eval_interval={steps}",
        f"--device={run.machine.device}",
        f"--out_dir={folder}",
        *args.train_args.split(),
    ]
    train_if_missing(folder, flags)
    focus = run.beside(folder)
    layer = focus.model.transformer.h[0].attn
    k = min(2, layer.groups)
    args = dataclasses.replace(args, k=str(k), lengths="", repeats=1)
    (found,) = compared(args, focus)["lengths"]
    forms, mean = found["forms"], found["mean"]
    size = len(focus.model.transformer.h) * (layer.router.weight.numel() + layer.centroids.numel())
    return {
        "parameters": size,
        "full": forms["full"]["perplexity"],
        "soft": forms["soft"]["perplexity"],
        "hard": forms[f"k={k}"]["perplexity"],
        "kept": forms[f"k={k}"]["kept"],
        **{name: mean[name] for name in ("dominance", "evenness", "confidence")},
    }


def in_words(numbers):
    """A row for each length and form, and the meanings of forms and columns."""
    rows = []
    keys = ("loss", "loss_error", "more", "more_error", "perplexity", "kept")
    for part in numbers["lengths"]:
        for form, figures in part["forms"].items():
            speed = f"{figures['speed']:.2f}x"
            rows.append([part["length"], form, *map(figures.get, keys), speed])
    windows = " or ".join(sorted({str(part["windows"]) for part in numbers["lengths"]}))
    near, K = numbers["window"], numbers["groups"]
    meanings = {
        "full": "softmax attention of the same weights, all pairs",
        numbers["rivals"]: f"the same weights under these recipes; a window has {near} keys",
        "soft": "gates from 0 to 1, as in training",
        "k=k": f"a distant pair is open if it shares one of the k largest of {K} groups",
        "more": "loss over full attention's, on the same windows; +-: standard error over windows",
        "kept": f"share of open pairs among those {near} apart or more, by the soft form's groups",
        "speed": "of the whole model on one window, relative to full",
    }
    text = table(rows, "length form loss +- more +- perplexity kept speed".split())
    return (
        f"{windows} windows of {numbers['dataset']} ({numbers['split']}); trained at "
        f"{numbers['training_length']} tokens\n\n{text}\n\n{legend(meanings)}"
    )


def draw(path, found):
    """Draw perplexity against speed, a dot for each form, a colour for each run and length; or
    against swept knobs."""
    sweeps = [numbers["sweep"] for numbers in found.values() if "sweep" in numbers]
    if sweeps:
        return draw_sweep(path, sweeps)
    with figure_of(path, [5], [8]) as ((ax,),):
        for place, numbers in found.items():
            for part in numbers["lengths"]:
                points = sorted(
                    (figures["speed"], figures["perplexity"], form)
                    for form, figures in part["forms"].items()
                    if form != "soft"
                )
                speeds, perplexities, _ = zip(*points, strict=True)
                label = f"{Path(place).name}, T={part['length']}"
                ax.plot(speeds, perplexities, "o", label=label)
                for i, (*point, form) in enumerate(points):
                    offset = (4, -11) if i % 2 else (4, 4)  # by speed, above and below the dots
                    ax.annotate(form, point, offset, textcoords="offset points", fontsize=8)
        ax.margins(x=0.15)
        title = "the upper right corner is best"
        frame(ax, title, "speed relative to full attention", "perplexity")
        ax.set_yscale("log")
        ax.invert_yaxis()  # as in figure 1 of the paper, the best corner is at the upper right
        ax.legend(fontsize=8)


def draw_sweep(path, sweeps):
    """Draw the perplexity of each form against the values of a knob, a panel for each knob."""
    widths = [max(3.4, 5.5 / len(sweeps[0]))] * len(sweeps[0])
    with figure_of(path, [3.8], widths) as axes:
        for sweep in sweeps:
            for ax, (name, rows) in zip(axes[0], sweep.items(), strict=True):
                places = range(len(rows))
                curves = {}
                for label, key in (
                    ("full attention", "full"),
                    ("soft gates", "soft"),
                    ("k=2", "hard"),
                ):
                    curves[label] = places, [row[key] for row in rows]
                xlabel = f"{name} (below: share of the largest group)"
                line_panel(ax, curves, "perplexity", xlabel, legend=False)
                labels = [f"{row['value']}\n{row['dominance']:.0%}" for row in rows]
                ax.set_xticks(places, labels)
        axes[0, 0].legend(frameon=False, fontsize=8)
