"""train.py: the files of a run, killed and resumed runs, batches split over ranks and micro-steps, presets."""
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import below, close, dice, same
from conftest import (RECIPES, ROOT, TINY, assert_close_runs, assert_same_run, assert_says, by_default, command,
                      contents, log_rows, losses, meta, tiny_config, train, train_here, weights)

import train as train_script
from common import files
from common.flags import fields_of
from data import tokens
from model import GPT, GPTConfig
from training import balance

LEARN = ("--max_iters=60", "--learning_rate=2e-2", "--n_embd=32", "--eval_interval=30")
LONG = ("--attn=elastic", "--max_iters=300", "--eval_interval=30", "--log_interval=7", "--block_size=32",
        "--n_embd=32")


# ------------------------------------------------------------------------------------------------- the files of a run

def test_log_has_its_columns_and_a_row_for_every_interval(elastic_run):
    """The learning rate warms up, then falls to a tenth."""
    header, *rows = (line.split(",") for line in (elastic_run / "log.csv").read_text().splitlines())
    assert header == "step train_loss val_loss lr grad_norm ms tokens_per_s".split()
    assert [row[0] for row in rows] == [str(step) for step in range(1, 9)]
    assert [bool(row[2]) for row in rows] == [step in (4, 8) for step in range(1, 9)]
    rates = [float(row[3]) for row in rows]
    close([*rates[:2], rates[-1]], [1e-3, 2e-3, 2e-4], terms=1, dtype=torch.float32)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_meta_says_how_the_run_was_made(elastic_run, data):
    m = meta(elastic_run)
    given = {"attn": "elastic", "n_layer": 1, "dropout": 0.1, "rule": "elastic", "pos": "rope", "dataset": str(data),
             "seed": 1337, "vocab_size": 257}
    assert {name: m["knobs"][name] for name in given} == given
    assert m["versions"]["torch"] == torch.__version__ and m["versions"]["python"] == sys.version.split()[0]
    assert m["parameters"] == sum(w.numel() for name, w in weights(elastic_run).items() if name != "lm_head.weight")
    assert m["data_hash"] and "git_commit" in m and m["losses"]["step"] == 8
    close(m["losses"]["val"], float(log_rows(elastic_run)[-1][2]), terms=1, dtype=torch.float32)


def test_a_run_leaves_three_files_and_plain_tensors_under_plain_names(elastic_run):
    assert sorted(contents(elastic_run)) == ["ckpt.pt", "log.csv", "meta.json"]
    checkpoint = torch.load(elastic_run / "ckpt.pt", weights_only=True)
    assert checkpoint["step"] == 8 and {"model", "optimizer"} <= checkpoint.keys()
    names = {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.tau",
             "lm_head.weight"}
    assert names <= checkpoint["model"].keys()


def test_the_same_command_gives_the_same_run(elastic_run, tmp_path, data):
    """The command runs in another process here. All other tests may therefore train in this process."""
    train(tmp_path, data, "--attn=elastic", "--dropout=0.1")
    assert_same_run(tmp_path, elastic_run)


def test_evaluating_and_logging_do_not_change_the_training(elastic_run, tmp_path, data):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", "--attn=elastic", "--dropout=0.1", "--eval_interval=100",
               "--log_interval=3", "--eval_iters=2")
    same(weights(tmp_path), weights(elastic_run))


@pytest.mark.parametrize("dtype", ["float32", by_default(False, "bfloat16")])
@pytest.mark.parametrize("attn", RECIPES)
def test_every_recipe_learns(attn, dtype, tmp_path, data):
    """The loss starts at that of a uniform guess, up to the initial logits' spread of 0.1, and falls far below it."""
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", f"--attn={attn}", f"--dtype={dtype}", *LEARN,
               *(["--window=4"] if attn == "focus" else []))            # its router needs pairs beyond the window
    first = losses(tmp_path)[0]
    below(abs(first - np.log(257)), 0.1)
    below(1.5, first - max(losses(tmp_path)[-1], meta(tmp_path)["losses"]["val"]))


