"""lab"""
import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import attention
from common.flags import knob
from data import files, tokens
from evals.instrument import instead, numbers, recipe_names, table
from evals.probe import Probe, mean_of

HERE = Path(__file__).parents[1]


@dataclass
class Lab:
    """Flags of lab"""
    attn: str = knob("all", "recipes, separated by commas")
    seeds: str = knob("0,1,2", "seeds, separated by commas")
    out_dir: str = knob("out/lab", "where the runs go, a folder each; those that are there are not trained again")
    results: str = knob("", "where the table and the picture go: this name with .json and .png; empty: results/lab, or out_dir/lab of a part")
    train_args: str = knob("", "more flags for train.py, separated by spaces")
    json: bool = knob(False, "print JSON instead of a table")


def lab_command(args):
    """Train every recipe in the sink lab, on the same data with the same seeds, and put what became of each side by side."""
    recipes = recipe_names(args.attn)
    whole = set(recipes) == set(attention.ATTENTIONS) and not args.train_args and len(numbers(args.seeds)) >= 3
    place = args.results or (HERE / "results" / "lab" if whole else f"{args.out_dir}/lab")
    runs = {name: [] for name in [*recipes, BLIND]}
    for seed in numbers(args.seeds):
        for name in runs:
            attn, more = (name, lab_flags(name)) if name != BLIND else ("window", ["--window=1"])
            runs[name].append(train_in_lab(attn, seed, Path(args.out_dir) / f"{name}-{seed}", [*more, *args.train_args.split()]))
    figures = {name: [{key: run[key] for key in ("parameters", "seconds")} | run["report"] for run in group] for name, group in runs.items()}
    first = runs[recipes[0]][0]
    result = {"flags": dataclasses.asdict(args), "machine": first["machine"], "versions": first["versions"], "runs": figures}
    files.write_json(f"{place}.json", result)
    lab_picture(f"{place}.png", figures)
    rows = []
    for name, group in figures.items():
        mean = {key: np.mean([run[key] for run in group]) for key in group[0]}
        rows.append([name, *(f"{mean[key]:.3f}" for key in LAB_TABLE.values()), f"{mean['parameters']:.0f}", f"{mean['seconds']:.0f}"])
    return result, table(rows, ["recipe", *LAB_TABLE, "parameters", "s"]) + f"\n\nmeans over seeds {args.seeds}; all figures in {place}.json"


FIRST_ROW = 8                                   # rows before it do not count as idle or copy rows


def true_process(rows, meta):
    """Of sequences (N, T+1) of data/backcopy.py: each target's loss under the process that made it, and which queries are triggers, (N, T)."""
    x, y = rows[:, :-1], rows[:, 1:]
    before = F.pad(x[:, :-1], (1, 0), value=meta["symbols"])            # of the first query: no symbol
    trigger = torch.isin(x, torch.tensor(meta["triggers"], device=x.device))
    bigrams = torch.tensor(meta["bigrams"], dtype=torch.float64).to(x.device, torch.float32)
    p = torch.where(trigger & (before < meta["symbols"]), (y == before).float(), bigrams[x, y.clamp(max=meta["symbols"] - 1)])
    p[:, torch.arange(1, y.shape[1] + 1) == meta["fixed_at"]] = 1.0     # the fixed token's place is known
    return -p.log(), trigger


