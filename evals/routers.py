"""Focus compared with full attention, and Focus with other settings of its routers (arXiv
2604.03260).

    python eval.py routers --out_dir=A_FOCUS_RUN [--k=1,2,3,4] [--lengths=512,1024,2048]
        The forms of a Focus run, all with the same weights: full attention; near pairs alone; soft
        gates, as in training; and hard groups, where distant tokens must share one of their k
        largest groups (table 7, section 3.5)
    python eval.py routers --out_dir=A_BASE --sweep=groups (or window, temperature, iterations,
    route_dim, all)
        Routers trained on a run of plain attention, one knob at a time (table 9, and section 2's
        table of d_g). Each is a run in the folder OUT_DIR-focus-KNOB-VALUE, which is trained once.

With --balance=sinkhorn, as in the paper, the groups depend on later tokens: perplexities are not of
a causal model.
"""

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch

import mixers
from common.flags import Knobs, knob
from common.runs import load_weights
from evals import groups
from evals.instrument import batches, legend, table, train_if_missing, whole_numbers, window_batches
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
    train_args: str = knob("", "with --sweep: further flags of train.py, separated by spaces")

    def __post_init__(self):
        super().__post_init__()
        whole_numbers(self.k or "0", "k")  # raises ValueError, as the next line does
        whole_numbers(self.lengths or "0", "lengths")


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
    cells = [
        [name, row["value"], f"{row['parameters']:,}", *list(row.values())[2:]]
        for name in names
        for row in rows[name]
    ]
    return numbers, (
        f"routers after {args.steps} steps on {run.dataset}, --balance=sinkhorn; "
        f"perplexity on {args.split}\n\n{table(cells, header)}"
    )


def compared(args, run):
    """The figures of each form at each length: {"lengths": [{"length", "forms": {form: its
    figures}}]}."""
    groups.check(run)
    K, window, before = (
        run.model.transformer.h[0].attn.groups,
        run.model.config.window,
        run.model.config.topk,
    )
    ks = whole_numbers(args.k, "k") if args.k else range(1, min(groups.MOST, K) + 1)
    if min(ks) < 1 or max(ks) > K:
        raise ValueError(
            f"--k={args.k}, but a token of {run.out_dir} can have 1 to {K} groups: change --k"
        )
    lengths = sorted(
        {run.window(T, "lengths") for T in whole_numbers(args.lengths or "0", "lengths")}
    )
    forms = {
        "full": (plain_attention(run.model, 0), 0),
        "window": (plain_attention(run.model, window), 0),
        # {name: (model, --topk)}
        "soft": (run.model, 0),
        **{f"k={k}": (run.model, k) for k in ks},
    }
    found = [at_length(args, run, forms, T) for T in lengths]
    run.model.config.topk = before
    return {
        "dataset": run.dataset,
        "split": args.split,
        "groups": K,
        "window": window,
        "training_length": run.meta["knobs"]["block_size"],
        "lengths": found,
    }


def plain_attention(model, window):
    """A model with the same weights and softmax attention, over all pairs (window 0) or over near
    ones."""
    plain = {axis: mixers.DEFAULTS[axis] for axis in ("mixer", "balance", "affinity", "topk")}
    config = dataclasses.replace(model.config, attn="softmax", attn_args="", window=window, **plain)
    with torch.device("meta"):
        other = GPT(config)
    load_weights(other, model.state_dict(), "the run", copy=False)
    return other.eval()


def at_length(args, run, forms, T):
    """The figures of every form, {name: (model, k)}, in windows of T tokens."""
    machine, losses, found = run.machine, {form: [] for form in forms}, {}

    def in_form(form):
        # its layers read --topk at every call; 0 is the soft form
        model, model.config.topk = forms[form]
        return model

    @torch.no_grad()
    def read(form):
        with machine.autocast():
            in_form(form)(one[:, :-1])

    in_form("soft")
    mean = groups.mean_of([layer.numbers for layer in groups.look(args, run, T)])
    (one,) = window_batches(run.model, run.split(args.split), machine, T, 1, 1)
    seconds = machine.race({form: partial(read, form) for form in forms}, args.repeats)
    for rows in batches(run, args, T):
        for form in forms:  # the loss of each window
            losses[form] += token_losses(in_form(form), rows, machine).double().mean(1).tolist()
    for form, (_, k) in forms.items():
        found[form] = figures_of(losses[form], np.subtract(losses[form], losses["full"])) | {
            "kept": mean["kept"].get(str(k)),
            "speed": seconds["full"] / seconds[form],
            "losses": losses[form],
        }
    return {"length": T, "windows": len(losses["full"]), "mean": mean, "forms": found}


