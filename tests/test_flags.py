"""common/flags.py: a flag overrides the recipe, the recipe the preset, and the preset the default."""
import attention
import mixers
import train as train_script
from common.flags import Parser, add_flags
from evals.instrument import model_config
from model import GPTConfig


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
    """A stored run that is opened or continued with another --attn has the axes that this --attn alone gives."""
    alone = {name: vars(GPTConfig(attn=name, n_layer=1)) for name in attention.ATTENTIONS}
    for before in alone:
        for after in alone:
            found = vars(model_config(alone[before], {"attn": after}))
            assert all(found[axis] == alone[after][axis] for axis in mixers.DEFAULTS), (before, after)
    kept = model_config(vars(GPTConfig(attn="softmax", gate="head")), {"attn": "elastic"})
    assert kept.gate == "head"                  # a value from a flag is kept
