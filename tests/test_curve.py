"""eval.py curve: the weights of one row are computed from its scores by the recipe's formula."""
import json

import torch
from bounds import close

import attention
import eval as eval_script

RECIPES = [name for name, axes in attention.ATTENTIONS.items() if "mixer" not in axes]


def curve(capsys, *argv):
    eval_script.main(["curve", *argv])
    return capsys.readouterr().out


def test_weights_equal_the_formulas_of_the_scores(capsys):
    found = json.loads(curve(capsys, "softmax,elastic,relu,softmax1,tda,diff2", "--keys=9", "--spread=3", "--json"))
    s, w = torch.tensor(found["scores"]), {name: torch.tensor(row["weights"]) for name, row in found["recipes"].items()}
    close(s, torch.linspace(-3, 3, 9))
    p = s.double().softmax(0)
    close(w["softmax"], p, terms=9)
    close(w["elastic"], (p - 1 / 9).clamp(min=0), terms=9)
    close(w["relu"], s.double().clamp(min=0) / 9, terms=9)
    close(w["softmax1"], s.double().exp() / (1 + s.double().exp().sum()), terms=9)
    threshold = (2 * torch.tensor(9.0).double().log() / 64).sqrt()
    close(w["tda"], (s.double() / 3 - threshold).clamp(min=0) ** 2, terms=64)       # one view of cosines
    close(w["diff2"], p, terms=9)
    row, cut = (found["recipes"][name] for name in ("softmax1", "elastic"))
    assert row["zeros"] == 0 and row["largest"] == max(row["weights"])
    close(cut["zeros"], cut["weights"].count(0) / 9)
    close(row["on_keys"] + row["extra"], 1, terms=9, dtype=torch.float32)


def test_every_recipe_without_a_mixer_has_a_curve_and_is_drawn(tmp_path, capsys):
    text = curve(capsys, "all", f"--png={tmp_path / 'curve.png'}")
    assert {*RECIPES} <= {*text.split()}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
