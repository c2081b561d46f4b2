"""Losses that balance: heads (--head_balance), or the experts of a mixture (--expert_balance).

The head-balancing loss of The Attention Sink as Native MoE makes heads equally important. The importance of a head is 1
minus the weight that it puts on a sink, or the mean of its gate (eq. 8).
"""
import math

import torch

from axes.rows import SINKS


def losses(model, x, y, knobs, machine, starts=None):
    """The model's own loss on a micro-batch, packed or not, and its head-balancing loss: 0 without --head_balance."""
    if not knobs.head_balance:
        return model(x, y, starts=starts)[1], torch.zeros((), device=x.device)
    _, loss, importance = model(x, y, importance=True, starts=starts)
    importance = machine.mean(importance)       # (layers, heads), over the micro-batches of all ranks
    if knobs.balance_form == "routed":
        importance = routed(importance, knobs.balance_skip, knobs.balance_shared)
    return loss, knobs.head_balance * imbalance(importance)


def routed(importance, skip, shared):
    """The importance (n,) of the heads that eq. 9 balances, out of all (layers, heads).

    It leaves out the first `skip` layers, which attend to everything. Of the remaining heads it leaves out the fraction
    `shared` with the highest importance, the "shared experts"."""
    rest = importance[skip:].flatten().sort().values
    return rest[:len(rest) - math.ceil(shared * len(rest) - 1e-9)]


def imbalance(importance):
    """n CV^2 of the importance of n heads (eq. 8): 0 if all are equal. CV is standard deviation over mean.

    The paper does not say which standard deviation. This one divides the squares by n; dividing by n - 1 would multiply
    the loss by n / (n - 1)."""
    mean, noise = importance.mean(), torch.finfo(importance.dtype).eps  # an importance is 1 minus a weight near 1
    return importance.numel() * (importance / torch.where(mean > noise, mean, noise)).var(correction=0)


def expert_loss(model, knobs, machine):
    """--expert_balance times the load-balancing loss of the last micro-batch on all ranks; 0 without this knob.

    It is the sum over layers of E sum_e f_e P_e, with f_e the share of choices that expert e gets, and P_e its mean
    probability in a softmax over all experts. An even load makes it 1 in each layer. Only P_e has a gradient: it lowers
    the scores of experts that are chosen often. The loss is not a sum over tokens, so it depends on how a step is cut
    into micro-batches: f of the whole step would be known only after all of its forward passes.
    Source: Switch Transformer, Fedus et al. 2101.03961, eq. 4 to 6.
    Differs from the paper: there each token chooses one expert."""
    if not knobs.expert_balance:
        return 0.0
    share, probability = machine.mean(model.expert_load()).unbind(1)    # (layers, E) each
    return knobs.expert_balance * share.shape[1] * (share * probability).sum()


def check_balance(knobs, config):
    """Raise ValueError if --expert_balance is given without experts, or --head_balance without two heads to balance."""
    if knobs.expert_balance and config.mlp != "moe":
        raise ValueError(f"--expert_balance={knobs.expert_balance} balances experts, which --mlp={config.mlp} does not "
                         "have: add --mlp=moe, or leave it out")
    if not knobs.head_balance:
        return
    for kind in config.kinds:                   # which heads have an importance: see Attention.importance_of_heads
        gated = kind.mixer == "attention" and kind.gate != "none"
        if not gated and (kind.mixer != "attention" or kind.rule != "softmax" or kind.diff != "none"):
            raise ValueError(f"--head_balance balances gates, or sinks of one view of softmax, and --attn={kind.attn} "
                             "has neither: choose such a recipe, or add --gate=head or --gate=element")
        hidden = kind.window and not kind.first or knobs.docs
        if not gated and hidden and SINKS[kind.sink].score is None:
            raise ValueError("--head_balance balances the sink on a sequence's first token, which is out of sight with "
                             "--docs or beyond --window: add --first=1, a --sink or a --gate, or leave out --docs")
    heads = torch.zeros(config.n_layer, config.n_head)
    if knobs.balance_form == "routed":
        heads = routed(heads, knobs.balance_skip, knobs.balance_shared)
    elif knobs.balance_skip:
        raise ValueError("--balance_form=all balances all heads: leave out --balance_skip")
    if heads.numel() < 2:
        raise ValueError(f"--head_balance={knobs.head_balance} takes two heads, and --balance_skip="
                         f"{knobs.balance_skip} --balance_shared={knobs.balance_shared} leave {heads.numel()} of "
                         f"{config.n_layer} x {config.n_head} heads: exclude fewer, or raise --n_head or --n_layer")
