"""eval.py show: every page holds the code itself and names its place in the files."""
import inspect
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import attention
import eval as eval_script
import kernels
import mixers
from evals.show import page_of


def shown(capsys, *argv):
    eval_script.main(["show", *argv])
    return capsys.readouterr().out


@pytest.mark.parametrize("attn", attention.ATTENTIONS)
def test_a_page_holds_the_code_with_its_places_every_choice_and_every_parameter(attn):
    found, text = page_of(attn)
    mixer, rule = (attention.ATTENTIONS[attn].get(axis) for axis in ("mixer", "rule"))
    does = getattr(mixers.AXES["rule"][rule], "chunk", None) or getattr(attention, rule)
    assert inspect.getsource(does).rstrip() in text
    if not mixer:
        weigh = kernels.KERNELS[rule].weigh
        assert inspect.getsource(getattr(weigh, "fn", weigh)).rstrip() in text
    # a place is the line where the function begins: its def or the decorator above
    for name, place in (found["pytorch"] | found["triton"]).items():
        file, line = place.split(":")
        lines = (ROOT / file).read_text().splitlines()[int(line) - 1:int(line) + 1]
        assert place in text and any(re.match(rf" *(def|class) {name}\(", line) for line in lines), place
    file, line = found["where"].split()[0].split(":")
    assert f'"{attn}": {{' in (ROOT / file).read_text().splitlines()[int(line) - 1]
    rows = {axis: value for axis, value in attention.ATTENTIONS[attn].items() if axis != "args"}
    rows |= {name: tuple(shape) for name, shape in found["learns"].items() if name[:6] not in ("c_attn", "c_proj")}
    for name, value in rows.items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(str(value))}( |$)", text, re.M), name


def test_a_page_shows_what_comes_before_and_after_the_rule():
    found = list(page_of("tda")[0]["pytorch"])
    assert found == ["unit_length", "tra_threshold", "tra", "lambda_of_head", "attend", "head_norm"]
    # lssar's threshold is computed from another rule's row sums
    assert "softplus_weigh" in page_of("lssar")[0]["triton"]
    assert "visible" in page_of("streaming")[0]["pytorch"]


def test_a_page_has_the_sizes_of_a_run_also_of_another_recipe(elastic_run, data, capsys):
    out_dir = f"--out_dir={elastic_run}"
    page = shown(capsys, out_dir)
    for line in (r"tau +\(2,\)", "n_kv_head +2", "head_dim +8", "rope_base +10000", "rope_scaling +none"):
        assert re.search(rf"^{line} +[a-zA-Z0-9]", page, re.M), line
    assert f"trained on {data}, from scratch" in " ".join(page.split())
    page = shown(capsys, "k_bias", out_dir, "--diff=sink")
    for line in (r"\+ sink_key +\(2, 8\) ", r"- sink_logit +\(2,\) ", "  n_embd +16 "):
        assert re.search(f"^{line}", page, re.M), line


def test_a_closed_pipe_is_no_error():
    words = f"{sys.executable} {ROOT / 'eval.py'} show elastic | head -1"
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("elastic") and done.stderr == ""
