"""The speed of every recipe on this machine, and the memory of its attention; other flags time something else.

All cases take turns in one process, for many rounds (Machine.race). Other programs on the machine slow all of them
alike, so ratios are reliable even if seconds are not. evals/everything.sh runs all that need a GPU.

Each kind of measurement is a function, see MODES at the end. It is called as measure(args, machine, lengths, numbers),
adds its figures to the dict `numbers`, and yields a text after every part.
"""
import os
import re
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map, tree_map_only

import attention
import kernels
import mixers
from axes.sight import visible
from common import files
from common.flags import Knobs, knob
from common.machine import Machine
from common.runs import ROOT
from evals.instrument import Common, OpenedRun, load_run, recipe_names, table, watch, whole_numbers, window_batches
from evals.kernels import time_kernels
from mixers.focus import Focus, sets_of, sparse
from mixers.recurrent import Recurrent
from model import GPT, GPTConfig

WIDTH, WINDOW = 64, 128                         # head dimension; keys that a row sees in any group of Focus
CASES = [(4, 1), (4, 2), (8, 1), (8, 2)]        # number of groups, and how many of them a token is in
# table 6 of the paper of Focus, on an H100, one group a token: {T: {groups: speed relative to full attention}}
PRINTED = {1024: {4: 0.2, 8: 0.2}, 4096: {4: 0.5, 8: 0.6}, 16384: {4: 1.5, 8: 1.8}, 32768: {4: 2.2, 8: 3.1},
           65536: {4: 3.0, 8: 4.7}, 262144: {4: 4.0, 8: 7.6}, 1048576: {4: 4.1, 8: 8.6}}
LIVE_TILE = 64                                  # rows and keys of the kernels' tiles at width 64


@dataclass
class Speed(Knobs):
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; with --kernels 1024,4096,16384 "
                            "(on a CPU 64,128); with --focus 1024,4096,16384 (on a GPU up to a million); with "
                            "--decode 1024,4096,16384; with --live the run's block_size")
    memory: str = knob("4096,8192,16384", "measure the attention's memory at these lengths, separated by commas; "
                                          "empty: skip it")
    tokens: int = knob(0, "tokens of a training step, or of a call of a kernel; "
                          "0: 2048; with --kernels 16384 (on a CPU 128)")
    n_layer: int = knob(4, "blocks of the timed model", least=1)
    n_head: int = knob(2, "heads of the timed model", least=1)
    n_embd: int = knob(0, "width of the timed model; 0: 128; with --kernels 2048 (on a CPU 128), with "
                        "--decode 64 a head")
    vocab_size: int = knob(257, "token ids of the timed model", least=1)
    repeats: int = knob(20, "timed rounds over all recipes; the result is the median", least=1)
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best available")
    dtype: str = knob("auto", "precision of matrix products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, time our fused kernels and torch's own, without a model")
    live: bool = knob(False, "instead, for a trained run (--out_dir): measure the share of tiles with nonzero weights, "
                             "and the time that skipping the others saves")
    focus: bool = knob(False, "instead, time the sparse form of Focus and full attention")
    decode: bool = knob(False, "instead, time a decoding step of one layer with long caches, and count the bytes of "
                               "keys, values or state that it reads; with --out_dir: prompts and new tokens of a run")
    out_dir: str = knob("", "with --live or --decode: the run")
    rival: str = knob("", "with --decode --out_dir: also time this folder's model in transformers; python "
                          "data/weights.py export writes one")
    widths: str = knob("64,128", "with --kernels: head dimensions, separated by commas")
    out: str = knob("", "also save the figures as JSON in this file; "
                        "empty: on a GPU with --kernels or --focus a file in results/, otherwise nowhere")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        super().__post_init__()
        for name in ("lengths", "memory", "widths"):
            if getattr(self, name):
                whole_numbers(getattr(self, name), name, least=1)       # raises ValueError


