"""speed --everything: the measurements that need a GPU, in a few minutes.

PARTS lists the parts, the most useful first. Each has a share of the minutes, and gets what earlier parts have left
over. A part is a list of steps, also the most useful first. Its file results/gpu-<part>-<gpu>.json is written anew
after every step, and then the page docs/gpu.md from all of them. If the command is cut off, all finished steps are on
the disk. A step that fails is noted with its error, and the next one follows. At the end the command names the steps
for which no time was left.
"""
import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

import kernels
import mixers
from common import files
from common.machine import Machine, gpu_name
from common.runs import ROOT
from common.tiles import TRITON, keep_tiles
from evals import live, sparse
from evals.decode import HARD
from evals.instrument import Common, OpenedRun, markdown, model_config, progress, save_numbers, train_if_missing
from evals.kernels import time_kernels
from evals.steps import compare, training_step
from evals.tune import largest_error, rounding
from model import GPT, GPTConfig
from training.presets import PRESETS

MINUTES = 8                                     # the default budget
clock = time.monotonic                          # tests replace it

# recipes that together use every kernel, those of most users first; HARD is the Focus that the kernels compute
CHECKED = ("softmax", "elastic", "tda", "gated_deltanet", "entmax", "softpick", "sigmoid", "relu", "lazy", "window",
           "gla", "sparsemax", "lssar", "tra", "elu", "linear", "asentmax", "retnet", "deltanet", "linear_state")
FIRST = ("softmax", "elastic", "lazy", "tda", "gated_deltanet", "softpick", "entmax", "sigmoid", "gated", "window")
STATES = ("linear_state", "retnet", "gla", "mamba2", "deltanet", "gated_deltanet")


