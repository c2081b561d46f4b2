"""Shards (--shard=1): every rank holds a part of each weight, gradient and optimizer state, by torch's FSDP2.

Data parallelism alone keeps all of these on every rank. With shards, the memory of a rank falls with the number of
ranks: the weights of a block are gathered just before they are needed, and freed afterwards. ckpt.pt is whole, so
instruments never see shards. Where no host can hold it, --sharded_ckpt=1 writes parts by torch.distributed.checkpoint.
This makes a ckpt.pt of them:

    python common/shards.py RUN/sharded_ckpt/STEP RUN/ckpt.pt
"""
import argparse
import copy
import pickle
import sys
import warnings
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files

# ----------------------------------------------------------------------------------------------- a model of split parts


class WithoutMatrices(TorchFunctionMode):
    """A context in which a model is built without memory for its matrices: they are on torch's meta device.

    nn.Linear and its kin allocate with torch.empty. All other tensors, such as one scalar a head, have their values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.empty:
            shape_only = torch.empty(*args, **kwargs | {"device": "meta"})
            if shape_only.dim() > 1:
                return shape_only
        return function(*args, **kwargs)


def shard(model, machine, seed):
    """Split a model, which was built WithoutMatrices, over all ranks, in place. Then draw its initial weights, which
    depend on the seed.

    Matrix products stay under autocast. FSDP's own MixedPrecisionPolicy would cast all weights of a block to 16 bits,
    and with them norms, gates, thresholds and decay rates, which autocast leaves in float32."""
    from torch.distributed.device_mesh import init_device_mesh          # these imports take a second
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    known = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    blocks = list(model.transformer.h)
    weights = [p for block in blocks for p in block.parameters()]
    # a weight that several blocks share, such as T5's table, must be gathered once for all of them
    for group in blocks if len(weights) == len(set(weights)) else [blocks]:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)               # embeddings and the last norm
    model.to_empty(device=machine.device)
    fill(model.state_dict(), known)
    model.init_weights(seed)


def is_split(x):
    """Is this a tensor of which each rank holds a part, a DTensor?"""
    return hasattr(x, "full_tensor")


def is_sharded(model):
    return hasattr(model, "unshard")


def gather(model):
    """Give every rank all weights of a sharded model, for good: it then computes without the other ranks."""
    for module in filter(is_sharded, model.modules()):
        module.set_reshard_after_forward(False)
        module.unshard()


# -------------------------------------------------------------------------------------- between whole tensors and parts


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
    """Copy whole tensors {name: value} into those of a model's state_dict(), one after another. Of a split one, each
    rank keeps its part."""
    for name, value in values.items():
        p = state[name]
        p.copy_(part_of(value, p) if is_split(p) else value)


def draw(p, std, generator):
    """Fill a parameter with values from N(0, std). Each part of a split one has the values that the whole would have.
    """
    if is_split(p):
        return p.copy_(part_of(torch.empty(p.shape).normal_(0.0, std, generator=generator), p))
    return p.normal_(0.0, std, generator=generator)


def load_optimizer(optimizer, state):
    """optimizer.load_state_dict for the state of a checkpoint, which is whole, and weights that may be split. Settings
    such as betas stay those of the run's knobs. Raises ValueError if the state is not that of AdamW for these weights,
    since torch would overwrite memory."""
    weights = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    groups = optimizer.state_dict()["param_groups"]
    try:                                        # a weight without a gradient so far has no entry
        fits = [group["params"] for group in state["param_groups"]] == [group["params"] for group in groups] and all(
            is_average(entry, weights[i].shape) for i, entry in state["state"].items())
    except (TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ValueError("the checkpoint's optimizer state does not fit the model: it is damaged. Start a new run from "
                         "its weights: name its folder with --init_from and another one with --out_dir")

    def as_its_weight(p, value):                # AdamW's averages are split, its count of steps is not
        return part_of(value, p).clone() if is_split(p) and value.shape == p.shape else value

    averages = {i: {name: as_its_weight(weights[i], value) for name, value in found.items()}
                for i, found in state["state"].items()}
    optimizer.load_state_dict({"state": averages, "param_groups": groups})


def is_average(entry, shape):
    """Is this AdamW's state of one weight of this shape: two averages, and the number of steps?"""
    shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    return entry.keys() == shapes.keys() and all(
        is_dense(value) and value.is_contiguous() and value.shape == shapes[name]
        for name, value in entry.items())


# ------------------------------------------------------------------------------------------- checkpoints in many parts


