"""train.py as real processes: it learns, it logs, it is killed and resumes, and it splits over ranks."""
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, complain, log_rows, losses, meta, run, same_weights, tiny_config, train, weights

import attention
import train as train_script
from model import GPT, Parser, add_flags

LEARN = ("--max_iters=60", "--learning_rate=2e-2", "--n_embd=32", "--eval_interval=30")
LONG = ("--attn=elastic", "--max_iters=300", "--eval_interval=30", "--log_interval=7", "--block_size=32", "--n_embd=32")


# ------------------------------------------------------------------------------------------------------------ what a run leaves

def test_loss_falls_from_that_of_a_guess(tmp_path, data):
    """As a real process; test_every_recipe_learns does the rest of the recipes in this one."""
    train(tmp_path, data, "--attn=softmax", *LEARN)
    assert abs(losses(tmp_path)[0] - np.log(257)) < 0.1
    assert losses(tmp_path)[-1] < 3.5 and meta(tmp_path)["losses"]["val"] < 3.5


def test_log_has_its_columns_and_a_row_for_every_interval(elastic_run):
    lines = (elastic_run / "log.csv").read_text().splitlines()
    assert lines[0] == "step,train_loss,val_loss,lr,grad_norm,ms,tokens_per_s"
    rows = [line.split(",") for line in lines[1:]]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 9)]
    assert [bool(row[2]) for row in rows] == [step in (4, 8) for step in range(1, 9)]


def test_learning_rate_warms_up_and_falls_to_a_tenth(elastic_run):
    rates = [float(row[3]) for row in log_rows(elastic_run)[1:]]
    assert rates[:2] == [1e-3, 2e-3] and abs(rates[-1] - 2e-4) < 1e-9 and rates[1:] == sorted(rates[1:], reverse=True)


def test_meta_says_how_the_run_was_made(elastic_run, data):
    m = meta(elastic_run)
    given = {"attn": "elastic", "n_layer": 1, "dropout": 0.1, "rule": "elastic", "pos": "rope", "dataset": str(data), "seed": 1337, "vocab_size": 257}
    assert {name: m["knobs"][name] for name in given} == given
    assert m["versions"]["torch"] == torch.__version__ and m["versions"]["python"] == sys.version.split()[0]
    assert m["parameters"] == sum(w.numel() for name, w in weights(elastic_run).items() if name != "lm_head.weight")
    assert m["data_hash"] and "git_commit" in m
    assert f"{m['losses']['val']:.6g}" == f"{float(log_rows(elastic_run)[-1][2]):.6g}" and m["losses"]["step"] == 8


def test_checkpoint_is_plain_tensors_under_plain_names(elastic_run):
    checkpoint = torch.load(elastic_run / "ckpt.pt", weights_only=True)
    assert checkpoint["step"] == 8 and {"model", "optimizer"} <= checkpoint.keys()
    names = {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.tau", "lm_head.weight"}
    assert names <= checkpoint["model"].keys()


def test_a_run_leaves_no_temporary_files(elastic_run):
    assert sorted(p.name for p in elastic_run.iterdir()) == ["ckpt.pt", "log.csv", "meta.json"]


def test_the_same_command_gives_the_same_run(elastic_run, tmp_path, data):
    train(tmp_path, data, "--attn=elastic", "--dropout=0.1")
    assert log_rows(tmp_path) == log_rows(elastic_run) and same_weights(tmp_path, elastic_run)


def test_evaluating_and_logging_do_not_change_the_training(elastic_run, tmp_path, data):
    train(tmp_path, data, "--attn=elastic", "--dropout=0.1", "--eval_interval=100", "--log_interval=3", "--eval_iters=2")
    assert same_weights(tmp_path, elastic_run)


def test_a_fresh_clone_prepares_its_data_trains_and_ends_with_a_report(tmp_path):
    for path in (*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py")):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    done = subprocess.run([sys.executable, "train.py", "--attn=elastic", "--max_iters=2", "--eval_iters=1", "--n_layer=1"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data/stdlib/train.bin").exists() and (tmp_path / "out/stdlib-elastic/ckpt.pt").exists()
    for words in ("bits per byte", "sink ratio", "density", "sparsity", "eval.py probe --out_dir=out/stdlib-elastic"):
        assert words in done.stdout
    assert "loss" in done.stderr and "tokens/s" in done.stderr


# --------------------------------------------------------------------------------------------------------- killed and resumed

def start(out_dir, data, *flags):
    """Begin training and do not wait for the end."""
    argv = command("train.py", *TINY, f"--dataset={data}", f"--out_dir={out_dir}", *flags)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def stop_at_random(out_dir, sign, process, signal_number):
    """Let a run get as far as the file `sign`, then a little further, and send it a signal. Returns what it printed."""
    wait_for(out_dir / sign, process)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal_number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal_number)
    return said


