"""train.py: the files of a run, killed and resumed runs, batches split over ranks and micro-steps,
presets."""

import re
import math
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import bounds
import numpy as np
import pytest
import torch
from bounds import below, close, same
from conftest import (
    ROOT,
    TEXT,
    TINY,
    assert_close_runs,
    assert_same_run,
    assert_says,
    by_default,
    command,
    contents,
    log_rows,
    losses,
    meta,
    some_recipes,
    tiny_config,
    train_here,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st

import kernels
import mixers
import train as train_script
from common import balance, files
from common.flags import fields_of
from common.machine import Machine
from data import coders, tokens
from evals import show
from evals.loss import window_losses
from model import GPT, GPTConfig


def train(out, flags="", data=None):
    """Train a run of train_here in this folder. flags: one text."""
    dataset = [f"--dataset={data}"] if data else []
    train_here(f"--out_dir={out}", *dataset, *flags.split())


def test_a_tracker_gets_the_rows_of_the_log(tmp_path, data, monkeypatch):
    rows, about = [], {}
    tracker = SimpleNamespace(
        init=lambda **flags: about.update(flags), log=lambda row, step: rows.append((step, row))
    )
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    train(tmp_path / "run", "--wandb=sinks --max_iters=4", data)
    assert about["project"] == "sinks" and about["config"]["attn"] == "softmax"
    for line, (step, row) in zip(log_rows(tmp_path / "run")[1:], rows, strict=True):
        assert int(line[0]) == step and float(line[1]) == pytest.approx(row["train_loss"])
    assert "val_loss" in rows[-1][1]


def test_a_run_leaves_a_log_meta_json_and_plain_tensors_under_plain_names(elastic_run, data):
    assert sorted(contents(elastic_run)) == ["ckpt.pt", "log.csv", "meta.json"]
    header, *rows = (line.split(",") for line in (elastic_run / "log.csv").read_text().splitlines())
    assert header == "step train_loss val_loss lr grad_norm ms tokens_per_s".split()
    assert [(row[0], bool(row[2])) for row in rows] == [
        (str(step), step in (4, 8)) for step in range(1, 9)
    ]
    rates = [2e-4 + 9e-4 * (1 + math.cos(math.pi * step / 6)) for step in range(1, 7)]
    close([float(row[3]) for row in rows], [1e-3, 2e-3, *rates], terms=1, dtype=torch.float32)
    m, checkpoint = meta(elastic_run), torch.load(elastic_run / "ckpt.pt", weights_only=True)
    given = {
        "attn": "elastic",
        "n_layer": 1,
        "dropout": 0.1,
        "rule": "elastic",
        "pos": "rope",
        "dataset": str(data),
        "seed": 1337,
        "vocab_size": 257,
    }
    assert {name: m["knobs"][name] for name in given} == given
    assert (
        m["versions"]["torch"] == torch.__version__
        and m["versions"]["python"] == sys.version.split()[0]
    )
    assert m["parameters"] == sum(
        w.numel() for name, w in checkpoint["model"].items() if name != "lm_head.weight"
    )
    assert bool(m["git_commit"]) == (ROOT / ".git").exists()
    assert m["data_hash"] and m["losses"]["step"] == checkpoint["step"] == 8
    close(m["losses"]["val"], float(rows[-1][2]), terms=1, dtype=torch.float32)
    assert {"transformer.wte.weight", "transformer.h.0.attn.tau", "lm_head.weight"} <= checkpoint[
        "model"
    ].keys()


def test_evaluating_and_logging_change_no_weights(elastic_run, tmp_path, data):
    flags = "--attn=elastic --dropout=0.1 --eval_interval=100 --log_interval=3 --eval_iters=2"
    train(tmp_path, flags, data)
    close(weights(tmp_path), weights(elastic_run), dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["float32", by_default(False, "bfloat16")])
@pytest.mark.parametrize(
    "attn",
    some_recipes(
        "gated", "dex", "focus", "routing", "gated_deltanet", "ttt", among=mixers.trained_recipes()
    ),
)
def test_every_recipe_learns(attn, dtype, tmp_path, data):
    """The loss starts at that of a uniform guess, up to the initial logits' spread of 0.1, and
    falls far below it. A layer with a schedule, such as Dex, is told that the training is over."""
    flags = "--max_iters=60 --learning_rate=2e-2 --n_embd=32 --eval_interval=30"
    if attn.startswith("focus"):
        flags += " --window=4"  # its router needs pairs beyond the window
    train(tmp_path, f"{flags} --attn={attn} --dtype={dtype}", data)
    first = losses(tmp_path)[0]
    below(abs(first - np.log(257)), 0.1)
    below(1.5, first - max(losses(tmp_path)[-1], meta(tmp_path)["losses"]["val"]))
    assert all(value == 1 for name, value in weights(tmp_path).items() if name.endswith("progress"))


def test_a_fresh_clone_prepares_its_data_trains_and_ends_with_a_report(tmp_path):
    """The sample at its end contains bytes that are no text, which a terminal for ASCII cannot
    show."""
    for room in ("", "axes", "common", "data", "evals", "mixers"):
        (tmp_path / room).mkdir(exist_ok=True)
        for path in (ROOT / room).glob("*.py"):
            shutil.copy(path, tmp_path / room)
    shutil.copy(ROOT / "kernels.cpp", tmp_path)
    words = "train.py --attn=elastic --max_iters=2 --eval_iters=1 --n_layer=1"
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data/stdlib/train.bin").exists()
    assert (tmp_path / "out/stdlib-elastic/ckpt.pt").exists()
    for words in (
        "bits_per_byte",
        "sink",
        "sparsity",
        "\\ufffd",
        "eval.py probe --out_dir=out/stdlib-elastic",
        "computed by cpp",
    ):
        assert words in done.stdout
    assert "loss" in done.stderr and "tokens/s" in done.stderr


def test_sigterm_leaves_a_word_while_the_imports_run(tmp_path, data):
    """Python lists every module that it has imported."""
    argv = command("train.py", *TINY, f"--dataset={data}", f"--out_dir={tmp_path / 'run'}")
    process = subprocess.Popen(
        [argv[0], "-X", "importtime", *argv[1:]], stderr=subprocess.PIPE, text=True
    )
    while "| torch" not in (line := process.stderr.readline()):
        assert line, "it ended before it imported torch"
    process.terminate()
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 1
    assert said[-1].startswith("train.py: terminated outside the training loop")


def test_a_run_from_weights_killed_before_its_first_checkpoint_resumes_from_them(
    elastic_run, tmp_path
):
    """Nothing was saved yet, so resuming must begin with those weights again, not with random ones.
    The other run's model is kept. A step of Adam is at most as long as the learning rate, which
    head_lr scales for tau."""
    flags = (
        f"--init_from={elastic_run} --max_iters=4 --eval_interval=4 --log_interval=1 --device=cpu "
        "--dtype=float32 --learning_rate=1e-5 --weight_decay=0.5 --warmup_iters=0 --head_lr=0"
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, flags)
    train(killed, flags)
    (killed / "ckpt.pt").unlink()  # as if it had been killed at step 3
    train(killed, "--init_from=resume")
    assert_same_run(killed, whole)
    assert meta(whole)["knobs"]["n_embd"] == 16 and meta(whole)["knobs"]["attn"] == "elastic"
    for name, before in weights(elastic_run).items():
        moved = (weights(whole)[name] - before).abs().max()
        assert moved == 0 if name.endswith("tau") else 1e-6 < moved < 1e-4, name


@pytest.mark.parametrize("part, on", [("q", slice(16)), ("k", slice(16, 24)), ("v", slice(24, 32))])
def test_biases_that_bias_of_turns_off_stay_0(part, on, tmp_path, data):
    """Two query heads share one head of keys and values."""
    for flags in (
        f"--max_iters=4 --qkv_bias=1 --bias_of={part} --n_kv_head=1",
        "--init_from=resume --max_iters=8",
    ):
        train(tmp_path, f"{flags} --attn=elastic", data)
        bias = weights(tmp_path)["transformer.h.0.attn.c_attn.bias"]
        assert bias[on].any() and not bias.clone().index_fill_(0, torch.arange(32)[on], 0).any()


def test_a_finished_run_can_be_made_longer_with_its_flags_repeated_and_in_float16(
    copy, elastic_run, data
):
    """float16 needs a scaler, of which the first checkpoint holds nothing. It counts its steps
    without overflow. The logged norm, which is clipped, is that of the gradient before the scaler
    multiplied it by 65536."""
    repeated = f"--dataset={data} --attn=elastic --n_layer=1 --dropout=0.1"
    for steps, flags in ((10, repeated), (13, "")):
        train(copy, f"--init_from=resume --max_iters={steps} --dtype=float16 {flags}")
        scaler = torch.load(copy / "ckpt.pt", weights_only=True)["scaler"]
        assert (scaler["scale"], scaler["_growth_tracker"]) == (2**16, steps - 8)
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 14)]
    assert log_rows(copy)[:9] == log_rows(elastic_run)
    norms = [float(row[4]) for row in log_rows(copy)[1:]]
    below(max(norms[8:]), 4 * max(norms[:8]))