@torch.no_grad()
def lab(model, split, meta, machine, count=256):
    """Every figure of the sink lab on `count` fixed sequences, as {name: value}.

    Losses are in excess of the true process's, so 0 is perfect. *Copy* rows are queries at triggers, *idle* rows all others, both from
    position 8. zero_cost and hide_cost are what the loss gains when the first token's value is set to zero, and when no later row may
    see its key (with row counts n as they were).
    """
    rows = split.windows(tokens.fixed_windows(split, model.config.block_size, count, meta["stride"]), model.config.block_size + 1, model.config.vocab_size)
    rows = torch.from_numpy(rows).to(machine.device)
    bayes, trigger = true_process(rows, meta)
    late = torch.arange(trigger.shape[1], device=rows.device) >= FIRST_ROW
    counted = {"idle": ~trigger & late, "copy": trigger & late, "all": torch.ones_like(trigger)}
    probes = {name: [Probe() for _ in model.transformer.h] for name in counted}

    def look(attend, layer, module, *inputs):
        for name, mask in counted.items():
            probes[name][layer].see(module, *inputs, counted=mask)
        return attend(*inputs)

    def zeroed(attend, layer, module, q, k, v, *more):
        first = torch.arange(v.shape[2], device=v.device)[:, None] == module.ahead
        return attend(q, k, v.masked_fill(first, 0.0), *more)

    def hidden(attend, layer, module, *inputs):
        module.hide = module.ahead
        output = attend(*inputs)
        module.hide = -1
        return output

    loss = {}
    for name, change in (("as_is", look), ("zero", zeroed), ("hide", hidden)):
        with instead(model, change), machine.autocast():
            logits = model(rows[:, :-1])[0]
        loss[name] = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
    excess = loss["as_is"] - bayes
    idle, copy, everything = (mean_of(probes[name]) for name in ("idle", "copy", "all"))
    return {
        **{f"excess_{of}": excess[counted[rows]].mean().item() for of, rows in (("loss", "all"), ("copy", "copy"), ("idle", "idle"))},
        "sink_idle": idle["sink"], "sink_copy": copy["sink"], "row_mass_idle": idle["row_mass"], "share_idle": idle["share"],
        "value_norm_ratio": idle["value_norm_ratio"],
        "zero_cost": (loss["zero"] - loss["as_is"]).mean().item(), "hide_cost": (loss["hide"] - loss["as_is"]).mean().item(),
        "share_copy": copy["share"], "times_uniform_idle": idle["times_uniform"], "times_uniform_copy": copy["times_uniform"],
        "row_mass_copy": copy["row_mass"], "extra_idle": idle["extra"], "extra_copy": copy["extra"],
        "sparsity": everything["sparsity"], "empty_rows": everything["empty_rows"],
    }


BLIND = "blind"                                 # the same model whose rows see themselves alone: what can be had without attention


def lab_flags(attn):
    """What a recipe needs to mean anything in the lab: a window shorter than its 64 tokens, a second head where heads are paired, and a
    threshold that some keys pass at first, for with tra's beta of 1 hardly any does, and what gets no gradient learns nothing."""
    axes = attention.recipe(attn)
    return (["--window=16"] * ("window" in axes) + ["--n_head=2"] * (axes.get("diff") == "v1")
            + ["--attn_args=beta_init=0.1"] * (axes["rule"] == "tra"))


def train_in_lab(attn, seed, folder, more):
    """Train one recipe in the lab, in a process of its own, unless its folder holds the result already. Returns its meta.json."""
    flags = ["--preset=lab", f"--attn={attn}", f"--seed={seed}", f"--out_dir={folder}", *more]
    done = files.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    if "report" not in done or done["flags"] != flags:
        print(f"training {folder.name}", file=sys.stderr, flush=True)
        process = subprocess.run([sys.executable, HERE / "train.py", *flags], capture_output=True, text=True)
        if process.returncode:
            raise ValueError(f"train.py {' '.join(flags)} failed: {process.stderr.strip().splitlines()[-1]}")
        done = files.read_json(folder / "meta.json")
    return done


LAB_TABLE = {                                   # column: the figure behind it
    "excess": "excess_loss", "on copy": "excess_copy", "on idle": "excess_idle", "sink idle": "sink_idle", "sink copy": "sink_copy",
    "share": "share_idle", "x uniform": "times_uniform_idle", "mass": "row_mass_idle", "extra": "extra_idle", "zeros": "sparsity",
    "empty": "empty_rows", "|v0|/|v|": "value_norm_ratio", "zero": "zero_cost", "hide": "hide_cost",
}


def lab_picture(path, runs):
    """Four figures of every recipe side by side: a bar for the mean over seeds, a dot for each seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    panels = {"sink_idle": ("weight on the first token, idle rows", 0, 1.05), "value_norm_ratio": ("norm of the first value over the others", 0, 2.5),
              "row_mass_idle": ("sum of the weights of an idle row", -0.5, 1.5), "excess_copy": ("excess loss on copy rows (nats)", 0, None)}
    names = list(runs)[::-1]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 1.2 + 0.26 * len(names)), sharey=True)
    for ax, (key, (title, low, high)) in zip(axes, panels.items(), strict=True):
        values = [[run[key] for run in runs[name]] for name in names]
        ax.barh(range(len(names)), [np.mean(v) for v in values], color="#9ecae1")
        ax.set_xlim(low, high)
        for y, v in enumerate(values):
            ax.plot(v, [y] * len(v), "o", color="#08519c", markersize=3.5)
            if high and np.mean(v) > high:      # rules without a normaliser may spend anything
                ax.text(high, y, f"{np.mean(v):.3g} ", ha="right", va="center", fontsize=8)
        ax.set_title(title, fontsize=9)
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    figure.supxlabel("a bar is the mean over seeds, a dot one seed; a bar that is cut off has its value beside it", fontsize=9)
    figure.tight_layout(w_pad=2)
    with files.replacing(path) as f:
        figure.savefig(f, format="png", dpi=110)
    plt.close(figure)
