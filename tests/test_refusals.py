"""Refusals: a command line that cannot work ends with one line that says what was given, what is allowed, and what to
type. No file changes.

A row of REFUSALS is (the rest of a command line, a pattern of the line on stderr, events before the command).
"""
import gzip
import json
import os
import pickle
import re
import runpy
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, WORDS, assert_says, complain, run, tiny_config, train_here, write_data, write_tokenizer

import kernels
import eval as eval_script
import mixers
import train as train_script
from common import files
from data import benchmarks, tokens
from data import weights as weights_script
from evals import claims
from evals.ledger import experiments
from model import GPT
from pretrained import convert

# one worker makes all runs and data sets of the table
pytestmark = pytest.mark.xdist_group("refusals")

# ----------------------------------------------------------------------------------------- events before the command


class Before(NamedTuple):
    """An event before the command, such as damage to a file."""
    what: str
    do: object                                  # do(monkeypatch), called in the command's folder


def written(path, content):
    """A file gets this content: bytes, text, or an object to write as JSON."""
    def do(_):
        if not isinstance(content, bytes | str):
            return files.write_json(path, content)
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return Before(f"{path} holds {str(content)[:40]}", do)


def changed(path, what, change):
    """A file's bytes are replaced by change(bytes)."""
    return Before(f"{path} {what}", lambda _: Path(path).write_bytes(change(Path(path).read_bytes())))


def cut(path, end):
    return changed(path, f"cut at {end}", lambda content: content[:end])


def removed(path):
    return Before(f"{path} removed", lambda _: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink())


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
    return changed(path, f"with {entries}", edit)


def edited_knobs(path, **knobs):
    return edited(path, "knobs", **knobs)


def saved(path, what, change):
    """A checkpoint is replaced by change(checkpoint)."""
    return Before(f"{path} {what}", lambda _: torch.save(change(torch.load(path, weights_only=True)), path))


def weights_changed(path, what, change):
    """The weights of a checkpoint are modified in place by change(weights)."""
    def whole(checkpoint):
        change(checkpoint["model"])
        return checkpoint
    return saved(path, what, whole)


def of_tokens(path, train, val, vocab_size=257):
    """A data set is replaced by one with these tokens."""
    return Before(f"{path} of {len(train)} and {len(val)} tokens",
                  lambda _: write_data(Path(path), train, val, vocab_size))


def without(package):
    return Before(f"{package} not installed", lambda monkeypatch: monkeypatch.setitem(sys.modules, package, None))


def on_machine(what, *patches):
    """Attributes of modules are replaced. A patch is (module, name, value)."""
    def do(monkeypatch):
        for patch in patches:
            monkeypatch.setattr(*patch)
    return Before(what, do)


def offline(monkeypatch):
    """The proxies are at port 9, where no server listens. tiktoken's cache is empty."""
    for name, value in {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "",
                        "TIKTOKEN_CACHE_DIR": os.path.abspath("cache")}.items():
        monkeypatch.setenv(name, value)


NO_TRITON = on_machine("no triton", (kernels, "AVAILABLE", False))
NO_GPU = on_machine("no GPU", (torch.cuda, "is_available", lambda: False))
OFFLINE = Before("no network", offline)


def fail_to_save(*args):
    raise RuntimeError("no space")


def grown(found):
    """A checkpoint in which one average of AdamW has twice as many rows as its weight."""
    found["optimizer"]["state"][0]["exp_avg"] = found["optimizer"]["state"][0]["exp_avg"].repeat(2, 1)
    return found


class Stranger:
    """A class that a pickle can contain and a checkpoint must not contain."""


def header(*numbers, length=256):
    """The header of a shard."""
    return np.array(list(numbers) + [0] * (length - len(numbers)), "<i4").tobytes()


def as_int8(content):
    """A .safetensors file with model.norm.weight in int8."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load(content)
    return safetensors.save(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)})


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def task_file(name, *rows):
    """The file of a benchmark's task gets these rows."""
    return written(f"questions/{benchmarks.TASKS[name].file}", jsonl(*rows))


SPEECH = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 300}, "merges": []}, "added_tokens": []}
FULL_DISK = Before("full disk", lambda monkeypatch: monkeypatch.setattr(torch, "save", fail_to_save))
EMPTY_ZIP = b"PK\5\6" + bytes(18)
SMALL_PUBLIC = Before("smollm2 is small", lambda monkeypatch: monkeypatch.setitem(
    convert.PUBLIC, "smollm2", convert.PUBLIC["smollm2"]._replace(n_layer=2, n_embd=16)))

# -------------------------------------------------------------------------------------- folders that a row can name

# {name} in a command line stands for a copy of one of these folders. {new} stands for the flags of a small new run on
# {data} with --out_dir={run}, the folder of a finished run
SHORT = {"{new}": " ".join([*TINY, "--dataset={data}", "--out_dir={run}"])}

FIXTURES = {"run": "elastic_run", "copy": "elastic_run", "data": "data", "symbols": "backcopy", "toy": "toy",
            "toy_data": "toy_data", "toy_run": "toy_run"}
RUNS = {                                        # finished runs of one step: {name: flags}
    "softmax": "--attn=softmax", "learned": "--pos=learned --bias=1", "focus": "--attn=focus --window=4 --n_layer=2",
    "short_focus": "--attn=focus --window=4",
    "symbols_run": "--dataset={symbols}", "llama_run": "--n_layer=2 --n_head=4 --n_kv_head=2 --norm=rmsnorm "
    "--mlp=swiglu"}


def make_pair(folder, place):
    """A run and a LoRA adapter on it. The adapter finds the run in the same parent folder."""
    train_here(f"--dataset={place('data')}", f"--out_dir={folder}/base", "--n_layer=2", "--max_iters=1")
    train_here(f"--init_from={folder}/base", f"--out_dir={folder}/lora", "--train_only=lora", "--lora_rank=2",
               "--max_iters=1", "--eval_iters=1", "--batch_size=2", "--device=cpu")
    edited(f"{folder}/lora/meta.json", "base", path="base").do(None)


def make_llama(folder, place, run="llama_run"):
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
    (folder / "some.jsonl").write_text(jsonl(*({"text": f"page {n} " * 30} for n in range(40))))
    run("data/fineweb_edu.py", f"--source={folder}/some.jsonl", f"--out_dir={folder}/made", "--tokenizer=bytes",
        "--shard_tokens=4000")


MAKE = {
    "pair": make_pair, "llama": make_llama, "gpt2": partial(make_llama, run="learned"), "gguf": make_gguf,
    "questions": make_questions, "scrolls": make_scrolls, "pages": make_pages,
    "no_separator": lambda folder, place: write_tokenizer(folder)}      # without a config, no separator is named


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


def names_in(line):
    return re.findall(r"{(\w+)}", line)


# ------------------------------------------------------------------------------------------------------------ the table

FLAGS, INPUT = 2, 1                             # exit codes: a flag is wrong; a run, data or the machine does not fit


def whole(*lines):
    """Rows for command lines whose last flag must be a list of whole numbers."""
    flags = [line.rsplit("--", 1)[1].split("=") for line in lines]
    return [(line, f"--{flag}='{value}' must be whole numbers separated by commas")
            for line, (flag, value) in zip(lines, flags, strict=True)]


def must(be, *flags):
    """Rows for flags whose message says which numbers are allowed."""
    return [(f"--{flag}", rf"{flag}(\.0)? must {be}") for flag in flags]


