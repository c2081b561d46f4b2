"""Train a GPT with any attention recipe.

    python train.py --attn=elastic                         on whatever this machine has: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train.py --attn=elastic    on eight GPUs, or on as many CPU processes
    python train.py --attn=elastic --init_from=resume      go on where a stopped or killed run was last saved

A flag given here beats the recipe (--attn), which beats the preset (--preset), which beats the defaults below.
A run writes out/<dataset>-<attn>/: ckpt.pt (model, optimizer, step), meta.json (every knob, versions, hashes, losses) \
and log.csv. With --train_only=focus or lora it is an adapter: ckpt.pt holds only what was trained, and meta.json \
names the run that it stands on.
With -h every knob, its meaning and its default in brackets (the default preset, tiny, changes some; see the presets \
at the end).
"""
import math
import signal
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
import mixers
from common.flags import Parser, add_flags, at_least, fields_of, given_flags, knob, shown, with_recipe
from common.machine import Machine
from common.runs import (
    Run,
    as_base,
    describe,
    load_weights,
    on_base,
    read_checkpoint,
    read_run,
    read_weights,
    what_is_new,
)
from data import files, tokens
from evals.loss import mean_loss
from evals.report import report
from model import GPT, GPTConfig

# -------------------------------------------------------------------------------------------------------------- knobs


PRESETS = {
    "tiny": {
        "about": "a byte model of 0.8M parameters: minutes on two CPU cores",
        "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "batch_size": 8, "max_iters": 1000,
        "learning_rate": 2e-3},
    "lab": {
        "about": "the sink lab: a sink grows in one layer with one head, in well under a minute",
        "dataset": "backcopy", "n_layer": 1, "n_head": 1, "n_embd": 64, "n_inner": 256, "block_size": 64,
        "pos": "learned", "norm": "layernorm", "mlp": "relu", "bias": True, "bias_range": 64, "tied": False,
        "batch_size": 48, "max_iters": 800, "warmup_iters": 100, "learning_rate": 1e-2, "beta2": 0.999,
        "weight_decay": 0.01, "eval_interval": 200, "eval_iters": 5, "dtype": "float32"},
    "tune": {
        "about": "to train on from public weights (the default with these in --init_from): minutes on two cores",
        "block_size": 256, "batch_size": 1, "max_iters": 200, "learning_rate": 1e-4, "warmup_iters": 20,
        "eval_interval": 100, "eval_iters": 16},
    "gpt2": {
        "about": "GPT-2 small (124M) as nanoGPT trains it, half a million tokens a step; on FineWeb-Edu where nanoGPT "
                 "has OpenWebText",
        "dataset": "fineweb_edu", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304,
        "pos": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied": True,
        "batch_size": 16, "gradient_accumulation_steps": 32, "max_iters": 19_000, "learning_rate": 6e-4,
        "warmup_iters": 700, "eval_interval": 250, "eval_iters": 20},
    "paper1": {
        "about": "Lazy Attention, appendix C.2: 340M on 15B tokens. There the Llama 2 tokenizer (32k ids), here "
                 "GPT-2's, so 360M; the number of heads and the width of the MLP are not printed and follow DeltaNet's "
                 "340M",
        "dataset": "fineweb_edu", "n_layer": 24, "n_head": 16, "n_embd": 1024, "n_inner": 2816, "block_size": 4096,
        "vocab_size": 50304, "pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": True,
        "batch_size": 8, "gradient_accumulation_steps": 16, "max_iters": 28_610, "learning_rate": 4e-4,
        "weight_decay": 0.01, "warmup_iters": 1024, "eval_interval": 500, "eval_iters": 20},
    "paper2": {
        "about": "Threshold Differential Attention, appendix D: GPT-2 162M with RoPE and a head of its own, same "
                 "tokenizer and data; there 190,730 steps, here one pass over the data; the peak learning rate is not "
                 "printed",
        "dataset": "fineweb_edu", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304,
        "pos": "rope", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied": False,
        "batch_size": 16, "gradient_accumulation_steps": 32, "max_iters": 19_000, "learning_rate": 1e-3,
        "warmup_iters": 715, "eval_interval": 250, "eval_iters": 20},
    "paper5": {
        "about": "When Attention Sink Emerges: LLaMA blocks of 59M beside their embeddings, 20k steps. There the Pile "
                 "with its own tokenizer, here FineWeb-Edu with GPT-2's; the batch follows from 5B tokens in 20k steps",
        "dataset": "fineweb_edu", "n_layer": 10, "n_head": 8, "n_embd": 768, "n_inner": 1536, "block_size": 2048,
        "vocab_size": 50304, "pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": False,
        "batch_size": 16, "gradient_accumulation_steps": 8, "max_iters": 20_000, "learning_rate": 4e-4,
        "warmup_iters": 100, "eval_interval": 250, "eval_iters": 20},
}


