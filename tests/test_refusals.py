"""Refusals: what cannot work ends with one line that says what was given, what is allowed, and what to type.

Three properties hold for drawn cases, and for 20 times as many with --all: of the models that flags describe, of flags,
and of damaged files. Numbers have a table of BORDERS, and every other mechanism has a case in REFUSALS or CALLS.
"""
import contextlib
import copy
import dataclasses
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
from evals.instrument import Common, Overrides, Picture
from model import GPT, GPTConfig
from train import DryRun, Train

# one worker makes all runs and data sets
pytestmark = pytest.mark.xdist_group("refusals")

# -------------------------------------------------------------------------------- models: they work, or a line says why

FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}
NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 24, -1, 1 << 31, 10 ** 30, 0.5, 1.5, 1e-9, 1e30, float("nan"), float("inf"), None, "x")
SCALINGS = [f"{kind}:{numbers}" for kind in ("linear", "ntk", "llama3", "yarn", "x")
            for numbers in ("", "2", "0", "nan", "8,1,4,16", "8,32,1,16", "8,4,4,9", "inf,1,4,9", "1e400,1,1")]
CONSTANTS = "0", "1", "2", "3", "0.5", "-1", "nan", "1e30", "all", "block", "learned", "", "1=2"


@st.composite
def drawn_choices(draw):
    """A recipe and up to four other fields of GPTConfig. In half of the cases its mixer accepts each value by itself."""
    attn, anything = draw(st.sampled_from(list(ATTENTIONS))), draw(st.booleans())
    mixer = mixers.MIXERS[ATTENTIONS[attn].get("mixer", "attention")]
    axes = mixers.AXES if anything else mixer.axes
    constants = {name for values in axes.values() for choice in values.values() for name in getattr(choice, "args", ())}
    values = {name: field.metadata["choices"] or {bool: (False, True), str: ()}.get(field.type, NUMBERS)
              for name, field in FIELDS.items() if name not in mixers.AXES} | axes
    values |= {"rope_scaling": SCALINGS, "kernel": ("auto", "torch", "sdpa"),           # triton would take minutes
               "attn_args": [f"{name}={value}" for name in sorted(constants) for value in CONSTANTS]}
    names = [name for name in values if anything or name not in mixers.NUMBERS or name in mixer.numbers]
    changed = draw(st.lists(st.sampled_from(names), max_size=4))
    return {"attn": attn} | {name: draw(st.sampled_from(list(values[name]))) for name in changed if values[name]}


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
SECONDS, MEMORY = 90, 6 << 30                   # what a command may take; an allocation beyond it fails at once
MAIN = {"train.py": train_script.main, "eval.py": eval_script.main, "data/weights.py": weights_script.main}


@contextlib.contextmanager
def as_a_process(argv):
    """Inside this context argv, the environment, the streams and the limits are those of a script. Yields stderr."""
    limit, in_use = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    kept, environment = (sys.argv, sys.path, sys.stdout, sys.stderr), dict(os.environ)
    sys.argv, sys.path, sys.stdout = list(argv), list(sys.path), io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, limit[1]))
    alarm = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{argv} hangs"))
    signal.alarm(SECONDS)
    try:
        yield sys.stderr
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        sys.argv, sys.path, sys.stdout, sys.stderr = kept
        os.environ.clear()
        os.environ.update(environment)


def outcome(script, *argv):
    """Run a command, which may succeed or fail. Returns its exit code and what it said on stderr. If it failed, its last
    line is its only error. It executed no code from files and left no half-written ones."""
    with as_a_process([script, *argv]) as stderr:
        try:
            MAIN[script](list(argv)) if script in MAIN else runpy.run_path(str(ROOT / script), run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code or 0
    stderr.flush()
    said = stderr.buffer.getvalue().decode()
    assert not os.path.exists(MARKER) and not [*Path().rglob(".*.tmp")]
    if code:
        errors = re.findall(rf"^{os.path.basename(script)}(?: \w+)?: error: .+$", said, re.M)
        assert len(errors) == 1 and said.splitlines()[-1] == errors[0] and "Traceback" not in said, said
    return code, said


# --------------------------------------------------------------------------------------------------- folders to damage

# {name} in a command line stands for a copy of one of these folders. {new} stands for the flags of a small new run on
# {data} with --out_dir={run}, the folder of a finished run
NEW = " ".join([*TINY, "--dataset={data}", "--out_dir={run}"])
FIXTURES = {"run": "elastic_run", "copy": "elastic_run", "data": "data", "symbols": "backcopy", "toy": "toy",
            "toy_data": "toy_data", "toy_run": "toy_run"}
RUNS = {                                        # finished runs of one step: {name: flags}
    "softmax": "--attn=softmax", "learned": "--pos=learned --bias=1", "focus": "--attn=focus --window=4 --n_layer=2",
    "short_focus": "--attn=focus --window=4", "symbols_run": "--dataset={symbols}",
    "llama_run": "--n_layer=2 --n_head=4 --n_kv_head=2 --norm=rmsnorm --mlp=swiglu"}


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
    written(folder / "some.jsonl", "".join(json.dumps({"text": f"page {n} " * 30}) + "\n" for n in range(40)))(None)
    run("data/fineweb_edu.py", f"--source={folder}/some.jsonl", f"--out_dir={folder}/made", "--tokenizer=bytes",
        "--shard_tokens=4000")


def make_claims(folder, place):
    """The results of three claims."""
    claims = files.read_json(ROOT / "results/claims.json")["claims"]
    written(folder / "claims.json", {"claims": dict([*claims.items()][:3])})(None)


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
            folder = found[name] = home / name
            if name in MAKE:
                MAKE[name](folder, find)
            else:
                flags = [flag.format_map({key: find(key) for key in names_in(flag)}) for flag in RUNS[name].split()]
                train_here(f"--dataset={find('data')}", f"--out_dir={folder}", "--max_iters=1", *flags)
        return found[name]
    return find


@pytest.fixture
def prepared(place, tmp_path, monkeypatch):
    """prepared(line) makes a new folder the current one, copies the folders that the line names into it, and returns
    the line's words."""
    def prepare(line):
        line = line.replace("{new}", NEW)
        here = tmp_path / f"{len([*tmp_path.iterdir()])}" / "here"      # so that ".." is a small folder
        here.mkdir(parents=True)
        for name in names_in(line):
            shutil.copytree(place(name), here / name)
        monkeypatch.chdir(here)
        return shlex.split(line.format_map({name: f"./{name}" for name in names_in(line)}))
    yield prepare
    shutil.rmtree(tmp_path)


# --------------------------------------------------------------------------------------------------------------- flags

WRONG = ("", " ", "x", "none", "None", "nan", "inf", "1e400", "true", "0x10", "1_0", "²", "٣", ",", "=", "a=b", "-", "%s",
         "{}", "[", "*", "1,2", "8,4,", "..", "/dev/null", "./data", "./run", "é\n", "\udcff", "a" * 300, "3:4", "1/8",
         "softmax,elastic", "linear:1e400")
SMALL = st.sampled_from(WRONG) | st.integers(-9, 99).map(str)
TEXTS = st.one_of(SMALL, st.integers(10 ** 9, 10 ** 40).map(str), st.floats().map(str),
                  st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9))
