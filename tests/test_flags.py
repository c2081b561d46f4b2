"""Flags: which value wins."""

import re
import shutil

import pytest
from conftest import meta
from hypothesis import given
from hypothesis import strategies as st

import attention
import mixers
import train as train_script
from axes.options import constants
from common import files
from common.flags import Parser, add_flags, given_flags
from common.resolve import resolve_run
from evals.instrument import model_config
from model import GPTConfig


def settled(*argv):
    """The knobs that train.py finds for these flags."""
    groups, parser = (train_script.Train, GPTConfig), Parser()
    add_flags(parser, *groups)
    given_here = given_flags(parser.parse_args(argv), *groups)
    return resolve_run(given_here, train_script.Train)[0]


def shown(capsys, *argv):
    """{source: {knob: value}} of train.py --show_config."""
    train_script.main(["--show_config", *argv])
    found = {}
    for name, value, source in re.findall(r"--(\w+)=(\S*) +(.*)", capsys.readouterr().out):
        found.setdefault(source, {})[name] = value
    return found


def test_precedence_is_flag_then_recipe_then_run_then_preset_then_default(
    copy, capsys, monkeypatch
):
    tiny = {"about": "", "n_layer": 7, "pos": "learned", "gate": "element", "qk_norm": "l2"}
    monkeypatch.setitem(train_script.PRESETS, "tiny", tiny)
    recipe = {"rule": "elastic", "pos": "none", "gate": "none"}
    monkeypatch.setitem(attention.ATTENTIONS, "elastic", recipe)
    found = shown(capsys, "--attn=elastic", "--pos=alibi", "--n_head", "2")
    assert found["flag"] == {"attn": "elastic", "pos": "alibi", "n_head": "2"}
    of_recipe = {"rule": "elastic", "gate": "none", "attn_args": "", "layers": ""}
    assert found["recipe elastic"] == of_recipe
    assert found["preset tiny"] == {"preset": "tiny", "n_layer": "7", "qk_norm": "l2"}
    assert found["default"].items() >= {"n_embd": "768", "sink": "none", "bias": "0"}.items()

    # a run of another recipe, whose window was changed by a flag
    changed = {"attn": "streaming", "rule": "softmax", "first": 4, "window": 5, "seed": 5}
    knobs, run = meta(copy)["knobs"] | changed, f"run {copy}"
    files.write_json(copy / "meta.json", meta(copy) | {"knobs": knobs})
    found = shown(capsys, f"--init_from={copy}", "--attn=elastic")
    assert found["recipe elastic"] == of_recipe | {"pos": "none"}
    assert found["default"]["first"] == "0"  # the old recipe's goes
    assert found[run]["window"] == "5" and found[run]["dataset"] == knobs["dataset"]
    assert found["default"]["seed"] == "1337"
    own = knobs | {"attn": "elastic", "rule": "elastic", "attn_args": "tau_init=0.5"}
    files.write_json(copy / "meta.json", meta(copy) | {"knobs": own})
    assert (
        shown(capsys, f"--init_from={copy}", "--attn=elastic")[run]["attn_args"] == "tau_init=0.5"
    )
    found = shown(capsys, f"--init_from={copy}", "--layers=elastic,tau_init=2")
    assert found["recipe elastic"]["attn_args"] == ""
    resumed = ("--init_from=resume", f"--out_dir={copy}", "--max_iters=9", "--n_kv_head=0")
    found = shown(capsys, *resumed)
    assert found["flag"] == {"max_iters": "9", "out_dir": str(copy)} and found[run]["seed"] == "5"


def test_public_weights_are_trained_with_the_preset_tune(copy):
    """The default is the preset tune, because their own context would not fit. A named preset and
    flags override it."""
    about, public = meta(copy), f"--init_from={copy}"
    files.write_json(
        copy / "meta.json", about | {"source": {}, "knobs": about["knobs"] | {"block_size": 8192}}
    )
    knobs = settled(public, "--attn=softmax")
    assert (knobs["preset"], knobs["block_size"], knobs["batch_size"], knobs["attn"]) == (
        "tune",
        256,
        1,
        "softmax",
    )
    assert settled(public, "--preset=tune", "--attn=softmax") == knobs
    assert settled(public, "--block_size=64")["block_size"] == 64
    assert settled(public, "--preset=tiny")["block_size"] == 8192


