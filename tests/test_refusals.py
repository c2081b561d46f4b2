"""Refusals: what cannot work ends with one line that says what was given, what is allowed, and what to type.

Three properties are tested on drawn cases: of all models that flags describe, of all flags, and of damaged files. The
table REFUSALS has one case for each mechanism. `--all` draws 20 times as many cases.
"""
import contextlib
import copy
import dataclasses
import faulthandler
import gzip
import io
import json
import os
import pickle
import re
import resource
import runpy
import shlex
import shutil
import signal
import struct
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, WORDS, examples, run, tiny_config, train_here, write_data, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import eval as eval_script
import kernels
import mixers
import train as train_script
from attention import ATTENTIONS
from common import files
from data import benchmarks, tokens
from data import weights as weights_script
from evals import claims
from evals.instrument import Common, Overrides, Picture
from evals.ledger import experiments
from model import GPT, GPTConfig
from pretrained import convert
from train import DryRun, Train

# one worker makes all runs and data sets
pytestmark = pytest.mark.xdist_group("refusals")

# -------------------------------------------------------------------------------- models: they work, or a line says why

FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}
NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 24, -1, 1 << 31, 10 ** 30, 0.5, 1.5, 1e-9, 1e30, float("nan"), float("inf"), None, "x")
SCALINGS = [f"{kind}:{numbers}" for kind in ("linear", "ntk", "llama3", "yarn", "x")
            for numbers in ("", "2", "0", "nan", "8,1,4,16", "8,32,1,16", "8,4,4,9", "inf,1,4,9", "1e400,1,1")]
BACKENDS = ("auto", "torch", "sdpa")            # Triton's interpreter would take minutes


def arguments_of(mixer):
    """The names of the constants that --attn_args may set with any choice of a mixer."""
    return sorted({name for values in mixer.axes.values() for choice in values.values() for name in choice.args})


@st.composite
def drawn_choices(draw):
    """A recipe and up to four other fields of GPTConfig. In half of the cases its mixer accepts each single value."""
    attn = draw(st.sampled_from(list(ATTENTIONS)))
    mixer, any_value = mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")], draw(st.booleans())
    axes = mixers.AXES if any_value else mixer.axes
    known = {name: st.sampled_from(list(field.metadata["choices"] or (True, False)))
             for name, field in FIELDS.items() if field.metadata["choices"] or field.type is bool}
    known |= {name: st.sampled_from(NUMBERS) for name, field in FIELDS.items() if field.type in (int, float, int | None)}
    known |= {name: st.sampled_from(list(values)) for name, values in axes.items()}
    known |= {"rope_scaling": st.sampled_from(SCALINGS), "kernel": st.sampled_from(BACKENDS)}
    known |= {"attn_args": st.builds("{}={}".format, st.sampled_from([*arguments_of(mixer), "unknown"]), st.sampled_from(
        ("0", "1", "2", "3", "0.5", "-1", "nan", "1e30", "all", "block", "learned", "", "1=2")))}
    names = [name for name in known if any_value or name not in mixers.DEFAULTS or name in {**axes, **mixer.numbers}]
    return {"attn": attn} | {name: draw(known[name]) for name in draw(st.lists(st.sampled_from(names), max_size=4))}


@settings(max_examples=examples(250))
@given(drawn_choices())
def test_any_choices_make_a_model_that_works_or_are_refused_in_one_line_that_names_one_of_them(choices):
    try:
        config = tiny_config(**choices)
        mixers.choose_kernel(config, "cpu")
    except ValueError as e:
        names = [*choices, choices.get("attn_args", "attn").partition("=")[0]]
        assert "\n" not in str(e) and any(re.search(rf"\b{name}\b", str(e)) for name in names), e
        return
    gpt, idx = GPT(config), torch.arange(min(9, config.block_size))[None] % config.vocab_size
    logits, loss = gpt(idx, idx)
    assert logits.isfinite().all() and loss.isfinite()
    if mixers.MIXERS[config.mixer].trains:
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in gpt.parameters())


# ------------------------------------------------------------------------------------------ a command in this process

MARKER = "code_was_executed"                    # the folder that the code in pickles makes
SECONDS, MEMORY = 60, 6 << 30                   # what a command may take; more bytes fail at once
MAIN = {"train.py": train_script.main, "eval.py": eval_script.main, "data/weights.py": weights_script.main}


