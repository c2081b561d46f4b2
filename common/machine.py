"""The machine: device, precision, ranks, clock and memory, all that differs between a laptop, one
GPU and many."""

import contextlib
import ctypes
import gc
import importlib
import math
import os
import re
import signal
import socket
import time
import weakref

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# dense TFLOP/s in 16 bits, from the data sheets; the first name that is a part of the device's name
# counts
PEAK_TFLOPS = {
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "4090": 165,
    "3090": 71,
    "V100": 125,
    "T4": 65,
}


class Machine:
    """The device, the precision, and this process's rank among those that torchrun started."""

    def __init__(self, device="auto", dtype="auto"):
        # torchrun sets these; without it there is one rank
        usual = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        given = {name: os.environ.get(name, value) for name, value in usual.items()}
        numbers = [int(text) if text.isdecimal() else -1 for text in given.values()]
        self.rank, self.local_rank, self.world = numbers
        alone = self.world > 1 and "RANK" not in os.environ
        if not 0 <= self.rank < self.world or self.local_rank < 0 or alone:
            words = " ".join(f"{name}={os.environ.get(name, 'not set')}" for name in usual)
            raise ValueError(
                f"{words} name no rank: they must be whole numbers, and RANK in "
                "0..WORLD_SIZE-1. Let torchrun set these variables, or unset them"
            )
        self.main = self.rank == 0  # the rank that prints and writes
        if self.world > 1 or "STARTED_BY" in os.environ:  # by torchrun, or by an instrument
            end_with_parent()
        self.device = pick_device(device, self.local_rank)
        self.dtype = pick_dtype(dtype, self.device.type)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.world > 1 and not dist.is_initialized():
            # Imported later, their functions would keep the group as a default argument. Its
            # threads would then outlive close(), and now and then abort the process at its end.
            for name in ("torch.distributed.nn", "torch.distributed.fsdp"):
                importlib.import_module(name)
            check_launcher()
            nccl = {"backend": "nccl", "device_id": self.device}
            dist.init_process_group(**(nccl if self.device.type == "cuda" else {"backend": "gloo"}))

    def __str__(self):
        cuda = self.device.type == "cuda"
        threads = f"{torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name(self.device) if cuda else threads
        precision = self.dtype if self.dtype == "float32" else f"{self.dtype} autocast"
        ranks = f"{self.world} rank{'s' * (self.world > 1)}"
        return f"{self.device} ({name}), {precision}, {ranks}, torch {torch.__version__}"

    def autocast(self):
        """A context in which matrix products are in self.dtype."""
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.dtype))

    def sum(self, *values):
        """Sums of Python numbers over all ranks."""
        if self.world == 1:
            return values
        values = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return values.tolist()

    def mean(self, x):
        """Mean of a tensor over all ranks. The gradient flows through each rank's own tensor only.
        Since ranks average their gradients, the result is the gradient of the mean."""
        if self.world == 1:
            return x
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / self.world + (x - x.detach())

    def share(self, value):
        """The main rank's value, on every rank."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def wait(self):
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def close(self):
        if dist.is_initialized():
            gc.collect()  # sharding may still hold the group: its threads must end first
            dist.destroy_process_group()

    def peak_flops(self):
        """FLOP/s of dense products in this precision, from the device's data sheet; None if
        unknown."""
        if self.device.type == "cuda" and self.dtype != "float32":
            name = torch.cuda.get_device_name(self.device)
            for words, tera in PEAK_TFLOPS.items():
                if re.search(rf"\b{words}\b", name):
                    return 1e12 * tera
        return None

    def seconds(self, run):
        """How long run() keeps the device busy. On CUDA by the device's own clock, after flushing
        the L2 cache."""
        if self.device.type == "cuda":
            torch.empty(1 << 28, dtype=torch.int8, device=self.device).zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # while the device sleeps for about 1 ms, Python queues the kernels: it is not timed
            torch.cuda._sleep(2_000_000)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()  # an error in a kernel is raised here at the latest
            return start.elapsed_time(end) / 1000
        started = time.perf_counter()
        run()
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - started

    def race(self, cases, rounds):
        """Median seconds of each case {name: function}. Cases take turns, so noise affects all
        alike."""
        seconds = {name: [] for name in cases}
        for _ in range(rounds + 2):  # the first two rounds warm up
            for name, run in cases.items():
                seconds[name].append(self.seconds(run))
        return {name: float(np.median(values[2:])) for name, values in seconds.items()}

    def peak_memory(self, run):
        """Peak bytes of tensors during run(), without those that existed before. (On a CPU, an
        older tensor counts as soon as an operation returns a view of it.)"""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        with LiveMemory() as memory:
            run()
        return memory.peak


def end_with_parent():
    """Tell Linux to kill this process when the one that started it ends, even by kill -9. It would
    otherwise go on training, and write into the folder in which the next call of its parent trains.
    Raises ValueError if the instrument that started this process has ended already."""
    set_signal_of_parents_death = 1  # from prctl.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(set_signal_of_parents_death, signal.SIGKILL)
    if os.environ.get("STARTED_BY", str(os.getppid())) != str(os.getppid()):
        raise ValueError("the command that started this one has ended")


def check_launcher():
    """Raise ValueError if torchrun has ended, since the ranks would wait half an hour for each
    other."""
    # rank 0 opens the port itself, later
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, timeout=30).close()
    except OSError as e:
        raise ValueError(
            f"torchrun, which started this rank, has ended ({e}): start it again"
        ) from None


def pick_device(name, local_rank):
    """cuda, then mps, then cpu; each rank gets a GPU of its own."""
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    try:
        device = torch.device(name)
        if device.type not in ("cuda", "mps", "cpu"):
            raise RuntimeError("choose cuda, mps or cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(1, device=device)  # fails at once if the device cannot be used
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device={name} cannot be used here: {str(e).splitlines()[0]}") from None
    return device


def pick_dtype(name, device_type):
    """bfloat16 where the hardware multiplies it faster, float16 on older GPUs, float32
    elsewhere."""
    if name != "auto":
        return name
    if device_type == "cuda":
        # without this flag torch also says yes to slow emulation of bfloat16 (a T4)
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device_type == "cpu":  # a processor without these instructions emulates bfloat16, slowly
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"
    return "float32"


def keep_freed_memory():
    """Tell Linux's allocator to keep freed memory. Otherwise every large tensor of a CPU run costs
    a page fault per 4 KB, which took up to 40 % of attention's time."""
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 1 << 25)  # the largest value allowed
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def host_memory():
    """The bytes of this machine's memory; infinite on Windows, which lacks this call."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(size, what, advice):
    """Raise ValueError if `size` bytes are more than this machine has. It must be called before
    they are needed, since Linux promises any memory and later kills a process that uses it."""
    if size > host_memory():
        raise ValueError(
            f"{what} {size / 1e9:,.1f} GB of memory, and this machine has "
            f"{host_memory() / 1e9:,.1f} GB: {advice}"
        )


class LiveMemory(TorchDispatchMode):
    """A context that counts the bytes of live tensors: those that operations return, until they are
    freed."""

    def __enter__(self):
        self.now, self.peak, self.known = 0, 0, set()
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        outputs = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:  # views share a storage
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return outputs

    def forget(self, key, size):
        self.known.discard(key)
        self.now -= size
