"""The kernels compile for GPUs that this machine may lack: Triton needs no GPU for that.

They run only with --all. With -s they print registers and programs per multiprocessor (SM).
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import attention  # noqa: E402, F401            # before mixers, which import it
import kernels  # noqa: E402
from mixers import recurrent_kernels  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STATES = ("gla", "deltanet", "gated_deltanet")


def start(call, width, dtype):
    """Start the kernels of a call, forward and backward: a state, or a rule with options. busy:
    with a table, a tail, a slope, a window and first keys; mix: two views; sets: tokens with a
    common group do not see each other."""
    rule, *options = call.split("+")
    mixed, busy, grouped = (name in options for name in ("mix", "busy", "sets"))
    q, k, v = (
        torch.empty(2, 1024, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, 4, 2 if mixed else 4)
    )  # (B, heads, T, width) as projections do
    if rule in STATES:
        forget = torch.zeros(2, 4, 1024, 1 if rule == "gated_deltanet" else width)
        erase = None if rule == "gla" else torch.zeros(2, 4, 1024, 1)
        o = recurrent_kernels.recur(q, k, v, forget, erase)
    else:
        t = torch.zeros(2, 4, 1024) if kernels.KERNELS[rule].takes_t else None
        more = {"window": 128, "sets": torch.zeros(2, 1024, dtype=torch.int64)} if grouped else {}
        if busy:
            table, tail, slope = torch.zeros(4, 512), torch.zeros(4), torch.zeros(4)
            more = {
                "table": table.requires_grad_(),
                "tail": tail,
                "slope": slope,
                "window": 256,
                "first": 4,
            }
        mix = torch.zeros(2, 2, 1024) if mixed else None
        o = kernels.attend(rule, q, k, v, t, mix=mix, **more)[0]
    o.backward(o.detach())


def main(sm, dtype, width, *calls):
    """Print the figures of each kernel as JSON. The host code runs unchanged, on CPU tensors: a
    substitute driver claims to be the GPU, and launches only compile."""
    target = triton.backends.compiler.GPUTarget("cuda", int(sm), 32)
    function = triton.runtime.jit.JITFunction
    compile_kernel = function.run

    def launch(kernel, *args, grid, warmup, **options):
        compiled = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
        print(json.dumps({"call": call, "kernel": kernel.__name__} | figures(int(sm), compiled)))

    # a device's number is a key of Triton's cache
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: int(sm),
            get_current_stream=lambda device: 0,
        )
    )
    torch.cuda.get_device_capability = lambda device: divmod(int(sm), 10)
    kernels.problems_anywhere = lambda q, k, v: ()  # such as a missing GPU
    function.run = launch
    for call in calls:
        start(call, int(width), getattr(torch, dtype))


def figures(sm, compiled):
    """Registers and bytes of stack of a thread, programs of an SM, bytes of shared memory, columns
    of tensor memory, whether a kernel uses tensor cores ("new" if as Hopper and Blackwell do), and
    a hash of its code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    registers, stack = (int(re.search(name + r":(\d+)", usage)[1]) for name in ("REG", "STACK"))
    # an SM holds as many programs as its 65,536 registers, its shared memory and its warps allow.
    # A thread gets its registers in steps of 8. Source: CUDA C++ Programming Guide, technical
    # specifications per compute capability
    kilobytes, most_warps = (164, 64) if sm == 80 else (100, 48)
    if sm // 10 in (9, 10):
        kilobytes, most_warps = 228, 64
    shared, warps, ptx = compiled.metadata.shared, compiled.metadata.num_warps, compiled.asm["ptx"]
    programs = min(
        65536 // (warps * 32 * 8 * -(-registers // 8)),
        1024 * kilobytes // (shared + 1024),
        most_warps // warps,
    )
    new, old = (re.search(name, ptx) for name in (r"wgmma\.mma_async|tcgen05\.mma", r"mma\.sync"))
    return {
        "registers": registers,
        "stack": stack,
        "programs": programs,
        "shared": shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "tensor_cores": "new" if new else "old" if old else "none",
        "code": hashlib.sha256(ptx.encode()).hexdigest(),
    }


def compiled(case, path=ROOT, **environment):
    """The figures of the kernels of "SM DTYPE WIDTH CALL ..", from a process that does not
    interpret them."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.check_output(
        [sys.executable, __file__, *case.split()],
        text=True,
        env=env | {"PYTHONPATH": str(path)} | environment,
    )
    return list(map(json.loads, printed.splitlines()))


# the calls with the fewest registers to spare, of both kinds of kernels. A GPU that has no tiles
# of its own needs only these
TIGHT = "bfloat16 128 elastic+busy gated_deltanet"
# the call of each row of the tile tables that needs the most registers
FULLEST = "softmax+sets elastic+busy lssar+busy tra+mix+busy gated_deltanet deltanet"
MORE = [f"{sm} {TIGHT}" for sm in (86, 89, 100, 120)] + [
    f"{sm} {dtype} {calls}"
    for sm in (80, 90)
    for dtype in ("float32", "bfloat16")
    for calls in (f"64 {FULLEST}", f"128 {FULLEST}", "256 elastic+busy lssar+busy gla")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [f"90 {TIGHT}", *MORE])
def test_kernels_do_not_spill_fit_into_shared_memory_and_use_tensor_cores(case):
    """The tiles were chosen with Triton 3.9 for Ampere and Hopper: older versions may spill some
    registers, and so do sm_100 and the widest heads."""
    sm, dtype, width, *calls = case.split()
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    data_centre = sm in ("90", "100")
    spilled = 32 if width == "256" else 72 if old else 16 if sm == "100" else 0
    rows = compiled(case)
    assert {row["call"] for row in rows} == {*calls}
    for row in rows:
        print(
            f"sm_{sm} {dtype} {width} {row['call']} {row['kernel']}: "
            f"{row['registers']} registers, {row['programs']} programs per SM"
        )
        assert row["stack"] <= spilled, row
        # sm_86, sm_89 and sm_120 use the tiles of sm_80, so these must fit into their shared
        # memory
        assert row["shared"] <= 1024 * (227 if data_centre else 99), row
        assert row["tensor_memory"] <= 512, row
        # the matrix instructions of sm_90 and sm_100 need tiles of 64 rows, too large for some
        # calls
        too_large = width == "256" or row["call"].startswith("tra+mix") or row["call"] in STATES
        valid = ("new", "old") if too_large or not data_centre else ("new",)
        assert dtype == "float32" or row["tensor_cores"] in valid, row


@pytest.mark.exhaustive
def test_an_edited_rule_is_compiled_anew(tmp_path):
    """Triton caches compiled kernels on disk. Without Kernel.cache_key, it would run the old
    kernel."""
    source, line, codes = (ROOT / "attention.py").read_text(), "    w = tl.exp2(s - r)\n", []
    assert source.count(line) == 1
    for edited in (line, line + "    w = w * 2\n", line):
        (tmp_path / "attention.py").write_text(source.replace(line, edited))
        rows = compiled(
            "90 bfloat16 64 softmax",
            f"{tmp_path}{os.pathsep}{ROOT}",
            TRITON_CACHE_DIR=str(tmp_path / "cache"),
            PYTHONDONTWRITEBYTECODE="1",
        )
        codes.append(rows[0]["code"])
    assert codes[0] == codes[2] != codes[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
