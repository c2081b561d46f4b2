"""A fuzzer: wrong inputs, made from a seed, each of which must work or end in one line.

    python tests/fuzz.py                        1000 inputs
    python tests/fuzz.py --count=60 --seed=2    others
    python tests/fuzz.py --only=123             input 123 alone, with what it prints

An input is a command line with wrong flags, or one that reads a damaged file: a checkpoint, JSON, tokens, safetensors,
GGUF. Bits are flipped, files are cut short, entries get other types, lengths become huge, files are another model's,
and pickles hold code. All inputs run in this process. A traceback, a hang, a file that is left half written, or code
that ran from a file is a finding. If the whole process crashes, its last line names the input.
"""
import argparse
import contextlib
import copy
import dataclasses
import faulthandler
import importlib.util
import io
import json
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from conftest import ROOT, TINY, WORDS, train_here, write_data
from test_refusals import MAKE, RUNS, call, header, names_in

import attention
import eval as eval_script
from common import files
from evals.instrument import Common, Overrides, Picture
from model import GPTConfig
from train import DryRun, Train
from training.presets import PRESETS

MARKER = "code_was_executed"                    # the folder that the code in pickles makes
SECONDS = 60                                    # an input that takes longer hangs
MEMORY = 6 << 30                                # bytes that this process may use, so that a huge size fails at once

# ----------------------------------------------------------------------------------------------- what can be damaged

PACKAGES = {"llama": "safetensors", "gpt2": "safetensors", "gguf": "gguf"}


class Places:
    """Folders to damage, made when they are first needed: runs, data sets, public weights."""

    def __init__(self, home):
        self.home, self.made = Path(home), {}

    def __call__(self, name):
        if name not in self.made:
            folder = self.made[name] = self.home / name
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                self.make(name, folder)
        return self.made[name]

    def make(self, name, folder):
        if name == "data":
            write_data(folder, WORDS[:4000], WORDS[4000:6000])
        elif name in ("run", "other"):
            self.train(folder, "--attn=elastic" if name == "run" else "--attn=diff2")
        elif name in MAKE:
            MAKE[name](folder, self)
        else:
            self.train(folder, *RUNS[name].split())

    def train(self, folder, *flags):
        train_here(f"--dataset={self('data')}", f"--out_dir={folder}", "--max_iters=2", *flags)


# --------------------------------------------------------------------------------------------------- values of flags

SMALL = ("0", "1", "2", "3", "4", "8", "-1", "-7", "0.5", "1.5", "1e-3")
HUGE = ("1000000000", "4294967296", "9223372036854775808", "1" + "0" * 30)
WORDY = ("", " ", "x", "none", "None", "nan", "inf", "-inf", "1e400", "true", "0x10", "1_0", "²", "٣", ",", "=", "a=b",
         "-", "%s", "{}", "[", "*", "1,2", "8,4,", "..", "/dev/null", "./data", "./run", "data/meta.json", "é\n",
         "\udcff", "a" * 300, "softmax,elastic", "3:4", "1/8", "linear:1e400")
# a large value of these is valid and only takes long
LONG = {"n_layer", "max_iters", "gradient_accumulation_steps", "eval_iters", "n_expert", "samples", "tokens", "repeats",
        "trials", "limit"}
# these compile, train other runs or make data sets
SLOW = {"compile", "shard", "dataset", "sweep", "out_dir", "run", "preset", "finetune"}


def random_value(rng, field):
    choices = field.metadata["choices"]
    pools = [SMALL, SMALL, WORDY] + ([] if field.name in LONG else [HUGE]) + ([tuple(choices)] if choices else [])
    if field.name == "attn":
        pools += [tuple(attention.ATTENTIONS)] * 3
    return str(rng.choice(rng.choice(pools)))


def random_flags(rng, groups, count):
    """Flags of these dataclasses with random values, some of which are valid."""
    fields = [field for group in groups for field in dataclasses.fields(group) if field.name not in SLOW]
    found = []
    for field in rng.choices(fields, k=count):
        name, value = field.name, random_value(rng, field)
        if rng.random() < 0.03:
            name = name[:-1]
        found += [f"--{name}", value] if rng.random() < 0.1 else [f"--{name}={value}"]
    return found


# ----------------------------------------------------------------------------------------------------------- damage

STRANGE = (None, "", "x", "é" * 9, -1, 0, 1, 3, 1 << 40, 10 ** 30, 1.5, 1e308, float("nan"), float("inf"), True, False,
           [], {}, [1], ["x"], {"a": 1}, [[1, 2]])


