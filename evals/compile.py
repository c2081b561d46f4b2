"""compile: compile the Triton kernels for GPUs that this machine may lack.

    python eval.py compile                                      registers, shared memory and spills of every kernel
    python eval.py compile --sm=89 --width=128 --calls=elastic+busy,gla      the same for these calls on another GPU
    python eval.py compile --choose=backward_keys --sm=90 --width=64 --calls=softmax+busy,tra+busy
        the largest tile of one kernel that has no problem in any of these calls

Triton compiles for any GPU on any machine. The host code runs unchanged on CPU tensors. A substitute driver claims to
be the GPU in question, and launches only compile. So the compiled kernels are exactly those that the GPU would run.
"""
import contextlib
import hashlib
import itertools
import math
import multiprocessing
import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import kernels
from common.flags import at_least, knob
from evals.instrument import progress, table, whole_numbers
from mixers import recurrent_kernels

COLUMNS = ("sm", "dtype", "width", "call", "kernel", "tile", "warps", "registers", "shared", "stack", "matmuls",
           "exponentials", "problems")
DTYPES = ("float32", "bfloat16", "float16")
HOPPER = 232448                                 # bytes of shared memory for one program on sm_90 and sm_100
OTHERS = 101376                                 # the same on sm_86, sm_89 and sm_120, which use the tiles of sm_80
TENSOR_MEMORY = 512                             # columns of the memory that holds the products of sm_100

# Calls of the attention kernels: a rule, with or without options. EXPONENTIALS: how many the rule computes for a score.
# busy: with a table, a tail, a slope, a window and first keys. mix: two views at once. sets: the call of Focus in which
# tokens with a common group do not see each other
EXPONENTIALS = dict(softmax=1, elastic=1, entmax=0, sparsemax=0, softplus=1, lssar=2, softpick=1, relu=0, tra=0,
                    sigmoid=1, elu=1, identity=0, alphamax=1, softplus_sum=1, sigmoid_sum=1)
ATTENTION = {rule + "".join(more): (rule, more) for more in ((), ("+busy",)) for rule in EXPONENTIALS}
ATTENTION |= {"softmax+sets": ("softmax", ("+sets",))}
ATTENTION |= {"tra" + "".join(more): ("tra", more) for more in (("+mix",), ("+mix", "+busy"))}
# Calls of the kernels of a state, named after a recipe that makes them (no recipe makes the last one): {name: (how many
# `forget` rates a head has, whether the state erases)}
STATES = {"linear_state": (0, False), "retnet": (1, False), "deltanet": (0, True), "gated_deltanet": (1, True),
          "gla": ("D", False), "delta+channels": ("D", True)}
# the kernels that these calls launch
ATTENTION_KERNELS = ("forward", "backward_rows", "backward_keys", "backward_table")
STATE_KERNELS = ("invert", "scan", "read", "read_back", "scan_back", "gradients")


def row_of_tiles(call):
    """The group of a call. Calls of one group take their tiles from the same row of the tile tables."""
    if call in STATES:
        return "states+channels" if STATES[call][0] == "D" else "states"
    rule, more = ATTENTION[call]
    kind = "mix" if "+mix" in more else "heavy" if kernels.named(rule).heavy else "plain"
    return kind + ("+busy" if {"+busy", "+sets"} & {*more} else "")


CALLS = {}                                      # {group: its calls}
for _call in (*ATTENTION, *STATES):
    CALLS[row_of_tiles(_call)] = [*CALLS.get(row_of_tiles(_call), []), _call]


@dataclass
class Compile:
    """Flags of compile"""
    sm: str = knob("80,90", "generations of GPUs, separated by commas: compute capability times 10")
    width: str = knob("64,128,256", "head dimensions, separated by commas")
    dtype: str = knob(",".join(DTYPES), "data types of q, k and v, separated by commas")
    calls: str = knob(",".join(CALLS), "compile the kernels of these calls, separated by commas: names in the "
                                       "column `call`, or groups")
    choose: str = knob("", "instead, try tiles of this kernel, the largest first, until one has no problem")
    processes: int = knob(1, "how many calls to compile at a time")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, processes=1)


class Case(NamedTuple):
    """One call, whose kernels are compiled."""
    sm: int
    dtype: str
    width: int
    call: str                   # a name of ATTENTION or STATES


