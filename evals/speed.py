"""speed"""
import os
from dataclasses import dataclass

import torch

from common.flags import at_least, knob
from common.machine import Machine
from evals import kernels, live
from evals.instrument import numbers, recipe_names, save_result, table
from model import GPT, GPTConfig


@dataclass
class Speed:
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; of the kernels 1024,4096,16384, or 64,128 on a CPU; "
                            "of a run its block_size")
    memory: str = knob("4096,8192,16384", "lengths at which the attention's memory is measured, separated by commas; empty: do not")
    tokens: int = knob(0, "tokens in a training step, or in a call of a kernel; 0: 2048; of the kernels 16384, or 128 on a CPU")
    n_layer: int = knob(4, "blocks of the model that takes the steps")
    n_head: int = knob(2, "its heads")
    n_embd: int = knob(0, "its width; 0: 128; of the kernels, for which it is all heads together, 2048, or 128 on a CPU")
    repeats: int = knob(20, "timed rounds over all recipes; the median counts")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("auto", "precision of the products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, the fused kernels alone against torch's own")
    live: bool = knob(False, "instead, of a trained run (--out_dir): which tiles hold any weight, and what skipping the others gains")
    out_dir: str = knob("", "with --live: the run")
    widths: str = knob("64,128", "with --kernels: head widths")
    out: str = knob("", "also save the figures as JSON here; empty, of the kernels on a GPU: results/speed-<its name>.json")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, tokens=0, n_layer=1, n_head=1, n_embd=0, repeats=1)


def speed_command(args):
    """Training steps and attention alone, of every recipe against softmax through torch's own fused kernel, side by side in one process."""
    if args.kernels:
        return kernels.kernels_command(args)
    if args.live:
        return live.live_command(args)
    machine, names = Machine(args.device, args.dtype), recipe_names(args.attn)
    cases = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    cases |= {name: (name, "auto") for name in names if name != "softmax"}

    def make_model(attn, kernel, T):
        return GPT(GPTConfig(attn=attn, kernel=kernel, block_size=T, vocab_size=257, n_layer=args.n_layer, n_head=args.n_head,
                             n_embd=args.n_embd or 128, bias_range=min(T, 512))).to(machine.device)

    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    result, text = {"machine": str(machine), "load_average": load, "lengths": {}, "memory_mb": {name: {} for name in cases}}, []
    for T in numbers(args.lengths or "256,1024"):
        batch = max(1, (args.tokens or 2048) // T)
        rows = result["lengths"][T] = compare(cases, make_model, T, batch, machine, args.repeats)
        text.append(f"T={T}, {batch} sequences: training steps, and how fast they and attention alone are against the first row\n" + table(
            [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[key]:.2f}" for key in ("step", "forward", "both"))] for name, row in rows.items()],
            ["recipe", "tokens/s", "step", "forward", "forward + backward"]))
    lengths = numbers(args.memory) if args.memory else []
    for name, case in cases.items():
        for T in lengths:
            used = machine.peak_memory(attention_call(make_model(*case, T), machine, 1))
            result["memory_mb"][name][T] = round(used / 2**20, 3)
    if lengths:
        text.append("memory that one layer's attention takes beside its inputs, forward and backward, one sequence (MB)\n" + table(
            [[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in result["memory_mb"].items()], ["recipe", *(f"T={T}" for T in lengths)]))
    save_result(args, result)
    return result, f"{machine}; load average {load}\n\n" + "\n\n".join(text)


def training_step(model, machine, batch):
    """A function that takes one training step."""
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    rows = torch.randint(model.config.vocab_size, (batch, model.config.block_size + 1), device=machine.device)

    def run():
        with machine.autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def attention_call(model, machine, batch, backward=True):
    """A function that runs the first layer's attention alone, between the projections, forward or both ways."""
    module, T, low = model.transformer.h[0].attn, model.config.block_size, getattr(torch, machine.dtype)

    def draw(heads, width):                     # (B, heads, T, width), laid out in memory as the projections leave it
        return torch.randn(batch, T, heads, width, device=machine.device, dtype=low).transpose(1, 2).requires_grad_(backward)

    q, k, v = (draw(*shape) for shape in module.shapes.values())
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))

    def run():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, getattr(module, "table", None))
        if backward:
            o.backward(do)

    return run


def compare(cases, make_model, T, batch, machine, repeats):
    """Time every case at one length. Returns {name: {"tokens_per_s": .., and speed against the first case of "step", "forward", "both"}}."""
    models = {name: make_model(*case, T) for name, case in cases.items()}
    seconds = {
        "step": machine.race({name: training_step(m, machine, batch) for name, m in models.items()}, repeats),
        "forward": machine.race({name: attention_call(m, machine, batch, False) for name, m in models.items()}, repeats),
        "both": machine.race({name: attention_call(m, machine, batch) for name, m in models.items()}, repeats)}
    first = next(iter(cases))
    return {name: {"tokens_per_s": batch * T / seconds["step"][name]} | {of: times[first] / times[name] for of, times in seconds.items()}
            for name in cases}