class Hang(BaseException):
    """A command took longer than SECONDS."""


@contextlib.contextmanager
def as_a_process(argv):
    """Inside this context argv, the environment, the streams and the limits are those of a script. Yields stderr."""
    def stop(*_):
        raise Hang
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, alarm = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    kept, environment = (sys.argv, sys.path, sys.stdout, sys.stderr), dict(os.environ)
    sys.argv, sys.path, sys.stdout = list(argv), list(sys.path), io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, limit[1]))
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(SECONDS + 30, exit=True, file=sys.__stderr__)     # a hang outside of Python
    try:
        yield sys.stderr
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        sys.argv, sys.path, sys.stdout, sys.stderr = kept
        os.environ.clear()
        os.environ.update(environment)


def call(script, argv):
    """Run a script in this process: its main, or the whole file. Returns its exit code."""
    try:
        MAIN[script](argv) if script in MAIN else runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as e:
        return e.code or 0
    return 0


def outcome(script, *argv):
    """Run a command that may succeed or fail, (exit code, what it said on stderr). If it failed, its last line is its
    only error. It executed no code from files and left no half-written ones."""
    with as_a_process([script, *argv]) as stderr:
        code = call(script, list(argv))
    stderr.flush()
    said = stderr.buffer.getvalue().decode()
    assert not os.path.exists(MARKER)
    assert not [*Path().rglob(".*.tmp")]
    if code:
        errors = re.findall(rf"^{os.path.basename(script)}(?: \w+)?: error: .+$", said, re.M)
        assert len(errors) == 1 and said.splitlines()[-1] == errors[0] and "Traceback" not in said, said
    return code, said


# ----------------------------------------------------------------------------------------------------- folders to read

# {name} in a command line stands for a copy of one of these folders. {new} stands for the flags of a small new run on
# {data} with --out_dir={run}, the folder of a finished run
NEW = " ".join([*TINY, "--dataset={data}", "--out_dir={run}"])
FIXTURES = {"run": "elastic_run", "copy": "elastic_run", "data": "data", "symbols": "backcopy", "toy": "toy",
            "toy_data": "toy_data", "toy_run": "toy_run"}
RUNS = {                                        # finished runs of one step: {name: flags}
    "softmax": "--attn=softmax", "learned": "--pos=learned --bias=1", "focus": "--attn=focus --window=4 --n_layer=2",
    "short_focus": "--attn=focus --window=4", "symbols_run": "--dataset={symbols}",
    "llama_run": "--n_layer=2 --n_head=4 --n_kv_head=2 --norm=rmsnorm --mlp=swiglu"}


def edited(path, /, *inside, **entries):
    """A JSON file gets these entries, in the object under the keys `inside`. The value ... removes an entry."""
    def edit(content):
        whole = part = json.loads(content)
        for key in inside:
            part = part[key]
        part |= entries
        for key in [key for key, value in part.items() if value is ...]:
            del part[key]
        return json.dumps(whole).encode()
    return changed(path, edit)


def changed(path, change):
    """A file's bytes are replaced by change(bytes)."""
    return lambda _: Path(path).write_bytes(change(Path(path).read_bytes()))


def names_in(line):
    return list(dict.fromkeys(re.findall(r"{(\w+)}", line)))


def make_pair(folder, place):
    """A run and a LoRA adapter on it. The adapter finds the run in the same parent folder."""
    train_here(f"--dataset={place('data')}", f"--out_dir={folder}/base", "--n_layer=2", "--max_iters=1")
    train_here(f"--init_from={folder}/base", f"--out_dir={folder}/lora", "--train_only=lora", "--lora_rank=2",
               "--max_iters=1", "--eval_iters=1", "--batch_size=2", "--device=cpu")
    edited(f"{folder}/lora/meta.json", "base", path="base")(None)


def make_public(folder, place, run="llama_run"):
    """A run exported in Hugging Face's layout, by default a Llama."""
    pytest.importorskip("safetensors")
    weights_script.main(["export", str(place(run)), str(folder)])


