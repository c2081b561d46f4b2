"""Train a GPT with any attention recipe.

    python train.py --attn=elastic                  on this machine's best device: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train.py --attn=elastic     on eight GPUs, or as eight CPU processes
    python train.py --attn=elastic --init_from=resume       continue a stopped or killed run
    python train.py --preset=paper1-760m --dry_run  only print what it needs: memory, FLOPs, hours

Later beats earlier: the default of a knob, the preset (--preset), the model and the data set of the
run of --init_from, the recipe (--attn), a flag. The preset tune, which adapts a run, beats that
run. A resumed run keeps all its knobs, but for a few flags that may change. --show_config prints
each value and where it comes from.

A run writes out/<dataset>-<attn>/: ckpt.pt (model, optimizer, step), meta.json (every knob,
versions, losses) and log.csv; common/runs.py describes them, and adapters (--train_only=PART).
-h shows the knobs that people use, and -h all shows all of them. The value in parentheses is the
one without flags: that of the preset tiny, or else the default.
"""

import os
import signal
import sys

if __name__ == "__main__" and "RANK" not in os.environ:  # torchrun itself says why its ranks ended
    # The imports take seconds. A SIGTERM during them, or outside the loop, ends with one line
    said = (
        "train.py: terminated outside the training loop: the last checkpoint, if there is one, "
        "is as it was"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(said))

import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import common  # noqa: F401                     it must come before torch
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import mixers
from common import files
from common.balance import check_balance, head_balance_loss
from common.flags import Knobs, Parser, add_flags, fields_of, given_flags, knob, shown
from common.machine import PEAK_TFLOPS, Machine, check_memory
from common.presets import PRESETS, presets_and_recipes
from common.resolve import default_out_dir, resolve_run
from common.runs import Run, as_base, made_by, read_run
from common.weights import (
    PROJECTIONS,
    gather,
    is_sharded,
    load_optimizer,
    num_trained,
    resume,
    shard,
    take_weights,
    train_only,
)
from data import tokens
from evals.loss import mean_loss, window_targets
from evals.report import report
from model import GPT, GPTConfig, check_size, hidden_width

# -------------------------------------------------------------------------------------------- knobs


