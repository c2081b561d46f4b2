"""eval.py claims: verdicts on invented numbers on either side of each threshold, the runs that claims name, checks with
answers known by hand, and the command."""
import json
import math
from pathlib import Path

import bounds
import numpy as np
import pytest
import torch
from bounds import close
from conftest import ROOT
from layers import inputs, layer
from test_lab import output_here

import eval as eval_script
import train as train_script
from common.flags import Parser, add_flags, fields_of, given_flags
from evals import claims
from evals.instrument import Common, Overrides
from evals.lab_runs import RECIPES, SETUPS, flags_of
from evals.ledger import checks, experiments, routing, view
from evals.ledger.book import CLAIMS, PAPERS, cost_of, decided_by, evidence, fits, jobs_of, readable, verdicts_of
from evals.ledger.changes import LOG
from evals.ledger.claim import (
    AGREES,
    CONTRADICTS,
    COSTS,
    GRADES,
    HAS_SINK,
    MIXED,
    NOT_RUN,
    SOFTMAX_SINK,
    UNTESTABLE,
    VERDICTS,
    Bound,
    Quantity,
    Reading,
    in_words,
    interval,
    judge,
    rank_correlation,
    readings,
    thirds,
)
from evals.ledger.emerges import OTHERS, SUM_TO_ONE
from evals.ledger.experiments import COMMANDS, LOOKS, Job, Place, all_jobs
from evals.ledger.threshold import THEIR_ORDER
from evals.sweeps import SWEEPS, cases
from model import GPTConfig

A, C, M, N = AGREES, CONTRADICTS, MIXED, UNTESTABLE
SPREAD = np.array([-0.01, 0.0, 0.01])           # of invented losses over three seeds


def windows(loss, noise=0.1, shared=True):
    """Losses of eight windows for three seeds. Windows differ much more than forms do; shared: all forms alike."""
    return np.full((3, 1), loss) + noise * (np.arange(8) - 3.5) * (1 if shared else -1)


def seeds(value):
    """A number or a list, repeated for three seeds. An array already has one value a seed."""
    return value if isinstance(value, np.ndarray) else np.array([value] * 3, float)


def verdict(name, where="", **columns):
    """The verdict of a claim on {column: {run: value}}. A bare value is that of every run. An underscore in the name of
    a column is a space."""
    reading = readings(CLAIMS[name])[where]
    named = {column.replace("_", " "): value for column, value in columns.items()}
    reads = {column.replace("_", " "): runs.split() for column, (_, runs) in reading.reads.items()}
    numbers = {}
    for column, runs in reading.reads.items():
        value = named.get(column.replace("_", " "), {})
        runs = [run.split("@")[0] for run in runs[1].split()]
        group = value if isinstance(value, dict) else dict.fromkeys(runs, value)
        numbers[column] = {run: seeds(group.get(run, 9.0 if column == SOFTMAX_SINK else 0.0)) for run in runs}
    assert named.keys() <= reads.keys(), named.keys() - reads.keys()
    return judge(reading, numbers)


def ramp(layers, *values):
    """An array (seeds, layers, heads) with one number a layer, the same for both heads."""
    return np.broadcast_to(np.array(values, float)[None, :, None], (3, layers, 2))


# ------------------------------------------------------------------------------------------------------------ verdicts

# {claim: [(verdict, columns), (verdict, changes to the first columns), ...]}, on either side of each threshold

LAZY = {
    "elastic-removed-mass": [(A, {"mass": 0.59}), (M, {"mass": 0.61}), (M, {"mass": 0.19}), (A, {"mass": 0.21}),
                             (M, {"mass": 0.79}), (C, {"mass": 0.81})],
    "repeat-tokens": [
        (A, {"x uniform": {"softmax": 3.1, "sinusoidal": 9, "rope": 1.6, "alibi": 1}, "not repeated": 4, "extra": 0.6,
             "extra on text": 1, "spread": 9e-6}),
        (M, {"not repeated": {"rope": 3.9}}),
        (M, {"x uniform": {"softmax": 2.9}}), (M, {"x uniform": {"rope": 1.8}}), (C, {"spread": 2e-5}),
        (C, {"x uniform": {"rope": 1}, "extra": 0.4}), (C, {"x uniform": {"softmax": 2.9, "sinusoidal": 2.9}}),
        (M, {"x uniform": {"softmax": 2.9, "sinusoidal": 3.1}, "spread": {"softmax": 1, "learned-untrained": 1}})],
    "streaming-ppl": [(A, {"full": 1.0, "first and last": 1.1, "last": 1.2}), (M, {"short, full": 2e-5}),
                      (A, {"last": 1.1}), (C, {"first and last": 1.0})],
    "lazy-ablation": [
        (A, {"loss": {"softmax": 2.0, "rope+bias": 1.9, "elastic": 2.1, "lazy": 1.95}}),
        (A, {"loss": {"elastic": 1.99}}), (M, {"loss": {"rope+bias": 1.9 + SPREAD, "lazy": 1.91}}),
        (C, {"loss": {"rope+bias": 2.1, "elastic": 2.2, "lazy": 2.25}}), (C, {"loss": {"lazy": 1.89}})],
    "tau-by-depth": [
        (expected, {"tau": ramp(6, first, 1, 1, 1, 1, 1) + ramp(6, 0, 0, .1, .1, apart, apart) * np.array([1, -1])})
        for expected, first, apart in ((A, 3, .3), (M, 3, .14), (C, 0, .3))],
    "lazy-extrapolates": [
        (A, {"65-128": {"rope": 1.0, "elastic-rope": 2.0, "lazy": 0.49},
             "129-256": {"rope": 1.0, "elastic-rope": 2.0, "lazy": 0.49}}),
        (M, {"65-128": {"lazy": 0.51}}),
        (C, {"65-128": {"elastic-rope": 0, "lazy": 1.0}, "129-256": {"elastic-rope": 0, "lazy": 1.1}})],
    "elastic-offset-order": [
        (A, {"loss": {"softmax": 1.0, "elastic": 1.1, "tau-from-0": 1.2, "tau-fixed": 1.3, "tau-plain": 1.4 + SPREAD},
             "sink": {"softmax": .5, "elastic": .1, "tau-from-0": .3, "tau-fixed": .2, "tau-plain": .4},
             "softmax, x uniform": 4}),
        (M, {"softmax, x uniform": 3.9}),
        (M, {"loss": {"tau-plain": 1.29}}), (C, {"loss": {"tau-fixed": 1.5}}),
        (C, {"loss": {"tau-plain": 1.4}, "sink": {"elastic": .3, "tau-from-0": .1}})],
    "lazy-sink-gone": [
        (A, {"raw": {"softmax": 1.0, "elastic": 0.099, "lazy": 0.0}}), (M, {"raw": {"elastic": 0.101}}),
        (M, {"raw": {"elastic": 0.34, "lazy": 0.33}}), (C, {"raw": {"elastic": 0.34, "lazy": 0.34}})],
    "elastic-two-pass": [(A, {"forward": 0.51, "forward and backward": 0.63}), (C, {"forward": 0.49}),
                         (C, {"forward and backward": 0.62})],
}


