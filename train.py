"""Train a GPT with any attention recipe.

    python train.py --attn=elastic                         on whatever this machine has: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train.py --attn=elastic    on eight GPUs, or on as many CPU processes
    python train.py --attn=elastic --init_from=resume      go on where a stopped or killed run was last saved

A flag given here beats the recipe (--attn), which beats the preset (--preset), which beats the defaults below.
A run writes out/<dataset>-<attn>/: ckpt.pt (model, optimizer, step), meta.json (every knob, versions, hashes, losses) and log.csv.
With -h every knob, its meaning and its default in brackets (the default preset, tiny, changes some; see the presets at the end).
"""
import contextlib
import math
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import attention
from data import files, tokens
from common.flags import Parser, add_flags, at_least, fields_of, given_flags, knob, shown, with_recipe
from common.machine import Machine
from common.runs import Run, describe, load_weights, read_checkpoint, read_run
from evals.loss import mean_loss
from evals.report import report
from model import GPT, GPTConfig

HERE = Path(__file__).parent

# --------------------------------------------------------------------------------------------------------------------- knobs

@dataclass
class Train:
    """How to train"""
    # what to train, and where it goes
    preset: str = knob("tiny", "a named set of values for the other knobs", ("tiny", "lab", "gpt2", "paper1", "paper2", "paper5"))
    dataset: str = knob("stdlib", "a name in data/, or the path of a folder that a data script wrote")
    out_dir: str = knob("", "where the run goes; empty: out/<dataset>-<attn>")
    init_from: str = knob("scratch", "scratch; resume: go on from out_dir's checkpoint; or a run's path: start from its weights")
    # how much
    max_iters: int = knob(1000, "optimizer steps")
    batch_size: int = knob(16, "sequences per forward pass on one device, at most")
    gradient_accumulation_steps: int = knob(1, "a step sees batch_size times this many sequences, shared out over all ranks")
    # AdamW, with linear warm-up and cosine decay
    learning_rate: float = knob(6e-4, "largest learning rate")
    head_lr: float = knob(1.0, "factor on it for what attention learns outside linear layers (tau and its kin)")
    weight_decay: float = knob(0.1, "on matrices and embeddings only")
    beta1: float = knob(0.9, "AdamW's first beta")
    beta2: float = knob(0.95, "AdamW's second beta")
    grad_clip: float = knob(1.0, "largest gradient norm; 0: no limit")
    decay_lr: bool = knob(True, "cosine decay of the learning rate; 0: constant after the warm-up")
    warmup_iters: int = knob(100, "steps of linear warm-up")
    lr_decay_iters: int = knob(0, "step at which the learning rate reaches min_lr; 0: max_iters")
    min_lr: float = knob(-1.0, "learning rate at the end; negative: a tenth of learning_rate")
    # looking and saving
    eval_interval: int = knob(250, "steps between evaluations; each also saves a checkpoint")
    eval_iters: int = knob(20, "an evaluation reads this many times batch_size fixed windows")
    log_interval: int = knob(10, "steps between rows of log.csv")
    # the machine
    seed: int = knob(1337, "seed of initial weights, data order and dropout")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("auto", "precision of the products; auto: bfloat16 where it is fast", ("auto", "float32", "bfloat16", "float16"))
    compile: bool = knob(False, "torch.compile the model")

    def __post_init__(self):
        at_least(self, max_iters=1, batch_size=1, gradient_accumulation_steps=1, eval_interval=1, eval_iters=1, log_interval=1,
                 head_lr=0, weight_decay=0, grad_clip=0, warmup_iters=0, lr_decay_iters=0, seed=0)
        if not 0 < self.learning_rate < math.inf or math.isnan(self.min_lr):
            raise ValueError(f"--learning_rate={self.learning_rate} and --min_lr={self.min_lr} must be numbers, the first above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"--beta1={self.beta1} and --beta2={self.beta2} must lie in [0, 1)")


PRESETS = {
    "tiny": {
        "about": "a byte model of 0.8M parameters: minutes on two CPU cores",
        "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "batch_size": 8, "max_iters": 1000, "learning_rate": 2e-3},
    "lab": {
        "about": "the sink lab: a sink grows in one layer with one head, in well under a minute",
        "dataset": "backcopy", "n_layer": 1, "n_head": 1, "n_embd": 64, "n_inner": 256, "block_size": 64, "pos": "learned", "norm": "layernorm",
        "mlp": "relu", "bias": True, "bias_range": 64, "tied": False, "batch_size": 48, "max_iters": 800, "warmup_iters": 100,
        "learning_rate": 1e-2, "beta2": 0.999, "weight_decay": 0.01, "eval_interval": 200, "eval_iters": 5, "dtype": "float32"},
    "gpt2": {
        "about": "GPT-2 small (124M) as nanoGPT trains it, half a million tokens a step; on FineWeb-Edu where nanoGPT has OpenWebText",
        "dataset": "fineweb_edu", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "pos": "learned",
        "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied": True, "batch_size": 16, "gradient_accumulation_steps": 32,
        "max_iters": 19_000, "learning_rate": 6e-4, "warmup_iters": 700, "eval_interval": 250, "eval_iters": 20},
    "paper1": {
        "about": "Lazy Attention, appendix C.2: 340M on 15B tokens. There the Llama 2 tokenizer (32k ids), here GPT-2's, so 360M; the "
                 "number of heads and the width of the MLP are not printed and follow DeltaNet's 340M",
        "dataset": "fineweb_edu", "n_layer": 24, "n_head": 16, "n_embd": 1024, "n_inner": 2816, "block_size": 4096, "vocab_size": 50304,
        "pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": True, "batch_size": 8, "gradient_accumulation_steps": 16,
        "max_iters": 28_610, "learning_rate": 4e-4, "weight_decay": 0.01, "warmup_iters": 1024, "eval_interval": 500, "eval_iters": 20},
    "paper2": {
        "about": "Threshold Differential Attention, appendix D: GPT-2 162M with RoPE and a head of its own, same tokenizer and data; "
                 "there 190,730 steps, here one pass over the data; the peak learning rate is not printed",
        "dataset": "fineweb_edu", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "pos": "rope",
        "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied": False, "batch_size": 16, "gradient_accumulation_steps": 32,
        "max_iters": 19_000, "learning_rate": 1e-3, "warmup_iters": 715, "eval_interval": 250, "eval_iters": 20},
    "paper5": {
        "about": "When Attention Sink Emerges: LLaMA blocks of 59M beside their embeddings, 20k steps. There the Pile with its own "
                 "tokenizer, here FineWeb-Edu with GPT-2's; the batch follows from 5B tokens in 20k steps",
        "dataset": "fineweb_edu", "n_layer": 10, "n_head": 8, "n_embd": 768, "n_inner": 1536, "block_size": 2048, "vocab_size": 50304,
        "pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": False, "batch_size": 16, "gradient_accumulation_steps": 8,
        "max_iters": 20_000, "learning_rate": 4e-4, "warmup_iters": 100, "eval_interval": 250, "eval_iters": 20},
}

MAY_CHANGE = {"out_dir", "device", "dtype", "compile", "kernel", "max_iters", "eval_interval", "log_interval"}  # on resume


def about_preset(name):
    """A preset as -h shows it."""
    about, *flags = PRESETS[name].items()
    lines = textwrap.wrap(about[1], 140) + textwrap.wrap(" ".join(f"--{knob}={shown(value)}" for knob, value in flags), 140, break_on_hyphens=False)
    return f"  {name}\n" + textwrap.indent("\n".join(lines), "      ")


def about_recipe(name):
    axes = attention.ATTENTIONS[name]
    return f"  {name:18}" + " ".join(f"--{axis}={value}" for axis, value in axes.items() if axis != "args") + "".join(
        f" --attn_args={key}={shown(value)}" for key, value in axes.get("args", {}).items())


def settle_knobs(args):
    """All knobs of this run from the flags given, as one dict, and the meta.json of the run to resume or None."""
    given = given_flags(args, Train, GPTConfig)
    if given.get("init_from") == "resume":
        return resume_knobs(given)
    base = dict(PRESETS[given.get("preset", Train.preset)])
    if given.get("init_from", "scratch") != "scratch":                  # weights of another run: its model, unless a flag says otherwise
        given["init_from"] = str(read_run(given["init_from"])[1])
        knobs = read_run(given["init_from"])[0]["knobs"]
        base |= fields_of(GPTConfig, knobs) | {"dataset": knobs["dataset"]}
    return with_recipe(base, given, attention.ATTENTIONS, attention.DEFAULTS), None


def resume_knobs(given):
    """The run's own knobs; flags may only repeat them, or change what MAY_CHANGE allows."""
    preset = PRESETS[given.get("preset", Train.preset)]
    named = {"dataset": Train.dataset, "attn": GPTConfig.attn} | preset | given
    out_dir = given.get("out_dir") or default_out_dir(named["dataset"], named["attn"])
    meta, _ = read_run(out_dir)
    stored = meta["knobs"]
    for name, value in given.items():
        decided = value == 0 and name in ("n_kv_head", "vocab_size")    # 0 asked the run to decide, and it has
        if name not in MAY_CHANGE | {"init_from"} and value != stored.get(name, value) and not decided:
            raise ValueError(f"{out_dir} was trained with {name}={stored[name]}, so it cannot resume with {name}={value}: "
                             "leave the flag away, or start a new run with another --out_dir")
    return stored | {n: v for n, v in given.items() if n in MAY_CHANGE} | {"out_dir": out_dir}, meta


def default_out_dir(dataset, attn):
    return f"out/{Path(dataset).name}-{attn}"


# ---------------------------------------------------------------------------------------------------------------------- data

OFFLINE = ("stdlib", "backcopy")                         # data sets that train.py makes by itself, because they need no network


def prepare_data(dataset, machine):
    """Make a data set that needs no network, if it is not there yet; one rank of each machine does it while the others wait."""
    if dataset in OFFLINE and machine.local_rank == 0 and not (tokens.data_folder(dataset) / "meta.json").exists():
        if subprocess.run([sys.executable, HERE / "data" / f"{dataset}.py"]).returncode:
            raise ValueError(f"data/{dataset}.py failed: see the line above")
    machine.wait()


class Batches:
    """Training batches as a pure function of (seed, step, sample): resuming needs no state, and every split of the step's samples
    over ranks and micro-steps reads the same tokens."""

    def __init__(self, split, config, knobs, machine, stride):
        self.split, self.config, self.knobs, self.machine, self.stride = split, config, knobs, machine, stride
        self.thread, self.ahead, self.waited = ThreadPoolExecutor(1), {}, 0.0   # waited: seconds that steps spent on their batches
        self.choices = (len(split) - config.block_size - 1) // stride + 1
        if self.choices < 1:
            raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of block_size={config.block_size}: "
                             "lower --block_size or add data")
        self.total = knobs.batch_size * knobs.gradient_accumulation_steps
        if self.total % machine.world:
            raise ValueError(f"{self.total} sequences a step (batch_size {knobs.batch_size} x gradient_accumulation_steps "
                             f"{knobs.gradient_accumulation_steps}) cannot be shared by {machine.world} ranks: make it a multiple of {machine.world}")

    def read(self, step):
        """This rank's micro-batches of a step: pairs of inputs and targets, (at most batch_size, T) each."""
        # every rank draws the whole step's windows and takes its own part of them
        starts = np.random.default_rng([self.knobs.seed, step]).integers(0, self.choices, self.total) * self.stride
        own, micro_batches = starts.reshape(self.machine.world, -1)[self.machine.rank], []
        for part in np.split(own, range(self.knobs.batch_size, len(own), self.knobs.batch_size)):
            rows = torch.from_numpy(self.split.windows(part, self.config.block_size + 1, self.config.vocab_size))
            if self.machine.device.type == "cuda":
                rows = rows.pin_memory()        # so that the copy to the GPU runs beside its work
            rows = rows.to(self.machine.device, non_blocking=True)
            micro_batches.append((rows[:, :-1], rows[:, 1:]))
        return micro_batches

    def __call__(self, step):
        """The micro-batches of a step, which a thread has read while the step before was computed."""
        found = self.ahead.pop(step, None) or self.thread.submit(self.read, step)
        started = time.perf_counter()
        micro_batches = found.result()
        self.waited += time.perf_counter() - started
        self.ahead = {step + 1: self.thread.submit(self.read, step + 1)}
        return micro_batches


# ------------------------------------------------------------------------------------------------------------------ training

def learning_rate(step, knobs):
    """Of step 1, 2, ...: linear warm-up, then cosine from learning_rate to min_lr at lr_decay_iters, then min_lr."""
    end, low = knobs.lr_decay_iters or knobs.max_iters, knobs.min_lr if knobs.min_lr >= 0 else knobs.learning_rate / 10
    if step <= knobs.warmup_iters:
        return knobs.learning_rate * step / knobs.warmup_iters
    if not knobs.decay_lr:
        return knobs.learning_rate
    done = min(1.0, (step - knobs.warmup_iters) / max(1, end - knobs.warmup_iters))
    return low + (knobs.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """One optimizer step at a time."""

    def __init__(self, model, knobs, machine, batches):
        self.model, self.knobs, self.machine, self.batches = model, knobs, machine, batches
        self.optimizer = model.configure_optimizers(knobs.weight_decay, knobs.learning_rate, (knobs.beta1, knobs.beta2), knobs.head_lr)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == "float16")
        self.running = torch.compile(model) if knobs.compile else model
        if machine.world > 1:
            self.running = DistributedDataParallel(self.running)

    def step(self, step, stop):
        """One update. Returns its loss, the norm of its gradient and whether any rank was asked to stop."""
        # the learning rate of this step; per-head scalars have a factor of their own
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.knobs) * group["lr_scale"]
        self.model.set_progress(step / self.knobs.max_iters)
        # forward and backward of each micro-batch: gradients add up, each weighted by its share of this rank's sequences
        micro_batches = self.batches(step)
        size, total = sum(len(x) for x, _ in micro_batches), 0.0
        for micro, (x, y) in enumerate(micro_batches):
            if self.model.config.dropout:       # a number of its own for every (seed, step, rank, micro-step)
                torch.manual_seed(np.random.SeedSequence([self.knobs.seed, step, self.machine.rank, micro]).generate_state(1)[0].item())
            last = micro == len(micro_batches) - 1                      # ranks average their gradients once, after the last
            with contextlib.nullcontext() if last or self.machine.world == 1 else self.running.no_sync():
                with self.machine.autocast():
                    loss = self.running(x, y)[1] * (len(x) / size)
                self.scaler.scale(loss).backward()
            total = total + loss.detach()
        # every rank must know the mean loss and whether to stop, so that all of them stop at the same step
        total, stop = self.machine.sum(total.item(), float(stop))
        norm = self.clip()
        if self.sound(total, norm):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total / self.machine.world, norm, stop > 0

    def sound(self, loss, norm):
        """Are these numbers finite? With float16 an infinite gradient is the scaler's business: it skips the step."""
        return math.isfinite(loss) and (math.isfinite(norm) or self.scaler.is_enabled())

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.knobs.grad_clip or math.inf).item()


