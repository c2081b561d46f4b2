"""Refusals: what cannot work ends with one line that says what was given, what is allowed, and what
to type.

Three properties hold for drawn cases (ten times as many with --all): of the models that flags
describe, of flags, and of damaged files. BORDERS tests the numbers. Every other reason to refuse
has a row in SAYS, AFTER or CALLS.
"""

import contextlib
import dataclasses
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
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, TINY, WORDS, data_script, examples, tiny_config, train_here, write_data
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import combinations, inputs, layer

import eval as eval_script
import kernels
import mixers
import train as train_script
from attention import ATTENTIONS
from common import files
from data import tokens
from evals.instrument import OVERRIDES, Common, Picture
from model import GPT, GPTConfig
from pretrained import convert
from train import DryRun, Train

# one worker makes all runs and data sets
pytestmark = pytest.mark.xdist_group("refusals")

FLAGS, INPUT = 2, 1  # exit codes: a flag is wrong; a run, data or the machine does not fit
MARKER = "code_was_executed"  # the folder that the code in pickles makes
SECONDS, MEMORY = 90, 6 << 30  # what a command may take
MAIN = {"train.py": train_script.main, "eval.py": eval_script.main, "data/weights.py": convert.main}
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    6,
    12,
    24,
    -1,
    1 << 31,
    10**30,
    0.5,
    1e-9,
    1e30,
    float("nan"),
    float("inf"),
    True,
    None,
    "x",
)
SCALINGS = [
    f"{kind}:{numbers}"
    for kind in ("linear", "ntk", "llama3", "x")
    for numbers in (
        "",
        "2",
        "0",
        "nan",
        "8,1,4,16",
        "8,32,1,16",
        "8,4,4,9",
        "inf,1,4,9",
        "1e400,1,1",
    )
]
LAYERS = (
    "softmax+kda",
    "gla+lazy,pos=none",
    "elastic,tau_init=0+diff,window=2",
    "softmax*2+sink_token",
)
CONSTANTS = "0", "1", "2", "3", "0.5", "-1", "nan", "1e30", "all", "block", "learned", "", "1=2"


@st.composite
def any_choices(draw):
    """A combination of axes, and up to three fields of GPTConfig with any value."""
    choices = draw(combinations())
    axes = mixers.MIXERS[ATTENTIONS[choices["attn"]].get("mixer", "attention")].axes
    constants = set()
    for table in axes.values():
        for choice in table.values():
            constants |= {*getattr(choice, "args", ())}
    values = {}
    for field in dataclasses.fields(GPTConfig):
        by_type = {bool: (False, True), str: ()}.get(field.type, NUMBERS)
        values[field.name] = field.metadata["choices"] or by_type
    values |= mixers.AXES | {
        "rope_scaling": SCALINGS,
        "kernel": ("auto", "torch", "sdpa"),  # triton would take minutes
        "layers": LAYERS,
        "attn_args": [f"{name}={value}" for name in sorted(constants) for value in CONSTANTS],
    }
    some = st.sampled_from([name for name in values if values[name]])
    for name in draw(st.lists(some, max_size=3)):
        choices[name] = draw(st.sampled_from(list(values[name])))
    return choices


@settings(max_examples=examples(250))
@given(any_choices())
def test_any_choices_make_a_model_that_works_or_are_refused_in_one_line_that_names_one_of_them(
    choices,
):
    try:
        config = tiny_config(**choices)
        mixers.choose_kernel(config, "cpu")
    except ValueError as e:
        names = [*choices, *re.findall(r"\w+(?==)", choices.get("attn_args", ""))]
        assert "\n" not in str(e) and any(re.search(rf"\b{name}\b", str(e)) for name in names), e
        return
    gpt = GPT(config)
    idx = torch.arange(min(9, config.block_size))[None] % config.vocab_size
    logits, loss = gpt(idx, idx)
    assert logits.isfinite().all() and loss.isfinite()
    assert gpt.penalized or gpt.penalty() == 0
    if mixers.MIXERS[config.mixer].trains:
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in gpt.parameters())


@contextlib.contextmanager
def limited():
    """An allocation of more than MEMORY fails at once, so that no drawn number stops this machine.
    What hangs fails."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) << 12
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, limit[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{sys.argv} hangs"))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)


def outcome(script, *argv):
    """Run a command, which may succeed or fail: (exit code, what it said on stderr). If it failed,
    its last line is its only error. It executed no code from files and left no half-written
    ones."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ),
        mock.patch.multiple(sys, argv=[script, *argv], path=[*sys.path]),
        limited(),
    ):
        try:
            if script in MAIN:
                MAIN[script]([*argv])
            else:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code or 0
    err.flush()
    said = err.buffer.getvalue().decode()
    assert not os.path.exists(MARKER) and not [*Path().rglob(".*.tmp")]
    if code:
        errors = re.findall(rf"^{os.path.basename(script)}(?: \w+)?: error: .+$", said, re.M)
        assert errors == [said.splitlines()[-1]] and "Traceback" not in said, said
    return code, said


# Events before a command. Each is a function of monkeypatch


