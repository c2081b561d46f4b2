"""Looks for the rows of later.toml: does a sink depend on a run's history, and what is a dormant head worth?"""
from functools import partial
from pathlib import Path

import torch

from common.runs import RESUME
from evals.ablate import output_fixed, output_zeroed, unchanged, value_zeroed, window_losses
from evals.instrument import Common, OpenedRun, instead, window_batches
from evals.jobs import Job, do, result_of, val_losses
from evals.lab_figures import true_process
from evals.measures import Probe

# ------------------------------------------------------------------------------------------------------ history or loss


def history(place, excess=0.014, more=1000):
    """The sink of a run of the lab at the first evaluation with this excess loss, or else at the one with the lowest,
    and after `more` further steps at a learning rate of 1e-3. The log tells the step. The run is trained again up to
    there, in a folder of its own: its flags decide its weights."""
    place, run = Path(place), OpenedRun(Common(out_dir=place), {})
    knobs = run.meta["knobs"]
    count = knobs["eval_iters"] * knobs["batch_size"]                   # of the windows of each evaluation
    windows, = window_batches(run.model, run.split("val"), run.machine, knobs["block_size"], count, count)
    found, goal = val_losses(place), true_process(windows, run.data_meta)[0].mean().item() + excess
    step = next((step for step, loss in found.items() if loss <= goal), min(found, key=found.get))
    flags = [flag for flag in run.meta["flags"] if flag != RESUME and not flag.startswith("--out_dir=")]
    decay = knobs["lr_decay_iters"] or knobs["max_iters"]
    equal = trained(place / "equal", *flags, f"--lr_decay_iters={decay}", f"--max_iters={step}")
    after = trained(place / "after", *flags, f"--init_from={place / 'equal'}", "--learning_rate=1e-3", "--decay_lr=0",
                    "--warmup_iters=0", f"--max_iters={more}")
    return {"step": step, "equal": equal["sink_idle"], "after": after["sink_idle"], "excess": equal["excess_loss"],
            "excess after": after["excess_loss"]}


def trained(folder, *flags):
    """Train a run in this folder. Returns its report."""
    job = Job(("train.py", *flags, f"--out_dir={folder}"), folder)
    do(job)
    return result_of(job)


# -------------------------------------------------------------------------------------------------------- dormant heads

DORMANT = {"above 0.75": (0.75, 2), "0.65 to 0.75": (0.65, 0.75), "0.5 to 0.65": (0.5, 0.65)}   # weight on the sink


def dormant(place, books):
    """What the heads of a run are worth on three texts, by their weight on the first token: {text: `worth_of_heads`}.
    books: a data set that holds out Moby-Dick."""
    texts = {"python": ("stdlib", "val"), "moby-dick": (books, "val"), "other books": (books, "train")}
    return {text: worth_of_heads(OpenedRun(Common(out_dir=place, dataset=dataset), {}), split)
            for text, (dataset, split) in texts.items()}


@torch.no_grad()
def worth_of_heads(run, split, count=128, length=256, draws=20):
    """The increase of the loss on `count` windows if the first value is zero for all later rows, if the output is zero,
    or if it is always its mean, in each group of heads: {group: {"heads": their number, intervention: {"cost", "less
    random"}}}. "less random" is the cost minus that of as many random heads of the same layers. Both are lists over the
    draws of random heads, and each draw has its own windows."""
    rows, = window_batches(run.model, run.split(split), run.machine, length, 2 * count, 2 * count)
    alpha, means = alpha_and_means(run, rows[1::2])                     # heads are chosen on other windows
    ways = {"value": partial(value_zeroed, to_itself=False), "zero": output_zeroed,
            "mean": partial(output_fixed, fixed=means)}
    losses, found = partial(window_losses, model=run.model, machine=run.machine, batch_size=8), {}
    before = losses(unchanged, rows=rows[0::2])
    for group, (low, high) in DORMANT.items():
        chosen = (alpha > low) & (alpha <= high)
        found[group] = {"heads": chosen.sum().item()} | {
            name: worth(way, chosen, losses, rows[0::2], before, draws) for name, way in ways.items()}
    return found


def alpha_and_means(run, rows):
    """The weight of each head on the sink, (layers, heads), and its mean output, (layers, heads, E)."""
    probes, outputs = [Probe(local=8) for _ in run.model.transformer.h], [[] for _ in run.model.transformer.h]

    def look(attend, layer, module, *inputs):
        probes[layer].see(module, *inputs)
        o = attend(*inputs)                     # (B, heads, T, E)
        outputs[layer].append(o.float().mean((0, 2)))
        return o

    for some in rows.split(8):
        with instead(run.model, look), run.machine.autocast():
            run.model(some[:, :-1])
    return (torch.stack([probe.result()["alpha_sink"] for probe in probes]),
            torch.stack([torch.stack(several).mean(0) for several in outputs]))


def worth(way, chosen, losses, rows, before, draws):
    """The numbers of one intervention in the chosen heads (layers, heads), on rows (N, T + 1)."""
    dice = torch.Generator().manual_seed(0)     # the same random heads for each intervention
    cost, other = losses(way(chosen), rows=rows) - before, []
    for some in rows.tensor_split(draws):
        order = torch.rand(chosen.shape, generator=dice).argsort(1).argsort(1)
        other.append(losses(way(order < chosen.sum(1, keepdim=True)), rows=some))
    less = cost - (torch.cat(other) - before)
    return {name: [part.mean().item() for part in values.tensor_split(draws)]
            for name, values in (("cost", cost), ("less random", less))}


LOOKS = {look.__name__: look for look in (history, dormant)}
