"""speed: training steps of whole models, their attention alone, and its memory."""
from functools import partial

import torch

from common.machine import load_average
from evals.instrument import recipe_names, save_numbers, table, whole_numbers
from model import GPT, GPTConfig

# headings of the columns that have another name in JSON
COLUMNS = {"both": "forward + backward", "step_gb": "memory of a step, GiB", "mfu": "share of peak FLOP/s"}


def command(args, machine):
    """Time every recipe. Every length has the same number of tokens in a step."""
    # first softmax in two ways, to which the others are compared: torch's own fused kernel, and the block loop, which
    # computes recipes without a kernel
    cases = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    cases |= {name: (name, "auto") for name in recipe_names(args.attn) if name != "softmax"}
    numbers = {"machine": str(machine), "load_average": load_average(), "lengths": {}, "memory_mb": {}}
    text = [f"{machine}; load average {numbers['load_average']}"]       # shows how busy the machine was
    for T in whole_numbers(args.lengths, "lengths"):
        batch = max(1, (args.tokens or 2048) // T)
        numbers["lengths"][T] = rows = compare(cases, T, batch, args, machine)
        columns = list(next(iter(rows.values())))[1:]
        text.append(f"T={T}, {batch} sequences: training steps, "
                    "and the speed of steps and of attention alone relative to the first row\n" + table(
                        [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[column]:.2f}" for column in columns)]
                         for name, row in rows.items()],
                        ["recipe", "tokens/s", *(COLUMNS.get(column, column) for column in columns)]))
        save_numbers(args.out, numbers)
    lengths = whole_numbers(args.memory, "memory") if args.memory else []
    numbers["memory_mb"] = memory = {name: {T: memory_of(case, T, args, machine) for T in lengths}
                                     for name, case in cases.items()}
    if lengths:
        text.append("memory of one layer's attention without its inputs, forward and backward, one sequence (MiB)\n"
                    + table([[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in memory.items()],
                            ["recipe", *(f"T={T}" for T in lengths)]))
    save_numbers(args.out, numbers)
    return numbers, "\n\n".join(text)


def make_model(case, T, args, machine):
    """A model of one case for sequences of T tokens."""
    attn, kernel = case
    return GPT(GPTConfig(
        attn=attn, kernel=kernel, block_size=T, vocab_size=args.vocab_size, n_layer=args.n_layer, n_head=args.n_head,
        n_embd=args.n_embd or 128, bias_range=min(T, 512))).to(machine.device)


def compare(cases, T, batch, args, machine):
    """Time every case at one length. Returns {name: {"tokens_per_s", "step", "forward", "both"}}: tokens per second of
    training, then speeds relative to the first case: of a training step, and of attention alone, forward and both
    ways. On a GPU also "step_gb", the memory of a step besides weights and optimizer, and "mfu", the share of the
    device's peak FLOP/s, if that is known."""
    models = {name: make_model(case, T, args, machine) for name, case in cases.items()}
    seconds = {}
    for way, make in (("step", training_step), ("forward", partial(attention_call, backward=False)),
                      ("both", attention_call)):                        # all cases race at one kind of work
        calls = {name: make(model, machine, batch) for name, model in models.items()}
        seconds[way] = machine.race(calls, args.repeats)
        if way == "step" and machine.device.type == "cuda":
            memory = {name: machine.peak_memory(call) for name, call in calls.items()}
    first, rows = next(iter(cases)), {}
    for name, model in models.items():
        speed = batch * T / seconds["step"][name]
        rows[name] = {"tokens_per_s": speed} | {way: times[first] / times[name] for way, times in seconds.items()}
        if machine.device.type == "cuda":
            rows[name]["step_gb"] = memory[name] / 2**30
        if machine.peak_flops():
            rows[name]["mfu"] = model.flops_per_token() * speed / machine.peak_flops()
    return rows


def training_step(model, machine, batch):
    """A function that takes one training step on random sequences. The time does not depend on the tokens."""
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    rows = torch.randint(model.config.vocab_size, (batch, model.config.block_size + 1), device=machine.device)

    def take_step():
        with machine.autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)   # as in train.py: gradients take no memory between steps

    return take_step


def attention_call(model, machine, batch, backward=True):
    """A function that runs the first layer's attention alone, between the projections, forward or both ways."""
    module, T = model.transformer.h[0].attn, model.config.block_size
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype)}
    # (B, heads, T, width), with the memory layout of a projection
    q, k, v = (torch.randn(batch, T, heads, width, **like).transpose(1, 2).requires_grad_(backward)
               for heads, width in module.shapes.values())
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)       # the input of gates
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))        # the gradient of the output

    def attend():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, module.distance())
        if backward:
            o.backward(do)

    return attend


def memory_of(case, T, args, machine):
    """The memory of one layer's attention, forward and backward, without its inputs, for one sequence, in MiB."""
    # the model is made before the count begins, so only the call itself counts
    call = attention_call(make_model(case, T, args, machine), machine, 1)
    return round(machine.peak_memory(call) / 2**20, 3)
