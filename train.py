"""Train a GPT with any attention recipe.

    python train.py --attn=elastic                         on this machine's best device: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train.py --attn=elastic    on eight GPUs, or as eight CPU processes
    python train.py --attn=elastic --init_from=resume      continue a stopped or killed run from its last checkpoint
    python train.py --preset=paper1-760m --dry_run         only print what a run would need: memory, FLOPs, hours

Each knob has the value of the first of these that sets it: flag, recipe (--attn), the run of --init_from, preset
(--preset), default. One exception: the preset tune beats the run of --init_from.
A run writes out/<dataset>-<attn>/: ckpt.pt (model, optimizer, step), meta.json (every knob, versions, hashes, losses)
and log.csv; common/runs.py describes them, checkpoints in parts (--sharded_ckpt=1), and adapters (--train_only=PART).
-h shows the knobs that people use, and -h all shows all of them. The value in parentheses is the one without flags:
that of the preset tiny, or else the default.
"""
if __name__ == "__main__":                      # the imports take seconds: a SIGTERM during them must leave a message
    from training.stopping import say_terminated
    say_terminated()

import contextlib
import dataclasses
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import common  # noqa: F401                     it must come before torch
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import mixers
from common import files
from common.flags import Knobs, Parser, add_flags, fields_of, given_flags, knob
from common.machine import Machine, check_memory
from common.runs import Run, as_base, last_checkpoint, made_by, read_run
from common.shards import is_split
from data import tokens
from evals.loss import mean_loss
from evals.report import report
from model import GPT, GPTConfig, check_size
from training import printing
from training.balance import check_balance, losses
from training.dry_run import DryRun, dry_run
from training.presets import PRESETS, default_out_dir, settle_knobs
from training.stopping import StopSignal
from training.weights import (
    PROJECTIONS, WithoutMatrices, gather, is_sharded, num_trained, resume, shard, take_weights, train_only)

# -------------------------------------------------------------------------------------------------------------- knobs