@dataclass
class Train:
    """How to train"""
    # what to train, and where it goes
    preset: str = knob(
        "tiny", "a named set of values for the other knobs", tuple(PRESETS))
    dataset: str = knob(
        "stdlib", "a name in data/, or the path of a folder that a data script wrote; with a run in --init_from: in "
                  "its tokenizer")
    out_dir: str = knob("", "where the run goes; empty: out/<dataset>-<attn>")
    init_from: str = knob(
        "scratch", "scratch; resume: go on from out_dir's checkpoint; or a run's path: start from its weights")
    train_only: str = knob(
        "all", "all weights; focus: what a mixer adds to plain attention; or LoRA on attention's projections. The rest "
        "stays as --init_from has it, and the run saves an adapter, which holds only what was trained",
        ("all", "focus", "lora"))
    lora_rank: int = knob(4, "rank of what --train_only=lora adds to each projection")
    lora_on: str = knob("both", "which projections; the Focus paper's 147K parameters are those of c_attn alone",
                        ("both", "c_attn", "c_proj"))
    # how much
    max_iters: int = knob(1000, "optimizer steps")
    batch_size: int = knob(16, "sequences per forward pass on one device, at most")
    gradient_accumulation_steps: int = knob(
        1, "a step sees batch_size times this many sequences, shared out over all ranks")
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
    # the head-balancing loss of The Attention Sink as Native MoE, on top of the model's own
    head_balance: float = knob(0.0, "lambda: balance how much the heads are used, as eq. 9 has it")
    balance_form: str = knob("routed", "which heads: all (eq. 8), or those that the next two leave (eq. 9)",
                             ("routed", "all"))
    balance_skip: int = knob(0, "first layers that stay as they are")
    balance_shared: float = knob(0.2, "share of the other heads, the most used, that stay as they are")
    # looking and saving
    eval_interval: int = knob(250, "steps between evaluations; each also saves a checkpoint")
    eval_iters: int = knob(20, "an evaluation reads this many times batch_size fixed windows")
    log_interval: int = knob(10, "steps between rows of log.csv")
    # the machine
    seed: int = knob(1337, "seed of initial weights, data order and dropout")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob(
        "auto", "precision of the products; auto: bfloat16 where it is fast",
        ("auto", "float32", "bfloat16", "float16"))
    compile: bool = knob(False, "torch.compile the model")

    def __post_init__(self):
        at_least(self, max_iters=1, batch_size=1, gradient_accumulation_steps=1, eval_interval=1, eval_iters=1,
                 log_interval=1, head_lr=0, weight_decay=0, grad_clip=0, warmup_iters=0, lr_decay_iters=0, seed=0,
                 lora_rank=1, head_balance=0, balance_skip=0, balance_shared=0)
        if self.train_only != "all" and self.init_from == "scratch":
            raise ValueError(f"--train_only={self.train_only} trains only a part of the model, so the rest must come "
                             "from a run: name it with --init_from")
        if not 0 < self.learning_rate < math.inf or math.isnan(self.min_lr):
            raise ValueError(f"--learning_rate={self.learning_rate} and --min_lr={self.min_lr} must be numbers, "
                             "the first above 0")
        if self.balance_shared >= 1:
            raise ValueError(f"--balance_shared={self.balance_shared} must be below 1")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"--beta1={self.beta1} and --beta2={self.beta2} must lie in [0, 1)")


# ------------------------------------------------------------------------------------------------------------ batches


