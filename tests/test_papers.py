"""docs/papers.md: each command runs, in the page's order, on models of two training steps, and
evals/everything.sh runs the same commands."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TEXT, meta, train_here, write_tokenizer
from test_docs import PAGES, commands_of

from common import files
from data import tokens

PAGE = PAGES["docs/papers.md"]
ROWS = [
    line[2:-2].split(" | ")
    for line in PAGE.splitlines()
    if line.count(" | ") == 6 and line[2:7] != "where"
]
COMMANDS = [command for command in dict.fromkeys(commands_of(PAGE)) if "FOLDER" not in command]

# flags that make a command small
STEPS = "--max_iters=2 --eval_interval=2 --eval_iters=1 --warmup_iters=1 --batch_size=2"
WINDOWS = "--windows=2 --batch_size=2 --length=40"
SMALL = {
    "train.py": STEPS,
    "lab": "--seeds=2",
    "board": "--seeds=",
    "speed": "--repeats=1 --lengths=64 --memory=64 --tokens=64",
    "passkey": "--trials=1 --lengths=400",
    "bench": "--limit=2 --include_path=tasks --tasks=answers_test",
    "lengths": "--windows=2 --batch_size=2 --lengths=32,64",
    "routers": "--windows=2 --batch_size=2 --lengths=32 --steps=2 --finetune=2",
} | dict.fromkeys(("loss", "probe", "heads", "params", "groups"), WINDOWS)


def in_this_process(script, *arguments):
    """Run a command in the current folder. Returns what went wrong, or None."""
    small = SMALL.get(arguments[0] if script == "eval.py" else script, "").split()
    if any(argument.startswith("--text") for argument in arguments):  # a sentence has no windows
        small = []
    if arguments[0] == "lab":
        theirs = [a.partition("=")[2] for a in arguments if a.startswith("--train_args")]
        small.append(f"--train_args={' '.join([*theirs, STEPS])}")
    sys.argv = [str(ROOT / script), *arguments, *small]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code and str(stop)
    except Exception as e:
        return repr(e)


@pytest.fixture
def place(tmp_path, data, backcopy, monkeypatch):
    """A folder with the page's data sets, novels and a SmolLM2, all of them tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(tokens, "HERE", tmp_path / "data")
    shutil.copytree(data, tmp_path / "data/stdlib")
    shutil.copytree(backcopy, tmp_path / "data/backcopy")
    for name in ("moby-dick", "middlemarch"):
        with files.replacing(f"books/{name}.txt", "w") as f:
            f.write(TEXT * 200)
    task = (ROOT / "docs/instruments.md").read_text(encoding="utf-8")
    task = re.search(r"```yaml\n(.*?)```", task, re.S)[1].replace("arc_local", "answers_test")
    row = {"question": TEXT, "choices": ["a fox", "a dog"], "gold": 0}
    for name, text in {
        "answers.yaml": re.sub(r"test: \S+?jsonl", "test: tasks/test.jsonl", task),
        "test.jsonl": 9 * f"{json.dumps(row)}\n",
        "train.jsonl": 99 * f"{json.dumps({'prompt': TEXT, 'response': ' a fox'})}\n",
    }.items():
        with files.replacing(f"tasks/{name}", "w") as f:
            f.write(text)
    coder = write_tokenizer(tmp_path / "smollm2", tokenizer="smollm2", separator=0)
    coder = tokens.tokenizer(str(coder))
    ids = {split: tokens.encode_all(coder, [TEXT * 99]) for split in ("train", "val")}
    tokens.write_data_set(tmp_path / "data/stdlib-smollm2", coder, ids, dataset="stdlib")
    llama = "--norm=rmsnorm --mlp=swiglu --bias=0 --tied=1 --n_layer=30 --n_head=9 --n_kv_head=3"
    train_here(*llama.split(), "--n_embd=36", "--dataset=stdlib-smollm2", "--out_dir=out/smollm2")
    files.write_json("out/smollm2/meta.json", meta(tmp_path / "out/smollm2") | {"source": "tiny"})
    return tmp_path


@pytest.mark.exhaustive
def test_every_command_runs(place, trainings):
    failed = {}
    for command in COMMANDS:
        if command != ("data/weights.py", "smollm2"):  # made above
            if problem := in_this_process(*command):
                failed[shlex.join(command)] = problem
    assert not failed, failed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_command_with_its_minutes_or_says_why_not(row):
    where, shows, command, minutes, ours, theirs, differs = row
    assert where and shows
    if command == "-":
        assert differs and not minutes.strip("- ")
    else:
        assert re.fullmatch(r"(`(python|torchrun) [^`]+`(<br>)?)+", command)
        assert ours and (differs.startswith("not run") or 0 < float(minutes) <= 60)


def test_the_script_runs_the_commands_of_the_page(tmp_path):
    """Here its python is a program that only prints what it should run."""
    for name in ("python", "torchrun"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" ""\n', encoding="utf-8")
        program.chmod(0o755)
    shutil.copytree(ROOT / "evals", tmp_path / "repo/evals")
    shutil.copytree(ROOT / "docs", tmp_path / "repo/docs")
    done = subprocess.run(
        ["sh", tmp_path / "repo/evals/everything.sh", "papers"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    found = [tuple(lines.splitlines()) for lines in done.stdout.split("\n\n")]
    assert {lines[1:] for lines in found if lines} >= set(COMMANDS)
