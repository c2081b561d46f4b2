"""What a training run would need, without running it (--dry_run): parameters, tokens, memory, FLOPs and hours.

Memory is counted operation by operation. A training step runs on fake tensors: they have a shape and a data type but,
like those of the meta device, no content. So a model of any size is counted in seconds, on any machine.
"""
from dataclasses import dataclass
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

import mixers
from common.flags import Knobs, knob
from common.machine import PEAK_TFLOPS, LiveMemory, Machine
from model import GPT
from training.balance import losses
from training.weights import train_only


@dataclass
class DryRun(Knobs):
    """Flags of a dry run"""
    dry_run: bool = knob(False, "print what the run would need, and stop: parameters, tokens, memory, FLOPs, hours")
    gpu: str = knob("H100", "GPU whose hours a dry run prints", tuple(PEAK_TFLOPS))
    mfu: float = knob(0.4, "share of that GPU's peak FLOP/s that a dry run expects")

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu={self.mfu} must lie in (0, 1]")


def dry_run(knobs, config, plan):
    """The text that a dry run prints. plan: a DryRun."""
    machine = Machine("cpu", "bfloat16" if knobs.dtype == "auto" else knobs.dtype)      # auto: as on a GPU
    model, memory = memory_of_a_step(knobs, config, machine)
    memory["together"] = sum(memory.values())
    split = (memory["weights"] + memory["gradients"] + memory["optimizer"]) / 8
    a_step = knobs.batch_size * knobs.gradient_accumulation_steps * config.block_size
    tokens, tflops = a_step * knobs.max_iters, PEAK_TFLOPS[plan.gpu]
    flops = model.flops_per_token() * tokens
    hours = flops / (1e12 * tflops * plan.mfu) / 3600

    def in_units(size):
        return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"

    return "\n".join([
        f"model: {model.num_params() / 1e6:.2f}M parameters, --attn={config.layers or config.attn}",
        f"tokens: {a_step:,} a step, {knobs.max_iters:,} steps, {tokens:,} in all",
        f"memory of one process, {knobs.batch_size} sequences at a time in {machine.dtype}, attention computed by "
        f"{mixers.choose_kernel(config, 'cpu', importance=knobs.head_balance > 0)}:",
        *(f"  {name:11} {in_units(size):>10}" for name, size in memory.items()),
        f"  with --shard=1 the first three take {in_units(split)} on each of 8 GPUs, besides a block or two",
        f"FLOPs: {model.flops_per_token():.3g} a token, {flops:.3g} in all",
        f"hours on {plan.gpu} ({tflops} TFLOP/s in 16 bits) at an MFU of {plan.mfu:.0%}: {hours:.3g} on 1 GPU, "
        f"{hours / 8:.3g} on 8 GPUs"])


def memory_of_a_step(knobs, config, machine):
    """The model, made of fake tensors, and {part: bytes} of one process during a training step. Their sum is its peak.

    activations: what the peak needs beyond the other parts. If a step is a single micro-batch, its gradients appear
    while activations are freed, so they share memory. Attention is counted as a CPU computes it: by torch's fused
    softmax, or by the block loop, which needs somewhat more than a Triton kernel. Not counted: evaluation, the second
    copy of the gradients if several processes exchange them, and gaps between tensors. Allocators that keep freed
    memory need up to a third more."""
    # a condition on the content of a fake tensor counts as false: entmax then runs all steps of Newton's method
    no_content = mock.patch.object(FakeTensor, "__bool__", lambda tensor: False)
    with FakeTensorMode(), no_content, LiveMemory() as memory:
        model = GPT(config, knobs.seed)
        train_only(model, knobs)
        trained = [p for p in model.parameters() if p.requires_grad]
        weights = memory.now
        if knobs.gradient_accumulation_steps > 1:                       # gradients of earlier micro-batches exist
            for p in trained:
                p.grad = torch.empty_like(p)
        x, y = torch.zeros(2, knobs.batch_size, config.block_size, dtype=torch.long)
        memory.peak = memory.now                # forget what only the initialisation needed
        try:
            with machine.autocast():
                loss, balance = losses(model, x, y, knobs, machine)
                balance = balance + model.penalty()
            (loss + balance).backward()
        except DynamicOutputShapeException:
            raise ValueError(f"--dry_run cannot count --attn={config.attn} with --mlp={config.mlp}: the shapes of some "
                             "of its tensors depend on the data; try another --attn or --mlp") from None
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return model, {"weights": weights, "gradients": gradients, "optimizer": 2 * gradients,      # AdamW's two averages
                   "activations": memory.peak - weights - gradients}
