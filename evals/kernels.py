"""speed --kernels: the fused kernels alone, without a model, against torch's own.

Two figures for each: TFLOP/s, which counts the products that the rule needs, so it says how well the kernel uses the
device; and the speed against our softmax, which says what the rule costs.
"""
import dataclasses
import math
from functools import partial

import torch
from torch.nn import functional as F

import kernels
from common.machine import Machine
from evals.instrument import file_of_gpu, save_numbers, table, whole_numbers

COLUMNS = ("forward", "backward", "forward_ratio", "backward_ratio", "both_ratio")
RIVALS = {"sdpa flash": "FLASH_ATTENTION", "sdpa cudnn": "CUDNN_ATTENTION",     # torch's names of its fused softmaxes,
          "sdpa efficient": "EFFICIENT_ATTENTION"}                      # of which this one has float32, too

# products of a T x T and a T x width matrix that each needs: (forward, backward); of tda a view, for two are one pass
PRODUCTS = {
    "softmax": (2, 5), "elastic": (4, 5), "entmax": (9, 5), "sparsemax": (9, 5), "lssar": (2, 5), "softpick": (2, 5),
    "relu": (2, 5), "tra": (2, 5), "tda": (1.5, 4), "sigmoid": (2, 5), "elu": (2, 5), "identity": (2, 5),
}


def command(args, run):
    """The fused kernels alone, forward and backward apart, against torch's, interleaved in one process."""
    machine = Machine(args.device, args.dtype)
    args = with_sizes(args, machine)
    sizes = {(width, T): time_kernels(T, width, args, machine)
             for width in whole_numbers(args.widths, "widths") for T in whole_numbers(args.lengths, "lengths")}
    triton = kernels.triton.__version__ if kernels.AVAILABLE else None
    numbers = {"machine": str(machine), "triton": triton, "tokens": args.tokens,
               "sizes": {f"width {width}, T {T}": rows for (width, T), rows in sizes.items()}}
    save_numbers(args.out, numbers)
    text = [f"{machine}, triton {triton}", *(kernels_table(*size, rows) for size, rows in sizes.items())]
    if not kernels.AVAILABLE:
        text.append("our kernels did not run: they need triton and a CUDA GPU "
                    "(or TRITON_INTERPRET=1 and --dtype=float32, to see that they work)")
    *_, last = sizes.values()                   # what is missing at one size is missing at all
    text += [f"{name} is missing: {row['missing']}" for name, row in last.items() if "missing" in row]
    return numbers, "\n\n".join(text)


def with_sizes(args, machine):
    """The flags with every size in them: what was not given is large on a GPU, and its figures are saved."""
    gpu = machine.device.type == "cuda"         # on a CPU they run in Triton's interpreter: for looking, not timing
    defaults = {"lengths": "1024,4096,16384", "tokens": 16384, "n_embd": 2048} if gpu else {
        "lengths": "64,128", "tokens": 128, "n_embd": 128}
    if gpu:
        defaults["out"] = file_of_gpu("speed")
    return dataclasses.replace(args, **{name: getattr(args, name) or default for name, default in defaults.items()})


def kernels_table(width, T, rows):
    return f"width {width}, T={T}: TFLOP/s by the products each needs, and speed against our softmax\n" + table(
        [[name, *(f"{row[column]:.2f}" if column in row else "-" for column in COLUMNS)] for name, row in rows.items()],
        ["", *COLUMNS])


# --------------------------------------------------------------------------------------------------- what is compared


def torch_cases(q, k, v):
    """torch's fused softmaxes: {name: (a function that returns the output, products forward, products backward)}."""
    def sdpa(backend):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    cases = {name: (partial(sdpa, backend), *PRODUCTS["softmax"]) for name, backend in RIVALS.items()}
    if q.is_cuda:                               # on a CPU FlexAttention has no backward
        from torch.nn.attention import flex_attention as flex
        T = q.shape[2]
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=q.device)
        cases["flex"] = partial(torch.compile(flex.flex_attention), q, k, v, block_mask=mask), *PRODUCTS["softmax"]
    return cases


def our_cases(q, k, v):
    """Our kernels, in the same form. Row inputs (T,) are of the size that they have in a layer."""
    n = torch.arange(1, q.shape[2] + 1, device=q.device).float()        # how many keys each row sees
    row_inputs = {"elastic": 1 / n, "lssar": torch.ones_like(n), "tra": torch.sqrt(2 * n.log() / q.shape[-1]),
                  "sigmoid": torch.full_like(n, math.log(q.shape[2]))}

    def attend(rule, v=v, **mix):               # without the row statistic, which comes second
        return kernels.attend(rule, q, k, v, row_inputs.get(rule), scale=q.shape[-1] ** -0.5, **mix)[0]

    cases = {rule: (partial(attend, rule), *PRODUCTS[rule]) for rule in PRODUCTS if rule in kernels.KERNELS}
    if q.shape[1] % 2 == 0:                     # half of the heads are second views, of the same values
        cases["tda"] = partial(attend, "tra", v[:, 0::2], mix=q.new_tensor(0.5)), *PRODUCTS["tda"]
    return cases


def time_kernels(T, width, args, machine):
    """Time every case at one size, forward and backward apart. Returns {name: {"forward", "backward": TFLOP/s,
    "forward_ratio", "backward_ratio", "both_ratio": speed against our softmax}}, or of what does not run {name:
    {"missing": why}}."""
    batch, heads = max(1, args.tokens // T), max(1, args.n_embd // width)       # as much work at every length and width
    like = {"device": machine.device, "dtype": getattr(torch, machine.dtype), "requires_grad": True}
    q, k, v, do = (torch.randn(batch, heads, T, width, **like) for _ in range(4))
    cases = torch_cases(q, k, v) | (our_cases(q, k, v) if kernels.AVAILABLE else {})
    backward, rows = {}, {}
    for name, (attend, *_) in cases.items():
        try:
            o = attend()                        # its graph is kept, so that backward can be timed alone
            backward[name] = partial(torch.autograd.grad, o, (q, k, v), do[:, :o.shape[1]], retain_graph=True)
            backward[name]()                    # tda's output has half of the heads, hence the cut of do
        except Exception as e:                  # a backend that this device or this build of torch does not have:
            if name in PRODUCTS:                # errors of many kinds; but ours must run
                raise
            backward.pop(name, None)
            rows[name] = {"missing": str(e).splitlines()[0]}
    seconds = {"forward": machine.race({name: cases[name][0] for name in backward}, args.repeats),
               "backward": machine.race(backward, args.repeats)}
    both = {name: sum(times[name] for times in seconds.values()) for name in backward}
    base = "softmax" if "softmax" in backward else next(iter(backward))
    for name in backward:
        # a product is 2 T T width operations for each head, of which causality needs half
        operations = {way: n * batch * heads * T * T * width for way, n in zip(seconds, cases[name][1:], strict=True)}
        rows[name] = {way: operations[way] / times[name] / 1e12 for way, times in seconds.items()}
        rows[name] |= {f"{way}_ratio": times[base] / times[name] for way, times in (seconds | {"both": both}).items()}
    return rows