@pytest.fixture(scope="module", params=[0.0, 0.2], ids=["plain", "dropout"])
def uninterrupted(request, tmp_path_factory, data):
    """A run that nobody stops, and the flags that made it."""
    out, flags = tmp_path_factory.mktemp("uninterrupted"), (*LONG, f"--dropout={request.param}")
    train(out, data, *flags)
    return out, flags


def assert_resumes_to(expected, out_dir):
    run("train.py", f"--out_dir={out_dir}", "--init_from=resume")
    assert log_rows(out_dir) == log_rows(expected) and same_weights(out_dir, expected)
    assert meta(out_dir)["losses"] == meta(expected)["losses"]


def test_killed_twice_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, data):
    expected, flags = uninterrupted
    stop_at_random(tmp_path, "ckpt.pt", start(tmp_path, data, *flags), signal.SIGKILL)
    again = start(tmp_path, data, *flags, "--init_from=resume")
    time.sleep(random.uniform(0, 4))                                    # anywhere: importing, loading, training, saving, finished
    again.kill()
    again.communicate()
    assert_resumes_to(expected, tmp_path)


def test_ctrl_c_saves_says_how_to_resume_and_resumes_exactly(uninterrupted, tmp_path, data):
    expected, flags = uninterrupted
    said = stop_at_random(tmp_path, "ckpt.pt", start(tmp_path, data, *flags), signal.SIGINT)
    step = torch.load(tmp_path / "ckpt.pt", weights_only=True)["step"]
    assert f"saved at step {step}" in said and f"--out_dir={tmp_path} --init_from=resume" in said
    assert_resumes_to(expected, tmp_path)


def test_killed_before_the_first_checkpoint_resumes_from_the_start(elastic_run, tmp_path, data):
    flags = ("--attn=elastic", "--dropout=0.1", "--max_iters=100000", "--eval_interval=100000")
    stop_at_random(tmp_path, "log.csv", start(tmp_path, data, *flags), signal.SIGKILL)
    assert not (tmp_path / "ckpt.pt").exists()
    run("train.py", f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=8", "--eval_interval=4")
    assert log_rows(tmp_path) == log_rows(elastic_run) and same_weights(tmp_path, elastic_run)


def test_started_from_weights_and_killed_before_the_first_checkpoint(call, elastic_run, tmp_path, data):
    """Nothing was saved yet, so resuming must begin with those weights again, not with random ones."""
    flags = ("--max_iters=4", "--eval_interval=4", "--log_interval=1", f"--init_from={elastic_run}", "--device=cpu", "--dtype=float32")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        call(*flags, f"--out_dir={out}")
    (killed / "ckpt.pt").unlink()                                       # as if it had been killed at step 3
    call(f"--out_dir={killed}", "--init_from=resume")
    assert log_rows(killed) == log_rows(whole) and same_weights(killed, whole)


# ----------------------------------------------------------------------------------------------- many runs in this one process

@pytest.fixture
def call(capsys):
    """train.main in this process: cheaper than a process of its own where that proves nothing more. A new run is as tiny as can be."""
    def run_here(*argv):
        new = () if any(str(a).startswith("--init_from") for a in argv) else TINY
        with pytest.raises(SystemExit) as stop:
            train_script.main([*new, *map(str, argv)])
        said = capsys.readouterr()
        assert stop.value.code == 0, said.err
        return said.out
    return run_here


@pytest.fixture
def copy(elastic_run, tmp_path):
    """A copy of the finished elastic run, to change."""
    return shutil.copytree(elastic_run, tmp_path / "copy")


def test_resuming_a_finished_run_changes_nothing(call, copy, elastic_run):
    call("--init_from=resume", f"--out_dir={copy}")
    assert log_rows(copy) == log_rows(elastic_run) and same_weights(copy, elastic_run)
    assert meta(copy)["losses"] == meta(elastic_run)["losses"]


def test_a_finished_run_can_be_made_longer(call, copy, elastic_run):
    call("--init_from=resume", f"--out_dir={copy}", "--max_iters=12")
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 13)]
    assert log_rows(copy)[:9] == log_rows(elastic_run)


def test_flags_repeated_on_resume_are_welcome(call, copy, data):
    call("--init_from=resume", f"--out_dir={copy}", "--attn=elastic", "--n_layer=1", "--dropout=0.1", f"--dataset={data}", "--max_iters=9")


