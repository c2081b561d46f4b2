"""Tiles of the Triton kernels that were chosen by timing on a GPU, in place of those in the tables.

`python eval.py speed --tune` times tiles and writes the fastest into results/tiles-<gpu>.json, a *record*: the names of
GPU, torch and Triton, and {name of a tile: its four numbers}. A tile decides in which order numbers are added. So a run
stores in its meta.json which tiles it used, and keeps them when it resumes.
"""
from importlib import metadata
from pathlib import Path

import torch

from common import files
from common.machine import gpu_name

try:
    TRITON = metadata.version("triton")
except metadata.PackageNotFoundError:           # the block loop has no tiles
    TRITON = None

RESULTS = Path(__file__).parent.parent / "results"
CHOSEN = {}                     # {GPU: {name of a tile: its numbers}}: what was read so far


def tile_name(column, row, width, dtype):
    """The name of a tile in a record, such as "backward_keys, plain+busy, width 64, 16 bits". The kernels of a state
    (mixers/recurrent_kernels.py) have the column "state"."""
    return f"{column}, {row}, width {width}, {8 * dtype.itemsize} bits"


@torch.compiler.assume_constant_result          # torch.compile need not trace how the file is read
def chosen_tile(device, name):
    """The tile of this name that was chosen on this GPU, or None."""
    return chosen_tiles(device).get(name)


def chosen_tiles(device):
    """The tiles chosen on this GPU, {name: numbers}; {} if nobody has chosen there. Read once. Raises ValueError if
    the file is damaged or another GPU's."""
    gpu = gpu_name(device)
    if gpu not in CHOSEN:
        path = file_of_tiles(gpu)
        CHOSEN[gpu] = tiles_of(files.read_json(path), gpu, path) if path.exists() else {}
    return CHOSEN[gpu]


def file_of_tiles(gpu):
    return RESULTS / f"tiles-{gpu}.json"


def tiles_of(record, gpu, place):
    """The tiles in a record for this GPU; {} if another Triton chose them, since this Triton may need more registers or
    shared memory for them. Raises ValueError, with the record's place, a file or a description, if the record is
    damaged or another GPU's."""
    record = record if isinstance(record, dict) else {}
    tiles, advice = record.get("tiles"), "delete it"
    if isinstance(place, Path):
        advice += " (python eval.py speed --tune writes such a file anew)"
    if not isinstance(tiles, dict) or not all(is_tile(name, tile) for name, tile in tiles.items()) or (
            not isinstance(record.get("gpu"), str)):
        raise ValueError(f"{place} does not hold tiles of kernels: {advice}")
    if record["gpu"] != gpu:
        raise ValueError(f"{place} has the tiles of {record['gpu']}, but this GPU is {gpu}: {advice}")
    return {name: tuple(tile) for name, tile in tiles.items()} if record.get("triton") == TRITON else {}


def is_tile(name, tile):
    """Could a kernel run with this tile? Sides are powers of two, from 16 on; that of backward_table is square."""
    if not isinstance(tile, (list, tuple)) or len(tile) != 4 or not all(type(n) is int and n > 0 for n in tile):
        return False
    powers = tile if name.startswith("state") else tile[:3]
    sides = tile if name.startswith("state") else tile[:2]
    square = tile[0] == tile[1] or not name.startswith("backward_table")
    return all(n & (n - 1) == 0 for n in powers) and min(sides) >= 16 and square


def record_of_tiles(device):
    """The record of the tiles in use on this GPU, as meta.json and results/tiles-<gpu>.json store it."""
    return {"gpu": gpu_name(device), "torch": torch.__version__, "triton": TRITON,
            "tiles": dict(chosen_tiles(device))}


def keep_tiles(record, meta):
    """From now on use a run's tiles, the entry "tiles" of its meta.json, on the GPU that it names. None: those of the
    GPU's file. meta: the path of meta.json, for error messages."""
    CHOSEN.clear()
    if record is not None:
        gpu = record.get("gpu") if isinstance(record, dict) else None
        tiles = tiles_of(record, gpu, f'the entry "tiles" in {meta}')   # also checks that gpu is a name
        CHOSEN[gpu] = tiles