# a large value of these is valid and only takes long; those in SLOW train other runs or change the disk elsewhere
LONG = {"n_layer", "max_iters", "gradient_accumulation_steps", "eval_iters", "samples", "tokens", "trials", "limit"}
SLOW = {"dataset", "sweep", "out_dir", "run", "finetune"}
A_RUN = [f"--device=cpu --out_dir={run}" for run in ("{run}", "{softmax}", "{focus}", "{learned}", "{run},{softmax}")]
COMMANDS = {                                    # {a command: how its line begins}
    "train.py": ["{new}", "--init_from=resume --out_dir={run}", "--init_from={run} --out_dir=out"],
    **{f"eval.py {name}": A_RUN if name in eval_script.OF_A_RUN else [""] for name in eval_script.COMMANDS},
    "eval.py passkey": [f"{begins} --lengths=90 --trials=1" for begins in A_RUN],
    "data/text.py": ["--source={pages}/some.jsonl --tokenizer=bytes --out_dir=out"],
    "data/fineweb_edu.py": ["--source={pages}/some.jsonl --tokenizer=bytes --out_dir=out --shard_tokens=9000"],
    "data/backcopy.py": ["--out_dir=out --sequences=9 --val_sequences=3"],
    "data/benchmarks.py": ["--source={questions} --out_dir=out"], "data/weights.py": ["{llama} --out=out"]}
OF_SCRIPTS = {"data/text.py": "tokenizer_files name val val_share fixed_at length", "data/weights.py": "out",
              "data/fineweb_edu.py": "train_shards", "data/backcopy.py": "seed length sequences fixed_at no_bos",
              "data/benchmarks.py": "tasks"}
ONLY_FLAGS = {"train.py", "eval.py compile", "eval.py speed", "eval.py lab"}            # the work would take too long


def groups_of(command):
    """The dataclasses of a command's flags."""
    if command == "train.py":
        return Train, DryRun, GPTConfig, GPTConfig
    name = command.removeprefix("eval.py ")
    found, of_a_run = eval_script.COMMANDS[name], name in eval_script.OF_A_RUN
    return *[found.flags] * 3, *[Picture] * bool(found.draw), *[Common, Overrides] * of_a_run


@st.composite
def drawn_flags(draw, command, works):
    """Up to four flags of a command with any values. works: the command goes on to its work, so none takes long."""
    known = ([(name, (), False) for name in ("source", "tokenizer", *OF_SCRIPTS[command].split())]
             if command in OF_SCRIPTS else
             [(field.name, tuple(ATTENTIONS) if field.name == "attn" else field.metadata["choices"] or (),
               field.metadata["positional"]) for group in groups_of(command) for field in dataclasses.fields(group)])
    found = []
    for name, choices, positional in draw(st.lists(st.sampled_from(known), max_size=4)):
        texts = SMALL if works and (name in LONG or command in OF_SCRIPTS) else TEXTS
        value = draw(texts | st.sampled_from(list(choices)).map(str) if choices else texts)
        name = f"--{name[:draw(st.sampled_from((None, None, None, None, None, -1)))]}"
        if not (works and name[2:] in SLOW):
            found += [value] if positional else draw(st.sampled_from(([f"{name}={value}"], [name, value], [name])))
    return found


