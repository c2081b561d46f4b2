"""common/runs.py: broken runs are refused and left alone, earlier runs are kept, a full disk loses nothing."""
import json
import pickle
import resource
from functools import partial

import pytest
import torch
from conftest import FILES, TEXT, assert_same_run, assert_says, complain, log_rows, meta, run, train_here

import eval as eval_script
import train as train_script
from common.runs import USUAL
from evals.instrument import load_run

# --------------------------------------------------------------------------------------------------------- broken runs


class Stranger:
    """Something that a pickle may hold and a checkpoint may not."""


def rewrite(name, change):
    """Damage one file of a run: change(bytes) -> bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def edited_knobs(**knobs):
    def edit(text):
        stored = json.loads(text)
        return json.dumps(stored | {"knobs": stored["knobs"] | knobs}).encode()
    return rewrite("meta.json", edit)


def saved(value):
    return lambda folder: torch.save(value, folder / "ckpt.pt")


BROKEN = {                                      # name: (what happened to a good run, what the message must hold)
    "checkpoint of no bytes": (rewrite("ckpt.pt", lambda b: b""), "ckpt.pt"),
    "checkpoint cut": (rewrite("ckpt.pt", lambda b: b[:len(b) // 2]), "ckpt.pt.*damaged"),
    "checkpoint of noise": (rewrite("ckpt.pt", lambda b: bytes(range(256)) * 40), "ckpt.pt.*damaged"),
    "another pickle": (rewrite("ckpt.pt", lambda b: pickle.dumps({"a": Stranger()}, 2)), "ckpt.pt.*train.py"),
    "another torch file": (saved({"weight": torch.ones(2)}), "ckpt.pt.*train.py"),
    "a tensor": (saved(torch.ones(2)), "ckpt.pt.*train.py"),
    "a nanoGPT checkpoint": (saved({"model": {}, "optimizer": {}, "iter_num": 5}), "ckpt.pt.*train.py"),
    "no weights in it": (saved({"model": {}, "optimizer": {}, "step": 5}), "ckpt.pt.*transformer.wte.weight"),
    "wider config": (edited_knobs(n_embd=32), "transformer.wte.weight"),
    "deeper config": (edited_knobs(n_layer=2), "transformer.h.1"),
    "other vocabulary": (edited_knobs(vocab_size=300), "transformer.wte.weight"),
    "other recipe": (edited_knobs(attn="softmax", rule="softmax"), "tau"),
    "impossible config": (edited_knobs(n_head=3), "n_head=3"),
    "unknown recipe": (edited_knobs(attn="nonsense"), "nonsense.*softmax"),
    "meta missing": (lambda folder: (folder / "meta.json").unlink(), "meta.json.*train"),
    "meta cut": (rewrite("meta.json", lambda b: b[:99]), "meta.json"),
    "meta no text": (rewrite("meta.json", lambda b: bytes(range(128, 256))), "meta.json"),
    "meta of something else": (rewrite("meta.json", lambda b: b'{"a": 1}'), "meta.json.*train.py"),
    "meta a list": (rewrite("meta.json", lambda b: b"[]"), "meta.json.*train.py"),
}


@pytest.mark.parametrize("how", ["eval", "resume", "init_from"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_run_is_refused_and_left_alone(broken, how, copy, tmp_path, capsys):
    do, says = BROKEN[broken]
    do(copy)
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    main, args = {"eval": (eval_script.main, ("loss", f"--out_dir={copy}")),
                  "resume": (train_script.main, ("--init_from=resume", f"--out_dir={copy}")),
                  "init_from": (train_script.main, (f"--init_from={copy}", f"--out_dir={tmp_path / 'new'}"))}[how]
    assert_says(says, complain(main, capsys, *args)[1])
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
    assert not (tmp_path / "new" / "ckpt.pt").exists()


def test_a_context_longer_than_learned_positions_is_refused(data, tmp_path, capsys):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'short'}", "--pos=learned", "--max_iters=1")
    capsys.readouterr()
    _, err = complain(train_script.main, capsys, f"--init_from={tmp_path / 'short'}", "--block_size=32",
                      f"--out_dir={tmp_path / 'new'}")
    assert_says("wpe.*16.*32", err)


def test_a_recipe_of_other_projections_is_named_with_recipes_that_fit(data, tmp_path, capsys):
    """As an error of eval.py and of train.py; every recipe that the error names does fit."""
    base = tmp_path / "base"
    train_here(f"--dataset={data}", f"--out_dir={base}", "--attn=softmax", "--max_iters=1")
    capsys.readouterr()
    for attn, diff in (("diff2", "v2"), ("tda", "subtract"), ("diff_rela", "subtract")):
        says = rf"--attn={attn} \(--diff={diff}\).*projections.*cannot be put under.*softmax, .*elastic"
        assert_says(says, complain(eval_script.main, capsys, "loss", f"--out_dir={base}", f"--attn={attn}")[1])
        assert_says(says, complain(train_script.main, capsys, f"--init_from={base}", f"--attn={attn}",
                                   f"--out_dir={tmp_path / 'new'}")[1])
    for attn in USUAL:
        assert load_run(base, "cpu", {"attn": attn})[0].config.attn == attn


# -------------------------------------------------------------------------------------------------------- earlier runs

def test_another_run_in_the_same_folder_loses_nothing(copy, elastic_run, data, capsys):
    train_here(f"--out_dir={copy}", f"--dataset={data}", "--attn=elastic", "--max_iters=1")
    old = copy / "old" / "1"
    assert_same_run(old, elastic_run)
    assert meta(old) == meta(elastic_run)
    assert str(old) in capsys.readouterr().out and len(log_rows(copy)) == 2


def test_a_third_run_in_the_same_folder_loses_nothing_either(copy, data):
    kept = {(copy / "ckpt.pt").read_bytes()}
    for seed in (1, 2):
        train_here(f"--out_dir={copy}", f"--dataset={data}", "--max_iters=1", f"--seed={seed}")
        kept.add((copy / "ckpt.pt").read_bytes())
    assert {path.read_bytes() for path in copy.rglob("ckpt*.pt")} == kept


# --------------------------------------------------------------------------------------------------------- a full disk

def small_disk(limit=20000):
    """No file of this process may grow beyond so many bytes. 20 kB fit a log, but no checkpoint; 500 bytes not even a
    log."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit, says", [
    (20000, "step 12.*checkpoint of step 8 is still there"), (500, "copy at step 8")])
def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_can_go_on(limit, says, copy, elastic_run):
    flags = ("--init_from=resume", f"--out_dir={copy}", "--max_iters=12")
    done = run("train.py", *flags, ok=False, preexec_fn=partial(small_disk, limit))
    assert done.returncode not in (0, None) and "Traceback" not in done.stderr
    assert (copy / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert sorted(p.name for p in copy.iterdir()) == sorted(FILES)
    line = done.stderr.rstrip("\n").splitlines()[-1]                    # those before are the progress bar
    assert_says(says, line)
    assert_says("space|resume", line)                                   # what to do
    train_here(*flags)
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 13)]


def test_a_full_disk_leaves_no_half_data_set(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(60):
        (source / f"module_{i}.py").write_text(TEXT * 20)
    done = run("data/stdlib.py", f"--source={source}", f"--out_dir={out}", ok=False, preexec_fn=small_disk)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "stdlib.py: error: " in done.stderr
    assert not list(out.iterdir())
