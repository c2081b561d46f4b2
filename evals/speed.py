"""The speed of every recipe on this machine, and the memory of its attention; other flags time
something else.

All cases take turns in one process, for many rounds (Machine.race). Other programs on the machine
slow all of them alike, so ratios are reliable even if seconds are not. evals/everything.sh runs
what needs a GPU.

Each kind of measurement is a function, see MODES at the end. It is called as measure(args,
machine, lengths, numbers), adds its figures to the dict `numbers`, and yields a text after every
part.
"""

import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import attention
import kernels
import mixers
from axes.layer import Cache
from common import files
from common.cpp import processor
from common.flags import knob
from common.machine import Machine
from evals.instrument import (
    Common,
    OpenedRun,
    Picture,
    instead,
    recipe_names,
    table,
    table_of_lines,
    watch,
    whole_numbers,
    window_batches,
)
from evals.kernels import time_kernels
from evals.pictures import figure_of, line_panel, powers_of_two
from kernels import visible
from mixers.recurrent import Recurrent
from model import GPT, GPTConfig

WIDTH, WINDOW = 64, 128  # head dimension; keys that a row sees in any group of Focus
GROUPS = [(4, 1), (4, 2), (8, 1), (8, 2)]  # number of groups, and how many a token is in
LIVE_TILE = 64  # rows and keys of the kernels' tiles at width 64


@dataclass
class Speed(Common, Picture):
    """Flags of speed"""

    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob(
        "",
        "context lengths, separated by commas; empty: 256,1024; with "
        "--kernels, --focus or --decode 1024,4096,16384; with --live the run's "
        "block_size",
    )
    memory: str = knob(
        "4096,8192,16384",
        "measure the attention's memory at these lengths, separated by commas; empty: skip it",
    )
    dense: str = knob(
        "",
        "recipes, separated by commas, that are also computed by plain PyTorch with the weights of "
        "all rows in memory at once",
    )
    tokens: int = knob(
        0, "tokens of a training step, or of a call of a kernel; 0: 2048; with --kernels 16384"
    )
    n_layer: int = knob(4, "blocks of the timed model", least=1)
    n_head: int = knob(2, "heads of the timed model", least=1)
    n_embd: int = knob(
        0, "width of the timed model; 0: 128; with --kernels 2048; with --decode 64 a head"
    )
    vocab_size: int = knob(257, "token ids of the timed model", least=1)
    repeats: int = knob(20, "timed rounds over all recipes; the result is the median", least=1)
    dtype: str = knob(
        "auto", "precision of matrix products", ("auto", "float32", "bfloat16", "float16")
    )
    kernels: bool = knob(False, "instead, time our fused kernels and torch's own, without a model")
    live: bool = knob(
        False,
        "instead, for a trained run (--out_dir): measure the share of tiles "
        "with nonzero weights, and the time that skipping the others saves",
    )
    focus: bool = knob(False, "instead, time the sparse form of Focus and full attention")
    decode: bool = knob(
        False,
        "instead, time a decoding step of one layer with long caches, and "
        "count the bytes of keys, values or state that it reads",
    )
    widths: str = knob("64,128", "with --kernels: head dimensions, separated by commas")
    out: str = knob("", "also save the figures as JSON in this file")

    def __post_init__(self):
        super().__post_init__()
        for name in ("lengths", "memory", "widths"):
            if getattr(self, name):
                whole_numbers(getattr(self, name), name, least=1)  # raises ValueError
        for name in ("png", "dense"):
            if getattr(self, name) and (mode := mode_of(self)):
                raise ValueError(f"--{name} is for training steps: leave out --{mode}, or --{name}")
        for name in recipe_names(self.dense) if self.dense else []:
            if not mixers.MIXERS[mixer := GPTConfig(attn=name).mixer].in_blocks:
                raise ValueError(
                    f"--dense={self.dense}: {name} (mixer {mixer}) never has the weights of all "
                    f"rows in memory: leave out {name}"
                )