def damaged_bytes(rng, content):
    """Bits flipped, the end cut off, a part removed, repeated or overwritten, a length made huge."""
    content, at = bytearray(content), 0
    if not content:
        return b"x"
    for _ in range(rng.choice((1, 1, 2, 5))):
        # most formats have their structure at the beginning or, as zip, at the end
        at = int(rng.choice((rng.random() ** 4, rng.random(), 1 - rng.random() ** 4)) * (len(content) - 1))
        size = rng.choice((1, 2, 4, 8, 64))
        how = rng.randrange(6)
        if how <= 1:
            content[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            content[at:at + 8] = struct.pack("<q", rng.choice((-1, 0, 1 << 31, 1 << 40, (1 << 63) - 1)))[:size]
        elif how == 3:
            del content[at:at + size]
        elif how == 4:
            content[at:at] = content[at:at + size]
        else:
            content[at:at + size] = rng.randbytes(size)
    return bytes(content[:at] if rng.random() < 0.15 else content)


def damaged_value(rng, value, strange=STRANGE):
    """A copy of nested dicts and lists in which one entry is removed, gets another value, or is added."""
    value = copy.deepcopy(value)
    inside = value
    while isinstance(inside, dict | list) and inside:
        key = rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not (isinstance(inside[key], dict | list) and inside[key]) or rng.random() < 0.15:
            how = rng.randrange(8)
            if how == 0:
                del inside[key]
            elif how == 1 and isinstance(inside, dict):
                inside[rng.choice(("x", "extra", "../x", ""))] = copy.deepcopy(rng.choice(strange))
            else:
                inside[key] = copy.deepcopy(rng.choice(strange))
            return value
        inside = inside[key]
    return rng.choice(strange)


def damage_json(rng, path):
    """Damage a JSON file: its bytes, an entry, or all of it."""
    content, how = path.read_bytes(), rng.random()
    if how < 0.25:
        content = damaged_bytes(rng, content)
    elif how < 0.3:
        content = rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"null", b"\xff\xfe{}", b""))
    else:
        value = json.loads(content)
        for _ in range(rng.choice((1, 1, 1, 3))):
            value = damaged_value(rng, value)
        content = json.dumps(value).encode()
    path.write_bytes(content)


class Attack:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def attack(rng, path):
    """Replace a file by a pickle that holds code, in one of the forms that torch.load knows."""
    evil, how = Attack(os.path.abspath(MARKER)), rng.randrange(4)
    if how == 0 or path.suffix != ".pt":
        path.write_bytes(pickle.dumps({"model": evil, "optimizer": {}, "step": 1}, rng.randrange(6)))
    elif how == 1:
        torch.save({"model": {"x": evil}, "optimizer": {}, "step": 1}, path)
    elif how == 2:
        torch.save({"model": evil, "optimizer": {}, "step": 1}, path, _use_new_zipfile_serialization=False)
    else:                                       # a true checkpoint, in which only the pickle is another
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, content in parts.items():
                new.writestr(name, pickle.dumps(evil, 2) if name.endswith("data.pkl") else content)


TENSORS = (torch.ones(2), torch.zeros(0), torch.full((16, 16), torch.nan), torch.ones(3, 4, dtype=torch.int64),
           torch.ones(2, dtype=torch.complex64), torch.tensor(3.0))


def damage_checkpoint(rng, path):
    how = rng.random()
    if how < 0.4:
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
    elif how < 0.55:
        attack(rng, path)
    else:
        found = torch.load(path, weights_only=True)
        torch.save(damaged_value(rng, found, STRANGE + TENSORS), path)


def damage_tokens(rng, folder):
    """Damage a shard. In half of the cases its hash in meta.json fits."""
    path = folder / rng.choice(("train.bin", "val.bin"))
    content, how = path.read_bytes(), rng.random()
    if how < 0.5:
        content = damaged_bytes(rng, content)
    elif how < 0.8:
        numbers = [rng.choice((20240520, 20240801, 0, -1)), rng.choice((1, 7, 2)), rng.choice((0, 1, 9, -5, 2**31 - 1))]
        content = header(*numbers, length=rng.choice((3, 255, 256))) + rng.randbytes(rng.choice((0, 1, 2, 3, 4, 18)))
    else:
        attack(rng, path)
        content = path.read_bytes()
    path.write_bytes(content)
    if rng.random() < 0.5:
        meta = files.read_json(folder / "meta.json")
        meta["shards"][path.name]["sha256"] = files.sha256(path)
        files.write_json(folder / "meta.json", meta)


