"""compile: compile the Triton kernels for GPUs that this machine may lack.

    python eval.py compile                              registers, shared memory and spills of every kernel
    python eval.py compile --sm=89 --width=128 --calls=elastic+busy,gla         these calls on another GPU

Triton compiles for any GPU on any machine. The host code runs unchanged on CPU tensors. A substitute driver claims to
be the GPU in question, and launches only compile. So the compiled kernels are exactly those that the GPU would run.
"""
import collections
import hashlib
import itertools
import multiprocessing
import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

import kernels
from common.flags import Knobs, knob
from evals.instrument import progress, table, whole_numbers
from mixers import recurrent_kernels

COLUMNS = ("sm", "dtype", "width", "call", "kernel", "tile", "warps", "registers", "shared", "stack", "programs_per_sm",
           "warps_per_scheduler", "instructions", "exponentials", "problems")
DTYPES = ("float32", "bfloat16", "float16")

# Calls of the attention kernels: a rule, with or without options. EXPONENTIALS: how many the rule computes for a score.
# busy: with a table, a tail, a slope, a window and first keys. mix: two views at once. sets: the call of Focus in which
# tokens with a common group do not see each other. docs: packed documents
EXPONENTIALS = dict(softmax=1, elastic=1, entmax=0, sparsemax=0, softplus=1, lssar=2, softpick=1, relu=0, tra=0,
                    sigmoid=1, elu=1, identity=0, alphamax=1, softplus_sum=1, sigmoid_sum=1)
ATTENTION = [*EXPONENTIALS, *(f"{rule}+busy" for rule in EXPONENTIALS), "softmax+sets", "softmax+docs", "tra+mix",
             "tra+mix+busy"]
# Calls of the kernels of a state, named after a recipe that makes them (no recipe makes the last one): {name: (how many
# `forget` rates a head has, whether the state erases)}
STATES = {"linear_state": (0, False), "retnet": (1, False), "deltanet": (0, True), "gated_deltanet": (1, True),
          "gla": ("D", False), "delta+channels": ("D", True)}
# {group: its calls}, which take their tiles from the same row of the tile tables
CALLS = collections.defaultdict(list)
for _call in ATTENTION:
    _rule, *_options = _call.split("+")
    _kind = "mix" if "mix" in _options else "heavy" if kernels.kernel_named(_rule).heavy else "plain"
    CALLS[_kind + "+busy" * (_options not in ([], ["mix"], ["docs"]))].append(_call)
for _call, (_rates, _) in STATES.items():
    CALLS["states" + "+channels" * (_rates == "D")].append(_call)


@dataclass
class Compile(Knobs):
    """Flags of compile"""
    sm: str = knob("80,90", "generations of GPUs, separated by commas: compute capability times 10")
    width: str = knob("64,128,256", "head dimensions, separated by commas")
    dtype: str = knob(",".join(DTYPES), "data types of q, k and v, separated by commas")
    calls: str = knob(",".join(CALLS), "compile the kernels of these calls, separated by commas: names in the "
                                       "column `call`, or groups")
    processes: int = knob(1, "how many calls to compile at a time", least=1)
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        super().__post_init__()
        for flag, valid in (("calls", (*CALLS, *ATTENTION, *STATES)), ("dtype", DTYPES)):
            for name in getattr(self, flag).split(","):
                if name not in valid:
                    raise ValueError(f"--{flag}={name} is unknown: choose from {', '.join(valid)}")


Case = collections.namedtuple("Case", "sm dtype width call")            # one call, whose kernels are compiled


def command(args, run):
    """Compile the Triton kernels for GPUs that this machine may lack: registers, shared memory, spills to the stack,
    how many programs a multiprocessor (SM) holds, and how many warps each of its four schedulers can choose from."""
    if kernels.INTERPRETED or not hasattr(kernels.triton, "runtime"):
        raise ValueError("compile needs triton without TRITON_INTERPRET=1: install triton, or unset the variable")
    warnings.filterwarnings("ignore")
    calls = [call for name in args.calls.split(",") for call in CALLS.get(name, [name])]
    cases = [Case(*case) for case in itertools.product(
        whole_numbers(args.sm, "sm"), args.dtype.split(","), whole_numbers(args.width, "width", least=1), calls)]
    with multiprocessing.Pool(args.processes) as pool:
        each = zip(pool.imap(rows_of, cases), progress(cases, True), strict=True)
        found = [row for rows, _ in each for row in rows]
    cells = [[", ".join(row[name]) if name == "problems" else str(row[name]) for name in COLUMNS] for row in found]
    bad = sum(bool(row["problems"]) for row in found)
    return {"kernels": found}, f"{table(cells, COLUMNS)}\n\n{len(found)} kernels, {bad} of them with problems"


def rows_of(case):
    """A row of the table for each kernel that a call and its backward launch: COLUMNS, and a hash of the code."""
    compiled, function = {}, kernels.triton.runtime.jit.JITFunction
    run = function.run

    def compile_only(kernel, *args, grid, warmup, **options):
        name = kernel.__name__
        if name not in compiled:                # a state's backward launches `scan` again
            compiled[name] = args[-1], run(kernel, *args, grid=grid, warmup=True, **options)

    # the substitute answers all that Triton asks before it compiles. A device's number is a key of Triton's cache
    target = kernels.triton.backends.compiler.GPUTarget("cuda", case.sm, 32)
    kernels.triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: case.sm, get_current_stream=lambda device: 0))
    with (mock.patch.object(function, "run", compile_only),
          mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(case.sm, 10))):
        launch(case)
    return [row_of(case, name, *parts) for name, parts in compiled.items()]


