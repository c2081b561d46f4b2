"""speed --tune: choose the tiles of our kernels by timing them on this GPU.

The tables in kernels.py and mixers/recurrent_kernels.py hold tiles that compile without spills. Which tile is fast can
only be measured. Each choice starts from the table's tile and tries its neighbours: one side doubled or halved, other
warps or stages. A neighbour that does not run, or whose result differs by more than rounding, is left out. The others
take turns in one race, in which the table's tile runs twice. The difference between its two times is the noise. A
neighbour wins if it gains more than the noise and more than 1 %, and runs in all calls of its row. For a backward
kernel, the whole backward pass that contains it is timed.

Every choice is saved in results/tiles-<gpu>.json at once (see common/tiles.py). A choice that fails, because even the
table's tile does not run here, is noted with its error. A second call goes on with the choices that are left.
"""
import dataclasses
import itertools
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

import kernels
from common import files
from common.machine import Machine, gpu_name
from common.tiles import CHOSEN, file_of_tiles, record_of_tiles, tile_name, tiles_of
from evals import compile
from evals.instrument import progress, save_numbers, table, whole_numbers
from evals.kernels import row_inputs, with_sizes
from mixers import recurrent_kernels

MINUTES = 5                                     # the default budget
MARGIN = 0.01                                   # the least gain that counts, even if the noise is smaller
SHORT = 256                                     # tokens of the calls in which a winner must run, besides the timed one
# Kernels of a row of tiles are timed in the call of most users: {row: {column: call}}. "": all other columns
TIMED = {"plain": {"forward with U": "elastic", "": "softmax"}, "heavy": {"forward": "lssar", "": "entmax"},
         "mix": {"": "tra+mix"}, "states": {"": "gated_deltanet"}, "states+channels": {"": "gla"}}
# the most useful first
ROWS = ("plain", "states", "plain+busy", "heavy", "mix", "heavy+busy", "mix+busy", "states+channels")
clock = time.monotonic                          # tests replace it


class Choice(NamedTuple):
    """One tile to choose."""
    column: str                                 # of kernels.COLUMNS, or "state": all kernels of a state together
    row: str                                    # a group of evals/compile.py's CALLS
    width: int
    dtype: torch.dtype

    @property
    def name(self):
        return tile_name(self.column, self.row, self.width, self.dtype)

    @property
    def call(self):
        """The timed call: a name of evals/compile.py."""
        kind, busy, _ = self.row.partition("+busy")
        calls = TIMED[kind]
        return calls.get(self.column, calls[""]) + busy

    def present(self, device):
        """The table's tile."""
        tiles = recurrent_kernels.tiles_of_table if self.column == "state" else partial(
            kernels.tile_of_tables, self.column)
        return tiles(self.row, self.width, self.dtype, device)


def command(args, run):
    """Time tiles of our kernels on this GPU, and write the fastest to a file. From then on the kernels read
    results/tiles-<gpu>.json, which is this file unless --out names another."""
    machine = Machine(args.device, args.dtype)
    q = torch.empty(1, dtype=getattr(torch, machine.dtype), device=machine.device)
    for bad, why in kernels.problems_anywhere(q, q, q):
        if bad:
            raise ValueError(why)
    gpu, path = machine.device.type == "cuda", file_to_write(args, machine)
    args = with_sizes(dataclasses.replace(args, out=path, lengths=args.lengths or "4096" * gpu), machine)
    record = {"machine": str(machine)} | record_of_tiles(machine.device) | earlier_choices(path, machine)
    CHOSEN[record["gpu"]] = tiles = record["tiles"]     # from now on the kernels take what is put here
    record["failed"] = failed = {}
    left, end = [], clock() + 60 * (args.minutes or MINUTES)
    for choice in progress(list(all_choices(args, machine)), True):
        if choice.name in tiles:
            continue
        if clock() > end:
            left.append(choice.name)
            continue
        try:
            record["choices"][choice.name] = choose(choice, args, machine, tiles)
        except Exception as e:                  # see what_is_wrong; here even the table's tile fails
            failed[choice.name] = reason(e)
        save_numbers(path, record)
    return record | {"left": left}, text_of(record, left, path)


def file_to_write(args, machine):
    """The file of --out, or else the file that the kernels of this GPU read. "": without a GPU nothing is saved."""
    gpu = machine.device.type == "cuda"
    return args.out or (str(file_of_tiles(gpu_name(machine.device))) if gpu else "")


