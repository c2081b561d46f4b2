"""speed --live: how much time the zeros of a trained run save.

A fused kernel works on tiles of rows and keys, and skips dead tiles, in which all weights are zero. Adjacent zeros save
time, scattered zeros save none. This module counts the live tiles, and times the kernels with and without skipping. It
needs a trained run, because training decides where the zeros are.
"""
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import kernels
import mixers
from axes.sight import visible
from evals.instrument import Common, OpenedRun, save_numbers, table, watch, whole_numbers, window_batches

LIVE_TILE = (kernels.BLOCK, 64)                 # rows and keys of the kernels' tiles at widths up to 128
COUNTS = ("tiles", "live_tiles", "pairs", "live_pairs")


def command(args, machine):
    """The share of live tiles of a trained run on its held-out data, and the speed-up from skipping all others."""
    if not args.out_dir:
        raise ValueError("--live needs a trained run: name it with --out_dir=out/...")
    run = OpenedRun(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})
    numbers = {"machine": str(machine), "out_dir": args.out_dir, "tile": LIVE_TILE, "lengths": {}}
    text = [f"{machine}; {args.out_dir}"]
    for T in whole_numbers(args.lengths or str(run.model.config.block_size), "lengths"):
        layers = numbers["lengths"][T] = [
            live_tiles(module, *inputs) | {"gain": gain_of_skipping(module, machine, args.repeats, *inputs)}
            for module, inputs in inputs_of_layers(run, T)]
        lines = dict(enumerate(layers))
        lines["all"] = {name: sum(counts[name] for counts in layers) for name in COUNTS} | {"gain": None}
        text.append(f"T={T}: tiles of {LIVE_TILE[0]} rows and {LIVE_TILE[1]} keys\n" + table(
            [[str(name), line["live_tiles"] / line["tiles"], line["live_pairs"] / line["pairs"], line["gain"]]
             for name, line in lines.items()], ["layer", "live tiles", "live pairs", "speed"]))
        save_numbers(args.out, numbers)
    if not any(layers[0]["gain"] for layers in numbers["lengths"].values()):
        text.append("no speed: the fused kernels, which skip dead tiles, do not run here")
    return numbers, "\n\n".join(text)


def inputs_of_layers(run, T):
    """The inputs of every layer's attention on 4 windows of T held-out tokens: [(module, (q, k, v, x, distance))]."""
    layers = []

    def keep(layer, module, *inputs):           # copies, because a layer may overwrite its inputs
        layers.append((module, tree_map_only(torch.Tensor, torch.clone, inputs)))

    rows, = window_batches(run.model, run.split("val"), run.machine, T, 4, 4, run.stride)       # (4, T + 1)
    watch(run.model, keep, rows[:, :-1], run.machine)
    return layers


@torch.no_grad()
def live_tiles(module, q, k, v, x, distance=None):
    """The number of visible tiles and pairs of one layer, and the number of those with nonzero weights: {COUNTS}, over
    all sequences and score heads."""
    counts = dict.fromkeys(COUNTS, 0)
    T, keys = k.shape[2], torch.arange(k.shape[2], device=q.device)
    blocks = module.view_blocks(q, k, distance) # one block of rows is one row of tiles
    for (_, i), w in zip(kernels.row_blocks(q.shape[2], T, q.device), blocks, strict=True):
        w = w[..., -T:]                         # (B, H, rows, T), without an extra key's column
        seen = visible(i[:, None], keys, module.sight).expand_as(w)
        for name, cells in (("", seen), ("live_", w != 0)):
            # (B, H, rows, tiles, keys of a tile); the last tile is padded with invisible keys
            tiles = F.pad(cells, (0, -T % LIVE_TILE[1])).unflatten(-1, (-1, LIVE_TILE[1]))
            counts[f"{name}pairs"] += cells.sum().item()
            counts[f"{name}tiles"] += tiles.any(-1).any(2).sum().item()
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