def command(args, run):
    """Time training steps of every recipe, and its attention alone, relative to softmax in torch's own fused kernel.
    All recipes take turns in one process."""
    measure, short, long, stem = next(row for flag, row in MODES.items() if not flag or getattr(args, flag))
    machine = Machine(args.device, args.dtype)
    gpu = machine.device.type == "cuda"
    lengths = args.lengths or (long if gpu else short)
    out = args.out
    if gpu and stem and not out:                # results/kernels-h200.json
        name = torch.cuda.get_device_name(machine.device).lower().removeprefix("nvidia ")
        out = ROOT / "results" / f"{stem}-{re.sub('[^a-z0-9]+', '-', name)}.json"
    triton = kernels.triton.__version__ if kernels.AVAILABLE else None
    # how busy the machine was in the last 1, 5 and 15 minutes; Windows does not count it
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    numbers = {"machine": str(machine), "triton": triton, "load_average": load}
    text = [f"{machine}, triton {triton}; load average {load}"]
    for part in measure(args, machine, whole_numbers(lengths, "lengths") if lengths else [], numbers):
        text.append(part)
        if out:                                 # after every part: the next one may be too large for the memory
            files.write_json(out, numbers)
    return numbers, "\n\n".join(text)


def time_training(args, machine, lengths, numbers):
    """Training steps of whole models, their attention alone, and its memory. Every length has the same number of tokens
    in a step."""
    # first softmax in two ways, to which the others are compared: torch's own fused kernel, and the block loop, which
    # computes recipes without a kernel
    cases = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    cases |= {name: (name, "auto") for name in recipe_names(args.attn) if name != "softmax"}
    numbers |= {"lengths": {}, "memory_mb": {name: {} for name in cases}}
    titles = {"both": "forward + backward", "step_gb": "memory of a step, GiB", "mfu": "share of peak FLOP/s"}
    for T in lengths:
        batch = max(1, (args.tokens or 2048) // T)
        numbers["lengths"][T] = rows = time_models(cases, T, batch, args, machine)
        columns = list(rows["softmax (sdpa)"])[1:]
        yield (f"T={T}, {batch} sequences: training steps, "
               "and the speed of steps and of attention alone relative to the first row\n" + table(
                   [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[column]:.2f}" for column in columns)]
                    for name, row in rows.items()],
                   ["recipe", "tokens/s", *(titles.get(column, column) for column in columns)]))
    lengths = whole_numbers(args.memory, "memory") if args.memory else []
    for name, case in cases.items():
        for T in lengths:                       # the model is made before the count begins: only the call itself counts
            call = attention_call(make_model(*case, T, args, machine), machine, 1)
            numbers["memory_mb"][name][T] = round(machine.peak_memory(call) / 2**20, 3)
    if lengths:
        yield ("memory of one layer's attention without its inputs, forward and backward, one sequence (MiB)\n" + table(
            [[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in numbers["memory_mb"].items()],
            ["recipe", *(f"T={T}" for T in lengths)]))


def time_models(cases, T, batch, args, machine):
    """Time every case at one length. Returns {name: {"tokens_per_s", "step", "forward", "both"}}: tokens per second of
    training, then speeds relative to the first case: of a training step, and of attention alone, forward and both
    ways. On a GPU also "step_gb", the memory of a step without weights and optimizer, and "mfu", the share of the
    device's peak FLOP/s, if that is known."""
    models = {name: make_model(*case, T, args, machine) for name, case in cases.items()}
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


def make_model(attn, kernel, T, args, machine):
    return GPT(GPTConfig(
        attn=attn, kernel=kernel, block_size=T, vocab_size=args.vocab_size, n_layer=args.n_layer, n_head=args.n_head,
        n_embd=args.n_embd or 128, bias_range=min(T, 512))).to(machine.device)


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


@torch.no_grad()
def time_decoding(args, machine, lengths, numbers):
    """One decoding step of every recipe that can be decoded, and the bytes of its cache that it reads.

    A step computes the output of one layer for one new token, given a cache of T tokens. The layer has random weights
    and reads random tokens, so scores are almost even: `magicpig` finds a few percent of all keys, whatever their
    number. The whole step (`layer`) appends the new token to the cache, whose buffers have room for it. The
    attention alone (`attend`) gets queries, keys, values and, for token selection, the index. Decoding on a large
    machine waits for memory, so the bytes that a step must read tell how fast it could be. `traffic` is softmax's
    bytes divided by the recipe's: the speed-up if only memory traffic counted."""
    if args.out_dir:
        yield from time_run(args, machine, lengths, numbers)
        return
    names = list(attention.ATTENTIONS) if args.attn == "all" else recipe_names(args.attn)
    cases = {name: {"attn": name} for name in ("softmax", *names)}
    if "focus" in names:
        cases["focus (1 of 4 groups)"] = {"attn": "focus", "topk": 1}
    width = args.n_embd // args.n_head or WIDTH
    numbers |= {"heads": args.n_head, "width": width, "lengths": {}}
    for T in lengths:
        with machine.autocast():
            steps = {name: decoding_step(T, choices, args.n_head, width, machine) for name, choices in cases.items()}
            layer, attend, size = ({name: step[i] for name, step in steps.items() if step} for i in range(3))
            layer, attend = machine.race(layer, args.repeats), machine.race(attend, args.repeats)
        rows = numbers["lengths"][T] = {
            name: {"layer_ms": 1000 * layer[name], "attend_ms": 1000 * attend[name], "bytes": size[name],
                   "layer": layer["softmax"] / layer[name], "attend": attend["softmax"] / attend[name],
                   "traffic": size["softmax"] / size[name]} for name in layer}
        yield f"one layer, {args.n_head} heads of {width}, {T} tokens in the cache\n" + table(
            [[name, f"{row['layer_ms']:.3f}", f"{row['layer']:.2f}", f"{row['attend_ms']:.3f}", f"{row['attend']:.2f}",
              f"{row['bytes'] / 2**10:,.0f}", f"{row['traffic']:.2f}"] for name, row in rows.items()],
            ["recipe", "layer, ms", "x softmax", "attend, ms", "x softmax", "KiB read", "traffic alone"])


@torch.no_grad()
def time_run(args, machine, lengths, numbers):
    """Seconds in which a run's model reads a prompt of T tokens, and seconds of a new token after it. "memory" is a
    plain read of what a new token needs, all weights and the cache. With --rival, transformers takes turns, in the same
    precision: then also our speed relative to it."""
    model, past = load_run(args.out_dir, machine.device, {}, machine.dtype)[0], {}
    numbers |= {"out_dir": args.out_dir, "lengths": {}}

    def ours(idx, new):
        past["ours"] = model.new_cache() if new else past["ours"]
        model(idx, cache=past["ours"], last=1)

    def theirs(idx, new):
        known = None if new else past["theirs"]
        with torch.autocast(machine.device.type, enabled=False):        # all its weights are in machine.dtype
            past["theirs"] = rival(idx, past_key_values=known, use_cache=True, logits_to_keep=1).past_key_values

    def memory():
        cached = (value for layer in past["ours"] for value in layer.values() if isinstance(value, torch.Tensor))
        for tensor in (*model.parameters(), *cached):
            tensor.sum()

    cases = {"ours": ours}
    if args.rival:
        rival, cases["theirs"] = files.optional("transformers").AutoModelForCausalLM.from_pretrained(args.rival), theirs
        rival.to(machine.device, getattr(torch, machine.dtype)).eval()
    for T in lengths:
        idx = torch.randint(model.config.vocab_size, (1, T), device=machine.device)
        with machine.autocast():                # one context for all tokens, as in sample: it keeps converted weights
            prompt = machine.race({name: partial(run, idx, True) for name, run in cases.items()}, args.repeats)
            step = {name: partial(run, idx[:, :1], False) for name, run in cases.items()} | {"memory": memory}
            step = machine.race(step, 10 * args.repeats)
        row = numbers["lengths"][T] = {"prompt_s": prompt["ours"], "token_ms": 1000 * step["ours"],
                                       "memory_ms": 1000 * step["memory"], "of_memory": step["ours"] / step["memory"]}
        if args.rival:
            row |= {"prompt_speed": prompt["theirs"] / prompt["ours"], "token_speed": step["theirs"] / step["ours"]}
    yield f"{args.out_dir}, and its speed relative to transformers\n" + table(
        [[str(T), *row.values()] for T, row in numbers["lengths"].items()], ["T", *row])


def decoding_step(T, choices, heads, width, machine):
    """A decoding step of one layer with a cache of T tokens: functions that compute it as a whole and its attention
    alone, and the bytes that it reads. None if the recipe cannot be decoded."""
    torch.manual_seed(0)
    module = mixers.layer_of(GPTConfig(**choices, block_size=T + 1, vocab_size=1, n_layer=1, n_head=heads,
                                       n_embd=width * heads), 0).to(machine.device).eval()
    if not module.cached:
        return None
    x, past, calls = torch.randn(1, T, width * heads, device=machine.device), {}, []

    def keep_inputs(q, k, v, *rest, **cached):  # in place of attention
        calls.append(((q, k, v, *rest), cached))
        return v.new_zeros(1, module.heads, q.shape[2], v.shape[-1])

    if isinstance(module, Recurrent):
        module(x[:, -64:], past)                # the size of a state does not depend on the number of tokens
    module.attend = keep_inputs
    if not past:
        module(x[:, 1:], past)                  # fills the cache, without attention
    module(x[:, :1], past)                      # makes room in its buffers
    again = partial(tree_map, lambda value: value)          # copies dicts and lists; a step repeats itself on a copy
    module(x[:, :1], again(past))
    del module.attend                           # restores the method
    inputs, cached = calls[-1]

    def whole():
        module(x[:, :1], again(past))

    def attend():
        module.attend(*inputs, **again(cached))

    return whole, attend, int(module.bytes_read(*inputs, **cached))


@torch.no_grad()
def time_focus(args, machine, lengths, numbers):
    """Attention over the pairs that share a group, and full attention (Focus 2604.03260, table 6).

    Tokens are in random groups of about equal size, because only the sizes of groups change the time. The time includes
    the choice of every token's largest groups and the sorting by group, but not the router's matrix products. "pairs":
    the share of distant pairs, WINDOW or more apart, that have a group in common; None if there are no such pairs."""
    numbers |= {"heads": args.n_head, "width": WIDTH, "window": WINDOW, "lengths": {}}
    fused = machine.device.type == "cuda" and kernels.AVAILABLE

    def focus(q, k, v, shares, topk):           # a Focus layer in evaluation, after its router
        return sparse(q, k, v, Focus.memberships(shares, topk), WINDOW, WIDTH ** -0.5, fused)[0]

    for T in lengths:
        dice, dtype = torch.Generator().manual_seed(0), getattr(torch, machine.dtype)
        q, k, v = (torch.randn(1, args.n_head, T, WIDTH, generator=dice).to(machine.device, dtype) for _ in range(3))
        # the shares of groups, (1, T, groups), from which each token gets its largest groups
        shares = {groups: torch.rand(1, T, groups, generator=dice).to(machine.device) for groups, _ in CASES}
        seconds = machine.race({"full": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)} | {
            (groups, topk): partial(focus, q, k, v, shares[groups], topk) for groups, topk in CASES}, args.repeats)
        rows, cells = [], []
        for groups, topk in CASES:
            _, own, _, meet = sets_of(Focus.memberships(shares[groups], topk)[0])
            so_far = meet[:, own].cumsum(1)     # (S, T): tokens so far that share a group with a set
            late = torch.arange(min(WINDOW, T), T, device=own.device)
            pairs = (so_far[own[late], late - WINDOW].sum() / (late - WINDOW + 1).sum()).item() if len(late) else None
            rows.append({"groups": groups, "topk": topk, "ratio": seconds["full"] / seconds[groups, topk],
                         "pairs": pairs})
            paper = PRINTED[T][groups] if T in PRINTED and topk == 1 else None
            cells.append([f"{topk} of {groups}", *("-" if x is None else f"{x:.2f}" for x in (
                rows[-1]["ratio"], paper, pairs))])
        numbers["lengths"][T] = {"full": seconds["full"], "sparse": rows}
        yield (f"T={T}, {args.n_head} heads of {WIDTH}, a window of {WINDOW}: speed relative to full attention, which "
               f"takes {seconds['full'] * 1000:.1f} ms\n" + table(cells, ["groups", "speed", "paper", "pairs kept"]))


