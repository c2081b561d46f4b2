"""Files of any content: they are never half written, and a damaged or malicious one ends a command in one line. Nothing
in them is executed, and no name in them leads to another folder."""
import gzip
import io
import json
import math
import os
import pickle
import runpy
import shutil
import sys
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_says, complain, meta, train_here
from hypothesis import given
from hypothesis import strategies as st

from common import files
from data import coders, tokens


def test_a_file_is_renamed_into_place_only_when_complete(tmp_path):
    path, gone, here = (tmp_path / name for name in ("a.txt", f".a.txt.{1 << 22}.tmp", f".a.txt.{os.getppid()}.tmp"))
    for left in (gone, here):                   # no process has the first id, and the second one is alive
        left.write_text("half")
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path, "w") as f:
        f.write("half")
        f.flush()
        assert path.read_text() == "before"
        raise KeyboardInterrupt
    assert path.read_text() == "before" and sorted(os.listdir(tmp_path)) == [here.name, "a.txt"]
    with files.replacing(path, "w") as f:
        f.write("after")
    assert path.read_text() == "after" and sorted(os.listdir(tmp_path)) == [here.name, "a.txt"]


def test_too_little_memory_is_reported_in_one_line_and_an_error_raised_with_traceback_1(monkeypatch, capsys):
    for error in (None, MemoryError(), RuntimeError("Storage size calculation overflowed")):
        with pytest.raises(SystemExit), files.one_line_errors():
            raise error or torch.empty(1 << 50)
        assert_says("there is not enough memory.*smaller sizes, such as --batch_size", capsys.readouterr().err)
    for call in (lambda: torch.ones(1).add_(1, alpha=1e308), lambda: torch.full((1,), 1e308), lambda: math.exp(1e4)):
        with pytest.raises(SystemExit), files.one_line_errors():
            call()
        assert_says("a number is too large.*use smaller ones, such as --learning_rate", capsys.readouterr().err)
    for traceback, error in (("", RuntimeError("another")), ("1", ValueError("one"))):
        monkeypatch.setenv("TRACEBACK", traceback)
        with pytest.raises(type(error), match=str(error)), files.one_line_errors():
            raise error


NEW = "--max_iters=1 --device=cpu"
LOSS, LORA_LOSS = (f"eval.py loss --device=cpu --windows=2 --out_dir={run}" for run in ("run", "lora"))
FOX_LOSS, TOY_LOSS = f"{LOSS} --dataset=./data/fox", "eval.py loss --device=cpu --out_dir=toy_run --dataset=stdlib"
RESUME, PARTS = (f"train.py --init_from=resume --max_iters=9 --out_dir={run}" for run in ("run", "parts"))
JOIN = "common/shards.py parts/sharded_ckpt/2 parts/ckpt.pt"
SAMPLE = "eval.py sample --device=cpu --tokens=2 --out_dir=toy_run"


@pytest.fixture(scope="module")
def home(tmp_path_factory, elastic_run, toy_run, data):
    """A folder with finished runs: whole, in parts, in a public tokenizer, and an adapter on its base."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(elastic_run, home / "run")
    shutil.copytree(toy_run, home / "toy_run")
    shutil.copytree(data, home / "data" / "fox")
    train_here(f"--dataset={data}", f"--out_dir={home / 'parts'}", "--sharded_ckpt=1", "--max_iters=2")
    train_here(f"--init_from={home / 'run'}", f"--out_dir={home / 'lora'}", "--train_only=lora", "--eval_iters=1",
               "--batch_size=2", *NEW.split())
    entries(base=meta(home / "lora")["base"] | {"path": "run"})(home / "lora" / "meta.json")            # of each copy
    return home


def entries(**changes):
    """JSON with other entries."""
    return lambda path: path.write_text(json.dumps(files.read_json(path) | changes))


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def tensors(change, optimizer=False):
    """A checkpoint with change(tensor) in place of one matrix, or of AdamW's average of it."""
    def do(path):
        found = torch.load(path, weights_only=True)
        part = found["optimizer"]["state"][0] if optimizer else found["model"]
        name = "exp_avg" if optimizer else next(name for name in part if name.endswith(("c_attn.weight", "lora_a")))
        part[name] = change(part[name])
        torch.save(found, path)
    return do


