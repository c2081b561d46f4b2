"""train.py --shard=1: weights, gradients and optimizer state are split over the ranks, and nothing else changes."""
import csv
import os
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bounds import below, close, same
from conftest import (FILES, ROOT, TINY, assert_close_runs, assert_same_run, by_default, command, complain, losses,
                      meta, run, tiny_config, train, train_here, weights)
from test_runs import small_disk


import eval as eval_script
import train as train_script
from attention import ATTENTIONS
from common.runs import last_checkpoint
from common.shards import WithoutMatrices, is_split, shard
from model import GPT

SHARED = ("--gradient_accumulation_steps=2", "--n_layer=2")
AT_ONCE = ("--gradient_accumulation_steps=1",)  # balancing losses depend on which sequences are in one forward pass


def column(out_dir, name):
    with open(out_dir / "log.csv", newline="") as f:
        return [float(row[name]) for row in csv.DictReader(f)]


FIFTY = ("--max_iters=50", "--eval_interval=25", "--gradient_accumulation_steps=4",
         "--learning_rate=3e-5")                # AdamW turns rounding of a gradient near 0 into a step of this size
FOCUS = ("--attn=focus", "--window=4", "--balance=softmax")


@pytest.mark.parametrize("flags", [
    ("--attn=elastic", "--grad_clip=0.1", "--dropout=0"),
    *(by_default(False, flags) for flags in (
        ("--attn=lazy",), ("--attn=tda",), ("--attn=gated_deltanet",), ("--attn=dex",), FOCUS,
        ("--attn=elastic", *FIFTY), ("--attn=lazy", *FIFTY), ("--attn=tda", *FIFTY),
        ("--attn=gated_deltanet", *FIFTY), (*FOCUS, *FIFTY),
        ("--attn=routing", "--attn_args=cluster_size=4"), ("--attn=softmax", "--tied=0", "--bias=1"),
        ("--attn=gated", "--n_head=4", "--head_balance=0.1", *AT_ONCE), ("--mlp=moe", "--expert_balance=0.1", *AT_ONCE),
        ("--attn=softmax1", "--head_balance=0.1", *AT_ONCE), ("--pos=t5",)))], ids=" ".join)
def test_shards_train_like_one_process(flags, tmp_path, data):
    """The ranks gather the same weights and average the same gradients, also those of balancing losses. Buffers that
    training sets, such as Dex's progress, are equal as well. Four ranks train fifty steps."""
    train(tmp_path / "2", data, *SHARED, *flags, "--shard=1", ranks=4 if {*FIFTY} <= {*flags} else 2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *SHARED, *flags)
    assert_close_runs(tmp_path / "2", tmp_path / "1")
    close(*(column(tmp_path / name, "grad_norm") for name in "21"), terms=1024, dtype=torch.float32)
    close(*(meta(tmp_path / name)["report"]["sink"] for name in "21"), size=1.0, dtype=torch.float32)


@pytest.mark.exhaustive
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")),
                    reason="torch.compile needs a C++ compiler on a CPU")
