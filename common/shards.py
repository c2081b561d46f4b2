"""Shards (--shard=1): every rank holds a part of each weight, gradient and optimizer state, by torch's FSDP2.

Data parallelism alone keeps all of these on every rank. With shards, the memory of a rank falls with the number of
ranks: the weights of a block are gathered just before they are needed, and freed afterwards. What is written to disk is
whole again, so only train.py knows of shards.
"""
import torch


def shard(model, machine):
    """Split a model's weights over all ranks, in place."""
    from torch.distributed.device_mesh import init_device_mesh          # these imports take a second
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)               # embeddings and the last norm


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


def is_split(x):
    """Is this a tensor of which each rank holds a part, a DTensor?"""
    return hasattr(x, "full_tensor")


def load_optimizer(optimizer, state):
    """optimizer.load_state_dict for the state of a checkpoint, which is whole, and weights that may be split. Settings
    such as betas stay those of the run's knobs. Raises ValueError if the state is not that of AdamW for these weights,
    since torch would overwrite memory."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    if not fits(state, weights, groups):
        raise ValueError("the checkpoint's optimizer state does not fit the model: it is damaged. Start a new run from "
                         "its weights: name its folder with --init_from and another one with --out_dir")

    def as_its_weight(p, value):                # AdamW's averages are split, its count of steps is not
        if not is_split(p) or value.shape != p.shape:
            return value
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    averages = {i: {name: as_its_weight(weights[i], value) for name, value in found.items()}
                for i, found in state["state"].items()}
    optimizer.load_state_dict({"state": averages, "param_groups": groups})


def fits(state, weights, groups):
    """Is this AdamW's state for these weights, in these groups? A weight without a gradient so far has no entry."""
    entries, found = state.get("state"), state.get("param_groups")
    if not (isinstance(entries, dict) and isinstance(found, list) and all(isinstance(group, dict) for group in found)):
        return False
    return [group.get("params") for group in found] == [group["params"] for group in groups] and all(
        i in range(len(weights)) and is_entry(entry, weights[i].shape) for i, entry in entries.items())


def is_entry(entry, shape):
    """Is this AdamW's state of one weight of this shape: two averages, and the number of steps?"""
    shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    return isinstance(entry, dict) and entry.keys() == shapes.keys() and all(
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shapes[name]
        for name, value in entry.items())


def is_sharded(model):
    return hasattr(model, "unshard")


def gather(model):
    """Give every rank all weights of a sharded model, for good: it then computes without the other ranks."""
    for module in filter(is_sharded, model.modules()):
        module.set_reshard_after_forward(False)
        module.unshard()
