"""speed --focus: time attention over the pairs that share a group, and full attention (Focus 2604.03260, table 6).

Tokens are in random groups of about equal size, because only the sizes of groups change the time. The time includes the
choice of every token's largest groups and the sorting by group. It does not include the router's matrix products.
"""
from functools import partial

import torch
from torch.nn import functional as F

import kernels
from evals.instrument import save_numbers, table, whole_numbers
from mixers.focus import Focus, sets_of, sparse

WIDTH, WINDOW = 64, 128                         # head dimension; keys that a row sees in any group
CASES = [(4, 1), (4, 2), (8, 1), (8, 2)]        # number of groups, and how many of them a token is in
# the paper's table 6, on an H100, one group a token: {T: {groups: speed relative to full attention}}
PRINTED = {1024: {4: 0.2, 8: 0.2}, 4096: {4: 0.5, 8: 0.6}, 16384: {4: 1.5, 8: 1.8}, 32768: {4: 2.2, 8: 3.1},
           65536: {4: 3.0, 8: 4.7}, 262144: {4: 4.0, 8: 7.6}, 1048576: {4: 4.1, 8: 8.6}}


def command(args, machine):
    """Time forward passes of one layer's attention, full and sparse in turn, from short sequences to long ones."""
    triton = kernels.triton.__version__ if kernels.AVAILABLE else None
    numbers = {"machine": str(machine), "triton": triton, "heads": args.n_head, "width": WIDTH, "window": WINDOW,
               "lengths": {}}
    lengths, rows = whole_numbers(args.lengths, "lengths"), []
    for T in lengths:
        row = numbers["lengths"][T] = time_length(T, args.n_head, args.repeats, machine)
        ratios = [f"{case['ratio']:.2f}" for case in row["sparse"]]
        printed = [f"{PRINTED[T][groups]:.1f}" if T in PRINTED else "-" for groups in (4, 8)]
        rows.append([f"{T}", f"{row['full'] * 1000:.1f}", *ratios, *printed])
        save_numbers(args.out, numbers)         # after every length: the next one may be too large for the memory
    pairs = [case["pairs"] for case in numbers["lengths"][max(lengths)]["sparse"]]
    rows.append(["pairs kept", "", *("-" if share is None else f"{share:.2f}" for share in pairs), "-", "-"])
    header = ["T", "full, ms", *(f"{topk} of {groups}" for groups, topk in CASES), "paper: 1 of 4", "1 of 8"]
    return numbers, (f"{machine}, triton {triton}; {args.n_head} heads of {WIDTH}, a window of {WINDOW}\n\n"
                     "speed relative to full attention; 1 of 4: each token is in one of four groups\n"
                     + table(rows, header))


@torch.no_grad()
def time_length(T, heads, repeats, machine):
    """{"full": seconds, "sparse": [{"groups", "topk", "ratio" of times, "pairs" kept}]} at one length."""
    dice, dtype = torch.Generator().manual_seed(0), getattr(torch, machine.dtype)
    q, k, v = (torch.randn(1, heads, T, WIDTH, generator=dice).to(machine.device, dtype) for _ in range(3))
    # the shares of groups, (1, T, groups), from which each token gets its largest groups
    shares = {groups: torch.rand(1, T, groups, generator=dice).to(machine.device) for groups, _ in CASES}
    fused = machine.device.type == "cuda" and kernels.AVAILABLE

    def focus(groups, topk):                    # a Focus layer in evaluation, after its router
        return sparse(q, k, v, Focus.memberships(shares[groups], topk), WINDOW, WIDTH ** -0.5, fused)[0]

    seconds = machine.race({"full": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)} | {
        case: partial(focus, *case) for case in CASES}, repeats)
    return {"full": seconds["full"], "sparse": [
        {"groups": groups, "topk": topk, "ratio": seconds["full"] / seconds[groups, topk],
         "pairs": pairs_kept(Focus.memberships(shares[groups], topk)[0])} for groups, topk in CASES]}


def pairs_kept(members, window=WINDOW):
    """The share of distant pairs, `window` or more apart, that have a group in common; None if there are no such pairs.
    members (T, K)."""
    T = len(members)
    _, own, _, meet = sets_of(members)
    so_far = meet[:, own].cumsum(1)             # (S, T): tokens so far that share a group with a set
    late = torch.arange(min(window, T), T, device=own.device)
    return (so_far[own[late], late - window].sum() / (late - window + 1).sum()).item() if len(late) else None