CALMER = "Start again with a lower --learning_rate or more --warmup_iters"


class StopSignal:
    """Inside this context Ctrl-C and SIGTERM ask the loop to save and stop after the step at hand. One more, later, ends it at once."""
    PATIENCE = 3                                # seconds: torchrun passes on the signal that its children have got already

    def __enter__(self):
        self.asked = None
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.asked and time.monotonic() - self.asked > self.PATIENCE:
            raise KeyboardInterrupt
        self.asked = self.asked or time.monotonic()


def train(knobs, model, machine, run, meta, trainer, val, first):
    """The loop: steps first+1 .. max_iters. Returns the step it ended with, which is below max_iters if it was asked to stop."""
    tokens_per_step, stride = trainer.batches.total * model.config.block_size, trainer.batches.stride
    bar = tqdm(total=knobs.max_iters, initial=first, disable=not machine.main, unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
    started, since, peak = time.perf_counter(), first, machine.peak_flops()
    with bar, StopSignal() as signals:
        for step in range(first + 1, knobs.max_iters + 1):
            # one update; a loss or gradient that is not finite ends the run before it touches the weights
            loss, norm, stop = trainer.step(step, signals.asked is not None)
            if not trainer.sound(loss, norm):
                raise ValueError(f"the loss is {loss} and the gradient norm {norm} at step {step}: stopped before this step touched the weights; "
                                 f"{run.last_good()}. {CALMER}")
            bar.update()
            # what this step is due for: a look at the validation loss (and a checkpoint), a row in the log
            look, record = step % knobs.eval_interval == 0 or step == knobs.max_iters, step % knobs.log_interval == 0
            if look or record or stop:
                ms = 1000 * (time.perf_counter() - started) / (step - since)
                row = {"step": step, "train_loss": loss, "lr": learning_rate(step, knobs), "grad_norm": norm, "ms": round(ms, 2),
                       "tokens_per_s": round(1000 * tokens_per_step / ms)}
                if peak:
                    row["mfu"] = round(model.flops_per_token() * row["tokens_per_s"] / (peak * machine.world), 4)
                mfu = f", mfu {row['mfu']:.1%}" if peak else ""
                bar.set_postfix_str(f"loss {loss:.4f}, {row['tokens_per_s']:,} tokens/s{mfu}", refresh=False)
            if look:
                row["val_loss"] = mean_loss(model, val, machine, knobs.eval_iters * knobs.batch_size, knobs.batch_size, stride)
                if not math.isfinite(row["val_loss"]):
                    raise ValueError(f"the validation loss is {row['val_loss']} after step {step}: stopped; {run.last_good()}. {CALMER}")
                meta["losses"] = {"step": step, "train": loss, "val": row["val_loss"]}
            if look or record:                  # the row goes first: a checkpoint never knows more than the log
                run.log(**row)
            if look or stop:
                run.save(meta, model, trainer.optimizer, trainer.scaler, step)
            if look or record:
                started, since = time.perf_counter(), step
            if stop:
                break
    return step


# ---------------------------------------------------------------------------------------------------------------------- main

def main(argv):
    lists = ["presets:", *map(about_preset, PRESETS), "\nrecipes:", *map(about_recipe, attention.ATTENTIONS)]
    parser = Parser(prog="train.py", description=__doc__, epilog="\n".join(lists))
    add_flags(parser, Train, GPTConfig)
    try:
        # what can be wrong with the flags alone is found before anything else starts
        wanted, resumed = settle_knobs(parser.parse_args(argv))
        knobs, vocab_size = Train(**fields_of(Train, wanted)), wanted.get("vocab_size", 0)
        config = GPTConfig(**fields_of(GPTConfig, wanted) | {"vocab_size": vocab_size or 1})           # 0: the data set says it, below
        if not tokens.data_folder(knobs.dataset).exists() and knobs.dataset not in tokens.data_sets():
            raise ValueError(f"unknown --dataset={knobs.dataset}: choose from {', '.join(tokens.data_sets())}, or name a folder by its path")
    except ValueError as e:
        parser.error(str(e))
    with files.one_line_errors():
        machine = Machine(knobs.device, knobs.dtype)
        prepare_data(knobs.dataset, machine)
        data = tokens.read_meta(tokens.data_folder(knobs.dataset), verify=machine.main)
        config.vocab_size = vocab_size or data["vocab_size"]
        tokens.check_vocabulary(config, data, knobs.dataset)
        knobs.out_dir = knobs.out_dir or default_out_dir(knobs.dataset, config.attn)
        finished = run_training(knobs, config, machine, data, resumed, argv)
        machine.close()
    sys.exit(0 if finished else 130)


def chosen_axes(config):
    """The rule, the positions, and what else is not as usual."""
    chosen = {name: getattr(config, name) for name in attention.DEFAULTS}
    return ", ".join(f"{name} {value}" for name, value in chosen.items() if name in ("rule", "pos") or value != attention.DEFAULTS[name])


def run_training(knobs, config, machine, data, resumed, flags):
    """Set up, train, report. Returns False if the run was asked to stop early."""
    kernel = attention.choose_kernel(config, machine.device.type)
    folder, stride = tokens.data_folder(knobs.dataset), data.get("stride", 1)
    batches, val = Batches(tokens.Tokens(folder, "train"), config, knobs, machine, stride), tokens.Tokens(folder, "val")
    tokens.fixed_windows(val, config.block_size, 1, stride)                    # too short a split is better found now than at the first evaluation
    # the model, with fresh weights or another run's; a resumed run that has saved before takes its own, below
    model = GPT(config, knobs.seed)
    run = Run(knobs.out_dir, machine)
    if knobs.init_from != "scratch" and not (resumed and run.checkpoint.exists()):
        if run.checkpoint.resolve() == Path(knobs.init_from).resolve():
            raise ValueError(f"--init_from and --out_dir both name {run.folder}: name another --out_dir for the new run")
        load_weights(model, read_checkpoint(knobs.init_from)["model"], knobs.init_from)
    # the optimizer, and where an earlier part of this run left off
    trainer = Trainer(model.to(machine.device), knobs, machine, batches)
    meta = describe(knobs, config, machine, model.num_params(), tokens.data_hash(data), flags)
    first = resume(run, resumed, meta, model, trainer) if resumed else 0
    if machine.main:
        print(f"model: {model.num_params() / 1e6:.2f}M parameters, --attn={config.attn} "
              f"({chosen_axes(config)}), computed by {kernel}\n"
              f"machine: {machine}\n"
              f"data: {knobs.dataset}, {len(batches.split):,} tokens; {batches.total * config.block_size:,} a step, "
              f"{knobs.max_iters} steps{f' from step {first}' if first else ''}; run: {knobs.out_dir}", flush=True)
    # nothing on the disk has been touched until here
    run.begin(meta, first if resumed else None)
    machine.wait()
    began = time.perf_counter()
    last = train(knobs, model, machine, run, meta, trainer, val, first) if first < knobs.max_iters else knobs.max_iters
    if last < knobs.max_iters:
        if machine.main:
            print(f"\nstopped and saved at step {last}; go on with: python train.py --out_dir={knobs.out_dir} --init_from=resume")
        return False
    meta["seconds"], meta["seconds_waiting_for_data"] = round(time.perf_counter() - began, 1), round(batches.waited, 3)
    meta["report"] = report(model, machine, knobs.dataset, knobs.eval_iters * knobs.batch_size, knobs.batch_size)
    run.finish(meta)
    if machine.main:
        print(f"\ntrained for {meta['seconds']} s, of which {batches.waited:.2f} s were spent waiting for data")
        kept = [flag for flag in flags if flag.startswith("--") and "=" in flag and not flag.startswith(("--attn", "--out_dir", "--init_from"))]
        other = " ".join([*kept, f"--attn={'elastic' if config.attn == 'softmax' else 'softmax'}"])
        print(f"\nnext:  python eval.py probe --out_dir={knobs.out_dir}     each layer and head\n"
              f"       python eval.py sample --out_dir={knobs.out_dir}    more text\n"
              f"       python train.py {other}    the same with another attention")
    return True


def resume(run, stored, meta, model, trainer):
    """Load a run's last checkpoint; returns its step. A run killed before its first checkpoint starts again at step 0."""
    if stored.get("data_hash") != meta["data_hash"]:
        raise ValueError(f"the data set {meta['knobs']['dataset']} has changed since {run.folder} began: make it as it was, or start a new run")
    if not (run.checkpoint).exists():
        return 0
    checkpoint = read_checkpoint(run.checkpoint)
    load_weights(model, checkpoint["model"], run.checkpoint)
    trainer.optimizer.load_state_dict(checkpoint["optimizer"])
    trainer.scaler.load_state_dict(checkpoint.get("scaler", {}))
    run.saved, meta["losses"] = checkpoint["step"], stored["losses"]
    return run.saved


if __name__ == "__main__":
    main(sys.argv[1:])