REFUSALS = [                                    # (how a command line begins, exit code, rows)
    # ------------------------------------------------------------------------------------------------ train.py: flags
    ("train.py {new}", FLAGS, [
        ("--nonsense=1", "unknown flag --nonsense=1.*; valid flags: .*--n_layer"),
        ("--n_layr=1", "did you mean --n_layer"),
        ("nonsense", "unknown flag nonsense; valid flags"),
        ("--n_layer", "--n_layer: expected one argument"),
        ("--n_layer=two", "--n_layer: invalid int value: 'two'"),
        ("--bias=maybe", "--bias: 'maybe' is not 0 or 1"),
        ("--learning_rate=fast", "--learning_rate: invalid float value: 'fast'"),
        ("--attn=nonsense", "softmax.*elastic"),
        ("--pos=nonsense", "rope.*none.*learned"),
        ("--rule=nonsense", "softmax.*elastic"),
        ("--mlp=nonsense", "swiglu"),
        ("--norm=nonsense", "rmsnorm"),
        ("--kernel=nonsense", "sdpa"),
        ("--dtype=int8", "bfloat16"),
        ("--preset=nonsense", "tiny"),
        ("--train_only=mlp", "mlp.*all.*focus.*lora"),
        ("--lora_on=mlp", "mlp.*both.*c_attn.*c_proj"),
        ("--dataset=nonsense", "unknown --dataset=nonsense: choose from .*stdlib.* or name a folder by its path"),
        ("--dataset=no/such/folder", "no/such/folder.*stdlib"),
        # sizes
        *must("be at least 1", "n_layer=0", "n_layer=-1", "n_head=0", "n_embd=-16", "n_embd=0", "n_kv_head=-1",
              "block_size=0", "vocab_size=-1", "bias_range=0"),
        *must("be at least 0", "window=-1"),
        *must("not be negative", "head_dim=-1", "n_inner=-1"),
        *must(r"be below 2\*\*31", f"n_embd={1 << 31}", f"vocab_size={10 ** 30}"),
        *must(r"lie in \[0, 1\)", "dropout=1", "dropout=-0.1"),
        *must("lie between 0 and 1", "norm_eps=0"),
        *must("be a positive number", "rope_base=0", "rope_base=inf"),
        *must(r"lie in \(0, 1\]", "rope_share=0", "rope_share=1.5"),
        ("--n_embd=17", "n_embd=17 is not divisible by n_head=2"),
        ("--n_kv_head=3", "n_head=2 is not divisible by n_kv_head=3"),
        # how to train
        *must("be a number of at least 1", "batch_size=0", "max_iters=0", "max_iters=-1",
              "gradient_accumulation_steps=0", "eval_interval=0", "eval_iters=0", "log_interval=0", "lora_rank=0"),
        *must("be a number of at least 0", "warmup_iters=-1", "grad_clip=-1", "head_lr=-1", "weight_decay=-1",
              "seed=-1"),
        ("--learning_rate=0", "--learning_rate=0.0 .*must be numbers, the first above 0"),
        ("--learning_rate=nan", "--learning_rate=nan .*must be numbers"),
        ("--learning_rate=inf", "--learning_rate=inf .*must be numbers"),
        ("--min_lr=nan", "--min_lr=nan must be numbers"),
        ("--beta1=-1", r"--beta1=-1.0 and --beta2=0.95 must lie in \[0, 1\)"),
        ("--beta2=1", r"--beta2=1.0 must lie in \[0, 1\)"),
        ("--train_only=lora", "trains only a part of the model.*--init_from"),
        ("--mfu=0", r"--mfu=0.0 must lie in \(0, 1\]"),
        ("--mfu=40", r"--mfu=40.0 must lie in \(0, 1\]"),
        ("--gpu=nonsense", "H100.*A100"),
        # a mixture of experts
        ("--expert_balance=0.1", "balances experts, which --mlp=gelu does not have: add --mlp=moe"),
        ("--mlp=moe --expert_balance=-1", "--expert_balance=-1.0 must be a number of at least 0"),
        ("--mlp=moe --n_expert=4 --n_active=5", "n_active=5 is more than n_expert=4"),
        ("--mlp=moe --n_active=0", "n_active=0 must be at least 1"),
        # constants of a recipe
        ("--attn=softmax --attn_args=tau_init=1", "unknown --attn_args key 'tau_init': this recipe accepts none"),
        ("--attn=elastic --attn_args=nonsense=1", "unknown --attn_args key 'nonsense': .*tau_init"),
        ("--attn=elastic --attn_args=speed=3", "per_length"),
        ("--attn=elastic --attn_args=tau_init=much", "write tau_init=NUMBER.*not 'much'"),
        ("--attn=elastic --attn_args=tau_init=nan", "write tau_init=NUMBER.*not 'nan'"),
        ("--attn=elastic --attn_args=tau_init", "write tau_init=NUMBER.*not ''"),
        ("--attn=elastic --attn_args=learn_tau=maybe", "learn_tau=maybe: use 1 or 0"),
        ("--attn=elastic --attn_args=per_length=row", "per_length=row: use 1 or 0, or block"),
        # positions
        *((f"--rope_scaling={text}", "write linear:FACTOR or ntk:RATIO or llama3:FACTOR,LOW,HIGH,ORIGINAL with L")
          for text in ("ntk", "linear", "linear:x", "linear:0", "llama3:8,1,4", "llama3:inf,1,4,8192",
                       "llama3:8,4,4,8192", "yarn:8,1,4,9")),
        ("--rope_scaling=linear:2 --pos=learned", "--rope_scaling=linear:2 needs rotary positions.*--pos=rope"),
        # choices that cannot be combined
        ("--attn=elastic --sink=one", "--sink=one needs --rule=softmax"),
        ("--attn=elastic --sink=key", "merged by log-sum-exp, and rule elastic has none"),
        ("--attn=softmax --normalize=sum", "rules without a normaliser of their own"),
        ("--attn=diff --n_head=1", "n_head=1 and n_kv_head=1 must both be even"),
        ("--attn=softmax --first=4", "--first=4 .*add --window=N"),
        ("--attn=softmax --window_every=2", "--window_every=2 .*add --window=N"),
        ("--attn=sink_token --window=8", "cannot be seen beyond --window: add --first=1"),
        ("--attn=mlp --normalize=sum", "use --normalize=max1"),
        ("--attn=kv_bias --attn_args=value_even=1", "value_even=1 needs .*add value_norm=NUMBER"),
        ("--attn=k_bias --attn_args=bias_dims=1.7", "bias_dims=1.7 must be a whole number, at most"),
        ("--attn=v_bias --attn_args=bias_dims=99", "bias_dims=99 must be .*at most a head's 8 channels"),
        ("--attn=streaming --window=4 --feature=elu", "channels of their own"),
        ("--attn=softmax --forget=fixed", "--forget=fixed cannot be used with .*only mixer recurrent has it"),
        ("--topk=2", "topk=2 cannot be used with .*mixer attention"),
        ("--balance=ema", "balance=ema cannot be used with .*mixer attention")]),
    ("train.py {new} --attn=focus", FLAGS, [
        ("--window=16", "block_size=16 is no longer than --window=16.*would learn nothing"),
        ("--window=0", "give --window=1 or more"),
        ("--window=4 --topk=5", "--topk=5 is more than the 4 groups: lower it, or raise --attn_args=groups=NUMBER"),
        ("--window=4 --attn_args=groups=1", "one group there is nothing to learn"),
        ("--window=4 --attn_args=groups=20", "more groups than the 16 tokens"),
        ("--window=4 --attn_args=groups=0", "groups=WHOLE NUMBER"),
        ("--window=4 --attn_args=group=8", "'group': this recipe accepts .*groups"),
        ("--window=4 --rule=elastic", "cannot be used with .*mixer focus.*log-sum-exps"),
        ("--window=4 --pos=alibi", "sorts the keys"),
        ("--window=4 --window_every=2", "each layer has a router"),
        ("--window=4 --first=1", "--first=1 cannot be used with --attn=focus"),
        ("--window=4 --sink=token", "it accepts none, one, logit"),
        ("--window=4 --head_balance=0.1", "has neither")]),
    ("train.py {new} --attn=routing", FLAGS, [
        ("--rule=elastic", "it accepts softmax"),
        ("--window=4", "clusters decide"),
        ("--pos=alibi", "use rope"),
        ("--attn_args=clusters=0", "from 1 to")]),
    ("train.py {new} --attn=performer", FLAGS, [
        ("--rule=softmax", "--rule=softmax cannot be used with --attn=performer"),
        ("--normalize=none", "it accepts sum"),
        ("--window=4", "a state holds no keys"),
        ("--attn_args=features=-1", "features=WHOLE NUMBER from 0")]),
    ("train.py {new} --attn=sparq", FLAGS, [
        ("--topk=8", "--attn=sparq selects keys .*train with --attn=softmax, then give --attn=sparq to eval.py"),
        ("--window=4", "selects among all earlier keys"),
        ("--pos=alibi", "know nothing of a bias by distance"),
        ("--rule=elastic", "selects keys for softmax"),
        ("--attn_args=components=0", "from 1 to")]),
    ("train.py {new} --attn=magicpig", FLAGS, [
        ("--topk=8", "depends on its tables"),
        ("--attn_args=tables=1", "from 2 to")]),
    ("train.py {new} --attn=retnet", FLAGS, [
        ("--window=8", "a state holds no keys"),
        ("--sink=one", "nothing to take"),
        ("--pos=alibi", "no score"),
        ("--diff=v2", "no weights to subtract"),
        ("--rule=elastic", "it accepts add"),
        ("--attn_args=chunk=0", "from 1 to"),
        ("--attn_args=chunk=2.5", "chunk=WHOLE NUMBER"),
        ("--mixer=attention", "softmax, elastic"),
        ("--write=dt", "forget=dt")]),
    ("train.py {new}", FLAGS, [
        ("--attn=mamba2 --rule=delta", "--write=dt has no bound"),
        ("--attn=deltanet --qk_norm=none", "--rule=delta needs unit-length keys: add --qk_norm=l2"),
        ("--attn=deltanet --feature=elu", "unit-length keys, and --feature=elu changes .*: leave out --feature"),
        ("--attn=ttt --forget=channel", "one rate per head: use --forget=none, fixed, dt or alpha"),
        ("--attn=gla --normalize=sum", "either sign")]),
    ("train.py {new} --head_balance=0.1", FLAGS, [
        ("--attn=elastic", "neither.*--gate"),
        ("--attn=diff2", "neither.*--gate"),
        ("--attn=window --window=4", "add --first=1"),
        ("--attn=softmax --balance_skip=1", "leave 0 of 1 x 2 heads"),
        ("--attn=softmax --balance_shared=-1", "--balance_shared=-1.0 must be a number of at least 0"),
        ("--attn=softmax --balance_shared=1.5", "--balance_shared=1.5 must be below 1"),
        ("--attn=softmax --balance_form=all --balance_skip=1", "balances all heads: leave out --balance_skip"),
        ("--attn=softmax --balance_form=all --n_head=1", "takes two")]),
    # -------------------------------------------------------------------------------------- train.py: machine and data
    ("train.py {new}", INPUT, [
        ("--device=nonsense", "--device=nonsense cannot be used here"),
        ("--device=meta", "--device=meta .*choose cuda, mps or cpu"),
        ("--attn=elastic --kernel=sdpa", "--kernel=sdpa: .*plain softmax only.*use auto or torch"),
        *((f"--attn={attn} --kernel=triton", "--kernel=triton: it needs triton and a CUDA GPU, or TRITON_INTERPRET=1",
           NO_TRITON) for attn in ("softmax", "elastic")),
        ("--kernel=triton --dropout=0.1", "--kernel=triton: .*dropout; use auto or torch"),
        ("--kernel=triton --n_embd=1024", "heads are wider than 256"),
        ("--attn=focus --window=4 --kernel=triton", "the soft gate of every pair has no kernel"),
        ("--attn=focus --window=4 --topk=2 --n_embd=1024 --kernel=triton", "heads are wider than 256"),
        ("--attn=focus --window=4 --kernel=sdpa", "plain softmax only"),
        ("--attn=routing --kernel=sdpa", "plain softmax only"),
        ("--attn=routing --kernel=triton", "mixer routing has no kernel"),
        ("--attn=performer --kernel=triton", "mixer performer has no kernel"),
        ("--attn=performer --kernel=sdpa", "it computes plain softmax only, not --attn=performer"),
        ("--attn=retnet --kernel=sdpa", "plain softmax only"),
        ("--attn=ttt --kernel=triton", "rule descent of a state has no kernel"),
        ("--attn=gla --n_embd=1024 --kernel=triton", "heads are wider than 256"),
        ("--vocab_size=100", "vocab_size=100 ids, the data set .* needs 257"),
        ("--block_size=20000", "train holds 20000 tokens, too few for one window of block_size=20000"),
        ("--preset=lab --dataset={symbols} --block_size=65",
         "block_size=65, but the sequences of .*symbols have 64 tokens: lower --block_size"),
        # damaged data
        ("", "train.bin is missing.*(run|make)", removed("data/train.bin")),
        ("", "train.bin is missing: make it with", removed("data/train.bin"),
         edited("data/meta.json", "shards", **{"train.bin": ...})),
        ("", "meta.json is missing.*make", removed("data/meta.json")),
        ("", "train.bin.*run", written("data/train.bin", b"")),
        ("", "val.bin.*damaged.*run", cut("data/val.bin", 1024)),
        ("", "val.bin.*damaged.*run", cut("data/val.bin", -100)),
        ("", "val.bin.*damaged.*run", changed("data/val.bin", "with two more bytes", lambda b: b + b"xx")),
        ("", "train.bin.*no token file.*run", written("data/train.bin", b"PNG" * 1000)),
        ("", "train.bin.*no token file.*run", changed("data/train.bin", "without header", lambda b: b[1024:])),
        ("", "train.bin.*sha256.*run", changed("data/train.bin", "with another end", lambda b: b[:-2] + b"\x01\x00")),
        ("", "meta.json.*make", cut("data/meta.json", 50)),
        ("", "meta.json.*make", written("data/meta.json", b"")),
        ("", "meta.json.*make", written("data/meta.json", bytes(range(128, 256)))),
        ("", "meta.json.*make", written("data/meta.json", [1, 2])),
        ("", "meta.json.*shards.*make", edited("data/meta.json", shards=...)),
        ("", "meta.json.*vocab_size.*make", edited("data/meta.json", vocab_size=...)),
        *(("", "meta.json lacks vocab_size, tokenizer or shards", edited("data/meta.json", **wrong)) for wrong in (
            {"vocab_size": 257.5}, {"vocab_size": 0}, {"vocab_size": 1 << 40}, {"tokenizer": {}}, {"stride": "x"},
            {"stride": 0}, {"shards": {"train.bin": 3}}, {"shards": {"train.bin": {"tokens": 1, "sha256": None}}},
            {"shards": {"train.bin": {"tokens": 1, "sha256": "x", "bytes": []}}})),
        ("", "meta.json is not valid JSON", written("data/meta.json", "[" * 100_000)),
        ("", "train.*block_size", of_tokens("data", WORDS[:16], WORDS)),
        ("", "val.*block_size", of_tokens("data", WORDS, WORDS[:16])),
        ("", "train.*no tokens.*run", of_tokens("data", WORDS[:0], WORDS)),
        ("", "train.*token id.*vocab", of_tokens("data", WORDS.astype(int) + 200, WORDS)),
        ("", "val.*token id.*vocab", of_tokens("data", WORDS, WORDS.astype(int) + 200)),
        *(("", f"train.bin.*{says}", written("data/train.bin", content)) for content, says in (
            (b"\0" * 5000, "wrong header"), (header(20240520, 7, 1) + b"ab", "wrong header"),
            (header(20240520, 1, 9) + b"ab", "damaged"), (header(20240520, 1, 0), "no tokens"),
            (header(20240801, 1, 1) + b"abcd", "wrong header"), (header(20240801, 7, 1) + b"ab", "damaged"),
            (header(20240801, 7, 0), "no tokens"), (header(20240801, 7, length=2), "wrong header"),
            (header(20240520, 1, -1), "damaged"), (header(20240520, 1, 5, length=3), "damaged")))]),
    # ------------------------------------------------------------------------------- train.py: continuing another run
    ("train.py --init_from=resume --out_dir={run}", FLAGS, [
        (f"--{knob}={value}", f"{knob}=.*cannot resume with {knob}=.*leave out the flag.*--out_dir")
        for knob, value in (
            ("n_layer", 2), ("attn", "softmax"), ("seed", 2), ("batch_size", 2), ("learning_rate", 0.5),
            ("dropout", 0), ("pos", "none"), ("attn_args", "tau_init=2"), ("weight_decay", 0), ("mlp", "relu"))]),
    ("train.py", FLAGS, [
        ("--init_from=no/such/run", "no run in no/such/run .*train one with"),
        ("--init_from=resume --out_dir=no/such/run", "no run in no/such/run .*train one with"),
        ("--init_from=resume --out_dir={pair}/lora --train_only=all", "cannot resume with train_only=all")]),
    ("train.py", INPUT, [
        ("--init_from=resume --out_dir={run} --dataset={data}",
         "the data set ./data has changed since run began: make it as it was",
         edited_knobs("run/meta.json", dataset="./data"), of_tokens("data", WORDS[:9000], WORDS[:900])),
        ("--init_from={run} --out_dir={run}", "name another --out_dir for the new run"),
        ("--init_from={learned} --block_size=32 --out_dir=out", r"wpe.weight is \(16, 16\) in the .*\(32, 16\)"),
        ("--init_from={toy_run} --dataset={data} --out_dir=out",
         "data is no data set in the tokenizer of toy_run .toy.: .*data/text.py .*--tokenizer=toy_run")]),
    *((how, INPUT, [
        (f"--attn={attn}", rf"--attn={attn} \(--diff={diff}\).*projections.*cannot use these.*softmax, .*elastic")
        for attn, diff in (("diff2", "v2"), ("tda", "subtract"), ("diff_rela", "subtract"))
    ]) for how in ("train.py --init_from={softmax} --out_dir=out", "eval.py loss --out_dir={softmax}")),
    ("train.py --init_from=resume --out_dir={run} --max_iters=9", INPUT, [
        ("", "optimizer state does not fit the model: .*--init_from", saved("run/ckpt.pt", what, change))
        for what, change in (
            ("with averages of another shape", lambda found: grown(found)),
            ("without an optimizer", lambda found: found | {"optimizer": {}}),
            ("with another order of weights", lambda found: found | {"optimizer": found["optimizer"] | {
                "param_groups": found["optimizer"]["param_groups"][::-1]}}))]),
    # adapters
    ("train.py --init_from={pair}/base", INPUT, [
        ("--out_dir=out --train_only=focus", "--attn=softmax adds nothing.*--attn=focus"),
        ("--out_dir=out --train_only=focus --attn=elastic", "--attn=elastic adds nothing.*--attn=focus"),
        ("--out_dir=out --train_only=lora --attn=elastic", "h.0.attn.tau is not in .*base.*initial value"),
        ("--out_dir={pair}/base --train_only=lora", "name another --out_dir")]),
    *((how, INPUT, [
        ("", "lora is an adapter, trained on top of the run base, which is neither there nor in .*/base: restore",
         removed("pair/base")),
        ("", "lora is an adapter for other weights than those in .*base.*changed", weights_changed(
            "pair/base/ckpt.pt", "trained further", lambda state: state["transformer.h.0.mlp.c_fc.weight"].add_(1))),
        ("", "does not fit.*h.1.attn.c_proj", weights_changed(
            "pair/lora/ckpt.pt", "without a factor", lambda state: state.pop("transformer.h.1.attn.c_proj.lora_b"))),
        ("", "does not fit.*h.0.attn.c_attn", weights_changed(
            "pair/lora/ckpt.pt", "of another shape",
            lambda state: state.update({"transformer.h.0.attn.c_attn.lora_a": torch.ones(2, 8)}))),
        ("", "does not fit.*h.7.attn.tau", weights_changed(
            "pair/lora/ckpt.pt", "with a parameter more",
            lambda state: state.update({"transformer.h.7.attn.tau": torch.ones(2)})))
    ]) for how in ("eval.py loss --out_dir={pair}/lora", "train.py --init_from=resume --max_iters=9 "
                   "--out_dir={pair}/lora", "train.py --init_from={pair}/lora --out_dir=out")),
    # ------------------------------------------------------------------------------------------------ a damaged run
    *((how, INPUT, [
        ("", "ckpt.pt is no readable checkpoint", written("run/ckpt.pt", b"")),
        ("", "ckpt.pt.*damaged", changed("run/ckpt.pt", "cut in half", lambda b: b[:len(b) // 2])),
        ("", "ckpt.pt.*damaged", written("run/ckpt.pt", bytes(range(256)) * 40)),
        ("", "ckpt.pt.*train.py", written("run/ckpt.pt", pickle.dumps({"a": Stranger()}, 2))),
        ("", "ckpt.pt.*train.py", saved("run/ckpt.pt", "is weights alone", lambda _: {"weight": torch.ones(2)})),
        ("", "ckpt.pt.*train.py", saved("run/ckpt.pt", "is a tensor", lambda _: torch.ones(2))),
        ("", "ckpt.pt.*train.py", saved("run/ckpt.pt", "is nanoGPT's", lambda _: {"model": {}, "optimizer": {},
                                                                                "iter_num": 5})),
        *(("", "ckpt.pt was not written by train.py", saved("run/ckpt.pt", f"with {wrong}", lambda found, wrong=wrong:
                                                            found | wrong)) for wrong in (
            {"step": "x"}, {"step": -1}, {"model": 3}, {"model": {"x": 3}}, {"optimizer": []}, {"scaler": {"a": "x"}})),
        ("", "ckpt.pt.*transformer.wte.weight", saved("run/ckpt.pt", "without weights", lambda found:
                                                      found | {"model": {}})),
        ("", "attn.tau", weights_changed("run/ckpt.pt", "without tau", lambda state:
                                         state.pop("transformer.h.0.attn.tau"))),
        ("", "transformer.wte.weight", edited_knobs("run/meta.json", n_embd=32)),
        ("", "transformer.h.1", edited_knobs("run/meta.json", n_layer=2)),
        ("", "transformer.wte.weight", edited_knobs("run/meta.json", vocab_size=300)),
        ("", "tau", edited_knobs("run/meta.json", attn="softmax", rule="softmax"))
    ]) for how in ("eval.py loss --out_dir={run}", "train.py --init_from=resume --out_dir={run}",
                   "train.py --init_from={run} --out_dir=out")),
    *((how, code, [
        ("", "no run in run .no meta.json there.: train", removed("run/meta.json")),
        ("", "meta.json is not valid JSON", cut("run/meta.json", 99)),
        ("", "meta.json is not valid JSON", written("run/meta.json", bytes(range(128, 256)))),
        ("", "meta.json.*not written by train.py", written("run/meta.json", b'{"a": 1}')),
        ("", "meta.json.*not written by train.py", written("run/meta.json", b"[]")),
        ("", "n_head=3", edited_knobs("run/meta.json", n_head=3)),
        ("", "n_layer='x' must be of type int", edited_knobs("run/meta.json", n_layer="x")),
        ("", "meta.json was not written by train.py", edited_knobs("run/meta.json", dataset=3)),
        ("", "meta.json was not written by train.py", edited("run/meta.json", knobs=[])),
        ("", "meta.json was not written by train.py", edited("run/meta.json", base={"path": 3})),
        ("", "attn=nonsense.*softmax", edited_knobs("run/meta.json", attn="nonsense")),
        ("", "norm=batchnorm is not among layernorm, rmsnorm", edited_knobs("run/meta.json", norm="batchnorm"))
    ]) for how, code in (("eval.py loss --out_dir={run}", INPUT),
                         ("train.py --init_from=resume --out_dir={run}", FLAGS),
                         ("train.py --init_from={run} --out_dir=out", FLAGS))),
    # ------------------------------------------------------------------------------------------------------- eval.py
    ("eval.py", FLAGS, [
        ("", "the first word must be a command: loss, lengths, compare"),
        ("nonsense", "must be a command: loss, lengths, compare.* not 'nonsense'"),
        ("loss", "which run. give --out_dir"),
        ("loss --nonsense=1", "unknown flag --nonsense=1.*valid flags"),
        ("loss --out_dir=x --windows=-1", "--windows=-1 must be a number of at least 0"),
        ("probe --out_dir=x --batch_size=0", "--batch_size=0 must be a number of at least 1"),
        ("probe --out_dir=x --attn=nonsense", "elastic"),
        ("speed --lengths=long", "--lengths='long' must be whole numbers of at least 1"),
        *((f"speed {flags}=0", f"{flags.split()[-1]}='0' must be whole numbers of at least 1") for flags in (
            "--lengths", "--memory", "--kernels --widths", "--kernels --lengths", "--decode --lengths",
            "--focus --lengths", "--tune --lengths", "--tune --widths", "--live --out_dir=x --lengths")),
        ("show nonsense", "elastic"),
        ("show --diff=nonsense", "elastic")]),
    ("eval.py", INPUT, [
        ("loss --out_dir=no/such/run", "no run in no/such/run"),
        ("loss --out_dir={run},no/run", "no run in no/run"),
        ("speed --live", "name it with --out_dir"),
        ("speed --attn=softmax,nonsense", "unknown --attn=nonsense: choose from softmax"),
        ("lab --attn=nonsense", "unknown --attn=nonsense: choose from .*elastic")]),
    ("eval.py", INPUT, whole(
        "lab --seeds=x", "maps --out_dir={run} --heads=x",
        "lengths --out_dir={run} --lengths=long", "passkey --out_dir={run} --lengths=many")),
    ("eval.py", FLAGS, whole(
        "probe --out_dir={run} --lengths=4,x", "routers --out_dir={softmax} --k=x", "claims --seeds=a",
        "routers --out_dir={softmax} --lengths=x",
        *(f"heads --out_dir={{run}} --prune={text}" for text in ("x", "", "long", "1,", "-1", "1.5")))),
    # which run, data and context
    ("eval.py loss", INPUT, [
        ("--out_dir={run} --attn=softmax", "does not fit.*tau"),
        ("--out_dir={run} --pos=learned", "does not fit.*wpe"),
        ("--out_dir={run} --kernel=sdpa", "--kernel=sdpa: "),
        ("--out_dir={run} --dataset={data}", "vocab_size=257 ids, the data set data needs 50257",
         of_tokens("data", [1] * 100, [1] * 100, vocab_size=50257)),
        ("--out_dir={toy_run} --dataset={data}", "no data set in the tokenizer of toy_run .*--tokenizer=toy_run"),
        ("--out_dir={run} --dataset={toy_data}", "no data set in the tokenizer of run .*--tokenizer=bytes"),
        ("--out_dir={run} --length=99999", "too few for one window of 99999: .*--length"),
        *((f"--out_dir={{learned}} --length={length}",     # before the data is read
           f"--length={length}, but --pos=learned knows only its block_size=16 positions",
           edited_knobs("learned/meta.json", dataset="nowhere")) for length in (17, 65)),
        ("--out_dir={symbols_run} --length=65", "--length=65, but the sequences of .* have 64 tokens")]),
    ("eval.py probe", INPUT, [
        ("--out_dir={run}", "ckpt.pt does not exist: the run has saved no checkpoint yet", removed("run/ckpt.pt")),
        ("--out_dir={run} --layer=1", "layers of .* are 0 to 0"),
        ("--out_dir={run} --k=17", "window has 16 tokens"),
        ("--out_dir={run} --length=1", "a window needs 2 tokens or more"),
        ("--out_dir={run} --lengths=8,1", "a window needs 2 tokens or more"),
        ("--out_dir={run} --lengths=8,9999999", "too few for one window"),
        ("--out_dir={learned} --length=65", "--pos=learned knows only its block_size=16"),
        ("--out_dir={symbols_run} --length=65", "sequences of .* have 64 tokens"),
        ("--out_dir={symbols_run} --input=bos", "the tokens of .* have no separator")]),
    ("eval.py probe --out_dir={run}", FLAGS, [
        ("--k=65", "first 64 tokens"),
        *must("be a number of at least 1", "k=0"),
        *must("be a number of at least 0", "eps=-1"),
        ("--input=noise", "repeat")]),
    ("eval.py sample --out_dir={run}", FLAGS, [
        *must("be a number of at least 1", "tokens=0", "samples=0"),
        *must("be a number of at least 0", "temperature=-1", "top_k=-1", "top_p=-1"),
        ("--chat", "give it as --prompt"),
        ("--system=x", "add --chat")]),
    ("eval.py sample --prompt=why? --chat", INPUT, [
        ("--out_dir={run}", "bytes has no <.im_end.>.*leave .*--chat"),
        ("--out_dir={toy_run}", "toy has no <.im_start.>.*leave .*--chat")]),
    ("eval.py sample --out_dir={symbols_run}", INPUT, [
        ("--prompt=999", "a prompt needs at least one token, with ids in 0..65")]),
    ("eval.py heads --out_dir={run}", FLAGS, [
        ("--prune=5,101", "a percentage above 100"),
        *must("be a number of at least 1", "local=0", "windows=0")]),
    ("eval.py heads --out_dir={run}", INPUT, [
        ("--local=17", "--local=17.*16"),
        ("--other=16", "--other=16.*16"),
        ("--against=no/such/data", "no/such/data")]),
    ("eval.py params --out_dir={softmax}", INPUT, [("--png=x.png", "nothing to draw")]),
    ("eval.py groups", INPUT, [
        ("--out_dir={run}", "has no groups: .*trained with --attn=focus"),
        ("--out_dir={focus} --layer=2", "layers of .* are 0 to 1"),
        ("--out_dir={focus} --against={run}", "run has --attn=elastic, which has no groups"),
        ("--out_dir={focus} --against=nowhere", "no run in nowhere"),
        ("--out_dir={focus} --against={short_focus}",
         "short_focus has 4 groups in each of 1 layers, where .*focus has 4 in each of 2: name another run")]),
    ("eval.py routers", INPUT, [
        ("--out_dir={softmax}", "has no groups"),
        ("--out_dir={focus} --sweep=window", "name its base"),
        ("--out_dir={focus} --k=5", "1 to 4 groups"),
        ("--out_dir={focus} --k=0", "1 to 4 groups"),
        ("--out_dir={softmax} --sweep=iterations --balancing=softmax", "--balancing=softmax has no iterations")]),
    ("eval.py routers --out_dir={softmax}", FLAGS, [
        ("--values=3", "name it, --sweep=groups"),
        ("--sweep=groups --values=many", "'many' must be a number, or a share such as 1/8")]),
    ("eval.py maps", INPUT, [
        (f"--out_dir={{run}} --text='{'ab ' * 40}'", "120 tokens.*100"),
        ("--out_dir={run} --layers=1", "from 0 to 0"),
        ("--out_dir={run} --heads=0,2", "from 0 to 1"),
        ("--out_dir={run} --views", "--attn=elastic"),
        ("--out_dir={learned} --text='the quick brown fox'",
         "19 tokens, but --pos=learned knows only its block_size=16"),
        ("--out_dir={symbols_run} --text='3 999'", "--text has the id 999, but this model has only 0 to 65"),
        *((f"--out_dir={{symbols_run}} --text='{text}'", f"a prompt must be numbers separated by spaces, not '{text}'")
          for text in ("a word", "three", "1.5", "-1", "70000"))]),
    ("eval.py maps --out_dir={run}", FLAGS, [
        ("--text=", "--text is empty: write a sentence"),
        ("--text=' '", "--text is empty: write a sentence")]),
    ("eval.py lengths", INPUT, [
        ("--out_dir={run} --lengths=24,64", "24,64.*divide.*64"),
        ("--out_dir={run} --lengths=0,64", "divide"),
        ("--out_dir={run} --lengths=100000", "too few for one window.*--length"),
        ("--out_dir={learned}", "--lengths=64.*block_size=16 positions: give a smaller --lengths"),
        ("--out_dir={symbols_run} --lengths=128", "--lengths=128.*sequences of .* have 64 tokens")]),
    ("eval.py lengths --out_dir={run}", FLAGS, [
        *must("be a number of at least 0", "finetune=-1"),
        *must("be a number of at least -1", "windows=-2")]),
    ("eval.py passkey", INPUT, [
        ("--out_dir={run} --lengths=200", "garbage.*at least"),
        ("--out_dir={learned}", "--lengths=500.*block_size=16 positions"),
        ("--out_dir={learned} --lengths=500,2000", "--lengths=2000.*block_size=16 positions"),
        ("--out_dir={symbols_run}", "symbols that spell no text: name a run trained on text")]),
    ("eval.py passkey --out_dir={run}", FLAGS, [
        *must("be a number of at least 1", "trials=0"),
        *must("be a number of at least 0", "seed=-1")]),
    ("eval.py scrolls --length=150 --tokens=8 --source={scrolls}", INPUT, [
        ("--out_dir={run} --length=100 --tokens=100", "100 tokens are not enough"),
        ("--out_dir={run} --length=0 --tokens=256", "16 tokens are not enough"),
        ("--out_dir={run} --tasks=quality --length=9 --tokens=4", "a choice is too long for --length=9"),
        ("--out_dir={run} --source=no/such", "neither gov_report/validation.jsonl.*zip"),
        ("--out_dir={run}", "needs the package rouge_score, which is not installed", without("rouge_score")),
        ("--out_dir={symbols_run}", "symbols that spell no text"),
        ("--out_dir={learned}", "--length=150.*block_size=16 positions"),
        *(("--out_dir={run} --tasks=quality", says, written("scrolls/quality/validation.jsonl", content))
          for content, says in (
              ("", "validation.jsonl is empty"), ("\n\n", "validation.jsonl is empty"),
              ("not json\n", "line 1 is no JSON object"),
              ('{"id": "a", "input": "b"}\n', '"output"'), ('{"id": "a", "input": "b", "output": null}\n', "line 1"),
              ('["a"]\n', "line 1"),
              ('{"id": "a", "input": "Q?\\n\\nno choices", "output": "x"}\n', "four choices")))]),
    ("eval.py scrolls --out_dir={run}", FLAGS, [
        ("", "give --source"),
        ("--source={scrolls} --tasks=qmsum,nonsense", "'nonsense'.*contract_nli"),
        ("--source={scrolls} --split=test", "validation"),
        ("--source={scrolls} --tokens=0", "--tokens=0 must be a number of at least 1")]),
    ("eval.py bench --source={questions}", INPUT, [
        ("--out_dir={run} --tasks=piqa,nonsense", "'nonsense' is no task: choose from hellaswag"),
        ("--out_dir={run} --source=nowhere", "no benchmark's file in nowhere: fetch them"),
        ("--out_dir={run} --source=nowhere --tasks=all", "hellaswag: no hellaswag_val.jsonl in nowhere"),
        ("--out_dir={run} --tasks=piqa", "no piqa_valid.jsonl in .* --tasks=piqa, or name a folder",
         removed("questions/piqa_valid.jsonl")),
        ("--out_dir={run} --tasks=piqa", "has no rows of piqa", task_file("piqa")),
        ("--out_dir={run} --tasks=piqa", "piqa_valid.jsonl.gz is damaged", removed("questions/piqa_valid.jsonl"),
         written("questions/piqa_valid.jsonl.gz",
                 gzip.compress(b'{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n', mtime=0)[:-12])),
        ("--out_dir={run} --length=3", "a choice has .* tokens where the model can predict 1 to 3"),
        ("--out_dir={symbols_run}", "was trained on symbols, not on text: bench needs a run with a text tokenizer"),
        ("--out_dir={learned} --length=100", "--length=100, but --pos=learned knows only its block_size=16 positions"),
        ("--out_dir={run} --tasks=wikitext --length=64 --png=x.png", "no accuracy to draw"),
        *((f"--out_dir={{run}} --tasks={name}", says, task_file(name, row)) for name, row, says in (
            ("piqa", {"question": "?", "label": 0}, "line 1 is no row of piqa .it lacks 'goal'"),
            ("piqa", [1], "no row of piqa"),
            ("hellaswag", {"query": "a", "choices": ["b"], "gold": 0}, "there is nothing to choose from"),
            ("piqa", {"goal": "a", "sol1": "b", "sol2": "", "label": 0}, "a choice is empty"),
            ("piqa", {"goal": "a", "sol1": "b", "sol2": 7, "label": 0}, "no text"),
            ("siqa", {"context": "a", "question": "b", "answerA": "c", "answerB": "d", "answerC": "e", "label": 4},
             "number 4 of 3"),
            ("arc_easy", {"passage": "a", "question": "b", "label": True}, "arc_easy"),
            ("winogrande", {"sentence": "", "option1": "a", "option2": "b", "answer": "2"}, "winogrande"),
            ("openbookqa", {"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}, "answerKey": "Q"},
             "not in list")))]),
    ("eval.py bench --out_dir={run}", FLAGS, must("be a number of at least 0", "limit=-1")),
    ("eval.py compare --out_dir={run},{copy}", INPUT, [     # before the first run is read
        *(("", f"{says}; give --anyway", edited_knobs("copy/meta.json", **knobs), removed("run/ckpt.pt"))
          for knobs, says in (
              ({"batch_size": 2}, "tokens trained on: 512 and 256"), ({"n_embd": 32}, "n_embd: 16 and 32"),
              ({"block_size": 8, "batch_size": 8}, "block_size: 16 and 8"))),
        ("", r"training data \(hash\).*--anyway", edited("copy/meta.json", data_hash="0"), removed("run/ckpt.pt")),
        ("", "copy was not trained here, so its data and budget are unknown; give --anyway",
         edited("copy/meta.json", data_hash=..., losses={}), removed("run/ckpt.pt"))]),
    ("eval.py claims", FLAGS, [
        ("--show=nonsense", "there is no claim 'nonsense'.* python eval.py claims names them all$"),
        ("--show=post-norm", "did you mean postnorm"),
        ("--run=lab,nonsense", "no claim 'nonsense'.*--run also takes lab")]),
    ("eval.py claims --out_dir=out", INPUT, [
        ("--run=lazy-vs-recurrent", "out of reach"),
        *(("--results=claims.json", "claims.json holds no results of claims", written("claims.json", wrong))
          for wrong in ([], {}, {"claims": 3}, {"claims": {"postnorm": {"": 3}}},
                        {"claims": {"postnorm": {"": {"numbers": {
                            "x uniform": {"postnorm": ["x"]}, "raw": {"postnorm": [1], "softmax": [1]}}}}}})),
        *((f"--run={claim}", "wants a GPU.*--train_args", NO_GPU) for claim in ("gpu-minutes", "focus-speed",
                                                                              "elastic-two-pass"))]),
    # ---------------------------------------------------------------------------------------------------- data scripts
    ("data/backcopy.py --out_dir=out", INPUT, [
        ("--fixed_at=99", "--fixed_at=99 must be a position in 0..64, or -1"),
        ("--length=0", "--length, .* must be at least 1"),
        ("--sequences=0", "--sequences .* must be at least 1")]),
    ("data/stdlib.py --source=. --out_dir=out", INPUT, [("", "0 Python files under .* are too few .*--source")]),
    ("data/text.py --out_dir=out --tokenizer=bytes", FLAGS, [
        ("", "give --source FILE or FOLDER"),
        ("--surce=a.txt", "--surce")]),
    ("data/text.py --out_dir=out --tokenizer=bytes", INPUT, [
        *((f"--source={name}", f"{name}.*{says}", written(name, content)) for name, content, says in (
            ("empty.txt", b"", "is empty"), ("blank.txt", b" \n", "is empty"),
            ("binary.bin", b"\x7fELF\0\1", "not text"), ("latin.txt", b"caf\xe9", "not text"),
            ("cut.txt.gz", gzip.compress(bytes(range(256)) * 9, mtime=0)[:200], "damaged"),
            ("plain.txt.gz", b"plain", "damaged"),
            ("line.jsonl", b'{"text": "a"}\n{"text": \n', "line 2"), ("field.jsonl", b'{"body": "a"}\n', '"text"'),
            ("number.jsonl", b'{"text": 3}\n', '"text"'), ("rows.jsonl", b'{"text": ""}\n', "no readable text"),
            ("one.txt", b"x", "holds 1 characters, too few to hold out"))),
        ("--source=missing", "--source=missing does not exist"),
        ("--source=pictures", "no readable text", written("pictures/p.png", b"\0")),
        ("--source=nothing", "no files in this folder", written("nothing/.hidden", b"text"))]),
    ("data/text.py --out_dir=out --source=a.txt", INPUT, [(*row, written("a.txt", "Alpha.\n")) for row in (
        ("--tokenizer=bytes --val zulu", "--val zulu: no such file in .*choose from a.txt"),
        ("--tokenizer=bytes --val a", "holds out everything.*name fewer files"),
        ("--tokenizer=bytes --val_share=1", "--val_share=1.0 must lie between 0 and 1"),
        ("--tokenizer=bytes --name=a/b", "--name=a/b must be a plain name"),
        ("--tokenizer=bytes --fixed_at=6 --length=6", "--fixed_at=6 must be a place in 0..5"),
        ("--tokenizer=llama", "unknown tokenizer 'llama': choose from bytes, gpt2"),
        ("--tokenizer=nowhere", "unknown tokenizer 'nowhere'.*tokenizer.json"),
        ("--tokenizer=numbers", "for symbols, not for text"),
        ("--tokenizer=a.txt", "a.txt is no tokenizer.json"),
        ("--tokenizer=bad.json", "bad.json is no tokenizer.json", written("bad.json", {})),
        ("--tokenizer={toy}", "needs the package tokenizers.*pip install tokenizers", without("tokenizers")),
        ("--tokenizer=gpt2 --tokenizer_files=.", "vocab.bpe is missing or is not the GPT-2 tokenizer's"),
        ("--tokenizer=gpt2", "the GPT-2 tokenizer could not be fetched.*TIKTOKEN_CACHE_DIR", OFFLINE),
        ("--tokenizer={no_separator}", "tokenizer.json.*between two texts.*eos_token"),
        ("--tokenizer={no_separator}", "tokenizer.json.*between two texts.*eos_token",
         written("no_separator/tokenizer_config.json", {})),
        ("--tokenizer={no_separator}", "tokenizer.json.*between two texts.*eos_token",    # it has no <s>
         written("no_separator/tokenizer_config.json", {"eos_token": None, "bos_token": "<s>"})),
    )]),
    ("data/text.py --tokenizer=bytes --source=a.txt --name=stdlib", INPUT, [
        ("", "--name=stdlib is the name of a script in data/", written("a.txt", "Alpha.\n"))]),
    ("data/fineweb_edu.py --tokenizer=bytes --out_dir=out", INPUT, [
        ("--source=t.csv", "unknown source type, choose files that end in .parquet", written("t.csv", "a,b")),
        ("--source={pages}/some.jsonl --shard_tokens=0", "--shard_tokens must be at least 1"),
        ("--source={pages}/some.jsonl", "none are left to train on: lower --shard_tokens"),
        ("--source=x.parquet", "pip install pyarrow", written("x.parquet", b"PAR1"), without("pyarrow")),
        ("", "--source|pip install pyarrow", OFFLINE)]),
    ("data/fineweb_edu.py --tokenizer=bytes --source={pages}/some.jsonl --out_dir={pages}/made", INPUT, [
        ("--shard_tokens=3000", "made holds a data set from other sources or with other flags"),
        *(("--shard_tokens=4000", "progress.json is damaged: delete .*made and run this again",
           written("pages/made/progress.json", wrong)) for wrong in (
               [], {"shards": {}}, {"next": [1], "shards": {}}, {"next": None, "shards": {"val_000000.bin": 3}})),
        ("--shard_tokens=4000", "made holds a data set from other sources or with other flags",
         changed("pages/some.jsonl", "with a row more", lambda b: b + b'{"text": "one more"}\n'))]),
    ("data/shakespeare.py --out_dir=out", INPUT, [
        ("--source=a/hamlet.txt", "not Tiny Shakespeare", written("a/hamlet.txt", "To be")),
        ("--source=a", "not Tiny Shakespeare", written("a/hamlet.txt", "To be")),
        ("", "name a local copy with --source", OFFLINE)]),
    ("data/benchmarks.py --out_dir=out", INPUT, [
        ("--tasks=piqa,nonsense", "'nonsense' is no task: choose from hellaswag"),
        ("--source=nowhere", "no benchmark's file in nowhere"),
        ("--source={questions} --tasks=all", "no hellaswag_val.jsonl", removed("questions/hellaswag_val.jsonl"))]),
    # ------------------------------------------------------------------------------------------------- data/weights.py
    ("data/weights.py", FLAGS, [
        ("", "NAME.FOLDER.FILE"),
        ("some/folder --source=x", "--source needs a name"),
        ("export", "RUN, FOLDER")]),
    ("data/weights.py {llama} --out=out", INPUT, [
        *(("", says, edited("llama/config.json", **changes)) for changes, says in (
            ({"model_type": "gemma"}, "model_type gemma is not among.*gpt2, llama, mistral, qwen2.*bloom"),
            ({"hidden_act": "gelu"}, "cannot compute hidden_act=gelu, only silu"),
            ({"attention_bias": True}, "attention_bias=True"), ({"mlp_bias": True}, "mlp_bias=True"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic, only .*llama3 or yarn"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn needs .*beta_fast.* truncate"),
            ({"rope_parameters": {"rope_type": "yarn", "truncate": True}}, "truncate=True, only False"),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_type=llama3 needs .*low_freq"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config=mxfp4"),
            ({"model_type": "gpt_oss"}, "config.json lacks num_local_experts, num_experts_per_tok"),
            *(({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
               | changes, says) for changes, says in (
                ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*only .*sliding_attention"),
                ({"layer_types": ["sliding_attention"] * 2}, r"layer_types=.'sliding_attention'., only"),
                ({"swiglu_limit": 9.0}, "swiglu_limit=9.0, only 7.0"),
                ({"num_experts_per_tok": 5}, "n_active=5 is more than n_expert=4"),
                ({"attention_bias": False}, "attention_bias=False, only True"))),
            ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
            ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
            ({"hidden_size": ...}, "config.json lacks hidden_size"),
            ({"hidden_size": "wide"}, "config.json describes no model: n_embd='wide' must be a whole number"),
            ({"num_hidden_layers": 2.5}, "config.json describes no model: n_layer=2.5 must be a whole number"),
            ({"rope_scaling": [1]}, "config.json describes no model"), ({"layer_types": 3}, "describes no model"),
            ({"num_key_value_heads": 3}, "n_head=4 is not divisible by n_kv_head=3"),
            ({"num_hidden_layers": 3}, r"model.layers.2\S+ is missing, but .* must be"),
            ({"num_hidden_layers": 1}, r"model.layers.1\S+ has no place"),
            ({"intermediate_size": 40}, r", but .* must be \(40, 16\)"),
            ({"num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 2}, r"k_proj.weight is \(8, 16\)"),
            ({"vocab_size": 256}, r"\(257, 16\), but .* must be \(256, 16\)"))),
        *(("", "model.safetensors is damaged, or was not fetched whole", before) for before in (
            cut("llama/model.safetensors", 5000), cut("llama/model.safetensors", 4),
            written("llama/model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"))),
        ("", "model.norm.weight as I8: only F32, F16 and BF16",
         changed("llama/model.safetensors", "with whole numbers", as_int8)),
        ("", "model.safetensors is missing", removed("llama/model.safetensors")),
        ("", "model-1.safetensors is missing", written("llama/model.safetensors.index.json", {
            "weight_map": {"lm_head.weight": "model-1.safetensors"}})),
        *(("", "index.json does not say which files hold", written("llama/model.safetensors.index.json", wrong))
          for wrong in ([], {"weight_map": 3}, {"weight_map": {"lm_head.weight": 3}})),
        ("", "config.json is not valid JSON", written("llama/config.json", "{")),
        ("", "config.json is missing", removed("llama/config.json")),
        ("", "the tokenizer llama has ids up to 300, the embedding 257 rows",
         written("llama/tokenizer.json", SPEECH | {"added_tokens": []})),
        *(("", "is no tokenizer.json that the package", written("llama/tokenizer.json", damaged))
          for damaged in ("{}", "[1]", "{")),
        ("", "tokenizer.json is missing there", removed("llama/tokenizer.json")),
        ("", "does not name the token between two texts",
         written("llama/tokenizer.json", SPEECH), edited("llama/config.json", bos_token_id=None, eos_token_id=None))]),
    ("data/weights.py", INPUT, [
        ("nowhere --out=out", "nowhere does not exist, and is none of the names smollm2, gpt2"),
        ("gpt2 --source=nowhere --out=out", "nowhere does not exist: name a"),
        ("{llama}/model.safetensors --out=out", "model.safetensors holds tensors only: name its folder"),
        ("{llama}/tokenizer.json --out=out", "is no folder with config.json"),
        ("{llama} --out={run}", "holds a run that was trained: name another folder with --out"),
        ("{llama} --out={llama}", "name another one for the run with --out"),
        ("gpt2-xl --source={llama} --out=out",
         "is not the public gpt2-xl .it has 2 layers of width 16, not 48 of 1600.*needs no name"),
        ("{gpt2} --out=out", "GPT-2 tokenizer could not be fetched .*put GPT-2's tokenizer.json into .*gpt2",
         removed("gpt2/tokenizer.json"), OFFLINE),
        ("{llama} --out=out", "could not write to out .no space.: free some space there, or name .*--out", FULL_DISK),
        # a .gguf, a wheel
        *(("{gguf}/small.gguf --out=out", "small.gguf is damaged, or was not fetched whole", before) for before in (
            cut("gguf/small.gguf", -2000), cut("gguf/small.gguf", 3000), cut("gguf/small.gguf", 10),
            cut("gguf/small.gguf", 0), changed("gguf/small.gguf", "as GGUX", lambda b: b"GGUX" + b[4:]))),
        ("{gguf}/small.gguf --out=out", "only the architecture llama is read, not gemma",
         changed("gguf/small.gguf", "of a Gemma", lambda b: b.replace(b"llama", b"gemma"))),
        ("{gguf}/small.gguf --out=out", r"its tokenizer \(gpt2, smallm\) cannot be read from the file",
         changed("gguf/small.gguf", "with another tokenizer", lambda b: b.replace(b"smollm", b"smallm"))),
        ("{gguf}/small.gguf --out=out", "small.gguf is damaged: it lacks the tokens, their types or the merges",
         changed("gguf/small.gguf", "without merges", lambda b: b.replace(b"ggml.merges", b"ggml.merged"))),
        ("smollm2 --source={gguf}/small.gguf --out=out",
         "small.gguf is not the public smollm2 .it has 2 layers of width 16, not 30 of 576"),
        ("smollm2 --source={gguf}/small.gguf --out=out", "is not the public smollm2 .sha256 differs", SMALL_PUBLIC),
        ("some.whl --out=out", "some.whl is damaged", written("some.whl", b"PK")),
        ("some.whl --out=out", "some.whl holds no .gguf: name another wheel", written("some.whl", EMPTY_ZIP))]),
    ("data/weights.py export", INPUT, [
        *(("{softmax} back", f"no family has .*{says}.*"
           "--norm=rmsnorm --mlp=swiglu, or a GPT-2 with --pos=learned --bias=1",
           edited_knobs("softmax/meta.json", **knobs))
          for knobs, says in (
              ({"sink": "logit"}, "sink=logit"), ({"gate": "head"}, "gate="), ({"rule": "elastic"}, "rule=elastic"),
              ({"norm": "rmsnorm"}, "mlp=gelu; the nearest is llama"), ({"mlp": "relu2", "pos": "none"}, "pos=none"),
              ({"norm": "rmsnorm", "mlp": "swiglu", "window": 4, "window_every": 2},
               "window_every=2; the nearest is mistral"))),
        ("{llama_run} back", "ckpt.pt is not the model that its meta.json describes: transformer.h.2",
         edited_knobs("llama_run/meta.json", n_layer=3)),
        ("{llama_run} {llama}", "exists and is not empty: name a new folder")]),
]

ROWS = [pytest.param(f"{begins} {rest}".strip(), code, says, before,
                     id=" | ".join([f"{begins} {rest}".strip(), *(event.what for event in before)]))
        for begins, code, rows in REFUSALS for rest, says, *before in rows]
MAIN = {"train.py": train_script.main, "eval.py": eval_script.main, "data/weights.py": weights_script.main}


def call(script, argv):
    """Run a script in this process: its main, or the whole file."""
    if script in MAIN:
        MAIN[script](argv)
    else:
        runpy.run_path(str(ROOT / script), run_name="__main__")


def contents():
    """{path: bytes} of all files in the current folder and its subfolders."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("line, code, says, before", ROWS)
def test_a_command_line_that_cannot_work_is_refused_in_one_line(
        line, code, says, before, place, tmp_path, monkeypatch, capsys):
    for short, long in SHORT.items():
        line = line.replace(short, long)
    names = dict.fromkeys(names_in(line))
    for name in names:
        shutil.copytree(place(name), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for event in before:
        event.do(monkeypatch)
    script, *argv = shlex.split(line.format_map({name: f"./{name}" for name in names}))
    monkeypatch.setattr(sys, "argv", [script, *argv])
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = contents()
    capsys.readouterr()                         # discard what was printed while the folders were made
    exit_code, said = complain(lambda argv: call(script, argv), capsys, *argv)
    assert_says(says, said)
    assert exit_code == code
    assert re.match(rf"{os.path.basename(script)}( \w+)?: error: ", said), said
    assert contents() == found


@pytest.mark.parametrize("line, code", [
    ("train.py {new} --n_embd=17", FLAGS), ("eval.py loss --out_dir=nowhere", INPUT),
    ("data/text.py --source=nowhere --tokenizer=bytes", INPUT)])
def test_a_real_process_refuses_with_the_same_exit_code_in_one_line(line, code, elastic_run):
    script, *argv = shlex.split(line.replace("{new}", " ".join([*TINY, f"--out_dir={elastic_run}"])))
    done = run(script, *argv, ok=False)
    assert done.returncode == code and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert done.stdout == ""


# ---------------------------------------------------------------------------------------------------- calls from Python


def attend(attn, rows=9, table=None, **choices):
    """Call a layer with 9 queries and keys, and with `rows` rows of its input x."""
    layer = mixers.layer_of(tiny_config(attn=attn, **choices), 0)
    q, k, v = (torch.zeros(1, *layer.shapes[name][:1], 9, layer.shapes[name][1]) for name in "qkv")
    return layer.attend(q, k, v, torch.zeros(1, rows, 16), table)


def views(attn, **choices):
    layer = mixers.layer_of(tiny_config(attn=attn, **choices), 0)
    return layer.views_of(*torch.zeros(2, 1, 2, 9, 8), torch.zeros(1, 9, 16))


def generate(*ids):
    return GPT(tiny_config()).generate(torch.tensor([ids], dtype=torch.long), 1)


def go_on(first, then):
    """Read tokens with one recipe, then with another and the same cache. The cache still works with the first."""
    begun, other = (GPT(tiny_config(attn=attn)).eval() for attn in (first, then))
    idx, cache = torch.arange(5)[None], begun.new_cache()
    begun(idx, cache=cache)
    try:
        other(idx, cache=cache)
    finally:
        begun(idx, cache=cache)


def go_on_in_a_layer(first, then):
    """The same with single layers. The second has one head."""
    past, begun = {}, mixers.layer_of(tiny_config(attn=first), 0)
    other = mixers.layer_of(tiny_config(attn=then, n_head=1), 0)
    begun(torch.zeros(1, 9, 16), past)
    other(torch.zeros(1, 9, 16), past)


def write_tokens(*ids):
    return tokens.write_shard(Path("x.bin"), np.array(ids))


NOWHERE = SimpleNamespace(place=Path("nowhere"))

CALLS = [                                       # (a call, a pattern of its error message)
    *((lambda attn=attn, choices=choices: attend(attn, table=torch.zeros(2, 9), **choices),
       "adds nothing to scores by distance")
      for attn, choices in (("focus", {"window": 4}), ("retnet", {}), ("routing", {}), ("topk", {}))),
    (lambda: attend("focus", window=4, rows=3), "x has 3 rows for 9 keys"),
    (lambda: attend("retnet", rows=8), "x has 8 rows for 9 keys"),
    (lambda: views("focus", window=4), "has no views"),
    (lambda: views("retnet"), "has no views"),
    (lambda: views("routing"), "has no views"),
    *((lambda first=first, then=then: go_on(first, then), "another recipe") for first, then in (
        ("retnet", "gla"), ("deltanet", "mamba2"), ("retnet", "deltanet"), ("softmax", "retnet"),
        ("retnet", "softmax"), ("ttt", "titans"))),
    (lambda: go_on_in_a_layer("retnet", "gla"), "a state of another recipe"),
    (lambda: generate(), "at least one token, with ids in 0..30"),
    (lambda: generate(31), "at least one token, with ids in 0..30"),
    (lambda: generate(-1), "at least one token, with ids in 0..30"),
    (lambda: write_tokens(0, 70000), "token ids must lie in 0..65535"),
    (lambda: write_tokens(-1, 5), "token ids must lie in 0..65535"),
    (lambda: claims.value_at({"loss": 1.0}, "loss/0", NOWHERE), "nowhere has nothing at loss/0: .*measure again"),
    (lambda: experiments.do(SimpleNamespace(words=("eval.py",), after=[NOWHERE])), "nowhere is not there"),
]


@pytest.mark.parametrize("call, says", CALLS, ids=[says for _, says in CALLS])
def test_a_call_that_cannot_work_says_why(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        call()
    assert not contents()