def edited(path, change):
    """change(content) modifies a JSON file or a checkpoint in place, or returns the new bytes of
    another file."""
    path = Path(path)

    def event(_):
        if path.suffix == ".json":
            change(found := files.read_json(path))
            files.write_json(path, found)
        elif path.suffix == ".pt":
            change(found := torch.load(path, weights_only=True))
            torch.save(found, path)
        else:
            path.write_bytes(change(path.read_bytes()))

    return event


def put(path, **entries):
    """Sets entries of nested dicts: put("run/meta.json", knobs={"n_layer": 2}) sets one knob."""

    def merge(part, entries):
        for name, value in entries.items():
            if isinstance(value, dict) and isinstance(part.get(name), dict):
                merge(part[name], value)
            else:
                part[name] = value

    return edited(path, lambda content: merge(content, entries))


def without(path, *names):
    """Removes an entry of nested dicts."""

    def change(part):
        for name in names[:-1]:
            part = part[name]
        del part[names[-1]]

    return edited(path, change)


def written(path, content):
    return lambda _: Path(path).write_bytes(content)


def data_set(train, val):
    return lambda _: write_data(Path("data"), train, val)


def only_prompts(path):
    return lambda _: tokens.write_shard(Path(path), [~WORDS.astype(int)], prompts=True)


def removed(path):
    return lambda _: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def pipe(path):
    return lambda _: (Path(path).unlink(), os.mkfifo(path))


def small_host(patch):
    patch.setattr("common.machine.host_memory", lambda: 10e9)


# {name} in a command line stands for a copy of one of these folders. {new} stands for the flags of
# a small new run on {data} with --out_dir={run}, the folder of a finished run
NEW = " ".join([*TINY, "--dataset={data}", "--out_dir={run}"])
FIXTURES = {
    "run": "elastic_run",
    "copy": "elastic_run",
    "symbols": "backcopy",
    "data": "data",
    "toy": "toy",
    "toy_data": "toy_data",
    "toy_run": "toy_run",
}
RUNS = {  # finished runs of one step: {name: flags}
    "softmax": "--attn=softmax",
    "learned": "--pos=learned --bias=1",
    "focus": "--attn=focus --window=4 --n_layer=2",
    "short_focus": "--attn=focus --window=4",
    "symbols_run": "--dataset={symbols}",
    "llama_run": "--n_layer=2 --n_head=4 --n_kv_head=2 --norm=rmsnorm --mlp=swiglu",
}


def names_in(line):
    return list(dict.fromkeys(re.findall(r"{(\w+)}", line)))


def make(name, folder, place):
    data = f"--dataset={place('data')}"
    if name == "pair":  # a LoRA adapter, and its run in the same parent folder
        base, lora = folder / "base", folder / "lora"
        train_here(data, f"--out_dir={base}", "--n_layer=2", "--max_iters=1")
        small = "--max_iters=1 --eval_iters=1 --batch_size=2 --device=cpu".split()
        adapter = "--train_only=lora", "--lora_rank=2"
        train_here(f"--init_from={base}", f"--out_dir={lora}", *adapter, *small)
        put(lora / "meta.json", base={"path": "base"})(None)
    elif name == "llama":  # a run exported in Hugging Face's layout
        pytest.importorskip("transformers")
        convert.main(["export", str(place("llama_run")), str(folder)])
    elif name == "pages":  # documents, and the data set that fineweb_edu.py makes from them
        folder.mkdir()
        source = folder / "some.jsonl"
        pages = [json.dumps({"text": f"page {n} " * 30}) + "\n" for n in range(40)]
        source.write_text("".join(pages))
        flags = "--tokenizer=bytes", "--shard_tokens=4000"
        data_script("fineweb_edu", f"--source={source}", f"--out_dir={folder}/made", *flags)
    else:
        flags = RUNS[name].format_map({key: place(key) for key in names_in(RUNS[name])})
        train_here(data, f"--out_dir={folder}", "--max_iters=1", *flags.split())


@pytest.fixture(scope="session")
def place(request, tmp_path_factory):
    """place(name) returns the folder of this name and makes it at its first use."""
    home, found = tmp_path_factory.mktemp("places"), {}

    def find(name):
        if name in FIXTURES:
            return request.getfixturevalue(FIXTURES[name])
        if name not in found:
            found[name] = home / name
            make(name, found[name], find)
        return found[name]

    return find


@pytest.fixture
def prepared(place, tmp_path, monkeypatch):
    """prepared(line) enters a new folder, copies the folders that the line names into it, returns
    the line's words."""

    def prepare(line):
        line = line.replace("{new}", NEW)
        here = tmp_path / f"{len([*tmp_path.iterdir()])}" / "here"  # so that ".." is a small folder
        here.mkdir(parents=True)
        for name in names_in(line):
            shutil.copytree(place(name), here / name)
        monkeypatch.chdir(here)
        return shlex.split(line.format_map({name: f"./{name}" for name in names_in(line)}))

    yield prepare
    shutil.rmtree(tmp_path)