def test_a_run_with_two_recipes_resumes_bit_for_bit(tmp_path, data):
    flags = "--order=pass --dropout=0.1 --lr_decay_iters=8 --n_layer=2 --layers=sink+gated"
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(whole, flags, data)
    train(part, f"{flags} --max_iters=4", data)
    train(part, "--init_from=resume --max_iters=8")
    assert_same_run(part, whole)
    found, _ = show.command(show.Show(out_dir=str(part)), None)
    assert [layer["recipe"] for layer in found["layers"]] == ["sink", "gated"]


def test_a_tokenizer_goes_from_run_to_run_and_new_runs_keep_earlier_ones(
    toy_run, toy, data, tmp_path, capsys
):
    flags = f"--init_from={toy_run} --max_iters=1 --device=cpu --eval_iters=1 --block_size=8"
    train(tmp_path, flags)
    assert "foxes in the tokenizer toy" in capsys.readouterr().out
    assert (meta(tmp_path)["tokenizer"], meta(tmp_path)["separator"]) == ("toy", 0)
    assert tokens.content_of(toy) == tokens.content_of(toy_run) == tokens.content_of(tmp_path)
    for seed, steps in (("1", 2), ("2", 3)):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        train(tmp_path, f"--max_iters={steps} --seed={seed}", data)
        assert contents(tmp_path / "old" / seed) == before and len(log_rows(tmp_path)) == steps + 1
        assert str(tmp_path / "old" / seed) in capsys.readouterr().out
        assert meta(tmp_path)["tokenizer"] == "bytes" and tokens.content_of(tmp_path) is None