@dataclass
class Train(Knobs):
    """Flags of training"""
    # model, data, and the run's folder
    preset: str = knob("tiny", "a named set of values for the other knobs", tuple(PRESETS))
    dataset: str = knob("stdlib", "a name in data/, or the path of a folder that a data script wrote. With "
                                  "--init_from=RUN it must use that run's tokenizer")
    docs: bool = knob(False, "packed documents: no row sees another document of its sequence, and each begins at "
                             "position 0, as if it were alone; data scripts record where documents begin")
    out_dir: str = knob("", "folder of the run; empty: out/<dataset>-<attn>")
    init_from: str = knob("scratch", "scratch; resume: continue from out_dir's checkpoint; the folder of a run: start "
                                     "from its weights")
    train_only: str = knob(
        "all", f"weights to train; {', '.join(mixers.RETROFITS)}: only those that this mixer adds to plain attention; "
        "lora: only LoRA on attention's projections. All others stay as in --init_from, and such a run saves an "
        "adapter, which holds only the trained weights", ("all", *mixers.RETROFITS, "lora"))
    lora_rank: int = knob(4, "rank of the matrices that --train_only=lora adds to each projection", least=1)
    lora_on: str = knob("both", "projections that get LoRA; c_attn gives the Focus paper's 147K parameters",
                        tuple(PROJECTIONS))
    # how much
    max_iters: int = knob(1000, "optimizer steps", least=1)
    batch_size: int = knob(16, "largest number of sequences per forward pass on one device", least=1)
    gradient_accumulation_steps: int = knob(1, "sequences per step, over all ranks, as a multiple of batch_size",
                                            least=1)
    # AdamW, with linear warm-up and cosine decay
    learning_rate: float = knob(6e-4, "largest learning rate")
    head_lr: float = knob(1.0, "factor on the learning rate of parameters outside linear layers, such as tau", least=0)
    weight_decay: float = knob(0.1, "weight decay of matrices and embeddings; nothing else decays", least=0)
    beta1: float = knob(0.9, "AdamW's first beta", least=0, below=1)
    beta2: float = knob(0.95, "AdamW's second beta", least=0, below=1)
    grad_clip: float = knob(1.0, "largest gradient norm; 0: no limit", least=0)
    decay_lr: bool = knob(True, "cosine decay of the learning rate; 0: constant after the warm-up")
    warmup_iters: int = knob(100, "steps of linear warm-up")
    lr_decay_iters: int = knob(0, "step at which the learning rate reaches min_lr; 0: max_iters")
    min_lr: float = knob(-1.0, "learning rate at the end; negative: a tenth of learning_rate")
    # the head-balancing loss of The Attention Sink as Native MoE, which is added to the model's own
    head_balance: float = knob(0.0, "weight (lambda of eq. 9) of the head-balancing loss, which is 0 for equal heads",
                                least=0)
    balance_form: str = knob("routed", "heads that it balances: all (eq. 8), or all except those that the next two "
                                       "flags exclude (eq. 9)", ("routed", "all"))
    balance_skip: int = knob(0, "number of first layers that the loss excludes")
    balance_shared: float = knob(0.2, "fraction of the other heads, the most important ones, that the loss excludes",
                                  least=0, below=1)
    # evaluations and checkpoints
    eval_interval: int = knob(250, "steps between evaluations; each also saves a checkpoint", least=1)
    eval_iters: int = knob(20, "windows per evaluation, as a multiple of batch_size; always the same ones", least=1)
    log_interval: int = knob(10, "steps between rows of log.csv", least=1)
    # the machine
    seed: int = knob(1337, "seed of initial weights, data order and dropout")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the fastest one here")
    dtype: str = knob("auto", "precision of matrix products (autocast); auto: bfloat16 where it is fast",
                      ("auto", "float32", "bfloat16", "float16"))
    compile: bool = knob(False, "torch.compile the model")
    shard: bool = knob(False, "on several ranks, split weights, gradients and optimizer state over them")
    sharded_ckpt: bool = knob(False, "for models larger than the memory of one machine: checkpoints in parts, one or "
                                     "more per rank, in out_dir/sharded_ckpt, which all ranks must see")

    def __post_init__(self):
        super().__post_init__()
        if self.train_only != "all" and self.init_from == "scratch":
            raise ValueError(f"--train_only={self.train_only} trains only a part of the model, so the rest must come "
                             "from a run: name it with --init_from")
        if not 0 < self.learning_rate < math.inf or math.isnan(self.min_lr):
            raise ValueError(f"--learning_rate={self.learning_rate} and --min_lr={self.min_lr} must be numbers, "
                             "the first above 0")


# ------------------------------------------------------------------------------------------------------------ batches


