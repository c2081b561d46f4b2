"""The instruments: look at a trained run.    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]

    loss      loss in nats per token and bits per byte on fixed windows (also under torchrun, which splits the windows over the ranks)
    probe     where the attention goes: sinks, density, exact zeros, per layer and head
    sample    generate text
    lab       train every recipe in the sink lab and compare them
    speed     time every recipe's training step and attention on this machine; these last two need no --out_dir. With --kernels, the fused
              kernels against torch's own; with --live (and --out_dir), what the zeros of a trained run are worth

The model is rebuilt from the run's meta.json alone; --attn and the flags of its axes override it where the parameters allow.
Definitions of the measures: sinks as in Gu et al. 2410.10781 (Sink_1^eps) and Lazy Attention 2601.00919, appendix C.3 (sink ratio,
density); sparsity as in Threshold Differential Attention 2601.12145, appendix D.1.
"""
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import kernels
from data import tokens
from model import GPT, GPTConfig, Parser, add_flags, knob

HERE = Path(__file__).parent

# ----------------------------------------------------------------------------------------------------------- where we run

PEAK_TFLOPS = {                                 # dense, in 16 bits, from the data sheets; the first name that matches counts
    "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "4090": 165, "3090": 71, "V100": 125, "T4": 65,
}


class Machine:
    """The device, the precision, and this process's place among the ranks that torchrun started."""

    def __init__(self, device="auto", dtype="auto"):
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device, self.local_rank)
        self.dtype = pick_dtype(dtype, self.device.type)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group(**{"backend": "nccl", "device_id": self.device} if self.device.type == "cuda" else {"backend": "gloo"})

    @property
    def main(self):
        return self.rank == 0

    def autocast(self):
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.dtype))

    def peak_flops(self):
        """What the vendor's data sheet says the device multiplies per second in this precision (dense); None where it is not known."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" and self.dtype != "float32" else ""
        return next((1e12 * tera for part, tera in PEAK_TFLOPS.items() if part in name), None)

    def seconds(self, run):
        """How long run() keeps the device busy. On CUDA by the device's own clock, with nothing of it left in the L2 cache."""
        if self.device.type == "cuda":
            torch.empty(1 << 28, dtype=torch.int8, device=self.device).zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)        # about a millisecond in which Python gets ahead: the device is timed, not the launching
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1000
        started = time.perf_counter()
        run()
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - started

    def peak_memory(self, run):
        """Bytes of tensors that are alive at the height of run(), beyond those from before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        with LiveMemory() as memory:
            run()
        return memory.peak

    def sum(self, *values):
        """Sums of Python numbers over all ranks."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self):
        if self.world > 1:
            dist.barrier()

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()

    def __str__(self):
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{torch.get_num_threads()} threads"
        precision = self.dtype if self.dtype == "float32" else f"{self.dtype} autocast"
        return f"{self.device} ({name}), {precision}, {self.world} rank{'s' * (self.world > 1)}, torch {torch.__version__}"


def keep_freed_memory():
    """Tell Linux's allocator to keep what is freed: handed back and fetched anew, the large tensors of a CPU run cost a page fault every
    4 KB, which took up to 40 % of attention's time."""
    trim_threshold, mmap_threshold = -1, -3     # from malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 1 << 25)   # the most that it allows
        libc.mallopt(trim_threshold, (1 << 31) - 1)


class LiveMemory(TorchDispatchMode):
    """Inside this context, counts the bytes of the tensors that operations make, and forgets them when they die."""

    def __enter__(self):
        self.now, self.peak, self.known = 0, 0, set()
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        outputs = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.count(storage.nbytes())
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return outputs

    def count(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)

    def forget(self, key, size):
        self.known.discard(key)
        self.now -= size


def pick_device(name, local_rank):
    """cuda, then mps, then cpu; each rank gets a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cuda", "mps", "cpu"):
            raise RuntimeError("choose cuda, mps or cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device={name} cannot be used here: {str(e).splitlines()[0]}") from None
    return device


def pick_dtype(name, device_type):
    """bfloat16 where the hardware multiplies it faster, float16 on older GPUs, float32 elsewhere."""
    if name != "auto":
        return name
    if device_type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return "bfloat16" if device_type == "cpu" and cpu_has_bf16() else "float32"


def cpu_has_bf16():
    """Does this processor have bfloat16 products (AVX512-BF16 or AMX)? Without them bfloat16 is emulated, and slow."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", lambda: False)() for name in ("avx512_bf16", "amx_tile"))


# --------------------------------------------------------------------------------------------------------- runs and their data

def data_folder(dataset):
    """A data set's folder: data/<name> beside this file, or any folder named by its path."""
    return Path(dataset) if os.sep in dataset or "/" in dataset else HERE / "data" / dataset


def check_vocabulary(config, meta, dataset):
    """Do the token ids of a data set fit a model, and its sequences its windows?"""
    if config.block_size >= meta.get("stride", math.inf):
        raise ValueError(f"block_size={config.block_size}, but the sequences of {dataset} have {meta['stride'] - 1} tokens: lower --block_size, "
                         "or make longer sequences (--length)")
    if meta["vocab_size"] > config.vocab_size:
        raise ValueError(f"the model's vocabulary has vocab_size={config.vocab_size} ids, the data set {dataset} needs {meta['vocab_size']}")