WRONG = (
    "",
    " ",
    "x",
    "none",
    "nan",
    "inf",
    "1e400",
    "true",
    "0x10",
    "1_0",
    "²",
    "٣",
    ",",
    "=",
    "-",
    "%s",
    "{}",
    "*",
    "1,2",
    "[",
    "8,4,",
    "..",
    "/dev/null",
    "./run",
    "é\n",
    "\udcff",
    "a" * 300,
    "3:4",
    "1/8",
    "softmax,elastic",
)
SMALL = st.sampled_from(WRONG) | st.integers(-9, 99).map(str)
TEXTS = st.one_of(
    SMALL,
    st.integers(10**9, 10**40).map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9),
)
# a large value of these is valid and only takes long; those in SLOW train other runs or change the
# disk elsewhere
LONG = (
    "n_layer max_iters gradient_accumulation_steps eval_iters samples tokens trials limit".split()
)
SLOW = "dataset sweep out_dir run finetune".split()
A_RUN = [
    f"--device=cpu --out_dir={run}"
    for run in ("{run}", "{softmax}", "{focus}", "{learned}", "{run},{softmax}")
]
COMMANDS = {  # {a command: how its line begins}
    f"eval.py {name}": A_RUN if name in eval_script.OF_A_RUN else [""]
    for name in eval_script.COMMANDS
}
COMMANDS |= {
    "train.py": ["{new}", "--init_from=resume --out_dir={run}", "--init_from={run} --out_dir=out"],
    "eval.py passkey": [f"{begins} --lengths=90 --trials=1" for begins in A_RUN],
}
ONLY_FLAGS = {"train.py", "eval.py speed", "eval.py lab", "eval.py board"}  # would work too long


@settings(max_examples=examples(12))
@given(data=st.data(), works=st.booleans())
@pytest.mark.parametrize("command", [*COMMANDS])
def test_a_command_with_any_flags_works_or_ends_in_one_line(command, works, data, prepared):
    """In half of the cases a command ends after its flags, where it would begin to work."""
    works = works and command not in ONLY_FLAGS
    argv = prepared(f"{command} {data.draw(st.sampled_from(COMMANDS[command]))}")
    name = command.removeprefix("eval.py ")
    if name == "train.py":
        groups = [Train, DryRun, GPTConfig, GPTConfig]
    else:
        found = eval_script.COMMANDS[name]
        groups = [found.flags] * 3 + [Picture] * bool(found.draw)
        groups += [Common] * (name in eval_script.OF_A_RUN)
    knobs = [field for group in groups for field in dataclasses.fields(group)]
    if name in eval_script.OF_A_RUN:
        knobs += [field for field in dataclasses.fields(GPTConfig) if field.name in OVERRIDES]
    knobs = st.sampled_from(knobs)
    for knob in data.draw(st.lists(knobs, max_size=4)):
        texts = SMALL if works and knob.name in LONG else TEXTS
        choices = list(ATTENTIONS if knob.name == "attn" else knob.metadata["choices"] or ())
        value = data.draw(texts | st.sampled_from(choices).map(str) if choices else texts)
        cut_off = data.draw(st.sampled_from((None, None, None, None, None, -1)))
        flag = f"--{knob.name[:cut_off]}"
        if works and knob.name in SLOW:
            continue
        ways = [f"{flag}={value}"], [flag, value], [flag]
        argv += [value] if knob.metadata["positional"] else data.draw(st.sampled_from(ways))
    with pytest.MonkeyPatch.context() as patch:
        if not works:
            patch.setattr(files, "one_line_errors", sys.exit)
        code, _ = outcome(*argv)
    assert works or code in (0, FLAGS)


# flags, the last value that is refused, and the first that is accepted
BORDERS = {
    "train.py {new}": """
        n_layer n_head block_size bias_range window_every batch_size max_iters 0 1,
        gradient_accumulation_steps eval_interval eval_iters log_interval lora_rank 0 1,
        n_embd 0 2, n_embd 17 18, n_kv_head 3 2, block_size 2147483648 2147483647,
        n_kv_head vocab_size window first topk head_dim n_inner grad_clip head_lr -1 0,
        warmup_iters lr_decay_iters weight_decay seed balance_skip -1 0,
        dropout -0.001 0, dropout 1 0.999, norm_eps 0 1e-9, norm_eps 1 0.9,
        rope_base 0 0.1, rope_base inf 1e30, learning_rate 0 1e-9,
        learning_rate inf 1, learning_rate nan 1, min_lr nan 0,
        balance_shared beta1 beta2 -0.1 0, balance_shared beta1 beta2 1 0.9,
        mfu 0 0.1, mfu 1.1 1""",
    "train.py {new} --attn=focus": "window 0 1, window 16 15",
    "train.py {new} --attn=focus --window=4": "attn_args=groups 1 2, attn_args=groups 17 16",
    "train.py {new} --attn=focus --window=4 --attn_args=groups=3": "topk 4 3",
    "train.py {new} --attn=retnet": "attn_args=chunk 0 1, attn_args=chunk 2.5 2",
    "train.py {new} --attn=k_bias": "attn_args=bias_dims 9 8, attn_args=bias_dims 1.7 1",
    "train.py {new} --attn=softmax --head_balance=0.1 --n_layer=2": "balance_skip 1 0",
    "eval.py probe --out_dir=x": "k 0 1, k 65 64, eps -1 0, windows -2 -1",
    "eval.py sample --out_dir=x": "tokens samples 0 1, temperature top_k -1 0",
    "eval.py heads --out_dir=x": "local windows 0 1, prune 101 100, prune -1 0",
    "eval.py speed": "memory lengths widths 0 1",
}