def growth(softmax, tda):
    return {f"at {T}": {"softmax": s, "tda": t} for T, s, t in zip((64, 128, 256), softmax, tda, strict=True)}


THRESHOLD = {
    "diff-fixed-sum": [(A, {"spread": 2e-3}), (M, {"spread": 1e-4}), (C, {"spread": 1e-6})],
    "rela-sink-free": [
        (A, {"x uniform": 1.9, "cost of zero v0": 0.004}), (M, {"cost of zero v0": 0.006}), (M, {"x uniform": 2.1}),
        (C, {"x uniform": {"rela": 4.1}, "cost of zero v0": 0.0}), (M, {"x uniform": {"softpick": 2.1}}),
        (C, {"x uniform": {"relu": 4.1}}), (C, {"x uniform": 1.0, "cost of zero v0": {"tda": 0.021}})],
    "entmax-keeps-sink": [(A, {"raw": 0.51}), (M, {"raw": 0.49}), (C, {"raw": 0.09})],
    "thm-survivors": [
        (A, {"survivors, kappa 1": [1.1] * 4, "survivors error, kappa 1": [0.04] * 4, "survivors, kappa 4": [4.0] * 4,
             "survivors error, kappa 4": [0.0] * 4, "overlap, kappa 1": [0.0] * 4, "overlap error, kappa 1": [0.0] * 4,
             "overlap, kappa 4": [0.25, 0, 0, 0], "overlap error, kappa 4": [0.0] * 4}),
        (C, {"survivors error, kappa 1": [0.03] * 4, "overlap, kappa 4": [0.0] * 4})],
    "nondispersive": [
        (A, {"tra": [0.5, 0, 0, 0.39], "tda": [0.5, 0, 0, 0.4], "softmax": [0.7, 0, 0, 0.8]}),
        (M, {"tra": [0.5, 0, 0, 0.41]}), (M, {"tda": [0.4, 0, 0, 0.4]}), (M, {"softmax": [0.9, 0, 0, 0.8]}),
        (C, {"tra": [0.3, 0, 0, 0.31]})],
    "tda-depth-profile": [
        (expected, dict.fromkeys(("at 10", "at full length"), ramp(6, .9, .9, middle, middle, last, last)))
        for expected, middle, last
        in ((A, .84, .9), (M, .86, .9), (M, .85, .8), (C, .91, .9))],
    "tda-signed-peaks": [
        (A, {"view 1": 1.0, "view 2": 0.5, "difference": 0.39, "lambda": [[0.5]], "negative": 0.1}),
        (M, {"negative": 0}), (M, {"difference": 0.41}), (M, {"difference": 0.94}), (C, {"difference": 0.96})],
    "tda-sink-growth": [(A, growth((2, 3, 4.1), [1.4] * 3)), (M, growth((2, 3, 4.1), [1.6] * 3)),
                        (M, growth((2, 3, 3.9), [1.4] * 3)), (M, growth([5] * 3, [np.array([1, 3.9, 11])] * 3)),
                        (C, growth((2, 3, 3.9), [4.1] * 3)),
                        (C, growth([9] * 3, (1, 1, 4.1)))],
    "tda-loss-order": [
        (A, {"loss": {**THEIR_ORDER, "tda": 3.11 + SPREAD}}), (C, {"loss": {"tda": 3.2}}),
        (M, {"loss": {"softmax": 3.1}}),
        (M, {"loss": {name: 6 - loss for name, loss in THEIR_ORDER.items()} | {"tda": 2.8}}),
        (N, {"loss": {name: loss + SPREAD for name, loss in THEIR_ORDER.items()}}),
        (A, {"loss": {name: loss + SPREAD / 10 for name, loss in THEIR_ORDER.items()}})],
    "tda-sparsity": [
        (A, {"zeros": {"tda": 0.91, "tra": 0.9, "diff_rela": 0.5, "rela": 0.5, "entmax": 0.4}}),
        (M, {"zeros": {"tda": 0.89, "tra": 0.8}}), (M, {"zeros": {"entmax": 0.95}}), (C, {"zeros": {"tra": 0.92}})],
    "tra-closes-gap": [
        (A, {"loss": {"rela": 2.0, "tra": 1.9}, "by place": {"rela": [2, 2.1, 2.2, 2.3], "softmax": [2] * 4,
                                                             "tra": [3, 2, 2, 2]}}),
        (M, {"by place": {"rela": [2.3, 2.2, 2.1, 2]}}), (M, {"by place": {"tra": [3, 2, 2.2, 2.3]}}),
        (M, {"loss": {"tra": 2.02 + SPREAD}}),
        (C, {"loss": {"tra": 2.03 + SPREAD}})],
    "tda-power": [
        (A, {"loss": {"tda-p1": 2 + SPREAD, "tda": 1.905 + SPREAD, "tda-p3": 1.9 + SPREAD, "tda-p5": 1.9 + SPREAD}}),
        (M, {"loss": {"tda": 1.92 + SPREAD}}), (M, {"loss": {"tda-p1": 1.91}}),
        (C, {"loss": {"tda-p1": 1.8 + SPREAD, "tda": 1.92 + SPREAD, "tda-p3": 1.9, "tda-p5": 1.9}})],
    "tda-beta": [
        (A, {"loss": {"tda-0.3": 1 + SPREAD, "tda-0.5": 1.019 + SPREAD, "tda-0.8": 1 + SPREAD, "tda-1": 1 + SPREAD}}),
        (C, {"loss": {"tda-0.5": 1.021 + SPREAD}})],
    "dead-heads": [
        (A, {"empty": {"tda-0.3": .1, "tda-0.5": .1, "tda-0.8": .12, "tda-1": .16}}), (C, {"empty": {"tda-1": .14}}),
        (M, {"empty": {"tda-0.5": .3, "tda-0.8": .2, "tda-1": .4}})],
    "tda-kernel": [
        (A, {f"torch at {T}": 1.0 for T in (1024, 4096, 16_384)}
         | {"TRA at 1024": 1.1, "TRA at 4096": 1.2, "TRA at 16384": 1.3}),
        (M, {"TRA at 16384": 1.1}), (M, {"TRA at 1024": 0.9}),
        (C, {"TRA at 1024": 0.7, "TRA at 4096": 0.8, "TRA at 16384": 0.9})],
}


def speeds_at(*ratios):
    lengths = (1024, 4096, 8192, 16_384, 32_768, 65_536, 262_144)
    return {f"T {T}": ratio for T, ratio in zip(lengths, ratios, strict=True)}


SWEPT = {"focus-n3": 1, "focus-n5": 2, "focus-frozen-sinkhorn": 3, "focus-n20": 4}