@pytest.mark.parametrize("interval, step", [(5, 10), (1, 9), (100, 12)])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_good_checkpoint(
    interval, step, copy, elastic_run, capsys
):
    """Step 9 moves the weights far away. The next row of the log notices it, before anything is
    saved."""
    knobs = meta(copy)["knobs"] | {"learning_rate": 1e35, "min_lr": 1e35}
    files.write_json(copy / "meta.json", meta(copy) | {"knobs": knobs})
    with pytest.raises(SystemExit, match="1"):
        train_script.main(
            f"--init_from=resume --out_dir={copy} --max_iters=12 --eval_interval={interval} "
            f"--log_interval={interval}".split()
        )
    err = capsys.readouterr().err
    words = f"step {step}.*checkpoint of step 8 is still there.*learning_rate"
    assert_says(words, err.splitlines()[-1])
    assert (copy / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A data set of bytes: documents of 2 to 40 tokens, of which 256 is the first."""
    out = tmp_path_factory.mktemp("data") / "packed"
    coder, rng = coders.Bytes(), np.random.default_rng(bounds.SEED)
    ids = {}
    for split, count in ("train", 400), ("val", 60):
        ids[split] = tokens.encode_all(coder, [TEXT[n : 2 * n] for n in rng.integers(1, 40, count)])
    tokens.write_data_set(out, coder, ids, dataset="packed")
    return out


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A data set of bytes: long prompts with short responses, which alone are targets."""
    out, coder = tmp_path_factory.mktemp("data") / "answers", coders.Bytes()
    ids = [*tokens.encode_all(coder, [(TEXT[n : n + 30], "fox") for n in range(40)])]
    tokens.write_data_set(out, coder, {"train": ids, "val": ids}, dataset="answers", prompt="q")
    return out


def batches(data, world=1, rank=0, batch_size=4, steps=4, **knobs):
    machine = SimpleNamespace(world=world, rank=rank, device=torch.device("cpu"))
    knobs = train_script.Train(batch_size=batch_size, gradient_accumulation_steps=steps, **knobs)
    return train_script.Batches(
        tokens.Tokens(data, "train", knobs.docs), tiny_config(vocab_size=257), knobs, machine
    )


@given(
    world=st.integers(1, 6),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 6),
    step=st.integers(1, 99),
    seed=st.integers(0, 99),
    docs=st.booleans(),
    order=st.sampled_from(["random", "pass"]),
    prompts=st.booleans(),
)
def test_every_split_of_a_step_reads_the_same_tokens_ahead_of_time(
    packed, answers, world, batch_size, steps, step, seed, docs, order, prompts
):
    """With docs=1 it also tells where the documents of its own tokens begin. Every target of a step
    has the same weight."""
    data = answers if prompts else packed
    total = batch_size * steps
    if total % world:
        words = f"cannot be shared by {world} ranks: make it a multiple of {world}"
        with pytest.raises(ValueError, match=words):
            batches(data, world, 0, batch_size, steps)
        return
    how = {"docs": docs, "order": order}
    whole, other = (batches(data, 1, 0, total, 1, seed=s, **how) for s in (seed, seed + 100))
    ranks = [
        batches(data, world, rank, batch_size, steps, seed=seed, **how) for rank in range(world)
    ]
    for now in (step, step + 1, step):  # in order, and after a jump
        weights, rows, *starts = zip(*(part for rank in ranks for part in rank(now)), strict=True)
        assert all(len(part) <= batch_size for part in rows)
        counts = np.array([(part[:, 1:] >= 0).sum() for part in rows])
        close(weights, counts * world / max(1, counts.sum()))
        rows = torch.cat(rows)
        same(rows, whole.read(now)[0][1])
        x = rows[:, :-1]
        began = torch.where(x == 256, torch.arange(x.shape[1]), 0).cummax(1).values
        same([*map(torch.cat, starts)], [began] * docs)
    if total > 3:  # fewer may be equal by chance
        assert not any(
            torch.equal(rows, later.read(n)[0][1])
            for later, n in ((whole, step + 1), (other, step))
        )