def damage_safetensors(rng, path):
    """Damage the bytes, or an entry of the header: 8 bytes with its length, then JSON, then the tensors."""
    content = path.read_bytes()
    if rng.random() < 0.4:
        path.write_bytes(damaged_bytes(rng, content))
        return
    size = struct.unpack("<Q", content[:8])[0]
    head = json.dumps(damaged_value(rng, json.loads(content[8:8 + size]))).encode()
    stated = len(head) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 32, (1 << 64) - 1))
    path.write_bytes(struct.pack("<Q", stated) + head + content[8 + size:])


def damage_gguf(rng, path):
    """Damage mostly the header: 24 bytes with counts, then keys and values, whose strings and lists state a length."""
    content = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        path.write_bytes(damaged_bytes(rng, content))
        return
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice((8, 16, 24 + int(rng.random() ** 2 * 6000)))
        size = rng.choice((1, 4, 8))
        content[at:at + size] = struct.pack("<Q", rng.choice((0, 1, 3, 9, 255, 1 << 31, 1 << 40, (1 << 64) - 1)))[:size]
    path.write_bytes(content)


# --------------------------------------------------------------------------------------------------- kinds of inputs

LOOKS = ("loss --windows=2", "probe --windows=2", "heads --windows=2", "params", "sample --tokens=3",
         "lengths --lengths=8", "maps --text='the quick'", "compare --windows=2", "passkey --lengths=90 --trials=2",
         "loss --attn=softmax1")
USES = [f"eval.py {look} --device=cpu --out_dir={{run}}" for look in LOOKS] + [
    "train.py --init_from=resume --out_dir={run} --max_iters=3", "train.py --init_from=resume --out_dir={run}",
    "train.py --init_from={run} --out_dir=out --max_iters=1 --dataset={data} --device=cpu",
    "train.py --init_from={run} --out_dir=out --max_iters=1 --dataset={data} --device=cpu --train_only=lora",
    "data/text.py --source=data/val.bin --out_dir=out --tokenizer={run}", "data/weights.py export {run} out"]


class Input(NamedTuple):
    """A command line in the current folder. {name} stands for a folder of Places, of which there is a copy."""
    line: list                                  # script and flags
    damage: object = None                       # damage(): changes files before the command
    also: tuple = ()                            # further folders that it needs


def flags_of_training(rng):
    new = [*TINY, "--max_iters=1", "--dataset=./{data}", "--out_dir=out", f"--preset={rng.choice(list(PRESETS))}"]
    of_a_run = ["--init_from={run}", "--out_dir=out", "--max_iters=1"], ["--init_from=resume", "--out_dir={run}"]
    base = rng.choice((*of_a_run, new, new, new))
    wrong = random_flags(rng, (Train, DryRun, GPTConfig, GPTConfig), rng.randint(1, 4))
    return Input(["train.py", *base, *wrong])


def flags_of_instruments(rng):
    name = rng.choice([name for name in eval_script.COMMANDS if name not in ("compile", "speed", "lab")])
    command = eval_script.COMMANDS[name]
    of_a_run = name in eval_script.OF_A_RUN
    groups = [command.flags] * 3 + ([Picture] if command.draw else []) + ([Common, Overrides] if of_a_run else [])
    run = rng.choice(("{run}", "{run}", "{softmax}", "{focus}", "{learned}", "{run},{softmax}"))
    base = [f"--out_dir={run}", "--device=cpu"] if of_a_run else []
    return Input(["eval.py", name, *base, *random_flags(rng, groups, rng.randint(1, 3))])


SCRIPTS = {
    "data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out": (
        "source", "tokenizer", "tokenizer_files", "name", "val", "val_share", "fixed_at", "length"),
    "data/fineweb_edu.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out --shard_tokens=9000": (
        "source", "tokenizer", "train_shards"),
    "data/backcopy.py --out_dir=out --sequences=9 --val_sequences=3": ("seed", "length", "sequences", "val_sequences",
                                                                        "fixed_at", "no_bos"),
    "data/benchmarks.py --source={questions} --out_dir=out": ("tasks", "source"),
    "data/weights.py {llama} --out=out": ("source", "out"),
    "data/shakespeare.py --out_dir=out --source={pages}": ("source", "tokenizer"),
    "data/stdlib.py --out_dir=out --source={pages}": ("source", "tokenizer"),
}


