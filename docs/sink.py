"""Grow an attention sink, and make it disappear:
    python docs/sink.py softmax     rows with nothing to look for look at the first token: a sink
    python docs/sink.py elastic     the same model, but a row may spend less than 1: no sink"""
import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, T, C = 500, 48, 32, 64  # training steps, sequences a step, tokens, channels
SYMBOLS, TRIGGERS, BOS = 64, 5, 64  # symbols are 0 to 63, triggers 0 to 4; BOS comes first
COUNT = torch.arange(1, T + 1)  # keys that each row sees: its own and all before it
RULES = {  # s (B, T, T), seen (T, T), t = tau / COUNT (T, 1) -> weights (B, T, T)
    "softmax": lambda s, seen, t: s.softmax(-1),
    "sparsemax": lambda s, seen, t: (s - ((s.sort(descending=True)[0].cumsum(-1) - 1) / COUNT)
                                     .amax(-1, True)).relu(),
    "elastic": lambda s, seen, t: (s.softmax(-1) - t).relu(),
    "softpick": lambda s, seen, t: F.normalize(s.expm1() * seen, p=1, dim=-1).relu(),
    "sigmoid": lambda s, seen, t: (s - s.new_tensor(T).log()).sigmoid()}


def draw(table, count):
    """Inputs and targets (count, T): row a of `table` says what follows a; a trigger repeats."""
    x = torch.full((count, T + 1), BOS)
    x[:, 1] = torch.randint(TRIGGERS, SYMBOLS, (count,))  # no trigger: nothing to repeat
    for i in range(2, T + 1):
        drawn = (table[x[:, i - 1]].cumsum(-1)[:, :-1] < torch.rand(count, 1)).sum(-1)
        x[:, i] = torch.where(x[:, i - 1] < TRIGGERS, x[:, i - 2], drawn)
    return x[:, :-1], x[:, 1:]


class Model(nn.Module):
    """One layer of attention with one head. This task needs no MLP."""
    def __init__(self, rule):
        super().__init__()
        self.rule, self.tau = RULES[rule], nn.Parameter(torch.ones(()))
        self.wte, self.wpe = nn.Embedding(SYMBOLS + 1, C), nn.Embedding(T, C)
        self.ln_1, self.ln_f, self.lm_head = nn.LayerNorm(C), nn.LayerNorm(C), nn.Linear(C, SYMBOLS)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        for layer in (self.wte, self.wpe, self.lm_head, self.c_attn, self.c_proj):
            nn.init.normal_(layer.weight, std=0.02)  # as in GPT-2

    def forward(self, idx):
        x = self.wte(idx) + self.wpe.weight
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)  # (B, T, C)
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        s = (q @ k.mT / C**0.5).masked_fill(~seen, -1e9)  # finite, and exp(-1e9) is 0
        w = self.rule(s, seen, self.tau / COUNT[:, None]) * seen  # (B, T, T)
        return self.lm_head(self.ln_f(x + self.c_proj(w @ v))), w, v


def main(rule, seed):
    torch.manual_seed(seed)
    table = torch.distributions.Dirichlet(torch.full((SYMBOLS, SYMBOLS), 0.1)).sample()
    model = Model(rule)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(step / 100, 1.1 - step / STEPS)
        x, y = draw(table, BATCH)
        F.cross_entropy(model(x)[0].mT, y).backward()  # .mT: it wants (B, symbols, T)
        optimizer.step()
        optimizer.zero_grad()
    x, y = draw(table, 256)  # new sequences
    logits, w, v = model(x)
    copy, idle = x < TRIGGERS, (x >= TRIGGERS) & (COUNT > 8)  # rows with a key to find; without
    shown, norm = copy.sum(-1).argmax(), v.norm(dim=-1).mean(0)  # most triggers; (T,)
    for a, row in zip(x[shown], (6 * w[shown].nan_to_num().clamp(0, 1)).round().int(), strict=True):
        print("copy" if a < TRIGGERS else "idle", "".join(2 * " .:+*#@"[n] for n in row))
    first, total = w[..., 0][idle].mean(), w.sum(-1)[idle].mean()
    print(f"weight of idle rows: {first:.2f} on the first token, {total:.2f} in all")
    print(f"norm of the first token's value: {norm[0] / norm[1:].mean():.2f} of the others'")
    print(f"loss of copy rows: {F.cross_entropy(logits[copy], y[copy]):.2f} nats (0 is perfect)")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are so small that more threads wait for each other
    parser = argparse.ArgumentParser(description="Train one layer with a rule, and show its sink.")
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
