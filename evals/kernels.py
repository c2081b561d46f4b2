"""speed --kernels: our fused kernels, torch's own, and the algorithm of Triton's tutorial, without a model.

Every kernel gets two kinds of figures, for the forward and the backward pass. TFLOP/s counts the matrix products that
the rule needs, so it tells how well the kernel uses the device. The speed relative to our softmax tells what the rule
costs.
"""
import itertools
import math
from functools import cache, partial

import torch
from torch.nn import functional as F

import kernels
from evals.instrument import table, whole_numbers
from evals.plain_flash import PlainFlash

COLUMNS = ("forward", "backward", "forward_ratio", "backward_ratio", "both_ratio")
# torch's names of its fused softmaxes; only the last one also computes in float32
RIVALS = {"sdpa flash": "FLASH_ATTENTION", "sdpa cudnn": "CUDNN_ATTENTION", "sdpa efficient": "EFFICIENT_ATTENTION"}

# number of products of a T x T and a T x width matrix that a rule needs: (forward, backward); tda: those of one view
PRODUCTS = {
    "softmax": (2, 5), "elastic": (4, 5), "entmax": (9, 5), "sparsemax": (9, 5), "lssar": (2, 5), "softpick": (2, 5),
    "relu": (2, 5), "tra": (2, 5), "tda": (1.5, 4), "sigmoid": (2, 5), "elu": (2, 5), "identity": (2, 5),
}


def time_kernels(args, machine, lengths, numbers):
    """Time the forward and the backward pass separately at every size."""
    gpu = machine.device.type == "cuda"         # on a CPU our kernels run in Triton's interpreter: a trial, no timing
    tokens, n_embd = args.tokens or (16384 if gpu else 128), args.n_embd or (2048 if gpu else 128)
    numbers |= {"tokens": tokens, "sizes": {}}
    for width, T in itertools.product(whole_numbers(args.widths, "widths"), lengths):
        batch, heads = max(1, tokens // T), max(1, n_embd // width)     # equal work at all sizes
        rows = numbers["sizes"][f"width {width}, T {T}"] = time_size(batch, heads, T, width, args.repeats, machine)
        cells = [[name, *(f"{row[column]:.2f}" if column in row else "-" for column in COLUMNS)]
                 for name, row in rows.items()]
        missing = [f"\n{name} is missing: {row['missing']}" for name, row in rows.items() if "missing" in row]
        yield (f"width {width}, T={T}: TFLOP/s of the products it needs, and speed relative to our softmax\n"
               + table(cells, ["", *COLUMNS]) + "".join(missing))
    if not kernels.AVAILABLE:
        yield ("our kernels did not run: they need triton and a CUDA GPU "
               "(or TRITON_INTERPRET=1 and --dtype=float32, to see that they work)")


def cases_of(q, k, v):
    """What is timed at one size: {name: (a function that returns the output, products forward, products backward)}."""
    (_, heads, T, width), n = q.shape, torch.arange(1, q.shape[2] + 1, device=q.device).float()

    def sdpa(backend):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    cases = {name: (partial(sdpa, backend), *PRODUCTS["softmax"]) for name, backend in RIVALS.items()}
    if q.is_cuda:                               # on a CPU FlexAttention has no backward
        from torch.nn.attention import flex_attention as flex
        torch._dynamo.reset()                   # each size is compiled again, and torch limits how often it does that
        # The backward pass that torch compiles for dynamic sizes refuses retain_graph, see time_size
        attend, make_mask = (torch.compile(f, dynamic=False) for f in (flex.flex_attention, flex.create_block_mask))
        # not compiled, it would hold T x T pairs. It is made in the first call, so it fails in this case alone
        mask = cache(lambda: make_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device))
        cases["flex"] = (lambda: attend(q, k, v, block_mask=mask())), *PRODUCTS["softmax"]
    if not kernels.AVAILABLE:
        return cases
    # row inputs with the values that a layer gives
    inputs = {"elastic": 1 / n, "lssar": torch.ones_like(n), "tra": torch.sqrt(2 * n.log() / width),
              "sigmoid": torch.full_like(n, math.log(T))}

    def ours(rule, v=v, **mix):                 # [0]: the output without the row statistic
        return kernels.attend(rule, q, k, v, inputs.get(rule), scale=width ** -0.5, **mix)[0]

    cases["triton tutorial"] = partial(PlainFlash.apply, q, k, v), *PRODUCTS["softmax"]
    cases |= {rule: (partial(ours, rule), *PRODUCTS[rule]) for rule in PRODUCTS if rule in kernels.KERNELS}
    if heads % 2 == 0:                          # half of the heads are second views and share values
        cases["tda"] = partial(ours, "tra", v[:, 0::2], mix=q.new_tensor(0.5)), *PRODUCTS["tda"]
    return cases


def time_size(batch, heads, T, width, repeats, machine):
    """Time every case at one size. Returns {name: {"forward", "backward": TFLOP/s, "forward_ratio", "backward_ratio",
    "both_ratio": speed relative to our softmax}}; for a case that cannot run here, {name: {"missing": reason}}."""
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype), "requires_grad": True}
    q, k, v, do = (torch.randn(batch, heads, T, width, **like) for _ in range(4))
    cases, backward, rows = cases_of(q, k, v), {}, {}
    for name, (attend, *_) in cases.items():
        try:
            o = attend()                        # the graph is kept to time backward alone
            backward[name] = partial(torch.autograd.grad, o, (q, k, v), do[:, :o.shape[1]], retain_graph=True)
            backward[name]()                    # do is cut because tda's output has half of the heads
        except Exception as e:                  # torch raises many kinds of errors for a backend that it lacks here
            if name in PRODUCTS and not isinstance(e, torch.OutOfMemoryError):          # ours must run
                raise
            backward.pop(name, None)
            rows[name] = {"missing": (str(e) or type(e).__name__).splitlines()[0]}
    seconds = {"forward": machine.race({name: cases[name][0] for name in backward}, repeats),
               "backward": machine.race(backward, repeats)}
    both = {name: sum(times[name] for times in seconds.values()) for name in backward}
    base = "softmax" if "softmax" in backward else next(iter(backward), None)
    for name in backward:
        # a product is 2 T T width operations for each head; causality needs half of them
        operations = {way: n * batch * heads * T * T * width for way, n in zip(seconds, cases[name][1:], strict=True)}
        rows[name] = {way: operations[way] / times[name] / 1e12 for way, times in seconds.items()}
        rows[name] |= {f"{way}_ratio": times[base] / times[name] for way, times in (seconds | {"both": both}).items()}
    return rows
