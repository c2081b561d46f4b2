"""A run on disk. Its folder holds these files, and only this module writes the first three:

    ckpt.pt     model, optimizer, scaler and step, always whole; loads with weights_only=True; names
                of the uncompiled module. An adapter (--train_only) stores only the parameters that
                it trained; its base has the others
    meta.json   every knob, versions, losses: enough to build the model again. For an adapter also
                its base, the run that it was trained on: {path, weights: their fingerprint}
    log.csv     step, train_loss, val_loss, lr, grad_norm, ms, tokens_per_s, on a GPU also mfu.
                "balance" is the sum of the losses that balance and of a layer's own penalty, if
                there are any. Public weights have no log
    tokenizer.json  the tokenizer of a public model, in Hugging Face's format
    lock        only while a process trains in the folder: its id and its host

log.csv grows by a row at a time. The others are written under a temporary name and renamed when
complete, so a run killed at any moment resumes from its last checkpoint. Only rank 0 writes.
"""

import contextlib
import csv
import hashlib
import itertools
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from common import files

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------------------------ writing


class Run:
    """The folder that a training run writes."""

    COLUMNS = ("step", "train_loss", "val_loss", "lr", "grad_norm", "ms", "tokens_per_s")

    def __init__(self, folder, machine):
        self.folder, self.main = Path(folder), machine.main
        self.checkpoint = self.folder / "ckpt.pt"
        self.meta_json, self.log_csv = self.folder / "meta.json", self.folder / "log.csv"
        self.lock = self.folder / "lock"
        self.process = f"process {os.getpid()} on {socket.gethostname()}"  # the content of its lock
        self.saved = None  # the step of the last checkpoint, None before the first
        self.meta = {}  # the content of meta.json
        self.columns = self.COLUMNS + (("mfu",) if machine.peak_flops() else ())

    @contextlib.contextmanager
    def locked(self, machine):
        """A context in which no other process trains in this folder. If one does, every rank raises
        ValueError."""
        error, is_new = None, not self.folder.exists()
        if self.main:
            try:
                self.take_lock()
            except ValueError as e:
                error = str(e)
            except OSError as e:
                error = (
                    f"could not write to {self.folder} ({e}): name another folder with "
                    "--out_dir, or free some space there"
                )
        if error := machine.share(error):  # the other ranks would wait for the main one
            raise ValueError(error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # somebody has deleted it
                if self.main and self.lock.read_text() == self.process:
                    self.lock.unlink()
                    if is_new:  # only a folder without files can be removed so
                        self.folder.rmdir()

    def take_lock(self):
        """Write the lock. That of a process of this host that has ended is taken over. Raises
        ValueError if the lock is another process's, or if a symbolic link would lead out of the
        folder."""
        for path in (self.lock, self.folder / "old"):
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a symbolic link, which no run follows: remove the "
                    "link, or name another folder with --out_dir"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as alone:
            # where this fails, only taking over can race
            with contextlib.suppress(ImportError, OSError):
                import fcntl  # not on Windows

                folder = os.open(self.folder, os.O_RDONLY)
                alone.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
            if self.lock.exists():
                holder = self.lock.read_text(errors="replace") if self.lock.is_file() else "?"
                found = re.fullmatch(r"process (\d+) on (.+)", holder)
                if holder and not found:  # a full disk leaves an empty lock
                    raise ValueError(
                        f"{self.lock} is not a run's lock: remove it, or name another "
                        "folder with --out_dir"
                    )
                here = found and found[2] == socket.gethostname()
                process = int(found[1]) if here else None
                ended = here and (process == os.getpid() or not files.is_running(process))
                if holder and not ended:
                    raise ValueError(
                        f"{holder} trains in {self.folder}: name another folder with "
                        "--out_dir; if that process has ended, delete "
                        f"{self.lock}"
                    )
                self.lock.unlink()
            with open(self.lock, "x") as f:
                f.write(self.process)

    def begin(self, meta):
        """Open the log. A new run moves an earlier run's files aside, to old/1, old/2, ... A
        resumed run drops the rows after its checkpoint (`saved`), because it writes them again."""
        self.meta = meta
        if not self.main:
            return
        with self.writing(self.saved or 0):
            if self.saved is None and self.checkpoint.exists():
                numbered = (self.folder / "old" / str(n) for n in itertools.count(1))
                old = next(path for path in numbered if not path.exists())
                old.mkdir(parents=True)
                # the checkpoint last: until then the run counts as not yet moved
                tokenizer = self.folder / "tokenizer.json"
                for path in (self.log_csv, tokenizer, self.meta_json, self.checkpoint):
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
                rows = list(csv.DictReader(line for line in f if line.endswith("\n")))
        except (ValueError, csv.Error) as e:  # not even text, or without commas
            raise ValueError(
                f"{self.log_csv} is damaged ({e}): delete it, and a new one begins"
            ) from None
        # None is the name of cells without a column, and the value of columns without a cell
        rows = [row for row in rows if None not in row and None not in row.values()]
        rows = [row for row in rows if row.get("step", "").isdecimal() and int(row["step"]) <= step]
        # another device may have other columns; those of the earlier one stay
        self.columns += ("mfu",) if rows and "mfu" in {*rows[0]} - {*self.columns} else ()
        return [[row.get(name, "") for name in self.columns] for row in rows]

    def log(self, **row):
        """Append a row. Columns that are not given stay empty."""
        if self.main:
            cells = [row.get(name, "") for name in self.columns]
            # read back bit for bit
            cells = [f"{c:.9g}" if isinstance(c, float) else c for c in cells]
            with self.writing(row["step"]), open(self.log_csv, "a", newline="") as f:
                csv.writer(f, lineterminator="\n").writerow(cells)

    def save(self, model, optimizer, scaler, step):
        """Write a checkpoint, then meta.json. A kill between the two leaves an older meta.json,
        which does no harm. Every rank must call it: with --shard each holds a part of a tensor."""

        def whole(x):
            if not hasattr(x, "full_tensor"):
                return x
            x = x.full_tensor()  # gathered from all ranks, one tensor at a time
            return x.cpu() if self.main else None

        state = tree_map(whole, {"model": learned(model), "optimizer": optimizer.state_dict()})
        if self.main:
            with self.writing(step), files.replacing(self.checkpoint) as f:
                torch.save(state | {"scaler": scaler.state_dict(), "step": step}, f)
        self.saved = step
        self.write_meta()

    def write_meta(self):
        if self.main:
            with self.writing(self.saved):
                files.write_json(self.meta_json, self.meta)

    @contextlib.contextmanager
    def writing(self, step):
        """A context that turns a full disk or a read-only folder into one sentence: what is safe,
        and what to do."""
        try:
            yield
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk as either
            then = (
                "continue with --init_from=resume"
                if self.saved
                else "start again, there or in another folder with --out_dir"
            )
            raise OSError(
                f"could not write to {self.folder} at step {step} "
                f"({str(e).splitlines()[0]}): {self.last_good()}. Free some space there, "
                f"then {then}"
            ) from None

    def last_good(self):
        if not self.saved:
            return "no checkpoint was saved before"
        return f"the checkpoint of step {self.saved} is still there"

    def diverged(self, what):
        """The error of a run whose loss or gradient is not finite. what: the finding and its
        step."""
        return ValueError(
            f"{what}; {self.last_good()}. Start again with a lower --learning_rate "
            "or more --warmup_iters"
        )


def frozen(model):
    """Names of the parameters that are not trained."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, p in parameters if not p.requires_grad}


def learned(model):
    """The part of a model's state_dict() that its checkpoints contain. An adapter's base has the
    rest."""
    kept = frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in kept}


def made_by():
    """The entries of meta.json about the code that wrote it."""

    def git(*args):  # None without a repository or without git
        with contextlib.suppress(OSError):
            found = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(ROOT), *args],
                capture_output=True,
                text=True,
            )
            return found.stdout.strip() if found.returncode == 0 else None

    return {
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def process_of(script, *flags, env=None, **how):
    """Run a script of this repository to its end, by subprocess.run. If this process is killed, so
    is the script: see common/machine.py. env: added to its environment."""
    env = os.environ | (env or {}) | {"STARTED_BY": str(os.getpid())}
    return subprocess.run([sys.executable, ROOT / script, *flags], env=env, **how)


def output_of(script, *flags, **variables):
    """The output of a script of this repository, run in a separate process, so that runs cannot
    affect each other through memory. variables: added to its environment. Raises ValueError with
    its last line if it fails."""
    done = process_of(script, *flags, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"{script} {' '.join(flags)} failed: {(done.stderr.strip() or '?').splitlines()[-1]}"
        )
    return done.stdout


def write_converted(folder, meta, weights, tokenizer):
    """Write public weights as a run before its first step. tokenizer: the content of its
    tokenizer.json, or None.

    meta.json marks a complete run: that of an earlier run is deleted first, and the new one is
    written last."""
    for name in ("meta.json", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
    try:
        with files.replacing(folder / "ckpt.pt") as f:
            torch.save({"model": weights, "optimizer": {}, "scaler": {}, "step": 0}, f)
    except RuntimeError as e:  # torch.save reports a full disk as this
        raise OSError(
            f"could not write to {folder} ({str(e).splitlines()[0]}): free some space "
            "there, or name another folder with --out"
        ) from None
    if tokenizer:
        with files.replacing(folder / "tokenizer.json") as f:
            f.write(tokenizer)
    files.write_json(folder / "meta.json", meta | made_by() | {"losses": {}})


# ------------------------------------------------------------------------------------------ reading


# {knob: a pattern of its values that only earlier versions know}
GONE = {
    "attn": "fox",
    "layers": r".*(\bfox\b|forget=sigmoid).*",
    "forget": "sigmoid",
    "mlp": "moe",
    "norm_place": "parallel",
    "rope_share": r"(?!1(\.0)?$).*",
    "rope_scaling": "yarn:.*",
    "optimizer": "muon",
    "sharded_ckpt": "True",
}


def read_run(out_dir):
    """(meta.json, path of the checkpoint) of a run, named by its folder or by its ckpt.pt."""
    out_dir = Path(out_dir)
    if out_dir.name == "ckpt.pt":
        out_dir = out_dir.parent
    if not (out_dir / "meta.json").exists():
        raise ValueError(
            f"no run in {out_dir} (no meta.json there): "
            f"train one with python train.py --out_dir={out_dir}"
        )
    meta = files.read_json(out_dir / "meta.json")
    # the entries that any command needs. Only an adapter has a base; `ends` and `separator` are ids
    # of tokens
    base = {"path": "", "weights": ""}
    usual = {"losses": {}, "base": base, "ends": [], "separator": 0, "seconds": 0}
    full = usual | meta if isinstance(meta, dict) else {}
    if not (
        files.has(full, knobs=dict, losses=dict, base=dict, ends=list, tokenizer=str | None)
        and files.has(full, seconds=int | float)
        and files.has(full["knobs"], dataset=str)
        and files.has(full["base"], path=str, weights=str)
        and all(
            type(token) is int and 0 <= token < 1 << 32
            for token in [*full["ends"], full["separator"]]
        )
    ):
        raise ValueError(
            f"{out_dir / 'meta.json'} was not written by train.py (it has no knobs, "
            "or others): restore it, or train the run again"
        )
    for name, values in GONE.items():  # a run of this version lacks some of these knobs
        value = meta["knobs"].get(name)
        if value is not None and re.fullmatch(values, str(value)):
            raise ValueError(
                f"{out_dir} was trained with {name}={value}, which this version does "
                "not have: git checkout 55b941e, the last commit that reads this run"
            )
    return meta, out_dir / "ckpt.pt"


RESUME = "--init_from=resume"


def run_with(folder, flags):
    """meta.json of the run in a folder if it was trained with these flags, perhaps resumed with
    them; or {}. A finished run has a report there."""
    meta = files.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    return meta if isinstance(meta, dict) and meta.get("flags") in (flags, [*flags, RESUME]) else {}


def flags_to_finish(folder, flags):
    """The flags of train.py that train this run, or that resume it if it was stopped after its
    first checkpoint."""
    meta = run_with(folder, flags)
    stopped = meta and "report" not in meta and (folder / "ckpt.pt").exists()
    return [*flags, RESUME] if stopped else flags


def read_checkpoint(path):
    """The dict in a ckpt.pt: model, optimizer, scaler, step. Its tensors stay on the disk until
    they are copied, so memory holds a large model only once. Raises ValueError if the file is not a
    checkpoint of this project."""
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist: the run has saved no checkpoint yet")
    files.regular(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # RuntimeError, UnpicklingError, EOFError, KeyError: it depends
        raise ValueError(
            f"{path} is not a readable checkpoint ({type(e).__name__}): it is "
            "damaged, or train.py did not write it"
        ) from None
    # older runs have no scaler
    full = {"scaler": {}} | checkpoint if isinstance(checkpoint, dict) else {}
    if not (
        files.has(full, model=dict, optimizer=dict, scaler=dict, step=int)
        and full["step"] >= 0
        and all(isinstance(number, int | float) for number in full["scaler"].values())
        and all(isinstance(name, str) and is_plain(value) for name, value in full["model"].items())
    ):
        raise ValueError(
            f"{path} was not written by train.py: it lacks model, optimizer or step, "
            "or its model holds something other than dense tensors of real numbers"
        )
    return full


def is_plain(x):
    """Is this a dense tensor of real numbers? Files can also hold sparse and nested ones."""
    return (
        isinstance(x, torch.Tensor)
        and x.layout == torch.strided
        and not x.is_nested
        and x.device.type == "cpu"
        and x.is_floating_point()
    )


def read_weights(out_dir):
    """{name: tensor} of a run's whole model. Tensors stay on the disk until they are copied. An
    adapter is completed by its base, with LoRA's matrices merged into their weights."""
    meta, path = read_run(out_dir)
    return merged(on_base(read_checkpoint(path)["model"], meta, path), path)


def on_base(state, meta, path):
    """The weights in a run's checkpoint. An adapter's weights replace its base's, which may be an
    adapter's."""
    return read_weights(find_base(meta, path.parent)) | state if "base" in meta else state


def merged(state, path):
    """A model's weights with LoRA folded in: W + B A, in float32, replaces W, A and B. The number
    at the end of a name is the first row of W that B A is added to. path: named in errors."""
    for found in [found for name in state if (found := re.fullmatch(r"(.+)\.lora_a(\d*)", name))]:
        module, first = found[1], int(found[2] or 0)
        a, b = state[found[0]], state.get(f"{module}.lora_b{found[2]}")
        weight = state.get(f"{module}.weight")
        if (
            b is None
            or weight is None
            or not a.dim() == b.dim() == weight.dim() == 2
            or (b.shape[1], *a.shape) != (len(a), len(a), weight.shape[1])
            or first + len(b) > len(weight)
        ):
            raise ValueError(
                f"{path} does not fit its base: {module} has another shape there, or lacks a matrix"
            )
        change = F.pad(b.float() @ a.float(), (0, 0, first, len(weight) - first - len(b)))
        state = state | {f"{module}.weight": weight.float() + change}
    return {name: value for name, value in state.items() if ".lora_" not in name}


def as_base(out_dir):
    """The entry "base" in meta.json of an adapter that is trained on this run."""
    return {"path": str(read_run(out_dir)[1].parent), "weights": fingerprint(out_dir)}


def fingerprint(out_dir):
    """One short hash of all weights in a run's checkpoint."""
    digest = hashlib.sha256()
    for name, value in sorted(read_checkpoint(read_run(out_dir)[1])["model"].items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy())  # its bytes
    return digest.hexdigest()[:16]


def find_base(meta, folder):
    """The folder of the run that an adapter was trained on: at its path in meta.json, or beside the
    adapter. Raises ValueError if it is missing or its weights have changed."""
    recorded = Path(meta["base"]["path"])
    places = [recorded, folder.resolve().parent / recorded.name]
    base = next((place for place in places if (place / "meta.json").exists()), None)
    if base is None:
        raise ValueError(
            f"{folder} is an adapter, trained on top of the run {recorded}, which is "
            f"neither there nor in {places[1]}: restore that run, or call this from "
            "the folder where that path begins"
        )
    if fingerprint(base) != meta["base"]["weights"]:
        raise ValueError(
            f"{folder} is an adapter for other weights than those in {base}, which "
            "have changed or are another run's: restore the run that it was trained "
            "on, or train the adapter again"
        )
    return base


def load_weights(model, state, path, new=(), copy=True):
    """Load a checkpoint's weights into a model: copies, or with copy=False the tensors themselves,
    in their precision.

    new: names of parameters that may be missing; they keep their initial values. The ValueError
    names the first tensor that does not fit, or the recipe if that is the reason."""
    expected = model.state_dict()
    loaded = model.without_unused_additions(state)
    state = {name: expected[name] for name in new if name not in loaded} | loaded
    for name in [*expected, *state]:
        if name not in expected or name not in state or expected[name].shape != state[name].shape:
            theirs, ours = (
                tuple(part[name].shape) if name in part else "nothing" for part in (state, expected)
            )
            raise ValueError(
                f"{path} does not fit --attn={model.config.attn}: {name} is {theirs} "
                f"in the checkpoint and {ours} in the model; use the run's own --attn "
                "and axes, or ones with the same parameters, as elastic and softmax "
                "have, and diff and softmax do not"
            )
    model.load_state_dict(state, assign=not copy)
    model.tie()


def what_is_new(new, path):
    """One line that names the parameters that a recipe adds to a run's weights: tau of 30
    layers."""
    layers = Counter(re.sub(r"^transformer\.h\.\d+\.(attn\.)?", "", name) for name in new)
    parts = [f"{name} of {count} layers" if count > 1 else name for name, count in layers.items()]
    return f"not in {path}, so at their initial values: {', '.join(parts)}"
