"""common/runs.py: earlier runs are kept, the newest checkpoint counts, a full disk loses nothing."""
import resource
import shutil
from functools import partial

import pytest
from conftest import FILES, TEXT, assert_same_run, assert_says, log_rows, meta, run, train_here

from common.runs import USUAL, last_checkpoint
from evals.instrument import load_run


def test_every_recipe_named_in_the_refusal_of_other_projections_fits(data, tmp_path):
    train_here(f"--dataset={data}", f"--out_dir={tmp_path}", "--attn=softmax", "--max_iters=1")
    for attn in USUAL:
        assert load_run(tmp_path, "cpu", {"attn": attn})[0].config.attn == attn


def test_new_runs_in_the_same_folder_keep_the_earlier_ones(copy, elastic_run, data, capsys):
    old, kept = copy / "old" / "1", {(copy / "ckpt.pt").read_bytes()}
    for seed in (1, 2):
        train_here(f"--out_dir={copy}", f"--dataset={data}", "--max_iters=1", f"--seed={seed}")
        assert str(old.with_name(str(seed))) in capsys.readouterr().out and len(log_rows(copy)) == 2
        kept.add((copy / "ckpt.pt").read_bytes())
    assert_same_run(old, elastic_run)
    assert meta(old) == meta(elastic_run)
    assert {path.read_bytes() for path in copy.rglob("ckpt*.pt")} == kept


def test_the_newest_complete_checkpoint_counts_and_on_equal_steps_the_whole_one(copy):
    """Parts without .metadata are incomplete. Folders that are not named by a step do not count."""
    assert last_checkpoint(copy) == copy / "ckpt.pt"
    for name, complete, expected in (("9", False, "ckpt.pt"), ("8", True, "ckpt.pt"), ("7", True, "ckpt.pt"),
                                     ("11 copy", True, "ckpt.pt"), ("10", True, "10"), ("9", True, "10")):
        (copy / "sharded_ckpt" / name).mkdir(parents=True, exist_ok=True)
        (copy / "sharded_ckpt" / name / (".metadata" if complete else "__0_0.distcp")).touch()
        assert last_checkpoint(copy).name == expected
    (copy / "ckpt.pt").unlink()
    assert last_checkpoint(copy).name == "10"
    shutil.rmtree(copy / "sharded_ckpt")
    assert last_checkpoint(copy) is None


def small_disk(limit=20000):
    """Limit every file of this process. 20 kB are enough for a log but not for a checkpoint, 500 bytes for neither."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit, says", [
    (20000, "step 12.*checkpoint of step 8 is still there"), (500, "copy at step 8")])
def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_can_go_on(limit, says, copy, elastic_run):
    flags = ("--init_from=resume", f"--out_dir={copy}", "--max_iters=12")
    done = run("train.py", *flags, ok=False, preexec_fn=partial(small_disk, limit))
    assert done.returncode not in (0, None) and "Traceback" not in done.stderr
    assert (copy / "ckpt.pt").read_bytes() == (elastic_run / "ckpt.pt").read_bytes()
    assert sorted(p.name for p in copy.iterdir()) == sorted(FILES)
    line = done.stderr.rstrip("\n").splitlines()[-1]                    # the lines before are the progress bar
    assert_says(f"{says}.*(space|resume)", line)                        # what is safe, and what to do
    train_here(*flags)
    assert [row[0] for row in log_rows(copy)[1:]] == [str(step) for step in range(1, 13)]


def test_a_full_disk_leaves_no_half_data_set(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(60):
        (source / f"module_{i}.py").write_text(TEXT * 20)
    done = run("data/stdlib.py", f"--source={source}", f"--out_dir={out}", ok=False, preexec_fn=small_disk)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert_says("stdlib.py: error: .*train.bin could not be written .*free some space", done.stderr)
    assert not list(out.iterdir())