FOCUS = {
    "focus-leak": [(A, {"change": 0}), (M, {"change": 1e-7}), (C, {"change": 1e-5})],
    "focus-gate-prunes": [(A, {"mass": .009}), (M, {"mass": .09}), (C, {"mass": .11})],
    "focus-small-router": [
        (A, {"loss": {"focus-frozen": windows(2.004), "focus-d512": windows(2.0), "focus-random": windows(2.02),
                      "focus-w16": windows(1), "focus-w64": windows(2), "focus-w256": windows(4)}}),
        (M, {"loss": {"focus-d512": windows(1.998)}}), (M, {"loss": {"focus-w16": windows(1, 2, shared=False)}}),
        (N, {"loss": {"focus-random": windows(2.013)}}),
        (C, {"loss": {"focus-frozen": windows(2.0), "focus-d512": windows(1.98), "focus-w16": windows(4),
                      "focus-w64": windows(3), "focus-w256": windows(1)}})],
    "focus-zero-degradation": [(A, {"fit": 0.98, "difference": 1e-5}), (M, {"fit": 0.97}),
                               (C, {"fit": 0.99, "difference": 0.02})],
    "focus-frozen-ppl": [
        (A, {"frozen": windows(2.0), "near pairs": windows(2.2), "gate": windows(2.1), "top-2": windows(1.97),
             "untrained gate": windows(1.9), "untrained top-2": windows(2.0)}),
        (C, {"top-2": windows(2.01)}), (C, {"top-2": windows(1.995)}), (M, {"top-2": windows(1.97, shared=False)}),
        (M, {"untrained top-2": windows(1.96)}), (M, {"near pairs": windows(1.96)})],
    "focus-ft-beats-full": [(A, {"full": 2.0, "sparse": 1.97 + SPREAD}), (M, {"sparse": 2.0 + SPREAD}),
                            (C, {"sparse": 2.03 + SPREAD})],
    "focus-long-gap": [(A, {"full at 256": windows(2.0), "top-2 at 256": windows(2.1), "full at 512": windows(2.0),
                            "top-2 at 512": windows(2.095)}),
                       (M, {"top-2 at 512": windows(2.13, shared=False)}), (C, {"top-2 at 512": windows(2.12)})],
    "focus-speed": [
        (A, speeds_at(.5, .9, .95, 1.1, 2, 3, 5.1)), (M, speeds_at(.5, .9, .95, 1.1, 2, 3, 4.9)),
        (M, speeds_at(1.1, 1.2, 1.3, 1.3, 2, 3, 6)), (M, speeds_at(.5, .6, .7, .9, 1.1, 3, 6)),
        (C, speeds_at(.5, .6, .7, .8, .9, 1.3, 6)), (C, speeds_at(*[.5] * 7))],
    "focus-sparser-better": [
        (A, {f"top-{k}": windows(loss) for k, loss in enumerate((3, 1.9, 2, 2), 1)}
         | {"untrained top-2": windows(2.1), "near pairs": windows(2)}),
        (M, {"top-2": windows(1.99, shared=False)}), (M, {"top-1": windows(1.8)}),
        (M, {"top-2": windows(2.5), "top-3": windows(2.2), "untrained top-2": windows(2.6)}),
        (C, {"top-1": windows(2.4), "top-2": windows(2.5), "top-3": windows(2.2), "untrained top-2": windows(2.6)})],
    "focus-topk-share": [(A, {"pairs kept": .74}), (M, {"pairs kept": .76}), (M, {"pairs kept": .44}),
                         (C, {"pairs kept": .81})],
    "focus-collapse": [
        (A, {"largest group": {"focus-entropy": [.2, .81], "focus-sinkhorn": [.2, .29], "focus-softmax": [.1, .81]}}),
        (M, {"largest group": {"focus-sinkhorn": [.2, .31]}}), (M, {"largest group": {"focus-softmax": [.1, .1]}}),
        (C, {"largest group": {"focus-entropy": [.2, .39], "focus-sinkhorn": [.2, .5], "focus-softmax": [.1, .1]}})],
    "focus-sinkhorn-balance": [(A, {"K 4, N 10": .37, "K 8, N 10": .18, "K 4, N 3": .5, "K 8, N 3": .6}),
                               (M, {"K 8, N 3": .49}), (C, {"K 8, N 10": .26})],
    "focus-groups-linguistic": [(A, {"mutual information": {"focus-k8": .21}, "purity": .81}), (M, {"purity": .79}),
                                (C, {"mutual information": {"focus-k8": .11, "focus-k8-random": .1}, "purity": 0})],
    "focus-balance-costs": [(A, {"loss": SWEPT, "dominance": SWEPT}),
                            (M, {"dominance": dict(zip(SWEPT, (3, 2, 4, 1), strict=True))}),
                            (C, {"dominance": {name: -value for name, value in SWEPT.items()}})],
    "focus-disjoint": [(A, {"merge error": 9e-6, "subtract cosine": .94}), (M, {"subtract cosine": .96}),
                       (M, {"subtract cosine": .9995}), (C, {"merge error": 2e-3, "subtract cosine": .9995})],
}

NATIVE_MOE = {
    "v0-norm-drain": [
        (A, {"with BOS": .29, "no BOS, layer 1": .51, "no BOS, layer 2": .29, "no BOS, x uniform": 4}),
        (M, {"with BOS": .31}), (M, {"no BOS, layer 1": .49}), (C, {"with BOS": .81}), (M, {"no BOS, x uniform": 3.9})],
    "zero-v0-harmless": [(A, {"zero": .009, "hide": .1, "sink": .76}), (M, {"zero": .011}),
                         (M, {"zero": .021, "hide": 1}), (C, {"zero": .051}), (N, {"sink": .74})],
    "q-pinned-geometry": [
        (A, {"cos q": {"softmax": .51, "sink": .2, "softmax1": -.2}, "cos k": {"softmax": -.21}, "outside": .5}),
        (M, {"cos q": {"softmax": .49}}), (M, {"cos q": {"sink": -.42}}), (N, {"outside": .4}),
        (C, {"cos q": {"sink": .42, "softmax1": -.42}, "cos k": -.3}),
        (C, {"cos q": {"sink": .42, "softmax1": .42}, "cos k": {"sink": -.6, "softmax1": -.6}})],
    "sink-blurs-focus": [
        (A, {"right key": {"softmax": .9, "gated": .91, "k_bias": .91, "sink": .91, "softmax1": .91}, "copy loss": 1}),
        (M, {"right key": {"gated": .89}}),
        (C, {"right key": {"gated": .89, "k_bias": .9, "sink": .9, "softmax1": .9}})],
    "zero-v0-harmless@SmolLM2, strong heads": [
        (A, {"zero": .01, "error": .008}), (M, {"error": .01}), (C, {"zero": .05}), (M, {"zero": .025})],
    "sink-logit-moves-sink": [
        (A, {"virtual": .51, "first": .05}), (M, {"first": .06}), (C, {"virtual": .05, "first": .5}),
        (M, {"virtual": {"softmax1": .05, "sink": .9}, "first": {"softmax1": .9, "sink": .0}})],
    "gated-no-sink": [
        (A, {"effective": 2.4, "x uniform": 2.4, "gate on copy": .9, "gate on idle": .39}), (M, {"gate on idle": .41}),
        (M, {"effective": 4.9, "gate on idle": .1}), (M, {"x uniform": 9}), (C, {"effective": 5.1, "x uniform": 5.1})],
    "gate-identity": [(A, {"sink attention": 9e-13, "drained to 0": 9e-13}), (C, {"drained to 0": 2e-12}),
                      (C, {"sink attention": 2e-12}), (A, {"drained to 0.1": .5})],
    "early-layers-active": [(A, {"sink": ramp(4, 1, 2, 4, 3)}), (M, {"sink": ramp(4, 2, 4, 1, 3)}),
                            (M, {"sink": ramp(4, 1.5, 2, 4, 3)}),
                            (C, {"sink": ramp(4, 4, 3, 2, 1)})],
    "heads-fixed": [(A, {"correlation": .91, "difference": .04}), (M, {"difference": .06}), (C, {"correlation": .59})],
    "bigger-more-dormant": [
        (A, {"dormant": {"gpt2": .1, "gpt2-medium": .2, "gpt2-large": .3, "gpt2-xl": .4}}),
        (M, {"dormant": {"gpt2-medium": .3, "gpt2-large": .2}}),
        (C, {"dormant": {"gpt2": .4, "gpt2-medium": .3, "gpt2-large": .2, "gpt2-xl": .1}})],
    "dormant-prunable": [(A, {"most sink": .02, "random": 1}), (M, {"most sink": .03}), (C, {"most sink": .11})],
}

