"""What a training run prints: its first lines, the progress bar, its last lines, and the lists at the end of -h."""
import os
import re
import sys
import textwrap
import time

from tqdm import tqdm

import attention
import mixers
from common.adapters import num_trained
from common.flags import shown
from common.runs import how_to_join, last_checkpoint
from training.presets import PRESETS

# ------------------------------------------------------------------------------------------------------ while it runs


def introduce(knobs, model, machine, data, batches, kernel, first):
    """Print the first lines of a run: the model, the machine, the data. data: the data set's meta.json."""
    if not machine.main:
        return
    config = model.config
    axes = [f"{name} {getattr(config, name)}" for name, default in mixers.DEFAULTS.items()
            if name in ("rule", "pos") or getattr(config, name) != default]
    tokenizer = f" in the tokenizer {data['tokenizer']}" if "separator" in data else ""
    used = f", {model.num_params(active=True) / 1e6:.2f}M of them active" if config.mlp == "moe" else ""
    part = f" ({num_trained(model):,} of them trained)" if knobs.train_only != "all" else ""
    print(f"model: {model.num_params() / 1e6:.2f}M parameters{used}{part}, --attn={config.attn} "
          f"({', '.join(axes)}), computed by {kernel}\n"
          f"machine: {machine}\n"
          f"data: {knobs.dataset}{tokenizer}, {len(batches.split):,} tokens; {batches.total * config.block_size:,} a "
          f"step, {knobs.max_iters} steps{f' from step {first}' if first else ''}; run: {knobs.out_dir}", flush=True)


def progress_bar(knobs, machine, first):
    """A progress bar over the steps, on the main rank only. A run without steps left shows none."""
    return tqdm(total=knobs.max_iters, initial=first, disable=not machine.main or first >= knobs.max_iters, unit="step",
                mininterval=0.5 if sys.stderr.isatty() else 10)


class Pace:
    """The speed of training between two rows of the log. sequences: of one step, on all ranks."""

    def __init__(self, model, machine, sequences, step):
        self.model, self.machine, self.sequences = model, machine, sequences
        self.restart(step)

    def restart(self, step):
        """Measure from the end of this step on."""
        self.since = step
        self.started = time.perf_counter()

    def columns(self, step):
        """The log's columns on speed, up to this step. mfu: share of the device's peak FLOP/s, if this is known."""
        seconds = (time.perf_counter() - self.started) / (step - self.since)
        tokens_per_s = round(self.sequences * self.model.config.block_size / seconds)
        columns = {"ms": round(1000 * seconds, 2), "tokens_per_s": tokens_per_s}
        if peak := self.machine.peak_flops():
            flops = self.model.flops_per_token() * tokens_per_s
            columns["mfu"] = round(flops / (peak * self.machine.world), 4)
        return columns


def show_on(bar, row):
    """Show the losses and the speed of a row of the log at the end of the progress bar."""
    balance = f" + {row['balance']:.4f}" if row["balance"] else ""
    mfu = f", mfu {row['mfu']:.1%}" if "mfu" in row else ""
    bar.set_postfix_str(f"loss {row['train_loss']:.4f}{balance}, {row['tokens_per_s']:,} tokens/s{mfu}", refresh=False)


# --------------------------------------------------------------------------------------------------------- at its end


def say_how_to_resume(knobs, machine, step):
    """Print that the run was stopped after a step, and the command that continues it."""
    if machine.main:
        launcher = "python" if machine.world == 1 else f"torchrun --nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
        print(f"\nstopped and saved at step {step}; "
              f"go on with: {launcher} train.py --out_dir={knobs.out_dir} --init_from=resume")


def say_what_next(knobs, config, meta, waited):
    """Print how long the run took, and commands to go on with. waited: seconds spent waiting for data."""
    print(f"\ntrained for {meta['seconds']} s, of which {waited:.2f} s were spent waiting for data")
    if knobs.sharded_ckpt:
        print(f"\nfirst: {how_to_join(last_checkpoint(knobs.out_dir))}    one ckpt.pt, which other commands read")
    print(f"\nnext:  python eval.py probe --out_dir={knobs.out_dir}     each layer and head\n"
          f"       python eval.py sample --out_dir={knobs.out_dir}    more text")
    if knobs.init_from == "resume":             # meta has only the flags of this last call
        return
    joined = re.sub(r"(?m)^(--[^=\n]+)\n(?!--)", r"\1=", "\n".join(meta["flags"]))     # --n_layer 4 as --n_layer=4
    kept = [flag for flag in joined.split("\n") if flag.startswith("--")
            and not flag.startswith(("--attn", "--out_dir"))]
    if knobs.train_only == "all":
        other = "elastic" if config.attn == "softmax" else "softmax"
        print("       python train.py", *kept, f"--attn={other}    the same with another attention")
    elif knobs.train_only in mixers.RETROFITS:  # the second phase of a retrofit, as in the mixer's paper
        kept = [flag for flag in kept if not flag.startswith(("--init_from", "--train_only", "--learning_rate"))]
        print("       python train.py", *kept, f"--attn={config.attn} --init_from={knobs.out_dir} --train_only=all "
              f"--out_dir={knobs.out_dir}-all    all weights, from here on")


# ------------------------------------------------------------------------------------------------------------- for -h


def presets_and_recipes():
    """The lists of presets and recipes at the end of -h."""
    return "\n".join(["presets:", *map(about_preset, PRESETS), "\nrecipes:", *map(about_recipe, attention.ATTENTIONS)])


def about_preset(name):
    """A preset's purpose and its flags, as indented lines."""
    about, *flags = PRESETS[name].items()
    flags = " ".join(f"--{knob}={shown(value)}" for knob, value in flags)
    lines = textwrap.wrap(about[1], 140) + textwrap.wrap(flags, 140, break_on_hyphens=False)
    return f"  {name}\n" + textwrap.indent("\n".join(lines), "      ")


def about_recipe(name):
    """A recipe's flags, on one line."""
    axes = attention.ATTENTIONS[name]
    return f"  {name:18}" + " ".join(f"--{axis}={value}" for axis, value in axes.items() if axis != "args") + "".join(
        f" --attn_args={key}={shown(value)}" for key, value in axes.get("args", {}).items())
