"""train.py --shard=1: weights, gradients and optimizer state are split over the ranks, and nothing else changes."""
import csv
import errno
import os
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bounds import below, close, same
from conftest import (ROOT, TINY, assert_close_runs, assert_same_run, by_default, complain, meta, run,
                      tiny_config, train, train_here)

import eval as eval_script
import train as train_script
from attention import ATTENTIONS
from common.runs import last_checkpoint
from common.shards import is_split, join_parts
from model import GPT
from training.weights import WithoutMatrices, shard

SHARED = ("--gradient_accumulation_steps=2", "--n_layer=2")
AT_ONCE = ("--gradient_accumulation_steps=1",)  # balancing losses depend on which sequences are in one forward pass
FIFTY = ("--max_iters=50", "--eval_interval=25", "--gradient_accumulation_steps=4",
         "--learning_rate=3e-5")                # AdamW turns rounding of a gradient near 0 into a step of this size


@pytest.mark.parametrize("flags", [
    ("--attn=elastic", "--grad_clip=0.1", "--dropout=0"),
    *(by_default(False, flags) for flags in (
        ("--attn=dex",), ("--attn=focus", "--window=4", "--balance=softmax", *FIFTY),
        *((f"--attn={attn}", *FIFTY) for attn in ("elastic", "lazy", "tda", "gated_deltanet")),
        ("--attn=routing", "--attn_args=cluster_size=4"), ("--attn=softmax", "--tied=0", "--bias=1"),
        ("--attn=gated", "--n_head=4", "--head_balance=0.1", *AT_ONCE),
        ("--attn=softmax1", "--head_balance=0.1", *AT_ONCE), ("--pos=t5",)))], ids=" ".join)
def test_shards_train_like_one_process(flags, tmp_path, data):
    """The ranks gather the same weights and average the same gradients, also those of balancing losses. Buffers that
    training sets, such as Dex's progress, are equal as well. Four ranks train fifty steps."""
    train(tmp_path / "2", data, *SHARED, *flags, "--shard=1", ranks=4 if {*FIFTY} <= {*flags} else 2)
    train_here(f"--dataset={data}", f"--out_dir={tmp_path / '1'}", *SHARED, *flags)
    assert_close_runs(tmp_path / "2", tmp_path / "1")
    logs = (csv.DictReader((tmp_path / name / "log.csv").open(newline="")) for name in "21")
    close(*([float(row["grad_norm"]) for row in log] for log in logs), terms=1024, dtype=torch.float32)
    close(*(meta(tmp_path / name)["report"]["sink"] for name in "21"), size=1.0, dtype=torch.float32)


def trained(ranks, *flags):
    """Train in this process, or in several."""
    new = () if any(flag.startswith("--init_from") for flag in flags) else TINY
    train_here(*flags) if ranks == 1 else run("train.py", *new, *flags, ranks=ranks)


def join(out_dir):
    """Make a run's ckpt.pt from its parts."""
    parts, = (out_dir / "sharded_ckpt").iterdir()
    join_parts(parts, out_dir / "ckpt.pt")


