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
CONSTANTS = "0", "1", "2", "3", "0.5", "-1", "nan", "1e30", "all", "block", "learned", "", "1=2"


@st.composite
def any_choices(draw):
    """A combination of axes, and up to three fields of GPTConfig with any value."""
    choices = draw(combinations())
    axes = mixers.MIXERS[ATTENTIONS[choices["attn"]].get("mixer", "attention")].axes
    constants = {
        name
        for values in axes.values()
        for choice in values.values()
        for name in getattr(choice, "args", ())
    }
    values = (
        {
            field.name: field.metadata["choices"]
            or {bool: (False, True), str: ()}.get(field.type, NUMBERS)
            for field in dataclasses.fields(GPTConfig)
        }
        | mixers.AXES
        | {
            "rope_scaling": SCALINGS,
            "kernel": ("auto", "torch", "sdpa"),  # triton would take minutes
            "layers": (
                "softmax+kda",
                "gla+lazy,pos=none",
                "elastic,tau_init=0+diff,window=2",
                "softmax*2+sink_token",
            ),
            "attn_args": [f"{name}={value}" for name in sorted(constants) for value in CONSTANTS],
        }
    )
    names = draw(st.lists(st.sampled_from([name for name in values if values[name]]), max_size=3))
    return choices | {name: draw(st.sampled_from(list(values[name]))) for name in names}


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
    gpt, idx = GPT(config), torch.arange(min(9, config.block_size))[None] % config.vocab_size
    logits, loss = gpt(idx, idx)
    assert logits.isfinite().all() and loss.isfinite() and (gpt.penalized or gpt.penalty() == 0)
    if mixers.MIXERS[config.mixer].trains:
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in gpt.parameters())


@contextlib.contextmanager
def limited():
    """An allocation of more than MEMORY fails at once, so that no drawn number stops this machine.
    What hangs fails."""
    in_use, limit = (
        int(Path("/proc/self/statm").read_text().split()[0]) << 12,
        resource.getrlimit(resource.RLIMIT_AS),
    )
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
            MAIN[script]([*argv]) if script in MAIN else runpy.run_path(
                str(ROOT / script), run_name="__main__"
            )
            code = 0
        except SystemExit as e:
            code = e.code or 0
    err.flush()
    said = err.buffer.getvalue().decode()
    assert not os.path.exists(MARKER) and not [*Path().rglob(".*.tmp")]
    if code:
        errors = re.findall(rf"^{os.path.basename(script)}(?: \w+)?: error: .+$", said, re.M)
        assert (
            len(errors) == 1 and said.splitlines()[-1] == errors[0] and "Traceback" not in said
        ), said
    return code, said


def edited(path, change):
    """An event before a command, a function of monkeypatch: change(content) modifies a JSON file or
    a checkpoint in place, or returns the new bytes of another file."""

    def do(_):
        if Path(path).suffix not in (".json", ".pt"):
            return Path(path).write_bytes(change(Path(path).read_bytes()))
        found = (
            files.read_json(path)
            if Path(path).suffix == ".json"
            else torch.load(path, weights_only=True)
        )
        change(found)
        files.write_json(path, found) if Path(path).suffix == ".json" else torch.save(found, path)

    return do