def time_live_tiles(args, machine, lengths, numbers):
    """How much time the zeros of a trained run save, on its held-out data.

    A fused kernel works on tiles of rows and keys, and skips dead tiles, in which all weights are zero. Adjacent zeros
    save time, scattered zeros save none. This counts the live tiles, and times the kernels with and without skipping.
    It needs a trained run, because training decides where the zeros are."""
    if not args.out_dir:
        raise ValueError("--live needs a trained run: name it with --out_dir=out/...")
    run = OpenedRun(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})
    numbers |= {"out_dir": args.out_dir, "tile": [LIVE_TILE, LIVE_TILE], "lengths": {}}
    inputs = []                                 # for every layer's attention: [(module, (q, k, v, x, distance))]

    def keep(layer, module, *parts):            # copies, because a layer may overwrite its inputs
        inputs.append((module, tree_map_only(torch.Tensor, torch.clone, parts)))

    for T in lengths or [run.model.config.block_size]:
        inputs.clear()
        idx, = window_batches(run.model, run.split("val"), run.machine, T, 4, 4)        # (4, T + 1)
        watch(run.model, keep, idx[:, :-1], run.machine)
        layers = numbers["lengths"][T] = [
            live_tiles(module, *parts) | {"gain": gain_of_skipping(module, machine, args.repeats, *parts)}
            for module, parts in inputs]
        every = {name: sum(counts[name] for counts in layers) for name in layers[0] if name != "gain"} | {"gain": None}
        yield f"{args.out_dir}, T={T}: tiles of {LIVE_TILE} rows and keys\n" + table(
            [[str(name), row["live_tiles"] / row["tiles"], row["live_pairs"] / row["pairs"], row["gain"]]
             for name, row in [*enumerate(layers), ("all", every)]], ["layer", "live tiles", "live pairs", "speed"])
    if not layers[0]["gain"]:
        yield "no speed: the fused kernels, which skip dead tiles, do not run here"


