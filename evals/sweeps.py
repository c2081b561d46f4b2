"""The tables of When Attention Sink Emerges (2410.10781, section 7) as lists of runs, for eval.py lab --sweep.

The paper's models have 60M parameters, 10 blocks of 8 heads and T = 2048, trained on 5B tokens of the Pile. It reports
Sink_1^0.3 in percent of heads and sequences, the same for the extra key (Sink*), and the validation loss. Our models
have the lab's one layer with one head, and our loss is the excess over the true process. So only the order of the rows
can be compared, not the numbers.
"""
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One row of a table: our run, and the paper's figures, None where it has none."""
    run: str                                    # of evals/lab_runs.py
    extra: float | None = None                  # Sink*, %: the extra key's
    sink: float | None = None                   # Sink_1, %
    loss: float | None = None                   # nats a token


SWEEPS = {                                      # {name: {what: Row}}
    "pos": {                                    # table 3
        "none": Row("no-positions", None, 20.35, 3.81),
        "sinusoidal": Row("sinusoidal", None, 32.73, 3.74),
        "learned": Row("softmax", None, 33.13, 3.79),
        "t5_index": Row("t5-index", None, 35.53, 5.45),                 # "relative" in their code
        "t5": Row("t5"),
        "alibi": Row("alibi", None, 20.78, 3.71),
        "rope": Row("rope", None, 18.18, 3.73)},
    "norm_place": {                             # section 7.2
        "pre": Row("softmax", None, 18.18, 3.73),
        "post": Row("postnorm", None, 13.54),
        "out": Row("outnorm"),
        "out, queries and keys normed": Row("outnorm-qknorm")},
    "bias": {                                   # table 4, and the questions of tables 12 and 13
        "softmax": Row("softmax", None, 18.18, 3.73),
        "sink_token": Row("sink_token", 74.12, 0.00, 3.72),
        "kv_bias": Row("kv_bias", 72.76, 0.04, 3.72),
        "k_bias": Row("k_bias", 73.34, 0.00, 3.72),
        "v_bias": Row("v_bias", None, 17.53, 3.73),
        "k_bias, 1 channel": Row("k_bias-1-dims"),
        "k_bias, 4 channels": Row("k_bias-4-dims"),
        "4 heads": Row("softmax-4-heads"),
        "4 heads, k_bias": Row("k_bias-4-heads"),
        "4 heads, kv_bias": Row("kv_bias-4-heads"),
        "4 heads, one k_bias": Row("k_bias-4-heads-shared"),
        "4 heads, one kv_bias": Row("kv_bias-4-heads-shared")},
    "value_norm": {                             # table 5
        "0": Row("value-norm-0", 73.34, 0.00, 3.72),
        "1 on an axis": Row("value-axis-1", 70.03, 0.06, 3.72),
        "5 on an axis": Row("value-axis-5", 44.43, 3.71, 3.72),
        "20 on an axis": Row("value-axis-20", 1.51, 25.88, 3.71),
        "1 evenly": Row("value-norm-1", 69.74, 2.15, 3.72),
        "5 evenly": Row("value-norm-5", 27.99, 5.93, 3.72),
        "20 evenly": Row("value-norm-20", 0.00, 11.21, 3.73)},
    "rule": {                                   # table 6; its sinks are shares of the row's sum
        "softmax": Row("softmax", None, 18.18, 3.73),
        "sigmoid_raw": Row("sigmoid_raw", None, 0.44, 3.70),
        "sigmoid_norm": Row("sigmoid_norm", None, 30.24, 3.74),
        "elu": Row("elu", None, 0.80, 3.69),
        "linear": Row("linear", None, 53.65, 4.19),
        "identity": Row("identity", None, 0.00, 3.99),
        "mlp_norm": Row("mlp_norm", None, 0.19, 3.85),
        "mlp": Row("mlp", None, 0.74, 3.91)},
}

OURS = {                                        # {column: figure of the lab}
    "Sink*": "extra_eps", "Sink_1": "sink_eps", "sink idle": "sink_idle", "share": "share_idle", "extra": "extra_idle",
    "|v0|/|v|": "value_norm_ratio", "zero": "zero_cost", "excess": "excess_loss", "on copy": "excess_copy"}


def cases(name):
    """{what: the name of its run} of a sweep."""
    return {what: row.run for what, row in SWEEPS[name].items()}


def side_by_side(name, runs):
    """The paper's table next to ours: rows, and the names of the columns. runs: {what: [the lab's figures of each
    seed]}. Our figures are means over seeds; "apart" is the range of sink idle over seeds."""
    cells = []
    for what, row in SWEEPS[name].items():
        ours = [[figures.get(key) for figures in runs[what]] for key in OURS.values()]
        sinks = [figures["sink_idle"] for figures in runs[what]]
        cells.append([what, *("-" if x is None else f"{x:.2f}" for x in row[1:]),
                      *("-" if None in values else f"{np.mean(values):.3f}" for values in ours),
                      f"{max(sinks) - min(sinks):.3f}"])
    return cells, ["", "their Sink*", "their Sink_1", "their loss", *OURS, "apart"]
