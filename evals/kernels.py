"""speed --kernels: our fused kernels beside torch's own, without a model.

TFLOP/s counts the matrix products that a rule needs, so it tells how well a kernel uses the
device. The speed relative to our softmax tells what the rule costs.
"""

import itertools
import math
from functools import cache, partial

import torch
from torch.nn import functional as F

import kernels
from evals.instrument import table, whole_numbers

COLUMNS = ("forward", "backward", "ratio")
# torch's names of its fused softmaxes; only the last one also computes in float32
RIVALS = {
    "sdpa flash": "FLASH_ATTENTION",
    "sdpa cudnn": "CUDNN_ATTENTION",
    "sdpa efficient": "EFFICIENT_ATTENTION",
}
# products of a T x T and a T x width matrix that a rule needs, (forward, backward); tda: a view's
PRODUCTS = {
    "softmax": (2, 5),
    "elastic": (4, 5),
    "entmax": (9, 5),
    "sparsemax": (9, 5),
    "lssar": (2, 5),
    "softpick": (2, 5),
    "relu": (2, 5),
    "tra": (2, 5),
    "tda": (1.5, 4),
    "sigmoid": (2, 5),
    "elu": (2, 5),
    "identity": (2, 5),
}


def time_kernels(args, machine, lengths, numbers):
    """Time the forward and the backward pass separately at every size."""
    if not kernels.AVAILABLE:
        raise ValueError(
            "--kernels needs triton and a CUDA GPU; for a trial on a CPU set "
            "TRITON_INTERPRET=1 and give --dtype=float32 --tokens=32 --n_embd=32 "
            "--lengths=32 --widths=16"
        )
    tokens, n_embd = args.tokens or 16384, args.n_embd or 2048
    numbers |= {"tokens": tokens, "sizes": {}}
    for width, T in itertools.product(whole_numbers(args.widths, "widths"), lengths):
        shape = max(1, tokens // T), max(1, n_embd // width), T, width  # always equal work
        rows = numbers["sizes"][f"width {width}, T {T}"] = time_size(shape, args.repeats, machine)
        cells = [[name, *map(row.get, COLUMNS)] for name, row in rows.items()]
        missing = [
            f"\n{name} is missing: {row['missing']}"
            for name, row in rows.items()
            if "missing" in row
        ]
        yield (
            f"width {width}, T={T}: TFLOP/s, and speed of both passes relative to our softmax\n"
            + table(cells, ["", *COLUMNS])
            + "".join(missing)
        )


def time_size(shape, repeats, machine):
    """Time every case with q, k and v of a shape. Returns {name: {"forward", "backward": TFLOP/s,
    "ratio": speed of both relative to our softmax}}, and {"missing": reason} for a case that
    cannot run here."""
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype), "requires_grad": True}
    q, k, v, do = (torch.randn(shape, **like) for _ in range(4))
    cases, forward, backward, rows = cases_of(q, k, v), {}, {}, {}
    for name, attend in cases.items():
        try:
            o = attend()
            # retain_graph: backward runs often after one forward. do is cut, since tda halves the
            # heads
            call = partial(
                torch.autograd.grad, o, (q, k, v), do[:, : o.shape[1]], retain_graph=True
            )
            call()
        except Exception as e:  # torch raises many kinds if it lacks a backend
            if name in PRODUCTS:  # ours must run
                raise
            rows[name] = {"missing": repr(e)[:200]}
        else:
            forward[name], backward[name] = attend, call
    seconds = {
        "forward": machine.race(forward, repeats),
        "backward": machine.race(backward, repeats),
    }
    both = {name: sum(times[name] for times in seconds.values()) for name in forward}
    for name in forward:
        # a product is 2 T T width operations for each head; causality needs half of them
        products = zip(seconds, PRODUCTS.get(name, PRODUCTS["softmax"]), strict=True)
        rows[name] = {
            way: n * q.numel() * q.shape[2] / seconds[way][name] / 1e12 for way, n in products
        }
        rows[name]["ratio"] = both["softmax"] / both[name]
    return rows


def cases_of(q, k, v):
    """What is timed at one size: {name: a function that returns the output}."""
    (_, heads, T, width), n = q.shape, torch.arange(1, q.shape[2] + 1, device=q.device).float()

    def sdpa(backend):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    cases = {name: partial(sdpa, backend) for name, backend in RIVALS.items()}
    if q.is_cuda:  # on a CPU FlexAttention has no backward
        from torch.nn.attention import flex_attention as flex

        torch._dynamo.reset()  # torch limits how often it compiles another size
        # the backward pass that torch compiles for dynamic sizes refuses retain_graph
        attend, make_mask = (
            torch.compile(f, dynamic=False) for f in (flex.flex_attention, flex.create_block_mask)
        )
        # not compiled, it would hold T x T pairs. Made in the first call, so it fails in this case
        # alone
        mask = cache(
            lambda: make_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device)
        )
        cases["flex"] = lambda: attend(q, k, v, block_mask=mask())
    # row inputs with the values that a layer gives
    inputs = {
        "elastic": 1 / n,
        "lssar": torch.ones_like(n),
        "tra": torch.sqrt(2 * n.log() / width),
        "sigmoid": torch.full_like(n, math.log(T)),
    }

    def ours(rule, v=v, **mix):  # [0]: the output without the row statistic
        return kernels.attend(rule, q, k, v, inputs.get(rule), scale=width**-0.5, **mix)[0]

    cases |= {rule: partial(ours, rule) for rule in PRODUCTS if rule in kernels.KERNELS}
    if heads % 2 == 0:  # half of the heads are second views; these share v
        cases["tda"] = partial(ours, "tra", v[:, 0::2], mix=q.new_tensor(0.5))
    return cases
