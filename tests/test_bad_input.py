"""Whatever is wrong with flags, data, checkpoints or the disk: one clear line, a non-zero exit, and nothing saved is lost."""
import json
import pickle
import resource
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TEXT, TINY, complain, log_rows, run, train, write_data

import eval as eval_script
import train as train_script
from data import tokens

WORDS = np.frombuffer((TEXT * 300).encode(), np.uint8)
FILES = ("ckpt.pt", "log.csv", "meta.json")


@pytest.fixture
def kept(elastic_run, tmp_path):
    """A copy of a finished run, whose three files must be the same after the test."""
    copy = shutil.copytree(elastic_run, tmp_path / "kept")
    yield copy
    assert all((copy / name).read_bytes() == (elastic_run / name).read_bytes() for name in FILES)
    assert sorted(p.name for p in copy.iterdir()) == sorted(FILES)


@pytest.fixture
def train_fails(kept, data, capsys):
    """Train into the folder of a finished run with bad input: (exit code, the line on stderr)."""
    def call(*flags):
        return complain(train_script.main, capsys, *TINY, f"--dataset={data}", f"--out_dir={kept}", *flags)
    return call


# ---------------------------------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("flag, says", [
    ("--nonsense=1", "valid flags: .*--n_layer"), ("--n_layr=1", "did you mean --n_layer"), ("nonsense", "nonsense"), ("--n_layer", "n_layer"),
    ("--attn=nonsense", "softmax.*elastic"), ("--pos=nonsense", "rope.*none.*learned"), ("--rule=nonsense", "softmax.*elastic"),
    ("--mlp=nonsense", "swiglu"), ("--norm=nonsense", "rmsnorm"), ("--kernel=nonsense", "sdpa"), ("--dtype=int8", "bfloat16"),
    ("--preset=nonsense", "tiny"), ("--n_layer=two", "n_layer"), ("--bias=maybe", "bias"), ("--learning_rate=fast", "learning_rate")])
def test_a_wrong_flag_exits_with_2_and_names_what_is_valid(flag, says, train_fails):
    code, err = train_fails(flag)
    assert code == 2
    assert_says(says, err)


def assert_says(pattern, line):
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(line)


@pytest.mark.parametrize("flag", [
    "--n_layer=0", "--n_head=0", "--n_embd=-16", "--block_size=0", "--batch_size=0", "--max_iters=-1", "--vocab_size=-1", "--eval_interval=0",
    "--eval_iters=0", "--log_interval=0", "--gradient_accumulation_steps=0", "--learning_rate=0", "--learning_rate=nan", "--seed=-1", "--dropout=1",
    "--beta2=1", "--n_embd=17", "--n_kv_head=3", "--warmup_iters=-1", "--grad_clip=-1", "--head_lr=-1", "--weight_decay=-1", "--n_inner=-1",
    "--rope_base=0", "--max_iters=0"])
def test_a_size_that_cannot_be_is_named(flag, train_fails):
    assert flag.strip("-").split("=")[0] in train_fails(flag)[1]


@pytest.mark.parametrize("flags, says", [
    (("--attn=elastic", "--attn_args=nonsense=1"), "tau_init"), (("--attn=elastic", "--attn_args=tau_init=much"), "tau_init"),
    (("--attn=elastic", "--kernel=sdpa"), "auto or torch"), (("--kernel=triton", "--dropout=0.1"), "dropout.*auto or torch"),
    (("--device=nonsense",), "--device=nonsense"), (("--device=meta",), "choose cuda"), (("--learning_rate=inf",), "learning_rate"),
    (("--min_lr=nan",), "min_lr"), (("--rope_base=inf",), "rope_base"), (("--attn=elastic", "--attn_args=tau_init=nan"), "tau_init"),
    (("--dataset=nonsense",), "stdlib"), (("--dataset=no/such/folder",), "no/such/folder.*stdlib"), (("--vocab_size=100",), "257"),
    (("--init_from=no/such/run",), "no/such/run"), (("--init_from=resume", "--out_dir=no/such/run"), "no/such/run")])
def test_what_cannot_be_done_says_what_can(flags, says, train_fails):
    assert_says(says, train_fails(*flags)[1])


# ----------------------------------------------------------------------------------------------------------------------- data

