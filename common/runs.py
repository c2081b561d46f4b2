"""A run on disk. Its folder holds these files, and only this module reads and writes the first three:

    ckpt.pt     model, optimizer, scaler and step; loads with weights_only=True; names of the uncompiled module.
                An adapter (--train_only) stores only the parameters that it trained; its base has the others
    meta.json   every knob, versions, hashes, losses: enough to build the model again. For an adapter also its base, the
                run that it was trained on: {path, weights: their fingerprint}
    log.csv     step, train_loss, val_loss, lr, grad_norm, ms, tokens_per_s, on a GPU also mfu. "balance" is the sum of
                --head_balance and a layer's own penalty, if there are any. Public weights have no log
    tokenizer.json  the tokenizer of a public model, in Hugging Face's format
    lock        only while a process trains in the folder: its id and its host
    sharded_ckpt/STEP/      only with --sharded_ckpt=1, in place of ckpt.pt: the same in parts, in the format of
                torch.distributed.checkpoint. Every other command needs ckpt.pt. Make it from the parts with
                python common/shards.py RUN/sharded_ckpt/STEP RUN/ckpt.pt

Each is written under a temporary name and renamed when complete, so a run killed at any moment resumes from its last
checkpoint. Only rank 0 writes, except for the parts: each rank writes its own.
"""
import contextlib
import csv
import hashlib
import itertools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from common import files
from common.shards import fill, is_dense, save_parts, whole

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------------------------------------------ writing


