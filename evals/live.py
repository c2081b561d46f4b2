"""live"""
from functools import partial

import torch
from torch.nn import functional as F

import attention
from data import tokens
from evals.instrument import Common, Loaded, instead, numbers, save_result, table


LIVE_TILE = (attention.BLOCK, 64)               # rows and keys of a tile, as the kernels have them at widths up to 128


def live_command(args):
    """Of a trained run, on its held-out data: the share of tiles that hold any weight, and the gain of visiting only those."""
    if not args.out_dir:
        raise ValueError("--live looks at a trained run, never at random numbers: name it with --out_dir=out/...")
    run = Loaded(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})
    result, text = {"machine": str(run.machine), "out_dir": args.out_dir, "tile": LIVE_TILE, "lengths": {}}, []
    for T in numbers(args.lengths or str(run.model.config.block_size)):
        layers = []

        def look(attend, layer, module, *inputs, layers=layers):
            layers.append((module, [part.clone() if part is not None else None for part in inputs]))
            return attend(*inputs)

        rows = run.split("val").windows(tokens.fixed_windows(run.split("val"), T, 4, run.stride), T, run.model.config.vocab_size)
        with instead(run.model, look), run.machine.autocast(), torch.no_grad():
            run.model(torch.from_numpy(rows).to(run.machine.device))
        found = [live_tiles(module, *inputs) | {"gain": gain_of_skipping(module, run.machine, args.repeats, *inputs)} for module, inputs in layers]
        result["lengths"][T] = found
        lines = {str(layer): counts for layer, counts in enumerate(found)}
        lines["all"] = {name: sum(counts[name] for counts in found) for name in ("tiles", "live_tiles", "pairs", "live_pairs")} | {"gain": None}
        text.append(f"T={T}: tiles of {LIVE_TILE[0]} rows and {LIVE_TILE[1]} keys\n" + table(
            [[name, f["live_tiles"] / f["tiles"], f["live_pairs"] / f["pairs"], f["gain"]] for name, f in lines.items()],
            ["layer", "live tiles", "live pairs", "speed"]))
    if found[0]["gain"] is None:
        text.append("no speed: the fused kernels, which skip dead tiles, do not run here")
    save_result(args, result)
    run.machine.close()
    return result, f"{run.machine}; {args.out_dir}\n\n" + "\n\n".join(text)


@torch.no_grad()
def live_tiles(module, q, k, v, x, table=None):
    """Counts of one layer's tiles and pairs, {"tiles", "live_tiles", "pairs", "live_pairs"}: those in sight, and those with any weight."""
    counts = dict.fromkeys(("tiles", "live_tiles", "pairs", "live_pairs"), 0)
    for (_, i), w in zip(attention.row_blocks(q.shape[2], k.shape[2], q.device), module.score_blocks(q, k, table), strict=True):
        w = w[..., -k.shape[2]:]                # without an extra key's column
        seen = attention.visible(i[:, None], torch.arange(k.shape[2], device=q.device), module.view).expand_as(w)
        for name, cells in (("", seen), ("live_", w != 0)):
            counts[f"{name}pairs"] += cells.sum().item()
            counts[f"{name}tiles"] += F.pad(cells, (0, -k.shape[2] % LIVE_TILE[1])).unflatten(-1, (-1, LIVE_TILE[1])).any(-1).any(2).sum().item()
    return counts


def gain_of_skipping(module, machine, repeats, q, k, v, x, table=None):
    """How much faster this layer's attention is, both ways, if its kernel skips dead tiles; None where no kernel runs here."""
    if attention.choose_kernel(module.config, q.device.type) != "triton":
        return None
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]

    def call(skip):
        module.skip = skip
        with machine.autocast():
            module.attend(*leaves, x, table).float().square().mean().backward()
        module.skip = True

    seconds = machine.race({skip: partial(call, skip) for skip in (True, False)}, repeats)
    return seconds[False] / seconds[True]