def command(args, run):
    """Compile the Triton kernels for GPUs that this machine may lack: registers, shared memory, spills to the stack."""
    if kernels.INTERPRETED or not hasattr(kernels.triton, "runtime"):
        raise ValueError("compile needs triton without TRITON_INTERPRET=1: install triton, or unset the variable")
    warnings.filterwarnings("ignore")
    names = chosen(args.calls, "calls", (*CALLS, *ATTENTION, *STATES))
    calls = [call for name in names for call in CALLS.get(name, [name])]
    dtypes, widths = chosen(args.dtype, "dtype", DTYPES), whole_numbers(args.width, "width", least=1)
    cases = [Case(*case) for case in itertools.product(whole_numbers(args.sm, "sm"), dtypes, widths, calls)]
    if args.choose:
        return choose(args.choose, cases)
    with multiprocessing.Pool(args.processes) as pool:
        each = zip(pool.imap(rows_of, cases), progress(cases, True), strict=True)
        found = [row for rows, _ in each for row in rows]
    bad = sum(bool(row["problems"]) for row in found)
    return {"kernels": found}, f"{table_of(found)}\n\n{len(found)} kernels, {bad} of them with problems"


def chosen(text, flag, valid):
    """The list in "softmax,gla"."""
    unknown = [name for name in text.split(",") if name not in valid]
    if unknown:
        raise ValueError(f"--{flag}={unknown[0]} is unknown: choose from {', '.join(valid)}")
    return text.split(",")


def table_of(rows):
    cells = [[", ".join(row[name]) if name == "problems" else str(row[name]) for name in COLUMNS] for row in rows]
    return table(cells, COLUMNS)


# ---------------------------------------------------------------------------------------------------------- compiling


class Driver:
    """A substitute for the driver of a GPU of generation `sm`. It answers all that Triton asks before it compiles."""

    def __init__(self, sm):
        self.target, self.sm = kernels.triton.backends.compiler.GPUTarget("cuda", sm, 32), sm

    def get_current_target(self):
        return self.target

    def get_current_device(self):               # the key of Triton's cache of compiled kernels
        return self.sm

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def pretended_gpu(sm, only=""):
    """Inside this context, launching a kernel on CPU tensors only compiles it, for a GPU of generation sm. Yields the
    dict that collects the kernels, {name: (Sizes, warps, compiled)}. only: the name of the one kernel to compile."""
    compiled, function = {}, kernels.triton.runtime.jit.JITFunction
    run = function.run

    def compile_only(kernel, *args, grid, warmup, **options):
        name = kernel.__name__
        if name not in compiled and only in ("", name):     # a state's backward launches `scan` again
            compiled[name] = args[-1], options["num_warps"], run(kernel, *args, grid=grid, warmup=True, **options)

    kernels.triton.runtime.driver.set_active(Driver(sm))
    with (mock.patch.object(function, "run", compile_only),
          mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(sm, 10))):
        yield compiled


def compile_call(case, only=""):
    """The kernels that a call and its backward launch: {name: (Sizes, warps, compiled)}."""
    with pretended_gpu(case.sm, only) as compiled:
        (call_attention if case.call in ATTENTION else call_state)(case)
    return compiled


def projected(heads, case):
    """(B, heads, T, width), as a fused projection returns it: the rows of one head are not contiguous."""
    return torch.empty(2, 1024, heads, case.width, dtype=getattr(torch, case.dtype)).transpose(1, 2)


def call_attention(case):
    rule, more = ATTENTION[case.call]
    q, k, v = (projected(heads, case) for heads in (4, 4, 2 if "+mix" in more else 4))
    mix = torch.empty(2, 2, 1024) if "+mix" in more else None
    if mix is not None and not kernels.holds_two_views(q, v):
        return                                  # attend() refuses it
    sets = torch.empty(2, 1024, dtype=torch.int64) if "+sets" in more else None
    t = torch.empty(2, 4, 1024) if kernels.named(rule).takes_t else None
    busy = "+busy" in more
    table, far, window, first = (torch.empty(4, 512), torch.empty(4, 2), 256, 4) if busy else (None, None, 0, 0)
    window = 128 if "+sets" in more else window
    call = (rule, q, k, v, t, table, far, mix, sets, 0.125, window, first)
    o, r, u, alive = kernels.run_forward(*call, True, True)
    kernels.run_backward(*call, u if u.numel() else o, r, alive, o, r, busy)


def call_state(case):
    rates, erases = STATES[case.call]
    q, k, v = (projected(4, case) for _ in range(3))
    c = torch.empty(2, 4, 1024, case.width if rates == "D" else 1) if rates else None
    erase = torch.empty(2, 4, 1024) if erases else None
    o, X = recurrent_kernels.run_forward(q, k, v, c, erase)
    recurrent_kernels.run_backward(q, k, v, c, erase, X, o)


# ------------------------------------------------------------------------------------------------- the results


def rows_of(case, only=""):
    """A row of the table for each kernel of a call: COLUMNS, and a hash of the code."""
    return [row_of(case, name, *parts) for name, parts in compile_call(case, only).items()]