@pytest.mark.parametrize("line", BORDERS)
def test_a_number_is_refused_up_to_its_border_and_accepted_beyond(line, prepared, monkeypatch):
    argv = prepared(line)
    monkeypatch.setattr(files, "one_line_errors", sys.exit)
    for border in BORDERS[line].split(","):
        *flags, refused, accepted = border.split()
        for flag in flags:
            code, said = outcome(*argv, f"--{flag}={refused}")
            assert code == FLAGS and refused in said, (flag, border)
            assert flag.rpartition("=")[2] in said, (flag, border)
            assert outcome(*argv, f"--{flag}={accepted}") == (0, ""), (flag, border)


STRANGE = (
    None,
    "",
    "x",
    "../x",
    "*",
    -1,
    0,
    1 << 40,
    10**30,
    1.5,
    float("nan"),
    True,
    [],
    {},
    [1],
    ["x"],
    {"a": 1},
)
TENSORS = (  # functions of the tensor that is replaced
    torch.Tensor.to_sparse,
    torch.Tensor.long,
    torch.Tensor.cfloat,
    lambda x: x.to("meta"),
    lambda x: x[None],
    lambda x: x * torch.nan,
    lambda x: torch.nested.nested_tensor([x, x]),
)


def damage(draw, part):
    """Remove or replace an entry of nested dicts and lists."""
    key = draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
    if isinstance(part[key], dict | list) and part[key] and draw(st.integers(0, 6)):
        damage(draw, part[key])
    elif isinstance(part[key], torch.Tensor) and draw(st.booleans()):
        part[key] = draw(st.sampled_from(TENSORS))(part[key])
    elif draw(st.booleans()):
        part[key] = draw(st.sampled_from(STRANGE))
    else:
        del part[key]


@st.composite
def damaged_file(draw, path):
    """The new content of a file: an entry is damaged, or some bytes are replaced or cut off."""
    content = path.read_bytes()
    if path.suffix == ".json" and draw(st.integers(0, 2)):
        damage(draw, value := json.loads(content))
        return json.dumps(value).encode()
    if path.suffix == ".pt" and draw(st.integers(0, 2)):
        damage(draw, value := torch.load(path, weights_only=True))
        torch.save(value, file := io.BytesIO())
        return file.getvalue()
    near = draw(st.integers(0, min(300, len(content))))
    new = draw(st.binary(max_size=9))
    at = draw(st.sampled_from((near, len(content) - near)))
    rest = content[at + draw(st.integers(0, 9)) :]
    whole = content[:at], content[:at] + new + rest, b"", b"null", b"[" * 100_000
    return draw(st.sampled_from(whole))


OF_A_RUN = """
  eval.py loss --windows=2 --device=cpu --out_dir=RUN
  eval.py loss --attn=softmax1 --device=cpu --out_dir=RUN
  eval.py probe --windows=2 --device=cpu --out_dir=RUN
  eval.py params --device=cpu --out_dir=RUN
  eval.py sample --tokens=3 --device=cpu --out_dir=RUN
  train.py --init_from=resume --out_dir=RUN --max_iters=3
  train.py --init_from=RUN --train_only=lora --out_dir=o --max_iters=1 --device=cpu --dataset={data}
  data/weights.py export RUN out
  data/text.py --source={data}/val.bin --out_dir=out --tokenizer=RUN
"""
OF_DATA = """
    train.py {new} --max_iters=1
    eval.py loss --windows=2 --out_dir={run} --dataset={data}
    eval.py sample --tokens=3 --out_dir={run} --dataset={data}
"""
OF_PAGES = (
    "data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made "
    "--shard_tokens=4000 --train_shards=3"
)
READERS = {  # {a file: command lines that read it}
    "{run}/ckpt.pt": OF_A_RUN.replace("RUN", "{run}"),
    "{run}/meta.json": OF_A_RUN.replace("RUN", "{run}"),
    "{pair}/lora/ckpt.pt": OF_A_RUN.replace("RUN", "{pair}/lora"),
    "{pair}/lora/meta.json": OF_A_RUN.replace("RUN", "{pair}/lora"),
    "{run}/log.csv": """
        train.py --init_from=resume --out_dir={run} --max_iters=9
        eval.py loss --windows=2 --png=out --out_dir={run}""",
    "{data}/train.bin": OF_DATA,
    "{data}/meta.json": OF_DATA,
    "{toy}/tokenizer.json": "data/text.py --source={data}/val.bin --out_dir=out --tokenizer={toy}",
    "{pages}/made/meta.json": OF_PAGES,
    "{pages}/some.jsonl": "data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=o",
}


@settings(max_examples=examples(4))
@given(data=st.data())
@pytest.mark.parametrize("path", READERS)
def test_a_command_that_reads_a_damaged_file_works_or_ends_in_one_line(path, data, prepared):
    line = data.draw(st.sampled_from(READERS[path].strip().splitlines()))
    *argv, path = prepared(f"{line} {path}")
    Path(path).write_bytes(data.draw(damaged_file(Path(path))))
    outcome(*argv)


