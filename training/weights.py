"""The weights of a run: split over ranks (--shard), trained in part (--train_only), begun from another run's
(--init_from=RUN) or from its own last checkpoint (--init_from=resume)."""
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from common.flags import fields_of
from common.runs import (find_base, frozen, last_checkpoint, learned, load_weights, on_base, read_checkpoint, read_run,
                         read_weights, what_is_new)
from common.shards import fill, generator_of, load_optimizer, load_parts
from model import GPTConfig

# ------------------------------------------------------------------------------------------------------------- shards


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
    """Split weights, gradients and optimizer state of a model, which was built WithoutMatrices, over all ranks, by
    torch's FSDP2. Then draw its initial weights, which depend on the seed.

    The weights of a block are gathered just before they are needed, and freed afterwards. Matrix products stay under
    autocast. FSDP's own MixedPrecisionPolicy would cast all weights of a block to 16 bits, and with them norms, gates,
    thresholds and decay rates, which autocast leaves in float32."""
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


def is_sharded(model):
    return hasattr(model, "unshard")


def gather(model):
    """Give every rank all weights of a sharded model, for good: it then computes without the other ranks."""
    for module in filter(is_sharded, model.modules()):
        module.set_reshard_after_forward(False)
        module.unshard()


# ----------------------------------------------------------------------------------------------------------- adapters

PROJECTIONS = {"both": ("c_attn", "c_proj"), "c_attn": ("c_attn",), "c_proj": ("c_proj",)}      # values of --lora_on


class LoRA(nn.Linear):
    """A linear layer W x + B A x. The weight W (out, in) stays; A (rank, in) and B (out, rank) are learned.

    B starts at 0, so the layer begins as W x. From Hu et al. 2021 (arXiv 2106.09685), section 4.1, which multiplies
    B A by alpha / rank: here alpha is the rank. generator: draws the initial A."""

    def __init__(self, linear, rank, generator):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = nn.Parameter(torch.randn(rank, self.in_features, generator=generator) * 0.02)
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def train_only(model, knobs):
    """Prepare a model for --train_only, on top of another run's weights: lora replaces projections of attention by LoRA
    layers and freezes the rest; a mixer's name freezes all that this mixer does not add.

    common/runs.py stores the trained weights, an adapter, and loads them on top of the base run. Raises ValueError if
    the mixer adds nothing, or if LoRA would use biases that --bias_of turns off."""
    part, blocks = knobs.train_only, model.transformer.h
    if part == "all":
        return
    if part == "lora" and model.config.bias_of != "all":
        raise ValueError(f"--train_only=lora cannot be combined with --bias_of={model.config.bias_of}: leave out one")
    for layer, block in enumerate(blocks):
        for name in PROJECTIONS[knobs.lora_on] if part == "lora" else ():
            generator = generator_of(knobs.seed, f"transformer.h.{layer}.attn.{name}.lora_a")
            setattr(block.attn, name, LoRA(getattr(block.attn, name), knobs.lora_rank, generator))
    for name, p in model.named_parameters():
        _, _, inside = name.partition(".attn.")                         # the parameter's name in its attention layer
        p.requires_grad_(".lora_" in inside if part == "lora" else any(inside in b.attn.added for b in blocks))
    if not num_trained(model):
        raise ValueError(f"--attn={model.config.attn} adds nothing to plain attention that --train_only={part} could "
                         f"train: use --attn={part}, or --train_only=lora")


def num_trained(model):
    """Number of parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ------------------------------------------------------------------------------------------------------ first weights


def take_weights(model, path, run, machine):
    """Load the weights of another run. Weights that only this model's recipe has keep their initial values.

    Raises ValueError if `run`, the new run, would overwrite that run, or if such a weight would never be trained."""
    if run.checkpoint.resolve() == Path(path).resolve():
        raise ValueError(f"--init_from and --out_dir both name {run.folder}: name another --out_dir for the new run")
    added = model.additions_to(GPTConfig(**fields_of(GPTConfig, read_run(path)[0]["knobs"])))
    if untrained := [name for name in added if name in frozen(model)]:
        raise ValueError(f"{untrained[0]} is not in {path}, and --train_only does not train it, so it would stay at "
                         "its initial value: leave out the flags that add it")
    load_weights(model, read_weights(path), path, added)
    if added and machine.main:
        print(what_is_new(added, path))


def resume(run, stored, meta, model, optimizer, scaler):
    """Load a run's own last checkpoint, if it has saved one. stored: its meta.json. meta: the new meta.json.

    Raises ValueError if the data set is not the one that the run began with."""
    if stored.get("data_hash") != meta["data_hash"]:
        raise ValueError(f"the data set {meta['knobs']['dataset']} has changed since {run.folder} began: "
                         "make it as it was, or start a new run")
    path = last_checkpoint(run.folder)
    if path is None:                            # killed before its first checkpoint: start again
        return
    if path.is_dir():                           # in parts
        if "base" in stored:
            load_weights(model, read_weights(find_base(stored, run.folder)), path, new=learned(model))
        run.saved = load_parts(path, learned(model), model, optimizer, scaler)
    else:
        checkpoint = read_checkpoint(path, mmap=is_sharded(model))      # a rank reads only its parts into memory
        load_weights(model, on_base(checkpoint["model"], stored, path), path)
        load_optimizer(optimizer, checkpoint["optimizer"])
        scaler.load_state_dict(scaler.state_dict() | checkpoint.get("scaler", {}))
        run.saved = checkpoint["step"]
    meta["losses"] = stored.get("losses", {})
