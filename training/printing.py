"""What a training run prints: its first lines, the progress bar, its last lines, and the lists at the end of -h."""
import os
import sys
import textwrap
import time

from tqdm import tqdm

import attention
import mixers
from common.flags import shown
from common.runs import how_to_join, last_checkpoint
from training.presets import PRESETS
from training.weights import num_trained


def introduce(knobs, model, machine, data, batches, kernel, first):
    """Print the first lines of a run: the model, the machine, the data. data: the data set's meta.json."""
    if not machine.main:
        return
    config = model.config
    axes = [f"{name} {getattr(config, name)}" for name, default in mixers.DEFAULTS.items()
            if name in ("rule", "pos") or getattr(config, name) != default]
    tokenizer = f" in the tokenizer {data['tokenizer']}" if "separator" in data else ""
    part = f" ({num_trained(model):,} of them trained)" if knobs.train_only != "all" else ""
    recipe = f"--layers={config.layers}" if config.layers else f"--attn={config.attn} ({', '.join(axes)})"
    print(f"model: {model.num_params() / 1e6:.2f}M parameters{part}, {recipe}, computed by {kernel}\n"
          f"machine: {machine}\n"
          f"data: {knobs.dataset}{tokenizer}, {len(batches.split):,} tokens{' in packed documents' * knobs.docs}; "
          f"{batches.total * config.block_size:,} a step, {knobs.max_iters} steps{f' from step {first}' * bool(first)}"
          f"; run: {knobs.out_dir}", flush=True)


class Progress(tqdm):
    """A progress bar over the steps, and the speed of training between two rows of the log.

    sequences: of one step, on all ranks. first: steps that an earlier part of the run has done. The bar is shown on the
    main rank, and not by a run without steps left."""

    def __init__(self, knobs, model, machine, sequences, first):
        super().__init__(total=knobs.max_iters, initial=first, disable=not machine.main or first >= knobs.max_iters,
                         unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
        self.model, self.machine, self.sequences = model, machine, sequences
        self.measure_from(first)

    def measure_from(self, step):
        self.since, self.started = step, time.perf_counter()

    def speed(self, step):
        """The log's columns on speed, up to this step. mfu: share of the device's peak FLOP/s, if this is known."""
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
        self.set_postfix_str(f"loss {row['train_loss']:.4f}{balance}, {row['tokens_per_s']:,} tokens/s{mfu}",
                             refresh=False)


def say_how_to_resume(knobs, machine, step):
    """Print that the run was stopped after a step, and the command that continues it."""
    launcher = "python" if machine.world == 1 else f"torchrun --nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
    if machine.main:
        print(f"\nstopped and saved at step {step}; "
              f"go on with: {launcher} train.py --out_dir={knobs.out_dir} --init_from=resume")


def say_what_next(knobs, config, meta, waited):
    """Print how long the run took, and commands to try next. waited: seconds spent waiting for data."""
    print(f"\ntrained for {meta['seconds']} s, of which {waited:.2f} s were spent waiting for data")
    if knobs.sharded_ckpt:
        print(f"\nfirst: {how_to_join(last_checkpoint(knobs.out_dir))}    one ckpt.pt, which other commands read")
    commands = {"probe": "each layer and head", "sample": "more text"}
    if "excess_loss" in meta["report"]:         # the sink lab, whose tokens are not text
        commands = {"maps": "the attention weights of a sequence", "probe --all": "all figures of the lab"}
    (first, why), (second, then) = commands.items()
    print(f"\nnext:  python eval.py {first} --out_dir={knobs.out_dir}    {why}\n"
          f"       python eval.py {second} --out_dir={knobs.out_dir}    {then}")
    if "resume" in " ".join(meta["flags"]):     # these are only the flags of the last call
        return
    replaced = "--attn=" if knobs.train_only == "all" else "--init_from="
    given = [flag for flag in meta["flags"] if not flag.startswith((replaced, "--layers=", "--out_dir="))]
    again = " ".join(["       python train.py", *given])                # if a flag is repeated, the last one counts
    if knobs.train_only == "all":
        other = "elastic" if config.attn == "softmax" else "softmax"
        print(f"{again} --attn={other} --out_dir={knobs.out_dir}-{other}    the same with another attention")
    elif knobs.train_only in mixers.RETROFITS:  # the second phase of a retrofit, as in the mixer's paper
        print(f"{again} --init_from={knobs.out_dir} --train_only=all --out_dir={knobs.out_dir}-all    all weights, "
              "from here on")


def presets_and_recipes():
    """The lists of presets and recipes at the end of -h: the flags that each of them sets."""
    lines = ["presets:"]
    for name, (about, *flags) in ((name, preset.items()) for name, preset in PRESETS.items()):
        flags = " ".join(f"--{knob}={shown(value)}" for knob, value in flags)
        text = textwrap.wrap(about[1], 140) + textwrap.wrap(flags, 140, break_on_hyphens=False)
        lines += [f"  {name}", textwrap.indent("\n".join(text), "      ")]
    lines += ["\nrecipes:"]
    for name, axes in attention.ATTENTIONS.items():
        flags = [f"--{axis}={value}" for axis, value in axes.items() if axis != "args"]
        args = "".join(f" --attn_args={key}={shown(value)}" for key, value in axes.get("args", {}).items())
        lines += [f"  {name:18}{' '.join(flags)}{args}"]
    return "\n".join(lines)