def read_run(out_dir):
    """(meta.json, path of the checkpoint) of a run, named by its folder or by its ckpt.pt."""
    out_dir = Path(out_dir)
    if out_dir.name == "ckpt.pt":
        out_dir = out_dir.parent
    if not (out_dir / "meta.json").exists():
        raise ValueError(f"no run in {out_dir} (no meta.json there): train one with python train.py --out_dir={out_dir}")
    meta = tokens.read_json(out_dir / "meta.json")
    if not isinstance(meta, dict) or "knobs" not in meta:
        raise ValueError(f"{out_dir / 'meta.json'} was not written by train.py (it has no knobs)")
    return meta, out_dir / "ckpt.pt"


def read_checkpoint(path, device="cpu"):
    """The dict in a ckpt.pt: model, optimizer, step. Raises ValueError where the file is no checkpoint of this project."""
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist: the run has saved no checkpoint yet")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:                      # torch raises RuntimeError, UnpicklingError, EOFError or KeyError, as the damage has it
        raise ValueError(f"{path} is no readable checkpoint ({type(e).__name__}): it is damaged or was not written by train.py") from None
    if not isinstance(checkpoint, dict) or not {"model", "optimizer", "step"} <= checkpoint.keys():
        raise ValueError(f"{path} was not written by train.py: it lacks model, optimizer or step")
    return checkpoint


def model_config(stored, given):
    """A GPTConfig from stored knobs and the flags given now: flag, then the recipe of a given --attn, then what is stored."""
    return GPTConfig(**fields_of(GPTConfig, with_recipe(stored, given) | given))


def with_recipe(stored, given):
    """Stored knobs under a given --attn: what the stored recipe had set goes, its constants too, and the given recipe's axes come."""
    if "attn" not in given:
        return stored
    before = attention.recipe(stored["attn"]) if "attn" in stored else {}
    kept = {name: value for name, value in stored.items() if name not in attention.DEFAULTS or before.get(name) != value}
    return kept | {"attn_args": ""} | attention.recipe(given["attn"])


def fields_of(group, values):
    """The entries of a dict that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if name in names}


def load_weights(model, state, path):
    """Copy a checkpoint's weights into a model; a mismatch is an error that names the first tensor that does not fit."""
    own = model.state_dict()
    for name in [*own, *state]:
        if name not in own or name not in state or own[name].shape != state[name].shape:
            shapes = [tuple(d[name].shape) if name in d else "nothing" for d in (state, own)]
            raise ValueError(f"{path} does not fit this model: {name} is {shapes[0]} in the checkpoint and {shapes[1]} in the model; "
                             "give it the run's own --attn and axes, or ones with the same parameters")
    model.load_state_dict(state)


def load_run(out_dir, device, given=None):
    """A run's model on a device, in eval mode, and its meta.json. `given` holds config fields that override the run's own."""
    meta, path = read_run(out_dir)
    model = GPT(model_config(meta["knobs"], given or {}))
    load_weights(model, read_checkpoint(path)["model"], path)
    return model.to(device).eval(), meta


# ---------------------------------------------------------------------------------------------------------------------- loss