def test_head_lr_moves_the_head_scalars_only_and_tau_is_not_decayed(tmp_path, data):
    runs = {}
    for name, flag in (("slow", "--head_lr=0"), ("fast", "--head_lr=10")):
        train_here(f"--dataset={data}", f"--out_dir={tmp_path / name}", "--attn=elastic", "--max_iters=1",
                   "--warmup_iters=0", "--weight_decay=0.5", flag)
        runs[name] = weights(tmp_path / name)
    tau = "transformer.h.0.attn.tau"
    same(runs["slow"].pop(tau), torch.ones(2))
    below(5e-4, (runs["fast"].pop(tau) - 1).abs().max())
    same(runs["slow"], runs["fast"])


def test_a_fresh_clone_prepares_its_data_trains_and_ends_with_a_report(tmp_path):
    rooms = (ROOT, *(ROOT / room for room in ("axes", "common", "data", "evals", "mixers", "training")))
    for path in (path for room in rooms for path in room.glob("*.py")):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    done = subprocess.run([sys.executable, "train.py", "--attn=elastic", "--max_iters=2", "--eval_iters=1",
                           "--n_layer=1"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data/stdlib/train.bin").exists() and (tmp_path / "out/stdlib-elastic/ckpt.pt").exists()
    for words in ("bits per byte", "sink ratio", "density", "sparsity", "eval.py probe --out_dir=out/stdlib-elastic"):
        assert words in done.stdout
    assert "loss" in done.stderr and "tokens/s" in done.stderr


# ---------------------------------------------------------------------------------------------- killed and resumed

def start(out_dir, data, *flags):
    """Begin training in another process and do not wait for the end."""
    argv = command("train.py", *TINY, f"--dataset={data}", f"--out_dir={out_dir}", *flags)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def stop_at_random(out_dir, sign, process, signal_number):
    """Wait until a run has written the file `sign`, then a little longer. Send it a signal. Returns what it printed."""
    deadline = time.monotonic() + 120
    while not (out_dir / sign).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal_number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal_number)
    return said


@pytest.fixture(scope="session", params=[by_default(False, 0.0), 0.2], ids=["plain", "dropout"])
def uninterrupted(request, tmp_path_factory, data):
    """A run that is not stopped, and the flags that made it."""
    out, flags = tmp_path_factory.mktemp("uninterrupted"), (*LONG, f"--dropout={request.param}")
    train_here(f"--dataset={data}", f"--out_dir={out}", *flags)
    return out, flags


def assert_resumes_to(expected, out_dir):
    train_here(f"--out_dir={out_dir}", "--init_from=resume")
    assert_same_run(out_dir, expected)
    assert meta(out_dir)["losses"] == meta(expected)["losses"]


@pytest.mark.xdist_group("uninterrupted")
def test_killed_twice_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, data):
    expected, flags = uninterrupted
    stop_at_random(tmp_path, "ckpt.pt", start(tmp_path, data, *flags), signal.SIGKILL)
    again = start(tmp_path, data, *flags, "--init_from=resume")
    time.sleep(random.uniform(0, 4))            # it imports, loads, trains, saves or has finished
    again.kill()
    again.communicate()
    assert_resumes_to(expected, tmp_path)


@pytest.mark.xdist_group("uninterrupted")
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
    train_here(f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=8", "--eval_interval=4")
    assert_same_run(tmp_path, elastic_run)


def test_a_run_from_weights_killed_before_its_first_checkpoint_resumes_from_them(elastic_run, tmp_path):
    """Nothing was saved yet, so resuming must begin with those weights again, not with random ones."""
    flags = ("--max_iters=4", "--eval_interval=4", "--log_interval=1", f"--init_from={elastic_run}", "--device=cpu",
             "--dtype=float32")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        train_here(*flags, f"--out_dir={out}")
    (killed / "ckpt.pt").unlink()               # as if it had been killed at step 3
    train_here(f"--out_dir={killed}", "--init_from=resume")
    assert_same_run(killed, whole)


def test_resuming_a_finished_run_changes_nothing(copy, elastic_run):
    assert_resumes_to(elastic_run, copy)


@pytest.mark.parametrize("repeated", [(), ("--attn=elastic", "--n_layer=1", "--dropout=0.1")])
def test_a_finished_run_can_be_made_longer_also_with_its_flags_repeated(repeated, copy, elastic_run, data):
    flags = (*repeated, f"--dataset={data}") if repeated else ()
    train_here("--init_from=resume", f"--out_dir={copy}", "--max_iters=12", *flags)
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 13)]
    assert log_rows(copy)[:9] == log_rows(elastic_run)