def test_shards_can_be_compiled(tmp_path, data, monkeypatch):
    """As simple a layer as that of the test without shards: the C++ compiler takes a second for each kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    flags = (*SHARED, "--attn=elastic", "--pos=none", "--mlp=relu", "--norm=rmsnorm", "--max_iters=4")
    train(tmp_path / "compiled", data, *flags, "--shard=1", "--compile", ranks=2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'eager'}", *flags)
    found, expected = weights(tmp_path / "compiled"), weights(tmp_path / "eager")
    assert found.keys() == expected.keys()
    close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), dtype=torch.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("only", [("--train_only=lora",), ("--attn=focus", "--window=4", "--train_only=focus")],
                         ids=["lora", "focus"])
def test_a_sharded_adapter_holds_only_what_it_trained(only, tmp_path, data):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'base'}")
    flags = (f"--init_from={tmp_path / 'base'}", "--max_iters=8", "--eval_interval=4", "--eval_iters=1",
             "--batch_size=4", "--log_interval=1", "--device=cpu", "--dtype=float32", *only)
    run("train.py", *flags, f"--out_dir={tmp_path / '2'}", "--shard=1", ranks=2)
    train_here(*flags, f"--out_dir={tmp_path / '1'}")
    assert_close_runs(tmp_path / "2", tmp_path / "1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 4)])
def test_a_checkpoint_knows_nothing_of_shards(before, after, tmp_path, data):
    """A run goes on from its checkpoint with another number of ranks."""
    flags = (*SHARED, "--shard=1", "--attn=elastic", "--max_iters=4")
    train(tmp_path / "parts", data, *flags, ranks=before)
    checkpoint = torch.load(tmp_path / "parts/ckpt.pt", weights_only=True)          # plain tensors
    averages = [value for group in checkpoint["optimizer"]["state"].values() for value in group.values()]
    assert {(type(value), value.device.type) for value in averages} == {(torch.Tensor, "cpu")}
    run("train.py", f"--out_dir={tmp_path / 'parts'}", "--init_from=resume", "--max_iters=8", ranks=after)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'whole'}", *flags)
    train_here(f"--out_dir={tmp_path / 'whole'}", "--init_from=resume", "--max_iters=8")
    assert_close_runs(tmp_path / "parts", tmp_path / "whole")


def test_one_rank_has_nothing_to_split(tmp_path, data):
    for name in "01":
        train_here(f"--dataset={data}", f"--out_dir={tmp_path / name}", f"--shard={name}")
    same(weights(tmp_path / "1"), weights(tmp_path / "0"))


# ------------------------------------------------------------------------------------------------ checkpoints in parts

def trained(ranks, *flags):
    """Train in this process, or in several."""
    if ranks == 1:
        return train_here(*flags)
    new = () if any(str(flag).startswith("--init_from") for flag in flags) else TINY
    run("train.py", *new, *flags, ranks=ranks)


def join(out_dir):
    """Make a run's ckpt.pt from its parts, as torch's command does."""
    parts, = (out_dir / "sharded_ckpt").iterdir()
    dcp_to_torch_save(parts, out_dir / "ckpt.pt")


@pytest.mark.parametrize("before, after", [(1, 1), by_default(False, 2, 4)])
def test_a_run_goes_on_from_a_checkpoint_in_parts(before, after, tmp_path, data):
    """With another number of ranks as well. Joined, the parts are the ckpt.pt of a run without parts."""
    flags = (f"--dataset={data}", *SHARED, "--shard=1", "--attn=elastic", "--max_iters=4", "--eval_interval=2")
    for name, more in (("parts", ["--sharded_ckpt=1"]), ("whole", [])):
        trained(before, *flags, f"--out_dir={tmp_path / name}", *more)
    assert [path.name for path in (tmp_path / "parts/sharded_ckpt").iterdir()] == ["4"]
    assert not (tmp_path / "parts/ckpt.pt").exists()
    shutil.copytree(tmp_path / "parts", tmp_path / "joined")
    join(tmp_path / "joined")
    same(weights(tmp_path / "joined"), weights(tmp_path / "whole"))
    shutil.rmtree(tmp_path / "joined/sharded_ckpt")
    for name in ("parts", "whole"):
        trained(after, f"--out_dir={tmp_path / name}", "--init_from=resume", "--max_iters=8")
    if after == 1:
        train_here(f"--out_dir={tmp_path / 'joined'}", "--init_from=resume", "--max_iters=8", "--sharded_ckpt=0")
        assert_same_run(tmp_path / "joined", tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts/sharded_ckpt").iterdir()] == ["8"]
    join(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.exhaustive
def test_a_run_has_one_checkpoint_whole_or_in_parts(copy, elastic_run):
    """It changes its kind on resume."""
    flags = (f"--out_dir={copy}", "--init_from=resume")
    train_here(*flags, "--max_iters=10", "--sharded_ckpt=1")
    assert not (copy / "ckpt.pt").exists() and last_checkpoint(copy) == copy / "sharded_ckpt/10"
    train_here(*flags, "--max_iters=12", "--sharded_ckpt=0")
    assert last_checkpoint(copy) == copy / "ckpt.pt" and not (copy / "sharded_ckpt").exists()
    (copy / "ckpt.pt").rename(copy / "twelve.pt")
    shutil.copy(elastic_run / "ckpt.pt", copy)
    train_here(*flags, "--max_iters=10")
    train_here(*flags, "--max_iters=12", "--sharded_ckpt=1")
    join(copy)
    same(weights(copy), torch.load(copy / "twelve.pt", weights_only=True)["model"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("only, ranks", [("lora", 1), ("lora", 2), ("all", 1)])
def test_a_run_from_other_weights_goes_on_from_parts(only, ranks, tmp_path, data):
    """Also an adapter: its parts hold only what it trained, and its base the rest."""
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'base'}")
    flags = (f"--init_from={tmp_path / 'base'}", "--eval_interval=4", "--eval_iters=1", "--batch_size=4",
             "--log_interval=1", "--device=cpu", "--dtype=float32", "--decay_lr=0", "--shard=1",
             f"--train_only={only}")
    trained(ranks, *flags, f"--out_dir={tmp_path / 'parts'}", "--max_iters=4", "--sharded_ckpt=1")
    trained(ranks, f"--out_dir={tmp_path / 'parts'}", "--init_from=resume", "--max_iters=8")
    join(tmp_path / "parts")
    trained(ranks, *flags, f"--out_dir={tmp_path / 'whole'}", "--max_iters=8")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_parts, after", [(0, 1), (1, 4)])
def test_killed_while_saving_goes_on_from_the_older_checkpoint(in_parts, after, tmp_path, data):
    """Two ranks are killed when the data of step 4 is written, in part or without its last file. Any number resumes."""
    script = tmp_path / "stop.py"
    script.write_text(f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch, train
from torch.distributed.checkpoint import FileSystemWriter

place, saves = Path(sys.argv[1]), 0
(place / ("pid" + os.environ["RANK"])).write_text(str(os.getpid()))

def wait_at_the_second(function, half):
    def stopping(*args, **kwargs):
        global saves
        saves += 1
        if saves < 2:
            return function(*args, **kwargs)
        half(*args, **kwargs)
        (place / "saving").touch()
        time.sleep(600)
    return stopping

if {in_parts}:                                  # its finish() writes .metadata
    FileSystemWriter.finish = wait_at_the_second(FileSystemWriter.finish, lambda *args, **kwargs: None)
else:
    torch.save = wait_at_the_second(torch.save, lambda state, f: f.write(b"half a file"))
train.main(sys.argv[2:])
""")
    out, flags = tmp_path / "out", (f"--dataset={data}", *SHARED, "--shard=1", f"--sharded_ckpt={in_parts}",
                                    "--attn=elastic", "--max_iters=6", "--eval_interval=2")
    process = subprocess.Popen(command(script, tmp_path, *TINY, *flags, f"--out_dir={out}", ranks=2),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / "saving").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    for path in tmp_path.glob("pid*"):
        os.kill(int(path.read_text()), signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    assert last_checkpoint(out) == (out / "sharded_ckpt/2" if in_parts else out / "ckpt.pt")
    assert (out / "sharded_ckpt/4").exists() == bool(in_parts)
    trained(after, f"--out_dir={out}", "--init_from=resume", "--sharded_ckpt=0")
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    train_here(*flags, f"--out_dir={tmp_path / 'whole'}", "--sharded_ckpt=0")
    assert_close_runs(out, tmp_path / "whole")


@pytest.mark.exhaustive
def test_a_full_disk_keeps_the_last_parts(tmp_path, data):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", "--sharded_ckpt=1")
    flags = ("--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=12")
    done = run("train.py", *flags, ok=False, preexec_fn=small_disk)
    assert "Traceback" not in done.stderr and "the checkpoint of step 8 is still there" in done.stderr
    assert last_checkpoint(tmp_path) == tmp_path / "sharded_ckpt/8"
    train_here(*flags)
    assert last_checkpoint(tmp_path) == tmp_path / "sharded_ckpt/12"


def test_an_instrument_says_how_to_join_the_parts(tmp_path, data, capsys):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'parts'}", "--sharded_ckpt=1")
    join_command = ("python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
                    f"{tmp_path / 'parts/sharded_ckpt/8'} {tmp_path / 'parts/ckpt.pt'}")
    assert join_command in capsys.readouterr().out
    said = complain(eval_script.main, capsys, "loss", f"--out_dir={tmp_path / 'parts'}")[1]
    assert said.endswith(join_command + "\n")
    # another run in the same folder keeps them
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'parts'}", "--max_iters=1")
    assert (tmp_path / "parts/old/1/sharded_ckpt/8/.metadata").exists() and (tmp_path / "parts/ckpt.pt").exists()


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory, data):
    """A run whose checkpoint is in parts."""
    out = tmp_path_factory.mktemp("in_parts") / "run"
    train_here(f"--dataset={data}", f"--out_dir={out}", "--sharded_ckpt=1", "--max_iters=2")
    return out


