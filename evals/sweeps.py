"""The tables of When Attention Sink Emerges (2410.10781, section 7) as lists of runs, for eval.py lab --sweep.

The paper's models have 60M parameters, 10 blocks of 8 heads and T = 2048, trained on 5B tokens of the Pile. It reports
Sink_1^0.3 in percent of heads and sequences, the same for the extra key (Sink*), and the validation loss. Our models
have the lab's one layer with one head, and our loss is the excess over the true process. So only the order of the rows
can be compared, not the numbers.
"""
# {name: {what: (our run, of evals/lab_runs.py; then the paper's figures, None where it has none: Sink* of the extra key
# and Sink_1 in percent, loss in nats a token)}}
SWEEPS = {
    "pos": {                                    # table 3
        "none": ("no-positions", None, 20.35, 3.81),
        "sinusoidal": ("sinusoidal", None, 32.73, 3.74),
        "learned": ("softmax", None, 33.13, 3.79),
        "t5_index": ("t5-index", None, 35.53, 5.45),                    # "relative" in their code
        "t5": ("t5", None, None, None),
        "alibi": ("alibi", None, 20.78, 3.71),
        "rope": ("rope", None, 18.18, 3.73)},
    "norm_place": {                             # section 7.2
        "pre": ("softmax", None, 18.18, 3.73),
        "post": ("postnorm", None, 13.54, None),
        "out": ("outnorm", None, None, None),
        "out, queries and keys normed": ("outnorm-qknorm", None, None, None)},
    "bias": {                                   # table 4, and the questions of tables 12 and 13
        "softmax": ("softmax", None, 18.18, 3.73),
        "sink_token": ("sink_token", 74.12, 0.00, 3.72),
        "kv_bias": ("kv_bias", 72.76, 0.04, 3.72),
        "k_bias": ("k_bias", 73.34, 0.00, 3.72),
        "v_bias": ("v_bias", None, 17.53, 3.73),
        "k_bias, 1 channel": ("k_bias-1-dims", None, None, None),
        "k_bias, 4 channels": ("k_bias-4-dims", None, None, None),
        "4 heads": ("softmax-4-heads", None, None, None),
        "4 heads, k_bias": ("k_bias-4-heads", None, None, None),
        "4 heads, kv_bias": ("kv_bias-4-heads", None, None, None),
        "4 heads, one k_bias": ("k_bias-4-heads-shared", None, None, None),
        "4 heads, one kv_bias": ("kv_bias-4-heads-shared", None, None, None)},
    "value_norm": {                             # table 5
        "0": ("value-norm-0", 73.34, 0.00, 3.72),
        "1 on an axis": ("value-axis-1", 70.03, 0.06, 3.72),
        "5 on an axis": ("value-axis-5", 44.43, 3.71, 3.72),
        "20 on an axis": ("value-axis-20", 1.51, 25.88, 3.71),
        "1 evenly": ("value-norm-1", 69.74, 2.15, 3.72),
        "5 evenly": ("value-norm-5", 27.99, 5.93, 3.72),
        "20 evenly": ("value-norm-20", 0.00, 11.21, 3.73)},
    "rule": {                                   # table 6; its sinks are shares of the row's sum
        "softmax": ("softmax", None, 18.18, 3.73),
        "sigmoid_raw": ("sigmoid_raw", None, 0.44, 3.70),
        "sigmoid_norm": ("sigmoid_norm", None, 30.24, 3.74),
        "elu": ("elu", None, 0.80, 3.69),
        "linear": ("linear", None, 53.65, 4.19),
        "identity": ("identity", None, 0.00, 3.99),
        "mlp_norm": ("mlp_norm", None, 0.19, 3.85),
        "mlp": ("mlp", None, 0.74, 3.91)},
}