def router(args, run, name, value):
    """Train one router on the run if it is missing: the run's own weights stay frozen. Returns its
    size, its perplexities in the soft form and with two groups a token, and how even its groups
    are."""
    constants, config = DEFAULTS | {name: value}, run.model.config
    # all sweeps share the run with the default values
    ending = "default" if constants == DEFAULTS else f"{name}-{value.replace('/', '-')}"
    folder = Path(f"{Path(run.out_dir).resolve()}-focus-{ending}")
    for size, whole in (("window", config.block_size), ("route_dim", config.n_embd)):
        share = Fraction(constants[size])  # "1/8" is a share, "8" the number itself
        constants[size] = max(1, int(whole * share)) if "/" in constants[size] else int(share)
    window = constants.pop("window")
    train_if_missing(
        folder,
        [
            f"--init_from={run.out_dir}",
            "--attn=focus",
            "--train_only=focus",
            "--balance=sinkhorn",
            f"--window={window}",
            f"--attn_args={','.join(f'{name}={value}' for name, value in constants.items())}",
            f"--dataset={run.dataset}",
            f"--max_iters={args.steps}",
            f"--eval_interval={args.steps}",
            f"--device={run.machine.device}",
            f"--out_dir={folder}",
            *args.train_args.split(),
        ],
    )
    trained = run.beside(folder)
    k = min(2, trained.model.transformer.h[0].attn.groups)
    (found,) = compared(dataclasses.replace(args, k=str(k), lengths="", repeats=1), trained)[
        "lengths"
    ]
    forms, mean = found["forms"], found["mean"]
    size = sum(
        p.numel()
        for name, p in trained.model.named_parameters()
        if name.endswith(("attn.router.weight", "attn.centroids"))
    )
    return {
        "value": value,
        "parameters": size,
        "full": forms["full"]["perplexity"],
        "soft": forms["soft"]["perplexity"],
        "hard": forms[f"k={k}"]["perplexity"],
        "kept": forms[f"k={k}"]["kept"],
        **{name: mean[name] for name in ("dominance", "evenness", "confidence")},
    }


def in_words(numbers):
    """A table with a row for each length and form."""
    rows = [
        [
            str(part["length"]),
            form,
            *(
                figures[key]
                for key in ("loss", "loss_error", "more", "more_error", "perplexity", "kept")
            ),
            f"{figures['speed']:.2f}x",
        ]
        for part in numbers["lengths"]
        for form, figures in part["forms"].items()
    ]
    windows = " or ".join(map(str, sorted({part["windows"] for part in numbers["lengths"]})))
    meanings = {
        "full": "softmax attention of the same weights, all pairs",
        "window": f"the same, only pairs less than {numbers['window']} apart",
        "soft": "gates from 0 to 1, as in training",
        "k=k": f"a distant pair is open if one of {numbers['groups']} groups is in the k largest of both tokens",
        "more": "loss than full attention, on the same windows; +- is a standard error over the windows",
        "kept": f"share of pairs {numbers['window']} apart or more that are open, by the groups of the soft form",
        "speed": "of the whole model on one window, relative to full",
    }
    text = table(rows, "length form loss +- more +- perplexity kept speed".split())
    return (
        f"{windows} windows of {numbers['dataset']} ({numbers['split']}); trained at {numbers['training_length']} "
        f"tokens\n\n{text}\n\n{legend(meanings)}"
    )


def draw(path, found):
    """Draw perplexity against speed, a dot for each form, a colour for each run and length; or
    against swept knobs."""
    knobs = next((list(numbers["sweep"]) for numbers in found.values() if "sweep" in numbers), [])
    with figure_of(path, [3.8], [max(3.4, 5.5 / len(knobs)) for _ in knobs] or [5.5]) as axes:
        for place, numbers in found.items():
            for ax, name in zip(axes[0], knobs, strict=False):
                rows = numbers["sweep"][name]
                forms = {"full attention": "full", "soft gates": "soft", "k=2": "hard"}
                line_panel(
                    ax,
                    {
                        label: (range(len(rows)), [row[key] for row in rows])
                        for label, key in forms.items()
                    },
                    "perplexity",
                    f"{name} (below: share of the largest group)",
                    legend=False,
                )
                ax.set_xticks(
                    range(len(rows)), [f"{row['value']}\n{row['dominance']:.0%}" for row in rows]
                )
            for part in numbers.get("lengths", ()):
                hard = {
                    form: (f["speed"], f["perplexity"])
                    for form, f in part["forms"].items()
                    if form != "soft"
                }
                axes[0, 0].plot(
                    *zip(*hard.values(), strict=True),
                    "o",
                    label=f"{Path(place).name}, T={part['length']}",
                )
                for form, point in hard.items():
                    axes[0, 0].annotate(form, point, (4, 4), textcoords="offset points", fontsize=8)
                frame(axes[0, 0], xlabel="speed relative to full attention", ylabel="perplexity")
        axes[0, 0].legend(frameon=False, fontsize=8)