def earlier_choices(path, machine):
    """The entries "tiles" and "choices" of the file, empty if there is none or another Triton made it."""
    stored = files.read_json(path) if path and Path(path).exists() else None
    tiles = {} if stored is None else tiles_of(stored, gpu_name(machine.device), Path(path))
    choices = stored.get("choices", {}) if tiles else {}
    return {"tiles": tiles, "choices": {name: choices[name] for name in tiles if name in choices}}


def all_choices(args, machine):
    """Every kernel of every row, width and precision that this machine computes, the most useful first."""
    widths = whole_numbers(args.widths, "widths")
    if max(widths) > 256:
        raise ValueError(f"--widths={args.widths}: the kernels have tiles for head dimensions up to 256: "
                         "give smaller --widths")
    dtypes = [getattr(torch, machine.dtype)]
    if args.dtype == "auto" and machine.dtype != "float32":
        dtypes.append(torch.float32)
    for dtype, width, row in itertools.product(dtypes, widths, ROWS):
        columns = ["state"] if row.startswith("states") else list(kernels.COLUMNS)
        if row.startswith("mix"):               # rules with a second view save no U
            columns.remove("forward with U")
        if not row.endswith("+busy") and "state" not in columns:        # without a distance table
            columns.remove("backward_table")
        padded = max(64, kernels.padded(width))
        if row.startswith("mix") and dtype == torch.float32 and padded > 128:
            continue                            # no tile holds two views of such heads
        yield from (Choice(column, row, padded, dtype) for column in columns)


# ------------------------------------------------------------------------------------------------------- one choice


def choose(choice, args, machine, tiles):
    """{"tile": the chosen one, "table": the table's, "gain": its time / the chosen tile's, "noise", "milliseconds" of
    each tile, "left_out": {tile: reason}}. tiles: the dict from which the kernels take their tiles."""
    T = max(whole_numbers(args.lengths, "lengths"))
    run, present = work(choice, choice.call, T, args, machine), choice.present(machine.device)

    def run_with(tile, run=run):
        tiles[choice.name] = tile
        return run()

    try:
        expected, nearby = run_with(present), neighbours(choice.column, present)
        left_out = {tile: what_is_wrong(partial(run_with, tile), expected) for tile in nearby}
        able = [present, *(tile for tile in nearby if not left_out[tile])]
        seconds = machine.race({tile: partial(run_with, tile) for tile in able} | {"again": partial(run_with, present)},
                               args.repeats)
        again = seconds.pop("again")
        noise = max(MARGIN * again, abs(seconds[present] - again))
        limit = min(seconds[present], again) - noise
        everywhere = partial(runs_everywhere, choice, run_with, min(T, SHORT), args, machine)
        faster = (tile for tile in sorted(able, key=seconds.get) if seconds[tile] < limit and everywhere(tile))
        winner = next(faster, present)
    finally:
        tiles.pop(choice.name, None)
    tiles[choice.name] = winner
    return {"tile": winner, "table": present, "gain": seconds[present] / seconds[winner], "noise": noise / again,
            "milliseconds": {shown(tile): 1000 * seconds[tile] for tile in able},
            "left_out": {shown(tile): why for tile, why in left_out.items() if why}}


def shown(tile):
    return "x".join(map(str, tile))


def neighbours(column, tile):
    """The tiles that differ from this one in one step, a list."""
    def times(*factors):
        return tuple(int(number * factor) for number, factor in zip(tile, factors, strict=True))

    twice, half = 2, 0.5
    if column == "state":                       # four sides
        found = [times(*(factor if i == side else 1 for i in range(4)))
                 for side in range(4) for factor in (twice, half)]
        return [t for t in found if 16 <= min(t) and max(t) <= 128]
    if column == "backward_table":              # square
        found = [times(twice, twice, 1, 1), times(half, half, 1, 1)]
    else:
        found = [times(twice, 1, 1, 1), times(half, 1, 1, 1), times(1, twice, 1, 1), times(1, half, 1, 1),
                 times(twice, half, 1, 1), times(half, twice, 1, 1)]
    found += [times(1, 1, twice, 1), times(1, 1, half, 1)]
    found += [(*tile[:3], tile[3] + more) for more in (1, -1)]
    return [t for t in found if 16 <= min(t[:2]) and max(t[:2]) <= 128 and 1 <= t[2] <= 16 and 1 <= t[3] <= 4]


def what_is_wrong(run, expected):
    """Why a tile cannot be used: it does not run, or its result differs by more than rounding. None if it can."""
    try:
        error = largest_error(run(), expected)
    except Exception as e:                      # which error a tile that does not fit raises depends on Triton
        return reason(e)
    return None if error <= rounding(expected[0].dtype) else f"another result: relative error {error:.2g}"


