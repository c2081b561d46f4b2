"""The instruments: look at a trained run.    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]

    loss      loss in nats per token and bits per byte on fixed windows (also under torchrun, which splits the windows over the ranks)
    probe     where the attention goes: sinks, density, exact zeros, per layer and head
    sample    generate text

The model is rebuilt from the run's meta.json alone; --attn and the flags of its axes override it where the parameters allow.
Definitions of the measures: sinks as in Gu et al. 2410.10781 (Sink_1^eps) and Lazy Attention 2601.00919, appendix C.3 (sink ratio,
density); sparsity as in Threshold Differential Attention 2601.12145, appendix D.1.
"""
import contextlib
import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import attention
from data import tokens
from model import GPT, GPTConfig, Parser, add_flags, knob

HERE = Path(__file__).parent

# ----------------------------------------------------------------------------------------------------------- where we run

class Machine:
    """The device, the precision, and this process's place among the ranks that torchrun started."""

    def __init__(self, device="auto", dtype="auto"):
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device, self.local_rank)
        self.dtype = pick_dtype(dtype, self.device.type)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def main(self):
        return self.rank == 0

    def autocast(self):
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.dtype))

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


def pick_device(name, local_rank):
    """cuda, then mps, then cpu; each rank gets a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
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
    """Do the token ids of a data set fit a model?"""
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
    chosen = attention.recipe(given["attn"]) if given.get("attn") else {}
    return GPTConfig(**fields_of(GPTConfig, stored | chosen | given))


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
            raise ValueError(f"{path} does not fit this model: {name} is {shapes[0]} in the checkpoint and {shapes[1]} in the model")
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
def watching(model, see):
    """Inside this context every attention layer of a forward pass calls see(layer, module, q, k, v, x, *more) before it attends."""
    def watched(layer, module, attend, *inputs):
        see(layer, module, *inputs)
        return attend(*inputs)

    modules = [block.attn for block in model.transformer.h]
    for layer, module in enumerate(modules):
        module.attend = partial(watched, layer, module, module.attend)
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
    "sparsity": "share of exact zeros among the pairs that may attend",
    "empty_rows": "share of rows whose weights are all zero",
    "sink_eps": "Sink_1^0.3: share of sequences whose first 64 queries put over 0.3 on the first token",
}


class Probe:
    """Sums of one layer's measures, per head, over all queries of all sequences it is shown."""
    EPS, EPS_ROWS = 0.3, 64

    def __init__(self):
        self.sums = {}

    def add(self, name, value):
        """value (B, H, ...): summed over all but the heads."""
        self.sums[name] = self.sums.get(name, 0) + value.double().flatten(2).sum((0, 2)).cpu()

    def see(self, module, q, k, v, x, *more):
        """Take in one batch: the weights come block by block, (B, H, rows, T), and are summed at once."""
        start, early = 0, 0                     # early (B, H): share of the first 64 queries on the first token
        for w in module.weight_blocks(q, k, x, *more):
            i = torch.arange(start, start + w.shape[2], device=w.device)
            n = attention.visible_count(i).expand(w.shape[:3])
            share = w.abs() / (w.abs().sum(-1, keepdim=True) + 1e-8)
            self.add("rows", torch.ones_like(n))
            self.add("pairs", n)
            self.add("uniform", 1 / n)
            self.add("sink", w[..., 0])
            self.add("share", share[..., 0])
            self.add("row_mass", w.sum(-1))
            self.add("zeros", n - (w != 0).sum(-1))
            self.add("empty_rows", (w == 0).all(-1))
            early = early + share[:, :, i < self.EPS_ROWS, 0].sum(-1)
            start += w.shape[2]
        self.add("sequences", torch.ones_like(early[..., None]))
        self.add("sink_eps", early[..., None] / min(self.EPS_ROWS, start) > self.EPS)

    def result(self):
        """{measure: (H,) tensor}."""
        s = self.sums
        mean = {name: s[name] / s["rows"] for name in ("sink", "uniform", "share", "row_mass", "empty_rows")}
        return mean | {"times_uniform": s["share"] / s["uniform"], "density": mean["row_mass"] - mean["sink"],
                       "sparsity": s["zeros"] / s["pairs"], "sink_eps": s["sink_eps"] / s["sequences"]}


@torch.no_grad()
def probe(model, split, machine, count=100, batch_size=4, stride=1):
    """The MEASURES of every layer and head on `count` fixed windows: {"mean": {measure: value}, "layers": [{measure: [per head]}]}."""
    layers = [Probe() for _ in model.transformer.h]
    starts = fixed_windows(split, model.config.block_size, count, stride)
    with watching(model, lambda layer, module, *inputs: layers[layer].see(module, *inputs)):
        for batch in np.split(starts, range(batch_size, len(starts), batch_size)):
            rows = split.windows(batch, model.config.block_size, model.config.vocab_size)
            with machine.autocast():
                model(torch.from_numpy(rows).to(machine.device))
    results = [layer.result() for layer in layers]
    return {"windows": len(starts), "length": model.config.block_size,
            "mean": {name: float(torch.stack([r[name] for r in results]).mean()) for name in MEASURES},
            "layers": [{name: [round(v, 6) for v in r[name].tolist()] for name in MEASURES} for r in results]}


# ------------------------------------------------------------------------------------------------------------------- printing