class Run:
    """The folder that a training run writes."""
    COLUMNS = ("step", "train_loss", "val_loss", "lr", "grad_norm", "ms", "tokens_per_s")

    def __init__(self, folder, machine, extra_columns=()):
        """extra_columns: columns of the log beyond the usual ones."""
        self.folder, self.main = Path(folder), machine.main
        self.checkpoint, self.parts = self.folder / "ckpt.pt", self.folder / PARTS
        self.meta_json, self.log_csv = self.folder / "meta.json", self.folder / "log.csv"
        self.lock = self.folder / "lock"
        self.process = f"process {os.getpid()} on {socket.gethostname()}"               # the content of its lock
        self.saved = None                       # the step of the last checkpoint, None before the first
        self.meta = {}                          # the content of meta.json
        self.columns = self.COLUMNS + (("mfu",) if machine.peak_flops() else ()) + extra_columns

    @contextlib.contextmanager
    def locked(self, machine):
        """A context in which no other process trains in this folder. If one does, every rank raises ValueError."""
        error = None
        if self.main:
            try:
                with self.writing(self.saved or 0):
                    self.take_lock()
            except (ValueError, OSError) as e:
                error = str(e)
        if error := machine.share(error):       # the other ranks would wait for the main one
            raise ValueError(error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):                          # somebody has deleted it
                if self.main and self.lock.read_text() == self.process:
                    self.lock.unlink()

    def take_lock(self):
        """Write the lock. That of a process of this host that has ended is taken over. Raises ValueError if the lock is
        another process's, or if a symbolic link would lead out of the folder."""
        for path in (self.lock, self.parts, self.folder / "old"):
            if path.is_symlink():
                raise ValueError(f"{path} is a symbolic link, which no run follows: remove the link, or name another "
                                 "folder with --out_dir")
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as alone:
            with contextlib.suppress(ImportError, OSError):             # where this fails, only taking over can race
                import fcntl                    # not on Windows
                folder = os.open(self.folder, os.O_RDONLY)
                alone.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
            if self.lock.exists():
                holder = files.regular(self.lock).read_text(errors="replace")
                found = re.fullmatch(r"process (\d+) on (.+)", holder)
                here = found and found[2] == socket.gethostname()
                ended = here and (int(found[1]) == os.getpid() or not files.is_running(int(found[1])))
                if holder and not ended:        # a full disk leaves an empty lock
                    raise ValueError(f"{holder[:99]} trains in {self.folder}: name another folder with --out_dir; if "
                                     f"that process has ended, delete {self.lock}")
                self.lock.unlink()
            with open(self.lock, "x") as f:
                f.write(self.process)

    def begin(self, meta):
        """Open the log. A new run moves an earlier run's files aside, to old/1, old/2, ... A resumed run drops the rows
        after its checkpoint (`saved`), because it writes them again."""
        self.meta = meta
        if not self.main:
            return
        with self.writing(self.saved or 0):
            # left by a kill during a save
            files.delete_leftovers(self.folder, r"ckpt\.pt|meta\.json|log\.csv|tokenizer\.json")
            steps = (left for left in self.parts.glob("*") if left.name.isdecimal())
            delete(*(left for left in steps if not (left / ".metadata").exists()))
            if self.saved is None and last_checkpoint(self.folder):
                numbered = (self.folder / "old" / str(n) for n in itertools.count(1))
                old = next(path for path in numbered if not path.exists())
                old.mkdir(parents=True)
                # the checkpoint last: until then the run counts as not yet moved
                for path in (self.log_csv, self.folder / "tokenizer.json", self.meta_json, self.parts, self.checkpoint):
                    if path.exists():
                        os.replace(path, old / path.name)
                print(f"the earlier run in {self.folder} was moved to {old}")
            rows = [] if self.saved is None else self.rows_until(self.saved)
            with files.replacing(self.log_csv, "w") as f:
                csv.writer(f, lineterminator="\n").writerows([self.columns, *rows])
            files.write_json(self.meta_json, meta)

    def rows_until(self, step):
        """The log's rows up to a step, without a row that a kill cut short."""
        if not self.log_csv.exists():
            return []
        files.regular(self.log_csv)
        try:
            with open(self.log_csv, newline="") as f:
                rows = csv.reader(line for line in f if line.endswith("\n"))
                complete = (row for row in rows if len(row) == len(self.columns) and row[0].isdecimal())
                return [row for row in complete if int(row[0]) <= step]
        except (ValueError, csv.Error) as e:    # not even text, or without commas
            raise ValueError(f"{self.log_csv} is damaged ({e}): delete it, and a new one begins") from None

    def log(self, **row):
        """Append a row. Columns that are not given stay empty."""
        if self.main:
            cells = [row.get(name, "") for name in self.columns]
            cells = [f"{c:.9g}" if isinstance(c, float) else c for c in cells]          # read back bit for bit
            with self.writing(row["step"]), open(self.log_csv, "a", newline="") as f:
                csv.writer(f, lineterminator="\n").writerow(cells)

    def save(self, model, optimizer, scaler, step, in_parts=False):
        """Write a checkpoint, then meta.json. A kill between the two leaves an older meta.json, which does no harm.
        in_parts: every rank writes its parts of the tensors, so none needs memory for all of them."""
        path = self.parts / str(step) if in_parts else self.checkpoint
        if in_parts:
            with self.writing(step):
                save_parts(path, learned(model), model, optimizer, scaler, step)
        else:
            state = whole({"model": learned(model), "optimizer": optimizer.state_dict()}, keep=self.main)
            if self.main:
                with self.writing(step), files.replacing(path) as f:
                    torch.save(state | {"scaler": scaler.state_dict(), "step": step}, f)
        self.saved = step
        if self.main:
            with self.writing(step):            # a run has two checkpoints only until the newer one is complete
                delete(*{self.checkpoint, *self.parts.glob("*")} - {path} if in_parts else [self.parts])
        self.write_meta()

    def write_meta(self):
        if self.main:
            with self.writing(self.saved):
                files.write_json(self.meta_json, self.meta)

    @contextlib.contextmanager
    def writing(self, step):
        """A context that turns a full disk or a read-only folder into one sentence: what is safe, and what to do."""
        try:
            yield
        except (OSError, RuntimeError) as e:    # torch.save reports a full disk as either
            then = ("continue with --init_from=resume" if self.saved else
                    "start again, there or in another folder with --out_dir")
            raise OSError(f"could not write to {self.folder} at step {step} ({str(e).splitlines()[0]}): "
                          f"{self.last_good()}. Free some space there, then {then}") from None

    def last_good(self):
        return f"the checkpoint of step {self.saved} is still there" if self.saved else "no checkpoint was saved before"

    def diverged(self, what):
        """The error of a run whose loss or gradient is not finite. what: the finding and its step."""
        return ValueError(f"{what}; {self.last_good()}. Start again with a lower --learning_rate or more "
                          "--warmup_iters")


def delete(*paths):
    """Delete those of these files and folders that exist."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def frozen(model):
    """Names of the parameters that are not trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def learned(model):
    """The part of a model's state_dict() that its checkpoints contain. An adapter's base has the rest."""
    kept = frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in kept}