class Batches:
    """Training batches as a pure function of (seed, step, sample): resuming needs no state, and every split of the
    step's samples over ranks and micro-steps reads the same tokens."""

    def __init__(self, split, config, knobs, machine, stride):
        self.split, self.config, self.knobs, self.machine, self.stride = split, config, knobs, machine, stride
        self.thread, self.ahead = ThreadPoolExecutor(1), {}             # ahead: the next step's batches, by its number
        self.waited = 0.0                                               # seconds that steps spent on their batches
        self.choices = (len(split) - config.block_size - 1) // stride + 1               # places for a window to begin
        if self.choices < 1:
            raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of "
                             f"block_size={config.block_size}: lower --block_size or add data")
        self.total = knobs.batch_size * knobs.gradient_accumulation_steps               # sequences a step, of all ranks
        if self.total % machine.world:
            raise ValueError(f"{self.total} sequences a step (batch_size {knobs.batch_size} x "
                             f"gradient_accumulation_steps {knobs.gradient_accumulation_steps}) cannot be shared by "
                             f"{machine.world} ranks: make it a multiple of {machine.world}")

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
            micro_batches.append((rows[:, :-1], rows[:, 1:]))           # the target of each token is the next one
        return micro_batches

    def __call__(self, step):
        """The micro-batches of a step, which a thread has read while the step before was computed."""
        found = self.ahead.pop(step, None) or self.thread.submit(self.read, step)
        started = time.perf_counter()
        micro_batches = found.result()
        self.waited += time.perf_counter() - started
        self.ahead = {step + 1: self.thread.submit(self.read, step + 1)}
        return micro_batches


# ----------------------------------------------------------------------------------------------------------- training