def make_gguf(folder, place):
    """The same Llama as small.gguf."""
    safetensors = pytest.importorskip("safetensors.torch")
    from test_weights import write_gguf
    llama, config = place("llama"), files.read_json(place("llama") / "config.json")
    state = safetensors.load_file(llama / "model.safetensors")
    folder.mkdir()
    write_gguf(folder / "small.gguf", SimpleNamespace(config=SimpleNamespace(**config), state_dict=lambda: state))


def make_questions(folder, place):
    """A file for each benchmark of eval.py bench."""
    from test_benchmarks import PUBLIC, WIKI, write_rows
    for name, row in PUBLIC.items():
        write_rows(folder, name, row)
    (folder / "wiki.test.raw").write_text(WIKI)


def make_scrolls(folder, place):
    """A file for each task of eval.py scrolls."""
    from test_scrolls import ROWS, write_rows
    for name, rows in ROWS.items():
        write_rows(folder / name / "validation.jsonl", rows)


def make_pages(folder, place):
    """A file of documents, and the data set that fineweb_edu.py makes from it."""
    folder.mkdir()
    (folder / "some.jsonl").write_text("".join(json.dumps({"text": f"page {n} " * 30}) + "\n" for n in range(40)))
    run("data/fineweb_edu.py", f"--source={folder}/some.jsonl", f"--out_dir={folder}/made", "--tokenizer=bytes",
        "--shard_tokens=4000")


def make_claims(folder, place):
    folder.mkdir()
    shutil.copy(ROOT / "results/claims.json", folder)


MAKE = {"pair": make_pair, "llama": make_public, "gpt2": partial(make_public, run="learned"), "gguf": make_gguf,
        "questions": make_questions, "scrolls": make_scrolls, "pages": make_pages, "claims": make_claims,
        "no_separator": lambda folder, place: write_tokenizer(folder)}  # without a config, no separator is named


@pytest.fixture(scope="session")
def place(request, tmp_path_factory):
    """place(name) returns the folder of this name and makes it at its first use."""
    home, found = tmp_path_factory.mktemp("places"), {}

    def find(name):
        if name in FIXTURES:
            return request.getfixturevalue(FIXTURES[name])
        if name not in found:
            found[name] = home / name
            if name in MAKE:
                MAKE[name](home / name, find)
            else:
                flags = [flag.format_map({key: find(key) for key in names_in(flag)}) for flag in RUNS[name].split()]
                train_here(f"--dataset={find('data')}", f"--out_dir={home / name}", "--max_iters=1", *flags)
        return found[name]
    return find


@pytest.fixture
def prepared(place, tmp_path, monkeypatch):
    """prepared(line) makes a new folder the current one, copies the folders that the line names into it, and returns
    the line's words."""
    def prepare(line, *more):
        line = line.replace("{new}", NEW)
        here = tmp_path / f"{len([*tmp_path.iterdir()])}" / "here"      # so that ".." is a small folder
        here.mkdir(parents=True)
        for name in {*names_in(line), *more}:
            shutil.copytree(place(name), here / name)
        monkeypatch.chdir(here)
        return shlex.split(line.format_map({name: f"./{name}" for name in names_in(line)}))
    yield prepare
    shutil.rmtree(tmp_path)


# --------------------------------------------------------------------------------------------------------------- flags

WRONG = ("", " ", "x", "none", "None", "nan", "inf", "1e400", "true", "0x10", "1_0", "²", "٣", ",", "=", "a=b", "-", "%s",
         "{}", "[", "*", "1,2", "8,4,", "..", "/dev/null", "./data", "./run", "é\n", "\udcff", "a" * 300, "3:4", "1/8",
         "softmax,elastic", "linear:1e400")
TEXTS = st.one_of(st.sampled_from(WRONG), st.integers(-9, 9).map(str), st.integers(10 ** 9, 10 ** 40).map(str),
                  st.floats().map(str), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9))
# a large value of these is valid and only takes long; those in SLOW compile, train other runs or make data sets
LONG = {"n_layer", "max_iters", "gradient_accumulation_steps", "eval_iters", "n_expert", "samples", "tokens", "repeats",
        "trials", "limit"}
SLOW = {"compile", "shard", "dataset", "sweep", "out_dir", "run", "preset", "finetune"}