def row_of(case, name, sizes, warps, compiled):
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    hopper, blackwell, older, exps = map(ptx.count, ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "ex2.approx"))
    newest = hopper + blackwell
    problems = [what for what, bad in (
        ("spills", stack > 0),
        ("too much shared memory", shared > (HOPPER if case.sm // 10 in (9, 10) else OTHERS)),
        ("too much tensor memory", (getattr(compiled.metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY),
        ("no tensor cores", case.dtype != "float32" and not (newest or older and may_be_older(case))),
        ("wrong number of exponentials", case.call in ATTENTION and not is_expected(exps, case, name, sizes, warps)),
    ) if bad]
    tile = "x".join(str(side.value) for side in ((sizes.BM, sizes.BN) if case.call in ATTENTION else
                                                 (sizes.C, sizes.BD, sizes.BE)))
    return case._asdict() | {
        "kernel": name, "tile": tile, "warps": warps, "registers": registers, "shared": shared, "stack": stack,
        "matmuls": newest or older, "exponentials": exps, "problems": problems,
        "code": hashlib.sha256(ptx.encode()).hexdigest()}


def registers_and_stack(cubin):
    """Registers and bytes of stack of a thread, from the disassembler in Triton's package. Spills use the stack."""
    tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return (int(re.search(name + r":(\d+)", listing)[1]) for name in ("REG", "STACK"))


def may_be_older(case):
    """May this call use the older matrix instructions? Those of sm_90 and sm_100 need tiles of 64 rows, too large for
    some calls."""
    return case.sm // 10 not in (9, 10) or case.width > 128 or case.call in STATES or "+mix" in ATTENTION[case.call][1]


def is_expected(exps, case, name, sizes, warps):
    """Is the number of exponentials plausible? Each copy of the tile's code computes EXPONENTIALS for a score. There is
    a copy for far and one for near tiles, and twice as many if the statistic or delta has a pass of its own. A few more
    update the running maximum of the rows. Still more would mean that warps repeat each other's work."""
    rule, more = ATTENTION[case.call]
    about = kernels.named(rule)
    twice = about.passes if name == "forward" else name == "backward_rows" and about.sum_delta
    copies = 1 if name == "backward_table" or "+sets" in more else 4 if twice else 2     # sets: all are masked
    scores = copies * sizes.BM.value * sizes.BN.value // (32 * warps)
    return EXPONENTIALS[rule] * scores <= exps <= max(1, 2 * EXPONENTIALS[rule]) * scores + 16


# ----------------------------------------------------------------------------------------------------------- choosing


def choose(kernel, cases):
    """Try the tiles of one kernel, the largest first, until one has no problem in any case that launches the kernel."""
    chosen(kernel, "choose", ATTENTION_KERNELS + STATE_KERNELS)
    cases = [case for case in cases if (case.call in STATES) == (kernel in STATE_KERNELS)]
    tried = []
    for tile in candidates(kernel):
        with mock.patch.object(*with_tile(kernel, tile)):
            problems = next(filter(None, (row["problems"] for case in cases for row in rows_of(case, kernel))), [])
        tried.append({"tile": tile, "problems": problems})
        if not problems:
            break
    text = "\n".join(f"{row['tile']}: {', '.join(row['problems']) or 'clean'}" for row in tried)
    return {"kernel": kernel, "tried": tried}, text


def candidates(kernel):
    """The tiles to try, the largest first: (BM, BN, warps, stages) for attention, (C, BD, BE, BE of `gradients`) for a
    state. Among tiles of the same size, the one with most rows comes first; for backward_keys, with most keys."""
    sides = (128, 64, 32, 16)
    if kernel in STATE_KERNELS:
        found = [(C, BD, BE, BE) for C, BD, BE in itertools.product(sides[1:], sides[1:], sides)]
        return sorted(found, key=lambda tile: (-math.prod(tile[:3]), -tile[0]))
    found = [(own, other) for own in sides for other in sides
             if own * other <= 128 * 64 and (own == other or kernel != "backward_table")]
    found = sorted(found, key=lambda tile: (-math.prod(tile), -tile[0]))
    return [(*((other, own) if kernel == "backward_keys" else (own, other)), warps, stages) for own, other in found
            for warps in (8, 4, 2) if 16 * warps <= own or own == other for stages in (3, 2, 1)]


def with_tile(kernel, tile):
    """The arguments of mock.patch.object that give one kernel this tile: (module, name, substitute)."""
    if kernel in STATE_KERNELS:
        return recurrent_kernels, "tiles", lambda q, channels: tile
    usual = kernels.tile
    return kernels, "tile", lambda name, *about: tile if name == kernel else usual(name, *about)
