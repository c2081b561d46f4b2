"""Flags: which value wins, what the help lists, and that a real process prints readable text."""
import pytest
from conftest import run

import attention
import eval as eval_script
import mixers
import train as train_script
from common.flags import Parser, add_flags
from evals.instrument import Common, Overrides, model_config
from model import GPTConfig


def test_precedence_is_flag_then_recipe_then_preset_then_default(monkeypatch):
    def settled(*argv):
        parser = Parser()
        add_flags(parser, train_script.Train, GPTConfig)
        return train_script.settle_knobs(parser.parse_args(argv))[0]
    monkeypatch.setitem(train_script.PRESETS, "tiny", {"n_layer": 7, "n_head": 3, "pos": "learned", "rule": "softmax"})
    monkeypatch.setitem(attention.ATTENTIONS, "elastic", {"rule": "elastic", "n_head": 5, "pos": "none"})
    knobs = settled("--attn=elastic", "--n_embd=64")
    assert [knobs[name] for name in ("n_embd", "n_head", "pos", "rule", "n_layer")] == [64, 5, "none", "elastic", 7]
    assert "bias" not in knobs
    knobs = settled("--attn=elastic", "--pos=rope", "--n_head", "2", "--rule=softmax", "--n_layer=1")
    assert [knobs[name] for name in ("n_head", "pos", "rule", "n_layer")] == [2, "rope", "softmax", 1]
    assert settled()["pos"] == "learned"


def test_a_new_recipe_leaves_nothing_of_the_old_one_behind():
    """A stored run that is opened or continued with another --attn has the axes that this --attn alone gives."""
    alone = {name: vars(GPTConfig(attn=name, n_layer=1)) for name in attention.ATTENTIONS}
    for before in alone:
        for after in alone:
            found = vars(model_config(alone[before], {"attn": after}))
            assert all(found[axis] == alone[after][axis] for axis in mixers.DEFAULTS), (before, after)
    assert model_config(vars(GPTConfig(gate="head")), {"attn": "elastic"}).gate == "head"       # a flag's value is kept


@pytest.mark.parametrize("command", ["", *eval_script.COMMANDS])
def test_help_lists_the_commands_and_every_flag_of_each(command, capsys):
    with pytest.raises(SystemExit) as stop:
        eval_script.main([*command.split(), "-h"])
    said, names = capsys.readouterr().out, eval_script.COMMANDS
    if command:
        groups = [names[command].flags, *[Common, Overrides] * (command in eval_script.OF_A_RUN)]
        names = [knob.name if knob.metadata["positional"] else f"--{knob.name} "
                 for group in groups for knob in group.__dataclass_fields__.values()]
    assert stop.value.code == 0 and all(name in said for name in names)


def test_a_real_process_prints_readable_text(elastic_run):
    done = run("eval.py", "loss", f"--out_dir={elastic_run}", "--device=cpu", "--windows=2")
    assert "bits per byte" in done.stdout and "val" in done.stdout and done.stderr == ""