@dataclass
class Train(Knobs):
    """Flags of training"""

    # model, data, and the run's folder
    preset: str = knob("tiny", "a named set of values for the other knobs", tuple(PRESETS))
    dataset: str = knob(
        "stdlib",
        "a name in data/, or the path of a folder that a data script "
        "wrote. With --init_from=RUN it must use that run's tokenizer",
    )
    docs: bool = knob(
        False,
        "packed documents: no row sees another document of its sequence, and "
        "each begins at position 0, as if it were alone; data scripts record "
        "where documents begin",
    )
    order: str = knob(
        "random",
        "order of the training windows. random: a step draws them anew, so some are read twice and "
        "others never; pass: every window once an epoch, in a new order each epoch",
        ("random", "pass"),
    )
    out_dir: str = knob("", "folder of the run; empty: out/<dataset>-<attn>")
    init_from: str = knob(
        "scratch",
        "scratch; resume: continue from out_dir's checkpoint; the "
        "folder of a run: start from its weights",
    )
    train_only: str = knob(
        "all",
        f"weights to train; {', '.join(mixers.RETROFITS)}: only those that this mixer adds "
        "to plain attention; lora: only LoRA on linear layers. All others stay as "
        "in --init_from, and such a run saves an adapter, which holds only the trained "
        "weights",
        ("all", *mixers.RETROFITS, "lora"),
    )
    lora_rank: int = knob(
        4, "rank of the matrices that --train_only=lora adds to each linear layer", least=1
    )
    lora_on: str = knob(
        "both",
        "linear layers that get LoRA: attention's c_attn and c_proj (both) or one of them; queries "
        "and values (qv), as in table 4 of Focus; or c_attn, c_proj and the MLP's (all)",
        tuple(PROJECTIONS),
    )
    # how much
    max_iters: int = knob(1000, "optimizer steps", least=1)
    batch_size: int = knob(
        16, "largest number of sequences per forward pass on one device", least=1
    )
    gradient_accumulation_steps: int = knob(
        1, "sequences per step, over all ranks, as a multiple of batch_size", least=1
    )
    # AdamW, with linear warm-up and cosine decay
    learning_rate: float = knob(6e-4, "largest learning rate", least=1e-12, below=math.inf)
    head_lr: float = knob(
        1.0, "factor on the learning rate of parameters outside linear layers, such as tau", least=0
    )
    weight_decay: float = knob(
        0.1, "weight decay of matrices and embeddings; nothing else decays", least=0
    )
    beta1: float = knob(0.9, "AdamW's first beta", least=0, below=1)
    beta2: float = knob(0.95, "AdamW's second beta", least=0, below=1)
    grad_clip: float = knob(1.0, "largest gradient norm; 0: no limit", least=0)
    decay_lr: bool = knob(True, "cosine decay of the learning rate; 0: constant after the warm-up")
    warmup_iters: int = knob(100, "steps of linear warm-up")
    lr_decay_iters: int = knob(0, "step at which the learning rate reaches min_lr; 0: max_iters")
    min_lr: float = knob(
        -1.0, "learning rate at the end; negative: a tenth of learning_rate", below=math.inf
    )
    # the head-balancing loss of The Attention Sink as Native MoE, which is added to the model's own
    head_balance: float = knob(
        0.0,
        "weight (lambda of eq. 9) of the head-balancing loss, which is 0 for equal heads",
        least=0,
    )
    balance_form: str = knob(
        "routed",
        "heads that it balances: all (eq. 8), or all except those "
        "that the next two flags exclude (eq. 9)",
        ("routed", "all"),
    )
    balance_skip: int = knob(0, "number of first layers that the loss excludes")
    balance_shared: float = knob(
        0.2,
        "fraction of the other heads, the most important ones, that the loss excludes",
        least=0,
        below=1,
    )
    # evaluations and checkpoints
    eval_interval: int = knob(
        250, "steps between evaluations; each also saves a checkpoint", least=1
    )
    eval_iters: int = knob(
        20, "windows per evaluation, as a multiple of batch_size; always the same ones", least=1
    )
    log_interval: int = knob(10, "steps between rows of log.csv", least=1)
    wandb: str = knob(
        "", "also send the rows of log.csv to this project of Weights & Biases (pip install wandb)"
    )
    # the machine
    seed: int = knob(1337, "seed of initial weights, data order and dropout")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the fastest one here")
    dtype: str = knob(
        "auto",
        "precision of matrix products (autocast); auto: bfloat16 where it is fast",
        ("auto", "float32", "bfloat16", "float16"),
    )
    compile: bool = knob(False, "torch.compile the model")
    shard: bool = knob(
        False, "on several ranks, split weights, gradients and optimizer state over them"
    )


@dataclass
class DryRun(Knobs):
    """Flags that print something and train nothing"""

    show_config: bool = knob(
        False, "print the value of each knob and where it comes from, and stop"
    )
    dry_run: bool = knob(
        False, "print what the run would need, and stop: parameters, tokens, memory, FLOPs, hours"
    )
    gpu: str = knob("H100", "GPU whose hours a dry run prints", tuple(PEAK_TFLOPS))
    mfu: float = knob(0.4, "share of that GPU's peak FLOP/s that a dry run expects")


def check(knobs, config, plan, before):
    """Raise ValueError if knobs do not fit together. plan: a DryRun. before: see main."""
    if not 0 < plan.mfu <= 1:
        raise ValueError(f"--mfu={plan.mfu} must lie in (0, 1]")
    if knobs.train_only != "all" and knobs.init_from == "scratch":
        raise ValueError(
            f"--train_only={knobs.train_only} trains only a part of the model, so the rest must "
            "come from a run: name it with --init_from"
        )
    check_balance(knobs, config)
    for layer in config.layer_configs:
        if reason := mixers.MIXERS[layer.mixer].cannot_learn(layer):
            raise ValueError(reason)
        if knobs.docs:
            mixers.check_packs(layer)
    places = [tokens.data_folder(knobs.dataset, run) for run in (None, before)]
    if knobs.dataset not in tokens.DATA_SETS and not any(path.exists() for path in places):
        made = (path.parent.name for path in tokens.HERE.glob("*/meta.json"))
        raise ValueError(
            f"unknown --dataset={knobs.dataset}: choose from "
            f"{', '.join(sorted({*tokens.DATA_SETS, *made}))}, or name a folder by its path"
        )


# ------------------------------------------------------------------------------------------ batches