@pytest.mark.parametrize("before, after", [(1, 1), by_default(False, 2, 1), by_default(False, 2, 4)])
def test_a_run_goes_on_from_parts_with_any_number_of_ranks(before, after, tmp_path, data):
    """Joined, the parts are the ckpt.pt of a run without parts. A run can change its kind, and has one of them."""
    flags = (f"--dataset={data}", *SHARED, "--attn=elastic", "--max_iters=4", "--eval_interval=2")
    parts, whole, joined = (tmp_path / name for name in ("parts", "whole", "joined"))
    trained(before, *flags, f"--out_dir={parts}", "--shard=1", "--sharded_ckpt=1")
    trained(before, *flags, f"--out_dir={whole}", f"--shard={int(before > 1)}")         # one rank has nothing to split
    assert os.listdir(parts / "sharded_ckpt") == ["4"] and not (parts / "ckpt.pt").exists()
    shutil.copytree(parts, joined)
    join(joined)
    found, expected = (torch.load(folder / "ckpt.pt", weights_only=True) for folder in (joined, whole))
    same(found["model"], expected["model"])
    averages = [value for entry in expected["optimizer"]["state"].values() for value in entry.values()]
    assert {(type(value), value.device.type) for value in averages} == {(torch.Tensor, "cpu")}
    for folder, *more in ((parts,), (whole, "--sharded_ckpt=1"), (joined, "--sharded_ckpt=0")):
        trained(after, f"--out_dir={folder}", "--init_from=resume", "--max_iters=8", *more)
    assert last_checkpoint(joined) == joined / "ckpt.pt" and not (joined / "sharded_ckpt").exists()
    assert os.listdir(parts / "sharded_ckpt") == ["8"] and not (whole / "ckpt.pt").exists()
    join(parts)
    join(whole)
    assert_same_run(parts, whole)
    assert_same_run(joined, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("only", [("--train_only=lora",), ("--attn=focus", "--window=4", "--train_only=focus"), ()],
                         ids=["lora", "focus", "all"])
def test_a_sharded_run_from_other_weights_goes_on_from_parts(only, tmp_path, data):
    """An adapter's parts hold only what it trained, and its base the rest."""
    base, parts, whole = (tmp_path / name for name in ("base", "parts", "whole"))
    train_here(f"--dataset={data}", f"--out_dir={base}")
    flags = (f"--init_from={base}", "--eval_interval=4", "--eval_iters=1", "--batch_size=4", "--log_interval=1",
             "--device=cpu", "--dtype=float32", "--decay_lr=0", *only)
    trained(2, *flags, f"--out_dir={parts}", "--max_iters=4", "--shard=1", "--sharded_ckpt=1")
    trained(2, f"--out_dir={parts}", "--init_from=resume", "--max_iters=8")
    join(parts)
    train_here(*flags, f"--out_dir={whole}", "--max_iters=8")
    assert_close_runs(parts, whole)


def test_a_save_that_is_cut_short_keeps_older_parts_and_an_instrument_says_how_to_join_them(tmp_path, data, capsys,
                                                                                           monkeypatch):
    """The disk is full when the last file of the second checkpoint, .metadata, is written. The run goes on in float16,
    which needs a scaler, of which the first checkpoint holds nothing, and then again in float32."""
    from torch.distributed.checkpoint import FileSystemWriter
    flags, out, finish = (f"--dataset={data}", "--eval_interval=2"), tmp_path / "out", FileSystemWriter.finish

    def stop(self, *args, **kwargs):
        if self.path.name == "4":
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(FileSystemWriter, "finish", stop)
        train_script.main([*TINY, *flags, f"--out_dir={out}", "--sharded_ckpt=1", "--max_iters=6"])
    assert "the checkpoint of step 2 is still there" in capsys.readouterr().err.splitlines()[-1]
    assert last_checkpoint(out) == out / "sharded_ckpt/2" and (out / "sharded_ckpt/4").exists()
    shutil.copytree(out, tmp_path / "again")
    train_here(f"--out_dir={tmp_path / 'again'}", "--init_from=resume", "--sharded_ckpt=0")
    train_here(*flags, f"--out_dir={tmp_path / 'whole'}", "--max_iters=6")
    assert_same_run(tmp_path / "again", tmp_path / "whole")

    for steps, dtype in ((3, "float16"), (4, "float16"), (5, "float32")):
        train_here(f"--out_dir={out}", "--init_from=resume", f"--max_iters={steps}", f"--dtype={dtype}")
    line = f"python common/shards.py {out / 'sharded_ckpt/5'} {out / 'ckpt.pt'}"
    assert line in capsys.readouterr().out
    assert complain(eval_script.main, capsys, "loss", f"--out_dir={out}")[1].endswith(line + "\n")
    monkeypatch.setattr(sys, "argv", line.split()[1:])
    runpy.run_path(str(ROOT / "common/shards.py"), run_name="__main__")
    eval_script.main(["loss", f"--out_dir={out}", "--windows=1"])
    train_here(*flags, f"--out_dir={out}", "--max_iters=1")             # another run in the same folder keeps both
    assert (out / "old/1/sharded_ckpt/5/.metadata").exists() and (out / "old/1/ckpt.pt").exists()


@pytest.mark.parametrize("rank, world", [by_default(False, 1, 2), by_default(False, 0, 4), (2, 3)])
def test_a_rank_draws_its_part_of_one_process_s_weights(rank, world, request):
    """Also of tensors that cannot be split evenly, and of buffers, which are not split. Only this rank exists: parts
    are split, and nothing is sent. torch caches their shapes by world, so a process can be only one rank of each."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    request.addfinalizer(dist.destroy_process_group)
    machine = SimpleNamespace(device=torch.device("cpu"), world=world, rank=rank)
    others = [{"bias": True}, {"norm": "rmsnorm", "tied": False, "embed_norm": True, "n_kv_head": 1}]
    others += [{"pos": pos} for pos in ("learned", "sinusoidal", "alibi", "t5", "bias")]
    for choices in [{"attn": attn} for attn in ATTENTIONS] if world != 3 else others:
        config = tiny_config(n_layer=2, **choices)
        with WithoutMatrices():
            model = GPT(config, 7)
        shard(model, machine, 7)
        found, expected = model.state_dict(), GPT(config, 7).state_dict()
        assert found.keys() == expected.keys() and all(is_split(p) for p in model.parameters())
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
import sys
from resource import RUSAGE_SELF, getrusage
sys.path.insert(0, {str(ROOT)!r})
import train

def count(*args):
    before = getrusage(RUSAGE_SELF).ru_maxrss
    weights = 4 * made(*args).model.num_params()
    with open(sys.argv[1] + f"/rank{{train.Machine().rank}}", "w") as f:
        f.write(str((getrusage(RUSAGE_SELF).ru_maxrss - before) * 1024 / weights))
    sys.exit()

made, train.Training = train.Training, count
train.main(sys.argv[2:])
""")
    run(script, tmp_path, f"--dataset={data}", f"--out_dir={tmp_path}", "--n_layer=8", "--n_embd=768", "--n_head=2",
        "--batch_size=4", "--device=cpu", "--shard=1", ranks=4)
    shares = [float(path.read_text()) for path in tmp_path.glob("rank*")]
    assert len(shares) == 4
    below(max(shares), 0.6)                     # a quarter, a matrix, and room for Python's own objects