def table(rows, header):
    """Right-aligned columns as text."""
    cells = [header] + [[c if isinstance(c, str) else "-" if c is None else f"{c:.4f}" for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def report(model, machine, dataset, windows, batch_size):
    """What train.py prints at the end of a run: the losses, a first look at the attention, and a sample. Returns the losses."""
    folder = data_folder(dataset)
    meta = tokens.read_meta(folder, verify=False)
    stride = meta.get("stride", 1)
    splits = {name: tokens.Tokens(folder, name) for name in ("train", "val")}
    losses = {name: mean_loss(model, split, machine, windows, batch_size, stride) for name, split in splits.items()}
    if machine.main:
        print(table([[name, loss, bits_per_byte(loss, meta, name)] for name, loss in losses.items()], ["split", "loss", "bits per byte"]))
        seen = probe(model, splits["val"], machine, 16, 4, stride)["mean"]
        print(f"\nsink ratio {seen['sink']:.4f} (an even spread puts {seen['uniform']:.4f} on the first token), "
              f"density {seen['density']:.4f}, sparsity {seen['sparsity']:.4f}\n")
        coder = tokens.tokenizer(meta["tokenizer"])
        prompt = torch.tensor([[coder.separator]], device=machine.device)
        print(coder.decode(model.generate(prompt, 240, temperature=0.8, top_k=50, seed=0)[0].tolist()))
    return losses


# ------------------------------------------------------------------------------------------------------------------- commands

@dataclass
class Common:
    """Flags of every command"""
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


def loss_command(args, model, machine, folder, meta):
    """Mean loss of a split."""
    loss = mean_loss(model, tokens.Tokens(folder, args.split), machine, args.windows, args.batch_size, meta.get("stride", 1))
    bpb = bits_per_byte(loss, meta, args.split)
    return {"split": args.split, "loss": loss, "bits_per_byte": bpb}, table([[args.split, loss, bpb]], ["split", "loss", "bits per byte"])


@dataclass
class ProbeFlags:
    """Flags of probe"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(100, "fixed windows of block_size tokens, spread evenly")
    batch_size: int = knob(4, "windows per forward pass")


def probe_command(args, model, machine, folder, meta):
    """Where the attention goes."""
    found = probe(model, tokens.Tokens(folder, args.split), machine, args.windows, args.batch_size, meta.get("stride", 1))
    rows = [[f"{layer}.{head}"] + [measures[name][head] for name in MEASURES]
            for layer, measures in enumerate(found["layers"]) for head in range(model.config.n_head)]
    text = table(rows + [["mean"] + list(found["mean"].values())], ["layer.head", *MEASURES])
    return found, text + "\n\n" + "\n".join(f"{name:>13}  {meaning}" for name, meaning in MEASURES.items())


@dataclass
class Sample:
    """Flags of sample"""
    prompt: str = knob("", "text to continue; empty: a document's beginning")
    tokens: int = knob(300, "tokens to generate")
    samples: int = knob(1, "how many continuations")
    temperature: float = knob(0.8, "0: always the likeliest token")
    top_k: int = knob(50, "draw from the k likeliest tokens only; 0: from all")
    top_p: float = knob(0.0, "draw from the fewest tokens whose probabilities reach p; 0: from all")
    seed: int = knob(0, "seed of the draws")


def sample_command(args, model, machine, folder, meta):
    """Generate text."""
    if args.tokens < 1 or args.samples < 1 or args.temperature < 0 or args.top_k < 0 or not 0 <= args.top_p <= 1:
        raise ValueError("sample needs --tokens and --samples of at least 1, --temperature and --top_k of at least 0, --top_p in [0, 1]")
    coder = tokens.tokenizer(meta["tokenizer"])
    prompt = coder.encode(args.prompt).tolist() or [coder.separator]
    idx = torch.tensor([prompt] * args.samples, device=machine.device)
    with machine.autocast():
        idx = model.generate(idx, args.tokens, args.temperature, args.top_k, args.top_p, args.seed)
    texts = [coder.decode(row) for row in idx.tolist()]
    return {"samples": texts}, "\n---------------\n".join(texts)


COMMANDS = {"loss": (Loss, loss_command), "probe": (ProbeFlags, probe_command), "sample": (Sample, sample_command)}


def given_flags(args, *knobs):
    """The values that were set on the command line, as {name: value}, for the fields of these dataclasses."""
    return {name: value for group in knobs for name, value in fields_of(group, vars(args)).items() if value is not None}


def main(argv):
    parser = Parser(prog="eval.py", description=__doc__)
    if not argv or argv[0] not in COMMANDS:
        parser.parse_args([a for a in argv if a in ("-h", "--help")])
        parser.error(f"the first word must be a command: {', '.join(COMMANDS)}" + (f", not {argv[0]!r}" if argv else ""))
    flags, command = COMMANDS[argv[0]]
    parser = Parser(prog=f"eval.py {argv[0]}", description=command.__doc__)
    overrides = dataclasses.make_dataclass("Overrides", [(f.name, f.type, f) for f in dataclasses.fields(GPTConfig)
                                                         if f.name in ("attn", "attn_args", "kernel", *attention.AXES)])
    overrides.__doc__ = "Overrides of the run's own choices"
    add_flags(parser, Common, flags, overrides)
    parsed = parser.parse_args(argv[1:])
    common, args = (group(**given_flags(parsed, group)) for group in (Common, flags))
    if not common.out_dir:
        parser.error("which run? give --out_dir=out/...")
    for name in ("windows", "batch_size"):
        if getattr(args, name, 1) < (name == "batch_size"):
            parser.error(f"--{name} is too small")
    with tokens.one_line_errors():
        machine = Machine(common.device, common.dtype)
        model, run = load_run(common.out_dir, machine.device, given_flags(parsed, overrides))
        dataset = common.dataset or run["knobs"]["dataset"]
        meta = tokens.read_meta(data_folder(dataset))
        check_vocabulary(model.config, meta, dataset)
        result, text = command(args, model, machine, data_folder(dataset), meta)
        if machine.main:
            print(json.dumps(result, indent=2) if common.json else text)
        machine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