def written(path, content):
    return lambda _: Path(path).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def removed(path):
    return lambda _: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


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
    if name == "pair":  # a LoRA adapter, and its run in the same parent folder
        train_here(
            f"--dataset={place('data')}", f"--out_dir={folder}/base", "--n_layer=2", "--max_iters=1"
        )
        train_here(
            f"--init_from={folder}/base",
            f"--out_dir={folder}/lora",
            "--train_only=lora",
            "--lora_rank=2",
            "--max_iters=1",
            "--eval_iters=1",
            "--batch_size=2",
            "--device=cpu",
        )
        edited(f"{folder}/lora/meta.json", lambda meta: meta["base"].update(path="base"))(None)
    elif name == "llama":  # a run exported in Hugging Face's layout
        pytest.importorskip("transformers")
        convert.main(["export", str(place("llama_run")), str(folder)])
    elif name == "pages":  # documents, and the data set that fineweb_edu.py makes from them
        folder.mkdir()
        folder.joinpath("some.jsonl").write_text(
            "".join(f'{{"text": "{f"page {n} " * 30}"}}\n' for n in range(40))
        )
        data_script(
            "fineweb_edu",
            f"--source={folder}/some.jsonl",
            f"--out_dir={folder}/made",
            "--tokenizer=bytes",
            "--shard_tokens=4000",
        )
    else:
        flags = [
            flag.format_map({key: place(key) for key in names_in(flag)})
            for flag in RUNS[name].split()
        ]
        train_here(f"--dataset={place('data')}", f"--out_dir={folder}", "--max_iters=1", *flags)


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
LONG = {
    "n_layer",
    "max_iters",
    "gradient_accumulation_steps",
    "eval_iters",
    "samples",
    "tokens",
    "trials",
    "limit",
}
SLOW = {"dataset", "sweep", "out_dir", "run", "finetune"}
A_RUN = [
    f"--device=cpu --out_dir={run}"
    for run in ("{run}", "{softmax}", "{focus}", "{learned}", "{run},{softmax}")
]
COMMANDS = {  # {a command: how its line begins}
    "train.py": ["{new}", "--init_from=resume --out_dir={run}", "--init_from={run} --out_dir=out"],
    **{
        f"eval.py {name}": A_RUN if name in eval_script.OF_A_RUN else [""]
        for name in eval_script.COMMANDS
    },
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
    name, groups = command.removeprefix("eval.py "), [Train, DryRun, GPTConfig, GPTConfig]
    if found := eval_script.COMMANDS.get(name):
        groups = (
            [found.flags] * 3
            + [Picture] * bool(found.draw)
            + [Common] * (name in eval_script.OF_A_RUN)
        )
    knobs = [field for group in groups for field in dataclasses.fields(group)]
    if name in eval_script.OF_A_RUN:
        knobs += [field for field in dataclasses.fields(GPTConfig) if field.name in OVERRIDES]
    knobs = st.sampled_from(knobs)
    for knob in data.draw(st.lists(knobs, max_size=4)):
        texts = SMALL if works and knob.name in LONG else TEXTS
        choices = list(ATTENTIONS if knob.name == "attn" else knob.metadata["choices"] or ())
        value = data.draw(texts | st.sampled_from(choices).map(str) if choices else texts)
        flag = f"--{knob.name[: data.draw(st.sampled_from((None, None, None, None, None, -1)))]}"
        if not (works and knob.name in SLOW):
            ways = [f"{flag}={value}"], [flag, value], [flag]
            argv += [value] if knob.metadata["positional"] else data.draw(st.sampled_from(ways))
    with pytest.MonkeyPatch.context() as patch:
        if not works:
            patch.setattr(files, "one_line_errors", sys.exit)
        code, _ = outcome(*argv)
    assert works or code in (0, FLAGS)


# flags, the last value that is refused, and the first that is accepted
BORDERS = {
    "train.py {new}": """n_layer n_head block_size bias_range window_every batch_size max_iters 0 1,
        gradient_accumulation_steps eval_interval eval_iters log_interval lora_rank 0 1, n_embd 0 2, n_embd 17 18,
        n_kv_head vocab_size window first topk head_dim n_inner warmup_iters lr_decay_iters grad_clip head_lr -1 0,
        weight_decay seed balance_skip -1 0, n_kv_head 3 2,
        block_size 2147483648 2147483647, dropout -0.001 0, dropout 1 0.999, norm_eps 0 1e-9, norm_eps 1 0.9,
        rope_base 0 0.1, rope_base inf 1e30, learning_rate 0 1e-9,
        learning_rate inf 1, learning_rate nan 1, min_lr nan 0, balance_shared beta1 beta2 -0.1 0,
        balance_shared beta1 beta2 1 0.9, mfu 0 0.1, mfu 1.1 1""",
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
            assert code == FLAGS and flag.rpartition("=")[2] in said and refused in said, (
                flag,
                border,
            )
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
    content, file = path.read_bytes(), io.BytesIO()
    if path.suffix in (".json", ".pt") and draw(st.integers(0, 2)):
        value = (
            json.loads(content) if path.suffix == ".json" else torch.load(path, weights_only=True)
        )
        damage(draw, value)
        if path.suffix == ".json":
            return json.dumps(value).encode()
        torch.save(value, file)
        return file.getvalue()
    near, new = draw(st.integers(0, min(300, len(content)))), draw(st.binary(max_size=9))
    at = draw(st.sampled_from((near, len(content) - near)))
    rest = content[at + draw(st.integers(0, 9)) :]
    return draw(
        st.sampled_from((content[:at], content[:at] + new + rest, b"", b"null", b"[" * 100_000))
    )


OF_A_RUN = [
    f"eval.py {look} --device=cpu --out_dir=RUN"
    for look in (
        "loss --windows=2",
        "loss --attn=softmax1",
        "probe --windows=2",
        "params",
        "sample --tokens=3",
    )
]
OF_A_RUN += [
    "train.py --init_from=resume --out_dir=RUN --max_iters=3",
    "data/weights.py export RUN out",
    "train.py --init_from=RUN --out_dir=out --max_iters=1 --dataset={data} --device=cpu --train_only=lora",
    "data/text.py --source={data}/val.bin --out_dir=out --tokenizer=RUN",
]
OF_DATA = [
    "train.py {new} --max_iters=1",
    *(
        f"eval.py {look} --out_dir={{run}} --dataset={{data}}"
        for look in ("loss --windows=2", "sample --tokens=3")
    ),
]
OF_PAGES = (
    "data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made "
    "--shard_tokens=4000 --train_shards=3"
)
READERS = {  # {a file: command lines that read it}
    **{
        f"{run}/{name}": [line.replace("RUN", run) for line in OF_A_RUN]
        for run in ("{run}", "{pair}/lora")
        for name in ("ckpt.pt", "meta.json")
    },
    "{run}/log.csv": [
        "train.py --init_from=resume --out_dir={run} --max_iters=9",
        "eval.py loss --windows=2 --png=out --out_dir={run}",
    ],
    **{f"{{data}}/{name}": OF_DATA for name in ("train.bin", "meta.json")},
    "{toy}/tokenizer.json": [
        "data/text.py --source={data}/val.bin --out_dir=out --tokenizer={toy}"
    ],
    "{pages}/made/meta.json": [OF_PAGES],
    "{pages}/some.jsonl": [
        "data/text.py --source={pages}/some.jsonl --tokenizer=bytes --out_dir=out"
    ],
}


@settings(max_examples=examples(4))
@given(data=st.data())
@pytest.mark.parametrize("path", READERS)
def test_a_command_that_reads_a_damaged_file_works_or_ends_in_one_line(path, data, prepared):
    *argv, path = prepared(f"{data.draw(st.sampled_from(READERS[path]))} {path}")
    Path(path).write_bytes(data.draw(damaged_file(Path(path))))
    outcome(*argv)


class Attack:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, (os.path.abspath(MARKER),)


SAYS = [  # (how a line begins, exit code, "its flags => the error says; ...")
    (
        "train.py {new}",
        FLAGS,
        """--bias=maybe => 'maybe' is not 0 or 1; --rope_scaling=linear:0 => write linear:FACTOR;
    --train_only=lora => a part of the model.*--init_from; --attn=elastic --attn_args=tau_init=nan => use a number;
    --attn=ttt --forget=channel => use --forget=none, fixed, dt or alpha; --attn=performer --rule=softmax => it accepts;
    --n_layr=1 => unknown flag --n_layr=1, did you mean --n_layer;
    --attn=elastic --sink=key => merged by log-sum-exp; --rope_scaling=linear:2 --pos=learned => needs rotary positions;
    --attn=elastic --attn_args=per_length=row => use 1 or 0, or block; --topk=2 => only mixer focus or selection has it;
    --attn_args=tau_init=1 => key 'tau_init': --attn=softmax accepts none; --attn=routing --window=4 => clusters decide;
    --attn=sink_token --window=8 => add --first=1; --normalize=sum => without a normaliser; --first=4 => add --window=N;
    --attn=kv_bias --attn_args=value_even=1 => add value_norm=NUMBER; --attn=magicpig --topk=8 => depends on its tables;
    --window_every=2 => add --window=N; --attn=retnet --write=dt => forget=dt; --head_balance=1 --n_head=1 => takes two;
    --attn=mamba2 --rule=delta => --write=dt has no bound; --head_balance=1 --balance_skip=1 => leave 0 of 1 x 2 heads;
    --head_balance=1 --attn=window --window=4 => add --first=1; --attn=deltanet --feature=elu => leave out --feature;
    --attn=streaming --window=4 --feature=elu => channels of their own; --attn=diff --n_head=1 => must both be even;
    --attn=mlp --normalize=sum => use --normalize=max1; --attn=deltanet --qk_norm=none => add --qk_norm=l2;
    --head_balance=1 --attn=elastic => neither.*--gate; --attn=sparq => then give --attn=sparq to eval.py;
    --dataset=no/such => choose from .*stdlib; --attn=gla --normalize=sum => either sign;
    --head_balance=1 --balance_form=all --balance_skip=1 => leave out --balance_skip;
    --bias_of=k => add --qkv_bias=1; --warmup_iters=99999999999999999999 => must be below 2..31;
    --layers=elastic+foo => 'foo' must be RECIPE.*softmax; --layers=softmax*100 => must be RECIPE;
    --layers=softmax*2 => names 2 layers, and n_layer=1: raise;
    --layers=elastic --attn=lazy => leave out --attn=lazy; --layers=softmax,window=x => must be a whole number;
    --layers=softmax+sink_token --n_layer=2 => sink=none, .* layer's sink=token: add --sink=VALUE .* or key_value;
    --layers=softmax+kda --n_layer=2 --head_balance=1 => neither.*--gate; --docs=1 --attn=routing => leave out --docs;
    --layers=softmax+kda --n_layer=2 --docs=1 => of mixer recurrent;
    --docs=1 --attn=sink_token => use --sink=key_value; --docs=1 --head_balance=1 => or leave out --docs""",
    ),
    (
        "train.py {new} --kernel=sdpa",
        INPUT,
        """--attn=elastic => use auto or torch; --attn=softmax1 => plain softmax;
    --attn=focus --window=4 => plain softmax; --attn=performer => plain softmax; --pos=alibi => plain softmax;
    --attn=softmax --n_head=4 --head_balance=0.5 => log-sum-exp of each row.*use auto or torch""",
    ),
    (
        "train.py {new} --kernel=triton",
        INPUT,
        """--dropout=0.1 => dropout; --n_embd=1024 => heads are wider than 256;
    --attn=routing => has no kernel; --attn=streaming --window=4 --n_embd=512 => heads are wider than 256;
    --attn=focus --window=4 => the soft gate of every pair has no kernel""",
    ),
    (
        "train.py {new}",
        INPUT,
        """--device=meta => choose cuda, mps or cpu;
    --vocab_size=256 => the data set .* needs 257;
    --preset=lab --dataset={symbols} --block_size=65 => have 64 tokens: lower --block_size""",
    ),
    (
        "train.py --init_from=resume --out_dir={run}",
        FLAGS,
        """--n_layer=2 => cannot resume with n_layer=2: leave out;
    --out_dir=no => no run in no""",
    ),
    (
        "train.py --out_dir=out",
        INPUT,
        """--init_from={run} --out_dir={run} => name another --out_dir for the new run;
    --init_from={learned} --block_size=32 => wpe.weight is .16, 16. in the .*.32, 16.;
    --init_from={toy_run} --dataset={data} => in the tokenizer of toy_run .toy.: .*--tokenizer=toy_run;
    --init_from={softmax} --attn=diff2 => does not fit --attn=diff2: .*c_attn.*as elastic and softmax have;
    --init_from={pair}/base --train_only=lora --qkv_bias=1 --bias_of=k => leave out one;
    --init_from={pair}/base --train_only=focus => --attn=softmax adds nothing.*--attn=focus;
    --init_from={pair}/base --train_only=lora --attn=elastic => h.0.attn.tau is not in .*base.*initial value""",
    ),
    (
        "eval.py",
        FLAGS,
        """=> which command. .*: loss, lengths; prob => 'prob', did you mean probe. .*-h;
    bench --out_dir=x => which tasks. give --tasks; loss => which run. give --out_dir;
    theory --seed=-1 => must be at least 0; maps --out_dir=x --text=' ' => --text is empty;
    heads --out_dir=x --prune=1,x => '1,x' must be whole;
    board --train_args=--n_layer=1 => a folder of their own; board --dataset=x => a folder of their own;
    board --rates=2e-3,x => 2e-3,x must be numbers;
    board --seeds=1,2 => 1 only chooses; board --attn=nothing => nothing""",
    ),
    (
        "eval.py",
        INPUT,
        """loss --out_dir={run} --dataset={toy_data} => in the tokenizer of run .*--tokenizer=bytes;
    loss --out_dir={run} --attn=softmax => does not fit.*tau; probe --out_dir={symbols_run} --input=bos => no separator;
    loss --out_dir={symbols_run} --length=65 => 64 tokens; lengths --out_dir={run} --lengths=24,64 => 24,64.*divide.*64;
    probe --out_dir={run} --k=17 => window has 16 tokens; passkey --out_dir={run} --lengths=200 => garbage.*at least;
    groups --out_dir={focus} --against={short_focus} => 4 groups in each of 1 layers, where .*focus has 4;
    routers --out_dir={focus} --k=5 => 1 to 4 groups; passkey --out_dir={symbols_run} => trained on text;
    loss --out_dir={learned} --length=17 => its block_size=16 positions""",
    ),
    ("data/text.py --out_dir=out", FLAGS, "=> give --source FILE or FOLDER"),
    (
        "data/text.py --tokenizer=bytes",
        INPUT,
        """--source={toy} --val tokenizer meta => holds out everything;
    --source={toy} --val zulu => --val zulu: no such file in; --source={toy} --name=stdlib => is the name of a script;
    --source=missing => --source=missing does not exist; --source={toy} --fixed_at=6 --length=6 => in 0..5""",
    ),
    (
        "data/text.py --source={toy} --out_dir=out",
        INPUT,
        """--tokenizer=nowhere => choose from bytes, gpt2;
    --tokenizer=numbers => for symbols, not for text;
    --tokenizer=gpt2-256 => 257 to 50257 ids""",
    ),
    ("data/backcopy.py --out_dir=out", INPUT, "--fixed_at=99 => in 0..64, or -1"),
    (
        "data/stdlib.py --source=. --out_dir=out",
        INPUT,
        "=> 0 Python files under .* are too few .*--source",
    ),
    ("data/weights.py", FLAGS, "=> NAME.FOLDER.FILE"),
    (
        "data/weights.py",
        INPUT,
        """no/such => neither a folder with config.json nor a .gguf;
    {llama}/model.safetensors --out=out => neither a folder; export {llama_run} {llama} => exists: name a new;
    {llama} --out={llama} => name another one; {llama} --out={run} => holds a run that was trained""",
    ),
]


def small_host(patch):
    patch.setattr("common.machine.host_memory", lambda: 10e9)


def pipe(path):
    return lambda _: (Path(path).unlink(), os.mkfifo(path))


LOSS, RESUME = (
    "eval.py loss --out_dir={run}",
    "train.py --init_from=resume --max_iters=9 --out_dir={run}",
)
SAMPLE, LORA = "eval.py sample --tokens=2 --out_dir={toy_run}", LOSS.replace("{run}", "{pair}/lora")
TEXT = "data/text.py --out_dir=out --tokenizer=bytes"
AFTER = [  # (a command line, rows: what the error says, events before it)
    (
        "train.py {new} --kernel=triton",
        [("needs triton", lambda patch: patch.setattr(kernels, "AVAILABLE", False))],
    ),
    (
        "train.py {new}",
        [
            ("val.*block_size", lambda _: write_data(Path("data"), WORDS, WORDS[:16])),
            ("train.*no tokens.*make", lambda _: write_data(Path("data"), [], WORDS)),
            ("train.bin is missing.*make", removed("data/train.bin")),
            ("val.bin.*damaged.*make", edited("data/val.bin", lambda content: content[:-100])),
            ("train.bin.*not a token file.*make", written("data/train.bin", b"PNG" * 1000)),
            ("val.bin is not a regular file", pipe("data/val.bin")),
            ("meta.json.*make", written("data/meta.json", "{")),
            (
                "meta.json lacks vocab_size, tokenizer or",
                edited("data/meta.json", lambda meta: meta.update(separator=-1)),
            ),
            (
                "meta.json lacks vocab_size, tokenizer or",
                edited(
                    "data/meta.json",
                    lambda meta: meta["shards"].update(
                        {"../run/ckpt.pt": {"tokens": 1, "sha256": ""}}
                    ),
                ),
            ),
        ],
    ),
    *(
        (f"train.py {{new}} {flag}", [(says, small_host)])
        for flag, says in (
            ("--eval_iters=100", "asks for 400 windows, and .* holds 249: give at most 62"),
            (
                "--gradient_accumulation_steps=2000000000",
                "tokens of a step need 1,088.0 GB of memory, .*: lower it",
            ),
            (
                "--n_layer=300000",
                "parameters, 3,104 in each of n_layer=300000 blocks, needs 26.9 GB .* 10.0 GB: lower",
            ),
        )
    ),
    (
        "train.py {new} --docs=1",
        [("data/train does not begin with a document's separator.*leave out --docs",)],
    ),
    (
        RESUME,
        [
            (
                "data set ./data has changed since run began",
                lambda _: write_data(Path("data"), WORDS[:9000], WORDS[:900]),
                edited("run/meta.json", lambda meta: meta["knobs"].update(dataset="./data")),
            ),
            (
                "process 1 on .* trains in .*, delete .*lock",
                written("run/lock", f"process 1 on {socket.gethostname()}"),
            ),
            ("log.csv is not a regular file", pipe("run/log.csv")),
            *(
                ("optimizer state does not fit the model: .*--init_from", event)
                for event in (
                    edited(
                        "run/ckpt.pt", lambda found: found["optimizer"]["param_groups"].reverse()
                    ),
                    edited(
                        "run/ckpt.pt",
                        lambda found: found["optimizer"]["state"][0].update(
                            exp_avg=torch.ones(2, 2)
                        ),
                    ),
                    edited(
                        "run/ckpt.pt",
                        lambda found: found["optimizer"].update(
                            state={0: {"exp_avg": torch.eye(2).to_sparse()}}
                        ),
                    ),
                )
            ),
        ],
    ),
    (
        LOSS,
        [
            *(
                ("ckpt.pt was not written by train.py", edited("run/ckpt.pt", change))
                for change in (
                    lambda found: found.update(step=-1),
                    lambda found: found.update(optimizer=[]),
                )
            ),
            (
                "attn.tau",
                edited("run/ckpt.pt", lambda found: found["model"].pop("transformer.h.0.attn.tau")),
            ),
            (
                "other than dense tensors",
                edited("run/ckpt.pt", lambda m: m["model"].update(x=torch.eye(2).to_sparse())),
            ),
            ("not a readable checkpoint", written("run/ckpt.pt", b"PK")),
            (
                "not a readable checkpoint",
                edited("run/ckpt.pt", lambda found: found.update(model=Attack())),
            ),
            (
                "not a readable checkpoint",
                lambda _: pickle.dump({"model": Attack()}, open("run/ckpt.pt", "wb")),
            ),
            ("ckpt.pt is not a regular file", pipe("run/ckpt.pt")),
            ("no run in run .no meta.json there.: train", removed("run/meta.json")),
            ("the run has saved no checkpoint yet", removed("run/ckpt.pt")),
            (
                "meta.json was not written by train.py",
                edited("run/meta.json", lambda m: m.update(base={"path": 3})),
            ),
            *(
                (says, edited("run/meta.json", lambda m, knobs=knobs: m["knobs"].update(knobs)))
                for says, knobs in (
                    ("transformer.h.1", {"n_layer": 2}),
                    ("attn=x.*softmax", {"attn": "x"}),
                    ("n_layer='x' must be of type int", {"n_layer": "x"}),
                    ("must be a plain name", {"dataset": "*"}),
                )
            ),
        ],
    ),
    (
        LORA,
        [
            (
                "trained on top of the run base, which is neither there nor in .*/base: restore",
                removed("pair/base"),
            ),
            *(
                (says, edited(f"pair/{name}/ckpt.pt", change))
                for name, says, change in (
                    (
                        "base",
                        "adapter for other weights",
                        lambda found: found["model"]["transformer.ln_f.weight"].add_(1),
                    ),
                    (
                        "lora",
                        "does not fit.*c_pr",
                        lambda found: found["model"].pop("transformer.h.1.attn.c_proj.lora_b"),
                    ),
                    (
                        "lora",
                        "does not fit.*h.7.tau",
                        lambda found: found["model"].update({"h.7.tau": torch.ones(2)}),
                    ),
                )
            ),
        ],
    ),
    (
        SAMPLE,
        [
            (says, edited("toy_run/meta.json", lambda meta, wrong=wrong: meta.update(wrong)))
            for says, wrong in (
                ("must be a plain name", {"tokenizer": "../../evil"}),
                ("separator 300 is not an id", {"separator": 300}),
                ("not written by train.py", {"ends": [-1]}),
                ("not written by train.py", {"separator": 1.5}),
            )
        ],
    ),
    (
        "eval.py loss --out_dir={run} --png=out --windows=2",
        [
            ("log.csv is damaged.*--png", written("run/log.csv", "step,val_loss\n4,x\n")),
            ("no curve.*--png", removed("run/log.csv")),
        ],
    ),
    *(
        (f"{TEXT} --source={name}", [(f"{name}.*{says}", written(name, content))])
        for name, says, content in (
            ("blank.txt", "is empty", " \n"),
            ("binary.bin", "not text", b"\x7fELF\0\1"),
            ("a.txt", "not text", b"\xe9"),
            ("line.jsonl", "line 2", '{"text": "a"}\n{"text": \n'),
            ("one.txt", "too few to hold out", "x"),
            ("plain.gz", "damaged", "x"),
        )
    ),
    (
        f"{TEXT} --source={{toy}} --tokenizer={{toy}}",
        [
            ("between two texts.*eos_token", removed("toy/meta.json")),
            (
                "pip install tokenizers",
                lambda patch: patch.setitem(sys.modules, "tokenizers", None),
            ),
        ],
    ),
    (
        OF_PAGES,
        [
            (
                "from other sources",
                edited("pages/some.jsonl", lambda b: b + b'{"text": "one more"}\n'),
            )
        ],
    ),
    (
        "data/weights.py {llama} --out=out",
        [
            ("transformers cannot read", removed("llama/config.json")),
            (
                "transformers cannot read the weights",
                edited("llama/model.safetensors", lambda b: b[:5000]),
            ),
            *(
                (says, edited("llama/config.json", lambda config, new=new: config.update(new)))
                for says, new in (
                    ("model_type gemma is not among llama, gpt2", {"model_type": "gemma"}),
                    ("unexpected tensors, such as model.layers.1", {"num_hidden_layers": 1}),
                )
            ),
        ],
    ),
    (
        "data/weights.py export {softmax} back",
        [
            (
                "has no .*sink=logit",
                edited("softmax/meta.json", lambda m: m["knobs"].update(sink="logit")),
            )
        ],
    ),
]
ROWS = [
    (f"{begins} {row.split('=> ')[0].strip()}", code, row.split("=> ")[1], ())
    for begins, code, text in SAYS
    for row in text.split(";")
]
ROWS += [(line, INPUT, says, events) for line, rows in AFTER for says, *events in rows]


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


CALLS = [  # (what the error says, a function, its arguments)
    ("adds nothing to scores", attend, "retnet", 9, torch.zeros(2, 9)),
    ("x has 3 rows for 9", attend, "focus", 3),
    ("x has 8 rows for 9 keys", attend, "retnet", 8),
    ("another recipe", read, "softmax", "retnet"),
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