class Batches:
    """Training batches as a pure function of (seed, step, number of the sequence).

    So a resumed run needs no stored state, and the tokens of a step do not depend on the number of
    ranks and micro-batches."""

    def __init__(self, split, config, knobs, machine):
        self.split, self.config = split, config
        self.knobs, self.machine = knobs, machine
        self.thread = ThreadPoolExecutor(1)
        self.upcoming = {}  # {the next step: the Future of its batches}
        self.order_of = lru_cache(1)(self.order_of)  # an order holds 8 bytes a window
        self.waited = 0.0  # seconds that the loop has waited for batches
        # tokens between possible starts. In a pass, windows lie side by side
        self.gap = max(split.stride, config.block_size) if knobs.order == "pass" else split.stride
        self.choices = (len(split) - config.block_size - 1) // self.gap + 1
        if self.choices < 1:
            raise ValueError(
                f"{split.name} holds {len(split)} tokens, too few for one window of "
                f"block_size={config.block_size}: lower --block_size or add data"
            )
        # sequences a step, on all ranks
        self.total = knobs.batch_size * knobs.gradient_accumulation_steps
        size = 8 * self.total * (config.block_size + 1) // machine.world
        steps = f"--gradient_accumulation_steps={knobs.gradient_accumulation_steps}"
        check_memory(size, f"{steps}: the tokens of a step need", "lower it")
        if self.total % machine.world:
            raise ValueError(
                f"{self.total} sequences a step (batch_size {knobs.batch_size} x "
                f"gradient_accumulation_steps {knobs.gradient_accumulation_steps}) "
                f"cannot be shared by {machine.world} ranks: make it a multiple of "
                f"{machine.world}"
            )

    def chosen(self, step):
        """The numbers of the windows of a step, on all ranks, (total,)."""
        if self.knobs.order == "random":
            dice = np.random.default_rng([self.knobs.seed, step])
            return dice.integers(0, self.choices, self.total)
        numbers = np.arange((step - 1) * self.total, step * self.total)
        epochs, places = np.divmod(numbers, self.choices)
        parts = [self.order_of(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def order_of(self, epoch):
        """The order of all windows in an epoch, for --order=pass."""
        return np.random.default_rng([self.knobs.seed, int(epoch)]).permutation(self.choices)

    def read(self, step):
        """This rank's micro-batches of a step. Each is its weight, its windows (at most batch_size,
        T + 1), as stored, and with --docs=1 where the document of each input begins. The weight is
        its share of the step's targets, times the number of ranks, because DDP averages."""
        T, size = self.config.block_size, self.knobs.batch_size
        # every rank draws the windows of all ranks, counts their targets, and takes its own part
        offsets = self.chosen(step) * self.gap
        targets = max(1, self.split.count_targets(offsets, T).sum())
        offsets = offsets.reshape(self.machine.world, -1)[self.machine.rank]
        micro_batches = []
        for part in np.split(offsets, range(size, len(offsets), size)):
            windows = torch.from_numpy(self.split.windows(part, T + 1, self.config.vocab_size))
            if self.machine.device.type == "cuda":
                # from pinned memory, the GPU copies while it computes
                windows = windows.pin_memory()
            weight = self.split.count_targets(part, T).sum() * self.machine.world / targets
            batch = [weight, windows.to(self.machine.device, non_blocking=True)]
            if self.knobs.docs:
                first = torch.from_numpy(self.split.first_keys(part, T))
                batch.append(first.to(self.machine.device))
            micro_batches.append(batch)
        return micro_batches

    def __call__(self, step):
        """The micro-batches of a step. A thread reads them while the previous step is computed."""
        found = self.upcoming.pop(step, None) or self.thread.submit(self.read, step)
        started = time.perf_counter()
        micro_batches = found.result()
        self.waited += time.perf_counter() - started
        self.upcoming = {step + 1: self.thread.submit(self.read, step + 1)}
        return micro_batches


# ----------------------------------------------------------------------------------------- training


def learning_rate(step, knobs):
    """The learning rate of step 1, 2, ...: linear warm-up, then a cosine from learning_rate to
    min_lr, then min_lr."""
    # AdamW's averages are poor estimates at first, so the first steps are small
    if step <= knobs.warmup_iters:
        return knobs.learning_rate * step / knobs.warmup_iters
    if not knobs.decay_lr:
        return knobs.learning_rate
    end = knobs.lr_decay_iters or knobs.max_iters
    low = knobs.min_lr if knobs.min_lr >= 0 else knobs.learning_rate / 10
    # share of the decay, 0 to 1
    done = min(1.0, (step - knobs.warmup_iters) / max(1, end - knobs.warmup_iters))
    return low + (knobs.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


class Training:
    """One training run: all that its loop needs, from the data to the optimizer. Making it writes
    nothing to disk, so a wrong flag destroys no earlier run; `begin` does."""

    def __init__(
        self,
        run,  # the Run of its output folder
        knobs,
        config,
        machine,
        folder,  # of the data set
        data,  # its meta.json
        stored,  # meta.json of the run to resume, or None
        flags,  # the command line as given
    ):
        self.run, self.knobs, self.config = run, knobs, config
        self.machine, self.folder = machine, folder
        if stored and stored.get("data_hash") != tokens.data_hash(data):
            raise ValueError(
                f"the data set {knobs.dataset} has changed since "
                f"{Path(knobs.out_dir)} began: make it as it was, or start a new run"
            )
        with machine.autocast():
            self.kernel = mixers.choose_kernel(  # raises if it is not there
                config, machine.device.type, importance=knobs.head_balance > 0
            )
        self.tracker = None  # offline with WANDB_MODE=offline
        if knobs.wandb and machine.main:
            self.tracker = files.optional("wandb")
        # the data: batches to train on, and a split to evaluate on
        self.batches = Batches(tokens.Tokens(folder, "train", knobs.docs), config, knobs, machine)
        self.val = tokens.Tokens(folder, "val", knobs.docs)
        fit = len(tokens.fixed_windows(self.val, config.block_size, 0))  # raises if it is too short
        self.windows = knobs.eval_iters * knobs.batch_size
        # a short split may have fewer windows than the default, but an --eval_iters above the
        # default must fit
        if not stored and knobs.eval_iters > Train.eval_iters and self.windows > fit:
            raise ValueError(
                f"--eval_iters={knobs.eval_iters} asks for {self.windows} windows, "
                f"and {self.val.name} holds {fit}: give at most "
                f"{max(Train.eval_iters, fit // knobs.batch_size)}"
            )
        for split in (self.batches.split, self.val):  # the report at the end reads both
            window_targets(split, config.block_size, self.windows)  # raises if there is no target

        checkpoint = self.make_model(stored)
        self.meta = self.new_meta(data, stored, flags, resumed=checkpoint is not None)
        self.running = self.distribute()

        self.optimizer = self.model.configure_optimizers(
            knobs.weight_decay, knobs.learning_rate, (knobs.beta1, knobs.beta2), knobs.head_lr
        )
        # keeps small gradients from becoming 0 in float16; in other precisions it does nothing
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == "float16")
        if checkpoint:
            load_optimizer(self.optimizer, checkpoint["optimizer"])
            self.scaler.load_state_dict(self.scaler.state_dict() | checkpoint["scaler"])
            self.run.saved = checkpoint["step"]

    def make_model(self, stored):
        """Make the whole model on the CPU of each rank: with fresh weights, those of another run,
        or those of this run's last checkpoint. Returns this checkpoint, or None."""
        knobs, machine = self.knobs, self.machine
        # on a CPU, gradients and AdamW's two averages come into the same memory
        all_in_one = machine.device.type == "cpu" and knobs.train_only == "all"
        check_size(self.config, 4 if all_in_one else 1)
        self.model = model = GPT(self.config, knobs.seed)
        train_only(model, knobs)
        if knobs.head_balance or model.penalized:
            self.run.columns += ("balance",)
        if stored and self.run.checkpoint.exists():  # else it was killed before its first one
            return resume(model, self.run.checkpoint, stored)
        if knobs.init_from != "scratch":
            take_weights(model, knobs.init_from, self.run, machine)

    def new_meta(self, data, stored, flags, resumed):
        """meta.json: the settings of the run, and entries from the data set and from an earlier
        run."""
        knobs, model, machine = self.knobs, self.model, self.machine
        meta = {
            "flags": flags,
            "knobs": dataclasses.asdict(knobs) | dataclasses.asdict(self.config),
            "parameters": model.num_params(),
            "data_hash": tokens.data_hash(data),
            **made_by(),
            "machine": str(machine),
            "world_size": machine.world,
            "losses": stored.get("losses", {}) if resumed else {},
            "seconds": stored.get("seconds", 0) if resumed else 0,
        }
        earlier = stored or ({} if knobs.init_from == "scratch" else read_run(knobs.init_from)[0])
        for name, origin in (("tokenizer", data), ("separator", data), ("ends", earlier)):
            if name in origin:
                meta[name] = origin[name]
        if knobs.train_only != "all":
            meta["trained"] = num_trained(model)
            meta["base"] = stored["base"] if resumed else as_base(knobs.init_from)
        return meta

    def distribute(self):
        """Put the model on the device: a part of every weight (--shard), or all of them. Returns
        what the loop calls: the same model, compiled and made ready for several ranks."""
        model, machine = self.model, self.machine
        sharded = self.knobs.shard and machine.world > 1
        if sharded:
            shard(model, machine)
        model.to(machine.device)
        with machine.autocast():
            for block in model.transformer.h:  # may build code, which torch.compile cannot trace
                block.attn.kernel_on(machine.device.type)
        # without dynamic=False, the compiler turns a rule's constants into symbols once a second
        # model has other constants, and fails in `checkpoint`
        running = torch.compile(model, dynamic=False) if self.knobs.compile else model
        return DistributedDataParallel(running) if machine.world > 1 and not sharded else running

    def begin(self, data):
        """Print what is about to be trained, and write the run's first files."""
        if self.machine.main:
            introduce(self, data)
        self.run.begin(self.meta)
        if self.machine.main:  # the run keeps its tokenizer, so eval.py can read and write text
            tokens.keep_tokenizer(self.run.folder, tokens.content_of(self.folder))
        if self.tracker:
            name, knobs = self.run.folder.name, self.meta["knobs"]
            self.tracker.init(project=self.knobs.wandb, name=name, config=knobs)
        self.machine.wait()  # until the main rank has written

    def train(self):
        """Train to the last step. Returns the step at which a signal stopped it, or None."""
        knobs, machine = self.knobs, self.machine
        model, optimizer, scaler = self.model, self.optimizer, self.scaler
        first = self.run.saved or 0  # steps that an earlier part of this run has done
        self.began = time.perf_counter() - self.meta["seconds"]  # as if all parts were one
        progress = Progress(knobs, model, machine, self.batches.total, first)
        with StopSignal() as signals, progress:
            for step in range(first + 1, knobs.max_iters + 1):
                lr = learning_rate(step, knobs)
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]  # the group's own factor
                model.set_progress(step / knobs.max_iters)  # for layers with a schedule

                sums = self.accumulate_gradients(step)  # (2,), of both losses

                # clip the gradient, to limit the effect of one unusual batch. If float16 overflows,
                # the scaler skips the step and lowers its scale
                scaler.unscale_(optimizer)  # the norm is that of the unscaled gradient
                limit = knobs.grad_clip or math.inf
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
                model.finish_step(machine)  # for layers that count tokens
                optimizer.zero_grad(set_to_none=True)  # frees memory for the next forward pass
                progress.update()

                # Only steps with a row of the log read numbers from the device: in all others a GPU
                # need not wait for Python
                evaluate = step % knobs.eval_interval == 0 or step == knobs.max_iters
                if not evaluate and step % knobs.log_interval:
                    continue
                if hasattr(norm, "full_tensor"):  # each rank has a part
                    norm = norm.full_tensor()
                # all ranks share the wish to stop as well, so they stop after the same step
                numbers = machine.sum(*sums.tolist(), norm.item(), signals.asked is not None)
                train_loss, balance, norm, stop = (total / machine.world for total in numbers)
                finite = math.isfinite(norm) or scaler.is_enabled()
                if not (math.isfinite(train_loss) and finite):
                    raise self.run.diverged(
                        f"the loss is {train_loss} and the gradient norm {norm} at step {step}"
                    )
                row = {"step": step, "train_loss": train_loss, "lr": lr, "grad_norm": norm}
                row |= {"balance": balance} | progress.speed(step)
                progress.show(row)
                self.evaluate_and_save(row, evaluate, stop)
                progress.measure_from(step)  # without the time of the evaluation
                if stop:
                    return step if step < knobs.max_iters else None

    def accumulate_gradients(self, step):
        """Run this rank's micro-batches of a step forward and backward. Returns a tensor (2,): the
        model's mean loss, and that of the losses that are added to it."""
        knobs, machine, running = self.knobs, self.machine, self.running
        micro_batches = self.batches(step)
        sums = torch.zeros(2, device=machine.device)
        for micro, (weight, windows, *starts) in enumerate(micro_batches):
            idx, targets = tokens.ids_and_targets(windows)
            if self.config.dropout:  # seeded by these numbers: no state to be stored
                seeds = np.random.SeedSequence((knobs.seed, step, machine.rank, micro))
                torch.manual_seed(seeds.generate_state(1)[0].item())
            # DDP averages the gradients of the ranks once, after the last micro-batch; --shard does
            # after each
            if isinstance(running, DistributedDataParallel):
                running.require_backward_grad_sync = micro == len(micro_batches) - 1
            with machine.autocast():  # products in 16 bits if fast, sums in float32
                _, loss, *importance = running(
                    idx[:, :-1],
                    targets[:, 1:],  # the target of each token is the next token
                    importance=knobs.head_balance > 0,
                    starts=starts[0] if starts else None,
                )
                balance = torch.zeros((), device=machine.device)
                if importance:
                    balance = head_balance_loss(importance[0], knobs, machine)
                balance = balance + self.model.penalty()
            # weighted by shares of targets and sequences, gradients add up to that of one batch
            share = len(idx) * machine.world / self.batches.total
            parts = torch.stack([loss * weight, balance * share])
            self.scaler.scale(parts.sum()).backward()
            sums += parts.detach()
        return sums

    def evaluate_and_save(self, row, evaluate, stop):
        """Evaluate on the same windows as always, if that is due, then write a row of the log and a
        checkpoint. The row comes first: wherever the run is killed, the log has all rows up to its
        checkpoint."""
        knobs, run, step = self.knobs, self.run, row["step"]
        if evaluate:
            row["val_loss"] = mean_loss(
                self.model,
                self.val,
                self.machine,
                self.windows,
                knobs.batch_size,
                share=not is_sharded(self.model),
            )
            if not math.isfinite(row["val_loss"]):
                raise run.diverged(
                    f"the validation loss is {row['val_loss']} after step {step}: stopped"
                )
            run.meta["losses"] = {"step": step, "train": row["train_loss"], "val": row["val_loss"]}
        run.log(**row)
        if self.tracker:
            self.tracker.log(row, step=step)
        if evaluate or stop:
            run.meta["seconds"] = round(time.perf_counter() - self.began, 1)
            run.save(self.model, self.optimizer, self.scaler, step)

    def say_how_to_resume(self, step):
        """Print the command that continues a run after a stop request."""
        launcher = "python"
        if self.machine.world > 1:
            launcher = f"torchrun --nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
        if self.machine.main:
            print(
                f"\nstopped and saved at step {step}; go on with: "
                f"{launcher} train.py --out_dir={self.knobs.out_dir} --init_from=resume"
            )

    def finish(self):
        """Print the report, write it into meta.json, and say what to do next."""
        knobs, meta, waited = self.knobs, self.run.meta, self.batches.waited
        meta["seconds_waiting_for_data"] = round(waited, 3)
        gather(self.model)  # most of the report looks into the model on the main rank alone
        meta["report"] = report(
            self.model, self.machine, self.folder, self.windows, knobs.batch_size, knobs.docs
        )
        self.run.write_meta()
        if self.machine.main:
            looks = [("probe", "each layer and head"), ("sample", "more text")]
            if "excess_loss" in meta["report"]:  # the sink lab, whose tokens are not text
                looks = [
                    ("maps", "the attention weights of a sequence"),
                    ("probe --all", "all figures of the lab"),
                ]
            print(
                f"\ntrained for {meta['seconds']} s, of which {waited:.2f} s were spent waiting "
                "for data\n\nnext:"
            )
            for look, why in looks:
                print(f"  python eval.py {look} --out_dir={knobs.out_dir}    {why}")


class StopSignal:
    """Inside this context, Ctrl-C and SIGTERM ask the loop to save and stop at the next row of the
    log.

    Another signal, more than PATIENCE seconds later, ends the process at once."""

    PATIENCE = 3  # torchrun repeats a signal that its children have already received

    def __enter__(self):
        self.asked = None  # the time of the first signal
        self.before = {
            number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.asked and time.monotonic() - self.asked > self.PATIENCE:
            raise KeyboardInterrupt
        self.asked = self.asked or time.monotonic()


# ----------------------------------------------------------------------------------------- printing


def introduce(training, data):
    """Print the first lines of a run: the model, the machine, the data. data: the data set's
    meta.json."""
    knobs, config, batches = training.knobs, training.config, training.batches
    first = training.run.saved
    axes = [
        f"{name} {getattr(config, name)}"
        for name, default in mixers.DEFAULTS.items()
        if name in ("rule", "pos") or getattr(config, name) != default
    ]
    tokenizer = f" in the tokenizer {data['tokenizer']}" if "separator" in data else ""
    part = f" ({training.meta['trained']:,} of them trained)" if "trained" in training.meta else ""
    recipe = f"--attn={config.attn} ({', '.join(axes)})"
    if config.layers:
        recipe = f"--layers={config.layers}"
    size = f"{training.meta['parameters'] / 1e6:.2f}M parameters"
    packed = " in packed documents" if knobs.docs else ""
    begun = f" from step {first}" if first else ""
    print(
        f"model: {size}{part}, {recipe}, computed by {training.kernel}\n"
        f"machine: {training.machine}\n"
        f"data: {knobs.dataset}{tokenizer}, {len(batches.split):,} tokens{packed}; "
        f"{batches.total * config.block_size:,} a step, {knobs.max_iters} steps{begun}; "
        f"run: {knobs.out_dir}",
        flush=True,
    )


class Progress(tqdm):
    """A progress bar over the steps, and the speed of training between two rows of the log.

    sequences: of one step, on all ranks. first: steps that an earlier part of the run has done. The
    bar is shown on the main rank, and not by a run without steps left."""

    def __init__(self, knobs, model, machine, sequences, first):
        hidden = not machine.main or first >= knobs.max_iters
        super().__init__(
            total=knobs.max_iters,
            initial=first,
            disable=hidden,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )
        self.model, self.machine, self.sequences = model, machine, sequences
        self.measure_from(first)

    def measure_from(self, step):
        self.since, self.started = step, time.perf_counter()

    def speed(self, step):
        """The log's columns on speed, up to this step. mfu: share of the device's peak FLOP/s, if
        this is known."""
        seconds = (time.perf_counter() - self.started) / (step - self.since)
        tokens_per_s = round(self.sequences * self.model.config.block_size / seconds)
        columns = {"ms": round(1000 * seconds, 2), "tokens_per_s": tokens_per_s}
        if peak := self.machine.peak_flops():
            flops = self.model.flops_per_token() * tokens_per_s
            columns["mfu"] = round(flops / (peak * self.machine.world), 4)
        return columns

    def show(self, row):
        """Show the losses and the speed of a row of the log at the end of the bar."""
        balance = f" + {row['balance']:.4f}" if row["balance"] else ""
        mfu = f", mfu {row['mfu']:.1%}" if "mfu" in row else ""
        self.set_postfix_str(
            f"loss {row['train_loss']:.4f}{balance}, {row['tokens_per_s']:,} tokens/s{mfu}",
            refresh=False,
        )


def memory_of_a_step(model, config, knobs):
    """{part: bytes} of one process during a training step; an estimate, exact but for the
    activations.

    Weights, gradients and AdamW's two averages are float32. Of each token, a block
    keeps for its backward pass about 10 vectors of width C, of which 4 stay float32 under autocast,
    and 2 as wide as the MLP (4 with swiglu). Three times the logits are in float32. Attention is
    assumed to be fused, as softmax's; other recipes keep up to four times as much a block. In 16
    bits, autocast also has a copy of the weights. Not counted: dropout's masks, evaluation,
    exchange between processes."""
    size = 4 if knobs.dtype == "float32" else 2  # bytes of a number; auto: as on a GPU
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    hidden = (4 if config.mlp == "swiglu" else 2) * hidden_width(config)
    block = (16 + 6 * size) * config.n_embd + size * hidden  # bytes of a token
    tokens_at_once = knobs.batch_size * config.block_size
    activations = tokens_at_once * (config.n_layer * block + 12 * config.vocab_size)
    if size == 2:
        activations += 2 * model.num_params()
    return {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": gradients,
        "optimizer": 2 * gradients,
        "activations": activations,
    }


def dry_run(knobs, config, plan):
    """The text that a dry run prints. plan: a DryRun."""
    with torch.device("meta"):  # shapes only
        model = GPT(config)
        train_only(model, knobs)
        memory = memory_of_a_step(model, config, knobs)
    memory["together"] = sum(memory.values())
    split = (memory["weights"] + memory["gradients"] + memory["optimizer"]) / 8
    a_step = knobs.batch_size * knobs.gradient_accumulation_steps * config.block_size
    total, tflops = a_step * knobs.max_iters, PEAK_TFLOPS[plan.gpu]
    flops = model.flops_per_token() * total
    hours = flops / (1e12 * tflops * plan.mfu) / 3600
    return "\n".join(
        [
            f"model: {model.num_params() / 1e6:.2f}M parameters, "
            f"--attn={config.layers or config.attn}",
            f"tokens: {a_step:,} a step, {knobs.max_iters:,} steps, {total:,} in all",
            f"memory of one process, {knobs.batch_size} sequences at a time with fused attention, "
            "about:",
            *(f"  {name:11} {size / 1e9:10,.3f} GB" for name, size in memory.items()),
            f"  with --shard=1 the first three take {split / 1e9:,.3f} GB on each of 8 GPUs, "
            "besides a block or two",
            f"FLOPs: {model.flops_per_token():.3g} a token, {flops:.3g} in all",
            f"hours on {plan.gpu} ({tflops} TFLOP/s in 16 bits) at an MFU of {plan.mfu:.0%}: "
            f"{hours:.3g} on 1 GPU, {hours / 8:.3g} on 8 GPUs",
        ]
    )


# --------------------------------------------------------------------------------- the command line

# what -h shows
USUAL = (
    "preset dataset out_dir init_from max_iters batch_size gradient_accumulation_steps "
    "learning_rate eval_interval seed device dtype compile show_config dry_run block_size n_layer "
    "n_head n_embd dropout attn kernel pos window"
).split()


def main(argv):
    """Resolve all knobs, find the data, and train. Exit code 0 after the last step, 130 after a
    stop request."""
    parser = Parser(USUAL, prog="train.py", description=__doc__, epilog=presets_and_recipes())
    # without a flag or a preset's value, the data set decides on vocab_size
    add_flags(parser, Train, DryRun, GPTConfig, preset={"vocab_size": 0} | PRESETS[Train.preset])
    args = parser.parse_args(argv)
    try:
        # validate all flags before the GPU is used or anything is written
        plan = DryRun(**given_flags(args, DryRun))
        values, origins, stored = resolve_run(given_flags(args, Train, GPTConfig), Train)
        knobs = Train(**fields_of(Train, values))
        vocab_size = values.get("vocab_size", 0)  # 0: take it from the data set, below
        config = GPTConfig(**fields_of(GPTConfig, values) | {"vocab_size": vocab_size or 1})
        # the folder of the run that this one continues or starts from, whose tokenizer it shares
        before = None
        if stored:  # this run resumes that one
            before = Path(knobs.out_dir)
        elif knobs.init_from != "scratch":
            before = Path(knobs.init_from).parent
        check(knobs, config, plan, before)
    except (ValueError, OSError) as e:  # OSError: a name that is too long for a file
        parser.error(str(e))
    if plan.show_config:
        values = dataclasses.asdict(knobs) | dataclasses.asdict(config)
        for name, value in (values | {"vocab_size": vocab_size}).items():
            print(f"{f'--{name}={shown(value)}':40} {origins.get(name, 'default')}")
        return
    with files.one_line_errors():
        machine = Machine(knobs.device, knobs.dtype)
        if plan.dry_run:  # needs data only to learn the size of the vocabulary
            if not vocab_size:
                _, data = tokens.data_for(knobs.dataset, before, machine)
                config.vocab_size = data["vocab_size"]
            return print(dry_run(knobs, config, plan))
        folder, data = tokens.data_for(knobs.dataset, before, machine)
        config.vocab_size = vocab_size or data["vocab_size"]
        tokens.check_vocabulary(config, data, knobs.dataset)
        knobs.out_dir = knobs.out_dir or default_out_dir(folder.name, args.layers or config.attn)
        run = Run(knobs.out_dir, machine)
        with run.locked(machine):  # before an earlier run's checkpoint is read
            training = Training(run, knobs, config, machine, folder, data, stored, argv)
            training.begin(data)
            if stopped := training.train():
                training.say_how_to_resume(stopped)
            else:
                training.finish()
        del training  # by now nothing uses the group of ranks
        machine.close()
    sys.exit(130 if stopped else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
