"""The weights of a run: trained in part (--train_only), begun from another run's (--init_from=RUN)
or from its own last checkpoint (--init_from=resume), and split over ranks (--shard)."""

from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from common.flags import fields_of
from common.runs import (
    frozen,
    load_weights,
    on_base,
    read_checkpoint,
    read_run,
    read_weights,
    what_is_new,
)
from model import GPTConfig, generator_of

# ----------------------------------------------------------------------------------------- adapters

ATTENTION = "attn.c_attn", "attn.c_proj"
PROJECTIONS = {  # {value of --lora_on: the linear layers of a block}
    "both": ATTENTION,
    "c_attn": ATTENTION[:1],
    "c_proj": ATTENTION[1:],
    "qv": ATTENTION[:1],  # its rows for queries and values, with an A and a B each
    "all": (*ATTENTION, "mlp.c_fc", "mlp.c_gate", "mlp.c_proj"),
}


class LoRA(nn.Linear):
    """A linear layer W x + B A x. The weight W (out, in) stays; A (rank, in) and B (out, rank) are
    learned.

    B starts at 0, so the layer begins as W x. From Hu et al. 2021 (arXiv 2106.09685), section 4.1,
    which multiplies B A by alpha / rank: here alpha is the rank. generator: draws the initial A.
    parts: {first row: number of rows}, the rows of W that get an A and a B of their own. Their
    names end with the first row if it is not 0."""

    def __init__(self, linear, rank, generator, parts):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts
        for first, rows in parts.items():
            drawn = torch.randn(rank, self.in_features, generator=generator, device="cpu")
            setattr(self, f"lora_a{first or ''}", nn.Parameter(drawn * 0.02))
            setattr(self, f"lora_b{first or ''}", nn.Parameter(torch.zeros(rows, rank)))

    def forward(self, x):
        y = super().forward(x)
        for first, rows in self.parts.items():
            a, b = (getattr(self, f"lora_{part}{first or ''}") for part in "ab")
            y = y + F.pad(F.linear(F.linear(x, a), b), (first, self.out_features - first - rows))
        return y


def train_only(model, knobs):
    """Prepare a model for --train_only, on top of another run's weights: lora replaces linear
    layers by LoRA layers and freezes the rest; a mixer's name freezes all that this mixer
    does not add.

    common/runs.py stores the trained weights, an adapter, and loads them on top of the base run.
    Raises ValueError if the mixer adds nothing, or if LoRA would use biases that --bias_of turns
    off."""
    part, blocks = knobs.train_only, model.transformer.h
    if part == "all":
        return
    if part == "lora" and model.config.bias_of != "all":
        raise ValueError(
            "--train_only=lora cannot be combined with "
            f"--bias_of={model.config.bias_of}: leave out one"
        )
    names = PROJECTIONS[knobs.lora_on] if part == "lora" else ()
    for layer, block in enumerate(blocks):
        linears = {name: linear for name, linear in block.named_modules() if name in names}
        for name, linear in linears.items():
            generator = generator_of(knobs.seed, f"transformer.h.{layer}.{name}.lora_a")
            outputs = linear.out_features
            if knobs.lora_on == "qv":  # c_attn's rows are those of q, of k and of v
                q, _, v = (heads * width for heads, width in block.attn.shapes.values())
                parts = {0: q, outputs - v: v}
            else:
                parts = {0: outputs}
            block.set_submodule(name, LoRA(linear, knobs.lora_rank, generator, parts))
    for name, p in model.named_parameters():
        _, _, inside = name.partition(".attn.")  # the parameter's name in its attention layer
        added = any(inside in block.attn.added for block in blocks)
        p.requires_grad_(".lora_" in name if part == "lora" else added)
    if not num_trained(model):
        raise ValueError(
            f"--attn={model.config.attn} adds nothing to plain attention that "
            f"--train_only={part} could train: use --attn={part}, or "
            "--train_only=lora"
        )


def num_trained(model):
    """Number of parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ------------------------------------------------------------------------------------ first weights


def take_weights(model, path, run, machine):
    """Load the weights of another run. Weights that only this model's recipe has keep their initial
    values.

    Raises ValueError if `run`, the new run, would overwrite that run, or if such a weight would
    never be trained."""
    if run.checkpoint.resolve() == Path(path).resolve():
        raise ValueError(
            f"--init_from and --out_dir both name {run.folder}: name another "
            "--out_dir for the new run"
        )
    added = model.additions_to(GPTConfig(**fields_of(GPTConfig, read_run(path)[0]["knobs"])))
    if untrained := [name for name in added if name in frozen(model)]:
        raise ValueError(
            f"{untrained[0]} is not in {path}, and --train_only does not train it, so "
            "it would stay at its initial value: leave out the flags that add it"
        )
    load_weights(model, read_weights(path), path, added)
    if added and machine.main:
        print(what_is_new(added, path))


def resume(model, path, stored):
    """Load the weights of a run's own checkpoint. stored: its meta.json. Returns the checkpoint."""
    checkpoint = read_checkpoint(path)
    load_weights(model, on_base(checkpoint["model"], stored, path), path)
    return checkpoint


def load_optimizer(optimizer, stored):
    """Load the optimizer state of a checkpoint, which is whole, for weights that may be split over
    the ranks. Settings such as betas stay those of the run's knobs.

    Raises ValueError if the state is not that of these weights: a fused step would write beyond
    it."""
    groups, state = optimizer.state_dict()["param_groups"], {}
    # as torch numbers them, through all groups
    weights = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    try:
        numbers = [group["params"] for group in groups]
        fits = numbers == [group["params"] for group in stored["param_groups"]]
        for i, averages in stored["state"].items():  # without those that had no gradient so far
            p = weights[i]
            shapes = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}
            fits = fits and {name: x.shape for name, x in averages.items()} == shapes
            if fits:
                state[i] = {name: copy_like(p, x) for name, x in averages.items()}
    except (TypeError, KeyError, AttributeError, RuntimeError):  # not even dense tensors
        fits = False
    if not fits:
        raise ValueError(
            "the checkpoint's optimizer state does not fit the model: it is damaged. "
            "Start a new run from its weights: name its folder with --init_from and "
            "another one with --out_dir"
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def copy_like(p, x):
    """A copy of the tensor x, split over the ranks if the parameter p is."""
    x = torch.zeros(x.shape).copy_(x)
    if not hasattr(p, "placements") or not x.dim():  # each rank has the whole number of steps
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(p.device)
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None).clone()


# ------------------------------------------------------------------------------------------- shards


def shard(model, machine):
    """Split weights, gradients and optimizer state over all ranks, by torch's FSDP2.

    The weights of a block are gathered just before they are needed, and freed afterwards. Matrix
    products stay under autocast. FSDP's own MixedPrecisionPolicy would cast all weights of a block
    to 16 bits, also norms, gates, thresholds and decay rates, which autocast leaves in float32."""
    from torch.distributed.device_mesh import init_device_mesh  # these imports take a second
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(machine.device.type, (machine.world,))
    blocks = list(model.transformer.h)
    weights = [p for block in blocks for p in block.parameters()]
    # a weight that several blocks share, such as T5's table, must be gathered once for all of them
    for group in blocks if len(weights) == len(set(weights)) else [blocks]:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)  # embeddings and the last norm


def is_sharded(model):
    return hasattr(model, "unshard")


def gather(model):
    """Give every rank all weights of a sharded model, for good: it then computes without the other
    ranks."""
    for module in filter(is_sharded, model.modules()):
        module.set_reshard_after_forward(False)
        module.unshard()
