"""eval.py params: shows known parameter values of every recipe, next to their initial values."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import close
from conftest import RECIPES, enliven, tiny_config
from layers import in_every_layer

from common.machine import Machine
from data import tokens
from evals import params
from evals.params import Params, figures
from evals.pictures import pyplot
from model import GPT


def opened(data, gpt, **knobs):
    """An opened run of this model on this data, which was never saved."""
    return SimpleNamespace(
        model=gpt,
        machine=Machine("cpu", "float32"),
        meta={"knobs": knobs},
        split=lambda name: tokens.Tokens(data, name),
        window=lambda length: gpt.config.block_size,
    )


def layer(**choices):
    return GPT(tiny_config(**choices)).transformer.h[0].attn


SIGMOID_2 = 1 / (1 + math.exp(-2))
VECTORS = [[3, 4] + [0] * 6, [1] * 8]  # of norms 5 and sqrt(8)
LAMBDAS = {
    f"lambda_{name}": [value] * 8
    for name, value in (("q1", 0.1), ("k1", 0.5), ("q2", 0.2), ("k2", 0.25))
}
# recipe, parameters or --attn_args, the figures of its two heads. For an input of zeros, biases
# alone give the numbers
FIGURES = [
    ("k_bias", {"sink_key": VECTORS}, {"|sink_key|": [5, math.sqrt(8)]}),
    ("kv_bias", "value_norm=7", {"|sink_value|": [7, 7]}),
    ("dex", {"dex_lambda": [0.5]}, {"dex_lambda": [0.5]}),
    ("entmax", "alpha=learned", {"alpha": [1.5, 1.5]}),
    (
        "asentmax",
        {"scale_beta": [0.5, 1.0], "scale_gamma": [0.0, -1.0]},
        {"sharpness": [1.5, 1 + 1 / math.log(17)]},
    ),
    ("tda", {"lambda_logit": [0.0, 2.0]}, {"lambda": [0.5, SIGMOID_2]}),
    ("diff", LAMBDAS, {"lambda": [math.exp(0.4) - math.exp(0.4) + 0.2]}),  # Ye et al. eq. 3
    ("retnet", {}, {"kept": [1 - 1 / 32, 1 - 1 / 64]}),
    (
        "gated_deltanet",
        {"A_log": [0.0, math.log(3)], "dt_bias": [math.log(math.e - 1), math.log(math.e**2 - 1)]},
        {"kept": [math.exp(-1), math.exp(-6)], "written": [0.5, 0.5]},
    ),  # softplus: 1 and 2
    ("titans", {"momentum.bias": [0.0, 2.0]}, {"momentum": [0.5, SIGMOID_2]}),
]


@pytest.mark.parametrize(
    "attn, given, expected", FIGURES, ids=lambda x: x if isinstance(x, str) else ""
)
@torch.no_grad()
def test_known_parameters_give_known_figures(attn, given, expected):
    module = layer(attn=attn, attn_args=given if isinstance(given, str) else "")
    for name, values in given.items() if isinstance(given, dict) else ():
        p = module.get_parameter(name)
        p.copy_(torch.tensor(values).view(p.shape))
    found = {name: values.tolist() for name, values in figures(module).items() if name in expected}
    close(found, expected, terms=8, size=8.0, dtype=torch.float32)


@pytest.mark.parametrize("gate, bias_range", [("head", 4), ("element", 40)])
def test_a_run_is_shown_next_to_its_initial_values_and_a_gate_by_its_mean_opening(
    gate, bias_range, data
):
    """Distance biases are those of the table, up to block_size. On data, a gate equals the linear
    layer written out. For an input of zeros, it is half open."""
    gpt = GPT(
        tiny_config(attn="lazy", gate=gate, bias_range=bias_range, vocab_size=257, n_layer=2)
    ).eval()
    enliven(gpt)
    numbers, text = params.command(Params(windows=3, batch_size=2), opened(data, gpt))
    split, now = tokens.Tokens(data, "val"), {}
    idx = torch.from_numpy(split.windows(tokens.fixed_windows(split, 16, 3), 16, 257))
    now["gate"] = in_every_layer(
        lambda module, q, k, v, x, table: (
            torch.sigmoid(x.double() @ module.gate.weight.double().T)
            .mean((0, 1))
            .view(2, -1)
            .mean(1)
        ),
        gpt,
        idx,
    )
    now["tau"] = [block.attn.tau.detach() for block in gpt.transformer.h]
    for name, start in (("gate", 0.5), ("tau", 1.0)):
        figure = numbers["figures"][name]
        close(torch.tensor(figure["now"]), torch.stack([*now[name]]), terms=16, dtype=torch.float32)
        assert figure["start"] == [[start, start]] * 2
    table = gpt.transformer.h[0].attn.table
    close(torch.tensor(numbers["distance_bias"]["now"][0]), table[:, :16].detach())
    assert "gate  the gate on" in text


@pytest.mark.parametrize("attn", RECIPES)
def test_a_model_before_its_first_step_shows_its_initial_values(attn, data):
    gpt = GPT(tiny_config(attn=attn, vocab_size=257, n_layer=2), seed=5)
    numbers, text = params.command(Params(windows=1), opened(data, gpt, seed=5))
    assert text and ("(kept as it was)" in text) == (attn in ("lssar", "focus", "focus_printed"))
    for name, figure in numbers["figures"].items():
        # those of text are 0.2 from the initial value, which is for zeros
        of_text = name in ("gate", "lambda", "kept", "written", "momentum")
        assert figure["now"] == [
            pytest.approx(layer, abs=0.2 * of_text) for layer in figure["start"]
        ]


def test_each_layer_of_a_pattern_shows_what_it_has(data):
    gpt = GPT(tiny_config(layers="deltanet+lazy+sink", vocab_size=257, n_layer=4))
    found, _ = params.command(Params(windows=1), opened(data, gpt))
    assert {
        name: figure["layers"]
        for name, figure in (found["figures"] | {"b": found["distance_bias"]}).items()
    } == {"written": [0, 3], "tau": [1], "sink_logit": [2], "b": [1]}


def test_the_picture_has_a_dot_for_each_head_and_a_panel_for_the_bias_of_each_layer():
    gpt = GPT(tiny_config(layers="softmax+lazy", vocab_size=257, n_layer=6))
    enliven(gpt)
    torch.nn.init.normal_(gpt.transformer.h[3].attn.table)
    found, _ = params.command(Params(), opened(None, gpt))
    _, (left, right) = pyplot().subplots(1, 2)
    tau, bias = found["figures"]["tau"], found["distance_bias"]
    params.draw_figure(left, "tau", tau)
    params.draw_bias(right, bias["layers"], np.array(bias["now"]))
    dots, mean = left.child_axes[0].lines[2:4]  # of the second layer that has the figure
    assert [label.get_text() for label in left.get_yticklabels()] == ["1", "3", "5"]
    assert dots.get_xdata().tolist() == tau["now"][1] and mean.get_xdata() == sum(tau["now"][1]) / 2
    titles = [part.get_title() for part in right.child_axes]
    assert titles == ["layer 1", "layer 3", "layer 5"]
    curves = [line.get_ydata() for line in right.child_axes[1].lines[:3]]
    close(torch.tensor(curves[2]), torch.tensor(np.mean(curves[:2], 0)))