class Attack:
    """An object that makes the file EVIL when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch EVIL",)


def parts(change):
    """A checkpoint in parts, after change(its metadata, its folder)."""
    def do(path):
        metadata = pickle.loads(path.read_bytes())
        change(metadata, path.parent)
        path.write_bytes(pickle.dumps(metadata))
    return do


def attack_step(metadata, folder):
    """Replace the number of the step, which is stored in a part, by an attack."""
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "step")
    attack = io.BytesIO()
    torch.save(Attack(), attack)
    place.offset, place.length = (folder / place.relative_path).stat().st_size, attack.tell()
    with open(folder / place.relative_path, "ab") as f:
        f.write(attack.getvalue())


def move_parts(metadata, folder):
    for place in metadata.storage_data.values():
        place.relative_path = "../../../parts/sharded_ckpt/2/" + place.relative_path


KINDS = {                                       # tensors that no checkpoint of ours holds
    "sparse": torch.Tensor.to_sparse, "int": torch.Tensor.int, "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t, t]), "scalar": lambda t: torch.tensor(1.0),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "expanded": lambda t: torch.zeros(1, 1).expand(t.shape)}
IDS, NAME = "not written by train.py", "must be a plain name"
DAMAGED = [                                     # (file, what is done to it, command, its one line)
    *(("toy_run/meta.json", entries(tokenizer=name), TOY_LOSS, NAME) for name in ("../../evil", "", "*", "\ud800")),
    *(("run/meta.json", lambda path, name=name: entries(knobs=meta(path.parent)["knobs"] | {"dataset": name})(path),
       command, NAME)
      for name, command in (("*", LOSS), ("..", LOSS), ("x" * 300, RESUME))),
    *(("run/meta.json", entries(), f"train.py --dataset={name} {NEW}", says)
      for name, says in (("x" * 300, NAME), ("/" + "x" * 300, "name too long"))),
    *(("toy_run/meta.json", entries(ends=ends), SAMPLE, IDS) for ends in ([[1]], 5, [True], [-1])),
    *(("toy_run/meta.json", entries(separator=id), SAMPLE, IDS) for id in (1 << 32, -1, 1.5, None)),
    ("toy_run/meta.json", entries(separator=300), SAMPLE, "separator 300 is not an id below 300"),
    *(("data/fox/meta.json", entries(**wrong), FOX_LOSS, "lacks vocab_size")
      for wrong in ({"separator": -1}, {"shards": {"../../run/ckpt.pt": {"tokens": 1, "sha256": ""}}})),
    *(("run/ckpt.pt", tensors(kind), LOSS, "other than dense tensors|is .. in the checkpoint|not a readable")
      for kind in KINDS.values()),
    *(("run/ckpt.pt", tensors(KINDS[kind], optimizer=True), RESUME, "optimizer state does not fit")
      for kind in ("sparse", "meta", "expanded", "scalar")),
    *(("lora/ckpt.pt", tensors(KINDS[kind]), LORA_LOSS, "other than dense|does not fit its base")
      for kind in ("sparse", "scalar")),
    *((path, pipe, command, f"{Path(path).name} is not a regular file") for path, command in (
        ("run/ckpt.pt", LOSS), ("run/log.csv", RESUME), ("run/meta.json", LOSS), ("data/fox/val.bin", FOX_LOSS),
        ("toy_run/tokenizer.json", SAMPLE), ("parts/sharded_ckpt/2/.metadata", PARTS),
        ("parts/sharded_ckpt/2/__0_0.distcp", PARTS))),
    *(("parts/sharded_ckpt/2/.metadata", parts(change), command, "sharded_ckpt/2 is not a readable checkpoint")
      for command in (PARTS, JOIN) for change in (
          lambda metadata, _: metadata.planner_data.update(x=Attack()), attack_step, move_parts)),
    *((f"parts/sharded_ckpt/2/{name}", lambda path, share=share: os.truncate(path, path.stat().st_size // share),
       PARTS, "not a readable checkpoint")
      for name in (".metadata", "__0_0.distcp") for share in (2, 10 ** 9)),
    ("parts/meta.json", lambda path: path.write_text(path.read_text().replace('"n_embd": 16', '"n_embd": 32')), PARTS,
     "not a readable checkpoint"),                 # the parts are those of another model
    *((name, lambda path: path.write_bytes(gzip.compress(b"x" * 2_000_000)),
       f"data/text.py --out_dir=out --tokenizer=bytes --source={name}", "(longer|more) than 1,000 bytes")
      for name in ("long.jsonl.gz", "long.txt.gz"))]


@pytest.mark.parametrize("file, damage, command, says", DAMAGED)
def test_a_damaged_or_malicious_file_ends_in_one_line(file, damage, command, says, home, tmp_path, monkeypatch, capsys):
    """Nothing is executed, and no file appears anywhere."""
    place = shutil.copytree(home, tmp_path / "deep" / "home")
    monkeypatch.chdir(place)
    monkeypatch.setattr(tokens, "HERE", place / "data")
    monkeypatch.setattr(tokens, "LONGEST", 1000)
    damage(place / file)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", command.split())
    script = str(ROOT / sys.argv[0])
    assert_says(says, complain(lambda _: runpy.run_path(script, run_name="__main__"), capsys)[1])
    assert sorted(tmp_path.rglob("*")) == before


@given(st.text("ab./\\*?[]~ \0\n-_é", max_size=5))
def test_a_plain_name_stays_in_its_folder(name):
    try:
        files.check_name(name, "--name")
    except ValueError:
        return
    path = os.path.join("data", name)
    assert os.path.normpath(path) == path and os.path.split(path) == ("data", name) and "*" not in name


REPLACE = {"type": "Replace", "pattern": {"String": "e"}}


@pytest.mark.parametrize("damage, says", [
    ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}}, r"Missing \[UNK\]"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(
        b"\0\4\0\0" + bytes(range(256)) * 4 + b"abc\0").decode()}}, "out of bounds"),
    ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE | {"content": "e" * 100}] * 5}}, "memory"),
    ({"normalizer": REPLACE | {"content": "x" * 300}}, "more than 100 tokens"), ({"model": {}}, ""),
    ({}, "more than 0.01 seconds")])
def test_a_foreign_tokenizer_is_tried_in_a_process_of_its_own(damage, says, toy, tmp_path, monkeypatch):
    """Some abort the process that loads them. Others fail only at the first text, fill all memory, or are slow."""
    monkeypatch.setattr(coders, "MEMORY", 1 << 30)
    monkeypatch.setattr(coders, "SECONDS", coders.SECONDS if damage else 0.01)
    files.write_json(tmp_path / "tokenizer.json", files.read_json(toy / "tokenizer.json") | damage)
    with pytest.raises(ValueError, match=f"not a tokenizer.json that the package tokenizers can use .*{says}"):
        tokens.tokenizer(str(tmp_path))