@pytest.mark.parametrize("flag", ["--n_layer=2", "--attn=softmax", "--seed=2", "--batch_size=2", "--learning_rate=0.5", "--dropout=0", "--pos=none",
                                  "--attn_args=tau_init=2", "--weight_decay=0", "--mlp=relu"])
def test_resuming_with_another_config_is_refused_and_touches_nothing(flag, copy, elastic_run, capsys):
    _, err = complain(train_script.main, capsys, "--init_from=resume", f"--out_dir={copy}", flag)
    assert flag.strip("-").split("=")[0] in err and "--out_dir" in err
    assert all((copy / name).read_bytes() == (elastic_run / name).read_bytes() for name in ("ckpt.pt", "log.csv", "meta.json"))


def test_another_run_in_the_same_folder_loses_nothing(call, copy, elastic_run, data):
    said = call(f"--out_dir={copy}", f"--dataset={data}", "--attn=elastic", "--max_iters=1")
    old = copy / "old" / "1"
    assert same_weights(old, elastic_run) and meta(old) == meta(elastic_run) and log_rows(old) == log_rows(elastic_run)
    assert str(old) in said and len(log_rows(copy)) == 2


def test_a_third_run_in_the_same_folder_loses_nothing_either(call, copy, data):
    kept = {(copy / "ckpt.pt").read_bytes()}
    for seed in (1, 2):
        call(f"--out_dir={copy}", f"--dataset={data}", "--max_iters=1", f"--seed={seed}")
        kept.add((copy / "ckpt.pt").read_bytes())
    assert {path.read_bytes() for path in copy.rglob("ckpt*.pt")} == kept


def test_init_from_a_path_starts_with_its_weights_and_model(call, elastic_run, tmp_path):
    call(f"--init_from={elastic_run}", f"--out_dir={tmp_path}", "--max_iters=1", "--learning_rate=1e-12", "--weight_decay=0", "--device=cpu",
         "--dtype=float32", "--eval_iters=1", "--batch_size=4")
    assert meta(tmp_path)["knobs"]["n_embd"] == 16 and meta(tmp_path)["knobs"]["attn"] == "elastic"
    for name, w in weights(tmp_path).items():
        torch.testing.assert_close(w, weights(elastic_run)[name], rtol=0, atol=1e-9)
    assert losses(tmp_path)[0] < 5.5 < losses(elastic_run)[0]


def settled(*argv):
    parser = Parser()
    add_flags(parser, train_script.Train, train_script.GPTConfig)
    return train_script.settle_knobs(parser.parse_args(argv))[0]


def test_precedence_is_flag_then_recipe_then_preset_then_default(monkeypatch):
    monkeypatch.setitem(train_script.PRESETS, "tiny", {"n_layer": 7, "n_head": 3, "pos": "learned", "rule": "softmax"})
    monkeypatch.setitem(attention.ATTENTIONS, "elastic", {"rule": "elastic", "n_head": 5, "pos": "none"})
    knobs = settled("--attn=elastic", "--n_embd=64")
    assert (knobs["n_embd"], knobs["n_head"], knobs["pos"], knobs["rule"], knobs["n_layer"]) == (64, 5, "none", "elastic", 7)
    assert "bias" not in knobs
    knobs = settled("--attn=elastic", "--pos=rope", "--n_head", "2", "--rule=softmax", "--n_layer=1")
    assert (knobs["n_head"], knobs["pos"], knobs["rule"], knobs["n_layer"]) == (2, "rope", "softmax", 1)
    assert settled()["pos"] == "learned"


@pytest.mark.parametrize("how", [("--batch_size=4", "--gradient_accumulation_steps=2"), ("--batch_size=3", "--gradient_accumulation_steps=4")])
def test_gradient_accumulation_equals_one_big_batch(how, call, tmp_path, data):
    total = 8 if "--batch_size=4" in how else 12
    for name, flags in (("big", (f"--batch_size={total}",)), ("parts", how)):
        call(f"--dataset={data}", f"--out_dir={tmp_path / name}", *flags)
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "big"), rtol=0, atol=1e-5)


def test_head_lr_moves_the_head_scalars_only_and_tau_is_not_decayed(call, tmp_path, data):
    runs = {}
    for name, flags in (("slow", ("--head_lr=0",)), ("fast", ("--head_lr=10",))):
        call(f"--dataset={data}", f"--out_dir={tmp_path / name}", "--attn=elastic", "--max_iters=1", "--warmup_iters=0", "--weight_decay=0.5", *flags)
        runs[name] = weights(tmp_path / name)
    tau = "transformer.h.0.attn.tau"
    assert torch.equal(runs["slow"][tau], torch.ones(2)) and (runs["fast"][tau] - 1).abs().max() > 1e-3
    assert all(torch.equal(runs["slow"][name], runs["fast"][name]) for name in runs["slow"] if name != tau)