def launch(case):
    """Forward and backward of one call."""
    def projected(heads):                       # (B, heads, T, width) as a projection returns it, not contiguous
        return torch.empty(2, 1024, heads, case.width, dtype=getattr(torch, case.dtype)).transpose(1, 2)

    if case.call in STATES:
        rates, erases = STATES[case.call]
        q, k, v = (projected(4) for _ in range(3))
        c = torch.empty(2, 4, 1024, case.width if rates == "D" else 1) if rates else None
        erase = torch.empty(2, 4, 1024) if erases else None
        o, X = recurrent_kernels.run_forward(q, k, v, c, erase, None)
        recurrent_kernels.run_backward(q, k, v, c, erase, None, X, o)
        return
    rule, *options = case.call.split("+")
    mixed, busy, grouped = (name in options for name in ("mix", "busy", "sets"))
    q, k, v = (projected(heads) for heads in (4, 4, 2 if mixed else 4))
    if mixed and not kernels.holds_two_views(q, v):
        return                                  # attend() refuses it
    mix = torch.empty(2, 2, 1024) if mixed else None
    sets = torch.empty(2, 1024, dtype=torch.int64) if grouped else None
    starts = torch.zeros(2, 1024, dtype=torch.int32) if "docs" in options else None
    t = torch.empty(2, 4, 1024) if kernels.kernel_named(rule).takes_t else None
    table, tail_slope = (torch.empty(4, 512), torch.empty(4, 2)) if busy else (None, None)
    window, first = (256, 4) if busy else (128, 0) if grouped else (0, 0)
    call = (rule, q, k, v, t, table, tail_slope, None, mix, sets, starts, 0.125, window, first)
    o, r, u, alive = kernels.run_forward(*call, True, True)
    kernels.run_backward(*call, u if u.numel() else o, r, alive, o, r, busy)


def row_of(case, name, sizes, compiled):
    """The row of one kernel. "problems" names what would make it slow, or unable to run on this GPU."""
    # registers and bytes of stack of a thread, from the disassembler in Triton's package. Spills use the stack
    tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run([tool, "-res-usage", "-sass", file.name], capture_output=True, text=True,
                                 check=True).stdout
    registers, stack = (int(re.search(name + r":(\d+)", listing)[1]) for name in ("REG", "STACK"))
    # a multiprocessor holds as many programs as its 65,536 registers, its shared memory and its warps allow. Source:
    # CUDA C++ Programming Guide, technical specifications per compute capability
    data_centre, shared, warps = case.sm // 10 in (9, 10), compiled.metadata.shared, compiled.metadata.num_warps
    kilobytes, most_warps = (228, 64) if data_centre else (164, 64) if case.sm == 80 else (100, 48)
    of_a_warp = 32 * 8 * -(-registers // 8)     # a thread gets its registers in steps of 8
    programs = min(65536 // (of_a_warp * warps), 1024 * kilobytes // (shared + 1024), most_warps // warps)

    ptx, attention = compiled.asm["ptx"], case.call in ATTENTION
    hopper, blackwell, older = map(ptx.count, ("wgmma.mma_async", "tcgen05.mma", "mma.sync"))
    # a walk has a loop for full tiles, perhaps one for those within the table, and one for masked tiles
    loops = loops_of(listing)[::3 if "+busy" in case.call else 2] if attention else []
    due = EXPONENTIALS[case.call.split("+")[0]] if attention else 0
    per_score = 32 * warps / (sizes.BM.value * sizes.BN.value) if loops else 0
    instructions, exps, _ = (round(per_score * n, 1) for n in (loops or [(0, 0, 0)])[-1])
    # the matrix instructions of sm_90 and sm_100 need tiles of 64 rows, too large for some calls
    may_be_older = not data_centre or case.width > 128 or not attention or "+mix" in case.call
    problems = {
        "spills": stack > 0,
        # sm_86, sm_89 and sm_120 use the tiles of sm_80, so these must fit into their shared memory
        "too much shared memory": shared > 1024 * (227 if data_centre else 99),
        "too much tensor memory": (getattr(compiled.metadata, "tmem_size", 0) or 0) > 512,          # columns, of sm_100
        "no tensor cores": case.dtype != "float32" and not (hopper + blackwell or older and may_be_older),
        # more would mean that warps repeat each other's work, as two of backward_table may
        "wrong number of exponentials": loops and not due <= exps < 1 + due * (1 + (name == "backward_table"))}
    sides = (sizes.BM, sizes.BN) if attention else (sizes.C, sizes.BD, sizes.BE)
    return case._asdict() | {
        "kernel": name, "tile": "x".join(str(side.value) for side in sides), "warps": warps, "registers": registers,
        "shared": shared, "stack": stack, "programs_per_sm": programs, "warps_per_scheduler": programs * warps / 4,
        "instructions": instructions, "exponentials": exps, "problems": [*filter(problems.get, problems)],
        "loops": loops, "code": hashlib.sha256(ptx.encode()).hexdigest()}


def loops_of(listing):
    """A warp's instructions, exponentials and FLOPs of products in each innermost loop that multiplies matrices."""
    code = {int(at, 16): words for at, words in re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ )?([^;]+);", listing)}
    jumps = [(int(to[1], 16), at) for at, words in code.items() if (to := re.match(r"BRA.* (0x\w+)", words))]
    loops, found = sorted((start, end) for start, end in jumps if start < end), []
    for a, b in loops:                          # products of 16 x 8 x 16 numbers, or of four warps of 64 x size x 16
        body = [words for at, words in code.items() if a <= at <= b]
        sizes = [int(size or 8) for size in re.findall(r"\bHG?MMA\.(?:64x(\d+)x)?16", " ".join(body))]
        if sizes and not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops):
            found.append([len(body), sum("MUFU.EX2" in words for words in body), 512 * sum(sizes)])
    return found
