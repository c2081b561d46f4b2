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

import attention
import mixers
from common.machine import load_average
from evals.instrument import recipe_names, save_numbers, table, whole_numbers
from mixers.recurrent import Recurrent
from model import GPTConfig

WIDTH = 64                                      # head dimension
HARD = {"focus (1 of 4 groups)": {"attn": "focus", "topk": 1}}          # besides the recipes


def command(args, machine):
    """Time decoding steps at several lengths of the cache."""
    names = list(attention.ATTENTIONS) if args.attn == "all" else recipe_names(args.attn)
    numbers = {"machine": str(machine), "load_average": load_average(), "heads": args.n_head, "width": WIDTH,
               "lengths": {}}
    text = [f"{machine}; load average {numbers['load_average']}; one layer, {args.n_head} heads of {WIDTH}, softmax "
            "over all keys first"]
    for T in whole_numbers(args.lengths, "lengths"):
        rows = numbers["lengths"][T] = time_steps(T, names, args, machine)
        text.append(f"{T} tokens in the cache\n" + table(
            [[name, f"{row['layer_ms']:.3f}", f"{row['layer']:.2f}", f"{row['attend_ms']:.3f}", f"{row['attend']:.2f}",
              f"{row['bytes'] / 2**10:,.0f}", f"{row['traffic']:.2f}"] for name, row in rows.items()],
            ["recipe", "layer, ms", "x softmax", "attend, ms", "x softmax", "KiB read", "traffic alone"]))
        save_numbers(args.out, numbers)
    return numbers, "\n\n".join(text)


@torch.no_grad()
def time_steps(T, names, args, machine):
    """{recipe: {"layer_ms", "attend_ms", "bytes", and "layer", "attend", "traffic" relative to softmax}}."""
    cases = {name: {"attn": name} for name in ("softmax", *names)} | (HARD if "focus" in names else {})
    with machine.autocast():
        steps = {name: decoding_step(T, choices, args, machine) for name, choices in cases.items()}
        layer, attend, size = ({name: step[i] for name, step in steps.items() if step} for i in range(3))
        layer, attend = machine.race(layer, args.repeats), machine.race(attend, args.repeats)
    return {name: {"layer_ms": 1000 * layer[name], "attend_ms": 1000 * attend[name], "bytes": size[name],
                   "layer": layer["softmax"] / layer[name], "attend": attend["softmax"] / attend[name],
                   "traffic": size["softmax"] / size[name]} for name in layer}


def decoding_step(T, choices, args, machine):
    """A decoding step of one layer with a cache of T tokens: functions that compute it as a whole and its attention
    alone, and the bytes that it reads. None if the recipe cannot be decoded."""
    torch.manual_seed(0)
    module = mixers.layer_of(GPTConfig(**choices, block_size=T + 1, vocab_size=1, n_layer=1, n_head=args.n_head,
                                       n_embd=WIDTH * args.n_head), 0).to(machine.device).eval()
    if not module.cached:
        return None
    x, past, calls = torch.randn(1, T, WIDTH * args.n_head, device=machine.device), {}, []
    if isinstance(module, Recurrent):
        module(x[:, -64:], past)                # the size of a state does not depend on the number of tokens
    else:                                       # fill the cache, without attention
        module.attend = lambda q, k, v, *_, **__: v.new_zeros(1, module.heads, T, v.shape[-1])
        module(x, past)
        del module.attend                       # now it is the method again

    def whole():                                # on copies of the dicts, which a step changes; it changes no tensor
        module(x[:, :1], dict(past))

    def attend(inputs, cached):
        return type(module).attend(module, *inputs, **{
            name: dict(value) if isinstance(value, dict) else value for name, value in cached.items()})

    def keep_inputs(*inputs, **cached):
        calls.append((inputs, cached))
        return attend(inputs, cached)

    module.attend = keep_inputs
    whole()
    del module.attend
    inputs, cached = calls[-1]
    return whole, lambda: attend(inputs, cached), int(module.bytes_read(*inputs, **cached))