def learning_rate(step, knobs):
    """Of step 1, 2, ...: linear warm-up, then cosine from learning_rate to min_lr at lr_decay_iters, then min_lr."""
    # AdamW's averages know little at first, so the first steps are small
    if step <= knobs.warmup_iters:
        return knobs.learning_rate * step / knobs.warmup_iters
    if not knobs.decay_lr:
        return knobs.learning_rate
    # half a cosine, from 1 to 0: it falls slowly at both ends
    end = knobs.lr_decay_iters or knobs.max_iters
    low = knobs.min_lr if knobs.min_lr >= 0 else knobs.learning_rate / 10
    done = min(1.0, (step - knobs.warmup_iters) / max(1, end - knobs.warmup_iters))     # of the decay, 0 to 1
    return low + (knobs.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


def losses(model, x, y, knobs, machine):
    """The model's loss on a micro-batch, and the head-balancing loss, 0 without it. Heads are balanced over the
    micro-batches of all ranks together."""
    if not knobs.head_balance:
        return model(x, y)[1], torch.zeros((), device=x.device)
    _, loss, importance = model(x, y, importance=True)
    importance = machine.mean(importance)
    if knobs.balance_form == "routed":
        importance = routed(importance, knobs.balance_skip, knobs.balance_shared)
    return loss, knobs.head_balance * imbalance(importance)


def routed(importance, skip, shared):
    """The heads that eq. 9 of The Attention Sink as Native MoE balances, (n,), of all (layers, heads): without the
    first layers, which look at everything, and of the rest without the most used, the "shared experts"."""
    rest = importance[skip:].flatten().sort().values
    return rest[:len(rest) - math.ceil(shared * len(rest) - 1e-9)]


def imbalance(importance):
    """n CV^2 of n heads, CV their standard deviation over their mean: 0 where all are used alike. Eq. 8.

    The paper does not say which standard deviation. This one divides the squares by n; dividing by n - 1 would multiply
    the loss by n / (n - 1)."""
    mean, noise = importance.mean(), torch.finfo(importance.dtype).eps  # an importance is 1 minus a weight near 1
    return importance.numel() * (importance / torch.where(mean > noise, mean, noise)).var(correction=0)


def train(knobs, config, machine, folder, data, stored, flags):
    """One run, from the data to the report. Returns False if it was asked to stop before its last step.

    folder, data: of the data set, and its meta.json. stored: meta.json of the run to resume, or None. flags: the
    command line as given.
    """
    kernel = mixers.choose_kernel(config, machine.device.type)

    # the data: batches to train on, and a split to evaluate on, which must hold one window at least
    stride = data.get("stride", 1)              # windows begin where sequences begin, if the data has some
    batches = Batches(tokens.Tokens(folder, "train"), config, knobs, machine, stride)
    val = tokens.Tokens(folder, "val")
    tokens.fixed_windows(val, config.block_size, 1, stride)             # better found now than at the first evaluation

    # the model, with fresh weights or another run's, all of it to be trained or a part
    model = GPT(config, knobs.seed)
    balanced = knobs.head_balance or model.penalized                    # then there is a loss beside the model's own
    run = Run(knobs.out_dir, machine, ("balance",) if balanced else ())
    if knobs.train_only == "lora":
        names = ("c_attn", "c_proj") if knobs.lora_on == "both" else (knobs.lora_on,)
        model.add_lora(names, knobs.lora_rank, knobs.seed)
    if knobs.train_only != "all":
        model.freeze(knobs.train_only)
    resuming = stored and run.checkpoint.exists()
    if knobs.init_from != "scratch" and not resuming:
        take_weights(model, knobs.init_from, run, machine)
    model.to(machine.device)

    # AdamW, and a scaler that keeps float16's small gradients from becoming 0; with other precisions it does nothing
    optimizer = model.configure_optimizers(
        knobs.weight_decay, knobs.learning_rate, (knobs.beta1, knobs.beta2), knobs.head_lr)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == "float16")

    # where an earlier part of this run left off: 0, or the step of its last checkpoint
    meta = describe(knobs, config, machine, model.num_params(), tokens.data_hash(data), flags)
    meta |= {name: data[name] for name in ("tokenizer", "separator") if name in data}
    earlier = stored or ({} if knobs.init_from == "scratch" else read_run(knobs.init_from)[0])
    meta |= {name: earlier[name] for name in ("ends",) if name in earlier}              # ids at which an answer ends
    if knobs.train_only != "all":               # this run is an adapter
        meta |= {"trained": model.num_trained(), "base": stored["base"] if resuming else as_base(knobs.init_from)}
    first = resume(run, stored, meta, model, optimizer, scaler) if stored else 0

    # what the loop calls is the model compiled and shared by the ranks; what it evaluates and saves is the model itself
    running = torch.compile(model) if knobs.compile else model
    if machine.world > 1:
        running = DistributedDataParallel(running)
    introduce(knobs, model, machine, data, batches, kernel, first)

    # nothing on the disk has been touched until here
    run.begin(meta, first if stored else None)
    if machine.main:                            # the tokenizer belongs to the run: text goes in and comes out by it
        tokens.keep_tokenizer(run.folder, tokens.content_of(folder))
    machine.wait()                              # the main rank writes, the others begin with it

    step, began = first, time.perf_counter()
    since, started = first, began               # of the last row in the log: its step, and when it was written
    with StopSignal() as signals, progress_bar(knobs, machine, first) as bar:
        for step in range(first + 1, knobs.max_iters + 1):
            # the learning rate of this step, times each group's own factor
            lr = learning_rate(step, knobs)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            model.set_progress(step / knobs.max_iters)                  # some layers change over the training (Dex)

            # forward and backward of each micro-batch, weighted by its share of this rank's sequences: the gradients
            # add up to that of one big batch, which would not fit into memory
            micro_batches, own_loss, own_balance = batches(step), 0.0, torch.zeros((), device=machine.device)
            sequences = sum(len(x) for x, _ in micro_batches)
            for micro, (x, y) in enumerate(micro_batches):
                if config.dropout:              # no state to save: these four numbers decide what is dropped
                    seed_dropout(knobs.seed, step, machine.rank, micro)
                if machine.world > 1:           # ranks average their gradients once, after the last micro-batch
                    running.require_backward_grad_sync = micro == len(micro_batches) - 1
                with machine.autocast():        # products in 16 bits where they are fast, sums in float32
                    loss, balance = losses(running, x, y, knobs, machine)
                    balance = balance + model.penalty()
                share = len(x) / sequences
                scaler.scale((loss + balance) * share).backward()
                own_loss = own_loss + loss.detach() * share             # on the device: Python does not wait for it
                own_balance = own_balance + balance.detach() * share

            # every rank learns the mean loss and whether any was asked to stop: all of them stop after the same step
            total, balance, asked = machine.sum(own_loss.item(), own_balance.item(), float(signals.asked is not None))
            train_loss, balance, stop = total / machine.world, balance / machine.world, asked > 0

            # the gradient, clipped: a batch that is unlike the others must not throw the weights far away
            scaler.unscale_(optimizer)          # so that the norm is the gradient's own
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), knobs.grad_clip or math.inf).item()

            # the step. What is not finite ends the run before it touches the weights; but with float16 an infinite
            # gradient is the scaler's business: it leaves the step out and scales less from then on
            if not (math.isfinite(train_loss) and (math.isfinite(norm) or scaler.is_enabled())):
                raise ValueError(f"the loss is {train_loss} and the gradient norm {norm} at step {step}: stopped "
                                 f"before this step touched the weights; {run.last_good()}. {CALMER}")
            scaler.step(optimizer)
            scaler.update()
            model.finish_step(machine)          # what layers have counted of this step's tokens (Focus)
            optimizer.zero_grad(set_to_none=True)                       # its memory is free for the next forward pass
            bar.update()

            # what this step is due for: every evaluation is also a row of the log
            evaluate = step % knobs.eval_interval == 0 or step == knobs.max_iters
            record = evaluate or step % knobs.log_interval == 0
            if record or stop:
                row = {"step": step, "train_loss": train_loss, "lr": lr, "grad_norm": norm, "balance": balance}
                row |= pace(model, machine, (time.perf_counter() - started) / (step - since), batches.total)
                show_on(bar, row)

            # the evaluation, always on the same windows: two losses differ by their models alone
            if evaluate:
                windows = knobs.eval_iters * knobs.batch_size
                row["val_loss"] = mean_loss(model, val, machine, windows, knobs.batch_size, stride)
                if not math.isfinite(row["val_loss"]):
                    raise ValueError(f"the validation loss is {row['val_loss']} after step {step}: stopped; "
                                     f"{run.last_good()}. {CALMER}")
                meta["losses"] = {"step": step, "train": train_loss, "val": row["val_loss"]}

            # the row goes before the checkpoint: wherever the run is killed, no checkpoint knows more than the log
            if record:
                run.log(**row)
            if evaluate or stop:                # what --init_from=resume goes on from
                run.save(meta, model, optimizer, scaler, step)
            if record:                          # the clock of the next row begins after the evaluation
                since, started = step, time.perf_counter()
            if stop:
                break

    # asked to stop: the report waits for the run that goes on from here
    if step < knobs.max_iters:
        if machine.main:
            print(f"\nstopped and saved at step {step}; "
                  f"go on with: python train.py --out_dir={knobs.out_dir} --init_from=resume")
        return False

    # the end: how long it took, and a first look at what was learned
    meta["seconds"] = round(time.perf_counter() - began, 1)
    meta["seconds_waiting_for_data"] = round(batches.waited, 3)
    meta["report"] = report(model, machine, folder, knobs.eval_iters * knobs.batch_size, knobs.batch_size)
    run.finish(meta)
    if machine.main:
        say_what_next(knobs, config, meta, batches.waited, flags)
    return True