def test_micro_batches_with_few_targets_add_up_to_the_step(answers, tmp_path):
    """Some of the sequences have none."""
    for size, steps in (8, 1), (1, 8):
        flags = f"--batch_size={size} --gradient_accumulation_steps={steps} --eval_iters={steps}"
        train(tmp_path / str(size), f"{flags} --max_iters=3", answers)
    assert_close_runs(tmp_path / "1", tmp_path / "8")


@pytest.mark.parametrize("stride, gap, total", [(1, 16, 5), (20, 20, 5), (1, 16, 40)])
def test_a_pass_reads_every_window_once_an_epoch_in_a_new_order(stride, gap, total, tmp_path):
    """Windows run over the border of two shards, a step over the end of an epoch."""
    ids, rows = np.arange(300) % 257, {}
    for name, part in ("train_000000.bin", ids[:130]), ("train_000001.bin", ids[130:]):
        rows[name] = tokens.write_shard(tmp_path / name, [part])
    about = {"tokenizer": "toy", "vocab_size": 257, "stride": stride, "shards": rows}
    files.write_json(tmp_path / "meta.json", about)
    split = batches(tmp_path, batch_size=total, steps=1, order="pass", seed=3)
    rows = torch.cat([split.read(n + 1)[0][1] for n in range(30)])
    whole = torch.from_numpy(ids).unfold(0, 17, gap)
    epochs = rows.split(len(whole))[:-1]
    assert all(
        torch.equal(epoch[epoch[:, 0].argsort()], whole[whole[:, 0].argsort()]) for epoch in epochs
    )
    assert not torch.equal(epochs[0], epochs[1])