def command(args, run):
    """Time training steps of every recipe, and its attention alone, relative to softmax in torch's
    own fused kernel. All recipes take turns in one process."""
    measure, usual = MODES[mode_of(args)]
    lengths = args.lengths or usual
    lengths = whole_numbers(lengths, "lengths") if lengths else []
    machine = Machine(args.device, args.dtype)
    triton = kernels.triton.__version__ if kernels.AVAILABLE else None
    chip = processor().partition("\n")[0].partition(": ")[2] or processor()
    numbers = {"machine": str(machine), "processor": chip, "triton": triton}
    text = [f"{machine}, triton {triton}, {chip}"]
    for part in measure(args, machine, lengths, numbers):
        text.append(part)
        if args.out:  # after every part: the next one may need too much memory
            files.write_json(args.out, numbers)
    if args.png:
        draw(args.png, numbers)
    return numbers, "\n\n".join(text)


def mode_of(args):
    """The flag that says what is timed; empty: training steps."""
    return next(flag for flag in MODES if not flag or getattr(args, flag))


def time_training(args, machine, lengths, numbers):
    """Training steps of whole models, their attention alone, and its memory. Every length has the
    same number of tokens in a step."""
    # first nanoGPT's model, to which the others are compared; softmax by torch's own fused kernel
    # and by the block loop, which computes recipes without a kernel
    cases = {
        "nanoGPT": {"attn": "softmax", "kernel": "sdpa", "pos": "learned"},
        "softmax (sdpa)": {"attn": "softmax", "kernel": "sdpa"},
        "softmax (torch)": {"attn": "softmax", "kernel": "torch"},
    }
    cases |= {name: {"attn": name} for name in recipe_names(args.attn)}
    dense = {}  # the cases whose weights are all in memory at once
    for name in recipe_names(args.dense) if args.dense else []:
        dense[f"{name} (dense)"] = {"attn": name, "kernel": "torch"}
    cases |= dense
    numbers |= {"lengths": {}, "memory_mb": {name: {} for name in cases}}
    for T in lengths:
        batch = max(1, (args.tokens or 2048) // T)
        models = {name: make_model(case, T, args, machine) for name, case in cases.items()}
        numbers["lengths"][T] = rows = time_models(models, machine, batch, args.repeats, dense)
        yield (
            f"T={T}, {batch} sequences: training steps, and the speed relative to the first row of "
            "steps and of attention alone, forward and both ways (and its milliseconds)\n"
            + table_of_lines(rows, "recipe")
        )
    lengths = whole_numbers(args.memory, "memory") if args.memory else []
    memory = numbers["memory_mb"]
    for name, case in cases.items():
        for T in lengths:  # the model exists before the count begins
            call = attention_call(make_model(case, T, args, machine), machine, 1)
            call = all_rows_at_once(call) if name in dense else call
            memory[name][T] = machine.peak_memory(call) / 2**20
    if lengths:
        yield (
            "memory of one layer's attention without its inputs, forward and backward, "
            "one sequence (MiB), by length\n" + table_of_lines(memory, "recipe")
        )


def time_models(models, machine, batch, repeats, dense):
    """Time models {name: GPT}, those in `dense` with all rows at once. Returns {name:
    {"tokens_per_s", "step", "forward", "both", "ms"}}: tokens per second of training, then speeds
    relative to the first: of the step, of attention forward, and of attention both ways, which
    takes this many milliseconds."""
    rows = {name: {} for name in models}
    for way, make in (
        ("step", training_step),
        ("forward", partial(attention_call, backward=False)),
        ("both", attention_call),
    ):  # all models race at one kind of work
        calls = {name: make(model, machine, batch) for name, model in models.items()}
        calls |= {name: all_rows_at_once(calls[name]) for name in dense}
        seconds = machine.race(calls, repeats)
        for name, model in models.items():
            if way == "step":
                speed = batch * model.config.block_size / seconds[name]
                rows[name]["tokens_per_s"] = round(speed)
            rows[name][way] = seconds["nanoGPT"] / seconds[name]
    for name, model in models.items():
        rows[name]["ms"] = 1000 * seconds[name]  # of both ways, the last race
        with machine.autocast():
            rows[name]["kernel"] = mixers.choose_kernel(model.config, machine.device.type)
    return rows


def all_rows_at_once(call):
    """`call` with one block of all rows in the block loop."""

    def dense_call():
        usual, kernels.BLOCK = kernels.BLOCK, sys.maxsize
        try:
            call()
        finally:
            kernels.BLOCK = usual

    return dense_call


def draw(path, numbers):
    """Draw the time of attention both ways, and its memory, by length, a line for each case: figure
    4 of Threshold Differential Attention, 2601.12145."""
    lengths, memory = numbers["lengths"], numbers["memory_mb"]
    panels = {
        "attention, forward and backward (ms)": {
            name: ([*lengths], [rows[name]["ms"] for rows in lengths.values()]) for name in memory
        },
        "its memory for one sequence (MiB)": {
            name: ([*line], [*line.values()]) for name, line in memory.items()
        },
    }
    with figure_of(path, [4], [4.5] * 2) as axes:
        for ax, (title, curves) in zip(axes[0], panels.items(), strict=True):
            line_panel(ax, curves, title, "tokens")
            powers_of_two(ax.xaxis)
            ax.set_yscale("log")


def make_model(case, T, args, machine):
    return GPT(
        GPTConfig(
            **case,
            block_size=T,
            vocab_size=args.vocab_size,
            n_layer=args.n_layer,
            n_head=args.n_head,
            n_embd=args.n_embd or 128,
            bias_range=min(T, 512),
        )
    ).to(machine.device)


def training_step(model, machine, batch):
    """A function that takes one training step on random sequences. The time does not depend on the
    tokens."""
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    size = batch, model.config.block_size + 1
    rows = torch.randint(model.config.vocab_size, size, device=machine.device)

    def take_step():
        with machine.autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # as in train.py: gradients need no memory for long

    return take_step


def attention_call(model, machine, batch, backward=True):
    """A function that runs the first layer's attention alone, between the projections, forward or
    both ways."""
    module = model.transformer.h[0].attn
    T = model.config.block_size
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype)}
    # (B, heads, T, width), with the memory layout of a projection
    q, k, v = (
        torch.randn(batch, T, heads, width, **like).transpose(1, 2).requires_grad_(backward)
        for heads, width in module.shapes.values()
    )
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)  # the input of gates
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))  # the gradient of the output

    def attend():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, module.distance())
        if backward:
            o.backward(do)

    return attend


