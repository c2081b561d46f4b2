"""kernels"""
import math
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import kernels
from common.machine import Machine
from evals.instrument import numbers, save_result, table

HERE = Path(__file__).parents[1]


def kernels_command(args):
    """The fused kernels alone, forward and backward apart, against torch's, interleaved in one process."""
    machine = Machine(args.device, args.dtype)
    gpu = machine.device.type == "cuda"         # on a CPU the kernels run in Triton's interpreter, if at all: for looking, not for timing
    args.lengths, args.tokens, args.n_embd = (given or (large if gpu else small) for given, large, small in (
        (args.lengths, "1024,4096,16384", "64,128"), (args.tokens, 16384, 128), (args.n_embd, 2048, 128)))
    if gpu and not args.out:
        args.out = str(HERE / "results" / f"speed-{torch.cuda.get_device_name().split()[-1].lower()}.json")
    result = {"machine": str(machine), "triton": kernels.triton.__version__ if kernels.AVAILABLE else None, "tokens": args.tokens, "sizes": {}}
    text, columns = [], ("forward", "backward", "forward_ratio", "backward_ratio")
    for width in numbers(args.widths):
        for T in numbers(args.lengths):
            rows = result["sizes"][f"width {width}, T {T}"] = time_kernels(T, width, args, machine)
            text.append(f"width {width}, T={T}: TFLOP/s by the products each needs, and speed against our softmax\n" + table(
                [[name, *(f"{row[c]:.2f}" if c in row else "-" for c in columns)] for name, row in rows.items()], ["", *columns]))
    if not kernels.AVAILABLE:
        text.append("our kernels did not run: they need triton and a CUDA GPU (or TRITON_INTERPRET=1 and --dtype=float32, to see that they work)")
    text += [f"{name} is missing: {row['missing']}" for name, row in rows.items() if "missing" in row]
    save_result(args, result)
    return result, f"{machine}, triton {result['triton']}\n\n" + "\n\n".join(text)


PRODUCTS = {"softmax": (2, 5), "elastic": (4, 5), "entmax": (9, 5), "sparsemax": (9, 5), "lssar": (2, 5), "softpick": (2, 5), "relu": (2, 5),
            "tra": (2, 5), "tda": (1.5, 4), "sigmoid": (2, 5), "elu": (2, 5), "identity": (2, 5)}  # tda: a view, of two in one pass


RIVALS = {"sdpa flash": "FLASH_ATTENTION", "sdpa cudnn": "CUDNN_ATTENTION"}


def fused_cases(q, k, v):
    """{name: (function of nothing giving the output, products forward, products backward)}: torch's fused softmaxes, then our kernels."""
    T, scale, cases = q.shape[2], q.shape[-1] ** -0.5, {}

    def torch_softmax(backend):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for name, backend in RIVALS.items():
        cases[name] = partial(torch_softmax, getattr(torch.nn.attention.SDPBackend, backend)), 2, 5
    if q.is_cuda:                               # on a CPU FlexAttention has no backward
        from torch.nn.attention import flex_attention as flex
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device)
        compiled = torch.compile(flex.flex_attention)
        cases["flex"] = (lambda: compiled(q, k, v, block_mask=mask)), 2, 5
    if kernels.AVAILABLE:
        n = torch.arange(1, T + 1, device=q.device).float()
        row_inputs = {"elastic": 1 / n, "lssar": torch.ones_like(n), "tra": torch.sqrt(2 * n.log() / q.shape[-1]),
                      "sigmoid": torch.full_like(n, math.log(T))}
        for rule in (name for name in PRODUCTS if name in kernels.RULES):
            cases[rule] = partial(lambda rule: kernels.attend(rule, q, k, v, row_inputs.get(rule), scale=scale)[0], rule), *PRODUCTS[rule]
        if q.shape[1] % 2 == 0:                 # half of the heads are second views, of the same values
            two_views = partial(kernels.attend, "tra", q, k, v[:, 0::2], row_inputs["tra"], scale=scale, mix=q.new_tensor(0.5))
            cases["tda"] = (lambda: two_views()[0]), *PRODUCTS["tda"]
    return cases


def time_kernels(T, width, args, machine):
    """{name: {"forward": TFLOP/s, "backward": TFLOP/s, "forward_ratio": speed against our softmax, "backward_ratio": ...}} at one size."""
    batch, heads, low = max(1, args.tokens // T), max(1, args.n_embd // width), getattr(torch, machine.dtype)
    q, k, v, do = (torch.randn(batch, heads, T, width, device=machine.device, dtype=low, requires_grad=True) for _ in range(4))
    cases, outputs, missing = fused_cases(q, k, v), {}, {}
    for name, (run, *_) in cases.items():
        try:
            outputs[name] = run()
            torch.autograd.grad(outputs[name], (q, k, v), do[:, :outputs[name].shape[1]], retain_graph=True)
        except Exception as e:                  # a backend that this device or this build of torch does not have: errors of many kinds
            if name in PRODUCTS:
                raise
            missing[name] = str(e).splitlines()[0]
    cases = {name: case for name, case in cases.items() if name not in missing}
    backward = {name: partial(torch.autograd.grad, outputs[name], (q, k, v), do[:, :outputs[name].shape[1]], retain_graph=True) for name in cases}
    seconds = {"forward": machine.race({name: run for name, (run, *_) in cases.items()}, args.repeats),
               "backward": machine.race(backward, args.repeats)}
    base, rows = "softmax" if "softmax" in cases else next(iter(cases)), {name: {"missing": why} for name, why in missing.items()}
    for name, (_, *products) in cases.items():
        flops = {way: count * batch * heads * T * T * width for way, count in zip(seconds, products, strict=True)}     # 2 each, halved: causal
        rows[name] = {way: flops[way] / seconds[way][name] / 1e12 for way in seconds}
        rows[name] |= {f"{way}_ratio": seconds[way][base] / seconds[way][name] for way in seconds}
    return rows