def made_by():
    """The entries of meta.json about the code that wrote it."""
    def git(*args):                             # None without a repository or without git
        with contextlib.suppress(OSError):
            found = subprocess.run(["git", "--no-optional-locks", "-C", str(ROOT), *args], capture_output=True,
                                   text=True)
            return found.stdout.strip() if found.returncode == 0 else None

    return {
        "git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}}


def process_of(script, *flags, env=None, **how):
    """Run a script of this repository to its end, by subprocess.run. If this process is killed, so is the script: see
    common/machine.py. env: added to its environment."""
    env = os.environ | (env or {}) | {"STARTED_BY": str(os.getpid())}
    return subprocess.run([sys.executable, ROOT / script, *flags], env=env, **how)


def output_of(script, *flags, **variables):
    """The output of a script of this repository, run in a separate process, so that runs cannot affect each other
    through memory. variables: added to its environment. Raises ValueError with its last line if it fails."""
    done = process_of(script, *flags, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{script} {' '.join(flags)} failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return done.stdout


def write_converted(folder, meta, weights, tokenizer):
    """Write public weights as a run before its first step. tokenizer: the content of its tokenizer.json, or None.

    meta.json marks a complete run: that of an earlier run is deleted first, and the new one is written last."""
    delete(folder / "meta.json", folder / "tokenizer.json")
    try:
        with files.replacing(folder / "ckpt.pt") as f:
            torch.save({"model": weights, "optimizer": {}, "scaler": {}, "step": 0}, f)
    except RuntimeError as e:                   # torch.save reports a full disk as this
        raise OSError(f"could not write to {folder} ({str(e).splitlines()[0]}): free some space there, or name "
                      "another folder with --out") from None
    if tokenizer:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(tokenizer)
    files.write_json(folder / "meta.json", meta | made_by() | {"losses": {}})


# ------------------------------------------------------------------------------------------------------------ reading


def read_run(out_dir):
    """(meta.json, path of the checkpoint) of a run, named by its folder or by its ckpt.pt."""
    out_dir = Path(out_dir)
    if out_dir.name == "ckpt.pt":
        out_dir = out_dir.parent
    if not (out_dir / "meta.json").exists():
        raise ValueError(f"no run in {out_dir} (no meta.json there): "
                         f"train one with python train.py --out_dir={out_dir}")
    meta = files.read_json(out_dir / "meta.json")
    # the entries that any command needs. Only an adapter has a base; `ends` and `separator` are ids of tokens
    usual = {"losses": {}, "base": {"path": "", "weights": ""}, "ends": [], "separator": 0}
    full = usual | meta if isinstance(meta, dict) else {}
    if not (files.has(full, knobs=dict, losses=dict, base=dict, ends=list, tokenizer=str | None)
            and files.has(full["knobs"], dataset=str) and files.has(full["base"], path=str, weights=str)
            and all(type(token) is int and 0 <= token < 1 << 32 for token in [*full["ends"], full["separator"]])):
        raise ValueError(f"{out_dir / 'meta.json'} was not written by train.py (it has no knobs, or others): restore "
                         "it, or train the run again")
    return meta, out_dir / "ckpt.pt"


RESUME = "--init_from=resume"


def run_with(folder, flags):
    """meta.json of the run in a folder if it was trained with these flags, perhaps resumed with them; or {}. A finished
    run has a report there."""
    meta = files.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    return meta if isinstance(meta, dict) and meta.get("flags") in (flags, [*flags, RESUME]) else {}


def flags_to_finish(folder, flags):
    """The flags of train.py that train this run, or that resume it if it was stopped after its first checkpoint."""
    meta = run_with(folder, flags)
    return [*flags, RESUME] if meta and "report" not in meta and last_checkpoint(folder) else flags


PARTS = "sharded_ckpt"                          # the folder of a run for checkpoints in parts, each named by its step


def last_checkpoint(folder):
    """The path of a run's last checkpoint: its ckpt.pt, or a folder sharded_ckpt/STEP. None before the first one."""
    whole = Path(folder) / "ckpt.pt"
    # torch writes .metadata last
    parts = (path.parent for path in (Path(folder) / PARTS).glob("*/.metadata") if path.parent.name.isdecimal())
    steps = {int(path.name): path for path in parts}
    if not steps:
        return whole if whole.exists() else None
    # a run has both if its parts were joined, or if it was killed before it deleted the older one
    newer = whole.exists() and read_checkpoint(whole, mmap=True)["step"] >= max(steps)
    return whole if newer else steps[max(steps)]


def how_to_join(parts):
    """The command that makes a run's ckpt.pt of a checkpoint in parts. Instruments read only a ckpt.pt."""
    return f"python common/shards.py {parts} {parts.parent.with_name('ckpt.pt')}"


def read_checkpoint(path, mmap=False):
    """The dict in a ckpt.pt: model, optimizer, step. mmap: tensors stay on the disk until they are copied, so memory
    holds a large model only once. Raises ValueError if the file is not a checkpoint of this project."""
    if not Path(path).exists():
        if parts := last_checkpoint(Path(path).parent):
            raise ValueError(f"{path} does not exist, because the run was trained with --sharded_ckpt=1: join its "
                             f"parts with {how_to_join(parts)}")
        raise ValueError(f"{path} does not exist: the run has saved no checkpoint yet")
    files.regular(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as e:                      # RuntimeError, UnpicklingError, EOFError, KeyError: it depends
        raise ValueError(f"{path} is not a readable checkpoint ({type(e).__name__}): it is damaged, or "
                         "train.py did not write it") from None
    full = {"scaler": {}} | checkpoint if isinstance(checkpoint, dict) else {}          # older runs have no scaler
    if not (files.has(full, model=dict, optimizer=dict, scaler=dict, step=int) and full["step"] >= 0
            and all(isinstance(number, int | float) for number in full["scaler"].values())
            and all(isinstance(name, str) and is_dense(value) for name, value in full["model"].items())):
        raise ValueError(f"{path} was not written by train.py: it lacks model, optimizer or step, or its model holds "
                         "something other than dense tensors of real numbers")
    return checkpoint


def read_weights(out_dir):
    """{name: tensor} of a run's whole model. Tensors stay on the disk until they are copied. An adapter is completed by
    its base, with LoRA's matrices merged into their weights."""
    meta, path = read_run(out_dir)
    return merged(on_base(read_checkpoint(path, mmap=True)["model"], meta, path), path)


def on_base(state, meta, path):
    """The weights in a run's checkpoint. An adapter's weights replace its base's, which may be an adapter's."""
    return read_weights(find_base(meta, path.parent)) | state if "base" in meta else state


def merged(state, path):
    """A model's weights with LoRA folded in: W + B A, in float32, replaces W, A and B. path: named in errors."""
    for name in [name for name in state if name.endswith(".lora_a")]:
        module = name.removesuffix(".lora_a")
        a, b, weight = (state.get(f"{module}.{part}") for part in ("lora_a", "lora_b", "weight"))
        if b is None or weight is None or not a.dim() == b.dim() == weight.dim() == 2 or (
                (*b.shape, *a.shape) != (len(weight), len(a), len(a), weight.shape[1])):
            raise ValueError(f"{path} does not fit its base: {module} has another shape there, or lacks a matrix")
        state = state | {f"{module}.weight": weight.float() + b.float() @ a.float()}
    return {name: value for name, value in state.items() if ".lora_" not in name}


def as_base(out_dir):
    """The entry "base" in meta.json of an adapter that is trained on this run."""
    return {"path": str(read_run(out_dir)[1].parent), "weights": fingerprint(out_dir)}


def fingerprint(out_dir):
    """One short hash of all weights in a run's checkpoint."""
    digest = hashlib.sha256()
    for name, value in sorted(read_checkpoint(read_run(out_dir)[1], mmap=True)["model"].items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy())        # its bytes
    return digest.hexdigest()[:16]


def find_base(meta, folder):
    """The folder of the run that an adapter was trained on: at its path in meta.json, or beside the adapter. Raises
    ValueError if it is missing or its weights have changed."""
    recorded = Path(meta["base"]["path"])
    places = [recorded, folder.resolve().parent / recorded.name]
    base = next((place for place in places if (place / "meta.json").exists()), None)
    if base is None:
        raise ValueError(f"{folder} is an adapter, trained on top of the run {recorded}, which is neither there nor in "
                         f"{places[1]}: restore that run, or call this from the folder where that path begins")
    if fingerprint(base) != meta["base"]["weights"]:
        raise ValueError(f"{folder} is an adapter for other weights than those in {base}, which have changed or are "
                         "another run's: restore the run that it was trained on, or train the adapter again")
    return base


def load_weights(model, state, path, new=(), copy=True):
    """Load a checkpoint's weights into a model: copies, or with copy=False the tensors themselves, in their precision.

    new: names of parameters that may be missing; they keep their initial values. The ValueError names the first tensor
    that does not fit, or the recipe if that is the reason."""
    expected = model.state_dict()
    loaded = model.without_unused_additions(state)
    state = {name: expected[name] for name in new if name not in loaded} | loaded
    for name in [*expected, *state]:
        if name not in expected or name not in state or expected[name].shape != state[name].shape:
            theirs, ours = (tuple(part[name].shape) if name in part else "nothing" for part in (state, expected))
            raise ValueError(f"{path} does not fit --attn={model.config.attn}: {name} is {theirs} in the checkpoint "
                             f"and {ours} in the model; use the run's own --attn and axes, or ones with the same "
                             "parameters, as elastic and softmax have, and diff and softmax do not")
    if copy:
        fill(expected, loaded)
    else:
        model.load_state_dict(state, assign=True)
    model.tie()


def what_is_new(new, path):
    """One line that names the parameters that a recipe adds to a run's weights: tau of 30 layers."""
    layers = Counter(re.sub(r"^transformer\.h\.\d+\.attn\.", "", name) for name in new)
    parts = [f"{name}{f' of {count} layers' if count > 1 else ''}" for name, count in layers.items()]
    return f"not in {path}, so at their initial values: {', '.join(parts)}"
