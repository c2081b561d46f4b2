"""speed --focus: time attention over the pairs that share a group, and full attention (Focus 2604.03260, table 6).

Tokens are in random groups of about equal size, because only the sizes of groups change the time. The time includes the
choice of every token's largest groups and the sorting by group. It does not include the router's matrix products.
"""
import dataclasses
from functools import partial

import torch
from torch.nn import functional as F

import kernels
from common.machine import Machine
from common.tiles import TRITON
from evals.instrument import file_of_gpu, save_numbers, table, whole_numbers
from mixers.focus import Focus, sets_of, sparse

WIDTH, WINDOW = 64, 128                         # head dimension; keys that a row sees in any group
CASES = [(4, 1), (4, 2), (8, 1), (8, 2)]        # number of groups, and how many of them a token is in
# the paper's table 6, on an H100, one group a token: {T: {groups: speed relative to full attention}}
PRINTED = {1024: {4: 0.2, 8: 0.2}, 4096: {4: 0.5, 8: 0.6}, 16384: {4: 1.5, 8: 1.8}, 32768: {4: 2.2, 8: 3.1},
           65536: {4: 3.0, 8: 4.7}, 262144: {4: 4.0, 8: 7.6}, 1048576: {4: 4.1, 8: 8.6}}


def command(args, run):
    """Time forward passes of one layer's attention, full and sparse in turn, from short sequences to long ones."""
    machine = Machine(args.device, args.dtype)
    gpu = machine.device.type == "cuda"
    lengths = args.lengths or "1024,4096,16384" + ",65536,262144,1048576" * gpu
    if gpu and not args.out:
        args = dataclasses.replace(args, out=file_of_gpu("speed-focus", machine.device))
    numbers = {"machine": str(machine), "triton": TRITON if kernels.AVAILABLE else None, "heads": args.n_head,
               "width": WIDTH, "window": WINDOW, "lengths": {}}
    for T in whole_numbers(lengths, "lengths"):
        numbers["lengths"][T] = time_length(T, args.n_head, args.repeats, machine)
        save_numbers(args.out, numbers)         # after every length: the next one may be too large for the memory
    return numbers, text_of(numbers)


@torch.no_grad()
def time_length(T, heads, repeats, machine):
    """{"full": seconds, "sparse": [{"groups", "topk", "ratio" of times, "pairs" kept}]} at one length."""
    dice, dtype = torch.Generator().manual_seed(0), getattr(torch, machine.dtype)
    q, k, v = (torch.randn(1, heads, T, WIDTH, generator=dice).to(machine.device, dtype) for _ in range(3))
    likes = {groups: torch.rand(1, T, groups, generator=dice).to(machine.device) for groups, _ in CASES}
    fused = machine.device.type == "cuda" and kernels.AVAILABLE
    cases = {"full": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
    cases |= {(groups, topk): partial(focus, q, k, v, likes[groups], topk, fused) for groups, topk in CASES}
    seconds = machine.race(cases, repeats)
    return {"full": seconds["full"], "sparse": [
        {"groups": groups, "topk": topk, "ratio": seconds["full"] / seconds[groups, topk],
         "pairs": pairs_kept(Focus.memberships(likes[groups], topk)[0])} for groups, topk in CASES]}


def focus(q, k, v, like, topk, fused):
    """The output of a Focus layer in evaluation, given the shares of groups from its router, like (B, T, K)."""
    return sparse(q, k, v, Focus.memberships(like, topk), WINDOW, WIDTH ** -0.5, fused)[0]


def pairs_kept(members, window=WINDOW):
    """The share of distant pairs, `window` or more apart, that have a group in common; None if there are no such pairs.
    members (T, K)."""
    T = len(members)
    _, own, _, meet = sets_of(members)
    so_far = meet[:, own].cumsum(1)             # (S, T): tokens so far that share a group with a set
    late = torch.arange(window, T, device=own.device)
    return (so_far[own[late], late - window].sum() / (late - window + 1).sum()).item() if len(late) else None


def text_of(numbers):
    """A table with a row for each length: speeds relative to full attention, and the paper's if it has them."""
    rows = []
    for T, row in numbers["lengths"].items():
        cells = [f"{case['ratio']:.2f}" for case in row["sparse"]]
        printed = [f"{PRINTED[T][groups]:.1f}" if T in PRINTED else "-" for groups in (4, 8)]
        rows.append([f"{T}", f"{row['full'] * 1000:.1f}", *cells, *printed])
    pairs = [case["pairs"] for case in numbers["lengths"][max(numbers["lengths"])]["sparse"]]
    rows.append(["pairs kept", "", *("-" if share is None else f"{share:.2f}" for share in pairs), "-", "-"])
    header = ["T", "full, ms", *(f"{topk} of {groups}" for groups, topk in CASES), "paper: 1 of 4", "1 of 8"]
    return (f"{numbers['machine']}, triton {numbers['triton']}; {numbers['heads']} heads of {WIDTH}, "
            f"a window of {WINDOW}\n\nspeed relative to full attention; 1 of 4: each token is in one of four groups\n"
            + table(rows, header))