class Batches:
    """Training batches as a pure function of (seed, step, number of the sequence).

    So a resumed run needs no stored state, and the tokens of a step do not depend on the number of ranks and
    micro-batches."""

    def __init__(self, split, config, knobs, machine):
        self.split, self.config, self.knobs, self.machine = split, config, knobs, machine
        self.thread = ThreadPoolExecutor(1)
        self.ahead = {}                         # {the next step: the Future of its batches}
        self.waited = 0.0                       # seconds that the loop has waited for batches
        self.choices = (len(split) - config.block_size - 1) // split.stride + 1         # number of possible starts
        if self.choices < 1:
            raise ValueError(f"{split.name} holds {len(split)} tokens, too few for one window of "
                             f"block_size={config.block_size}: lower --block_size or add data")
        self.total = knobs.batch_size * knobs.gradient_accumulation_steps               # sequences a step, on all ranks
        check_memory(8 * self.total * (config.block_size + 1) // machine.world, f"--gradient_accumulation_steps="
                     f"{knobs.gradient_accumulation_steps}: the tokens of a step need", "lower it")
        if self.total % machine.world:
            raise ValueError(f"{self.total} sequences a step (batch_size {knobs.batch_size} x "
                             f"gradient_accumulation_steps {knobs.gradient_accumulation_steps}) cannot be shared by "
                             f"{machine.world} ranks: make it a multiple of {machine.world}")

    def read(self, step):
        """This rank's micro-batches of a step: inputs and targets, and with --docs=1 where the document of each input
        begins, each (at most batch_size, T)."""
        # every rank draws the windows of all ranks and takes its own part
        drawn = np.random.default_rng([self.knobs.seed, step]).integers(0, self.choices, self.total)
        starts = drawn.reshape(self.machine.world, -1)[self.machine.rank] * self.split.stride
        micro_batches = []
        for part in np.split(starts, range(self.knobs.batch_size, len(starts), self.knobs.batch_size)):
            rows = torch.from_numpy(self.split.windows(part, self.config.block_size + 1, self.config.vocab_size))
            if self.machine.device.type == "cuda":
                rows = rows.pin_memory()        # from pinned memory, the GPU copies while it computes
            rows = rows.to(self.machine.device, non_blocking=True)
            starts = [self.split.first_keys(part, self.config.block_size)] if self.knobs.docs else []
            starts = [torch.from_numpy(first).to(self.machine.device) for first in starts]
            micro_batches.append((rows[:, :-1], rows[:, 1:], *starts))  # the target of each token is the next token
        return micro_batches

    def __call__(self, step):
        """The micro-batches of a step. A thread reads them while the previous step is computed."""
        found = self.ahead.pop(step, None) or self.thread.submit(self.read, step)
        started = time.perf_counter()
        micro_batches = found.result()
        self.waited += time.perf_counter() - started
        self.ahead = {step + 1: self.thread.submit(self.read, step + 1)}
        return micro_batches


# ----------------------------------------------------------------------------------------------------------- training


