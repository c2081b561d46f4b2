"""Tensors that are split over the ranks (--shard=1), and checkpoints in parts (--sharded_ckpt=1).

ckpt.pt is whole, so instruments never see parts. Where no host can hold it, torch.distributed.checkpoint writes parts.
This makes a ckpt.pt of them:

    python common/shards.py RUN/sharded_ckpt/STEP RUN/ckpt.pt
"""
import argparse
import copy
import pickle
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files


def is_split(x):
    """Is this a DTensor, a tensor that is split over the ranks?"""
    return hasattr(x, "full_tensor")


def whole(x, keep=True):
    """A tensor, or a dict or list of them, without shards. Every rank must call it, since each gives its part. keep: a
    rank that does not need the result gets None for what was split."""
    if isinstance(x, dict):
        return {name: whole(part, keep) for name, part in x.items()}
    if isinstance(x, list):
        return [whole(part, keep) for part in x]
    if not is_split(x):
        return x
    x = x.full_tensor()                         # one at a time, and to the CPU: no device holds all of them
    return x.cpu() if keep else None


def is_dense(x):
    """Is this an ordinary tensor of real numbers, each of which is stored? A file can also hold sparse, quantized and
    nested tensors, tensors without data, and large ones that repeat a few numbers."""
    return (type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_nested
            and x.device.type == "cpu" and x.is_floating_point()
            and x.untyped_storage().nbytes() >= x.numel() * x.element_size())


def part_of(value, p):
    """This rank's part of a whole tensor, which is split as p is. No rank sends anything: each has the whole tensor."""
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


@torch.no_grad()
def fill(state, values):
    """Copy whole tensors {name: value} into those of a model's state_dict(), one after another. If a tensor is split,
    each rank keeps its part."""
    for name, value in values.items():
        p = state[name]
        p.copy_(part_of(value, p) if is_split(p) else value)


def generator_of(seed, name):
    """A generator for the initial values of one tensor, independent of the model's other tensors."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def draw(p, std, generator):
    """Fill a parameter from N(0, std). Each part of a split one has the values that the whole would have."""
    if is_split(p):
        return p.copy_(part_of(torch.empty(p.shape).normal_(0.0, std, generator=generator), p))
    return p.normal_(0.0, std, generator=generator)


def load_optimizer(optimizer, state):
    """optimizer.load_state_dict for the state of a checkpoint, which is whole, and weights that may be split. Settings
    such as betas stay those of the run's knobs. Raises ValueError if the state is not that of this optimizer for these
    weights, since torch would overwrite memory."""
    weights = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    groups, averages = optimizer.state_dict()["param_groups"], {}
    try:
        fits = [group["params"] for group in state["param_groups"]] == [group["params"] for group in groups]
        for i, entry in state["state"].items():                         # a weight without a gradient so far has none
            p = weights[i]
            shapes = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}
            fits = fits and entry.keys() == shapes.keys() and all(
                is_dense(x) and x.is_contiguous() and x.shape == shapes[name] for name, x in entry.items())
            if not fits:
                break
            averages[i] = {name: part_of(x, p).clone() if is_split(p) and name != "step" else x
                           for name, x in entry.items()}
    except (TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ValueError("the checkpoint's optimizer state does not fit the model: it is damaged. Start a new run from "
                         "its weights: name its folder with --init_from and another one with --out_dir")
    optimizer.load_state_dict({"state": averages, "param_groups": groups})


def save_parts(folder, weights, model, optimizer, scaler, step):
    """Write a checkpoint into a folder: every rank writes its parts. weights: those of the model to save.

    torch writes the folder's file .metadata last, and renames it when complete. A folder without it counts as empty."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "scaler": scaler.state_dict(),
             "step": step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")         # torch warns of a single rank
        try:
            dcp.save(state, checkpoint_id=folder)
        except dcp.CheckpointException as e:    # not an Exception. It contains the ranks' errors
            error = next(iter(e.failures.values()))[0]
            raise OSError(str(error) or repr(error)) from None


