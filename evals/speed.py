"""The speed of every recipe on this machine, and the memory of its attention.

All recipes take turns in one process, for many rounds (Machine.race). Other programs on the machine slow all of them
alike, so ratios are reliable even if seconds are not. --kernels is in evals/kernels.py, --live in evals/live.py,
--focus in evals/sparse.py, --decode in evals/decode.py, --tune in evals/tune.py, --everything in evals/everything.py.
"""
from dataclasses import dataclass

import attention
from common.flags import at_least, knob
from common.machine import Machine, load_average
from evals import decode, everything, kernels, live, sparse, tune
from evals.instrument import Common, OpenedRun, recipe_names, save_numbers, table, whole_numbers
from evals.steps import cases_of, compare, memory_of, sequences


@dataclass
class Speed:
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; with --kernels 1024,4096,16384 "
                            "(on a CPU 64,128); with --focus 1024,4096,16384 (on a GPU up to a million); with "
                            "--decode 1024,4096,16384; with --live the run's block_size; with --tune 4096, and only "
                            "the longest counts")
    memory: str = knob("4096,8192,16384", "measure the attention's memory at these lengths, separated by commas; "
                                          "empty: skip it")
    tokens: int = knob(0, "tokens of a training step, or of a call of a kernel; "
                          "0: 2048; with --kernels 16384 (on a CPU 128)")
    n_layer: int = knob(4, "blocks of the timed model")
    n_head: int = knob(2, "heads of the timed model")
    n_embd: int = knob(0, "width of the timed model; 0: 128; with --kernels 2048 (on a CPU 128)")
    repeats: int = knob(20, "timed rounds over all recipes; the result is the median")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best available")
    dtype: str = knob("auto", "precision of matrix products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, time our fused kernels and torch's own, without a model")
    live: bool = knob(False, "instead, for a trained run (--out_dir): measure the share of tiles with nonzero weights, "
                             "and the time that skipping the others saves")
    focus: bool = knob(False, "instead, time the sparse form of Focus and full attention")
    decode: bool = knob(False, "instead, time a decoding step of one layer with long caches, and count the bytes of "
                               "keys, values or state that it reads")
    tune: bool = knob(False, "instead, choose the kernels' tiles by timing them on this GPU; the kernels use them from "
                             "then on, unless --out names another file than theirs")
    everything: bool = knob(False, "instead, measure on this GPU, in a few minutes, all that needs one, and write "
                                   "docs/gpu.md")
    minutes: float = knob(0.0, "budget of --tune (0: 5) and of --everything (0: 8)")
    out_dir: str = knob("", "with --live: the run")
    widths: str = knob("64,128", "with --kernels or --tune: head dimensions, separated by commas")
    out: str = knob("", "also save the figures as JSON in this file; "
                        "empty: on a GPU with --kernels, --focus or --tune a file in results/, otherwise nowhere. "
                        "With --everything a folder; empty: results/, without a GPU out/everything")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, tokens=0, n_layer=1, n_head=1, n_embd=0, repeats=1, minutes=0)
        for name in ("lengths", "memory", "widths"):
            if getattr(self, name):
                whole_numbers(getattr(self, name), name, least=1)       # raises ValueError


def command(args, run):
    """Time training steps of every recipe, and its attention alone, relative to softmax in torch's own fused kernel.
    All recipes take turns in one process."""
    if args.everything:
        return everything.command(args, run)
    if args.tune:
        return tune.command(args, run)
    if args.kernels:
        return kernels.command(args, run)
    if args.focus:
        return sparse.command(args, run)
    if args.decode:
        return decode.command(args, list(attention.ATTENTIONS) if args.attn == "all" else recipe_names(args.attn))
    if args.live:
        return live.command(args, open_run(args))
    machine, cases = Machine(args.device, args.dtype), cases_of(recipe_names(args.attn))
    load = load_average()                       # shows a reader of the figures how busy the machine was
    speeds = {T: compare(cases, T, args, machine) for T in whole_numbers(args.lengths or "256,1024", "lengths")}
    memory = memory_of(cases, whole_numbers(args.memory, "memory") if args.memory else [], args, machine)
    numbers = {"machine": str(machine), "load_average": load, "lengths": speeds, "memory_mb": memory}
    save_numbers(args.out, numbers)
    text = [f"{machine}; load average {load}", *(speed_table(T, rows, args) for T, rows in speeds.items())]
    return numbers, "\n\n".join(text + ([memory_table(memory)] if args.memory else []))


def open_run(args):
    """The run for --live."""
    if not args.out_dir:
        raise ValueError("--live needs a trained run: name it with --out_dir=out/...")
    return OpenedRun(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})


# --------------------------------------------------------------------------------------------------------- the tables


def speed_table(T, rows, args):
    return (f"T={T}, {sequences(T, args)} sequences: training steps, "
            "and the speed of steps and of attention alone relative to the first row\n") + table(
        [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[way]:.2f}" for way in ("step", "forward", "both"))]
         for name, row in rows.items()],
        ["recipe", "tokens/s", "step", "forward", "forward + backward"])


def memory_table(memory):
    lengths = next(iter(memory.values()))
    about = "memory of one layer's attention without its inputs, forward and backward, one sequence (MiB)\n"
    return about + table(
        [[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in memory.items()],
        ["recipe", *(f"T={T}" for T in lengths)])
