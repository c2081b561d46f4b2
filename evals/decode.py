"""speed --decode: one decoding step of every recipe that can be decoded, and the bytes of its cache that it reads.

A step computes the output of one layer for one new token, given a cache of T tokens. Steps of different recipes take
turns (Machine.race), so their ratios are reliable even on a busy machine. The layer has random weights and reads random
tokens, so scores are almost even: `magicpig` finds a few percent of all keys, whatever their number.

The whole step (`layer`) appends the new token to the cache and rotates keys, which copies the cache in this code. The
attention alone (`attend`) gets queries, keys, values and, for token selection, the index. Decoding on a large machine
waits for memory. So the bytes that a step must read tell how fast it could be. `traffic` is softmax's bytes divided
by the recipe's: the speed-up if only memory traffic counted.
"""
import torch

import mixers
from common.machine import Machine, load_average
from evals.instrument import save_numbers, table, whole_numbers
from mixers.recurrent import Recurrent
from model import GPTConfig

WIDTH = 64                                      # head dimension
HARD = {"focus (1 of 4 groups)": {"attn": "focus", "topk": 1}}          # besides the recipes


def command(args, names):
    """Time decoding steps of these recipes at several lengths of the cache. Returns numbers and text."""
    machine = Machine(args.device, args.dtype)
    load = load_average()
    found = {T: at_length(T, names, args, machine)
             for T in whole_numbers(args.lengths or "1024,4096,16384", "lengths")}
    numbers = {"machine": str(machine), "load_average": load, "heads": args.n_head, "width": WIDTH, "lengths": found}
    save_numbers(args.out, numbers)
    text = [f"{machine}; load average {load}; one layer, {args.n_head} heads of {WIDTH}, softmax over all keys first"]
    return numbers, "\n\n".join(text + [f"{T} tokens in the cache\n{text_of(rows)}" for T, rows in found.items()])


@torch.no_grad()
def at_length(T, names, args, machine):
    """{recipe: {"layer_ms", "attend_ms", "bytes", and "layer", "attend", "traffic" relative to softmax}}."""
    cases = {name: {"attn": name} for name in ("softmax", *names)} | (HARD if "focus" in names else {})
    with machine.autocast():
        steps = {name: Step(T, choices, args, machine) for name, choices in cases.items()}
        steps = {name: step for name, step in steps.items() if step.module.cached}
        layer = machine.race({name: step.whole for name, step in steps.items()}, args.repeats)
        attend = machine.race({name: step.attention for name, step in steps.items()}, args.repeats)
    rows = {}
    for name, step in steps.items():
        rows[name] = {"layer_ms": 1000 * layer[name], "attend_ms": 1000 * attend[name], "bytes": step.bytes_read(),
                      "layer": layer["softmax"] / layer[name], "attend": attend["softmax"] / attend[name]}
        rows[name]["traffic"] = rows["softmax"]["bytes"] / rows[name]["bytes"]
    return rows


class Step:
    """A decoding step of one layer with a cache of T tokens: as a whole, and its attention alone."""

    def __init__(self, T, choices, args, machine):
        config = GPTConfig(**choices, block_size=T + 1, vocab_size=1, n_layer=1, n_head=args.n_head,
                           n_embd=WIDTH * args.n_head)
        torch.manual_seed(0)
        self.module = mixers.layer_of(config, 0).to(machine.device).eval()
        x = torch.randn(1, T, config.n_embd, device=machine.device)
        self.past, self.new, self.inputs = {}, x[:, :1], None
        if not self.module.cached:
            return
        if isinstance(self.module, Recurrent):
            self.module(x[:, -64:], self.past)  # the size of a state does not depend on the number of tokens
        else:                                   # fill the cache, without attention
            self.module.attend = lambda q, k, v, *_, **__: v.new_zeros(1, self.module.heads, T, v.shape[-1])
            self.module(x, self.past)
        self.module.attend = self.keep_inputs
        self.whole()
        del self.module.attend                  # now it is the method again

    def keep_inputs(self, *inputs, **cached):
        self.inputs = inputs, cached
        return type(self.module).attend(self.module, *inputs, **self.copied(cached))

    @staticmethod
    def copied(cached):
        """The cache that a call may change, copied: no step changes its tensors."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in cached.items()}

    def whole(self):
        self.module(self.new, dict(self.past))

    def attention(self):
        inputs, cached = self.inputs
        self.module.attend(*inputs, **self.copied(cached))

    def bytes_read(self):
        inputs, cached = self.inputs
        return int(self.module.bytes_read(*inputs, **cached))


def text_of(rows):
    return table(
        [[name, f"{row['layer_ms']:.3f}", f"{row['layer']:.2f}", f"{row['attend_ms']:.3f}", f"{row['attend']:.2f}",
          f"{row['bytes'] / 2**10:,.0f}", f"{row['traffic']:.2f}"] for name, row in rows.items()],
        ["recipe", "layer, ms", "x softmax", "attend, ms", "x softmax", "KiB read", "traffic alone"])
