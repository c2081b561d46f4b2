"""eval.py show: every choice of a recipe, and the place of its code in the files."""

import re
import subprocess
import sys

import pytest
from conftest import FEW, ROOT, some_recipes

import attention
import mixers
from evals.show import Show, command


@pytest.mark.parametrize("attn", some_recipes(*FEW, "tda"))
def test_every_choice_and_learned_tensor_is_there_and_every_place_is_where_its_code_begins(attn):
    found, text = command(Show(recipe=attn), None)
    for axis, value, name, where in found["code"]:
        assert (
            re.search(rf"^{axis} +{re.escape(value)}( |$)", text, re.M)
            and name in text
            and where in text
        )
        if where:  # a function, the decorator above it, or a lambda in a table
            file, line = where.split(":")
            begins = (ROOT / file).read_text().splitlines()[int(line) - 1]
            assert re.search(r"^ *(@|def |class )|lambda", begins), where
    shown = {axis: value for axis, value, *_ in found["code"]}
    recipe = {
        axis: str(value) for axis, value in attention.ATTENTIONS[attn].items() if axis != "args"
    }
    assert recipe.items() <= shown.items() and not shown.keys() & found["usual"].keys()
    choices = mixers.MIXERS[attention.ATTENTIONS[attn].get("mixer", "attention")].axes
    assert choices.keys() <= shown.keys() | found["usual"].keys()
    assert all(f"{name} {tuple(shape)}" in text for name, shape in found["learns"].items())
    if attn == "tda":  # functions around the rule, and those of its kernel
        names = {f"{axis} {name}" for axis, _, name, *_ in found["code"]}
        assert {"qk_norm fixed_norm", "rule row_input", "rule Triton weigh", "diff mix"} <= names


def test_a_recipe_has_the_sizes_of_a_run(elastic_run):
    assert command(Show(out_dir=str(elastic_run)), None)[0]["learns"]["tau"] == [2]
    assert command(Show(recipe="k_bias", out_dir=str(elastic_run)), None)[0]["learns"][
        "sink_key"
    ] == [2, 8]


def test_show_names_what_it_needs():
    with pytest.raises(ValueError, match="show needs a recipe or a run"):
        Show()
    with pytest.raises(ValueError, match="sofmax: choose from softmax"):
        Show(recipe="sofmax")


def test_a_closed_pipe_is_no_error():
    script = "from common import files\nwith files.one_line_errors(): print('elastic ' * 10 ** 5)"
    done = subprocess.run(
        f'{sys.executable} -c "{script}" | head -c 9',
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.startswith("elastic") and done.stderr == ""