def reason(error):
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def largest_error(found, expected):
    """The largest relative error of these tensors: the norm of the difference, divided by the expected norm."""
    return max(((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
               for a, b in zip(found, expected, strict=True))


def rounding(dtype):
    """The relative error that rounding may cause."""
    return max(8 * torch.finfo(dtype).eps, 1e-5)


def runs_everywhere(choice, run_with, T, args, machine, tile):
    """Does a tile run in every call that takes its tile from this row? Calls with other rules than the timed one may
    need more registers and more shared memory."""
    for call in compile.CALLS[choice.row]:
        saves_u = choice.column != "state" and kernels.named(compile.ATTENTION[call][0]).save_u
        if choice.column == "forward with U" and not saves_u:
            continue
        try:
            with torch.set_grad_enabled(not (choice.column == "forward" and saves_u)):      # without gradients no U
                run_with(tile, work(choice, call, T, args, machine))
            machine.finish()                    # an error on the device counts for this tile, not for the next choice
        except Exception:                       # see what_is_wrong
            return False
    return True


# ------------------------------------------------------------------------------------------------- the timed calls


def work(choice, call, T, args, machine):
    """A function that runs the kernel of a choice in this call, and returns a tuple of tensors: the output of a forward
    kernel, the gradients of a backward kernel, both for a state."""
    batch, heads = max(1, args.tokens // T), max(2, args.n_embd // choice.width)
    like = {"device": machine.device, "dtype": choice.dtype}
    q, k, v, do = (torch.randn(batch, heads, T, choice.width, **like) for _ in range(4))
    if choice.column == "state":
        return state_call(call, q, k, v, do)
    attend, leaves = attention_call(call, q, k, v)
    if choice.column.startswith("forward"):
        return lambda: (attend(),)
    o = attend()                                # the graph is kept, so the backward pass is timed alone
    do = do[:, :o.shape[1]]                     # two views share an output
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def attention_call(call, q, k, v):
    """(function that returns the output, tensors that get gradients) of a call in evals/compile.py's ATTENTION."""
    (rule, more), (B, H, T, width) = compile.ATTENTION[call], q.shape
    options = {"scale": width ** -0.5}
    t = row_inputs(q).get(rule, 2.0 * torch.ones(T, device=q.device)) if kernels.named(rule).takes_t else None
    if "+mix" in more:
        v, options["mix"] = v[:, 0::2], q.new_tensor(0.5)
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    if "+busy" in more:
        biases = {"table": (H, 512), "tail": (H,), "slope": (H,)}
        biases = {name: 0.01 * torch.randn(shape, device=q.device) for name, shape in biases.items()}
        options |= biases | {"window": T // 2, "first": 4, "table": biases["table"].requires_grad_()}
        leaves.append(options["table"])
    if "+sets" in more:
        options |= {"sets": torch.randint(4, (B, T), device=q.device), "window": 128}
    return lambda: kernels.attend(rule, *leaves[:3], t, **options)[0], leaves


def state_call(call, q, k, v, do):
    """A function that returns output and gradients of a call in evals/compile.py's STATES."""
    rates, erases = compile.STATES[call]
    q, k, v = (part.detach().requires_grad_() for part in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    rows = q.shape[:3]
    forget = -0.1 * torch.rand(*rows, q.shape[3] if rates == "D" else 1, device=q.device) if rates else None
    erase = torch.rand(*rows, 1, device=q.device) if erases else None

    def both():
        o = recurrent_kernels.recur(q, k, v, forget, erase)
        return o, *torch.autograd.grad(o, (q, k, v), do)
    return both


# ---------------------------------------------------------------------------------------------------------- the text


def text_of(record, left, path):
    """A table of the choices, the choices that failed, and what the budget left out."""
    rows = [[name, shown(found["table"]), shown(found["tile"]), f"{found['gain']:.2f}", f"{found['noise']:.2f}"]
            for name, found in record["choices"].items()]
    text = [f"{record['machine']}, triton {record['triton']}",
            table(rows, ["kernel", "table", "chosen", "speed of its pass", "noise"])]
    text += [f"{name} failed: {why}" for name, why in record["failed"].items()]
    if left:
        text.append(f"the budget left out {len(left)} choices, the first {left[0]}: "
                    "call it again, and it goes on with these")
    if path:
        theirs = file_of_tiles(record["gpu"])
        used = "the kernels use these tiles from now on"
        if Path(path).resolve() != theirs.resolve():
            used = f"the kernels read only {theirs}: copy it there"
        text.append(f"saved in {path}: {used}")
    return "\n\n".join(text)