def rewrite(name, change):
    """Damage one file of a data set: change(bytes) -> bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def meta_without(key):
    return rewrite("meta.json", lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != key}).encode())


DAMAGE = {                                      # name: (what happened to a good data set, what the message must hold)
    "shard missing": (lambda folder: (folder / "train.bin").unlink(), "train.bin is missing.*(run|make)"),
    "meta missing": (lambda folder: (folder / "meta.json").unlink(), "meta.json is missing.*make"),
    "shard of no bytes": (rewrite("train.bin", lambda b: b""), "train.bin.*run"),
    "header only": (rewrite("val.bin", lambda b: b[:1024]), "val.bin.*damaged.*run"),
    "truncated": (rewrite("val.bin", lambda b: b[:-100]), "val.bin.*damaged.*run"),
    "too long": (rewrite("val.bin", lambda b: b + b"xx"), "val.bin.*damaged.*run"),
    "foreign": (rewrite("train.bin", lambda b: b"PNG" * 1000), "train.bin.*no token file.*run"),
    "raw nanoGPT file": (rewrite("train.bin", lambda b: b[1024:]), "train.bin.*no token file.*run"),
    "one token changed": (rewrite("train.bin", lambda b: b[:-2] + b"\x01\x00"), "train.bin.*sha256.*run"),
    "meta cut": (rewrite("meta.json", lambda b: b[:50]), "meta.json.*make"),
    "meta of no bytes": (rewrite("meta.json", lambda b: b""), "meta.json.*make"),
    "meta no text": (rewrite("meta.json", lambda b: bytes(range(128, 256))), "meta.json.*make"),
    "meta a list": (rewrite("meta.json", lambda b: b"[1, 2]"), "meta.json.*make"),
    "meta without shards": (meta_without("shards"), "meta.json.*shards.*make"),
    "meta without vocabulary": (meta_without("vocab_size"), "meta.json.*vocab_size.*make"),
    "train too short": (lambda folder: write_data(folder, WORDS[:16], WORDS), "train.*block_size"),
    "val too short": (lambda folder: write_data(folder, WORDS, WORDS[:16]), "val.*block_size"),
    "train of no tokens": (lambda folder: write_data(folder, WORDS[:0], WORDS), "train.*no tokens.*run"),
    "train ids outside the vocabulary": (lambda folder: write_data(folder, WORDS.astype(int) + 200, WORDS), "train.*token id.*vocab"),
    "val ids outside the vocabulary": (lambda folder: write_data(folder, WORDS, WORDS.astype(int) + 200), "val.*token id.*vocab"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_is_refused_before_any_work(damage, data, tmp_path, train_fails):
    folder = shutil.copytree(data, tmp_path / "fox")
    do, says = DAMAGE[damage]
    do(folder)
    assert_says(says, train_fails(f"--dataset={folder}")[1])


def test_resuming_on_changed_data_is_refused(kept, data, tmp_path, train_fails):
    meta_file, before = data / "meta.json", (data / "meta.json").read_bytes()
    shards = {name: (data / name).read_bytes() for name in ("train.bin", "val.bin")}
    try:
        write_data(data, WORDS[:9000], WORDS[:900])
        assert_says("data set.*changed", train_fails("--init_from=resume", "--attn=elastic", "--dropout=0.1")[1])
    finally:
        for name, content in shards.items():
            (data / name).write_bytes(content)
        meta_file.write_bytes(before)


def test_a_batch_that_ranks_cannot_share_is_refused(kept, data):
    done = train(kept, data, "--batch_size=3", ranks=2, ok=False)
    assert done.returncode != 0 and "cannot be shared by 2 ranks" in done.stderr and "multiple of 2" in done.stderr


# ---------------------------------------------------------------------------------------------------------------- checkpoints

class Stranger:
    """Something that a pickle may hold and a checkpoint may not."""


def edited_knobs(**knobs):
    def edit(text):
        stored = json.loads(text)
        return json.dumps(stored | {"knobs": stored["knobs"] | knobs}).encode()
    return rewrite("meta.json", edit)


def saved(value):
    return lambda run: torch.save(value, run / "ckpt.pt")


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
    "meta missing": (lambda run: (run / "meta.json").unlink(), "meta.json.*train"),
    "meta cut": (rewrite("meta.json", lambda b: b[:99]), "meta.json"),
    "meta no text": (rewrite("meta.json", lambda b: bytes(range(128, 256))), "meta.json"),
    "meta of something else": (rewrite("meta.json", lambda b: b'{"a": 1}'), "meta.json.*train.py"),
    "meta a list": (rewrite("meta.json", lambda b: b"[]"), "meta.json.*train.py"),
}


@pytest.mark.parametrize("how", ["eval", "resume", "init_from"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_run_is_refused_and_left_alone(broken, how, elastic_run, tmp_path, capsys):
    folder = shutil.copytree(elastic_run, tmp_path / "broken")
    do, says = BROKEN[broken]
    do(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    main, args = {"eval": (eval_script.main, ("loss", f"--out_dir={folder}")),
                  "resume": (train_script.main, ("--init_from=resume", f"--out_dir={folder}")),
                  "init_from": (train_script.main, (f"--init_from={folder}", f"--out_dir={tmp_path / 'new'}"))}[how]
    assert_says(says, complain(main, capsys, *args)[1])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert not (tmp_path / "new" / "ckpt.pt").exists()


def test_a_context_longer_than_learned_positions_is_refused(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_script.main([*TINY, f"--dataset={data}", f"--out_dir={tmp_path / 'short'}", "--pos=learned", "--max_iters=1"])
    capsys.readouterr()
    _, err = complain(train_script.main, capsys, f"--init_from={tmp_path / 'short'}", "--block_size=32", f"--out_dir={tmp_path / 'new'}")
    assert_says("wpe.*16.*32", err)


# ---------------------------------------------------------------------------------------------------------- while it is running

def last_line(done):
    """What a run that broke off said last; the lines before are its progress bar."""
    assert done.returncode not in (0, None) and "Traceback" not in done.stderr
    return done.stderr.rstrip("\n").splitlines()[-1]


def small_disk(limit=20000):
    """No file of this process may grow beyond so many bytes. 20 kB fit a log, but no checkpoint; 500 bytes not even a log."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit, says", [(20000, "step 12.*checkpoint of step 8 is still there"), (500, "run at step 8")])