@torch.no_grad()
def time_decoding(args, machine, lengths, numbers):
    """One decoding step of every recipe that can be decoded, and the bytes of its cache that it
    reads.

    A step computes the output of one layer for one new token, given a cache of T tokens. The layer
    has random weights and reads random tokens, so scores are almost even: `magicpig` finds a few
    percent of all keys, whatever their number. The whole step (`layer`) appends the new token to
    the cache, whose buffers have room for it. The attention alone (`attend`) gets queries, keys,
    values and, for token selection, the index. Decoding on a large machine waits for memory, so
    the bytes that a step must read tell how fast it could be."""
    names = list(attention.ATTENTIONS) if args.attn == "all" else recipe_names(args.attn)
    cases = {name: {"attn": name} for name in ("softmax", *names)}
    if "focus" in names:
        cases["focus (1 of 4 groups)"] = {"attn": "focus", "topk": 1}
    width = args.n_embd // args.n_head or WIDTH
    numbers |= {"heads": args.n_head, "width": width, "lengths": {}}
    for T in lengths:
        layers, attends, size = {}, {}, {}  # by name of the case
        with machine.autocast():
            for name, choices in cases.items():
                if step := decoding_step(T, choices, args.n_head, width, machine):
                    layers[name], attends[name], size[name] = step
            layer = machine.race(layers, args.repeats)
            attend = machine.race(attends, args.repeats)
        rows = numbers["lengths"][T] = {}
        for name in layer:
            rows[name] = {
                "layer_ms": 1000 * layer[name],
                "layer": layer["softmax"] / layer[name],
                "attend": attend["softmax"] / attend[name],
                "bytes": size[name],
            }
        yield (
            f"one layer, {args.n_head} heads of {width}, {T} tokens in the cache: speed over that "
            "of softmax, and bytes read\n" + table_of_lines(rows, "recipe")
        )