@st.composite
def drawn_flags(draw, groups, run=True):
    """Up to four flags of these dataclasses with any values. run: the command really runs, so none takes long."""
    fields = [field for group in groups for field in dataclasses.fields(group) if not (run and field.name in SLOW)]
    found = []
    for field in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4)):
        texts = st.integers(-9, 9).map(str) | st.sampled_from(WRONG) if run and field.name in LONG else TEXTS
        choices = list(ATTENTIONS) if field.name == "attn" else list(field.metadata["choices"] or ())
        value = draw(texts | st.sampled_from(choices).map(str) if choices else texts)
        name = draw(st.sampled_from(["--" + field.name] * 9 + ["--" + field.name[:-1]]))
        found += ([value] if field.metadata["positional"] else
                  draw(st.sampled_from(([f"{name}={value}"], [f"{name}={value}"], [name, value], [name]))))
    return found


def groups_of(command):
    """The dataclasses of a command's flags."""
    if command == "train.py":
        return Train, DryRun, GPTConfig, GPTConfig
    found = eval_script.COMMANDS[command]
    return (*[found.flags] * 3, *([Picture] if found.draw else []),
            *([Common, Overrides] if command in eval_script.OF_A_RUN else []))


def stop_before_work(monkeypatch):
    """After its flags a command enters this context. Here it ends instead."""
    monkeypatch.setattr(files, "one_line_errors", sys.exit)


@pytest.mark.parametrize("command", ["train.py", *eval_script.COMMANDS])
def test_any_flags_are_accepted_or_refused_in_one_line(command, prepared, monkeypatch):
    prepared("{run} {data}")
    stop_before_work(monkeypatch)
    begins = (["{new}", "--init_from=resume --out_dir={run}", "--init_from={run} --out_dir=out"]
              if command == "train.py" else ["--out_dir={run}", ""] if command in eval_script.OF_A_RUN else [""])
    begins = [begin.replace("{new}", NEW).format(run="./run", data="./data").split() for begin in begins]

    @settings(max_examples=examples(120 if command == "train.py" else 20))
    @given(st.sampled_from(begins), drawn_flags(groups_of(command), run=False))
    def check(begin, flags):
        script = ["train.py"] if command == "train.py" else ["eval.py", command]
        assert outcome(*script, *begin, *flags)[0] in (0, 2)
    check()


INSTRUMENTS = [f"{name} --lengths=90 --trials=1" if name == "passkey" else name for name in eval_script.COMMANDS
               if name not in ("compile", "speed", "lab")]
SCRIPTS = {
    "data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out": (
        "source", "tokenizer", "tokenizer_files", "name", "val", "val_share", "fixed_at", "length"),
    "data/fineweb_edu.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out --shard_tokens=9000": (
        "source", "tokenizer", "train_shards"),
    "data/backcopy.py --out_dir=out --sequences=9 --val_sequences=3": (
        "seed", "length", "sequences", "val_sequences", "fixed_at", "no_bos"),
    "data/benchmarks.py --source={questions} --out_dir=out": ("tasks", "source"),
    "data/weights.py {llama} --out=out": ("source", "out"),
    "data/shakespeare.py --out_dir=out --source={pages}": ("source", "tokenizer"),
    "data/stdlib.py --out_dir=out --source={pages}": ("source", "tokenizer")}


@settings(max_examples=examples(15))
@given(data=st.data())
@pytest.mark.parametrize("kind", ["train", "instrument", "script"])
def test_a_command_with_any_flags_works_or_ends_in_one_line(kind, data, prepared):
    if kind == "train":
        begin = data.draw(st.sampled_from(("{new}", "--init_from={run} --out_dir=out", "--init_from=resume --out_dir={run}")))
        line, flags = f"train.py {begin} --max_iters=9", data.draw(drawn_flags(groups_of("train.py")))
    elif kind == "instrument":
        line = "eval.py " + data.draw(st.sampled_from(INSTRUMENTS))
        flags = data.draw(drawn_flags(groups_of(line.split()[1])))
        if line.split()[1] in eval_script.OF_A_RUN:
            names = "{run}", "{softmax}", "{focus}", "{learned}", "{run},{softmax}"
            line += f" --device=cpu --out_dir={data.draw(st.sampled_from(names))}"
    else:
        line = data.draw(st.sampled_from(list(SCRIPTS)))
        small = st.integers(-9, 99).map(str) | st.sampled_from(WRONG)
        flags = data.draw(st.lists(st.builds("--{}={}".format, st.sampled_from(SCRIPTS[line]), small), max_size=2))
    outcome(*prepared(line), *flags)