WITHOUT = ("sigmoid_raw", "softpick", "elastic", "gated")                   # recipes whose rows do not sum to 1

EMERGES = {
    "postnorm": [(A, {"x uniform": 3.1}), (M, {"x uniform": 2.9}), (C, {"x uniform": 1.4})],
    "sigmoid-norm-sink": [(A, {"x uniform": 3.1}), (M, {"x uniform": 1.6}), (C, {"x uniform": 1.4})],
    "pe-all-sink": [
        (A, {"x uniform": 3.1, "loss": {"t5-index": 0.51}}), (M, {"loss": {"t5-index": 0.49}}), (M, {"x uniform": 2.9}),
        (M, {"loss": {"t5-index": 0.8, "alibi": 0.11}}),
        (C, {"x uniform": {"softmax": 9, "sinusoidal": 9, "rope": 9, "alibi": 1.4, "no-positions": 9, "t5-index": 9},
             "loss": 0})],
    "kbias-shift": [
        (A, {"bias": .51, "first": {"softmax": .9, "v_bias": .8, "k_bias": .05}, "loss": 1 + SPREAD, "deletion": .06}),
        (M, {"first": {"sink_token": .06}}), (M, {"bias": .49}), (M, {"first": {"v_bias": .7}}), (M, {"deletion": .04}),
        (M, {"loss": {"softmax": 1, "k_bias": 1.1, "kv_bias": 1, "v_bias": 1}}),
        (C, {"bias": .49, "first": {"k_bias": .5}, "loss": 1})],
    "bias-massive": [
        (A, {"massive": {"softmax": [1, 3.1], "v_bias": [1, 5.1], "k_bias": [1, 1.9], "kv_bias": [1, 1.9],
                         "sink_token": [1, 5.1], "value-norm-20": [1, 5.1]}}),
        (M, {"massive": {"v_bias": [1, 4.9]}}), (M, {"massive": {"k_bias": [1, 2.1]}}),
        (C, {"massive": {"softmax": [1, 5], "k_bias": [1, 5]}}), (N, {"massive": {"softmax": [1, 2.9]}})],
    "sigmoid-none": [(A, {"share": .1, "cost of zero v0": .006}), (M, {"share": .11}), (A, {"raw": .14, "mass": 3}),
                     (C, {"share": .31})],
    "linear-norm-sink": [
        (A, {"x uniform": {"linear": 5.1, "softmax": 5, "sigmoid_norm": 1}, "loss": {"linear": 1.1, "softmax": 1}}),
        (M, {"x uniform": {"linear": 4.9, "softmax": 1}}), (M, {"x uniform": {"softmax": 5.2}}),
        (M, {"loss": {"linear": 1.01 + SPREAD}}), (C, {"x uniform": {"linear": 1.4}, "loss": 0})],
    "unnorm-loss": [
        (A, {"loss": {"sigmoid": 3.04, "sigmoid_raw": 2.96, "softmax": 3}}),
        (M, {"loss": {"sigmoid": 3.06, "sigmoid_raw": 3}}), (M, {"loss": {"sigmoid": 3, "sigmoid_raw": 3.11}}),
        (C, {"loss": {"sigmoid": 3.11, "sigmoid_raw": 3.11}})],
    "massive-iff-norm": [
        (A, {"massive": {"softmax": [1, 5.1], **dict.fromkeys(WITHOUT, [1, 1.6])}}),
        (M, {"massive": {"softmax": [1, 4.9]}}), (M, {"massive": {"elastic": [1, 1.8]}}),
        (C, {"massive": {"softmax": [1, 4.9], **dict.fromkeys(WITHOUT, [1, 5])}}),
        (N, {"massive": {"softmax": [1, 2.9], **dict.fromkeys(WITHOUT, [1, 1])}})],
}


def fixed_token(places, *won):
    """Weights on the fixed and on the first token. The fixed token has more at the places in `won`."""
    return {f"fixed at {p}": float(p in won) for p in places} | {f"first at {p}": 0.5 for p in places}


def sink_variance(v0, h, normed):
    def pairs(ratio):                           # (1, layers, (first, others)); the first layer is not counted
        return np.array([[[9.0, 1.0]] + [[ratio, 1.0]] * 3])
    return {"|v0|": pairs(v0), "var of h": pairs(h), "after the norm": pairs(normed)}


def biases_by_depth(*slopes):
    return {"bias": np.array(slopes, float)[None, :, None, None] * np.linspace(1, 0, 64)}   # (1, layers, 1, W)


def inhibition(count):
    """`count` of ten heads favour the previous token and inhibit the tokens before it."""
    shaped = np.concatenate([[0, 1], -np.ones(28), np.zeros(170)])
    return {"bias": np.stack([np.zeros((10, 200)), (np.arange(10) < count)[:, None] * shaped])[None]}


def bias_ranges(alone, beside, moved):
    def until(distance):
        return (np.arange(200) < distance).astype(float)[None, None, None]
    slopes = np.array([[[.5, .25]]])
    return {"bias": {"bias-alone": until(alone), "rope+bias": until(beside)}, "slopes": slopes * (1 + moved),
            "slopes at first": slopes}


def pinned(all_heads, routed, apart):
    """Two layers of three heads. Eq. 9 balances all heads of layer 2 but the most used one."""
    def alpha(mean, apart):
        return np.array([[[mean] * 3, [mean - 0.1, mean + 0.05 + apart, mean + 0.05 - apart]]] * 3) * 0.4
    return {"sink": {"heads-plain": alpha(1, .5), "heads-eq8": alpha(all_heads, 0),
                     "heads-eq9": alpha(routed, apart)}}


def value_norms(bias, first):
    names = [f"value-norm-{m}" for m in (0, 1, 5, 20)]
    return {column: dict(zip(names, values, strict=True)) for column, values in (("bias", bias), ("first", first))}


def sinks_of(with_sum, without):
    """That many recipes of either kind have a sink."""
    sinks = {*SUM_TO_ONE[:with_sum], *OTHERS[:without]}
    return {"raw": {name: 0.2 if name in sinks else 0.05 for name in (*SUM_TO_ONE, *OTHERS)},
            "x uniform": {name: 3.1 if name in sinks else 2.9 for name in (*SUM_TO_ONE, *OTHERS)}}