def save_parts(folder, weights, model, optimizer, scaler, step):
    """Write a checkpoint into a folder: every rank writes its parts. weights: those of the model to save.

    torch writes the folder's file .metadata last, and renames it when complete. Without it, nothing there counts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "scaler": scaler.state_dict(),
             "step": step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")         # torch warns of a single rank
        try:
            dcp.save(state, checkpoint_id=folder)
        except dcp.CheckpointException as e:    # it is no Exception. It contains the errors of the ranks
            error = next(iter(e.failures.values()))[0]
            raise OSError(str(error) or repr(error)) from None


def load_parts(folder, weights, model, optimizer, scaler):
    """Load what save_parts wrote, with any number of ranks, into weights, optimizer and scaler. Returns the step.
    Settings such as betas stay those of the run's knobs. Raises ValueError if the parts are damaged or do not fit."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0}
    groups = copy.deepcopy(state["optimizer"]["param_groups"])

    def wanted(metadata):
        in_float16 = "scaler.scale" in metadata.state_dict_metadata     # the run has trained in float16
        return state | ({"scaler": scaler.state_dict()} if in_float16 else {})

    state = read_parts(folder, wanted)          # each rank reads its parts, into these tensors
    numbers = {"step": state["step"]} | state.get("scaler", {})
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers.values()):
        raise unreadable(folder, f"it holds {numbers}")
    set_optimizer_state_dict(model, optimizer, state["optimizer"] | {"param_groups": groups})
    scaler.load_state_dict(scaler.state_dict() | state.get("scaler", {}))
    return state["step"]


def join_parts(folder, path):
    """Write a ckpt.pt of the parts in a folder. torch's own dcp_to_torch would execute code that it finds in them."""
    from torch.distributed.checkpoint._nested_dict import set_element
    places = {}                                 # {"model.lm_head.weight": ("model", "lm_head.weight")}

    def wanted(metadata):
        places.update(metadata.planner_data)
        tensors = {name: about for name, about in metadata.state_dict_metadata.items() if hasattr(about, "size")}
        return dict.fromkeys(places) | {name: torch.empty(about.size, dtype=about.properties.dtype)
                                        for name, about in tensors.items()}

    state = {"scaler": {}}                      # torch stores nothing of an empty dict
    for name, value in read_parts(folder, wanted).items():
        set_element(state, places[name], value)
    # the parts name the weights, and an optimizer counts them
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    for group in state["optimizer"]["param_groups"]:
        group["params"] = [number[name] for name in group["params"]]
    state["optimizer"]["state"] = {number[name]: entry for name, entry in state["optimizer"]["state"].items()}
    with files.replacing(path) as f:
        torch.save(state, f)


# what a .metadata consists of, besides numbers, texts and containers
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


def read_parts(folder, wanted):
    """Read a checkpoint in parts without executing code in it. wanted: a function of its metadata, which returns the
    dict to fill. Returns this dict. Raises ValueError if the parts are damaged or do not fit the dict."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self):
            with open(files.regular(folder / ".metadata"), "rb") as f:
                metadata = MetadataUnpickler(f).load()
            for name in {place.relative_path for place in metadata.storage_data.values()}:
                if Path(name).name != name:
                    raise ValueError(f"its part {name} is in another folder")
                files.regular(folder / name)
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):                         # of all that is no tensor
            *inside, last = self.mappings[read_item.dest_index.fqn]
            part = self.original_state_dict
            for key in inside:
                part = part[key]
            part[last] = torch.load(value, weights_only=True)           # torch's own planner executes code here

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")         # torch warns of a single rank
        try:
            reader = Reader(folder)
            state = wanted(reader.read_metadata())
            dcp.load(state, storage_reader=reader, planner=Planner())
        except (Exception, dcp.CheckpointException) as e:               # the latter is no Exception
            raise unreadable(folder, repr(next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException)
                                          else e)) from None
    return state


def unreadable(folder, why):
    """The ValueError for damaged parts."""
    return ValueError(f"{folder} is no readable checkpoint ({why.splitlines()[0]}): restore it, or delete it and start "
                      "again")


def is_complete(folder):
    """Did save_parts finish in this folder?"""
    return (folder / ".metadata").exists()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a ckpt.pt of a checkpoint in parts.", allow_abbrev=False)
    parser.add_argument("parts", type=Path, help="RUN/sharded_ckpt/STEP")
    parser.add_argument("checkpoint", type=Path, help="RUN/ckpt.pt")
    args = parser.parse_args()
    with files.one_line_errors():
        join_parts(args.parts, args.checkpoint)