def fixed_windows(split, length, count, stride=1):
    """Starts of `count` windows of length+1 tokens, spread evenly over a split, the same at every call; fewer if it is short."""
    last = (len(split) - length - 1) // stride
    if last < 0:
        raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of block_size={length}: lower --block_size or add data")
    count = min(count, max(1, (len(split) - 1) // length)) if count else max(1, (len(split) - 1) // length)
    return np.linspace(0, last, count).astype(np.int64) * stride


@torch.no_grad()
def mean_loss(model, split, machine, count, batch_size, stride=1):
    """Mean loss (nats per token) on `count` fixed windows of a split, 0 for as many as fit; the ranks share them."""
    training, config = model.training, model.config
    model.eval()
    total, seen = 0.0, 0
    starts = fixed_windows(split, config.block_size, count, stride)[machine.rank::machine.world]
    for batch in np.split(starts, range(batch_size, len(starts), batch_size)) if len(starts) else []:
        rows = torch.from_numpy(split.windows(batch, config.block_size + 1, config.vocab_size)).to(machine.device)
        with machine.autocast():
            total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(batch)
        seen += len(batch)
    model.train(training)
    total, seen = machine.sum(total, seen)
    return total / seen


def bits_per_byte(loss, meta, split):
    """Loss in nats per token as bits per byte of text, which compares across tokenizers; None where the tokens are no text."""
    ratio = tokens.bytes_per_token(meta, split)
    return loss / math.log(2) / ratio if ratio else None


# --------------------------------------------------------------------------------------------------------------------- probe

@contextlib.contextmanager
def instead(model, look):
    """Inside this context every attention layer of a forward pass calls look(attend, layer, module, q, k, v, x, table) in place of
    its own attend(q, k, v, x, table): to watch what goes in, or to change it."""
    modules = [block.attn for block in model.transformer.h]
    for layer, module in enumerate(modules):
        module.attend = partial(look, module.attend, layer, module)
    try:
        yield
    finally:
        for module in modules:
            del module.attend


MEASURES = {                                    # name: its meaning, printed under the table
    "sink": "weight on the first token, mean over queries",
    "uniform": "what evenly spread rows would put there",
    "share": "the same weight as a share of the row's absolute weights",
    "times_uniform": "shares on the first token, over those of evenly spread rows",
    "density": "weight on all other tokens",
    "row_mass": "sum of the weights of a row (signed)",
    "extra": "weight on a key outside the sequence",
    "sparsity": "share of exact zeros among the pairs that may attend",
    "empty_rows": "share of rows whose weights are all zero",
    "sink_eps": "Sink_1^0.3: share of sequences whose first 64 queries put over 0.3 on the first token",
    "value_norm_ratio": "norm of the first token's value, over the mean norm of the others",
}


class Probe:
    """Sums of one layer's measures, per head, over the queries of all sequences it is shown."""
    EPS, EPS_ROWS = 0.3, 64

    def __init__(self):
        self.sums = {}

    def add(self, name, value):
        """value (B, H, ...): summed over all but the heads."""
        self.sums[name] = self.sums.get(name, 0) + value.double().flatten(2).sum((0, 2)).cpu()

    def see(self, module, q, k, v, x, table=None, counted=None):
        """Take in one batch: the weights come block by block, (B, H, rows, T), and are summed at once. counted (B, T): which queries count."""
        counted = torch.ones(len(q), q.shape[2] - module.ahead, device=q.device) if counted is None else counted
        start, early = 0, 0                     # early (B, H): share that the first 64 queries put on the first token
        for block, w in enumerate(module.weight_blocks(q, k, x, table)):
            if block == 0:                      # a token ahead of the sequence has no row of its own, and its column is an extra key's
                w = w[:, :, module.ahead:]
            i = torch.arange(start, start + w.shape[2], device=w.device)
            here = counted[:, None, i].expand(w.shape[:3])
            share = self.see_rows(here, w, attention.visible_count(i, module.view), module.has_extra_key or module.ahead)
            early = early + share[:, :, i < self.EPS_ROWS].sum(-1)
            start += w.shape[2]
        B, H = early.shape
        self.add("sequences", torch.ones(B, H, 1))
        self.add("sink_eps", early[..., None] / min(self.EPS_ROWS, start) > self.EPS)
        norm = v[:, :, module.ahead:].float().norm(dim=-1).repeat_interleave(H // v.shape[1], 1)
        self.add("first_norm", norm[..., :1])
        self.add("other_norm", norm[..., 1:].mean(-1, keepdim=True))

    def see_rows(self, here, w, n, has_extra_key):
        """One block: here (B, H, R) says which rows count, n (R,) how many keys each sees. Returns the first token's share (B, H, R)."""
        extra, w = (w[..., 0], w[..., 1:]) if has_extra_key else (torch.zeros_like(w[..., 0]), w)
        share = w[..., 0].abs() / (w.abs().sum(-1) + extra + 1e-8)
        rows = {"rows": torch.ones_like(share), "pairs": n, "uniform": 1 / n, "sink": w[..., 0], "share": share, "row_mass": w.sum(-1),
                "extra": extra, "zeros": n - (w != 0).sum(-1), "empty_rows": (w == 0).all(-1)}
        for name, value in rows.items():
            self.add(name, here * value)
        return share

    def result(self):
        """{measure: (H,) tensor}."""
        s = self.sums
        mean = {name: s[name] / s["rows"] for name in ("sink", "uniform", "share", "row_mass", "extra", "empty_rows")}
        return mean | {"times_uniform": s["share"] / s["uniform"], "density": mean["row_mass"] - mean["sink"],
                       "sparsity": s["zeros"] / s["pairs"], "sink_eps": s["sink_eps"] / s["sequences"],
                       "value_norm_ratio": s["first_norm"] / s["other_norm"]}


def mean_of(probes):
    """{measure: mean over layers and heads}."""
    results = [p.result() for p in probes]
    return {name: float(torch.stack([r[name] for r in results]).mean()) for name in MEASURES}


@torch.no_grad()
def probe(model, split, machine, count=100, batch_size=4, stride=1):
    """The MEASURES of every layer and head on `count` fixed windows: {"mean": {measure: value}, "layers": [{measure: [per head]}]}."""
    layers = [Probe() for _ in model.transformer.h]

    def look(attend, layer, module, *inputs):
        layers[layer].see(module, *inputs)
        return attend(*inputs)

    starts = fixed_windows(split, model.config.block_size, count, stride)
    with instead(model, look):
        for batch in np.split(starts, range(batch_size, len(starts), batch_size)):
            rows = split.windows(batch, model.config.block_size, model.config.vocab_size)
            with machine.autocast():
                model(torch.from_numpy(rows).to(machine.device))
    return {"windows": len(starts), "length": model.config.block_size, "mean": mean_of(layers),
            "layers": [{name: [round(v, 6) for v in layer.result()[name].tolist()] for name in MEASURES} for layer in layers]}


# ------------------------------------------------------------------------------------------------------------------- sink lab

FIRST_ROW = 8                                   # rows before it do not count as idle or copy rows


def true_process(rows, meta):
    """Of sequences (N, T+1) of data/backcopy.py: each target's loss under the process that made it, and which queries are triggers, (N, T)."""
    x, y = rows[:, :-1], rows[:, 1:]
    before = F.pad(x[:, :-1], (1, 0), value=meta["symbols"])            # of the first query: no symbol
    trigger = torch.isin(x, torch.tensor(meta["triggers"], device=x.device))
    bigrams = torch.tensor(meta["bigrams"], dtype=torch.float64).to(x.device, torch.float32)
    p = torch.where(trigger & (before < meta["symbols"]), (y == before).float(), bigrams[x, y.clamp(max=meta["symbols"] - 1)])
    p[:, torch.arange(1, y.shape[1] + 1) == meta["fixed_at"]] = 1.0     # the fixed token's place is known
    return -p.log(), trigger


@torch.no_grad()
def lab(model, split, meta, machine, count=256):
    """Every figure of the sink lab on `count` fixed sequences, as {name: value}.

    Losses are in excess of the true process's, so 0 is perfect. *Copy* rows are queries at triggers, *idle* rows all others, both from
    position 8. zero_cost and hide_cost are what the loss gains when the first token's value is set to zero, and when no later row may
    see its key (with row counts n as they were).
    """
    rows = split.windows(fixed_windows(split, model.config.block_size, count, meta["stride"]), model.config.block_size + 1, model.config.vocab_size)
    rows = torch.from_numpy(rows).to(machine.device)
    bayes, trigger = true_process(rows, meta)
    late = torch.arange(trigger.shape[1], device=rows.device) >= FIRST_ROW
    counted = {"idle": ~trigger & late, "copy": trigger & late, "all": torch.ones_like(trigger)}
    probes = {name: [Probe() for _ in model.transformer.h] for name in counted}

    def look(attend, layer, module, *inputs):
        for name, mask in counted.items():
            probes[name][layer].see(module, *inputs, counted=mask)
        return attend(*inputs)

    def zeroed(attend, layer, module, q, k, v, *more):
        first = torch.arange(v.shape[2], device=v.device)[:, None] == module.ahead
        return attend(q, k, v.masked_fill(first, 0.0), *more)

    def hidden(attend, layer, module, *inputs):
        module.hide = module.ahead
        output = attend(*inputs)
        module.hide = -1
        return output

    loss = {}
    for name, change in (("as_is", look), ("zero", zeroed), ("hide", hidden)):
        with instead(model, change), machine.autocast():
            logits = model(rows[:, :-1])[0]
        loss[name] = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
    excess = loss["as_is"] - bayes
    idle, copy, everything = (mean_of(probes[name]) for name in ("idle", "copy", "all"))
    return {
        **{f"excess_{of}": excess[counted[rows]].mean().item() for of, rows in (("loss", "all"), ("copy", "copy"), ("idle", "idle"))},
        "sink_idle": idle["sink"], "sink_copy": copy["sink"], "row_mass_idle": idle["row_mass"], "share_idle": idle["share"],
        "value_norm_ratio": idle["value_norm_ratio"],
        "zero_cost": (loss["zero"] - loss["as_is"]).mean().item(), "hide_cost": (loss["hide"] - loss["as_is"]).mean().item(),
        "share_copy": copy["share"], "times_uniform_idle": idle["times_uniform"], "times_uniform_copy": copy["times_uniform"],
        "row_mass_copy": copy["row_mass"], "extra_idle": idle["extra"], "extra_copy": copy["extra"],
        "sparsity": everything["sparsity"], "empty_rows": everything["empty_rows"],
    }


def recipe_names(text):
    """The recipes in "all" or in a list with commas. Raises ValueError on one that does not exist."""
    names = list(attention.ATTENTIONS) if text == "all" else text.split(",")
    for name in names:
        attention.recipe(name)
    return names


BLIND = "blind"                                 # the same model whose rows see themselves alone: what can be had without attention


def lab_flags(attn):
    """What a recipe needs to mean anything in the lab: a window shorter than its 64 tokens, a second head where heads are paired, and a
    threshold that some keys pass at first, for with tra's beta of 1 hardly any does, and what gets no gradient learns nothing."""
    axes = attention.recipe(attn)
    return (["--window=16"] * ("window" in axes) + ["--n_head=2"] * (axes.get("diff") == "v1")
            + ["--attn_args=beta_init=0.1"] * (axes["rule"] == "tra"))


def train_in_lab(attn, seed, folder, more):
    """Train one recipe in the lab, in a process of its own, unless its folder holds the result already. Returns its meta.json."""
    flags = ["--preset=lab", f"--attn={attn}", f"--seed={seed}", f"--out_dir={folder}", *more]
    done = tokens.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    if "report" not in done or done["flags"] != flags:
        print(f"training {folder.name}", file=sys.stderr, flush=True)
        process = subprocess.run([sys.executable, HERE / "train.py", *flags], capture_output=True, text=True)
        if process.returncode:
            raise ValueError(f"train.py {' '.join(flags)} failed: {process.stderr.strip().splitlines()[-1]}")
        done = tokens.read_json(folder / "meta.json")
    return done


LAB_TABLE = {                                   # column: the figure behind it
    "excess": "excess_loss", "on copy": "excess_copy", "on idle": "excess_idle", "sink idle": "sink_idle", "sink copy": "sink_copy",
    "share": "share_idle", "x uniform": "times_uniform_idle", "mass": "row_mass_idle", "extra": "extra_idle", "zeros": "sparsity",
    "empty": "empty_rows", "|v0|/|v|": "value_norm_ratio", "zero": "zero_cost", "hide": "hide_cost",
}


def lab_picture(path, runs):
    """Four figures of every recipe side by side: a bar for the mean over seeds, a dot for each seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    panels = {"sink_idle": ("weight on the first token, idle rows", 0, 1.05), "value_norm_ratio": ("norm of the first value over the others", 0, 2.5),
              "row_mass_idle": ("sum of the weights of an idle row", -0.5, 1.5), "excess_copy": ("excess loss on copy rows (nats)", 0, None)}
    names = list(runs)[::-1]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 1.2 + 0.26 * len(names)), sharey=True)
    for ax, (key, (title, low, high)) in zip(axes, panels.items(), strict=True):
        values = [[run[key] for run in runs[name]] for name in names]
        ax.barh(range(len(names)), [np.mean(v) for v in values], color="#9ecae1")
        ax.set_xlim(low, high)
        for y, v in enumerate(values):
            ax.plot(v, [y] * len(v), "o", color="#08519c", markersize=3.5)
            if high and np.mean(v) > high:      # rules without a normaliser may spend anything
                ax.text(high, y, f"{np.mean(v):.3g} ", ha="right", va="center", fontsize=8)
        ax.set_title(title, fontsize=9)
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    figure.supxlabel("a bar is the mean over seeds, a dot one seed; a bar that is cut off has its value beside it", fontsize=9)
    figure.tight_layout(w_pad=2)
    with tokens.replacing(path) as f:
        figure.savefig(f, format="png", dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------------- printing

def table(rows, header):
    """Right-aligned columns as text."""
    cells = [header] + [[c if isinstance(c, str) else "-" if c is None else f"{c:.4f}" for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def first_token(split, machine):
    """What a text of this data set begins with, (1, 1): a prompt when there is none."""
    return torch.from_numpy(split.window(0, 1).astype(np.int64))[None].to(machine.device)


def report(model, machine, dataset, windows, batch_size):
    """What train.py prints at the end of a run: the losses, a first look at the attention, and a sample; in the sink lab, its figures.
    Returns the figures as {name: value}."""
    folder = data_folder(dataset)
    meta = tokens.read_meta(folder, verify=False)
    stride = meta.get("stride", 1)
    splits = {name: tokens.Tokens(folder, name) for name in ("train", "val")}
    losses = {name: mean_loss(model, split, machine, windows, batch_size, stride) for name, split in splits.items()}
    if not machine.main:
        return {}
    print(table([[name, loss, bits_per_byte(loss, meta, name)] for name, loss in losses.items()], ["split", "loss", "bits per byte"]) + "\n")
    if "triggers" in meta:
        found = lab(model, splits["val"], meta, machine)
        print("\n".join(f"{name}: {value:.4f}" for name, value in found.items()))
        return losses | found
    seen = probe(model, splits["val"], machine, 16, 4, stride)["mean"]
    print(f"sink ratio {seen['sink']:.4f} (an even spread puts {seen['uniform']:.4f} on the first token), "
          f"density {seen['density']:.4f}, sparsity {seen['sparsity']:.4f}\n")
    coder = tokens.tokenizer(meta["tokenizer"])
    prompt = first_token(splits["val"], machine)
    print(coder.decode(model.generate(prompt, 240, temperature=0.8, top_k=50, seed=0)[0].tolist()))
    return losses | seen


# ------------------------------------------------------------------------------------------------------------------- commands

def at_least(flags, **bounds):
    for name, bound in bounds.items():
        if not bound <= getattr(flags, name) < math.inf:
            raise ValueError(f"--{name}={getattr(flags, name)} must be a number of at least {bound}")


@dataclass
class Common:
    """Flags of every command that looks at a run"""
    out_dir: str = knob("", "the run to look at")
    dataset: str = knob("", "data set to look at it on: a name in data/ or a folder's path; empty: the one it was trained on")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("float32", "precision of the products", ("auto", "float32", "bfloat16", "float16"))
    json: bool = knob(False, "print JSON instead of a table")


@dataclass
class Loss:
    """Flags of loss"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(0, "fixed windows of block_size tokens, spread evenly; 0: as many as fit")
    batch_size: int = knob(16, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=0, batch_size=1)


def loss_command(args, run):
    """Mean loss of a split on fixed windows."""
    loss = mean_loss(run.model, run.split(args.split), run.machine, args.windows, args.batch_size, run.stride)
    bpb = bits_per_byte(loss, run.data, args.split)
    return {"split": args.split, "loss": loss, "bits_per_byte": bpb}, table([[args.split, loss, bpb]], ["split", "loss", "bits per byte"])


@dataclass
class ProbeFlags:
    """Flags of probe"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(100, "fixed windows of block_size tokens, spread evenly; 0: as many as fit")
    batch_size: int = knob(4, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=0, batch_size=1)


def probe_command(args, run):
    """Where the attention goes, per layer and head."""
    found = probe(run.model, run.split(args.split), run.machine, args.windows, args.batch_size, run.stride)
    rows = [[f"{layer}.{head}"] + [measures[name][head] for name in MEASURES]
            for layer, measures in enumerate(found["layers"]) for head in range(len(measures["sink"]))]
    text = table(rows + [["mean"] + list(found["mean"].values())], ["layer.head", *MEASURES])
    return found, text + "\n\n" + "\n".join(f"{name:>16}  {meaning}" for name, meaning in MEASURES.items())


@dataclass
class Sample:
    """Flags of sample"""
    prompt: str = knob("", "text to continue; empty: whatever token the held-out data begins with, as a rule a separator")
    tokens: int = knob(300, "tokens to generate")
    samples: int = knob(1, "how many continuations")
    temperature: float = knob(0.8, "0: always the likeliest token")
    top_k: int = knob(50, "draw from the k likeliest tokens only; 0: from all")
    top_p: float = knob(0.0, "draw from the fewest tokens whose probabilities reach p; 0: from all")
    seed: int = knob(0, "seed of the draws")

    def __post_init__(self):
        at_least(self, tokens=1, samples=1, temperature=0, top_k=0, top_p=0, seed=0)


def sample_command(args, run):
    """Generate text."""
    coder = tokens.tokenizer(run.data["tokenizer"])
    prompt = torch.from_numpy(coder.encode(args.prompt).astype(np.int64))[None] if args.prompt else first_token(run.split("val"), run.machine)
    idx = prompt.to(run.machine.device).expand(args.samples, -1)
    with run.machine.autocast():
        idx = run.model.generate(idx, args.tokens, args.temperature, args.top_k, args.top_p, args.seed)
    texts = [coder.decode(row) for row in idx.tolist()]
    return {"samples": texts}, "\n---------------\n".join(texts)


@dataclass
class Lab:
    """Flags of lab"""
    attn: str = knob("all", "recipes, separated by commas")
    seeds: str = knob("0,1,2", "seeds, separated by commas")
    out_dir: str = knob("out/lab", "where the runs go, a folder each; those that are there are not trained again")
    results: str = knob("", "where the table and the picture go: this name with .json and .png; empty: results/lab, or out_dir/lab of a part")
    train_args: str = knob("", "more flags for train.py, separated by spaces")
    json: bool = knob(False, "print JSON instead of a table")


def lab_command(args):
    """Train every recipe in the sink lab, on the same data with the same seeds, and put what became of each side by side."""
    recipes = recipe_names(args.attn)
    whole = set(recipes) == set(attention.ATTENTIONS) and not args.train_args and len(numbers(args.seeds)) >= 3
    place = args.results or (HERE / "results" / "lab" if whole else f"{args.out_dir}/lab")
    runs = {name: [] for name in [*recipes, BLIND]}
    for seed in numbers(args.seeds):
        for name in runs:
            attn, more = (name, lab_flags(name)) if name != BLIND else ("window", ["--window=1"])
            runs[name].append(train_in_lab(attn, seed, Path(args.out_dir) / f"{name}-{seed}", [*more, *args.train_args.split()]))
    figures = {name: [{key: run[key] for key in ("parameters", "seconds")} | run["report"] for run in group] for name, group in runs.items()}
    first = runs[recipes[0]][0]
    result = {"flags": dataclasses.asdict(args), "machine": first["machine"], "versions": first["versions"], "runs": figures}
    tokens.write_json(f"{place}.json", result)
    lab_picture(f"{place}.png", figures)
    rows = []
    for name, group in figures.items():
        mean = {key: np.mean([run[key] for run in group]) for key in group[0]}
        rows.append([name, *(f"{mean[key]:.3f}" for key in LAB_TABLE.values()), f"{mean['parameters']:.0f}", f"{mean['seconds']:.0f}"])
    return result, table(rows, ["recipe", *LAB_TABLE, "parameters", "s"]) + f"\n\nmeans over seeds {args.seeds}; all figures in {place}.json"


@dataclass
class Speed:
    """Flags of speed"""
    attn: str = knob("all", "recipes, separated by commas")
    lengths: str = knob("", "context lengths, separated by commas; empty: 256,1024; of the kernels 1024,4096,16384, or 64,128 on a CPU; "
                            "of a run its block_size")
    memory: str = knob("4096,8192,16384", "lengths at which the attention's memory is measured, separated by commas; empty: do not")
    tokens: int = knob(0, "tokens in a training step, or in a call of a kernel; 0: 2048; of the kernels 16384, or 128 on a CPU")
    n_layer: int = knob(4, "blocks of the model that takes the steps")
    n_head: int = knob(2, "its heads")
    n_embd: int = knob(0, "its width; 0: 128; of the kernels, for which it is all heads together, 2048, or 128 on a CPU")
    repeats: int = knob(20, "timed rounds over all recipes; the median counts")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("auto", "precision of the products", ("auto", "float32", "bfloat16", "float16"))
    kernels: bool = knob(False, "instead, the fused kernels alone against torch's own")
    live: bool = knob(False, "instead, of a trained run (--out_dir): which tiles hold any weight, and what skipping the others gains")
    out_dir: str = knob("", "with --live: the run")
    widths: str = knob("64,128", "with --kernels: head widths")
    out: str = knob("", "also save the figures as JSON here; empty, of the kernels on a GPU: results/speed-<its name>.json")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        at_least(self, tokens=0, n_layer=1, n_head=1, n_embd=0, repeats=1)


def interleaved(cases, machine, repeats):
    """Median seconds of each case {name: function}: all cases once, again and again, so that a noisy machine is noisy for all of them."""
    seconds = {name: [] for name in cases}
    for repeat in range(repeats + 2):           # two rounds to warm up
        for name, run in cases.items():
            passed = machine.seconds(run)
            if repeat >= 2:
                seconds[name].append(passed)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def training_step(model, machine, batch):
    """A function that takes one training step."""
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    rows = torch.randint(model.config.vocab_size, (batch, model.config.block_size + 1), device=machine.device)

    def run():
        with machine.autocast():
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def attention_call(model, machine, batch, backward=True):
    """A function that runs the first layer's attention alone, between the projections, forward or both ways."""
    module, T, low = model.transformer.h[0].attn, model.config.block_size, getattr(torch, machine.dtype)

    def draw(heads, width):                     # (B, heads, T, width), laid out in memory as the projections leave it
        return torch.randn(batch, T, heads, width, device=machine.device, dtype=low).transpose(1, 2).requires_grad_(backward)

    q, k, v = (draw(*shape) for shape in module.shapes.values())
    x = torch.randn(batch, T, model.config.n_embd, device=machine.device)
    with machine.autocast(), torch.no_grad():
        do = torch.randn_like(module.attend(q, k, v, x))

    def run():
        with machine.autocast(), torch.set_grad_enabled(backward):
            o = module.attend(q, k, v, x, getattr(module, "table", None))
        if backward:
            o.backward(do)

    return run


def compare(cases, make_model, T, batch, machine, repeats):
    """Time every case at one length. Returns {name: {"tokens_per_s": .., and speed against the first case of "step", "forward", "both"}}."""
    models = {name: make_model(*case, T) for name, case in cases.items()}
    seconds = {
        "step": interleaved({name: training_step(m, machine, batch) for name, m in models.items()}, machine, repeats),
        "forward": interleaved({name: attention_call(m, machine, batch, False) for name, m in models.items()}, machine, repeats),
        "both": interleaved({name: attention_call(m, machine, batch) for name, m in models.items()}, machine, repeats)}
    first = next(iter(cases))
    return {name: {"tokens_per_s": batch * T / seconds["step"][name]} | {of: times[first] / times[name] for of, times in seconds.items()}
            for name in cases}


def numbers(text):
    if not text or not all(number.isdigit() for number in text.split(",")):
        raise ValueError(f"{text!r} must be whole numbers separated by commas")
    return [int(number) for number in text.split(",")]


# T x T x width products that a rule needs, forward and backward: entmax's forward looks for its threshold some six times
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
    seconds = {"forward": interleaved({name: run for name, (run, *_) in cases.items()}, machine, args.repeats),
               "backward": interleaved(backward, machine, args.repeats)}
    base, rows = "softmax" if "softmax" in cases else next(iter(cases)), {name: {"missing": why} for name, why in missing.items()}
    for name, (_, *products) in cases.items():
        flops = {way: count * batch * heads * T * T * width for way, count in zip(seconds, products, strict=True)}     # 2 each, halved: causal
        rows[name] = {way: flops[way] / seconds[way][name] / 1e12 for way in seconds}
        rows[name] |= {f"{way}_ratio": seconds[way][base] / seconds[way][name] for way in seconds}
    return rows


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


LIVE_TILE = (attention.BLOCK, 64)               # rows and keys of a tile, as the kernels have them at widths up to 128


@torch.no_grad()
def live_tiles(module, q, k, v, x, table=None):
    """Counts of one layer's tiles and pairs, {"tiles", "live_tiles", "pairs", "live_pairs"}: those in sight, and those with any weight."""
    counts = dict.fromkeys(("tiles", "live_tiles", "pairs", "live_pairs"), 0)
    for (_, i), w in zip(attention.row_blocks(q.shape[2], k.shape[2], q.device), module.score_blocks(q, k, table), strict=True):
        w = w[..., -k.shape[2]:]                # without an extra key's column
        seen = attention.visible(i[:, None], torch.arange(k.shape[2], device=q.device), module.view).expand_as(w)
        for name, cells in (("", seen), ("live_", w != 0)):
            counts[f"{name}pairs"] += cells.sum().item()
            counts[f"{name}tiles"] += F.pad(cells, (0, -k.shape[2] % LIVE_TILE[1])).unflatten(-1, (-1, LIVE_TILE[1])).any(-1).any(2).sum().item()
    return counts


def gain_of_skipping(module, machine, repeats, q, k, v, x, table=None):
    """How much faster this layer's attention is, both ways, if its kernel skips dead tiles; None where no kernel runs here."""
    if attention.choose_kernel(module.config, q.device.type) != "triton":
        return None
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]

    def call(skip):
        module.skip = skip
        with machine.autocast():
            module.attend(*leaves, x, table).float().square().mean().backward()
        module.skip = True

    seconds = interleaved({skip: partial(call, skip) for skip in (True, False)}, machine, repeats)
    return seconds[False] / seconds[True]


def live_command(args):
    """Of a trained run, on its held-out data: the share of tiles that hold any weight, and the gain of visiting only those."""
    if not args.out_dir:
        raise ValueError("--live looks at a trained run, never at random numbers: name it with --out_dir=out/...")
    run = Loaded(Common(out_dir=args.out_dir, device=args.device, dtype=args.dtype), {})
    result, text = {"machine": str(run.machine), "out_dir": args.out_dir, "tile": LIVE_TILE, "lengths": {}}, []
    for T in numbers(args.lengths or str(run.model.config.block_size)):
        layers = []

        def look(attend, layer, module, *inputs, layers=layers):
            layers.append((module, [part.clone() if part is not None else None for part in inputs]))
            return attend(*inputs)

        rows = run.split("val").windows(fixed_windows(run.split("val"), T, 4, run.stride), T, run.model.config.vocab_size)
        with instead(run.model, look), run.machine.autocast(), torch.no_grad():
            run.model(torch.from_numpy(rows).to(run.machine.device))
        found = [live_tiles(module, *inputs) | {"gain": gain_of_skipping(module, run.machine, args.repeats, *inputs)} for module, inputs in layers]
        result["lengths"][T] = found
        lines = {str(layer): counts for layer, counts in enumerate(found)}
        lines["all"] = {name: sum(counts[name] for counts in found) for name in ("tiles", "live_tiles", "pairs", "live_pairs")} | {"gain": None}
        text.append(f"T={T}: tiles of {LIVE_TILE[0]} rows and {LIVE_TILE[1]} keys\n" + table(
            [[name, f["live_tiles"] / f["tiles"], f["live_pairs"] / f["pairs"], f["gain"]] for name, f in lines.items()],
            ["layer", "live tiles", "live pairs", "speed"]))
    if found[0]["gain"] is None:
        text.append("no speed: the fused kernels, which skip dead tiles, do not run here")
    save_result(args, result)
    run.machine.close()
    return result, f"{run.machine}; {args.out_dir}\n\n" + "\n\n".join(text)


def save_result(args, result):
    if args.out:
        tokens.write_json(args.out, result)


def speed_command(args):
    """Training steps and attention alone, of every recipe against softmax through torch's own fused kernel, side by side in one process."""
    if args.kernels:
        return kernels_command(args)
    if args.live:
        return live_command(args)
    machine, names = Machine(args.device, args.dtype), recipe_names(args.attn)
    cases = {"softmax (sdpa)": ("softmax", "sdpa"), "softmax (torch)": ("softmax", "torch")}
    cases |= {name: (name, "auto") for name in names if name != "softmax"}

    def make_model(attn, kernel, T):
        return GPT(GPTConfig(attn=attn, kernel=kernel, block_size=T, vocab_size=257, n_layer=args.n_layer, n_head=args.n_head,
                             n_embd=args.n_embd or 128, bias_range=min(T, 512))).to(machine.device)

    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    result, text = {"machine": str(machine), "load_average": load, "lengths": {}, "memory_mb": {name: {} for name in cases}}, []
    for T in numbers(args.lengths or "256,1024"):
        batch = max(1, (args.tokens or 2048) // T)
        rows = result["lengths"][T] = compare(cases, make_model, T, batch, machine, args.repeats)
        text.append(f"T={T}, {batch} sequences: training steps, and how fast they and attention alone are against the first row\n" + table(
            [[name, f"{row['tokens_per_s']:,.0f}", *(f"{row[key]:.2f}" for key in ("step", "forward", "both"))] for name, row in rows.items()],
            ["recipe", "tokens/s", "step", "forward", "forward + backward"]))
    lengths = numbers(args.memory) if args.memory else []
    for name, case in cases.items():
        for T in lengths:
            used = machine.peak_memory(attention_call(make_model(*case, T), machine, 1))
            result["memory_mb"][name][T] = round(used / 2**20, 3)
    if lengths:
        text.append("memory that one layer's attention takes beside its inputs, forward and backward, one sequence (MB)\n" + table(
            [[name, *(f"{mb:.0f}" for mb in row.values())] for name, row in result["memory_mb"].items()], ["recipe", *(f"T={T}" for T in lengths)]))
    save_result(args, result)
    return result, f"{machine}; load average {load}\n\n" + "\n\n".join(text)


# ------------------------------------------------------------------------------------------------------------------------ main

class Loaded:
    """A run as the commands see it: its model on this machine, and the data to look at it on."""

    def __init__(self, common, given):
        self.machine = Machine(common.device, common.dtype)
        self.model, meta = load_run(common.out_dir, self.machine.device, given)
        self.folder = data_folder(common.dataset or meta["knobs"]["dataset"])
        self.data = tokens.read_meta(self.folder)
        self.stride = self.data.get("stride", 1)
        check_vocabulary(self.model.config, self.data, self.folder)

    def split(self, name):
        return tokens.Tokens(self.folder, name)


def given_flags(args, *knobs):
    """The values that were set on the command line, as {name: value}, for the fields of these dataclasses."""
    return {name: value for group in knobs for name, value in fields_of(group, vars(args)).items() if value is not None}


OVERRIDES = dataclasses.make_dataclass("Overrides", [  # the choices of a run that can be looked at otherwise
    (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata)) for f in dataclasses.fields(GPTConfig)
    if f.name in ("attn", "attn_args", "kernel", *attention.DEFAULTS)])
OVERRIDES.__doc__ = "Overrides of the run's own choices"

COMMANDS = {"loss": (loss_command, Loss), "probe": (probe_command, ProbeFlags), "sample": (sample_command, Sample), "lab": (lab_command, Lab),
            "speed": (speed_command, Speed)}


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        parser = Parser(prog="eval.py", description=__doc__)
        parser.parse_args([a for a in argv if a in ("-h", "--help")])
        parser.error(f"the first word must be a command: {', '.join(COMMANDS)}" + (f", not {argv[0]!r}" if argv else ""))
    command, flags = COMMANDS[argv[0]]
    of_runs = flags not in (Lab, Speed)         # these make models of their own
    parser = Parser(prog=f"eval.py {argv[0]}", description=command.__doc__)
    add_flags(parser, *((flags, Common, OVERRIDES) if of_runs else (flags,)))
    parsed = parser.parse_args(argv[1:])
    if of_runs and not parsed.out_dir:
        parser.error("which run? give --out_dir=out/...")
    try:
        args = flags(**given_flags(parsed, flags))
    except ValueError as e:
        parser.error(str(e))
    with tokens.one_line_errors():
        if of_runs:
            run = Loaded(Common(**given_flags(parsed, Common)), given_flags(parsed, OVERRIDES))
            result, text = command(args, run)
            if run.machine.main:
                print(json.dumps(result, indent=2) if parsed.json else text)
            run.machine.close()
        else:
            result, text = command(args)
            print(json.dumps(result, indent=2) if args.json else text)


if __name__ == "__main__":
    main(sys.argv[1:])
