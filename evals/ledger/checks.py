"""Measurements that only the ledger makes: exact checks on random tensors, by seed, and looks into the lab's runs.

In the lab, copy rows have something to copy; all others are idle.
"""
import math

import torch
from torch.nn import functional as F

import attention
import kernels
from evals.ablate import losses_with, unchanged
from evals.instrument import Common, OpenedRun, seeing, watch, window_batches
from evals.lab_figures import FIRST_ROW, kinds_of_rows, true_process
from evals.measures import gate_of, split_extra
from evals.stream import entering_the_score
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------- checks: seed -> numbers


def random_scores(seed, T=512, rows=8):
    """Elastic-Softmax at tau = 1 on random scores of several standard deviations: removed mass, share of zeros."""
    dice, seen = torch.Generator().manual_seed(seed), torch.ones(T, T, dtype=torch.bool).tril()
    n, found = seen.sum(-1, keepdim=True), {}
    for deviation in (0.02, 0.5, 1, 2):
        w = attention.elastic(deviation * torch.randn(rows, T, T, generator=dice), seen, 1 / n)
        zeros = (w[:, seen] == 0).float().mean().item()
        found[f"sd {deviation}"] = {"removed": 1 - w.sum(-1).mean().item(), "zeros": zeros}
    return found


def fixed_sum(seed):
    """The range of the row sums of differential softmax, in its two versions."""
    torch.manual_seed(seed)
    found = {}
    for name in ("diff", "diff2"):
        config = GPTConfig(block_size=64, vocab_size=8, n_layer=1, n_head=4, n_embd=64, attn=name)
        layer = GPT(config, seed).transformer.h[0].attn
        q, k = (torch.randn(8, heads, 64, width) for heads, width in (layer.shapes[part] for part in "qk"))
        sums = layer.weights_of(q, k, torch.randn(8, 64, 64)).sum(-1)   # (B, H, T)
        found[name] = {"spread": (sums.amax((0, 2)) - sums.amin((0, 2))).max().item()}
    return found


def survivors(seed):
    """Threshold attention on random unit vectors. Each number is a list over lengths, from equally many pairs: keys of
    a row that pass, keys that pass in both of two views, rows in which none passes, and the entropy of TRA, TDA and
    softmax over log n. The entropies are also measured with relevant keys in each row, of cosine 0.8 in both views."""
    dice, found = torch.Generator().manual_seed(seed), {}
    for kappa in (1, 4):
        rows = [chance_of(n, kappa, dice) for n in (64, 512, 4096, 65_536)]
        found[f"kappa {kappa}"] = {name: [row[name] for row in rows] for name in rows[0]}
    return found


def chance_of(n, kappa, dice, d=64, pairs=2 ** 22, relevant=4):
    """The numbers of `survivors` at one length."""
    def directions(count):
        return F.normalize(torch.randn(count, d, generator=dice), dim=-1)

    threshold, queries = math.sqrt(2 * math.log(n / kappa) / d), pairs // n
    cosines = torch.stack([directions(queries) @ directions(n).T for _ in range(2)])    # (2, queries, n)
    passed = cosines > threshold
    found = {"empty": (~passed[0]).all(-1).double().mean().item()}
    for name, alive in (("survivors", passed[0]), ("overlap", passed.all(0))):
        count = alive.sum(-1).double()
        found |= {name: count.mean().item(), f"{name} error": count.std().item() / queries ** 0.5}
    found["sparsity"] = 1 - found["survivors"] / n
    for suffix in ("", ", relevant keys"):
        w = (cosines - threshold).relu() ** 2
        found |= {f"tra{suffix}": dispersion(w[0]), f"tda{suffix}": dispersion(w[0] - 0.5 * w[1]),
                  f"softmax{suffix}": dispersion((cosines[0] * d ** 0.5).softmax(-1))}
        cosines[..., :relevant] = 0.8
    return found


def dispersion(w):
    """The entropy of absolute weights, normalised to sum to 1, over log n: the mean over rows. An empty row has 0."""
    p = w.abs() / w.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    return (torch.special.entr(p).sum(-1) / math.log(w.shape[-1])).mean().item()