@dataclasses.dataclass
class Sizes:
    """How large everything is. The defaults are for a GPU."""
    lengths: tuple = (4096, 16384, 1024, 65536)                         # of the kernels, the most telling first
    widths: tuple = (64, 128)
    tokens: int = 16384
    n_embd: int = 2048
    check: tuple = (1000, 4, 64)                                        # tokens, heads and width of the check
    preset: dict = dataclasses.field(default_factory=lambda: PRESETS["gpt2"])
    trained: tuple = ("--attn=tda", "--max_iters=500", "--eval_interval=500")           # flags of the trained TDA
    live: tuple = (256, 1024, 4096)
    focus: tuple = (4096, 16384, 65536, 262144, 1048576)
    states: tuple = (4096, 16384)
    heads: int = 4                                                      # of the last two parts

    def rounds(self, T):
        """How often each case is timed at this length."""
        return max(3, min(20, 20 * 8192 // T))


# without a GPU: a trial in Triton's interpreter that shows that all parts run
TRIAL = Sizes(
    lengths=(32,), widths=(16,), tokens=32, n_embd=32, check=(20, 2, 16), live=(16,), focus=(300,), states=(20,),
    heads=2, trained=("--attn=tda", "--preset=lab", "--max_iters=2", "--eval_interval=2", "--eval_iters=1"),
    preset={"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 257, "batch_size": 1})


class Step(NamedTuple):
    table: str                                  # the table that its rows belong to
    case: str                                   # what it measures, within this table
    run: Callable                               # run() -> {row: {column: number or text}}


class Part(NamedTuple):
    about: str                                  # its heading on the page
    share: float                                # of the minutes
    steps: Callable                             # steps(sizes, machine, folder) -> [Step]


def command(args, run):
    """Measure what needs a GPU, the most useful first, until the minutes are over. Each part saves its results."""
    machine = Machine(args.device, args.dtype)
    gpu = machine.device.type == "cuda"
    folder = Path(args.out or (ROOT / "results" if gpu else "out/everything"))
    page = folder / "gpu.md" if args.out or not gpu else ROOT / "docs/gpu.md"
    seconds, began, passed, found = 60 * (args.minutes or MINUTES), clock(), 0.0, {}
    for name, part in PARTS.items():
        passed += part.share / sum(part.share for part in PARTS.values())
        head = {"machine": str(machine), "triton": TRITON, "about": part.about}
        numbers = found[name] = head | {"tables": {}, "left": []}
        for step in progress(part.steps(Sizes() if gpu else TRIAL, machine, folder), True):
            if clock() > began + seconds * passed:
                numbers["left"].append(f"{step.table}: {step.case}" if step.case else step.table)
                continue
            numbers["tables"].setdefault(step.table, {}).update(rows_of(step))
            save(found, name, folder, page, machine)
        save(found, name, folder, page, machine)
    return found, page_of(found)


def rows_of(step):
    """The rows that a step measures. A step that fails gives one row with its error, so that the others can follow."""
    try:
        return step.run()
    except Exception as e:                      # on a machine that was never tried, anything may fail
        print(f"{step.table}, {step.case}: {type(e).__name__}: {e}", file=sys.stderr)
        return {step.case or step.table: {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}}


def save(found, name, folder, page, machine):
    """Write the file of this part, and the page."""
    save_numbers(folder / f"gpu-{name}-{gpu_name(machine.device)}.json", found[name])
    with files.replacing(page, "w") as f:
        f.write(page_of(found) + "\n")


# --------------------------------------------------------------------------------------------------------- the parts


def checks(sizes, machine, folder):
    """The kernels against the same layer in PyTorch in float64."""
    dtypes = ["float32"] if kernels.INTERPRETED else ["bfloat16", "float16", "float32"]
    cases = {name: {"attn": name} for name in CHECKED} | HARD
    return [Step(dtype, name, partial(errors_of, name, choices, dtype, sizes.check, machine))
            for dtype in dtypes for name, choices in cases.items()]


def errors_of(name, choices, dtype, size, machine):
    """{name: relative errors of the output and of the gradients of q, k and v, the largest error of a gradient of the
    layer's parameters and the name of that parameter (None: attention uses no parameters), and the error that rounding
    allows}.

    A parameter's gradient is a sum over all rows, whose terms cancel. The tests allow it four times that error."""
    T, heads, width = size
    config = choices | {"n_layer": 1, "n_head": heads, "n_embd": heads * width, "block_size": T, "vocab_size": 1}
    fused, judge = (mixers.layer_of(GPTConfig(kernel=kernel, **config), 0).to(machine.device).eval()
                    for kernel in ("triton", "torch"))
    judge.load_state_dict(fused.state_dict())
    judge.double()
    x = torch.randn(2, T, heads * width, device=machine.device)
    drawn = [torch.randn(2, T, n, w, device=machine.device).to(getattr(torch, dtype)).transpose(1, 2)
             for n, w in fused.shapes.values()]
    names = ["dq", "dk", "dv", *(name for name, _ in fused.named_parameters())]
    upstream, results = None, []
    for module, kind in ((fused, getattr(torch, dtype)), (judge, torch.float64)):
        leaves = [part.detach().to(kind).requires_grad_() for part in drawn]
        o = module.attend(*leaves, x.to(torch.float64 if module is judge else torch.float32), module.distance())
        upstream = torch.randn_like(o) if upstream is None else upstream.to(kind)
        # projections, which attend() does not use, have no gradient
        gradients = torch.autograd.grad(o, [*leaves, *module.parameters()], upstream, allow_unused=True)
        results.append({"output": o.detach()} | {
            part: gradient for part, gradient in zip(names, gradients, strict=True) if gradient is not None})
    errors = {part: largest_error([found], [results[1][part]]) for part, found in results[0].items()}
    row = {part: errors.pop(part) for part in ("output", "dq", "dk", "dv")}
    worst = max(errors, key=errors.get, default=None)
    return {name: row | {"parameters": errors.get(worst), "largest at": worst,
                         "allowed": rounding(getattr(torch, dtype))}}


def kernel_speeds(sizes, machine, folder):
    """Our kernels, and those of others, at every size."""
    def at_size(T, width):
        flags = SimpleNamespace(tokens=sizes.tokens, n_embd=sizes.n_embd, repeats=sizes.rounds(T))
        return time_kernels(T, width, flags, machine)

    about = "TFLOP/s, and speed relative to our softmax"
    return [Step(f"width {width}, T = {T:,}: {about}", "", partial(at_size, T, width))
            for T in sizes.lengths for width in sizes.widths]


def training_steps(sizes, machine, folder):
    """One training step of every recipe."""
    others = [name for name in mixers.trained_recipes() if name not in FIRST]
    cases = {"softmax (sdpa)": ("softmax", "sdpa")} | {name: (name, "auto") for name in (*FIRST, *others)}
    about = f"{sizes.preset['n_layer']} layers, {sizes.preset['batch_size']} sequences of {sizes.preset['block_size']}"
    return [Step(about, name, partial(one_step, name, *case, sizes.preset, machine)) for name, case in cases.items()]


def one_step(name, attn, kernel, preset, machine):
    """{name: tokens per second, share of the device's peak FLOP/s, and memory with weights and optimizer}."""
    machine.free_memory()                       # of the last model
    made = {}

    def two_steps():
        made["model"] = GPT(model_config(preset, {"attn": attn, "kernel": kernel})).to(machine.device)
        made["step"] = training_step(made["model"], machine, preset["batch_size"])
        made["step"](), made["step"]()

    memory = machine.peak_memory(two_steps)
    speed = preset["batch_size"] * preset["block_size"] / machine.race({name: made["step"]}, 5)[name]
    peak = machine.peak_flops()
    mfu = made["model"].flops_per_token() * speed / peak if peak else None
    return {name: {"tokens_per_s": speed, "mfu": mfu, "memory_gb": memory / 2**30}}


def skipped_tiles(sizes, machine, folder):
    """What skipping dead tiles gains in a trained TDA."""
    out_dir = folder / "tda" if folder != ROOT / "results" else ROOT / "out/gpu-tda"

    def train():
        machine.free_memory()                   # another process trains on the same GPU
        meta = train_if_missing(out_dir, [*sizes.trained, f"--out_dir={out_dir}", f"--device={machine.device}",
                                          f"--dtype={machine.dtype}"])
        return {"tda": {"steps": meta["losses"]["step"], "validation loss": meta["losses"]["val"]}}

    def look(T):
        try:
            run = OpenedRun(Common(out_dir=str(out_dir), device=str(machine.device), dtype=machine.dtype),
                            {"kernel": "triton"})
            layers = live.look_at_layers(run, T, sizes.rounds(T))
        finally:
            keep_tiles(None, "")                # later parts use this GPU's tiles, not those of the run
        return {f"layer {layer}": {"live tiles": row["live_tiles"] / row["tiles"],
                                   "live pairs": row["live_pairs"] / row["pairs"], "gain": row["gain"]}
                for layer, row in enumerate(layers)}

    return [Step("the trained model", "", train),
            *(Step(f"T = {T:,}: shares of tiles and pairs, and gain of speed by skipping", "", partial(look, T))
              for T in sizes.live)]


def focus_speeds(sizes, machine, folder):
    """Sparse Focus and full attention."""
    def at_length(T):
        found = sparse.time_length(T, sizes.heads, sizes.rounds(T), machine)
        return {f"{T:,}": {"full, ms": 1000 * found["full"]} | {
            f"{case['topk']} of {case['groups']}": case["ratio"] for case in found["sparse"]}}
    return [Step(f"{sizes.heads} heads of {sparse.WIDTH}: speed relative to full attention", f"T = {T:,}",
                 partial(at_length, T)) for T in sizes.focus]


def state_speeds(sizes, machine, folder):
    """States and softmax."""
    cases = {"softmax (sdpa)": ("softmax", "sdpa")} | {name: (name, "auto") for name in ("softmax", *STATES)}

    def at_length(T):
        flags = SimpleNamespace(tokens=sizes.tokens, n_layer=2, n_head=sizes.heads, n_embd=64 * sizes.heads,
                                repeats=sizes.rounds(T))
        return compare(cases, T, flags, machine)

    return [Step(f"T = {T:,}: tokens per second, and speeds relative to softmax (sdpa)", "", partial(at_length, T))
            for T in sizes.states]


PARTS = {
    "check": Part("The kernels against float64: relative errors", 90, checks),
    "kernels": Part("The kernels, and those of others", 150, kernel_speeds),
    "steps": Part("Training steps of GPT-2 small", 120, training_steps),
    "live": Part("Skipped tiles of a trained TDA", 60, skipped_tiles),
    "focus": Part("Sparse Focus beside full attention", 30, focus_speeds),
    "states": Part("States beside softmax", 30, state_speeds),
}


# ---------------------------------------------------------------------------------------------------------- the page


def page_of(found):
    """The page, from the numbers of all parts so far."""
    first = next(iter(found.values()))
    title = "# On a GPU" if first["machine"].startswith("cuda") else "# A trial without a GPU: these times mean nothing"
    lines = [title, "`python eval.py speed --everything` measured these numbers and wrote this page.",
             f"Machine: {first['machine']}, triton {first['triton']}."]
    for numbers in found.values():
        lines.append(f"## {numbers['about']}")
        for title, rows in numbers["tables"].items():
            lines += [f"{title}:", *table_and_notes(rows)]
        if numbers["left"]:
            lines.append(f"No time was left for {len(numbers['left'])} steps: {', '.join(numbers['left'])}.")
    return "\n\n".join(lines)


def table_and_notes(rows):
    """The rows as a table, and below it why rows are missing."""
    notes = {name: row.get("error") or row.get("missing") for name, row in rows.items()}
    rows = {name: row for name, row in rows.items() if not notes[name]}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[name, *(shown(row.get(column)) for column in columns)] for name, row in rows.items()]
    return ([markdown(cells, ["", *columns])] if cells else []) + [
        f"{name} is missing: {why}" for name, why in notes.items() if why]


def shown(value):
    """A cell: a name, three digits, or all of a large number."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