# ---------------------------------------------------------------------------------------------------- around the loop


def take_weights(model, path, run, machine):
    """Begin with the weights of another run, whose folder must not be the one that this run writes. What a recipe adds
    to that run's model begins at its initial values."""
    if run.checkpoint.resolve() == Path(path).resolve():
        raise ValueError(f"--init_from and --out_dir both name {run.folder}: name another --out_dir for the new run")
    new = model.beyond(GPTConfig(**fields_of(GPTConfig, read_run(path)[0]["knobs"])))
    if left := [name for name in new if name in model.frozen()]:
        raise ValueError(f"{left[0]} is not in {path}, and --train_only does not train it, so it would stay at its "
                         "initial value: leave out the flags that add it")
    load_weights(model, read_weights(path), path, new)
    if new and machine.main:
        print(what_is_new(new, path))


def resume(run, stored, meta, model, optimizer, scaler):
    """Load a run's last checkpoint; returns its step. A run killed before its first one starts again at step 0."""
    if stored.get("data_hash") != meta["data_hash"]:
        raise ValueError(f"the data set {meta['knobs']['dataset']} has changed since {run.folder} began: "
                         "make it as it was, or start a new run")
    if not run.checkpoint.exists():
        return 0
    checkpoint = read_checkpoint(run.checkpoint)
    load_weights(model, on_base(checkpoint["model"], stored, run.checkpoint), run.checkpoint)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint.get("scaler", {}))
    run.saved, meta["losses"] = checkpoint["step"], stored["losses"]
    return run.saved


def seed_dropout(*numbers):
    """Dropout draws from torch's own generator: seed it with one number made of these."""
    torch.manual_seed(np.random.SeedSequence(numbers).generate_state(1)[0].item())


CALMER = "Start again with a lower --learning_rate or more --warmup_iters"


class StopSignal:
    """Inside this context Ctrl-C and SIGTERM ask the loop to save and stop after the step at hand. One more, later,
    ends it at once."""
    PATIENCE = 3                                # seconds: torchrun repeats a signal that its children have got already

    def __enter__(self):
        self.asked = None                       # when it was asked to stop
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.asked and time.monotonic() - self.asked > self.PATIENCE:
            raise KeyboardInterrupt
        self.asked = self.asked or time.monotonic()


