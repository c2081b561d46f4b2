"""common/flags.py: wrong flags and values are named in one line, and flag beats recipe beats preset beats default."""
import pytest
from conftest import assert_says, complain

import attention
import mixers
import train as train_script
from common.flags import Parser, add_flags
from evals.instrument import model_config
from model import GPTConfig


@pytest.mark.parametrize("flag, says", [
    ("--nonsense=1", "valid flags: .*--n_layer"), ("--n_layr=1", "did you mean --n_layer"), ("nonsense", "nonsense"),
    ("--n_layer", "n_layer"), ("--attn=nonsense", "softmax.*elastic"), ("--pos=nonsense", "rope.*none.*learned"),
    ("--rule=nonsense", "softmax.*elastic"), ("--mlp=nonsense", "swiglu"), ("--norm=nonsense", "rmsnorm"),
    ("--kernel=nonsense", "sdpa"), ("--dtype=int8", "bfloat16"), ("--preset=nonsense", "tiny"),
    ("--n_layer=two", "n_layer"), ("--bias=maybe", "bias"), ("--learning_rate=fast", "learning_rate")])
def test_a_wrong_flag_exits_with_2_and_names_what_is_valid(flag, says, train_fails):
    code, err = train_fails(flag)
    assert code == 2
    assert_says(says, err)


@pytest.mark.parametrize("flag", [
    "--n_layer=0", "--n_head=0", "--n_embd=-16", "--block_size=0", "--batch_size=0", "--max_iters=-1",
    "--vocab_size=-1", "--eval_interval=0", "--eval_iters=0", "--log_interval=0", "--gradient_accumulation_steps=0",
    "--learning_rate=0", "--learning_rate=nan", "--seed=-1", "--dropout=1", "--beta2=1", "--n_embd=17",
    "--n_kv_head=3", "--warmup_iters=-1", "--grad_clip=-1", "--head_lr=-1", "--weight_decay=-1", "--n_inner=-1",
    "--rope_base=0", "--max_iters=0"])
def test_a_size_that_cannot_be_is_named(flag, train_fails):
    assert flag.strip("-").split("=")[0] in train_fails(flag)[1]


@pytest.mark.parametrize("flags, says", [
    (("--attn=elastic", "--attn_args=nonsense=1"), "tau_init"),
    (("--attn=elastic", "--attn_args=tau_init=much"), "tau_init"),
    (("--attn=elastic", "--attn_args=tau_init=nan"), "tau_init"),
    (("--attn=elastic", "--kernel=sdpa"), "auto or torch"),
    (("--kernel=triton", "--dropout=0.1"), "dropout.*auto or torch"),
    (("--device=nonsense",), "--device=nonsense"), (("--device=meta",), "choose cuda"),
    (("--learning_rate=inf",), "learning_rate"), (("--min_lr=nan",), "min_lr"), (("--rope_base=inf",), "rope_base"),
    (("--dataset=nonsense",), "stdlib"), (("--dataset=no/such/folder",), "no/such/folder.*stdlib"),
    (("--vocab_size=100",), "257"), (("--init_from=no/such/run",), "no/such/run"),
    (("--init_from=resume", "--out_dir=no/such/run"), "no/such/run")])
def test_what_cannot_be_done_says_what_can(flags, says, train_fails):
    assert_says(says, train_fails(*flags)[1])


def test_windows_longer_than_a_sequence_are_refused(backcopy, tmp_path, capsys):
    _, err = complain(train_script.main, capsys, "--preset=lab", f"--dataset={backcopy}", "--block_size=65",
                      f"--out_dir={tmp_path}", "--device=cpu")
    assert "sequences" in err


def settled(*argv):
    parser = Parser()
    add_flags(parser, train_script.Train, GPTConfig)
    return train_script.settle_knobs(parser.parse_args(argv))[0]


def test_precedence_is_flag_then_recipe_then_preset_then_default(monkeypatch):
    monkeypatch.setitem(train_script.PRESETS, "tiny", {"n_layer": 7, "n_head": 3, "pos": "learned", "rule": "softmax"})
    monkeypatch.setitem(attention.ATTENTIONS, "elastic", {"rule": "elastic", "n_head": 5, "pos": "none"})
    knobs = settled("--attn=elastic", "--n_embd=64")
    assert [knobs[name] for name in ("n_embd", "n_head", "pos", "rule", "n_layer")] == [64, 5, "none", "elastic", 7]
    assert "bias" not in knobs
    knobs = settled("--attn=elastic", "--pos=rope", "--n_head", "2", "--rule=softmax", "--n_layer=1")
    assert [knobs[name] for name in ("n_head", "pos", "rule", "n_layer")] == [2, "rope", "softmax", 1]
    assert settled()["pos"] == "learned"


def test_a_new_recipe_leaves_nothing_of_the_old_one_behind():
    """A stored run looked at, or gone on with, under another --attn: the model is the one that --attn alone makes."""
    alone = {name: vars(GPTConfig(attn=name, n_layer=1)) for name in attention.ATTENTIONS}
    for before in alone:
        for after in alone:
            found = vars(model_config(alone[before], {"attn": after}))
            assert all(found[axis] == alone[after][axis] for axis in mixers.DEFAULTS), (before, after)
    kept = model_config(vars(GPTConfig(attn="softmax", gate="head")), {"attn": "elastic"})
    assert kept.gate == "head"                  # a flag's choice stays