def test_resuming_a_preset_continues_its_own_run(copy, tmp_path, monkeypatch):
    knobs = meta(copy)["knobs"] | {"preset": "lab", "out_dir": "out/backcopy-softmax"}
    files.write_json(copy / "meta.json", meta(copy) | {"knobs": knobs})
    monkeypatch.chdir(tmp_path)
    shutil.copytree(copy, knobs["out_dir"])
    assert settled("--preset=lab", "--init_from=resume") == knobs


def test_resuming_may_repeat_the_layers_without_the_flags_that_changed_them(copy):
    layers = "softmax,gate=head+elastic,pos=none,gate=head"
    knobs = meta(copy)["knobs"] | {"attn": "softmax", "layers": layers}
    files.write_json(copy / "meta.json", meta(copy) | {"knobs": knobs})
    resume = "--init_from=resume", f"--out_dir={copy}"
    for repeated in ("softmax+elastic", "softmax+elastic,pos=none", layers):
        assert settled(*resume, f"--layers={repeated}")["layers"] == layers
    with pytest.raises(ValueError, match="cannot resume with layers=softmax.elastic,pos=alibi"):
        settled(*resume, "--layers=softmax+elastic,pos=alibi")


def test_a_new_recipe_leaves_nothing_of_the_old_one_behind():
    alone = {name: vars(GPTConfig(attn=name, n_layer=1)) for name in attention.ATTENTIONS}
    for before in alone:
        for after in alone:
            found = vars(model_config(alone[before], {"attn": after}))
            assert all(found[axis] == alone[after][axis] for axis in mixers.DEFAULTS), (
                before,
                after,
            )
    # a flag's value is kept
    assert model_config(vars(GPTConfig(gate="head")), {"attn": "elastic"}).gate == "head"


AXES = st.fixed_dictionaries(
    {},
    optional={
        "pos": st.sampled_from(["rope", "none", "alibi", "rope+bias"]),
        "window": st.sampled_from([0, 5]),
        "gate": st.sampled_from(["none", "head"]),
    },
)
CONSTANTS = st.fixed_dictionaries({}, optional={"tau_init": st.sampled_from([0.25, 0.5])})
PARTS = st.lists(
    st.tuples(st.sampled_from(["elastic", "lazy"]), st.integers(1, 3), AXES, CONSTANTS)
    | st.tuples(
        st.sampled_from(["softmax", "gated", "window"]), st.integers(1, 3), AXES, st.just({})
    ),
    min_size=1,
    max_size=4,
)


@given(PARTS, AXES, CONSTANTS, st.booleans())
def test_each_layer_of_a_pattern_has_its_own_axes_and_constants_except_where_a_flag_changes_all(
    parts, flags, constant, afterwards
):
    """afterwards: the flags change a stored run."""
    first, layers, texts = parts[0][0], [], []
    for attn, count, axes, own in parts:
        pairs = [f"{name}={value}" for name, value in (axes | own).items()]
        texts.append(",".join([f"{attn}*{count}", *pairs]))
        shared = constant if attn == first else {}
        layers += [
            (attn, mixers.DEFAULTS | attention.ATTENTIONS[attn] | axes | flags, shared | own)
        ] * count
    given = {"layers": "+".join(texts)}
    if "tau_init" in constant and first in ("elastic", "lazy"):
        given["attn_args"] = f"tau_init={constant['tau_init']}"
    config = model_config({"n_layer": len(layers)}, given if afterwards else given | flags)
    config = model_config(vars(config), flags if afterwards else {})
    for layer, (attn, axes, own) in zip(config.layer_configs, layers, strict=True):
        assert layer.attn == attn
        assert all(getattr(layer, axis) == axes[axis] for axis in mixers.DEFAULTS)
        assert constants(layer, attention.AXES).get("tau_init") == (
            own.get("tau_init", 1.0) if attn in ("elastic", "lazy") else None
        )


def test_a_layers_own_axis_beats_the_models_which_beats_the_layers_recipe():
    config = GPTConfig(layers="softmax,pos=none+lazy", pos="alibi", n_layer=2)
    assert [layer.pos for layer in config.layer_configs] == ["none", "alibi"]


@given(st.permutations(["gated_elementwise", "softmax", "elastic,gate=none"]))
def test_a_preset_holds_in_layers_whose_recipe_sets_nothing_else(parts):
    config = model_config({"gate": "head"}, {"layers": "+".join(parts), "n_layer": 3})
    gates = {"gated_elementwise": "element", "softmax": "head", "elastic": "none"}
    assert all(layer.gate == gates[layer.attn] for layer in config.layer_configs)