@settings(max_examples=examples(12))
@given(data=st.data(), works=st.booleans())
@pytest.mark.parametrize("command", [*COMMANDS])
def test_a_command_with_any_flags_works_or_ends_in_one_line(command, works, data, prepared):
    """In half of the cases a command ends after its flags, where it would begin to work."""
    argv, works = prepared(f"{command} {data.draw(st.sampled_from(COMMANDS[command]))}"), works and command not in ONLY_FLAGS
    with pytest.MonkeyPatch.context() as patch:
        if not works:
            patch.setattr(files, "one_line_errors", sys.exit)
        code, _ = outcome(*argv, *data.draw(drawn_flags(command, works)))
    assert works or code in (0, FLAGS)


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
    **{f"eval.py speed {how}": "lengths 0 1" for how in ("--decode", "--focus", "--live --out_dir=x")},
    "eval.py speed": "memory 0 1, lengths 0 1", "eval.py speed --kernels": "widths 0 1, lengths 0 1",
    "eval.py speed --tune": "widths 0 1, lengths 0 1"}


@pytest.mark.parametrize("line", BORDERS)
def test_a_number_is_refused_up_to_its_border_and_accepted_beyond(line, prepared, monkeypatch):
    argv = prepared(line)
    monkeypatch.setattr(files, "one_line_errors", sys.exit)
    for border in BORDERS[line].split(","):
        flag, refused, accepted = border.split()
        code, said = outcome(*argv, f"--{flag}={refused}")
        assert code == FLAGS and flag.rpartition("=")[2] in said and refused in said, border
        assert outcome(*argv, f"--{flag}={accepted}") == (0, ""), border


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


# ------------------------------------------------------------------------------------------- events before the command

# An event is a function of monkeypatch, called in the command's folder


def changed(path, change):
    """A file's bytes are replaced by change(bytes)."""
    return lambda _: Path(path).write_bytes(change(Path(path).read_bytes()))


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


def written(path, content):
    """A file gets this content: bytes, text, or an object to write as JSON."""
    def do(_):
        Path(path).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        Path(path).write_bytes(text.encode() if isinstance(text, str) else text)
    return do


def removed(path):
    return lambda _: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def saved(path, change):
    """change(checkpoint) modifies a checkpoint in place."""
    def do(_):
        found = torch.load(path, weights_only=True)
        change(found)
        torch.save(found, path)
    return do


def of_tokens(train, val):
    """The data set `data` has these tokens."""
    return lambda _: write_data(Path("data"), train, val)


def offline(monkeypatch):
    """The proxies are at port 9, where no server listens. tiktoken's cache is empty."""
    for name, value in {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "",
                        "TIKTOKEN_CACHE_DIR": os.path.abspath("cache")}.items():
        monkeypatch.setenv(name, value)


def without(package):
    return lambda monkeypatch: monkeypatch.setitem(sys.modules, package, None)


def no_triton(monkeypatch):
    monkeypatch.setattr(kernels, "AVAILABLE", False)


def full_disk(monkeypatch):
    monkeypatch.setattr(torch, "save", partial(os.write, -1, b""))      # raises OSError


A_TEXT = written("a.txt", "Alpha.\n")

# ------------------------------------------------------------------------------------------------------------ the table

FLAGS, INPUT = 2, 1                             # exit codes: a flag is wrong; a run, data or the machine does not fit
LOSS, RESUME, START = "eval.py loss --out_dir={run}", "train.py --init_from=resume --out_dir={run}", "train.py --out_dir=out"

