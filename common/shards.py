"""Shards (--shard=1): every rank holds a part of each weight, gradient and optimizer state, by torch's FSDP2.

Data parallelism alone keeps all of these on every rank. With shards, the memory of a rank falls with the number of
ranks: the weights of a block are gathered just before they are needed, and freed afterwards. ckpt.pt is whole, so
instruments never see shards. Where no host can hold it, --sharded_ckpt=1 writes parts by torch.distributed.checkpoint.
"""
import warnings

import torch
from torch.overrides import TorchFunctionMode

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
    state = by_number(state)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    if not fits(state, weights, groups):
        raise ValueError("the checkpoint's optimizer state does not fit the model: it is damaged. Start a new run from "
                         "its weights: name its folder with --init_from and another one with --out_dir")

    def as_its_weight(p, value):                # AdamW's averages are split, its count of steps is not
        return part_of(value, p).clone() if is_split(p) and value.shape == p.shape else value

    averages = {i: {name: as_its_weight(weights[i], value) for name, value in found.items()}
                for i, found in state["state"].items()}
    optimizer.load_state_dict({"state": averages, "param_groups": groups})


def fits(state, weights, groups):
    """Is this AdamW's state for these weights, in these groups? A weight without a gradient so far has no entry."""
    return has_groups(state) and (
        [group["params"] for group in state["param_groups"]] == [group["params"] for group in groups]) and all(
        i in range(len(weights)) and is_entry(entry, weights[i].shape) for i, entry in state["state"].items())


def has_groups(state):
    """Has this the form of an optimizer's state: entries, and groups that list the numbers or names of weights?"""
    groups = state.get("param_groups")
    return isinstance(state.get("state"), dict) and isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) and
        all(isinstance(name, int | str) for name in group["params"]) for group in groups)


def is_entry(entry, shape):
    """Is this AdamW's state of one weight of this shape: two averages, and the number of steps?"""
    shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    return isinstance(entry, dict) and entry.keys() == shapes.keys() and all(
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shapes[name]
        for name, value in entry.items())


def by_number(state):
    """An optimizer's state with numbers for its weights, as in torch.optim. In a ckpt.pt that was joined from parts, it
    has their names. Anything else stays as it is: `fits` refuses it."""
    if not has_groups(state):
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [group | {"params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number.get(name): value for name, value in state["state"].items()}, "param_groups": groups}


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
            raise OSError(str(next(iter(e.failures.values()))[0])) from None


def load_parts(folder, weights, model, optimizer, scaler):
    """Load what save_parts wrote, with any number of ranks, into weights, optimizer and scaler. Returns the step.
    Raises ValueError if the parts are damaged, or those of another model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if "scaler.scale" in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata:
                state["scaler"] = scaler.state_dict()                   # the run has trained in float16
            dcp.load(state, checkpoint_id=folder)                       # each rank reads its parts, into these tensors
        except (Exception, dcp.CheckpointException) as e:               # the latter is no Exception
            why = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
            raise ValueError(f"{folder} is no readable checkpoint ({repr(why).splitlines()[0]}): restore it, or delete "
                             "it and start again") from None
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    scaler.load_state_dict(scaler.state_dict() | state.get("scaler", {}))
    return state["step"]


def is_complete(folder):
    """Did save_parts finish in this folder?"""
    return (folder / ".metadata").exists()