@pytest.mark.parametrize("name, content", [("__0_0.distcp", b""), ("__0_0.distcp", None), (".metadata", b"half"),
                                           (".metadata", None), ("other", None)])
def test_damaged_parts_end_in_one_line(name, content, in_parts, tmp_path, capsys, data):
    """Files that are empty, half written or cut short (None); or the parts of another model (other)."""
    out = shutil.copytree(in_parts, tmp_path / "run")
    parts = out / "sharded_ckpt/2"
    if name == "other":
        train_here(f"--dataset={data}", f"--out_dir={tmp_path / 'other'}", "--sharded_ckpt=1", "--max_iters=2",
                   "--attn=diff2")
        shutil.rmtree(parts)
        shutil.copytree(tmp_path / "other/sharded_ckpt/2", parts)
    else:
        whole = (parts / name).read_bytes()
        (parts / name).write_bytes(whole[:len(whole) // 2] if content is None else content)
    capsys.readouterr()
    said = complain(train_script.main, capsys, "--init_from=resume", f"--out_dir={out}")[1]
    assert "sharded_ckpt/2 is no readable checkpoint" in said


def test_a_run_in_parts_continues_in_float16_and_back(in_parts, tmp_path):
    """float16 needs a scaler, of which the checkpoint holds nothing."""
    out = shutil.copytree(in_parts, tmp_path / "run")
    for steps, dtype in ((3, "float16"), (4, "float16"), (5, "float32")):
        train_here(f"--out_dir={out}", "--init_from=resume", f"--max_iters={steps}", f"--dtype={dtype}")
    assert last_checkpoint(out).name == "5"


# ------------------------------------------------------------------------------------------------------ initial weights

@pytest.fixture
def ranks():
    """Start a process group of which only this rank exists: ranks(rank, world). Parts are split, and nothing is sent.
    torch caches the shapes of parts by world, so a process can be only one rank of each world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank, world):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        return SimpleNamespace(device=torch.device("cpu"), world=world, rank=rank)
    yield start
    dist.destroy_process_group()


def sharded(config, seed, machine):
    with WithoutMatrices():
        model = GPT(config, seed)
    shard(model, machine, seed)
    return model


OTHERS = [{"pos": pos} for pos in ("learned", "sinusoidal", "alibi", "t5", "bias")] + [
    {"mlp": "moe", "bias": True}, {"norm": "rmsnorm", "tied": False, "embed_norm": True, "n_kv_head": 1}]


@pytest.mark.parametrize("rank, world", [by_default(False, 1, 2), by_default(False, 0, 4), (2, 3)])
def test_a_rank_draws_its_part_of_one_process_s_weights(rank, world, ranks):
    """Also of tensors that cannot be split evenly, and of buffers, which are not split."""
    machine = ranks(rank, world)
    for choices in ({"attn": attn} for attn in ATTENTIONS) if world != 3 else OTHERS:
        config = tiny_config(n_layer=2, **choices)
        found, expected = sharded(config, 7, machine).state_dict(), GPT(config, 7).state_dict()
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if is_split(value):
                part, = (p.dim for p in value.placements)
                rows = [*expected[name].chunk(world, part), *[expected[name][:0]] * world][rank]
                same(value.to_local(), rows)
            else:
                same(value, expected[name])


@pytest.mark.exhaustive
def test_no_rank_ever_holds_all_initial_weights(tmp_path, data):
    """The memory of a rank grows by its part of the weights and by one matrix until the training begins."""
    script = tmp_path / "peak.py"
    script.write_text(f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import train

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def count(*args):
    before = peak()
    weights = 4 * set_up(*args)[3].num_params()
    with open(sys.argv[1] + f"/rank{{train.Machine().rank}}", "w") as f:
        f.write(str((peak() - before) / weights))
    sys.exit()

set_up, train.set_up = train.set_up, count
train.main(sys.argv[2:])
""")
    run(script, tmp_path, f"--dataset={data}", f"--out_dir={tmp_path}", "--n_layer=8", "--n_embd=768", "--n_head=2",
        "--batch_size=4", "--device=cpu", "--shard=1", ranks=4)
    shares = [float(path.read_text()) for path in tmp_path.glob("rank*")]
    assert len(shares) == 4
    below(max(shares), 0.6)                     # a quarter, a matrix, and room for Python's own objects


@pytest.mark.exhaustive
def test_each_rank_holds_half_of_everything(tmp_path, data):
    """Weights and AdamW's averages of a rank, after a step: half of those of one process, rounded up."""
    script = tmp_path / "count.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from common.runs import Run
from common.shards import is_split

def count(self, model, optimizer, scaler, step, in_parts):
    local = [x.to_local() if is_split(x) else x for x in model.parameters()]
    local += [x.to_local() if is_split(x) else x for group in optimizer.state.values() for x in group.values()]
    with open(sys.argv[1] + f"/rank{{train.Machine().rank}}", "w") as f:
        f.write(str(sum(x.numel() for x in local)))

Run.save = count
train.main(sys.argv[2:])
""")
    counts = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(script, folder, f"--dataset={data}", f"--out_dir={folder}", "--max_iters=1", "--n_layer=2", "--n_embd=64",
            "--n_head=2", "--block_size=16", "--batch_size=2", "--eval_iters=2", "--shard=1", "--device=cpu",
            ranks=ranks)
        counts.append([int(path.read_text()) for path in sorted(folder.glob("rank*"))])
    (alone,), both = counts
    assert len(both) == 2
    below(max(both), 0.6 * alone)               # an odd number of rows cannot be halved