def gains(lead):
    return {f"gain at {T}": {"tda": 1 + lead, "softmax": 1.0} for T in (512, 1024, 2048)} | {
        f"error at {T}": {"tda": .03, "softmax": .065} for T in (512, 1024, 2048)}      # combined: 0.0716


ALL, LAB = (4, 8, 16, 32, 64), (4, 32)          # the lab has 64 tokens: a win at 32 does not contradict

SHAPES = {                                      # claim@where: other readings than the claim's first
    "fixed-token-16": [
        (expected, fixed_token(ALL, *won)) for expected, *won in (
            (A, 4, 8), (A, 4, 8, 16), (M, 4), (M, 4, 8, 32), (C, *ALL), (C, 64), (C,))],
    "fixed-token-16@lab without BOS": [
        (expected, fixed_token(LAB, *won)) for expected, *won in ((A, 4), (M, 4, 32), (M, 32), (C,))],
    "sink-low-variance": [
        (A, sink_variance(.5, 11, .9)), (M, sink_variance(.51, 11, .9)), (M, sink_variance(.5, 9, .9)),
        (M, sink_variance(.5, 11, 1.1)), (C, sink_variance(.81, 11, .9))],
    "bias-by-depth": [
        (A, biases_by_depth(6, 5, 4, 3, 1.8, 1)), (M, biases_by_depth(6, 5, 4, 3, 2, 1.1)),
        (C, biases_by_depth(1, 2, 3, 4, 5, 6)),
        (C, biases_by_depth(3, 1, 4, 2, 6, 5)), (M, biases_by_depth(3, 5, 1, 6, 2, 4)), (N, biases_by_depth(3, 2, 1))],
    "ior-shape": [(A, inhibition(6)), (M, inhibition(4)), (C, inhibition(1))],
    "bias-range": [(A, bias_ranges(100, 40, .19)), (M, bias_ranges(100, 40, .21)), (M, bias_ranges(100, 60, 0)),
                   (M, bias_ranges(50, 60, 0)), (C, bias_ranges(50, 60, 1.1)), (M, bias_ranges(200, 40, .1)),
                   (C, bias_ranges(200, 40, 1.1))],
    "head-pinning": [(A, pinned(.69, .91, .1)), (M, pinned(.71, .91, .1)), (M, pinned(.69, .89, .1)),
                     (M, pinned(.69, .91, .6)), (C, pinned(.91, .91, .1))],
    "bias-value-norm": [
        (A, value_norms((.91, .8, .3, .09), (.05, .1, .5, .91))), (M, {"bias": {"value-norm-0": .89}}),
        (M, {"bias": {"value-norm-20": .11}}), (C, {"bias": {"value-norm-1": .95}})],
    # 9 and 19 recipes
    "sum-dependence": [(A, sinks_of(7, 5)), (M, sinks_of(7, 6)), (M, sinks_of(5, 10)), (C, sinks_of(4, 9)),
                       (M, sinks_of(9, 0) | {"raw": 0.09})],
    "aux-helps@gpu": [(A, {"loss": {"softmax": 2 + SPREAD, "balanced-0.001": 1.9, "balanced-0.01": 2}}),
                      (M, {"loss": {"balanced-0.001": 2.01, "balanced-0.01": 2.005}}),
                      (C, {"loss": {"balanced-0.001": 2.1, "balanced-0.01": 2.1}})],
    "tda-long-context@gpu": [(A, gains(.15)), (M, gains(.14)), (M, gains(-.14)), (C, gains(-.15))],
    "focus-balance-costs@their table 9": [(A, {"frozen": .01, "fine-tuned": .01}), (M, {"frozen": -.6}),
                                          (C, {"frozen": -.6, "fine-tuned": -.6})],
}

INVENTED = LAZY | THRESHOLD | FOCUS | NATIVE_MOE | EMERGES | SHAPES


def changed(columns, changes):
    """The first columns of a claim, with some columns or some runs of a column replaced."""
    def both(name):
        old, new = columns.get(name), changes[name]
        return old | new if isinstance(old, dict) and isinstance(new, dict) else new
    return columns | {name: both(name) for name in changes}


@pytest.mark.parametrize("name, expected, columns", [
    (name, expected, changed(cases[0][1], columns)) for name, cases in INVENTED.items() for expected, columns in cases])
def test_a_verdict_on_invented_numbers(name, expected, columns):
    name, _, where = name.partition("@")
    assert verdict(name, where, **columns) == expected


@pytest.mark.parametrize("softmax, expected", [([4.1, 4.0], A), ([4.1, 3.9], N)])
def test_without_a_sink_a_claim_about_it_is_untestable(softmax, expected):
    reading = readings(CLAIMS["dormant-prunable"])[""]
    numbers = {"most sink": {"softmax@gpu": [0.01, 0.01]}, "random": {"softmax@gpu": [1, 1]},
               "least sink": {"softmax@gpu": [2, 2]},
               SOFTMAX_SINK: {"softmax@gpu": softmax}}
    assert judge(reading, numbers) == expected
    gated = {claim.id for claim in CLAIMS.values() for where, reading in readings(claim).items()
             if cost_of(claim, where) == "gpu-minutes" and SOFTMAX_SINK in reading.reads}
    assert gated >= {"fixed-token-16", "pe-all-sink", "early-layers-active", "heads-fixed"}
    assert all(HAS_SINK in reading.bounds for claim in CLAIMS.values() for where, reading in readings(claim).items()
               if where == "nobos" or SOFTMAX_SINK in reading.reads)


def test_every_claim_with_a_reading_has_invented_numbers():
    assert {name for name in INVENTED if "@" not in name} == {claim.id for claim in CLAIMS.values() if claim.reads}


def quantity(values, **bound):
    return Quantity("it", Bound(what="it", **bound), np.array(values, float), None)


def test_conditions_and_the_interval_of_a_mean():
    low, high = interval(np.array([1.0, 2.0, 4.0]))                     # scipy.stats.t.interval(0.95, 2, 7/3, sem)
    close([low, high], [-1.46125, 6.12792], terms=16, dtype=torch.float32)
    assert interval(np.array([1.0])) == (-math.inf, math.inf)
    low, high = interval(np.array([1.0]), errors=np.array([0.5]))
    close([low, high], [0.02, 1.98])
    three = quantity([0.1, 0.2, 0.4])
    for condition, expected in (("<= 0.2", [1, 1, 0]), ("> 1/5", [0, 0, 1]), ("0.1 to 0.3", [1, 1, 0]),
                                ("clearly < 0", [0]), ("not clearly < 0", [1]), ("clearly < 1", [1])):
        assert three.holds(condition).tolist() == [bool(met) for met in expected], condition
    assert quantity([0.1, 0.4], means=True).holds("< 0.3").tolist() == [True]
    assert not quantity([-5.0]).holds("clearly < 0").any()              # one seed has no interval


@pytest.mark.parametrize("a, b, fails, expected, why", [
    ([2, 2], [0, 0], "all", A, ""), ([0, 0], [5, 5], "all", C, ""), ([0, 0], [0, 0], "any", C, ""),
    ([0, 0], [0, 0], "all", M, "one part holds, another does not"), ([2, .5], [0, 0], "all", M, "seeds split"),
    ([.5, .5], [2, 2], "all", M, "between the bounds")])