# the flag, the last value that is refused, and the first that is accepted
BORDERS = {
    "train.py {new}": """n_layer 0 1, n_head 0 1, n_embd 0 2, n_embd 17 18, n_kv_head -1 0, n_kv_head 3 2, block_size 0 1,
        block_size 2147483648 2147483647, vocab_size -1 0, bias_range 0 1, window -1 0, first -1 0, topk -1 0,
        window_every 0 1, head_dim -1 0, n_inner -1 0, n_active 0 1, n_active 9 8, n_expert 1 2, dropout -0.001 0,
        dropout 1 0.999, norm_eps 0 1e-9, norm_eps 1 0.9, rope_base 0 0.1, rope_base inf 1e30, rope_share 0 0.1,
        rope_share 1.001 1, batch_size 0 1, max_iters 0 1, gradient_accumulation_steps 0 1, eval_interval 0 1,
        eval_iters 0 1, log_interval 0 1, lora_rank 0 1, warmup_iters -1 0, lr_decay_iters -1 0, grad_clip -1 0,
        head_lr -1 0, weight_decay -1 0, seed -1 0, balance_skip -1 0, balance_shared -0.1 0, balance_shared 1 0.9,
        expert_balance -1 0, learning_rate 0 1e-9, learning_rate inf 1, learning_rate nan 1, min_lr nan 0, beta1 -0.1 0,
        beta1 1 0.9, beta2 -0.1 0, beta2 1 0.9, mfu 0 0.1, mfu 1.1 1""",
    "train.py {new} --attn=focus": "window 0 1, window 16 15",
    "train.py {new} --attn=focus --window=4": "attn_args=groups 1 2, attn_args=groups 17 16",
    "train.py {new} --attn=focus --window=4 --attn_args=groups=3": "topk 4 3",
    "train.py {new} --attn=retnet": "attn_args=chunk 0 1, attn_args=chunk 2.5 2",
    "train.py {new} --attn=k_bias": "attn_args=bias_dims 9 8, attn_args=bias_dims 1.7 1",
    "train.py {new} --attn=softmax --head_balance=0.1 --n_layer=2": "balance_skip 1 0",
    "eval.py loss --out_dir=x": "windows -1 0, batch_size 0 1", "eval.py lengths --out_dir=x": "finetune -1 0, windows -2 -1",
    "eval.py probe --out_dir=x": "k 0 1, k 65 64, eps -1 0", "eval.py passkey --out_dir=x": "trials 0 1, seed -1 0",
    "eval.py sample --out_dir=x": "tokens 0 1, samples 0 1, temperature -1 0, top_k -1 0, top_p -1 0",
    "eval.py heads --out_dir=x": "local 0 1, windows 0 1, prune 101 100, prune -1 0",
    "eval.py scrolls --out_dir=x --source=y": "tokens 0 1", "eval.py bench --out_dir=x": "limit -1 0",
    **{f"eval.py speed {how}": "lengths 0 1" for how in ("", "--kernels", "--decode", "--focus", "--tune",
                                                         "--live --out_dir=x")},
    "eval.py speed": "memory 0 1", "eval.py speed --kernels": "widths 0 1", "eval.py speed --tune": "widths 0 1"}


@pytest.mark.parametrize("line", BORDERS)
def test_a_number_is_refused_up_to_its_border_and_accepted_beyond(line, prepared, monkeypatch):
    script, *argv = prepared(line)
    stop_before_work(monkeypatch)
    for border in BORDERS[line].split(","):
        flag, refused, accepted = border.split()
        code, said = outcome(script, *argv, f"--{flag}={refused}")
        assert code == 2 and flag.rpartition("=")[2] in said and refused in said, border
        assert outcome(script, *argv, f"--{flag}={accepted}") == (0, ""), border


# -------------------------------------------------------------------------------------------------------- damaged files

ATTACKED = {"model": None, "optimizer": {}, "step": 1}                  # a checkpoint to put code into