class Attack:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, (os.path.abspath(MARKER),)


SAYS = {  # {(how a line begins, exit code): its flags => what the error says, one a line}
    ("train.py {new}", FLAGS): """
        --bias=maybe => 'maybe' is not 0 or 1
        --rope_scaling=linear:0 => write linear:FACTOR
        --train_only=lora => a part of the model.*--init_from
        --attn=elastic --attn_args=tau_init=nan => use a number
        --attn=ttt --forget=channel => use --forget=none, fixed, dt or alpha
        --attn=performer --rule=softmax => it accepts
        --n_layr=1 => unknown flag --n_layr=1, did you mean --n_layer
        --attn=elastic --sink=key => merged by log-sum-exp
        --rope_scaling=linear:2 --pos=learned => needs rotary positions
        --attn=elastic --attn_args=per_length=row => use 1 or 0, or block
        --topk=2 => only mixer focus or selection has it
        --attn_args=tau_init=1 => key 'tau_init': --attn=softmax accepts none
        --attn=routing --window=4 => clusters decide
        --attn=sink_token --window=8 => add --first=1
        --normalize=sum => without a normaliser
        --first=4 => add --window=N
        --attn=kv_bias --attn_args=value_even=1 => add value_norm=NUMBER
        --attn=magicpig --topk=8 => depends on its tables
        --window_every=2 => add --window=N
        --attn=retnet --write=dt => forget=dt
        --head_balance=1 --n_head=1 => takes two
        --attn=mamba2 --rule=delta => --write=dt has no bound
        --head_balance=1 --balance_skip=1 => leave 0 of 1 x 2 heads
        --head_balance=1 --attn=window --window=4 => add --first=1
        --attn=deltanet --feature=elu => leave out --feature
        --attn=streaming --window=4 --feature=elu => channels of their own
        --attn=diff --n_head=1 => must both be even
        --attn=mlp --normalize=sum => use --normalize=max1
        --attn=deltanet --qk_norm=none => add --qk_norm=l2
        --head_balance=1 --attn=elastic => neither.*--gate
        --attn=sparq => then give --attn=sparq to eval.py
        --dataset=no/such => choose from .*stdlib
        --attn=gla --normalize=sum => either sign
        --head_balance=1 --balance_form=all --balance_skip=1 => leave out --balance_skip
        --bias_of=k => add --qkv_bias=1
        --warmup_iters=99999999999999999999 => must be below 2..31
        --layers=elastic+foo => 'foo' must be RECIPE.*softmax
        --layers=softmax*100 => must be RECIPE
        --layers=softmax*0 => must be RECIPE
        --layers=softmax*2 => names 2 layers, and n_layer=1: raise
        --layers=elastic --attn=lazy => leave out --attn=lazy
        --layers=softmax,window=x => must be a whole number
        --layers=softmax+sink_token --n_layer=2 => sink=none, .* layer's sink=token: add --sink
        --layers=softmax+kda --n_layer=2 --head_balance=1 => neither.*--gate
        --docs=1 --attn=routing => leave out --docs
        --layers=softmax+kda --n_layer=2 --docs=1 => of mixer recurrent
        --docs=1 --attn=sink_token => use --sink=key_value
        --docs=1 --head_balance=1 => or leave out --docs
    """,
    ("train.py {new} --kernel=sdpa", INPUT): """
        --attn=elastic => use auto or torch
        --attn=softmax1 => plain softmax
        --attn=focus --window=4 => plain softmax
        --attn=performer => plain softmax
        --pos=alibi => plain softmax
        --attn=softmax --n_head=4 --head_balance=0.5 => log-sum-exp of each row.*use auto or torch
    """,
    ("train.py {new} --kernel=triton", INPUT): """
        --dropout=0.1 => dropout
        --n_embd=1024 => heads are wider than 256
        --attn=routing => has no kernel
        --attn=streaming --window=4 --n_embd=512 => heads are wider than 256
        --attn=focus --window=4 => the soft gate of every pair has no kernel
    """,
    ("train.py {new}", INPUT): """
        --device=meta => choose cuda, mps or cpu
        --vocab_size=256 => the data set .* needs 257
        --preset=lab --dataset={symbols} --block_size=65 => have 64 tokens: lower --block_size
    """,
    ("train.py --init_from=resume --out_dir={run}", FLAGS): """
        --n_layer=2 => cannot resume with n_layer=2: leave out
        --out_dir=no => no run in no
    """,
    ("train.py --out_dir=out", INPUT): """
        --init_from={run} --out_dir={run} => name another --out_dir for the new run
        --init_from={learned} --block_size=32 => wpe.weight is .16, 16. in the .*.32, 16.
        --init_from={toy_run} --dataset={data} => tokenizer of toy_run .toy.: .*--tokenizer=toy_run
        --init_from={softmax} --attn=diff2 => does not fit --attn=diff2: .*c_attn.*as elastic and
        --init_from={pair}/base --train_only=lora --qkv_bias=1 --bias_of=k => leave out one
        --init_from={pair}/base --train_only=focus => --attn=softmax adds nothing.*--attn=focus
        --init_from={pair}/base --train_only=lora --attn=elastic => h.0.attn.tau is not in .*value
    """,
    ("eval.py", FLAGS): """
        => which command. .*: loss, lengths
        prob => 'prob', did you mean probe. .*-h
        bench --out_dir=x => which tasks. give --tasks
        loss => which run. give --out_dir
        theory --seed=-1 => must be at least 0
        probe --out_dir=x --lines=sink+pike => 'pike' is none of sink, .*peak
        speed --decode --png=x => leave out --decode, or --png
        speed --decode --dense=tda => leave out --decode, or --dense
        speed --dense=tda,gla => gla .mixer recurrent. never .*leave out gla
        maps --out_dir=x --text=' ' => --text is empty
        heads --out_dir=x --prune=1,x => '1,x' must be whole
        board --train_args=--n_layer=1 => a folder of their own
        board --dataset=x => a folder of their own
        board --rates=2e-3,x => 2e-3,x must be numbers
        board --seeds=1,2 => 1 only chooses
        board --attn=nothing => nothing
        probe --out_dir={run} --text=fox --lengths=4 => leave out --length, --lengths
    """,
    ("eval.py", INPUT): """
        loss --out_dir={run} --dataset={toy_data} => in the tokenizer of run .*--tokenizer=bytes
        loss --out_dir={run} --attn=softmax => does not fit.*tau
        probe --out_dir={symbols_run} --input=bos => no separator
        loss --out_dir={symbols_run} --length=65 => 64 tokens
        lengths --out_dir={run} --lengths=24,64 => 24,64.*divide.*64
        probe --out_dir={run} --k=17 => window has 16 tokens
        probe --out_dir={run} --text=a => needs 2
        passkey --out_dir={run} --lengths=200 => garbage.*at least
        groups --out_dir={focus} --against={short_focus} => 4 groups in each of 1 layers, where .*4
        routers --out_dir={focus} --k=5 => 1 to 4 groups
        passkey --out_dir={symbols_run} => trained on text
        loss --out_dir={learned} --length=17 => its block_size=16 positions
    """,
    ("data/text.py --out_dir=out", FLAGS): """
        => give --source FILE or FOLDER
    """,
    ("data/text.py --tokenizer=bytes", INPUT): """
        --source={toy} --val tokenizer meta => are held out, so nothing is left
        --source={toy} --val zulu => --val zulu: no such file in
        --source={toy} --name=stdlib => is the name of a script
        --source=missing => --source=missing does not exist
        --source={toy} --fixed_at=6 --length=6 => in 0..5
    """,
    ("data/text.py --source={toy} --out_dir=out", INPUT): """
        --tokenizer=nowhere => choose from bytes, gpt2
        --tokenizer=numbers => for symbols, not for text
        --tokenizer=gpt2-256 => 257 to 50257 ids
    """,
    ("data/backcopy.py --out_dir=out", INPUT): """
        --fixed_at=99 => in 0..64, or -1
    """,
    ("data/stdlib.py --source=. --out_dir=out", INPUT): """
        => 0 Python files under .* are too few .*--source
    """,
    ("data/weights.py", FLAGS): """
        => NAME.FOLDER.FILE
    """,
    ("data/weights.py", INPUT): """
        no/such => neither a folder with config.json nor a .gguf
        {llama}/model.safetensors --out=out => neither a folder
        export {llama_run} {llama} => exists: name a new
        {llama} --out={llama} => name another one
        {llama} --out={run} => holds a run that was trained
    """,
}

