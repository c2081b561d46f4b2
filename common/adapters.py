"""Adapters: train a small part of a model on top of another run's weights (--train_only).

The part is either LoRA, low-rank matrices added to attention's projections, or the weights that a mixer adds to plain
attention. This file prepares the model. common/runs.py stores an adapter and puts it back on its base run.
"""
import torch
import torch.nn as nn
from torch.nn import functional as F

from common.randomness import generator_of

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


def merged(state, path):
    """A model's weights with LoRA folded in: W + B A, in float32, replaces W, A and B. path: named in errors."""
    for name in [name for name in state if name.endswith(".lora_a")]:
        module = name.removesuffix(".lora_a")
        a, b, weight = (state.get(f"{module}.{part}") for part in ("lora_a", "lora_b", "weight"))
        if b is None or weight is None or not a.dim() == b.dim() == weight.dim() == 2 or (
                (*b.shape, *a.shape) != (len(weight), len(a), len(a), weight.shape[1])):
            raise ValueError(f"{path} does not fit its base: {module} has another shape there, or lacks a matrix")
        state = state | {f"{module}.weight": weight.float() + b.float() @ a.float()}
    return {name: value for name, value in state.items() if ".lora_" not in name}


def train_only(model, knobs):
    """Prepare a model for --train_only: replace projections of attention by LoRA layers if it is lora, and freeze all
    weights but LoRA's, or but those that the mixer of this name adds to attention.

    Raises ValueError if the mixer adds nothing."""
    part, blocks = knobs.train_only, model.transformer.h
    if part == "all":
        return
    for layer, block in enumerate(blocks):
        for name in PROJECTIONS[knobs.lora_on] if part == "lora" else ():
            generator = generator_of(knobs.seed, f"transformer.h.{layer}.attn.{name}.lora_a")
            setattr(block.attn, name, LoRA(getattr(block.attn, name), knobs.lora_rank, generator))
    for name, p in model.named_parameters():
        _, _, inside = name.partition(".attn.")                         # the parameter's name in its attention layer
        p.requires_grad_(".lora_" in inside if part == "lora" else inside in blocks[0].attn.added)
    if not num_trained(model):
        raise ValueError(f"--attn={model.config.attn} adds nothing to plain attention that --train_only={part} could "
                         f"train: use --attn={part}, or --train_only=lora")


def frozen(model):
    """Names of the parameters that are not trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def learned(model):
    """The part of a model's state_dict() that its checkpoints contain. An adapter's base has the rest."""
    kept = frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in kept}


def num_trained(model):
    """Number of parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