@pytest.mark.parametrize("attn", attention.ATTENTIONS)
def test_every_recipe_learns(attn, call, tmp_path, data):
    call(f"--dataset={data}", f"--out_dir={tmp_path}", f"--attn={attn}", *LEARN)
    assert abs(losses(tmp_path)[0] - np.log(257)) < 0.1
    assert losses(tmp_path)[-1] < 3.5 and meta(tmp_path)["losses"]["val"] < 3.5


def test_dex_fades_over_from_its_fixed_to_its_learned_lambda(call, tmp_path, data):
    """The loop tells the layer how much of the training is over, the checkpoint keeps it, and the correction has begun to learn."""
    call(f"--dataset={data}", f"--out_dir={tmp_path}", "--attn=dex", "--max_iters=10", "--eval_interval=5")
    state = weights(tmp_path)
    assert state["transformer.h.0.attn.progress"] == 1 and state["transformer.h.0.attn.dex_lambda"] != 0
    assert state["transformer.h.0.attn.dex_proj.weight"].abs().max() > 0


# ------------------------------------------------------------------------------------------------------------- ranks, compile

def test_data_parallel_wraps_every_recipe_without_an_unused_parameter(tmp_path):
    """A parameter that got no gradient would be an error at the second step."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for attn in attention.ATTENTIONS:
            wrapped = torch.nn.parallel.DistributedDataParallel(GPT(tiny_config(attn=attn)))
            for _ in range(2):
                idx = torch.randint(31, (2, 9))
                wrapped(idx, idx)[1].backward()
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path, data):
    for ranks in (1, 2):                                                # 12 sequences a step: micro-batches of 4 4 4, or 4 2 on each rank
        train(tmp_path / str(ranks), data, "--attn=elastic", "--gradient_accumulation_steps=3", "--eval_iters=3", ranks=ranks)
    one, two = (np.array([[float(x or 0) for x in row] for row in log_rows(tmp_path / str(ranks))[1:]]) for ranks in (1, 2))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_training_is_the_same_and_saves_plain_names(tmp_path, data, elastic_run):
    train(tmp_path, data, "--compile", "--attn=elastic", env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    assert weights(tmp_path).keys() == weights(elastic_run).keys()
    train(tmp_path / "eager", data, "--attn=elastic")
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "eager"), rtol=0, atol=1e-4)


def test_a_new_recipe_leaves_nothing_of_the_old_one_behind():
    """A stored run looked at, or gone on with, under another --attn: the model is the one that --attn alone makes."""
    from attention import ATTENTIONS, AXES
    from eval import model_config
    from model import GPTConfig
    for before in ATTENTIONS:
        stored = vars(GPTConfig(attn=before, n_layer=1))
        for after in ATTENTIONS:
            config = model_config(stored, {"attn": after})
            assert {axis: getattr(config, axis) for axis in AXES} == {axis: getattr(GPTConfig(attn=after), axis) for axis in AXES}, (before, after)
    kept = model_config(vars(GPTConfig(attn="softmax", gate="head")), {"attn": "elastic"})
    assert kept.gate == "head"                  # a flag's choice stays


def test_resuming_a_preset_goes_on_with_its_own_run(tmp_path, monkeypatch):
    import train as train_script
    monkeypatch.chdir(tmp_path)
    short = ("--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--batch_size=2", "--device=cpu")
    with pytest.raises(SystemExit) as stop:
        train_script.main(["--preset=lab", *short])
    assert stop.value.code == 0 and (tmp_path / "out" / "backcopy-softmax" / "ckpt.pt").exists()
    with pytest.raises(SystemExit) as stop:
        train_script.main(["--preset=lab", "--init_from=resume", "--max_iters=3"])
    assert stop.value.code == 0 and meta(tmp_path / "out" / "backcopy-softmax")["losses"]["step"] == 3


def test_weights_are_not_taken_from_the_folder_that_is_written(elastic_run, tmp_path, capsys):
    import shutil

    import train as train_script
    from conftest import complain
    copy = shutil.copytree(elastic_run, tmp_path / "run")
    assert "another --out_dir" in complain(train_script.main, capsys, f"--init_from={copy}", f"--out_dir={copy}", "--device=cpu")[1]
    assert same_weights(copy, elastic_run)


def test_windows_longer_than_a_sequence_are_refused(tmp_path, capsys):
    import train as train_script
    from conftest import complain
    assert "sequences" in complain(train_script.main, capsys, "--preset=lab", "--block_size=65", f"--out_dir={tmp_path}", "--device=cpu")[1]