def load_parts(folder, weights, model, optimizer, scaler):
    """Load what save_parts wrote, with any number of ranks, into weights, optimizer and scaler. Returns the step.
    Settings such as betas stay those of the run's knobs. Raises ValueError if the parts are damaged or do not fit."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    averages = get_optimizer_state_dict(model, optimizer)
    groups = copy.deepcopy(averages["param_groups"])
    state = read_parts(folder, {                # each rank reads its parts, into these tensors
        "model": weights, "optimizer": averages, "step": 0, "scaler": scaler.state_dict()})
    set_optimizer_state_dict(model, optimizer, state["optimizer"] | {"param_groups": groups})
    scaler.load_state_dict(scaler.state_dict() | state.get("scaler", {}))
    return state["step"]


def join_parts(folder, path):
    """Write a ckpt.pt of the parts in a folder. torch's own dcp_to_torch would execute code that it finds in them."""
    state = {"scaler": {}} | read_parts(folder)                         # torch does not store an empty dict
    # the parts identify weights by name, but an optimizer does so by number
    groups = state["optimizer"]["param_groups"]
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    for group in groups:
        group["params"] = [number[name] for name in group["params"]]
    state["optimizer"]["state"] = {number[name]: entry for name, entry in state["optimizer"]["state"].items()}
    with files.replacing(path) as f:
        torch.save(state, f)


# what a .metadata consists of, in addition to numbers, texts and containers
OF_METADATA = {"torch": ("Size",), "torch.serialization": ("_get_layout",), "pathlib": ("PosixPath",),
               "pathlib._local": ("PosixPath",), "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
               "torch.distributed.checkpoint.metadata": (
                   "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                   "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles a .metadata. pickle itself would execute any function that the file names."""

    def find_class(self, module, name):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in OF_METADATA.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_parts(folder, state=None):
    """Read a checkpoint in parts without executing code in it: into the tensors of a nested dict `state`, or without it
    into new ones. A "scaler" that the parts lack is left out. Returns the dict. Raises ValueError if the parts are
    damaged or do not fit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import set_element
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Planner(dcp.DefaultLoadPlanner if state else _EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item, value):                         # for entries that are not tensors
            place = self.mappings[read_item.dest_index.fqn]             # torch's own planner executes code here
            set_element(self.original_state_dict, place, torch.load(value, weights_only=True))

    try:
        with open(files.regular(folder / ".metadata"), "rb") as f:
            metadata = MetadataUnpickler(f).load()                      # torch may unpickle again what passes here
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            if Path(name).name != name:
                raise ValueError(f"its part {name} is in another folder")
            files.regular(folder / name)
        has_scaler = "scaler.scale" in metadata.state_dict_metadata     # it was trained in float16
        state = {name: part for name, part in (state or {}).items() if name != "scaler" or has_scaler}
        _load_state_dict(state, dcp.FileSystemReader(folder), planner=Planner(), no_dist=not dist.is_initialized())
        numbers = {"step": state["step"]} | state.get("scaler", {})
        if not all(isinstance(number, int | float) and number >= 0 for number in numbers.values()):
            raise ValueError(f"it holds {numbers}")
    except (Exception, dcp.CheckpointException) as e:                   # the latter is not an Exception
        cause = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
        raise ValueError(f"{folder} is not a readable checkpoint ({repr(cause).splitlines()[0]}): restore it, or "
                         "delete it and start again") from None
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a ckpt.pt of a checkpoint in parts.", allow_abbrev=False)
    parser.add_argument("parts", type=Path, help="RUN/sharded_ckpt/STEP")
    parser.add_argument("checkpoint", type=Path, help="RUN/ckpt.pt")
    args = parser.parse_args()
    with files.one_line_errors():
        join_parts(args.parts, args.checkpoint)