class Attack:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, (os.path.abspath(MARKER),)


def attacked(how, content):
    """A checkpoint with code in it, in one of the forms that torch.load reads."""
    file = io.BytesIO()
    if how == "in the pickle of a whole checkpoint":
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                new.writestr(name, pickle.dumps(Attack(), 2) if name.endswith("data.pkl") else old.read(name))
    elif how == "as a plain pickle":
        pickle.dump(ATTACKED | {"model": Attack()}, file, 2)
    else:
        torch.save(ATTACKED | {"model": {"x": Attack()}}, file, _use_new_zipfile_serialization=how == "as a zip")
    return file.getvalue()


ATTACKS = "as a plain pickle", "as a zip", "as before zips", "in the pickle of a whole checkpoint"


@pytest.mark.parametrize("how", ATTACKS)
def test_no_code_is_executed_from_a_checkpoint(how, prepared):
    argv = prepared("eval.py loss --out_dir={run} --device=cpu")
    path = Path("run/ckpt.pt")
    path.write_bytes(attacked(how, path.read_bytes()))
    code, said = outcome(*argv)
    assert code == 1 and "ckpt.pt" in said
    pickle.loads(pickle.dumps(Attack()))        # the attack itself works
    assert os.path.exists(MARKER)


STRANGE = st.sampled_from((
    None, "", "x", "é" * 9, "../x", "*", -1, 0, 1, 3, 1 << 40, 10 ** 30, 1.5, 1e308, float("nan"), float("inf"), True,
    [], {}, [1], ["x"], {"a": 1}, [[1, 2]]))
TENSORS = st.sampled_from((
    torch.ones(2), torch.zeros(0), torch.full((16, 16), torch.nan), torch.ones(3, 4, dtype=torch.int64),
    torch.ones(2, dtype=torch.complex64), torch.tensor(3.0), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(),
    torch.empty(2, device="meta")))


@st.composite
def damaged(draw, value, strange=STRANGE):
    """A copy of nested dicts and lists in which one entry is removed, replaced or added."""
    value = part = copy.deepcopy(value)
    while isinstance(part, dict | list) and part:
        key = draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
        if isinstance(part[key], dict | list) and part[key] and draw(st.integers(0, 6)):
            part = part[key]
            continue
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
        if how == "remove":
            del part[key]
        elif how == "add" and isinstance(part, dict):
            part[draw(st.sampled_from(("x", "../x", "")))] = draw(strange)
        else:
            part[key] = draw(strange)
        return value
    return draw(strange)


@st.composite
def damaged_bytes(draw, content):
    """Bytes that are cut, or lose, repeat or change some at up to three places, most near the beginning or the end."""
    for _ in range(draw(st.integers(1, 3))):
        near, size = draw(st.integers(0, 300)), draw(st.sampled_from((1, 2, 4, 8, 64)))
        at = min(len(content), draw(st.sampled_from((near, len(content) - near)) | st.integers(0, len(content))))
        piece = content[at:at + size]
        lengths = [struct.pack("<q", n)[:size] for n in (-1, 0, 1 << 31, 1 << 40, (1 << 63) - 1)]
        new = draw(st.sampled_from((b"", piece * 2, *lengths)) | st.binary(max_size=size))
        content = content[:at] + new + content[at + size:]
    return content[:draw(st.integers(0, len(content)))] if draw(st.integers(0, 5)) == 0 else content


WHOLE = st.sampled_from((b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"\xff\xfe{}"))


@st.composite
def damaged_file(draw, path):
    """The new content of a file: bytes or entries are damaged."""
    content, kind = path.read_bytes(), path.suffix
    entries = draw(st.sampled_from((True, True, False)))
    if not entries or kind not in (".json", ".jsonl", ".pt", ".safetensors"):
        return draw(damaged_bytes(content) | WHOLE)
    if kind == ".pt":
        file = io.BytesIO()
        torch.save(draw(damaged(torch.load(path, weights_only=True), STRANGE | TENSORS)), file)
        return draw(st.sampled_from([file.getvalue()] * 8 + [attacked(how, content) for how in ATTACKS]))
    if kind == ".safetensors":                  # 8 bytes with the length of the header, the header as JSON, the tensors
        end = 8 + int.from_bytes(content[:8], "little")
        head = json.dumps(draw(damaged(json.loads(content[8:end])))).encode()
        return draw(st.sampled_from([len(head)] * 9 + [1, 1 << 40])).to_bytes(8, "little") + head + content[end:]
    if kind == ".jsonl":
        rows = [json.loads(line) for line in content.splitlines()]
        return "".join(json.dumps(row) + "\n" for row in draw(damaged(rows, STRANGE | st.just({})))).encode()
    return json.dumps(draw(damaged(json.loads(content)))).encode()


