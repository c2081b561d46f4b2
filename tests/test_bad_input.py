"""eval.py: whatever is wrong with its flags, a run or its data is one clear line."""
import shutil

import pytest
from conftest import WORDS, assert_says, complain, write_data

import eval as eval_script


@pytest.fixture
def eval_fails(capsys):
    return lambda *args: complain(eval_script.main, capsys, *args)


@pytest.mark.parametrize("args, says", [
    ((), "loss, probe, sample"), (("nonsense",), "loss, probe, sample"), (("loss",), "--out_dir"),
    (("loss", "--out_dir=no/such/run"), "no/such/run"), (("loss", "--nonsense=1"), "valid flags"),
    (("probe", "--out_dir=x", "--batch_size=0"), "batch_size"), (("loss", "--out_dir=x", "--windows=-1"), "windows"),
    (("probe", "--out_dir=x", "--attn=nonsense"), "elastic")])
def test_eval_names_its_commands_and_flags(args, says, eval_fails):
    assert_says(says, eval_fails(*args)[1])


@pytest.mark.parametrize("flag", ["--tokens=0", "--samples=0", "--temperature=-1", "--top_k=-1", "--top_p=-1"])
def test_sample_refuses_impossible_numbers(flag, kept, eval_fails):
    assert flag.split("=")[0] in eval_fails("sample", f"--out_dir={kept}", flag)[1]


def test_eval_refuses_data_with_more_ids_than_the_model(kept, tmp_path, eval_fails):
    folder = write_data(tmp_path / "big", WORDS, WORDS, vocab_size=50257)
    assert_says("257.*50257", eval_fails("loss", f"--out_dir={kept}", f"--dataset={folder}")[1])


def test_eval_says_that_there_is_no_checkpoint_yet(elastic_run, tmp_path, eval_fails):
    folder = shutil.copytree(elastic_run, tmp_path / "young")
    (folder / "ckpt.pt").unlink()
    assert_says("ckpt.pt.*no checkpoint yet", eval_fails("probe", f"--out_dir={folder}")[1])