def flags_of_scripts(rng):
    line, names = rng.choice(list(SCRIPTS.items()))
    wrong = [f"--{rng.choice(names)}={rng.choice(rng.choice((SMALL, WORDY, WORDY)))}" for _ in range(rng.randint(1, 2))]
    return Input([*line.split(), *wrong])


def a_use(rng, uses=USES):
    """One of these commands, which read {run}, for one of several runs."""
    run = rng.choice(("{run}", "{run}", "{softmax}", "{focus}", "{pair}/base", "{pair}/lora"))
    line = rng.choice(uses).replace("{run}", run)
    return shlex.split(line), Path(run.format(run="run", softmax="softmax", focus="focus", pair="pair"))


def checkpoints(rng):
    line, run = a_use(rng)
    return Input(line, lambda: damage_checkpoint(rng, run / "ckpt.pt"))


def anothers(rng):
    """A file of another run in place of the run's own."""
    line, run = a_use(rng)
    other = rng.choice([name for name in ("run", "softmax", "focus", "learned", "other") if name != str(run)])
    name = rng.choice(("ckpt.pt", "ckpt.pt", "meta.json", "log.csv"))
    return Input(line, lambda: shutil.copy(Path(other) / name, run / name), (other,))


def settings(rng):
    line, run = a_use(rng)
    return Input(line, lambda: damage_json(rng, run / "meta.json"))


def logs(rng):
    line, run = a_use(rng, ["train.py --init_from=resume --out_dir={run} --max_iters=3",
                            "eval.py compare --out_dir={run}"])
    return Input(line, lambda: (run / "log.csv").write_bytes(damaged_bytes(rng, (run / "log.csv").read_bytes())))


NEW = " ".join(["train.py", *TINY, "--max_iters=1 --dataset=./{data} --out_dir=out"])
DATA_USES = [NEW, NEW, "eval.py loss --out_dir={run} --dataset=./{data} --windows=2",
             "eval.py sample --out_dir={run} --dataset=./{data} --tokens=3"]


def token_files(rng):
    return Input(rng.choice(DATA_USES).split(), lambda: damage_tokens(rng, Path("data")))


def data_settings(rng):
    return Input(rng.choice(DATA_USES).split(), lambda: damage_json(rng, Path("data/meta.json")))


def public_settings(rng):
    folder = Path(rng.choice(("llama", "gpt2")))
    name = rng.choice(("config.json", "config.json", "tokenizer.json", "tokenizer_config.json"))
    return Input(f"data/weights.py {{{folder}}} --out=out".split(), lambda: damage_json(rng, folder / name))


def safetensors(rng):
    folder = Path(rng.choice(("llama", "gpt2")))
    return Input(f"data/weights.py {{{folder}}} --out=out".split(),
                 lambda: damage_safetensors(rng, folder / "model.safetensors"))


def ggufs(rng):
    path = Path("gguf/small.gguf")
    return Input(f"data/weights.py {{gguf}}/{path.name} --out=out".split(), lambda: damage_gguf(rng, path))


def results(rng):
    """Files that instruments wrote, and that others read."""
    if rng.random() < 0.5:
        def damage():
            shutil.copy(ROOT / "results/claims.json", "claims.json")
            damage_json(rng, Path("claims.json"))
        more = rng.choice((["--show=lazy-sink-gone"], ["--json"], []))
        return Input(["eval.py", "claims", "--results=claims.json", *more], damage)
    return Input("data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made "
                 "--shard_tokens=4000 --train_shards=3".split(), lambda: damage_json(rng, progress_or_meta(rng)))


def progress_or_meta(rng):
    made = Path("pages/made")
    if rng.random() < 0.5:
        os.replace(made / "meta.json", made / "progress.json")
        return made / "progress.json"
    return made / "meta.json"


TEXTS = {"questions": "eval.py bench --source={questions} --out_dir={run} --device=cpu --limit=2",
         "scrolls": "eval.py scrolls --source={scrolls} --out_dir={run} --device=cpu --limit=1 --tokens=4",
         "pages": "data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out"}


def texts(rng):
    name = rng.choice(list(TEXTS))

    def damage():
        path = rng.choice(sorted(path for path in Path(name).rglob("*") if path.suffix in (".jsonl", ".raw")))
        if rng.random() < 0.4 or path.suffix == ".raw":
            path.write_bytes(damaged_bytes(rng, path.read_bytes()))
            return
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [damaged_value(rng, row) if rng.random() < 0.5 else row for row in rows]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Input(TEXTS[name].split(), damage)