def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_can_go_on(limit, says, elastic_run, tmp_path):
    folder = shutil.copytree(elastic_run, tmp_path / "run")
    flags = ("--init_from=resume", f"--out_dir={folder}", "--max_iters=12")
    line = last_line(run("train.py", *flags, ok=False, preexec_fn=partial(small_disk, limit)))
    assert (folder / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert_says(says, line)
    assert_says("space|resume", line)                                   # what to do
    run("train.py", *flags)
    assert [row[0] for row in log_rows(folder)[1:]] == [str(step) for step in range(1, 13)]


def test_a_full_disk_leaves_no_half_data_set(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(60):
        (source / f"module_{i}.py").write_text(TEXT * 20)
    done = run("data/stdlib.py", f"--source={source}", f"--out_dir={out}", ok=False, preexec_fn=small_disk)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "stdlib.py: error: " in done.stderr
    assert not list(out.iterdir())


@pytest.mark.parametrize("eval_interval, step", [(5, 10), (1, 9)])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_good_checkpoint(eval_interval, step, elastic_run, tmp_path):
    """Step 9 throws the weights far away: its own loss is still finite, the validation loss after it and the loss of step 10 are not."""
    folder = shutil.copytree(elastic_run, tmp_path / "run")
    edited_knobs(learning_rate=1e35, min_lr=1e35)(folder)
    done = run("train.py", "--init_from=resume", f"--out_dir={folder}", "--max_iters=12", f"--eval_interval={eval_interval}", ok=False)
    assert (folder / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert_says(f"step {step}.*checkpoint of step 8 is still there.*learning_rate", last_line(done))


def test_real_processes_end_the_same_way(kept, data):
    for done, code in ((run("train.py", "--attn=nonsense", ok=False), 2), (run("eval.py", "loss", "--out_dir=nowhere", ok=False), 1),
                       (train(kept, data, "--n_embd=17", ok=False), 2)):
        assert done.returncode == code and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr and done.stdout == ""


def test_token_files_refuse_what_uint16_cannot_hold(tmp_path):
    for ids in ([0, 70000], [-1, 5]):
        with pytest.raises(ValueError, match="0..65535"):
            tokens.write_shard(tmp_path / "x.bin", np.array(ids))
    assert not list(tmp_path.iterdir())
