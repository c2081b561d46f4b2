"""The speed of every recipe on this machine, and the memory of its attention; other flags time something else.

All cases take turns in one process, for many rounds (Machine.race). Other programs on the machine slow all of them
alike, so ratios are reliable even if seconds are not. Each kind of measurement is a module, see MODES.
evals/everything.sh runs all that need a GPU.
"""
import dataclasses
from dataclasses import dataclass

from common.flags import at_least, knob
from common.machine import Machine
from evals import decode, kernels, live, sparse, steps
from evals.instrument import file_of_gpu, whole_numbers

MODES = {   # {flag: (module, lengths on a CPU, lengths on a GPU, name of the file in results/ on a GPU)}
    "kernels": (kernels, "64,128", "1024,4096,16384", "speed"),         # on a CPU a trial in Triton's interpreter
    "focus": (sparse, "1024,4096,16384", "1024,4096,16384,65536,262144,1048576", "speed-focus"),
    "decode": (decode, "1024,4096,16384", "1024,4096,16384", ""),
    "live": (live, "", "", ""),                                         # the run's block_size
    "": (steps, "256,1024", "256,1024", "")}


@dataclass
class Speed:
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; with --kernels 1024,4096,16384 "
                            "(on a CPU 64,128); with --focus 1024,4096,16384 (on a GPU up to a million); with "
                            "--decode 1024,4096,16384; with --live the run's block_size")
    memory: str = knob("4096,8192,16384", "measure the attention's memory at these lengths, separated by commas; "
                                          "empty: skip it")
    tokens: int = knob(0, "tokens of a training step, or of a call of a kernel; "
                          "0: 2048; with --kernels 16384 (on a CPU 128)")
    n_layer: int = knob(4, "blocks of the timed model")
    n_head: int = knob(2, "heads of the timed model")
    n_embd: int = knob(0, "width of the timed model; 0: 128; with --kernels 2048 (on a CPU 128)")
    vocab_size: int = knob(257, "token ids of the timed model")
    repeats: int = knob(20, "timed rounds over all recipes; the result is the median")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best available")
    dtype: str = knob("auto", "precision of matrix products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, time our fused kernels and torch's own, without a model")
    live: bool = knob(False, "instead, for a trained run (--out_dir): measure the share of tiles with nonzero weights, "
                             "and the time that skipping the others saves")
    focus: bool = knob(False, "instead, time the sparse form of Focus and full attention")
    decode: bool = knob(False, "instead, time a decoding step of one layer with long caches, and count the bytes of "
                               "keys, values or state that it reads")
    out_dir: str = knob("", "with --live: the run")
    widths: str = knob("64,128", "with --kernels: head dimensions, separated by commas")
    out: str = knob("", "also save the figures as JSON in this file; "
                        "empty: on a GPU with --kernels or --focus a file in results/, otherwise nowhere")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, tokens=0, n_layer=1, n_head=1, n_embd=0, vocab_size=1, repeats=1)
        for name in ("lengths", "memory", "widths"):
            if getattr(self, name):
                whole_numbers(getattr(self, name), name, least=1)       # raises ValueError


def command(args, run):
    """Time training steps of every recipe, and its attention alone, relative to softmax in torch's own fused kernel.
    All recipes take turns in one process."""
    module, short, long, stem = next(row for flag, row in MODES.items() if not flag or getattr(args, flag))
    machine = Machine(args.device, args.dtype)
    gpu = machine.device.type == "cuda"
    out = args.out or (file_of_gpu(stem, machine.device) if gpu and stem else "")
    return module.command(dataclasses.replace(args, lengths=args.lengths or (long if gpu else short), out=out), machine)
