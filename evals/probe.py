"""probe"""
from dataclasses import dataclass

import numpy as np
import torch

import attention
from common.flags import at_least, knob
from data import tokens
from evals.instrument import instead, table


@dataclass
class ProbeFlags:
    """Flags of probe"""
    split: str = knob("val", "which split", ("train", "val"))
    windows: int = knob(100, "fixed windows of block_size tokens, spread evenly; 0: as many as fit")
    batch_size: int = knob(4, "windows per forward pass")

    def __post_init__(self):
        at_least(self, windows=0, batch_size=1)


def probe_command(args, run):
    """Where the attention goes, per layer and head."""
    found = probe(run.model, run.split(args.split), run.machine, args.windows, args.batch_size, run.stride)
    rows = [[f"{layer}.{head}"] + [measures[name][head] for name in MEASURES]
            for layer, measures in enumerate(found["layers"]) for head in range(len(measures["sink"]))]
    text = table(rows + [["mean"] + list(found["mean"].values())], ["layer.head", *MEASURES])
    return found, text + "\n\n" + "\n".join(f"{name:>16}  {meaning}" for name, meaning in MEASURES.items())


MEASURES = {                                    # name: its meaning, printed under the table
    "sink": "weight on the first token, mean over queries",
    "uniform": "what evenly spread rows would put there",
    "share": "the same weight as a share of the row's absolute weights",
    "times_uniform": "shares on the first token, over those of evenly spread rows",
    "density": "weight on all other tokens",
    "row_mass": "sum of the weights of a row (signed)",
    "extra": "weight on a key outside the sequence",
    "sparsity": "share of exact zeros among the pairs that may attend",
    "empty_rows": "share of rows whose weights are all zero",
    "sink_eps": "Sink_1^0.3: share of sequences whose first 64 queries put over 0.3 on the first token",
    "value_norm_ratio": "norm of the first token's value, over the mean norm of the others",
}


class Probe:
    """Sums of one layer's measures, per head, over the queries of all sequences it is shown."""
    EPS, EPS_ROWS = 0.3, 64

    def __init__(self):
        self.sums = {}

    def add(self, name, value):
        """value (B, H, ...): summed over all but the heads."""
        self.sums[name] = self.sums.get(name, 0) + value.double().flatten(2).sum((0, 2)).cpu()

    def see(self, module, q, k, v, x, table=None, counted=None):
        """Take in one batch: the weights come block by block, (B, H, rows, T), and are summed at once. counted (B, T): which queries count."""
        counted = torch.ones(len(q), q.shape[2] - module.ahead, device=q.device) if counted is None else counted
        start, early = 0, 0                     # early (B, H): share that the first 64 queries put on the first token
        for block, w in enumerate(module.weight_blocks(q, k, x, table)):
            if block == 0:                      # a token ahead of the sequence has no row of its own, and its column is an extra key's
                w = w[:, :, module.ahead:]
            i = torch.arange(start, start + w.shape[2], device=w.device)
            here = counted[:, None, i].expand(w.shape[:3])
            share = self.see_rows(here, w, attention.visible_count(i, module.view), module.has_extra_key or module.ahead)
            early = early + share[:, :, i < self.EPS_ROWS].sum(-1)
            start += w.shape[2]
        B, H = early.shape
        self.add("sequences", torch.ones(B, H, 1))
        self.add("sink_eps", early[..., None] / min(self.EPS_ROWS, start) > self.EPS)
        norm = v[:, :, module.ahead:].float().norm(dim=-1).repeat_interleave(H // v.shape[1], 1)
        self.add("first_norm", norm[..., :1])
        self.add("other_norm", norm[..., 1:].mean(-1, keepdim=True))

    def see_rows(self, here, w, n, has_extra_key):
        """One block: here (B, H, R) says which rows count, n (R,) how many keys each sees. Returns the first token's share (B, H, R)."""
        extra, w = (w[..., 0], w[..., 1:]) if has_extra_key else (torch.zeros_like(w[..., 0]), w)
        share = w[..., 0].abs() / (w.abs().sum(-1) + extra + 1e-8)
        rows = {"rows": torch.ones_like(share), "pairs": n, "uniform": 1 / n, "sink": w[..., 0], "share": share, "row_mass": w.sum(-1),
                "extra": extra, "zeros": n - (w != 0).sum(-1), "empty_rows": (w == 0).all(-1)}
        for name, value in rows.items():
            self.add(name, here * value)
        return share

    def result(self):
        """{measure: (H,) tensor}."""
        s = self.sums
        mean = {name: s[name] / s["rows"] for name in ("sink", "uniform", "share", "row_mass", "extra", "empty_rows")}
        return mean | {"times_uniform": s["share"] / s["uniform"], "density": mean["row_mass"] - mean["sink"],
                       "sparsity": s["zeros"] / s["pairs"], "sink_eps": s["sink_eps"] / s["sequences"],
                       "value_norm_ratio": s["first_norm"] / s["other_norm"]}


def mean_of(probes):
    """{measure: mean over layers and heads}."""
    results = [p.result() for p in probes]
    return {name: float(torch.stack([r[name] for r in results]).mean()) for name in MEASURES}


@torch.no_grad()
def probe(model, split, machine, count=100, batch_size=4, stride=1):
    """The MEASURES of every layer and head on `count` fixed windows: {"mean": {measure: value}, "layers": [{measure: [per head]}]}."""
    layers = [Probe() for _ in model.transformer.h]

    def look(attend, layer, module, *inputs):
        layers[layer].see(module, *inputs)
        return attend(*inputs)

    starts = tokens.fixed_windows(split, model.config.block_size, count, stride)
    with instead(model, look):
        for batch in np.split(starts, range(batch_size, len(starts), batch_size)):
            rows = split.windows(batch, model.config.block_size, model.config.vocab_size)
            with machine.autocast():
                model(torch.from_numpy(rows).to(machine.device))
    return {"windows": len(starts), "length": model.config.block_size, "mean": mean_of(layers),
            "layers": [{name: [round(v, 6) for v in layer.result()[name].tolist()] for name in MEASURES} for layer in layers]}
