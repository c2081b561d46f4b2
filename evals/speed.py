"""How fast every recipe is on this machine, and how much memory its attention takes.

All recipes are timed in turn, again and again, in one process (Machine.race). What slows the machine down meanwhile
slows all of them alike, so ratios can be trusted where seconds cannot. evals/kernels.py does what --kernels asks for,
evals/live.py what --live does, evals/sparse.py what --focus does.
"""
import os
from dataclasses import dataclass

import torch

from common.flags import at_least, knob
from common.machine import Machine
from evals import kernels, live, sparse
from evals.instrument import Common, OpenedRun, recipe_names, save_numbers, table, whole_numbers
from model import GPT, GPTConfig


@dataclass
class Speed:
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; of the kernels 1024,4096,16384, "
                            "or 64,128 on a CPU; with --focus 1024,4096,16384, on a GPU up to a million; of a run its "
                            "block_size")
    memory: str = knob("4096,8192,16384", "lengths at which the attention's memory is measured, separated by commas; "
                                          "empty: do not")
    tokens: int = knob(0, "tokens in a training step, or in a call of a kernel; "
                          "0: 2048; of the kernels 16384, or 128 on a CPU")
    n_layer: int = knob(4, "blocks of the model that takes the steps")
    n_head: int = knob(2, "its heads")
    n_embd: int = knob(0, "its width; 0: 128; of the kernels, for which it is all heads together, 2048, "
                          "or 128 on a CPU")
    repeats: int = knob(20, "timed rounds over all recipes; the median counts")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("auto", "precision of the products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, the fused kernels alone against torch's own")
    live: bool = knob(False, "instead, of a trained run (--out_dir): which tiles hold any weight, "
                             "and what skipping the others gains")
    focus: bool = knob(False, "instead, attention over pairs that share a group (Focus) against full attention")
    out_dir: str = knob("", "with --live: the run")
    widths: str = knob("64,128", "with --kernels: head widths")
    out: str = knob("", "also save the figures as JSON here; "
                        "empty, of the kernels on a GPU: results/speed-<its name>.json")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, tokens=0, n_layer=1, n_head=1, n_embd=0, repeats=1)


def command(args, run):
    """Training steps and attention alone, of every recipe against softmax through torch's own fused kernel, side by
    side in one process."""
    if args.kernels:
        return kernels.command(args, run)
    if args.focus:
        return sparse.command(args, run)
    if args.live:
        return live.command(args, open_run(args))
    machine, cases = Machine(args.device, args.dtype), cases_of(recipe_names(args.attn))
    # how busy the machine was before, since a reader of the figures cannot know; Windows does not say
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    speeds = {T: compare(cases, T, args, machine) for T in whole_numbers(args.lengths or "256,1024", "lengths")}
    memory = memory_of(cases, whole_numbers(args.memory, "memory") if args.memory else [], args, machine)
    numbers = {"machine": str(machine), "load_average": load, "lengths": speeds, "memory_mb": memory}
    save_numbers(args.out, numbers)
    text = [f"{machine}; load average {load}", *(speed_table(T, rows, args) for T, rows in speeds.items())]
    return numbers, "\n\n".join(text + ([memory_table(memory)] if args.memory else []))


def open_run(args):
    """The run that --live looks at."""
    if not args.out_dir:
        raise ValueError("--live looks at a trained run, never at random numbers: name it with --out_dir=out/...")
    return OpenedRun(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})


def cases_of(names):
    """{name: (recipe, kernel)}: softmax in two ways, as what all others are compared with, then the others."""
    # torch's own fused kernel, and the block loop that other recipes go through where they have no kernel
    softmax = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    return softmax | {name: (name, "auto") for name in names if name != "softmax"}


def make_model(case, T, args, machine):
    """A model of one case for sequences of T bytes."""
    attn, kernel = case
    config = GPTConfig(
        attn=attn, kernel=kernel, block_size=T, vocab_size=257, n_layer=args.n_layer, n_head=args.n_head,
        n_embd=args.n_embd or 128, bias_range=min(T, 512))
    return GPT(config).to(machine.device)


# --------------------------------------------------------------------------------------------- what is timed, and how


def sequences(T, args):
    """How many sequences of T tokens a step takes: at every length it has the same number of tokens."""
    return max(1, (args.tokens or 2048) // T)


def compare(cases, T, args, machine):
    """Time every case at one length. Returns {name: {"tokens_per_s", "step", "forward", "both"}}: tokens per second of
    training, then speeds against the first case, of a training step and of attention alone, forward and both ways."""
    models, batch = {name: make_model(case, T, args, machine) for name, case in cases.items()}, sequences(T, args)

    def race(start, *more):
        return machine.race({name: start(model, machine, batch, *more) for name, model in models.items()}, args.repeats)

    # all cases of one kind race together; what one kind costs says little about another
    seconds = {"step": race(training_step), "forward": race(attention_call, False), "both": race(attention_call)}
    first = next(iter(cases))
    return {name: {"tokens_per_s": batch * T / seconds["step"][name]} | {
        way: times[first] / times[name] for way, times in seconds.items()} for name in cases}


def training_step(model, machine, batch):
    """A function that takes one training step, always on the same random sequences: time does not depend on them."""
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    rows = torch.randint(model.config.vocab_size, (batch, model.config.block_size + 1), device=machine.device)

    def take_step():
        with machine.autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)   # as train.py does: gradients take no memory between steps

    return take_step


def attention_call(model, machine, batch, backward=True):
    """A function that runs the first layer's attention alone, between the projections, forward or both ways."""
    module, T = model.transformer.h[0].attn, model.config.block_size
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype)}

    def draw(heads, width):                     # (B, heads, T, width), laid out in memory as the projections leave it
        return torch.randn(batch, T, heads, width, **like).transpose(1, 2).requires_grad_(backward)

    q, k, v = (draw(*shape) for shape in module.shapes.values())
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)       # gates are computed from it
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))        # the gradient that arrives on the output

    def attend():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, module.distance())
        if backward:
            o.backward(do)

    return attend


def memory_of(cases, lengths, args, machine):
    """MB that one layer's attention takes beside its inputs, both ways, for one sequence: {name: {length: MB}}."""
    memory = {name: {} for name in cases}
    for name, case in cases.items():
        for T in lengths:
            # a model for each length, made before the count begins: only what the call itself takes is counted
            used = machine.peak_memory(attention_call(make_model(case, T, args, machine), machine, 1))
            memory[name][T] = round(used / 2**20, 3)
    return memory


# --------------------------------------------------------------------------------------------------------- for people


def speed_table(T, rows, args):
    return (f"T={T}, {sequences(T, args)} sequences: training steps, "
            "and how fast they and attention alone are against the first row\n") + table(
        [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[way]:.2f}" for way in ("step", "forward", "both"))]
         for name, row in rows.items()],
        ["recipe", "tokens/s", "step", "forward", "forward + backward"])


def memory_table(memory):
    lengths = next(iter(memory.values()))
    about = "memory that one layer's attention takes beside its inputs, forward and backward, one sequence (MB)\n"
    return about + table(
        [[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in memory.items()],
        ["recipe", *(f"T={T}" for T in lengths)])