# -------------------------------------------------------------------------------------------------- what a run prints


def introduce(knobs, model, machine, data, batches, kernel, first):
    """The first lines of a run: what is trained, where, on what."""
    if not machine.main:
        return
    config = model.config
    chosen = {name: getattr(config, name) for name in mixers.DEFAULTS}
    axes = [f"{name} {value}" for name, value in chosen.items()         # the rule, the positions, what is not as usual
            if name in ("rule", "pos") or value != mixers.DEFAULTS[name]]
    spelled = f" in the tokenizer {data['tokenizer']}" if "separator" in data else ""
    part = f" ({model.num_trained():,} of them trained)" if knobs.train_only != "all" else ""
    print(f"model: {model.num_params() / 1e6:.2f}M parameters{part}, --attn={config.attn} "
          f"({', '.join(axes)}), computed by {kernel}\n"
          f"machine: {machine}\n"
          f"data: {knobs.dataset}{spelled}, {len(batches.split):,} tokens; {batches.total * config.block_size:,} a "
          f"step, {knobs.max_iters} steps{f' from step {first}' if first else ''}; run: {knobs.out_dir}", flush=True)


def progress_bar(knobs, machine, first):
    """A bar on the main rank; none where no step is left to do."""
    return tqdm(total=knobs.max_iters, initial=first, disable=not machine.main or first >= knobs.max_iters, unit="step",
                mininterval=0.5 if sys.stderr.isatty() else 10)


def pace(model, machine, seconds, sequences):
    """The log's columns on speed, from the seconds and the sequences of a step. mfu: how much of the device's peak it
    reached, where the peak is known."""
    tokens_per_s = round(sequences * model.config.block_size / seconds)
    columns, peak = {"ms": round(1000 * seconds, 2), "tokens_per_s": tokens_per_s}, machine.peak_flops()
    if peak:
        columns["mfu"] = round(model.flops_per_token() * tokens_per_s / (peak * machine.world), 4)
    return columns


def show_on(bar, row):
    balance = f" + {row['balance']:.4f}" if row["balance"] else ""
    mfu = f", mfu {row['mfu']:.1%}" if "mfu" in row else ""
    bar.set_postfix_str(f"loss {row['train_loss']:.4f}{balance}, {row['tokens_per_s']:,} tokens/s{mfu}", refresh=False)


def say_what_next(knobs, config, meta, waited, flags):
    """The last lines of a run: how long it took, and commands to go on with."""
    kept = [flag for flag in flags if flag.startswith("--") and "=" in flag
            and not flag.startswith(("--attn", "--out_dir", "--init_from=resume"))]
    other = " ".join([*kept, f"--attn={'elastic' if config.attn == 'softmax' else 'softmax'}"])
    other += "    the same with another attention"
    if knobs.train_only == "focus":             # the second phase of a retrofit, as the paper has it
        phase = [flag for flag in kept if not flag.startswith(("--init_from", "--train_only", "--learning_rate"))]
        other = " ".join([*phase, f"--attn={config.attn}", f"--init_from={knobs.out_dir}", "--train_only=all"])
        other += f" --out_dir={knobs.out_dir}-all    all weights, from here on"
    print(f"\ntrained for {meta['seconds']} s, of which {waited:.2f} s were spent waiting for data")
    print(f"\nnext:  python eval.py probe --out_dir={knobs.out_dir}     each layer and head\n"
          f"       python eval.py sample --out_dir={knobs.out_dir}    more text"
          + (f"\n       python train.py {other}" if knobs.train_only != "lora" else ""))


# --------------------------------------------------------------------------------------------------- the command line