def test_a_verdict_and_why_it_is_mixed(a, b, fails, expected, why):
    bounds = (Bound(what="a", column="a", agrees=">= 1", contradicts="<= 0"),
              Bound(what="b", column="b", agrees="<= 1", contradicts=">= 3"))
    found = judge(Reading(reads={}, bounds=bounds, fails=fails), {"a": {"x@lab": a}, "b": {"x@lab": b}})
    assert (found, found.why) == (expected, why)
    assert [(part.name, part.values.tolist()) for part in found.quantities] == [("a", a), ("b", b)]


def test_quantities_are_columns_ratios_and_differences():
    numbers = {"raw": {"softmax@lab": [1.0, 2.0], "elastic@lab": [0.5, 0.2]}, "cost": {"elastic@lab": [1.0, 0.1]}}
    bounds = (Bound(what="ratio", column="raw", over="softmax"), Bound(what="less", column="raw", less="softmax"),
              Bound(what="columns", column="raw", of="elastic", over="cost"),
              Bound(what="own", value=lambda n: {run: 2 * values for run, values in n["raw"].items()}))
    found = {part.name: part.values for part in judge(Reading(reads={}, bounds=bounds), numbers).quantities}
    assert list(found) == ["ratio", "less", "columns", "own, softmax", "own, elastic"]
    close(np.stack(list(found.values())), [[.5, .1], [-.5, -1.8], [.5, 2], [2, 4], [1, .4]])


def test_the_bounds_in_words_and_the_axis_of_the_forest_plot():
    assert in_words(CLAIMS["lazy-sink-gone"], readings(CLAIMS["lazy-sink-gone"])["lr3e-3"]) == (
        "idle rows: agrees: weight on the first token over softmax's <= 1/10; contradicts: weight on the first token "
        "over softmax's >= 1/3")
    for bound, value, place in (
            ({"agrees": "<= 0.1", "contradicts": ">= 0.3"}, 0.2, 0.5), ({"agrees": "> 4"}, 6.0, 1.5),
            ({"agrees": "0.4 to 0.8", "contradicts": "< 0.2"}, 0.7, 1.5), ({"contradicts": "> 2"}, 3.0, -0.5),
            ({"agrees": "0.4 to 0.8", "contradicts": "> 1"}, 1.1, -0.5), ({"agrees": "0.8 to 1.2"}, 1.0, 2.0),
            ({"contradicts": "> 2"}, 1.0, 1.5), ({"contradicts": "<= 2"}, 3.0, 1.5),
            ({"agrees": "<= 2", "contradicts": "> 2"}, 3.0, -0.5),
            ({"agrees": "0.4 to 0.8", "contradicts": "< 0.2"}, 0.9, 0.5), ({"agrees": "clearly < 0"}, 0.5, 0.5),
            ({"agrees": "not clearly > 0"}, 0.5, 0.5)):
        (found,), low, high = view.positions(quantity([value], **bound))
        close([found, low, high], [place] * 3, terms=4)
    assert view.positions(quantity([1.0], needs="> 0")) is None
    line = view.drawn(quantity([0.2], agrees="<= 0.1", contradicts=">= 0.3"))
    assert [line.index("|"), line.index("o"), line.rindex("|")] == [10, 14, 19]


def test_ranks_and_thirds():
    found = [rank_correlation(*pair) for pair in (([1, 2, 2, 4], [1, 3, 3, 9]), ([1, 1], [1, 2]),
                                                  ([1, 2, 3, 3], [1, 2, 4, 3]))]
    close(found, [1, 0, 3 / 10 ** 0.5])         # as in scipy.stats.spearmanr
    close(thirds(np.array([[1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 4]])), [[1.5, 3], [3.5, 3], [5.5, 3.5]])
    assert np.isnan(thirds(np.array([[1, 2]]))[2])


# ------------------------------------------------------------------------------------------------------------ the rows


def test_the_number_of_claims_of_each_paper_and_cost():
    assert [len(rows) for rows in PAPERS.values()] == [15, 16, 15, 13, 11] and len(CLAIMS) == 70
    count = {cost: sum(claim.cost == cost for claim in CLAIMS.values()) for cost in COSTS}
    assert count == {"lab": 34, "cpu-minutes": 2, "public-weights": 3, "cpu-hours": 0, "gpu-minutes": 28,
                     "out of reach": 3}
    assert all(claim.reads or claim.cost == "out of reach" for claim in CLAIMS.values())


def everything():
    """Every job that the readings need, for one seed."""
    return [job for claim in CLAIMS.values() for reading in readings(claim).values()
            for group in jobs_of(reading, [2], Place()).values() for job in all_jobs(group)]


@pytest.fixture(scope="module")
def jobs():
    return list(dict.fromkeys(everything()))


SMALL = "--n_layer=2 --n_embd=32 --n_head=4 --max_iters=3 --eval_interval=3"


def test_every_training_command_makes_a_model(jobs):
    parser = Parser(prog="train.py")
    add_flags(parser, train_script.Train, GPTConfig)
    trained = [job.words[1:] for job in jobs if job.words[0] == "train.py"]
    assert len(trained) > 100
    for words in trained:
        fresh = [word for word in words if not word.startswith("--init_from")]          # that run does not exist
        for small in ([], SMALL.split()):       # SMALL is for trying out the rows of a GPU
            knobs = train_script.settle_knobs(parser.parse_args(fresh + small))[0]
            config = GPTConfig(**fields_of(GPTConfig, knobs) | {"vocab_size": 66})
            assert config.attn != "lazy" or config.pos == "rope+bias", "the set-up's positions replace lazy's own"
            heads = train_script.Train(**fields_of(train_script.Train, knobs) | {"train_only": "all"})
            train_script.check_balance(heads, config)


def test_every_evaluation_command_parses_and_every_recipe_and_look_is_used(jobs):
    for words in {job.words for job in jobs if job.words[0] == "eval.py"}:
        command, parser = eval_script.COMMANDS[words[1]], Parser(prog="eval.py")
        of_a_run = (Common, Overrides) if words[1] in eval_script.OF_A_RUN else ()
        add_flags(parser, command.flags, *of_a_run)
        command.flags(**given_flags(parser.parse_args(words[2:]), command.flags))
    runs = {run for claim in CLAIMS.values() for reading in readings(claim).values()
            for _, named in reading.reads.values() for run in named.split()}
    used = {run.split("@")[0] for run in runs} | {run for name in SWEEPS for run in cases(name).values()}
    assert used >= set(RECIPES) - {"heads", "blind"}, "no claim reads one of the recipes"
    assert {path.split("/")[0] for claim in CLAIMS.values() for reading in readings(claim).values()
            for path, _ in reading.reads.values()} >= {*COMMANDS, *LOOKS}, "no claim uses one of the looks"
    assert {run.partition("@")[2] for run in runs} | {"lab"} == set(SETUPS) | {""}
    with pytest.raises(ValueError, match="unknown --attn=nonsense"):
        flags_of("nonsense", "lab")


def test_the_claims_train_at_most_100_models_of_the_lab(jobs):
    trained = [job for job in jobs if job.words[:2] == ("train.py", "--preset=lab")]
    assert len(trained) <= 100