def test_a_run_in_float32_continues_in_float16(copy):
    """float16 needs a scaler, of which the checkpoint holds nothing."""
    train_here(f"--out_dir={copy}", "--init_from=resume", "--max_iters=10", "--dtype=float16")
    scaler = torch.load(copy / "ckpt.pt", weights_only=True)["scaler"]
    assert scaler["scale"] > 0 and meta(copy)["losses"]["step"] == 10


def test_resuming_a_preset_continues_its_own_run(backcopy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--batch_size=2", "--device=cpu")
    with pytest.raises(SystemExit) as stop:
        train_script.main(["--preset=lab", f"--dataset={backcopy}", *short])
    assert stop.value.code == 0 and (tmp_path / "out" / "backcopy-softmax" / "ckpt.pt").exists()
    with pytest.raises(SystemExit) as stop:
        train_script.main(["--preset=lab", "--init_from=resume", "--max_iters=3"])
    assert stop.value.code == 0 and meta(tmp_path / "out" / "backcopy-softmax")["losses"]["step"] == 3


def test_init_from_a_path_starts_with_its_weights_and_model(elastic_run, tmp_path):
    train_here(f"--init_from={elastic_run}", f"--out_dir={tmp_path}", "--max_iters=1", "--learning_rate=1e-12",
               "--weight_decay=0", "--device=cpu", "--dtype=float32", "--eval_iters=1", "--batch_size=4")
    assert meta(tmp_path)["knobs"]["n_embd"] == 16 and meta(tmp_path)["knobs"]["attn"] == "elastic"
    base = weights(elastic_run)
    for name, w in weights(tmp_path).items():   # a step of Adam is at most as long as the learning rate
        below((w.double() - base[name]).abs().max(), 1e-11)


def test_the_tokenizer_is_stored_with_the_run(toy_run, toy, data, tmp_path, capsys):
    """It is copied from the data set into a run, and from this run into one that starts from it. When a run moves to
    old/, its tokenizer moves with it."""
    assert (meta(toy_run)["tokenizer"], meta(toy_run)["separator"]) == ("toy", 0)
    tuned = tmp_path / "tuned"
    train_here(f"--init_from={toy_run}", f"--out_dir={tuned}", "--max_iters=2", "--device=cpu", "--eval_iters=1",
               "--block_size=8", "--batch_size=2")
    assert "foxes in the tokenizer toy" in capsys.readouterr().out and meta(tuned)["knobs"]["block_size"] == 8
    train_here(f"--out_dir={tuned}", "--init_from=resume", "--max_iters=3")
    assert meta(tuned)["tokenizer"] == "toy" and meta(tuned)["losses"]["step"] == 3
    assert tokens.content_of(toy) == tokens.content_of(toy_run) == tokens.content_of(tuned)
    train_here(f"--dataset={data}", f"--out_dir={tuned}", "--max_iters=1")
    assert meta(tuned)["tokenizer"] == "bytes" and tokens.content_of(tuned) is None
    assert tokens.content_of(tuned / "old" / "1") == tokens.content_of(toy)


def test_public_weights_are_trained_with_the_preset_tune(elastic_run, tmp_path):
    """The default is the preset tune, because their own context would not fit. A named preset and flags override it."""
    public = shutil.copytree(elastic_run, tmp_path / "public")
    about = meta(public)
    files.write_json(public / "meta.json", about | {"source": {}, "knobs": about["knobs"] | {"block_size": 8192}})

    def settled(*flags):
        parser = train_script.Parser(prog="train.py")
        train_script.add_flags(parser, train_script.Train, train_script.GPTConfig)
        return train_script.settle_knobs(parser.parse_args([f"--init_from={public}", *flags]))[0]

    knobs = settled("--attn=softmax")
    assert (knobs["preset"], knobs["block_size"], knobs["batch_size"], knobs["attn"]) == ("tune", 256, 1, "softmax")
    assert settled("--preset=tune", "--attn=softmax") == knobs
    assert settled("--block_size=64")["block_size"] == 64 and settled("--preset=tiny")["block_size"] == 8192


@pytest.mark.parametrize("eval_interval, step", [(5, 10), (1, 9)])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_good_checkpoint(eval_interval, step, copy, elastic_run, capsys):
    """Step 9 moves the weights far away. Its own loss is still finite. The validation loss after it and the loss of
    step 10 are not."""
    stored = meta(copy)
    stored["knobs"] |= {"learning_rate": 1e35, "min_lr": 1e35}
    files.write_json(copy / "meta.json", stored)
    with pytest.raises(SystemExit) as stop:
        train_script.main(["--init_from=resume", f"--out_dir={copy}", "--max_iters=12",
                           f"--eval_interval={eval_interval}"])
    err = capsys.readouterr().err
    assert stop.value.code == 1 and "Traceback" not in err
    assert (copy / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert_says(f"step {step}.*checkpoint of step 8 is still there.*learning_rate", err.rstrip("\n").splitlines()[-1])


# ---------------------------------------------------------------------------------- batches, micro-batches and ranks

def batches(data, world, rank, **knobs):
    machine = SimpleNamespace(world=world, rank=rank, device=torch.device("cpu"))
    knobs = train_script.Train(**{"batch_size": 4, "gradient_accumulation_steps": 4} | knobs)
    return train_script.Batches(tokens.Tokens(data, "train"), tiny_config(vocab_size=257), knobs, machine, 1)


@pytest.mark.parametrize("world, batch_size", [(1, 2), (2, 4), (4, 4), (2, 8), (4, 1), (1, 16), (8, 16)])
def test_every_split_of_a_step_reads_the_same_tokens(world, batch_size, data):
    whole = batches(data, 1, 0)
    split = {"batch_size": batch_size, "gradient_accumulation_steps": 16 // batch_size}
    for step in (1, 7):
        parts = [x for rank in range(world) for x, _ in batches(data, world, rank, **split).read(step)]
        assert all(len(x) <= batch_size for x in parts)
        same(torch.cat(parts), torch.cat([x for x, _ in whole.read(step)]))


def test_batches_depend_on_seed_and_step_and_come_ahead_of_time(data):
    ahead = batches(data, 1, 0)
    for step in (1, 2, 3, 9):                   # in order, and after a jump
        same(ahead(step), ahead.read(step))
    first = batches(data, 1, 0).read(1)[0][0]
    assert not torch.equal(first, ahead.read(2)[0][0])
    assert not torch.equal(first, batches(data, 1, 0, seed=5).read(1)[0][0])
    x, y = ahead.read(1)[0]
    same(x[:, 1:], y[:, :-1])


def test_a_batch_that_ranks_cannot_share_is_refused(data):
    with pytest.raises(ValueError, match="cannot be shared by 2 ranks: make it a multiple of 2"):
        batches(data, 2, 0, batch_size=3, gradient_accumulation_steps=1)


@pytest.mark.exhaustive
def test_a_batch_that_ranks_cannot_share_is_refused_by_all_of_them(tmp_path, data):
    done = train(tmp_path, data, "--batch_size=3", ranks=2, ok=False)
    assert done.returncode != 0 and "cannot be shared by 2 ranks" in done.stderr and "multiple of 2" in done.stderr


@pytest.mark.parametrize("total, how", [(8, ("--batch_size=4", "--gradient_accumulation_steps=2")),
                                        (12, ("--batch_size=3", "--gradient_accumulation_steps=4"))])
def test_gradient_accumulation_equals_one_big_batch(total, how, tmp_path, data):
    for name, flags in (("big", (f"--batch_size={total}",)), ("parts", how)):
        train_here(f"--dataset={data}", f"--out_dir={tmp_path / name}", *flags)
    assert_close_runs(tmp_path / "parts", tmp_path / "big")


@pytest.mark.parametrize("attn", ["elastic", by_default(False, "gated_deltanet"), by_default(False, "titans")])
def test_two_ranks_equal_one_process(attn, tmp_path, data):
    """A step has 12 sequences: micro-batches of 4, 4, 4 in one process, or of 4, 2 on each of two ranks."""
    flags = (f"--attn={attn}", "--gradient_accumulation_steps=3", "--eval_iters=3")
    train(tmp_path / "2", data, *flags, ranks=2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *flags)
    assert_close_runs(tmp_path / "2", tmp_path / "1")
    two, one = (torch.tensor([[float(x or 0) for x in row] for row in log_rows(tmp_path / name)[1:]]) for name in "21")
    close(list(two.T), list(one.T))             # each column has its own scale


# ------------------------------------------------------------------------------------------------- balancing heads


def test_eq_9_excludes_the_first_layers_and_the_most_used_heads():
    importance = torch.tensor([[0.9, 0.8, 0.9, 0.7], [0.1, 0.5, 0.9, 0.3], [0.2, 0.8, 0.4, 0.6]])
    rest = balance.routed(importance, skip=1, shared=0.2)          # ceil(0.2 x 8) = 2 of 8: without 0.9 and 0.8
    same(rest, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert len(balance.routed(torch.rand(5, 4), 0, 0.2)) == 16     # 0.2 x 20 is 4, whatever the rounding
    same(balance.routed(importance, 0, 0.0), importance.flatten().sort().values)


def test_imbalance_is_n_times_the_squared_coefficient_of_variation():
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    expected = 6 * np.var(values) / np.mean(values) ** 2
    close(balance.imbalance(torch.tensor(values, dtype=torch.float64)).item(), expected)
    assert balance.imbalance(torch.full((3, 4), 0.25)) == 0
    importance = torch.rand(3, 4, dtype=torch.float64, generator=dice()).requires_grad_()
    for skip, shared in ((0, 0.0), (1, 0.2)):
        assert torch.autograd.gradcheck(
            lambda x, s=skip, m=shared: balance.imbalance(balance.routed(x, s, m)), importance)


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-12, 1e-30, 0.0])
def test_imbalance_of_heads_that_are_hardly_used_is_finite(size):
    """If all heads put all weight on the sink, their mean importance is near 0 and may be rounded to 0."""
    importance = (size * torch.tensor([[1.0, 2.0], [3.0, 6.0]])).requires_grad_()
    value = balance.imbalance(importance)
    gradient, = torch.autograd.grad(value, importance)
    assert 0 <= value <= 12 and gradient.isfinite().all()               # 12 is n^2 - n, the value for one used head
    if size >= 1e-6:
        assert value.item() == pytest.approx(4 * 3.5 / 9, rel=1e-5)     # n times the variance over the squared mean


def test_the_log_shows_the_balancing_loss(tmp_path, data):
    flags = (f"--dataset={data}", "--attn=softmax", "--n_head=4", "--balance_shared=0")
    train_here(*flags, f"--out_dir={tmp_path / 'on'}", "--head_balance=0.5")
    train_here(*flags, f"--out_dir={tmp_path / 'off'}")
    header, *rows = [line.split(",") for line in (tmp_path / "on" / "log.csv").read_text().splitlines()]
    assert header[-1] == "balance" and all(0 < float(row[-1]) < 2 for row in rows)
    assert "balance" not in (tmp_path / "off" / "log.csv").read_text()


@pytest.mark.exhaustive
def test_heads_are_balanced_over_all_ranks(tmp_path, data):
    """Two ranks of 4 sequences have the losses of one process of 8, so the gradient is the same."""
    flags = ("--attn=softmax", "--n_head=4", "--n_layer=2", "--head_balance=1", "--balance_skip=1")
    train(tmp_path / "2", data, *flags, "--batch_size=4", "--gradient_accumulation_steps=2", ranks=2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *flags, "--batch_size=8", "--eval_iters=1")
    assert_close_runs(tmp_path / "2", tmp_path / "1")


# ------------------------------------------------------------------------------------------------ balancing experts


def test_the_loss_of_experts_is_one_for_an_even_load_and_grows_with_the_busiest(data):
    """E sum_e f_e P_e. Its gradient lowers the probability of the expert that is chosen most."""
    machine = SimpleNamespace(mean=lambda x: x)
    model, knobs = GPT(tiny_config(n_layer=2, mlp="moe", n_expert=4)), train_script.Train(expert_balance=0.5)
    load = torch.full((2, 2, 4), 0.25, requires_grad=True)
    model.expert_load = lambda: load
    assert balance.expert_loss(model, knobs, machine).item() == 0.5 * 2
    share, probability = torch.tensor([0.7, 0.1, 0.1, 0.1]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    load = torch.stack([share, probability]).expand(2, 2, 4).clone().requires_grad_()
    loss = balance.expert_loss(model, knobs, machine)
    close(loss, 0.5 * 2 * 4 * (0.28 + 0.03 + 0.02 + 0.01), dtype=torch.float32)
    loss.backward()
    assert (load.grad[:, 1].argmax(-1) == 0).all()
    assert balance.expert_loss(model, train_script.Train(), machine) == 0


def test_the_loss_of_experts_makes_their_load_even(tmp_path, data, capsys):
    flags = (f"--dataset={data}", "--mlp=moe", "--n_expert=6", "--max_iters=40", "--learning_rate=1e-2")
    for name, weight in (("off", 0), ("on", 1)):
        train_here(*flags, f"--out_dir={tmp_path / name}", f"--expert_balance={weight}")
    said = capsys.readouterr().out
    assert "M of them active" in said and "an even load gives each expert 0.1667" in said
    off, on = (meta(tmp_path / name)["report"] for name in ("off", "on"))
    assert off["least_used_expert"] < 1 / 6 < off["most_used_expert"]
    below(on["most_used_expert"] - 1 / 6, (off["most_used_expert"] - 1 / 6) / 2)
    header, *rows = [line.split(",") for line in (tmp_path / "on" / "log.csv").read_text().splitlines()]
    assert header[-1] == "balance" and all(0.99 < float(row[-1]) < 6 for row in rows)
    assert "balance" not in (tmp_path / "off" / "log.csv").read_text()


@pytest.mark.exhaustive
def test_experts_train_alike_on_two_ranks_also_those_that_no_token_of_a_rank_chooses(tmp_path, data):
    """Each rank has 64 tokens with 2 choices each for 64 experts. The load is balanced over both ranks."""
    flags = ("--mlp=moe", "--n_expert=64", "--n_inner=8", "--bias=1", "--expert_balance=0.1")
    train(tmp_path / "2", data, *flags, "--batch_size=4", "--gradient_accumulation_steps=2", ranks=2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *flags, "--batch_size=8", "--eval_iters=1")
    assert_close_runs(tmp_path / "2", tmp_path / "1")


@pytest.mark.exhaustive
def test_two_agents_on_this_machine_train_like_one_process(data, tmp_path):
    """The flags of torchrun set up two nodes."""
    with socket.socket() as free:               # the system names a port that nobody uses
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = (*TINY, f"--dataset={data}", f"--out_dir={tmp_path / 'nodes'}", "--attn=elastic")
    agents = [subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}",
                                "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}",
                                str(ROOT / "train.py"), *flags],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in (0, 1)]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert meta(tmp_path / "nodes")["world_size"] == 2
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'one'}", "--attn=elastic")
    assert_close_runs(tmp_path / "nodes", tmp_path / "one")