def main(argv):
    about = ["presets:", *map(about_preset, PRESETS), "\nrecipes:", *map(about_recipe, attention.ATTENTIONS)]
    parser = Parser(prog="train.py", description=__doc__, epilog="\n".join(about))
    add_flags(parser, Train, GPTConfig)
    try:
        # what can be wrong with the flags alone is found before anything else starts
        settled, stored = settle_knobs(parser.parse_args(argv))
        knobs, vocab_size = Train(**fields_of(Train, settled)), settled.get("vocab_size", 0)
        config = GPTConfig(**fields_of(GPTConfig, settled) | {"vocab_size": vocab_size or 1})           # 0: see below
        check_balance(knobs, config)
        if reason := mixers.MIXERS[config.mixer].cannot_learn(config):
            raise ValueError(reason)
        before = run_before(knobs, stored)
        if knobs.dataset not in tokens.data_sets() and not any(tokens.data_folder(knobs.dataset, run).exists()
                                                               for run in (None, before)):
            raise ValueError(f"unknown --dataset={knobs.dataset}: choose from {', '.join(tokens.data_sets())}, "
                             "or name a folder by its path")
    except ValueError as e:
        parser.error(str(e))
    with files.one_line_errors():
        machine = Machine(knobs.device, knobs.dtype)
        folder, data = tokens.data_for(before, knobs.dataset, machine)
        config.vocab_size = vocab_size or data["vocab_size"]            # 0: what the data set says
        tokens.check_vocabulary(config, data, knobs.dataset)
        knobs.out_dir = knobs.out_dir or default_out_dir(folder.name, config.attn)
        finished = train(knobs, config, machine, folder, data, stored, argv)
        machine.close()
    sys.exit(0 if finished else 130)


def check_balance(knobs, config):
    """Raise ValueError where there are no heads to balance."""
    if not knobs.head_balance:
        return
    attention.check_importance(config)
    heads = torch.zeros(config.n_layer, config.n_head)
    if knobs.balance_form == "routed":
        heads = routed(heads, knobs.balance_skip, knobs.balance_shared)
    elif knobs.balance_skip:
        raise ValueError("--balance_form=all balances all heads: leave out --balance_skip")
    if heads.numel() < 2:
        raise ValueError(f"--balance_skip={knobs.balance_skip} --balance_shared={knobs.balance_shared} leave "
                         f"{heads.numel()} of {config.n_layer} x {config.n_head} heads, and it takes two to balance")


def run_before(knobs, stored):
    """The folder of the run whose model, and so whose tokenizer, this one goes on with; None from scratch."""
    if stored:
        return Path(knobs.out_dir)
    return None if knobs.init_from == "scratch" else Path(knobs.init_from).parent


def settle_knobs(args):
    """All knobs of this run from the flags given, as one dict, and the meta.json of the run to resume or None."""
    given = given_flags(args, Train, GPTConfig)
    if given.get("init_from") == "resume":
        return resume_knobs(given)
    base = dict(PRESETS[given.get("preset", Train.preset)])
    if given.get("init_from", "scratch") != "scratch":                  # another run's model, but for what flags say
        meta, checkpoint = read_run(given["init_from"])
        given["init_from"] = str(checkpoint)
        base |= fields_of(GPTConfig, meta["knobs"]) | {"dataset": meta["knobs"]["dataset"]}
        # public weights, or what was trained from them: their context is too long here
        if ("source" in meta or meta["knobs"].get("preset") == "tune") and "preset" not in given:
            given["preset"], base = "tune", base | PRESETS["tune"]
    return with_recipe(base, given, attention.ATTENTIONS, mixers.DEFAULTS), None


# what may be another on resume: the folder's path, how it is computed, how long it goes on, how often it is looked at
MAY_CHANGE = {"out_dir", "device", "dtype", "compile", "kernel", "max_iters", "eval_interval", "log_interval"}


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
            raise ValueError(f"{out_dir} was trained with {name}={stored[name]}, so it cannot resume with "
                             f"{name}={value}: leave out the flag, or start a new run with another --out_dir")
    return stored | {n: v for n, v in given.items() if n in MAY_CHANGE} | {"out_dir": out_dir}, meta


def default_out_dir(dataset, attn):
    return f"out/{Path(dataset).name}-{attn}"


def about_preset(name):
    """A preset as -h shows it."""
    about, *flags = PRESETS[name].items()
    flags = " ".join(f"--{knob}={shown(value)}" for knob, value in flags)
    lines = textwrap.wrap(about[1], 140) + textwrap.wrap(flags, 140, break_on_hyphens=False)
    return f"  {name}\n" + textwrap.indent("\n".join(lines), "      ")


def about_recipe(name):
    axes = attention.ATTENTIONS[name]
    return f"  {name:18}" + " ".join(f"--{axis}={value}" for axis, value in axes.items() if axis != "args") + "".join(
        f" --attn_args={key}={shown(value)}" for key, value in axes.get("args", {}).items())


if __name__ == "__main__":
    main(sys.argv[1:])