def test_readings_on_a_gpu_run_only_when_asked_for():
    asked = claims.wanted(claims.ClaimsFlags(run="pe-all-sink"))
    assert [name for _, name, _ in asked] == ["", "one head"]
    everything = claims.wanted(claims.ClaimsFlags(run="gpu-minutes", train_args=TOY))
    assert "gpu" in [name for claim, name, _ in everything if claim.id == "pe-all-sink"]
    lab = {claim.id for claim, *_ in claims.wanted(claims.ClaimsFlags(run="lab"))}
    assert lab >= {c.id for c in CLAIMS.values() if c.cost == "lab"}


# --------------------------------------------------------------------------------------------------------- exact checks


def test_more_weight_is_removed_from_more_even_scores():
    found = checks.random_scores(bounds.SEED, T=64)
    bounds.below(1 - found["sd 0.02"]["removed"], 0.02)
    bounds.below(1 - found["sd 0.5"]["removed"], 1 - found["sd 2"]["removed"])
    bounds.below(abs(found["sd 0.02"]["zeros"] - 0.5), 0.1)             # half of the weights are below the mean


def test_differential_softmax_sums_to_one_minus_lambda():
    found = checks.fixed_sum(bounds.SEED)
    close(found["diff"]["spread"], 0, size=1.0, dtype=torch.float32)
    bounds.below(0.01, found["diff2"]["spread"])


def test_the_number_of_survivors_of_a_threshold_is_that_of_chance():
    """The cosine u of two random directions in 64 dimensions has a density proportional to (1 - u^2)^(61 / 2). Two
    pairs of directions are independent, so 64 x 20,000 of them give the standard error."""
    row = checks.chance_of(64, 1, 64, 20_000, 4, bounds.dice())
    u = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    density, threshold = (1 - u ** 2) ** (61 / 2), math.sqrt(2 * math.log(64) / 64)
    chance = 64 * (density[u > threshold].sum() / density.sum()).item()
    bounds.below(abs(row["survivors"] - chance), 6 * (chance / 20_000) ** 0.5)
    bounds.below(row["overlap"], 0.01)
    bounds.below(abs(row["tra, relevant keys"] - math.log(4) / math.log(64)), 0.01)


def test_the_gate_identity_is_exact():
    found = checks.gate_identity(bounds.SEED)
    close([found["sink"], found["drained to 0"]], [0, 0], terms=16, size=4.0)
    bounds.below(0.01, found["drained to 0.1"])
    bounds.below(found["drained to 0.1"], found["drained to 0.3"])


@pytest.mark.parametrize("attn", ["sink", "k_bias", "kv_bias"])
def test_without_its_extra_key_attention_is_softmax_over_the_tokens(attn):
    module, plain = layer(attn, torch.float32), layer("softmax", torch.float32)
    q, k, v, x = inputs(module, 45, dtype=torch.float32)
    found = checks.extra_key_deleted(module.attend, 0, module, q, k, v, x, None)
    close(found, plain.attend(q, k, v, x), terms=45, size=v.abs().max().item())


def test_checks_of_focus_equal_values_known_by_hand():
    leak, gate = routing.focus_leak(bounds.SEED), routing.focus_gate(bounds.SEED)
    assert leak["potential"] == gate["log"] == 0
    bounds.below(0.01, leak["sinkhorn"])
    bounds.below(0.1, gate["score"])
    found, far = routing.focus_topk(bounds.SEED), 496 * 497 / 2         # pairs of 512 tokens, 16 or more apart
    bounds.below(abs(found["pairs, top-2"] - 5 / 6), 6 * (5 / 36 / far) ** 0.5)         # 1 - 1 / (4 choose 2)
    assert found["pairs, top-3"] == 1
    merge = routing.focus_merge(bounds.SEED)
    close([found["difference, top-3"], merge["merge float32 error"], 1 - merge["subtract float32 cosine"]], [0, 0, 0],
          terms=16, size=1.0, dtype=torch.float32)
    close(routing.largest_group(torch.tensor([[.9, .1], [.8, .2], [.3, .7]])), 2 / 3)
    for name, share in routing.focus_sinkhorn(bounds.SEED, T=256).items():
        if name.startswith("SD 0.25, K "):      # larger scores need more iterations
            bounds.below(share - 1 / int(name[11]), 0.12)


@pytest.mark.parametrize("affinity", ["log", "score"])
def test_the_mass_of_shut_pairs_is_that_of_an_independent_form(affinity):
    module = layer("focus", window=5, affinity=affinity)
    q, k, _, x = inputs(module, 21)
    g, s, i = module.assign(x), (q @ k.mT) * q.shape[-1] ** -0.5, torch.arange(21)
    z = (module.gate_scale * (g @ g.mT - module.gate_offset))[:, None]
    distant, seen = i[:, None] - i >= 5, i[:, None] >= i
    gated = torch.where(distant, s + z.sigmoid().log() if affinity == "log" else s * z.sigmoid(), s)
    apart = distant & (g.argmax(-1)[:, :, None] != g.argmax(-1)[:, None])
    mass = [w.masked_fill(~seen, -math.inf).softmax(-1).mul(apart[:, None]).sum(-1).mean() for w in (gated, s)]
    close(routing.shut_in(module, q, k, x), [*mass, apart.sum() / (2 * 21 * 22 / 2)], terms=64, size=1.0)
    assert module.local == 5 and apart.any()


def test_mutual_information_of_groups_and_classes_is_1_if_equal_and_0_for_one_group():
    kinds = routing.classes_of("The cat, of 12.")
    assert [routing.CLASSES[k] for k in kinds] == [
        *["article"] * 3, "space", *["other"] * 3, "punctuation", "space", *["preposition"] * 2, "space", "digit",
        "digit", "punctuation"]
    tokens = ["The", " c", "at", ",", " of", " 12."]
    assert [routing.CLASSES[k] for k in routing.classes_of(tokens)] == [
        "article", "other", "other", "punctuation", "preposition", "punctuation"]
    close([routing.mutual_information(groups, kinds) for groups in (kinds, np.zeros_like(kinds))], [1, 0], size=1.0)