def decoding_step(T, choices, heads, width, machine):
    """A decoding step of one layer with a cache of T tokens: functions that compute it as a whole
    and its attention alone, and the bytes that it reads. None if the recipe cannot be decoded."""
    torch.manual_seed(0)
    config = GPTConfig(
        **choices, block_size=T + 1, vocab_size=1, n_layer=1, n_head=heads, n_embd=width * heads
    )
    module = mixers.layer_of(config, 0).to(machine.device).eval()
    if not module.cached:
        return None
    x = torch.randn(1, T, width * heads, device=machine.device)
    cache = Cache()
    calls = []

    def keep_inputs(attend, layer, module, q, k, v, *rest, **cached):  # in place of attention
        # a cache as it is now: later steps continue it
        cached = {n: part.copy() if isinstance(part, Cache) else part for n, part in cached.items()}
        calls.append((attend, (q, k, v, *rest), cached))
        return v.new_zeros(1, module.heads, q.shape[2], v.shape[-1])

    if isinstance(module, Recurrent):
        module(x[:, -64:], cache)  # a state is as large after any number of tokens
    with instead(module, keep_inputs):
        if not cache.tokens:
            module(x[:, 1:], cache)  # fills the cache, without attention
        module(x[:, :1], cache)  # makes room in its buffers
        module(x[:, :1], cache)
    attend, inputs, cached = calls[-1]

    def layer_step():
        module(x[:, :1], cache)

    def attend_step():
        attend(*inputs, **cached)

    return layer_step, attend_step, int(module.bytes_read(*inputs, **cached))


@torch.no_grad()
def time_focus(args, machine, lengths, numbers):
    """Attention over the pairs that share a group, and full attention (Focus 2604.03260, table 6).

    Tokens are in random groups of about equal size, because only the sizes of groups change the
    time. The time includes the choice of every token's largest groups and gathering the tokens of
    each group, but not the router's matrix products."""
    C = args.n_head * WIDTH
    numbers |= {"heads": args.n_head, "width": WIDTH, "window": WINDOW, "lengths": {}}
    for T in lengths:
        dice = torch.Generator().manual_seed(0)
        dtype = getattr(torch, machine.dtype)
        qkv = torch.randn(3, 1, args.n_head, T, WIDTH, generator=dice).to(machine.device, dtype)
        x = torch.zeros(1, T, C, device=machine.device)
        cases = {"full": partial(F.scaled_dot_product_attention, *qkv, is_causal=True)}
        for groups, topk in GROUPS:
            config = GPTConfig(
                attn="focus",
                topk=topk,
                window=WINDOW,
                attn_args=f"groups={groups}",
                n_head=args.n_head,
                n_embd=C,
            )
            module = mixers.layer_of(config, 0).to(machine.device).eval()
            # the shares of groups, from which each token gets its largest groups
            shares = torch.rand(1, T, groups, generator=dice).to(machine.device)
            cases[f"{topk} of {groups}"] = partial(module.attend, *qkv, x, g=shares)
        with machine.autocast():
            seconds = machine.race(cases, args.repeats)
        full = seconds.pop("full")
        rows = {name: full / time for name, time in seconds.items()}
        numbers["lengths"][T] = {"full_ms": 1000 * full, "speed": rows}
        yield (
            f"T={T}, {args.n_head} heads of {WIDTH}, a window of {WINDOW}: speed relative to "
            f"full attention, which takes {1000 * full:.1f} ms\n"
            + table(rows.items(), ["groups", "speed"])
        )


