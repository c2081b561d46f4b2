"""common/runs.py: earlier runs are kept, the newest checkpoint counts, a full disk loses nothing."""
import resource
import shutil
from functools import partial

import pytest
from conftest import FILES, ROOT, assert_says, log_rows, run, train_here

from common.runs import last_checkpoint, output_of


def test_the_newest_complete_checkpoint_counts(copy):
    """Parts without .metadata are incomplete. ckpt.pt is of step 8. tests/test_shards.py has both of the same step."""
    for name in ("7/.metadata", "9/.metadata", "10/.metadata", "11/__0_0.distcp", "12 copy/.metadata"):
        (copy / "sharded_ckpt" / name).parent.mkdir(parents=True)
        (copy / "sharded_ckpt" / name).touch()
    for step in ("10", "9"):
        assert last_checkpoint(copy).name == step
        shutil.rmtree(copy / "sharded_ckpt" / step)
    assert last_checkpoint(copy) == copy / "ckpt.pt"
    shutil.rmtree(copy / "sharded_ckpt")
    (copy / "ckpt.pt").unlink()
    assert last_checkpoint(copy) is None


def test_a_script_that_fails_says_why():
    with pytest.raises(ValueError, match="data/text.py --nothing failed: .*error: unknown flag --nothing"):
        output_of("data/text.py", "--nothing")


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
    done = run("data/stdlib.py", f"--source={ROOT / 'evals'}", f"--out_dir={tmp_path}", ok=False, preexec_fn=small_disk)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert_says("stdlib.py: error: .*train.bin could not be written .*free some space", done.stderr)
    assert not list(tmp_path.iterdir())