LOSS = "eval.py loss --out_dir={run}"
LORA = "eval.py loss --out_dir={pair}/lora"
SEVERAL = "eval.py loss --out_dir={run},{copy}"
CURVES = "eval.py loss --out_dir={run} --png=out --windows=2"
RESUME = "train.py --init_from=resume --max_iters=9 --out_dir={run}"
SAMPLE = "eval.py sample --tokens=2 --out_dir={toy_run}"
TEXT = "data/text.py --out_dir=out --tokenizer=bytes --source="
CODED = f"{TEXT}{{toy}} --tokenizer={{toy}}"
HUB = "data/weights.py {llama} --out=out"
NOT_OURS = "was not written by train.py"
NO_CHECKPOINT = "not a readable checkpoint"
NO_STATE = "optimizer state does not fit the model: .*--init_from"
BASE, ADAPTER = "pair/base/ckpt.pt", "pair/lora/ckpt.pt"
SPARSE = torch.eye(2).to_sparse()
NO_FILE = {"tokens": 1, "sha256": ""}

AFTER = [  # (a command line, what the error says, events before it)
    # train.py with data that do not fit
    ("train.py {new}", "val.*block_size", data_set(WORDS, WORDS[:16])),
    ("train.py {new}", "train.*no tokens.*make", data_set([], WORDS)),
    ("train.py {new}", "train.bin is missing.*make", removed("data/train.bin")),
    ("train.py {new}", "val.bin.*damaged.*make", edited("data/val.bin", lambda b: b[:-100])),
    ("train.py {new}", "train.bin.*not a token file", written("data/train.bin", b"PNG" * 1000)),
    ("train.py {new}", "val.bin is not a regular file", pipe("data/val.bin")),
    ("train.py {new}", "meta.json.*make", written("data/meta.json", b"{")),
    ("train.py {new}", "meta.json lacks vocab_size, tok", put("data/meta.json", separator=-1)),
    (
        "train.py {new}",
        "meta.json lacks vocab_size, tokenizer or",
        put("data/meta.json", shards={"../run/ckpt.pt": NO_FILE}),
    ),
    ("train.py {new}", "val: 4 windows .* no target.*raise --block", only_prompts("data/val.bin")),
    (
        "eval.py loss --out_dir={run} --dataset={data} --windows=1",
        "val: 1 windows of 16 tokens hold no target.*--windows",
        only_prompts("data/val.bin"),
    ),
    ("train.py {new} --docs=1", "data/train does not begin with .*separator.*leave out --docs"),
    # a machine that is too small
    (
        "train.py {new} --kernel=triton",
        "needs triton",
        lambda patch: patch.setattr(kernels, "AVAILABLE", False),
    ),
    (
        "train.py {new} --eval_iters=100",
        "asks for 400 windows, and .* holds 249: give at most 62",
        small_host,
    ),
    (
        "train.py {new} --gradient_accumulation_steps=2000000000",
        "tokens of a step need 1,088.0 GB of memory, .*: lower it",
        small_host,
    ),
    (
        "train.py {new} --n_layer=300000",
        "parameters, 3,104 in each of n_layer=300000 blocks, needs 26.9 GB .* 10.0 GB: lower",
        small_host,
    ),
    # a run that cannot go on
    (
        RESUME,
        "data set ./data has changed since run began",
        data_set(WORDS[:9000], WORDS[:900]),
        put("run/meta.json", knobs={"dataset": "./data"}),
    ),
    (
        RESUME,
        "process 1 on .* trains in .*, delete .*lock",
        written("run/lock", f"process 1 on {socket.gethostname()}".encode()),
    ),
    (RESUME, "log.csv is not a regular file", pipe("run/log.csv")),
    (
        RESUME,
        NO_STATE,
        edited("run/ckpt.pt", lambda found: found["optimizer"]["param_groups"].reverse()),
    ),
    *(
        (RESUME, NO_STATE, put("run/ckpt.pt", optimizer={"state": {0: {"exp_avg": wrong}}}))
        for wrong in (torch.ones(2, 2), SPARSE)
    ),
    # a run that cannot be read
    (LOSS, NOT_OURS, put("run/ckpt.pt", step=-1)),
    (LOSS, NOT_OURS, put("run/ckpt.pt", optimizer=[])),
    (LOSS, "attn.tau", without("run/ckpt.pt", "model", "transformer.h.0.attn.tau")),
    (LOSS, "other than dense tensors", put("run/ckpt.pt", model={"x": SPARSE})),
    (LOSS, NO_CHECKPOINT, written("run/ckpt.pt", b"PK")),
    (LOSS, NO_CHECKPOINT, put("run/ckpt.pt", model=Attack())),
    (LOSS, NO_CHECKPOINT, written("run/ckpt.pt", pickle.dumps({"model": Attack()}))),
    (LOSS, "ckpt.pt is not a regular file", pipe("run/ckpt.pt")),
    (LOSS, "no run in run .no meta.json there.: train", removed("run/meta.json")),
    (LOSS, "the run has saved no checkpoint yet", removed("run/ckpt.pt")),
    (LOSS, NOT_OURS, put("run/meta.json", base={"path": 3})),
    (LOSS, "transformer.h.1", put("run/meta.json", knobs={"n_layer": 2})),
    (LOSS, "attn=x.*softmax", put("run/meta.json", knobs={"attn": "x"})),
    (LOSS, "n_layer='x' must be of type int", put("run/meta.json", knobs={"n_layer": "x"})),
    (LOSS, "must be a plain name", put("run/meta.json", knobs={"dataset": "*"})),
    (LORA, "run base, which is neither there nor in .*/base: restore", removed("pair/base")),
    (
        LORA,
        "adapter for other weights",
        edited(BASE, lambda found: found["model"]["transformer.ln_f.weight"].add_(1)),
    ),
    (LORA, "does not fit.*c_pr", without(ADAPTER, "model", "transformer.h.1.attn.c_proj.lora_b")),
    (LORA, "does not fit.*h.7.tau", put(ADAPTER, model={"h.7.tau": torch.ones(2)})),
    (SAMPLE, "must be a plain name", put("toy_run/meta.json", tokenizer="../../evil")),
    (SAMPLE, "separator 300 is not an id", put("toy_run/meta.json", separator=300)),
    (SAMPLE, "not written by train.py", put("toy_run/meta.json", ends=[-1])),
    (SAMPLE, "not written by train.py", put("toy_run/meta.json", separator=1.5)),
    # runs that cannot be compared, found before the weights are read
    (
        SEVERAL,
        "training data .hash.: .* and 0.*--dataset",
        put("copy/meta.json", data_hash="0"),
        removed("run/ckpt.pt"),
    ),
    (
        SEVERAL,
        "block_size: 16 and 8.*--length",
        put("copy/meta.json", knobs={"block_size": 8}),
        removed("run/ckpt.pt"),
    ),
    (CURVES, "log.csv is damaged.*--png", written("run/log.csv", b"step,val_loss\n4,x\n")),
    (CURVES, "no curve.*--png", removed("run/log.csv")),
    # texts
    (f"{TEXT}blank.txt", "blank.txt.*is empty", written("blank.txt", b" \n")),
    (f"{TEXT}binary.bin", "binary.bin.*not text", written("binary.bin", b"\x7fELF\0\1")),
    (f"{TEXT}a.txt", "a.txt.*not text", written("a.txt", b"\xe9")),
    (f"{TEXT}b.jsonl", "b.jsonl.*line 2", written("b.jsonl", b'{"text": "a"}\n{"text": \n')),
    (
        f"{TEXT}one.jsonl --prompt=q --response=a",
        "documents .*1.* are held out, so nothing is left",
        written("one.jsonl", b'{"q": "Why?", "a": "So."}'),
    ),
    (f"{TEXT}one.txt", "one.txt.*too few to hold out", written("one.txt", b"x")),
    (f"{TEXT}plain.gz", "plain.gz.*damaged", written("plain.gz", b"x")),
    (CODED, "between two texts.*eos_token", removed("toy/meta.json")),
    (
        CODED,
        "pip install tokenizers",
        lambda patch: patch.setitem(sys.modules, "tokenizers", None),
    ),
    (
        OF_PAGES,
        "from other sources",
        edited("pages/some.jsonl", lambda b: b + b'{"text": "one more"}\n'),
    ),
    # public weights
    (HUB, "transformers cannot read", removed("llama/config.json")),
    (
        HUB,
        "transformers cannot read the weights",
        edited("llama/model.safetensors", lambda b: b[:5000]),
    ),
    (
        HUB,
        "model_type gemma is not among llama, gpt2",
        put("llama/config.json", model_type="gemma"),
    ),
    (
        HUB,
        "unexpected tensors, such as model.layers.1",
        put("llama/config.json", num_hidden_layers=1),
    ),
    (
        "data/weights.py export {softmax} back",
        "has no .*sink=logit",
        put("softmax/meta.json", knobs={"sink": "logit"}),
    ),
]
ROWS = [(line, INPUT, says, events) for line, says, *events in AFTER]
for (begins, code), rows in SAYS.items():
    for row in rows.strip().splitlines():
        flags, says = row.split("=> ")
        ROWS.append((f"{begins} {flags.strip()}", code, says, ()))