def learning_rate(step, knobs):
    """The learning rate of step 1, 2, ...: linear warm-up, then a cosine from learning_rate to min_lr, then min_lr."""
    # AdamW's averages are poor estimates at first, so the first steps are small
    if step <= knobs.warmup_iters:
        return knobs.learning_rate * step / knobs.warmup_iters
    if not knobs.decay_lr:
        return knobs.learning_rate
    end = knobs.lr_decay_iters or knobs.max_iters
    low = knobs.min_lr if knobs.min_lr >= 0 else knobs.learning_rate / 10
    done = min(1.0, (step - knobs.warmup_iters) / max(1, end - knobs.warmup_iters))     # share of the decay, 0 to 1
    return low + (knobs.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


class Training:
    """One training run: all that its loop needs, from the data to the optimizer. Making it writes nothing to disk, so a
    wrong flag destroys no earlier run; `begin` does.

    folder, data: the data set's folder and its meta.json. stored: meta.json of the run to resume, or None. flags: the
    command line as given."""

    def __init__(self, knobs, config, machine, folder, data, stored, flags):
        self.knobs, self.config, self.machine, self.folder = knobs, config, machine, folder
        self.kernel = mixers.choose_kernel(                     # raises if it is not there
            config, machine.device.type, importance=knobs.head_balance > 0)
        # the data: batches to train on, and a split to evaluate on
        self.batches = Batches(tokens.Tokens(folder, "train", knobs.docs), config, knobs, machine)
        self.val = tokens.Tokens(folder, "val", knobs.docs)
        fit = len(tokens.fixed_windows(self.val, config.block_size, 0))                 # raises if it is too short
        self.windows = knobs.eval_iters * knobs.batch_size
        # a short split may have fewer windows than the default, but an --eval_iters above the default must fit
        if not stored and knobs.eval_iters > Train.eval_iters and self.windows > fit:
            raise ValueError(f"--eval_iters={knobs.eval_iters} asks for {self.windows} windows, and {self.val.name} "
                             f"holds {fit}: give at most {max(Train.eval_iters, fit // knobs.batch_size)}")

        model = self.make_model()
        extra = knobs.head_balance or model.penalized   # losses in addition to its own
        self.run = Run(knobs.out_dir, machine, ("balance",) if extra else ())
        if knobs.init_from != "scratch" and not (stored and last_checkpoint(self.run.folder)):
            take_weights(model, knobs.init_from, self.run, machine)

        # the scaler keeps small gradients from becoming 0 in float16; in other precisions it does nothing
        self.optimizer = model.configure_optimizers(
            knobs.weight_decay, knobs.learning_rate, (knobs.beta1, knobs.beta2), knobs.head_lr)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == "float16")

        self.meta = self.new_meta(data, stored, flags)
        if stored:
            resume(self.run, stored, self.meta, model, self.optimizer, self.scaler)

    def new_meta(self, data, stored, flags):
        """meta.json: the settings of the run, and entries from the data set and from an earlier run."""
        knobs, model, machine = self.knobs, self.model, self.machine
        meta = {"flags": flags, "knobs": dataclasses.asdict(knobs) | dataclasses.asdict(self.config),
                "parameters": model.num_params(), "data_hash": tokens.data_hash(data), **made_by(),
                "machine": str(machine), "world_size": machine.world, "losses": {}}
        earlier = stored or ({} if knobs.init_from == "scratch" else read_run(knobs.init_from)[0])
        for name, origin in (("tokenizer", data), ("separator", data), ("ends", earlier)):      # ends: of chat
            if name in origin:
                meta[name] = origin[name]
        if knobs.train_only != "all":
            resumed = stored and last_checkpoint(self.run.folder)
            meta["trained"] = num_trained(model)
            meta["base"] = stored["base"] if resumed else as_base(knobs.init_from)
        return meta

    def begin(self, data):
        """Print what is about to be trained, and write the run's first files."""
        printing.introduce(self.knobs, self.model, self.machine, data, self.batches, self.kernel, self.run.saved)
        self.run.begin(self.meta)
        if self.machine.main:                   # the run keeps its tokenizer, so eval.py can read and write text
            tokens.keep_tokenizer(self.run.folder, tokens.content_of(self.folder))
        self.machine.wait()                     # until the main rank has written

    def make_model(self):
        """A model with fresh weights on the device. All of them are trained, or a part. Each rank holds a part of every
        weight (--shard), or all of them. The loop calls `running`: the same model, compiled and made ready for several
        ranks."""
        knobs, config, machine = self.knobs, self.config, self.machine
        split = knobs.shard and machine.world > 1
        if not split:                           # on a CPU, gradients and AdamW's two averages are in the same memory
            check_size(config, 4 if machine.device.type == "cpu" and knobs.train_only == "all" else 1)
        with WithoutMatrices() if split else contextlib.nullcontext():
            self.model = model = GPT(config, knobs.seed)
        train_only(model, knobs)
        if split:
            shard(model, machine, knobs.seed)
        model.to(machine.device)
        # without dynamic=False, the compiler turns a rule's constants into symbols once a second model has other
        # constants, and fails in `checkpoint`
        self.running = torch.compile(model, dynamic=False) if knobs.compile else model
        if machine.world > 1 and not split:
            self.running = DistributedDataParallel(self.running)
        return model

    def train(self):
        """Train to the last step. Returns the step at which a signal stopped it, or None."""
        knobs, machine, batches, model, running = self.knobs, self.machine, self.batches, self.model, self.running
        optimizer, scaler = self.optimizer, self.scaler
        first = self.run.saved or 0             # steps that an earlier part of this run has done
        unseen, stop = [], False                # steps whose numbers the device may not have computed yet
        with StopSignal() as signals, printing.Progress(knobs, model, machine, batches.total, first) as progress:
            for step in range(first + 1, knobs.max_iters + 1):
                lr = learning_rate(step, knobs)
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]                # the group's own factor
                model.set_progress(step / knobs.max_iters)              # for layers with a schedule

                # each micro-batch is weighted by its share of the sequences, so gradients add up to that of one batch
                micro_batches = batches(step)
                sums = torch.zeros(2, device=machine.device)            # of both losses, kept on the device: no waiting
                for micro, (x, y, *starts) in enumerate(micro_batches):
                    if self.config.dropout:     # its seed depends on these four numbers: resuming needs no stored state
                        seeds = np.random.SeedSequence((knobs.seed, step, machine.rank, micro))
                        torch.manual_seed(seeds.generate_state(1)[0].item())
                    # data-parallel ranks average their gradients once, after the last micro-batch
                    if isinstance(running, DistributedDataParallel):
                        running.require_backward_grad_sync = micro == len(micro_batches) - 1
                    with machine.autocast():    # products in 16 bits where they are fast, sums in float32
                        loss, balance = losses(running, x, y, knobs, machine, *starts)
                        balance = balance + model.penalty()
                    share = len(x) * machine.world / batches.total
                    scaler.scale((loss + balance) * share).backward()
                    sums += torch.stack([loss.detach(), balance.detach()]) * share

                # clip the gradient, to limit the effect of one unusual batch. If float16 overflows, the scaler skips
                # the step and lowers its scale
                scaler.unscale_(optimizer)      # the norm is that of the unscaled gradient
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), knobs.grad_clip or math.inf)
                norm = norm.full_tensor() if is_split(norm) else norm
                scaler.step(optimizer)
                scaler.update()
                model.finish_step(machine)      # for layers that count tokens
                optimizer.zero_grad(set_to_none=True)                   # frees memory for the next forward pass
                progress.update()

                # All ranks share these sums, so they stop after the same step. They are looked at one step later, or
                # before a row of the log: so a GPU need not wait for Python, and nothing is saved of a diverged run
                unseen.append((step, machine.sums(torch.stack([*sums, norm, norm.new_full((), bool(signals.asked))]))))
                evaluate = step % knobs.eval_interval == 0 or step == knobs.max_iters
                log = evaluate or step % knobs.log_interval == 0
                while len(unseen) > (0 if log or stop else 1):
                    seen, numbers = unseen.pop(0)
                    train_loss, balance, norm, stop = (total / machine.world for total in numbers())
                    if not (math.isfinite(train_loss) and (math.isfinite(norm) or scaler.is_enabled())):
                        raise self.run.diverged(f"the loss is {train_loss} and the gradient norm {norm} at step {seen}")
                if log or stop:
                    row = {"step": step, "train_loss": train_loss, "lr": lr, "grad_norm": norm, "balance": balance}
                    row |= progress.speed(step)
                    progress.show(row)
                    self.evaluate_and_save(row, evaluate, log, stop)
                    progress.measure_from(step)                         # without the time of the evaluation
                if stop:
                    return step if step < knobs.max_iters else None

    def evaluate_and_save(self, row, evaluate, log, stop):
        """Evaluate on the same windows as always, then write a row of the log and a checkpoint, if they are due. The
        row comes first: wherever the run is killed, the log has all rows up to its checkpoint."""
        knobs, run, step = self.knobs, self.run, row["step"]
        if evaluate:
            row["val_loss"] = mean_loss(self.model, self.val, self.machine, self.windows, knobs.batch_size,
                                        share=not is_sharded(self.model))
            if not math.isfinite(row["val_loss"]):
                raise run.diverged(f"the validation loss is {row['val_loss']} after step {step}: stopped")
            run.meta["losses"] = {"step": step, "train": row["train_loss"], "val": row["val_loss"]}
        if log:
            run.log(**row)
        if evaluate or stop:
            run.save(self.model, self.optimizer, self.scaler, step, in_parts=knobs.sharded_ckpt)

    def finish(self, seconds):
        """Print the report, write it into meta.json, and say what to do next."""
        knobs, meta = self.knobs, self.run.meta
        meta["seconds"] = round(seconds, 1)
        meta["seconds_waiting_for_data"] = round(self.batches.waited, 3)
        # most of the report looks into the model on the main rank alone
        in_parts = is_sharded(self.model) and knobs.sharded_ckpt
        if not in_parts:
            gather(self.model)
        meta["report"] = report(self.model, self.machine, self.folder, self.windows, knobs.batch_size, in_parts,
                                knobs.docs)
        self.run.write_meta()
        if self.machine.main:
            printing.say_what_next(knobs, self.config, meta, self.batches.waited)


