"""Training steps of whole models, and their attention alone: what evals/speed.py times.

args: the flags of evals/speed.py, of which tokens, n_layer, n_head, n_embd and repeats are read.
"""
import torch

from model import GPT, GPTConfig


def cases_of(names):
    """{name: (recipe, kernel)}: first softmax in two ways, to which the others are compared."""
    # torch's own fused kernel, and the block loop that computes recipes without a kernel
    softmax = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    return softmax | {name: (name, "auto") for name in names if name != "softmax"}


def make_model(case, T, args, machine):
    """A model of one case for sequences of T bytes."""
    attn, kernel = case
    config = GPTConfig(
        attn=attn, kernel=kernel, block_size=T, vocab_size=257, n_layer=args.n_layer, n_head=args.n_head,
        n_embd=args.n_embd or 128, bias_range=min(T, 512))
    return GPT(config).to(machine.device)


def sequences(T, args):
    """The number of sequences of T tokens in a step. Every length has the same number of tokens."""
    return max(1, (args.tokens or 2048) // T)


def compare(cases, T, args, machine):
    """Time every case at one length. Returns {name: {"tokens_per_s", "step", "forward", "both"}}: tokens per second of
    training, then speeds relative to the first case: of a training step, and of attention alone, forward and both
    ways."""
    models, batch = {name: make_model(case, T, args, machine) for name, case in cases.items()}, sequences(T, args)

    def race(start, *more):
        return machine.race({name: start(model, machine, batch, *more) for name, model in models.items()}, args.repeats)

    # all cases race together at one kind of work, then at the next
    seconds = {"step": race(training_step), "forward": race(attention_call, False), "both": race(attention_call)}
    first = next(iter(cases))
    return {name: {"tokens_per_s": batch * T / seconds["step"][name]} | {
        way: times[first] / times[name] for way, times in seconds.items()} for name in cases}


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

    def draw(heads, width):                     # (B, heads, T, width), with the memory layout of a projection
        return torch.randn(batch, T, heads, width, **like).transpose(1, 2).requires_grad_(backward)

    q, k, v = (draw(*shape) for shape in module.shapes.values())
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)       # the input of gates
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))        # the gradient of the output

    def attend():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, module.distance())
        if backward:
            o.backward(do)

    return attend


def memory_of(cases, lengths, args, machine):
    """The memory of one layer's attention, forward and backward, without its inputs, for one sequence, in MiB: {name:
    {length: MiB}}."""
    memory = {name: {} for name in cases}
    for name, case in cases.items():
        for T in lengths:
            # the model is made before the count begins, so only the call itself counts
            used = machine.peak_memory(attention_call(make_model(case, T, args, machine), machine, 1))
            memory[name][T] = round(used / 2**20, 3)
    return memory