@pytest.mark.parametrize(
    "line, code, says, events", [pytest.param(*row, id=f"{row[0]} => {row[2]}") for row in ROWS]
)
def test_a_command_line_that_cannot_work_is_refused_in_one_line(
    line, code, says, events, prepared, monkeypatch
):
    argv = prepared(line)
    for event in events:
        event(monkeypatch)
    before = {path: path.is_file() and path.read_bytes() for path in Path("..").rglob("*")}
    ended, said = outcome(*argv)
    assert re.search(says, said) and ended == code and said.count("\n") == 1, said
    assert {path: path.is_file() and path.read_bytes() for path in Path("..").rglob("*")} == before


def attend(attn, rows=9, table=None):
    """Call a layer with 9 queries and keys, and with `rows` rows of its input x."""
    *qkv, x = inputs(module := layer(attn), 9)
    module.attend(*qkv, x[:, :rows], table)


def read(*recipes):
    """Read tokens with one recipe after another and the same cache."""
    models = [GPT(tiny_config(attn=attn)).eval() for attn in recipes]
    cache = models[0].new_cache()
    for gpt in models:
        gpt(torch.arange(5)[None], cache=cache)


ZEROS = torch.zeros(1, 4, dtype=torch.long)


def read_packed_documents_with_a_cache():
    gpt = GPT(tiny_config()).eval()
    gpt(ZEROS, cache=gpt.new_cache(), starts=ZEROS)