def time_live_tiles(args, machine, lengths, numbers):
    """How much time the zeros of a trained run save, on its held-out data.

    A fused kernel works on tiles of rows and keys, and skips dead tiles, in which all weights are
    zero. Adjacent zeros save time, scattered zeros save none. This counts the live tiles, and
    times the kernels, if they run here, with and without skipping. It needs a trained run, because
    training decides where the zeros are."""
    if not args.out_dir:
        raise ValueError("--live needs a trained run: name it with --out_dir=out/...")
    run = OpenedRun(args, {})
    numbers |= {"out_dir": args.out_dir, "tile": [LIVE_TILE, LIVE_TILE], "lengths": {}}
    inputs = []  # of every layer: (module, (q, k, v, x, distance))

    def keep(layer, module, *parts):  # copies, because a layer may overwrite its inputs
        inputs.append((module, tree_map_only(torch.Tensor, torch.clone, parts)))

    for T in lengths or [run.model.config.block_size]:
        inputs.clear()
        (idx,) = window_batches(run.model, run.split("val"), run.machine, T, 4, 4)  # (4, T + 1)
        watch(run.model, keep, idx[:, :-1], run.machine)
        rows = numbers["lengths"][T] = []
        for module, parts in inputs:
            gain = gain_of_skipping(module, machine, args.repeats, *parts)
            rows.append({"live": live_tiles(module, *parts), "gain": gain})
        yield (
            f"{args.out_dir}, T={T}: live share of tiles of {LIVE_TILE} rows and keys, and the "
            "speed-up if the kernel skips the others\n"
            + table_of_lines(dict(enumerate(rows)), "layer")
        )


@torch.no_grad()
def live_tiles(module, q, k, v, x, distance=None):
    """The share of a layer's visible tiles with a nonzero weight, over all sequences and score
    heads."""
    T = k.shape[2]
    keys = torch.arange(T, device=q.device)
    live = visible_tiles = 0
    blocks = module.view_blocks(q, k, distance)  # a block has two rows of tiles
    row_blocks = kernels.row_blocks(q.shape[2], T, module.mask, q.device)
    for (_, _, i), w in zip(row_blocks, blocks, strict=True):
        w = w[..., -T:]  # (B, H, rows, T), without an extra key's column
        seen = visible(i[:, None], keys, module.mask).expand_as(w)
        live += count_tiles(w != 0)
        visible_tiles += count_tiles(seen)
    return live / visible_tiles


def count_tiles(cells):
    """The number of tiles in which any of the cells (B, H, rows, T) is true."""
    rows, keys = cells.shape[2:]
    # the last tiles are padded with invisible keys and rows
    cells = F.pad(cells, (0, -keys % LIVE_TILE, 0, -rows % LIVE_TILE))
    tiles = cells.unflatten(-1, (-1, LIVE_TILE)).unflatten(2, (-1, LIVE_TILE))
    return tiles.any(-1).any(3).sum().item()  # of (B, H, tiles, rows, tiles, keys)


def gain_of_skipping(
    module,
    machine,
    repeats,
    q,  # (B, H, T, D)
    k,  # (B, Hk, T, D)
    v,  # (B, Hv, T, E)
    x,  # (B, T, C)
    distance=None,
):
    """The speed-up of a layer's forward and backward pass if its kernel skips dead tiles; None
    without a kernel."""
    if mixers.choose_kernel(module.config, q.device.type) not in ("triton", "cpp"):
        return None
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]  # backward stops here

    def call(skip):
        module.skip_dead = skip
        with machine.autocast():
            module.attend(*leaves, x, distance).float().square().mean().backward()

    # the same kernel with and without skipping; the output is the same
    seconds = machine.race({skip: partial(call, skip) for skip in (True, False)}, repeats)
    module.skip_dead = True
    return seconds[False] / seconds[True]


MODES = {  # {flag: (function, its default lengths)}
    "kernels": (time_kernels, "1024,4096,16384"),
    "focus": (time_focus, "1024,4096,16384"),
    "decode": (time_decoding, "1024,4096,16384"),
    "live": (time_live_tiles, ""),
    "": (time_training, "256,1024"),
}