@torch.no_grad()
def live_tiles(module, q, k, v, x, distance=None):
    """The number of visible "tiles" and "pairs" of one layer, and of those with nonzero weights, "live_tiles" and
    "live_pairs", over all sequences and score heads."""
    counts = dict.fromkeys(("tiles", "live_tiles", "pairs", "live_pairs"), 0)
    T, keys = k.shape[2], torch.arange(k.shape[2], device=q.device)
    blocks = module.view_blocks(q, k, distance) # a block has two rows of tiles
    for (_, i), w in zip(kernels.row_blocks(q.shape[2], T, q.device), blocks, strict=True):
        w = w[..., -T:]                         # (B, H, rows, T), without an extra key's column
        seen = visible(i[:, None], keys, module.sight).expand_as(w)
        for name, cells in (("", seen), ("live_", w != 0)):
            # (B, H, tiles, rows, tiles, keys); the last tiles are padded with invisible keys and rows
            tiles = F.pad(cells, (0, -T % LIVE_TILE, 0, -len(i) % LIVE_TILE)).unflatten(-1, (-1, LIVE_TILE))
            counts[f"{name}pairs"] += cells.sum().item()
            counts[f"{name}tiles"] += tiles.unflatten(2, (-1, LIVE_TILE)).any(-1).any(3).sum().item()
    return counts


def gain_of_skipping(module, machine, repeats, q, k, v, x, distance=None):
    """The speed-up of a layer's forward and backward pass if its kernel skips dead tiles; None without a kernel."""
    if mixers.choose_kernel(module.config, q.device.type) != "triton":
        return None
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]     # backward stops here

    def call(skip):
        sight = module.sight._replace(skip_dead=skip)
        with machine.autocast():
            module.attend(*leaves, x, distance, sight).float().square().mean().backward()

    # the same kernel with and without skipping; the output is the same
    seconds = machine.race({skip: partial(call, skip) for skip in (True, False)}, repeats)
    return seconds[False] / seconds[True]


MODES = {   # {flag: (function, lengths on a CPU, lengths on a GPU, name of the file in results/ on a GPU)}
    "kernels": (time_kernels, "64,128", "1024,4096,16384", "speed"),    # on a CPU a trial in Triton's interpreter
    "focus": (time_focus, "1024,4096,16384", "1024,4096,16384,65536,262144,1048576", "speed-focus"),
    "decode": (time_decoding, "1024,4096,16384", "1024,4096,16384", ""),
    "live": (time_live_tiles, "", "", ""),                              # the run's block_size
    "": (time_training, "256,1024", "256,1024", "")}