def measure_importance(attn, starts=None):
    GPT(tiny_config(attn=attn))(ZEROS, importance=True, starts=starts)


CALLS = [  # (what the error says, a function, its arguments)
    ("adds nothing to scores", attend, "retnet", 9, torch.zeros(2, 9)),
    ("x has 3 rows for 9", attend, "focus", 3),
    ("x has 8 rows for 9 keys", attend, "retnet", 8),
    ("another recipe", read, "softmax", "retnet"),
    ("a cache cannot continue packed", read_packed_documents_with_a_cache),
    ("several first keys", measure_importance, "softmax", ZEROS),
    *(("does not measure the importance", measure_importance, name) for name in ("tra", "retnet")),
    *(
        ("with ids in 0..30", GPT(tiny_config()).generate, torch.tensor([ids]).long(), 1)
        for ids in ([], [31], [-1])
    ),
    *(
        ("ids must lie in 0..65535", tokens.write_shard, Path("x.bin"), [ids])
        for ids in ([0, 65536], [-1, 5])
    ),
]


@pytest.mark.parametrize(
    "says, call, arguments", [(says, call, rest) for says, call, *rest in CALLS]
)
def test_a_call_that_cannot_work_says_why(says, call, arguments, prepared):
    prepared("")
    with pytest.raises(ValueError, match=says):
        call(*arguments)
    assert not [*Path().iterdir()]