REFUSALS = [                                    # (how a command line begins, exit code, rows: the rest, pattern, events)
    ("train.py {new}", FLAGS, [
        ("--n_layr=1", "unknown flag --n_layr=1, did you mean --n_layer.; valid flags: .*--n_layer"),
        ("--bias=maybe", "--bias: 'maybe' is not 0 or 1"), ("--mlp=nonsense", "swiglu"),
        ("--dataset=no/such", "unknown --dataset=no/such: choose from .*stdlib.* or name a folder by its path"),
        ("--train_only=lora", "trains only a part of the model.*--init_from"),
        ("--expert_balance=0.1", "balances experts, which --mlp=gelu does not have: add --mlp=moe"),
        # constants and positions
        ("--attn=softmax --attn_args=tau_init=1", "unknown --attn_args key 'tau_init': this recipe accepts none"),
        ("--attn=elastic --attn_args=tau_init=nan", "write tau_init=NUMBER.*not 'nan'"),
        ("--attn=elastic --attn_args=per_length=row", "per_length=row: use 1 or 0, or block"),
        *((f"--rope_scaling={text}", "write linear:FACTOR or ntk:RATIO or llama3:FACTOR,LOW,HIGH,ORIGINAL with L")
          for text in ("linear:0", "llama3:inf,1,4,8192", "llama3:8,4,4,8192", "yarn:8,1,4,9")),
        ("--rope_scaling=linear:2 --pos=learned", "--rope_scaling=linear:2 needs rotary positions.*--pos=rope"),
        # choices that cannot be combined
        ("--attn=elastic --sink=key", "--sink=key needs --rule=softmax: .*merged by log-sum-exp, and rule elastic"),
        *((f"--attn=softmax --normalize={value}", "without a normaliser") for value in ("sum", "length", "max1")),
        ("--attn=mlp --normalize=sum", "use --normalize=max1"), ("--attn=gla --normalize=sum", "either sign"),
        ("--attn=diff --n_head=1", "n_head=1 and n_kv_head=1 must both be even"),
        ("--first=4", "--first=4 .*add --window=N"), ("--window_every=2", "--window_every=2 .*add --window=N"),
        ("--attn=streaming --window=4 --feature=elu", "channels of their own"),
        ("--attn=sink_token --window=8", "cannot be seen beyond --window: add --first=1"),
        ("--attn=kv_bias --attn_args=value_even=1", "value_even=1 needs .*add value_norm=NUMBER"),
        ("--topk=2", "topk=2 cannot be used with .*only mixer focus or selection has it"),
        ("--attn=performer --rule=softmax", "--rule=softmax cannot be used with --attn=performer.*it accepts"),
        ("--attn=routing --window=4", "clusters decide"), ("--attn=magicpig --topk=8", "depends on its tables"),
        ("--attn=sparq --topk=8", "--attn=sparq selects keys .*train with --attn=softmax, then give --attn=sparq to"),
        ("--attn=retnet --write=dt", "forget=dt"), ("--attn=mamba2 --rule=delta", "--write=dt has no bound"),
        ("--attn=deltanet --qk_norm=none", "--rule=delta needs unit-length keys: add --qk_norm=l2"),
        ("--attn=deltanet --feature=elu", "unit-length keys, and --feature=elu changes .*: leave out --feature"),
        ("--attn=ttt --forget=channel", "one rate per head: use --forget=none, fixed, dt or alpha"),
        *((f"--head_balance=0.1 {flags}", says) for flags, says in (
            ("--attn=elastic", "neither.*--gate"), ("--attn=diff2", "neither.*--gate"), ("--n_head=1", "takes two"),
            ("--attn=window --window=4", "add --first=1"), ("--balance_skip=1", "leave 0 of 1 x 2 heads"),
            ("--balance_form=all --balance_skip=1", "balances all heads: leave out --balance_skip")))]),
    ("train.py {new}", INPUT, [
        ("--device=meta", "--device=meta .*choose cuda, mps or cpu"),
        *((f"{flags} --kernel=sdpa", "--kernel=sdpa: .*plain softmax only.*use auto or torch") for flags in (
            "--attn=elastic", "--attn=softmax1", "--window=4", "--pos=alibi", "--attn=diff2", "--attn=performer",
            "--attn=focus --window=4")),
        *((f"{flags} --kernel=triton", f"--kernel=triton: .*{says}.*; use auto or torch") for flags, says in (
            ("--dropout=0.1", "dropout"), ("--n_embd=1024", "heads are wider than 256"), ("--attn=ttt", "has no kernel"),
            ("--attn=streaming --n_embd=512", "heads are wider than 256"), ("--attn=routing", "has no kernel"),
            ("--attn=focus --window=4", "the soft gate of every pair has no kernel"))),
        ("--kernel=triton", "--kernel=triton: it needs triton and a CUDA GPU, or TRITON_INTERPRET=1", no_triton),
        # the data
        ("--vocab_size=256", "vocab_size=256 ids, the data set .* needs 257"),
        ("--block_size=20000", "train holds 20000 tokens, too few for one window of block_size=20000"),
        ("", "val.*block_size", of_tokens(WORDS, WORDS[:16])), ("", "train.*no tokens.*run", of_tokens([], WORDS)),
        ("--preset=lab --dataset={symbols} --block_size=65", "the sequences of .*symbols have 64 tokens: lower --block"),
        *(("", f"{split}.*token id.*vocab", of_tokens(*ids)) for split, *ids in (
            ("train", [257] * 99, WORDS), ("val", WORDS, [257] * 99))),
        ("", "train.bin is missing.*(run|make)", removed("data/train.bin")),
        ("", "train.bin is missing: make it with", removed("data/train.bin"),
         edited("data/meta.json", "shards", **{"train.bin": ...})),
        ("", "val.bin.*damaged.*run", changed("data/val.bin", lambda b: b[:-100])),
        ("", "train.bin.*sha256.*run", changed("data/train.bin", lambda b: b[:-2] + b"\x01\x00")),
        ("", "train.bin.*no token file.*run", written("data/train.bin", b"PNG" * 1000)),
        *(("", "meta.json.*make", written("data/meta.json", wrong)) for wrong in ("{", "\xff", [1, 2], "[" * 100_000)),
        *(("", "meta.json lacks vocab_size, tokenizer or shards", edited("data/meta.json", **wrong)) for wrong in (
            {"shards": ...}, {"vocab_size": 0}, {"vocab_size": 1 << 40}, {"tokenizer": {}}, {"stride": 0},
            {"shards": {"train.bin": {"tokens": 1, "sha256": None}}}))]),
    # a run that is continued, or that another begins with
    (RESUME, FLAGS, [*((f"--{flag}", "=.*cannot resume with .*=.*: leave out the flag.*--out_dir")
                       for flag in ("n_layer=2", "attn=softmax", "seed=2", "dropout=0", "weight_decay=0")),
                     ("--out_dir=no/such", "no run in no/such .*train one with")]),
    (RESUME, INPUT, [
        ("", "the data set ./data has changed since run began: make it as it was",
         edited("run/meta.json", "knobs", dataset="./{data}".format(data="data")), of_tokens(WORDS[:9000], WORDS[:900])),
        *(("--max_iters=9", "optimizer state does not fit the model: .*--init_from", saved("run/ckpt.pt", change))
          for change in (lambda found: found.update(optimizer={}),
                         lambda found: found["optimizer"]["state"][0].update(exp_avg=torch.ones(2, 2)),
                         lambda found: found["optimizer"]["param_groups"].reverse()))]),
    (START, INPUT, [
        ("--init_from={run} --out_dir={run}", "name another --out_dir for the new run"),
        ("--init_from={learned} --block_size=32", r"wpe.weight is \(16, 16\) in the .*\(32, 16\)"),
        ("--init_from={toy_run} --dataset={data}", "no data set in the tokenizer of toy_run .toy.: .*--tokenizer=toy_run"),
        ("--init_from={softmax} --attn=diff2", r"--attn=diff2 \(--diff=v2\).*projections.*cannot use these.*elastic"),
        ("--init_from={pair}/base --train_only=focus", "--attn=softmax adds nothing.*--attn=focus"),
        ("--init_from={pair}/base --train_only=lora --attn=elastic", "h.0.attn.tau is not in .*base.*initial value")]),
    *((how, INPUT, [
        ("", "trained on top of the run base, which is neither there nor in .*/base: restore", removed("pair/base")),
        *(("", says, saved(f"pair/{run}/ckpt.pt", change)) for run, says, change in (
            ("base", "adapter for other weights than those in .*base.*changed",
             lambda found: found["model"]["transformer.h.0.mlp.c_fc.weight"].add_(1)),
            ("lora", "does not fit.*c_proj", lambda found: found["model"].pop("transformer.h.1.attn.c_proj.lora_b")),
            ("lora", "does not fit.*c_attn",
             lambda found: found["model"].update({"transformer.h.0.attn.c_attn.lora_a": torch.ones(2, 8)})),
            ("lora", "does not fit.*h.7.attn.tau",
             lambda found: found["model"].update({"transformer.h.7.attn.tau": torch.ones(2)}))))
    ]) for how in ("eval.py loss --out_dir={pair}/lora",
                   "train.py --init_from=resume --max_iters=9 --out_dir={pair}/lora")),
    *((how, INPUT, [
        ("", "ckpt.pt is no readable checkpoint", written("run/ckpt.pt", b"")),
        ("", "ckpt.pt.*damaged", changed("run/ckpt.pt", lambda b: b[:len(b) // 2])),
        *(("", "ckpt.pt was not written by train.py", saved("run/ckpt.pt", change)) for change in (
            lambda found: found.pop("step"), lambda found: found.update(step=-1),
            lambda found: found.update(model={"x": 3}), lambda found: found.update(optimizer=[]),
            lambda found: found.update(scaler={"a": "x"}))),
        ("", "attn.tau", saved("run/ckpt.pt", lambda found: found["model"].pop("transformer.h.0.attn.tau"))),
        *(("", says, edited("run/meta.json", "knobs", **knobs)) for says, knobs in (
            ("transformer.h.1", {"n_layer": 2}), ("wte.weight", {"n_embd": 32}),
            ("tau", {"attn": "softmax", "rule": "softmax"})))
    ]) for how in (LOSS, RESUME)),
    (LOSS, INPUT, [
        ("", "no run in run .no meta.json there.: train", removed("run/meta.json")),
        ("", "ckpt.pt does not exist: the run has saved no checkpoint yet", removed("run/ckpt.pt")),
        ("", "meta.json is not valid JSON", written("run/meta.json", "{")),
        ("", "meta.json.*not written by train.py", written("run/meta.json", {"a": 1})),
        ("", "meta.json was not written by train.py", edited("run/meta.json", base={"path": 3})),
        *(("", says, edited("run/meta.json", "knobs", **knobs)) for says, knobs in (
            ("n_layer='x' must be of type int", {"n_layer": "x"}), ("attn=nonsense.*softmax", {"attn": "nonsense"}),
            ("norm=batchnorm is not among layernorm, rmsnorm", {"norm": "batchnorm"}))),
        # what flags change
        ("--attn=softmax", "does not fit.*tau"), ("--pos=learned", "does not fit.*wpe"),
        ("--out_dir={softmax} --attn=tda", r"--attn=tda \(--diff=subtract\).*projections.*cannot use these.*elastic"),
        ("--dataset={toy_data}", "no data set in the tokenizer of run .*--tokenizer=bytes"),
        ("--length=99999", "too few for one window of 99999: .*--length"),
        ("--out_dir={learned} --length=17", "--length=17, but --pos=learned knows only its block_size=16 positions",
         edited("learned/meta.json", "knobs", dataset="nowhere")),      # before the data is read
        ("--out_dir={symbols_run} --length=65", "--length=65, but the sequences of .* have 64 tokens")]),
    # the other instruments
    ("eval.py", FLAGS, [
        ("", "the first word must be a command: loss, lengths, compare"), ("loss", "which run. give --out_dir"),
        ("probe --out_dir=x --input=noise", "repeat"), ("sample --out_dir=x --chat", "give it as --prompt"),
        ("sample --out_dir=x --system=x", "add --chat"), ("routers --out_dir=x --values=3", "name it, --sweep=groups"),
        ("maps --out_dir=x --text=' '", "--text is empty: write a sentence"), ("scrolls --out_dir=x", "give --source"),
        ("scrolls --out_dir=x --source=y --tasks=qmsum,nonsense", "'nonsense'.*contract_nli"),
        ("claims --show=post-norm", "did you mean postnorm"),
        ("claims --run=lab,nonsense", "no claim 'nonsense'.*--run also takes lab"),
        ("heads --out_dir=x --prune=1,x", "'1,x' must be whole numbers.* separated by commas")]),
    ("eval.py", INPUT, [
        ("speed --live", "name it with --out_dir"), ("params --out_dir={softmax} --png=x.png", "nothing to draw"),
        ("lab --attn=nonsense", "unknown --attn=nonsense: choose from .*elastic"),
        ("claims --run=lazy-vs-recurrent", "out of reach"),
        ("claims --results=a.json", "a.json holds no results of claims", written("a.json", {"claims": {"postnorm": 3}})),
        ("sample --out_dir={run} --prompt=why? --chat", "bytes has no <.im_end.>.*leave .*--chat"),
        ("sample --out_dir={symbols_run} --prompt=999", "a prompt needs at least one token, with ids in 0..65"),
        *((f"probe {flags}", says) for flags, says in (
            ("--out_dir={run} --layer=1", "layers of .* are 0 to 0"), ("--out_dir={run} --k=17", "window has 16 tokens"),
            ("--out_dir={run} --length=1", "a window needs 2 tokens or more"),
            ("--out_dir={symbols_run} --input=bos", "the tokens of .* have no separator"))),
        ("heads --out_dir={run} --local=17", "--local=17.*16"), ("heads --out_dir={run} --other=16", "--other=16.*16"),
        ("groups --out_dir={run}", "has no groups: .*trained with --attn=focus"),
        ("groups --out_dir={focus} --against={run}", "run has --attn=elastic, which has no groups"),
        ("groups --out_dir={focus} --against={short_focus}", "has 4 groups in each of 1 layers, where .*focus has 4 in"),
        ("routers --out_dir={softmax}", "has no groups"), ("routers --out_dir={focus} --sweep=window", "name its base"),
        ("routers --out_dir={focus} --k=5", "1 to 4 groups"),
        *((f"maps {flags}", says) for flags, says in (
            (f"--out_dir={{run}} --text='{'ab ' * 40}'", "120 tokens.*100"), ("--out_dir={run} --views", "--attn=elastic"),
            ("--out_dir={run} --heads=0,2", "from 0 to 1"),
            ("--out_dir={learned} --text='the quick brown fox'", "19 tokens, but --pos=learned knows .* block_size=16"),
            ("--out_dir={symbols_run} --text='3 66'", "--text has the id 66, but this model has only 0 to 65"),
            ("--out_dir={symbols_run} --text='a word'", "a prompt must be numbers separated by spaces, not 'a word'"))),
        ("lengths --out_dir={run} --lengths=24,64", "24,64.*divide.*64"),
        ("lengths --out_dir={learned}", "--lengths=64.*block_size=16 positions: give a smaller --lengths"),
        ("passkey --out_dir={run} --lengths=200", "garbage.*at least"),
        ("passkey --out_dir={learned} --lengths=500,2000", "--lengths=2000.*block_size=16 positions"),
        ("passkey --out_dir={symbols_run}", "symbols that spell no text: name a run trained on text"),
        *((f"scrolls --source={{scrolls}} {flags}", says) for flags, says in (
            ("--out_dir={run} --length=100 --tokens=100", "100 tokens are not enough"),
            ("--out_dir={run} --tasks=quality --length=9 --tokens=4", "a choice is too long for --length=9"),
            ("--out_dir={run} --source=no/such", "neither gov_report/validation.jsonl.*zip"),
            ("--out_dir={symbols_run}", "symbols that spell no text"))),
        ("scrolls --source={scrolls} --out_dir={run} --tasks=quality --length=99", "four choices",
         written("scrolls/quality/validation.jsonl", {"id": "a", "input": "Q?\n\nno choices", "output": "x"})),
        ("scrolls --source={scrolls} --out_dir={run} --tokens=4", "needs the package rouge_score", without("rouge_score")),
        ("bench --source=nowhere --out_dir={run}", "no benchmark's file in nowhere: fetch them"),
        *((f"bench --source={{questions}} {flags}", says) for flags, says in (
            ("--out_dir={run} --length=3", "a choice has .* tokens where the model can predict 1 to 3"),
            ("--out_dir={symbols_run}", "was trained on symbols, not on text: bench needs a run with a text tokenizer"),
            ("--out_dir={run} --tasks=wikitext --length=64 --png=x.png", "no accuracy to draw"))),
        *((f"bench --source={{questions}} --out_dir={{run}} --tasks={name}", says,
           written(f"questions/{benchmarks.TASKS[name].file}", row and json.dumps(row))) for name, says, row in (
            ("piqa", "has no rows of piqa", ""), ("piqa", "line 1 is no row of piqa .it lacks 'goal'", {"label": 0}),
            ("hellaswag", "there is nothing to choose from", {"query": "a", "choices": ["b"], "gold": 0}),
            ("piqa", "a choice is empty", {"goal": "a", "sol1": "b", "sol2": "", "label": 0}),
            ("piqa", "number 3 of 2", {"goal": "a", "sol1": "b", "sol2": "c", "label": 2}))),
        *(("compare --out_dir={run},{copy}", f"{says}.*give --anyway", event, removed("run/ckpt.pt"))
          for says, event in (                  # before the first run is read
              ("tokens trained on: 512 and 256", edited("copy/meta.json", "knobs", batch_size=2)),
              ("n_embd: 16 and 32", edited("copy/meta.json", "knobs", n_embd=32)),
              (r"training data \(hash\)", edited("copy/meta.json", data_hash="0")),
              ("data and budget are unknown", edited("copy/meta.json", data_hash=..., losses={}))))]),
    # the data scripts
    ("data/backcopy.py --out_dir=out", INPUT, [("--fixed_at=99", "--fixed_at=99 must be a position in 0..64, or -1"),
                                               ("--length=0", "--length, .* must be at least 1")]),
    ("data/stdlib.py --source=. --out_dir=out", INPUT, [("", "0 Python files under .* are too few .*--source")]),
    ("data/shakespeare.py --out_dir=out", INPUT, [("--source=a.txt", "not Tiny Shakespeare", A_TEXT),
                                                  ("", "name a local copy with --source", offline)]),
    ("data/benchmarks.py --out_dir=out", INPUT, [
        ("--tasks=piqa,nonsense", "'nonsense' is no task: choose from hellaswag"),
        ("--source={questions} --tasks=all", "no hellaswag_val.jsonl", removed("questions/hellaswag_val.jsonl"))]),
    ("data/text.py", FLAGS, [("", "give --source FILE or FOLDER")]),
    ("data/text.py --tokenizer=bytes", INPUT, [
        *((f"--out_dir=out --source={name}", f"{name}.*{says}", written(name, content)) for name, content, says in (
            ("blank.txt", b" \n", "is empty"), ("binary.bin", b"\x7fELF\0\1", "not text"),
            ("latin.txt", b"caf\xe9", "not text"), ("line.jsonl", b'{"text": "a"}\n{"text": \n', "line 2"),
            ("cut.txt.gz", gzip.compress(bytes(range(256)) * 9, mtime=0)[:200], "damaged"),
            ("one.txt", b"x", "holds 1 characters, too few to hold out"))),
        ("--source=missing", "--source=missing does not exist"),
        ("--source=pictures", "no readable text", written("pictures/p.png", b"\0")),
        ("--source=nothing", "no files in this folder", written("nothing/.hidden", b"text")),
        *((f"--source=a.txt {flags}", says, A_TEXT) for flags, says in (
            ("--val zulu", "--val zulu: no such file in .*choose from a.txt"),
            ("--val a", "holds out everything.*name fewer files"),
            ("--val_share=1", "--val_share=1.0 must lie between 0 and 1"),
            ("--name=a/b", "--name=a/b must be a plain name"),
            ("--name=stdlib", "--name=stdlib is the name of a script in data/"),
            ("--fixed_at=6 --length=6", "--fixed_at=6 must be a place in 0..5")))]),
    ("data/text.py --source=a.txt --out_dir=out", INPUT, [(*row, A_TEXT) for row in (
        ("--tokenizer=nowhere", "unknown tokenizer 'nowhere': choose from bytes, gpt2.*tokenizer.json"),
        ("--tokenizer=numbers", "for symbols, not for text"),
        ("--tokenizer={toy}", "needs the package tokenizers.*pip install tokenizers", without("tokenizers")),
        ("--tokenizer=gpt2 --tokenizer_files=.", "vocab.bpe is missing or is not the GPT-2 tokenizer's"),
        ("--tokenizer=gpt2", "the GPT-2 tokenizer could not be fetched.*TIKTOKEN_CACHE_DIR", offline),
        ("--tokenizer={no_separator}", "tokenizer.json.*between two texts.*eos_token"))]),
    ("data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made --shard_tokens=4000",
     INPUT, [("", "made holds a data set from other sources or with other flags",
              changed("pages/some.jsonl", lambda b: b + b'{"text": "one more"}\n'))]),
    # public weights
    ("data/weights.py", FLAGS, [("", "NAME.FOLDER.FILE"), ("some/folder --source=x", "--source needs a name")]),
    ("data/weights.py {llama} --out=out", INPUT, [
        *(("", says, edited("llama/config.json", **changes)) for says, changes in (
            ("model_type gemma is not among.*gpt2, llama, mistral, qwen2.*bloom", {"model_type": "gemma"}),
            ("n_embd='wide' must be a whole number", {"hidden_size": "wide"}),
            (r"model.layers.2\S+ is missing, but .* must be", {"num_hidden_layers": 3}),
            (r"model.layers.1\S+ has no place", {"num_hidden_layers": 1}),
            (r", but .* must be \(40, 16\)", {"intermediate_size": 40}))),
        ("", "damaged, or was not fetched whole", changed("llama/model.safetensors", lambda b: b[:5000])),
        ("", "model.safetensors is missing", removed("llama/model.safetensors")),
        ("", "config.json is missing", removed("llama/config.json")),
        ("", "tokenizer.json is missing there", removed("llama/tokenizer.json")),
        ("", "the tokenizer llama has ids up to 300, the embedding 257 rows", written("llama/tokenizer.json", {
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 300}, "merges": []}, "added_tokens": []})),
        ("", "could not write to out .*: free some space there, or name .*--out", full_disk)]),
    ("data/weights.py", INPUT, [
        ("nowhere --out=out", "nowhere does not exist, and is none of the names smollm2, gpt2"),
        ("{llama}/model.safetensors --out=out", "model.safetensors holds tensors only: name its folder"),
        ("{llama} --out={run}", "holds a run that was trained: name another folder with --out"),
        ("{llama} --out={llama}", "name another one for the run with --out"),
        ("gpt2-xl --source={llama} --out=out", "is not the public gpt2-xl .it has 2 layers of width 16, not 48 of 1600"),
        *(("{gguf}/small.gguf --out=out", says, changed("gguf/small.gguf", change)) for says, change in (
            ("small.gguf is damaged, or was not fetched whole", lambda b: b[:3000]),
            ("only the architecture llama is read, not gemma", lambda b: b.replace(b"llama", b"gemma")),
            (r"its tokenizer \(gpt2, smallm\) cannot be read from", lambda b: b.replace(b"smollm", b"smallm")),
            ("damaged: it lacks the tokens, their types or the merges", lambda b: b.replace(b".merges", b".merged")))),
        ("some.whl --out=out", "some.whl is damaged", written("some.whl", b"PK")),
        ("some.whl --out=out", "some.whl holds no .gguf: name another", written("some.whl", b"PK\5\6" + bytes(18)))]),
    ("data/weights.py export", INPUT, [
        ("{softmax} back", "no family has .*sink=logit.*--norm=rmsnorm --mlp=swiglu, or a GPT-2 with --pos=learned",
         edited("softmax/meta.json", "knobs", sink="logit")),
        ("{llama_run} back", "ckpt.pt is not the model that its meta.json describes: transformer.h.2",
         edited("llama_run/meta.json", "knobs", n_layer=3)),
        ("{llama_run} {llama}", "exists and is not empty: name a new folder")])]


@pytest.mark.parametrize("line, code, says, events", [
    pytest.param(f"{begins} {rest}".strip(), code, says, events, id=f"{begins} {rest} | {says}")
    for begins, code, rows in REFUSALS for rest, says, *events in rows])
def test_a_command_line_that_cannot_work_is_refused_in_one_line(line, code, says, events, prepared, monkeypatch):
    def contents():
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    argv = prepared(line)
    for event in events:
        event(monkeypatch)
    before = contents()
    ended, said = outcome(*argv)
    assert re.search(says, said) and ended == code and said.count("\n") == 1, said
    assert contents() == before


def test_a_real_process_refuses_with_the_same_exit_code_in_one_line(prepared):
    done = run(*prepared("train.py {new} --n_embd=17"), ok=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (FLAGS, "", 1) and "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------- calls from Python


def layer_of(attn, **choices):
    return mixers.layer_of(tiny_config(attn=attn, **choices), 0)


def attend(attn, rows=9, table=None, **choices):
    """Call a layer with 9 queries and keys, and with `rows` rows of its input x."""
    layer = layer_of(attn, **choices)
    q, k, v = (torch.zeros(1, heads, 9, width) for heads, width in layer.shapes.values())
    return layer.attend(q, k, v, torch.zeros(1, rows, 16), table)


def views(attn, **choices):
    return layer_of(attn, **choices).views_of(*torch.zeros(2, 1, 2, 9, 8), torch.zeros(1, 9, 16))


def go_on(first, then):
    """Read tokens with one recipe, then with another and the same cache. The cache still works with the first."""
    begun, other = (GPT(tiny_config(attn=attn)).eval() for attn in (first, then))
    idx, cache = torch.arange(5)[None], begun.new_cache()
    begun(idx, cache=cache)
    try:
        other(idx, cache=cache)
    finally:
        begun(idx, cache=cache)


def go_on_in_a_layer():
    """The same with single layers. The second has one head."""
    past = {}
    layer_of("retnet")(torch.zeros(1, 9, 16), past)
    layer_of("gla", n_head=1)(torch.zeros(1, 9, 16), past)


def generate(*ids):
    GPT(tiny_config()).generate(torch.tensor([ids], dtype=torch.long), 1)


CALLS = [                                       # (a pattern of the error message, a function, its arguments)
    *(("adds nothing to scores by distance", partial(attend, table=torch.zeros(2, 9)), attn)
      for attn in ("retnet", "routing", "topk")),
    ("adds nothing to scores by distance", partial(attend, window=4, table=torch.zeros(2, 9)), "focus"),
    ("x has 3 rows for 9 keys", partial(attend, window=4), "focus", 3), ("x has 8 rows for 9 keys", attend, "retnet", 8),
    ("has no views", partial(views, window=4), "focus"), ("has no views", views, "retnet"), ("has no views", views, "routing"),
    ("another recipe", go_on, "deltanet", "mamba2"), ("another recipe", go_on, "softmax", "retnet"),
    ("a state of another recipe", go_on_in_a_layer),
    *(("at least one token, with ids in 0..30", generate, *ids) for ids in ((), (31,), (-1,))),
    *(("ids must lie in 0..65535", tokens.write_shard, Path("x.bin"), np.array(ids)) for ids in ([0, 65536], [-1, 5]))]


@pytest.mark.parametrize("says, call, arguments", [(says, call, rest) for says, call, *rest in CALLS])
def test_a_call_that_cannot_work_says_why(says, call, arguments, prepared):
    prepared("")
    with pytest.raises(ValueError, match=says):
        call(*arguments)
    assert not [*Path().iterdir()]