@pytest.mark.exhaustive
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")),
                    reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_training_is_the_same_and_saves_plain_names(tmp_path, data, monkeypatch):
    """The layer is as simple as possible, because the C++ compiler takes a second for each kernel."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)    # compile in this process
    for name, flags in (("compiled", ["--compile"]), ("eager", [])):
        train_here(f"--dataset={data}", f"--out_dir={tmp_path / name}", "--attn=elastic", "--pos=none", "--mlp=relu",
                   "--norm=rmsnorm", "--max_iters=4", *flags)
    assert weights(tmp_path / "compiled").keys() == weights(tmp_path / "eager").keys()
    close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------- presets

@pytest.mark.parametrize("name, millions, counted, step_tokens", [
    ("gpt2", 124.48, "all", 524_288), ("paper1", 359.84, "all", 524_288), ("paper1-760m", 756.82, "all", 524_288),
    ("paper2", 162.32, "all", 524_288), ("paper5", 59.00, "blocks", 262_144),
    ("paper5-1b", 1130.46, "blocks", 1_048_576)])
def test_presets_have_the_size_that_they_state(name, millions, counted, step_tokens, monkeypatch):
    monkeypatch.setattr(GPT, "init_weights", lambda self, seed: None)
    preset = train_script.PRESETS[name]
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**fields_of(GPTConfig, preset)))
    C, V = gpt.config.n_embd, gpt.config.vocab_size
    count = gpt.num_params() - (2 * V * C if counted == "blocks" else 0)
    assert round(count / 1e6, 2) == millions
    assert preset["batch_size"] * preset["gradient_accumulation_steps"] * preset["block_size"] == step_tokens
    train_script.Train(**fields_of(train_script.Train, preset))
    assert set(preset) - {"about"} <= {f for group in (train_script.Train, GPTConfig) for f in vars(group())}