def test_the_rank_correlation_of_the_focus_table_is_that_of_scipy():
    by_scipy = {"frozen": -0.734927, "fine-tuned": -0.188786}          # spearmanr of the same 16 rows, to six digits
    assert routing.focus_table(0).keys() == by_scipy.keys()
    for name, found in routing.focus_table(0).items():
        close(found, by_scipy[name], terms=8, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------- the command

TOY = "--max_iters=3 --eval_interval=3 --batch_size=4 --eval_iters=1 --device=cpu"


def run_claims(capsys, *flags):
    eval_script.main(["claims", *map(str, flags)])
    return capsys.readouterr()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Flags of a toy ledger. Training runs in this process, because starting processes would take most of the time."""
    monkeypatch.setattr(experiments, "output_of", output_here)
    return f"--out_dir={tmp_path / 'claims'}", f"--train_args={TOY}", "--workers=1"


def test_the_ledger_has_a_line_for_each_claim_and_its_counts_add_up(capsys):
    said = run_claims(capsys).out
    lines = said.splitlines()
    counted = [int(n) for line in lines if line.strip().startswith(tuple(GRADES)) and line[-1].isdigit()
               for n in line.split()[-len(VERDICTS[:-1]):]]
    missing = int(lines[0].split(". ")[1].split()[0])
    assert lines[0].startswith("70 claims") and sum(counted) + missing == 70
    assert all(any(f" {name} " in line for line in lines) for name in CLAIMS)
    assert all(title in lines for title in PAPERS)


def test_a_claim_is_measured_once_and_then_read_from_disk(here, tmp_path, capsys):
    flags = (*here, "--run=postnorm,gate-identity", "--seeds=3")
    run_claims(capsys, *flags)
    first = json.loads((tmp_path / "claims/claims.json").read_text())["claims"]
    assert set(first) == {"postnorm", "gate-identity"} and first["postnorm"][""]["seeds"] == [3]
    run = tmp_path / "claims/postnorm-3"
    before = (run / "ckpt.pt").stat().st_mtime
    again = run_claims(capsys, *flags, "--json")
    assert (run / "ckpt.pt").stat().st_mtime == before                  # nothing is trained twice
    found = json.loads(again.out)
    assert found["claims"] == first and found["verdicts"]["gate-identity"] == {"": A}
    said = run_claims(capsys, *here, "--show=postnorm").out
    assert "python train.py --preset=lab --seed=3" in said and "seed 3" in said and "contradicts" in said


def test_jobs_that_depend_on_a_missing_run_are_done_again(monkeypatch):
    run, other = Job(("train.py",), Path("run")), Job(("eval.py",), Path("other"))
    look, done = Job(("eval.py",), Path("look"), (run,)), []
    monkeypatch.setattr(claims, "result_of", lambda job: None if job == run else {})
    monkeypatch.setattr(claims, "do", done.append)
    claims.do_all([run, look, other], 1)
    assert done == [run, look]


@pytest.mark.exhaustive
def test_an_interrupted_claim_continues_in_real_processes_with_the_same_numbers(tmp_path, capsys):
    flags = (f"--out_dir={tmp_path / 'claims'}", f"--train_args={TOY}", "--run=entmax-keeps-sink", "--seeds=2",
             "--results", tmp_path / "x.json")
    run_claims(capsys, *flags)
    first = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "claims/entmax-2/meta.json").unlink()               # as if it had been interrupted
    kept = (tmp_path / "claims/sparsemax-2/ckpt.pt").stat().st_mtime
    run_claims(capsys, *flags)
    assert (tmp_path / "claims/sparsemax-2/ckpt.pt").stat().st_mtime == kept
    again = json.loads((tmp_path / "x.json").read_text())
    assert again["claims"]["entmax-keeps-sink"][""]["numbers"] == first["claims"]["entmax-keeps-sink"][""]["numbers"]


def test_further_seeds_are_added_to_earlier_ones(here, tmp_path, capsys):
    place = tmp_path / "claims/claims.json"
    for seeds in ("2,3", "9", "3"):
        said = run_claims(capsys, *here, "--run=gate-identity", f"--seeds={seeds}").out
    found = json.loads(place.read_text())["claims"]["gate-identity"][""]
    assert found["seeds"] == [2, 3, 9] and found["earlier"]["seeds"] == [2, 9]
    for column, group in found["numbers"].items():
        path = readings(CLAIMS["gate-identity"])[""].reads[column][0]
        close(group["gate_identity"], [checks.gate_identity(s)[path] for s in (2, 3, 9)], dtype=torch.float32)
    assert "gate-identity" in said and "postnorm" not in said           # only the claim that was asked for


def test_a_failing_job_is_named_and_the_other_claims_are_measured(here, tmp_path, capsys, monkeypatch):
    def fails(script, *flags, **how):
        raise ValueError(f"{script} {' '.join(flags)} failed: no luck today")
    monkeypatch.setattr(experiments, "output_of", fails)
    said = run_claims(capsys, *here, "--run=postnorm,gate-identity", "--seeds=2")
    assert "--norm_place=post" in said.err and "failed: no luck today" in said.err
    assert set(json.loads((tmp_path / "claims/claims.json").read_text())["claims"]) == {"gate-identity"}


def test_one_reading_of_a_claim_can_be_named():
    (claim, where, _), = claims.wanted(claims.ClaimsFlags(run="zero-v0-harmless@nobias"))
    assert (claim.id, where) == ("zero-v0-harmless", "nobias")
    found = claims.wanted(claims.ClaimsFlags(run="zero-v0-harmless@,zero-v0-harmless@SmolLM2, all heads"))
    assert [where for _, where, _ in found] == ["", "SmolLM2, all heads"]
    with pytest.raises(ValueError, match="no such reading; it has nobos, nobias"):
        claims.ClaimsFlags(run="zero-v0-harmless@nowhere")


def test_numbers_older_than_a_change_of_the_bounds_say_so():
    found = {"git_commit": "abc", "machine": "cpu", "seeds": [2], "version": 1}
    assert "measured under version 1 of the bounds, judged by version 4" in view.made(CLAIMS["tda-sink-growth"], found)
    assert "measured under" not in view.made(CLAIMS["lazy-sink-gone"], found)
    assert "commit abc with uncommitted changes" in view.made(CLAIMS["lazy-sink-gone"], found | {"git_dirty": True})
    assert {change.claim for change in LOG} <= CLAIMS.keys()


def test_without_a_gpu_no_kernel_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    left = claims.wanted(claims.ClaimsFlags(run="gpu-minutes", train_args=TOY))
    assert {"focus-speed", "tda-kernel", "elastic-two-pass"}.isdisjoint(claim.id for claim, *_ in left)
    assert "left out, because they need a GPU: elastic-two-pass@, tda-kernel@" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- committed results


@pytest.fixture(scope="module")
def committed():
    return json.loads((ROOT / "results" / "claims.json").read_text())["claims"]


def test_the_committed_numbers_fit_the_readings_of_their_claims(committed):
    for name, found in committed.items():
        for where, kept in found.items():
            reading = readings(CLAIMS[name])[where]
            assert fits(reading, kept["numbers"]), (name, where)
            assert judge(reading, kept["numbers"]) in VERDICTS


def test_the_picture_shows_every_claim(committed, tmp_path):
    view.draw(tmp_path / "all.png", {"claims": readable(committed)})
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert verdicts_of(CLAIMS["lazy-vs-recurrent"], {}) == {"": NOT_RUN}


def test_a_claim_is_decided_as_written_or_by_its_first_other_reading():
    claim, found = CLAIMS["early-layers-active"], {"sink": {}, "local": {}, "sigma2": {}}
    assert decided_by(claim, {}) is None and evidence(claim, {}) is None
    assert decided_by(claim, {"SmolLM2": found}) == "SmolLM2" and evidence(claim, {"SmolLM2": found}) == "real model"
    assert decided_by(CLAIMS["lazy-sink-gone"], {"lr3e-3": found}) is None         # a variation decides nothing,
    assert decided_by(CLAIMS["tda-power"], {"text": found}) == "text"              # unless the claim needs a GPU


def test_the_pages_are_those_that_the_command_writes(committed, tmp_path):
    """If not, run python eval.py claims --pages=docs/claims."""
    claims.write_pages(tmp_path, {"claims": readable(committed)})
    written = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    assert written == {page.name: page.read_text() for page in (ROOT / "docs/claims").glob("*.md")}