def gate_identity(seed, T=64, d=32):
    """How exact eq. 4 is, in float64. "sink": the largest difference of sink attention and (1 - sink weight) x softmax.
    "drained to x": the mean difference of plain attention and (1 - w_0) x softmax over the other keys, relative to the
    norm of the output, when the first value has x times the norm of the other values."""
    dice = torch.Generator().manual_seed(seed)
    s, v, c = (torch.randn(*shape, generator=dice, dtype=torch.float64) for shape in ((T, T), (T, d), (1,)))
    s = s.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
    with_sink = torch.cat([c.expand(T, 1), s], 1).softmax(-1)
    found = {"sink": ((1 - with_sink[:, :1]) * (s.softmax(-1) @ v) - with_sink[:, 1:] @ v).abs().max().item()}
    s[:, 0] += 4                                # a sink: most rows put their weight there
    w, rest = s.softmax(-1), s[1:, 1:].softmax(-1) @ v[1:]
    for share in (0, 0.1, 0.3):
        v[0] *= share * v[1:].norm(dim=-1).mean() / v[0].norm().clamp(min=1e-30)
        full = w[1:] @ v
        error = ((1 - w[1:, :1]) * rest - full).norm(dim=-1).mean() / full.norm(dim=-1).mean()
        found[f"drained to {share}"] = error.item()
        v[0] = torch.ones(d, dtype=torch.float64)
    return found


CHECKS = {check.__name__: check for check in (random_scores, fixed_sum, survivors, gate_identity)}

# -------------------------------------------------------------------------------------------- looks: a run -> numbers


def opened(place, dataset="", count=256):
    """A run, and `count` fixed sequences (N, T + 1) of its own or another data set."""
    run = OpenedRun(Common(out_dir=place, dataset=dataset), {})
    rows, = window_batches(run.model, run.split("val"), run.machine, run.data_meta["stride"] - 1, count, count)
    return run, rows


def rows(place):
    """For idle and copy rows of the first layer: weight on the right key, share of empty rows, the gate, cosine of the
    query with the first key. "effective" is the weight on the first key times the gate, over an even spread.
    Also by how much the loss rises without the extra key."""
    run, windows = opened(place)
    kinds, found = kinds_of_rows(true_process(windows, run.data_meta)[1]), {}

    def see(layer, module, q, k, v, x, table):
        if layer > 0:
            return
        w = weights_on_tokens(module, q, k, x, table)
        queries, keys = (part[:, :, module.ahead:].float() for part in entering_the_score(module, q, k))
        seen = {"right": F.pad(torch.diagonal(w, -1, 1, 2), (1, 0)),    # each row's weight on the key before it
                "empty": (w == 0).all(-1).float(),
                "cos_qk": torch.cosine_similarity(queries, keys[:, :, :1], dim=-1).mean(1)}
        if hasattr(module, "gate"):
            seen["gate"] = gate_of(module, x, module.shapes["v"][1]).mean((1, 3))[:, module.ahead:]
            seen["effective"] = seen["gate"] * w[:, :, 0]
        even = 1 / torch.arange(1, w.shape[1] + 1, device=w.device).expand(w.shape[:2])     # of an even row
        for kind, which in kinds.items():
            found.update({f"{name} {kind}": value[which].mean().item() for name, value in seen.items()})
            if "gate" in seen:
                found[f"effective {kind}"] /= even[which].mean().item()
        found["cos_kk"] = torch.cosine_similarity(keys[:, :, 1:], keys[:, :, :1], dim=-1).mean().item()

    def without_extra_key(attend, layer, module, q, k, v, x, table):        # softmax over the tokens alone
        q, k, t, _ = module.rule_inputs(q, k)
        return kernels.block_loop(module.rule, q, k, v, t, module.sight, attention.as_distance(table))[0]

    before = losses_with(seeing(see), run.model, windows, run.machine)
    if run.model.transformer.h[0].attn.has_extra_key:
        found["deletion"] = (losses_with(without_extra_key, run.model, windows, run.machine) - before).mean().item()
    return found


def weights_on_tokens(module, q, k, x, table):
    """The mean weights over heads, (N, T, T), without a key outside the sequence."""
    return split_extra(module, module.weights_of(q, k, x, table))[1].mean(1)[:, module.ahead:]


def fixed(place):
    """The weight of later queries on the fixed token and on the first token, mean over layers."""
    run, windows = opened(place, count=64)
    at, found = run.data_meta["fixed_at"], []

    def see(layer, module, q, k, v, x, table):
        found.append(weights_on_tokens(module, q, k, x, table)[:, at + 1:].mean((0, 1)))                # (T,)

    watch(run.model, see, windows[:, :-1], run.machine)
    mean = torch.stack(found).mean(0)
    return {"on fixed": mean[at].item(), "on first": mean[0].item()}


def far(place, longer):
    """The excess loss in sequences of 256, from the data set `longer`: beyond the training length less that within."""
    run, windows = opened(place, longer)
    bayes = true_process(windows, run.data_meta)[0]
    excess = (losses_with(unchanged, run.model, windows, run.machine) - bayes).double().mean(0)         # (256,)
    within = excess[FIRST_ROW:64].mean()
    return {"within": within.item(), "65-128": (excess[64:128].mean() - within).item(),
            "129-256": (excess[128:256].mean() - within).item()}


LOOKS = {look.__name__: look for look in (rows, fixed, far)}