# --------------------------------------------------------------------------------------------------- the command line

# what -h shows
USUAL = ("preset", "dataset", "out_dir", "init_from", "max_iters", "batch_size", "gradient_accumulation_steps",
         "learning_rate", "eval_interval", "seed", "device", "dtype", "compile", "dry_run", "block_size", "n_layer",
         "n_head", "n_embd", "dropout", "attn", "kernel", "pos", "window")


def main(argv):
    """Resolve all knobs, find the data, and train. Exit code 0 after the last step, 130 after a stop request."""
    parser = Parser(USUAL, prog="train.py", description=__doc__, epilog=printing.presets_and_recipes())
    # without a flag or a preset's value, the data set decides on vocab_size
    add_flags(parser, Train, DryRun, GPTConfig, preset={"vocab_size": 0} | PRESETS[Train.preset])
    args = parser.parse_args(argv)
    try:
        # validate all flags before the GPU is used or anything is written
        settled, stored = settle_knobs(args, Train)
        plan = DryRun(**given_flags(args, DryRun))
        knobs = Train(**fields_of(Train, settled))
        vocab_size = settled.get("vocab_size", 0)                       # 0: take it from the data set, below
        config = GPTConfig(**fields_of(GPTConfig, settled) | {"vocab_size": vocab_size or 1})
        check_balance(knobs, config)
        for kind in config.kinds:
            if reason := mixers.MIXERS[kind.mixer].cannot_learn(kind):
                raise ValueError(reason)
            if knobs.docs:
                mixers.check_packs(kind)
        # the folder of the run that this one continues or starts from, and whose tokenizer it shares
        began_with = None if knobs.init_from == "scratch" else Path(knobs.init_from).parent     # of its ckpt.pt
        before = Path(knobs.out_dir) if stored else began_with
        if knobs.dataset not in tokens.DATA_SETS and not any(tokens.data_folder(knobs.dataset, run).exists()
                                                               for run in (None, before)):
            raise ValueError(f"unknown --dataset={knobs.dataset}: choose from {', '.join(tokens.DATA_SETS)}, "
                             "or name a folder by its path")
    except (ValueError, OSError) as e:          # OSError: a name that is too long for a file
        parser.error(str(e))
    with files.one_line_errors():
        machine = Machine(knobs.device, knobs.dtype)
        if plan.dry_run:                        # needs data only to learn the size of the vocabulary
            config.vocab_size = vocab_size or tokens.data_for(before, knobs.dataset, machine)[1]["vocab_size"]
            return print(dry_run(knobs, config, plan))
        folder, data = tokens.data_for(before, knobs.dataset, machine)
        config.vocab_size = vocab_size or data["vocab_size"]
        tokens.check_vocabulary(config, data, knobs.dataset)
        knobs.out_dir = knobs.out_dir or default_out_dir(folder.name, config.layers or config.attn)
        training = Training(knobs, config, machine, folder, data, stored, argv)
        with training.run.locked(machine):
            training.begin(data)
            began = time.perf_counter()
            if stopped := training.train():
                printing.say_how_to_resume(knobs, machine, stopped)
            else:
                training.finish(time.perf_counter() - began)
        del training                            # by now nothing uses the group of ranks
        machine.close()
    sys.exit(130 if stopped else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