KINDS = (flags_of_training, checkpoints, flags_of_instruments, settings, token_files, flags_of_scripts, safetensors,
         data_settings, ggufs, anothers, public_settings, results, texts, logs)


# ------------------------------------------------------------------------------------------------------- one input


class Hang(BaseException):
    """An input took longer than SECONDS."""


class Outcome(NamedTuple):
    finding: str | None                         # what is wrong; None: nothing
    code: int                                   # exit code, 0: it worked
    said: str                                   # on stderr


def make_input(number, seed):
    """(kind, Input) of a number: always the same ones."""
    rng = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    return kind, kind(rng)


@contextlib.contextmanager
def limited():
    """Inside this context, an allocation beyond MEMORY fails, and more than SECONDS raise Hang."""
    def stop(*_):
        raise Hang
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(SECONDS + 30, exit=True, file=sys.__stderr__)     # a hang outside of Python
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def as_a_process(argv):
    """Inside this context sys.argv, sys.path, the streams and the environment are those of a script. Yields stderr."""
    kept, environment = (sys.argv, sys.path, sys.stdout, sys.stderr), dict(os.environ)
    sys.argv, sys.path = list(argv), list(sys.path)
    sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    try:
        yield sys.stderr
    finally:
        sys.argv, sys.path, sys.stdout, sys.stderr = kept
        os.environ.clear()
        os.environ.update(environment)


def called(argv):
    """Run a command line in this process. Returns its Outcome."""
    error = None
    with as_a_process(argv) as stderr, limited():
        try:
            call(argv[0], argv[1:])
            code = 0
        except SystemExit as e:
            code = e.code or 0
        except (Exception, Hang) as e:
            code, error = 1, e
    stderr.flush()
    said = stderr.buffer.getvalue().decode()
    if isinstance(error, Hang):
        return Outcome("hangs in " + "".join(traceback.format_tb(error.__traceback__)[-3:]), code, said)
    if error:
        return Outcome("".join(traceback.format_exception(error)), code, said)
    return Outcome(wrong_in(argv, code, said), code, said)


def wrong_in(argv, code, said):
    """What is wrong with the end of a command, or None. If it failed, its last line must be its only error."""
    if os.path.exists(MARKER):
        return "code was executed"
    if left := [str(path) for path in Path().rglob(".*.tmp")]:
        return f"half-written files are left: {left}"
    lines = said.splitlines()
    errors = [line for line in lines if re.match(rf"{os.path.basename(argv[0])}( \w+)?: error: .", line)]
    if code and (len(errors) != 1 or lines[-1] != errors[0] or "Traceback" in said):
        return f"exit code {code}, but not one line: {said!r}"
    return None


def attempt(number, seed, places):
    """Make an input and run it in a new folder. Returns (kind, command line, Outcome)."""
    kind, found = make_input(number, seed)
    line, here = " ".join(found.line), os.getcwd()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "here")             # so that ".." is a small folder
        folder.mkdir()
        for name in {*names_in(line), *found.also}:
            shutil.copytree(places(name), folder / name)
        os.chdir(folder)
        try:
            if found.damage:
                found.damage()
            argv = [word.format_map({name: name for name in names_in(word)}) if names_in(word) else word
                    for word in found.line]
            return kind.__name__, shlex.join(argv), called(argv)
        finally:
            os.chdir(here)


def missing(number, seed):
    """The package that an input needs and that is not installed, or None."""
    found = make_input(number, seed)[1]
    needed = (PACKAGES.get(name) for name in names_in(" ".join(found.line)))
    return next((package for package in needed if package and not importlib.util.find_spec(package)), None)


# ---------------------------------------------------------------------------------------------------------- all of them


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="number of inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this one alone, and print what it says")
    args = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    numbers = range(args.first, args.first + args.count) if args.only is None else [args.only]
    outcomes, findings, began = Counter(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        places = Places(home)
        for number in numbers:
            if missing(number, args.seed):
                outcomes["not installed"] += 1
                continue
            print(f"input {number}", end="\r", file=sys.stderr, flush=True)
            started = time.monotonic()
            kind, line, outcome = attempt(number, args.seed, places)
            slow = time.monotonic() - started
            if outcome.finding or args.only is not None or slow > 10:
                print(f"\ninput {number} ({kind}, {slow:.1f} s): {line}\n{outcome.finding or outcome.said}", flush=True)
            findings += outcome.finding is not None
            outcomes["findings" if outcome.finding else "refused" if outcome.code else "worked"] += 1
    print(f"{dict(outcomes)} in {time.monotonic() - began:.0f} s")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
