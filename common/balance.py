"""The loss that balances heads (--head_balance).

The head-balancing loss of The Attention Sink as Native MoE makes heads equally important. The
importance of a head is 1 minus the weight that it puts on a sink, or the mean of its gate (eq. 8).
"""

import math

import torch

import mixers
from axes.rows import SINKS


def head_balance_loss(importance, knobs, machine):
    """The loss that --head_balance adds, from the importance of the heads (layers, heads) in a
    micro-batch."""
    importance = machine.mean(importance)  # over the micro-batches of all ranks
    if knobs.balance_form == "routed":
        importance = routed(importance, knobs.balance_skip, knobs.balance_shared)
    return knobs.head_balance * imbalance(importance)


def routed(importance, skip, shared):
    """The importance (n,) of the heads that eq. 9 balances, out of all (layers, heads).

    It leaves out the first `skip` layers, which attend to everything. Of the remaining heads it
    leaves out the fraction `shared` with the highest importance, the "shared experts"."""
    rest = importance[skip:].flatten().sort().values
    return rest[: len(rest) - math.ceil(shared * len(rest) - 1e-9)]


def imbalance(importance):
    """n CV^2 of the importance of n heads (eq. 8): 0 if all are equal. CV is standard deviation
    over mean.

    The paper does not say which standard deviation. This one divides the squares by n; dividing by
    n - 1 would multiply the loss by n / (n - 1)."""
    # an importance is 1 minus a weight near 1
    mean, noise = importance.mean(), torch.finfo(importance.dtype).eps
    return importance.numel() * (importance / torch.where(mean > noise, mean, noise)).var(
        correction=0
    )


def check_balance(knobs, config):
    """Raise ValueError if --head_balance is given without two heads to balance."""
    if not knobs.head_balance:
        return
    for layer in config.layer_configs:
        if not mixers.MIXERS[layer.mixer].has_importance(layer):
            raise ValueError(
                "--head_balance balances gates, or sinks of one view of softmax, and "
                f"--attn={layer.attn} has neither: choose such a recipe, or add --gate=head or "
                "--gate=element"
            )
        hidden = layer.window and not layer.first or knobs.docs
        if layer.gate == "none" and hidden and SINKS[layer.sink].extra_score is None:
            raise ValueError(
                "--head_balance balances the sink on a sequence's first token, which is masked "
                "with --docs or beyond --window: add --first=1, a --sink or a --gate, or leave "
                "out --docs"
            )
    heads = torch.zeros(config.n_layer, config.n_head)
    if knobs.balance_form == "routed":
        heads = routed(heads, knobs.balance_skip, knobs.balance_shared)
    elif knobs.balance_skip:
        raise ValueError("--balance_form=all balances all heads: leave out --balance_skip")
    if heads.numel() < 2:
        raise ValueError(
            f"--head_balance={knobs.head_balance} takes two heads, and "
            f"--balance_skip={knobs.balance_skip} --balance_shared={knobs.balance_shared} leave "
            f"{heads.numel()} of {config.n_layer} x {config.n_head} heads: exclude fewer, or raise "
            "--n_head or --n_layer"
        )