OF_A_RUN = [f"eval.py {look} --device=cpu --out_dir=RUN" for look in (
    "loss --windows=2", "probe --windows=2", "heads --windows=2", "params", "sample --tokens=3", "lengths --lengths=8",
    "maps --text='the quick'", "compare --windows=2", "passkey --lengths=90 --trials=2", "loss --attn=softmax1")] + [
    "train.py --init_from=resume --out_dir=RUN --max_iters=3", "train.py --init_from=resume --out_dir=RUN",
    *(f"train.py --init_from=RUN --out_dir=out --max_iters=1 --dataset={{data}} --device=cpu {more}"
      for more in ("", "--train_only=lora")),
    "data/text.py --source={data}/val.bin --out_dir=out --tokenizer=RUN", "data/weights.py export RUN out"]
OF_DATA = ["train.py {new} --max_iters=1", *(f"eval.py {look} --out_dir={{run}} --dataset={{data}}"
                                             for look in ("loss --windows=2", "sample --tokens=3"))]
BENCH = "eval.py bench --source={questions} --out_dir={run} --device=cpu --limit=2"
MORE_PAGES = ("data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made "
              "--shard_tokens=4000 --train_shards=3")
READERS = {                                     # {a file: command lines that read it}
    **{f"{run}/{name}": [line.replace("RUN", run) for line in OF_A_RUN]
       for run in ("{run}", "{focus}", "{pair}/base", "{pair}/lora") for name in ("ckpt.pt", "meta.json")},
    "{run}/log.csv": ["train.py --init_from=resume --out_dir={run} --max_iters=9", "eval.py compare --out_dir={run}"],
    **{f"{{data}}/{name}": OF_DATA for name in ("train.bin", "val.bin", "meta.json")},
    **{f"{{{model}}}/{name}": [f"data/weights.py {{{model}}} --out=out"] for model in ("llama", "gpt2")
       for name in ("config.json", "model.safetensors", "tokenizer.json")},
    "{gguf}/small.gguf": ["data/weights.py {gguf}/small.gguf --out=out"],
    "{pages}/made/meta.json": [MORE_PAGES], "{pages}/made/progress.json": [MORE_PAGES],
    "{pages}/some.jsonl": ["data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out"],
    "{claims}/claims.json": [f"eval.py claims --results={{claims}}/claims.json {more}"
                             for more in ("", "--json", "--show=lazy-sink-gone")],
    **{f"{{questions}}/{benchmarks.TASKS[task].file}": [BENCH] for task in ("piqa", "hellaswag", "wikitext")},
    "{scrolls}/qasper/validation.jsonl": ["eval.py scrolls --source={scrolls} --out_dir={run} --device=cpu --tokens=4"]}


@settings(max_examples=examples(3))
@given(data=st.data())
@pytest.mark.parametrize("path", READERS)
def test_a_command_that_reads_a_damaged_file_works_or_ends_in_one_line(path, data, prepared, place):
    *argv, path = prepared(f"{data.draw(st.sampled_from(READERS[path]))} {path}")
    path = Path(path)
    if path.name == "progress.json":            # it becomes meta.json when the last shard is written
        path.with_name("meta.json").rename(path)
    contents = damaged_file(path)
    if (other := place("learned") / path.name).exists():                # the file of another run
        contents |= st.just(other.read_bytes())
    path.write_bytes(data.draw(contents))
    if path.suffix == ".bin" and data.draw(st.booleans()):              # its hash in meta.json fits
        meta = files.read_json(path.with_name("meta.json"))
        meta["shards"][path.name]["sha256"] = files.sha256(path)
        files.write_json(path.with_name("meta.json"), meta)
    outcome(*argv)