def test_the_loss_of_packed_documents_is_that_of_each_document_alone(packed, tmp_path, monkeypatch):
    in_training, forward = [], GPT.forward

    def watched(gpt, *args, starts=None, **more):
        if gpt.training:
            in_training.append(starts)
        return forward(gpt, *args, starts=starts, **more)

    monkeypatch.setattr(GPT, "forward", watched)
    flags = "--docs=1 --max_iters=4 --learning_rate=0.1 --eval_iters=20 --pos=learned --attn=gated"
    train(tmp_path, flags, packed)
    gpt = GPT(GPTConfig(**fields_of(GPTConfig, meta(tmp_path)["knobs"]))).eval()
    gpt.load_state_dict(weights(tmp_path))
    split, losses = tokens.Tokens(packed, "val", docs=True), []
    windows = tokens.fixed_windows(split, 16, 80)
    rows = split.windows(windows, 17, 257)
    for row in rows:
        ends = [*np.flatnonzero(row[1:16] == 256) + 1, 16]
        # its last target begins the next document
        for start, end in zip([0, *ends], ends, strict=False):
            part = torch.from_numpy(row[None, start : end + 1])
            losses += [gpt(part[:, :-1], part[:, 1:])[1].item()] * int(end - start)
    close(meta(tmp_path)["losses"]["val"], np.mean(losses), dtype=torch.float32)
    found = window_losses(gpt, split, Machine("cpu", "float32"), 80, 8, 16)  # as eval.py loss does
    close(found.mean(), np.mean(losses), dtype=torch.float32)
    x, y = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
    starts = torch.from_numpy(split.first_keys(windows, 16))
    for importance in (False, True):  # the loss that is trained
        loss = gpt(x, y, importance=importance, starts=starts)[1]
        close(loss, np.mean(losses), dtype=torch.float32)
    assert len(in_training) == 4 and all(starts is not None for starts in in_training)


@pytest.mark.parametrize(
    "flags, runs",
    [
        ("", "cpp"),
        ("--head_balance=0.5", "cpp"),
        ("--dropout=0.1", "sdpa"),
        ("--dropout=0.1 --head_balance=0.5", "torch"),
        ("--dropout=0.1 --head_balance=0.5 --gate=head", "sdpa"),
    ],
)
def test_the_kernel_that_a_run_names_is_the_one_that_trains(
    flags, runs, data, tmp_path, monkeypatch, capsys
):
    """Evaluating measures no head's importance, so it may run another one."""
    ran = set()
    for name, function in ("cpp", "attend"), ("sdpa", "plain_softmax"), ("torch", "block_loop"):
        compute = getattr(kernels, function)
        monkeypatch.setattr(
            kernels,
            function,
            lambda *given, name=name, compute=compute, **more: (
                ran.update([name] * torch.is_grad_enabled()),
                compute(*given, **more),
            )[1],
        )
    train(tmp_path, f"--max_iters=1 --attn=softmax --n_head=4 {flags}", data)
    assert ran == {runs}
    assert re.search(rf"computed by {runs}( \(not cpp: .*\))?\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [
        # micro-batches 4, 2; test_shards.py has two ranks by default
        by_default(
            False, "--attn=elastic --batch_size=4 --gradient_accumulation_steps=3 --eval_iters=3"
        ),
        by_default(
            False,
            "--n_head=4 --n_layer=2 --head_balance=1 --balance_skip=1 --bias=1 --batch_size=6 "
            "--gradient_accumulation_steps=2 --eval_iters=2",
        ),
    ],
)
def test_ranks_on_two_nodes_equal_one_process_that_reads_all_sequences_at_once(
    flags, tmp_path, data
):
    """Two processes with the variables that torchrun sets on two nodes. Each column of the log has
    its own scale."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # the system names a port that nobody uses
        port = str(free.getsockname()[1])
    nodes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    two, one = tmp_path / "2", tmp_path / "1"
    ranks = [
        subprocess.Popen(
            command("train.py", *TINY, f"--dataset={data}", f"--out_dir={two}", *flags.split()),
            env=os.environ | nodes | {"RANK": rank},
        )
        for rank in "01"
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    assert meta(two)["world_size"] == 2
    at_once = "--batch_size=12 --gradient_accumulation_steps=1 --eval_iters=1"
    train(one, f"{flags} {at_once}", data)
    assert_close_runs(two, one)
    columns = []
    for out in (two, one):
        rows = [[float(x or 0) for x in row] for row in log_rows(out)[1:]]
        columns.append(list(torch.tensor(rows).T))
    close(*columns)


def test_ranks_divide_the_held_out_windows_unless_each_pass_needs_all_ranks(
    data, tmp_path, monkeypatch
):
    """A pass of a sharded model gathers weights from all ranks, which would wait for one without
    windows."""
    asked = []
    monkeypatch.setattr(train_script, "mean_loss", lambda *given, share: asked.append(share) or 1.0)
    for sharded in (False, True):
        monkeypatch.setattr(train_script, "is_sharded", lambda model, sharded=sharded: sharded)
        train(tmp_path, "--max_iters=1", data)
    assert asked == [True, False]


# numbers of heads: other scales of scores
@pytest.mark.parametrize("models", [(2,), by_default(False, (1, 2))])
def test_compiled_training_is_the_same_and_saves_plain_names(
    models, tmp_path, data, small_blocks, monkeypatch
):
    """Also two models in one process, whose constants differ. Backward passes compute blocks of
    rows again, with the dropout of the forward pass. The compiler's last stage, which needs a
    minute and C++, is left out."""
    found, compile_fully = [], torch.compile

    def without_last_stage(model, **how):
        found.append(model)
        return compile_fully(model, **how, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", without_last_stage)
    compiled, eager = tmp_path / "compiled", tmp_path / "eager"
    for heads in models:
        flags = f"--n_head={heads} --max_iters=4 --block_size=40 --dropout=0.3 --attn=elastic"
        train(eager, flags, data)
        train(compiled, f"{flags} --compile", data)
        assert found and weights(compiled).keys() == weights(eager).keys()
        close(losses(compiled), losses(eager), dtype=torch.float32)


def test_eq_9_excludes_the_first_layers_and_the_most_used_heads():
    importance = torch.tensor([[0.9, 0.8, 0.9, 0.7], [0.1, 0.5, 0.9, 0.3], [0.2, 0.8, 0.4, 0.6]])
    # ceil(0.2 x 8) = 2 of 8: without 0.9 and 0.8
    rest = balance.routed(importance, skip=1, shared=0.2)
    same(rest, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    # 0.2 x 20 is 4, whatever the rounding
    assert len(balance.routed(torch.rand(5, 4), 0, 0.2)) == 16
    close(
        balance.imbalance(rest).item(),
        6 * np.var(rest.numpy()) / np.mean(rest.numpy()) ** 2,
        dtype=torch.float32,
    )


def test_the_balancing_loss_is_logged_only_where_it_is_trained(tmp_path, data, capsys):
    for name, weight in (("off", 0), ("on", 0.5)):
        flags = f"--max_iters=40 --learning_rate=1e-2 --balance_shared=0 --head_balance={weight}"
        train(tmp_path / name, flags, data)
    off, said = meta(tmp_path / "off")["report"], capsys.readouterr().out
    for words in (f"{off['val'] / math.log(2):.4f}", f"sink   {off['sink']:.4f}"):
        assert words in said  # a token is 1 byte
    header, *rows = [
        line.split(",") for line in (tmp_path / "on" / "log.csv").read_text().splitlines()
    ]
    assert header[-1] == "balance" and all(0 < float(row[-1]) < 2 for row in rows)
    assert "balance" not in (tmp_path / "off" / "log.csv").read_text()


@pytest.mark.parametrize(
    "name, millions, counted, step_tokens",
    [
        ("gpt2", 124.48, "all", 524_288),
        ("paper1", 359.84, "all", 524_288),
        ("paper1-ablation", 359.84, "all", 524_288),
        ("paper1-760m", 756.82, "all", 524_288),
        ("paper2", 162.32, "all", 524_288),
        ("paper5", 59.00, "blocks", 1_048_576),
        ("paper5-1b", 1130.46, "blocks", 1_048_576),
    ],
)
def test_presets_have_the_size_that_they_state(name, millions, counted, step_tokens):
    preset = train_script.PRESETS[name]
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**fields_of(GPTConfig, preset)))
    count = gpt.num_params() - (
        2 * gpt.config.vocab_size * gpt.config.n_embd if counted == "blocks" else 0
    )
    assert round(count / 1e6, 2) == millions
    assert (
        preset["batch_size"] * preset["gradient_accumulation_steps"] * preset["block_size"]
        == step_tokens
    )
    assert preset.keys() - {"about"} <= vars(train_script.Train()).keys() | vars(gpt.config).keys()
