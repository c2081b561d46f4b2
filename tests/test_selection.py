"""mixers/selection.py: each rule by a float64 transcription of its paper's formula, row by row, and in its limits."""
import math

import pytest
import torch
from bounds import SEED, below, close, same
from conftest import tiny_config
from layers import inputs, layer, normal, token_ids

from evals.instrument import load_run
from mixers import trained_recipes
from model import GPT

TOPK = 6
CASES = [("topk", ""), ("sparq", "components=3"), ("sparq", "components=3,local=0.5,realloc=1"), ("quest", "page=4"),
         ("magicpig", "first=1,recent=3,bits=2,tables=6")]
cases = pytest.mark.parametrize("attn, args", CASES, ids=[f"{attn} {args}" for attn, args in CASES])


def selecting(attn, args, **choices):
    return layer(attn, attn_args=args, **({} if attn == "magicpig" else {"topk": TOPK}) | choices)


# --------------------------------------------------------------------- one row of weights, by the formula of its paper


def top_row(q, K, module):
    """Softmax over the TOPK best keys."""
    s = K @ q / math.sqrt(len(q))
    return softmax_over(s, sorted(range(len(K)), key=lambda j: -s[j])[:TOPK])


def softmax_over(s, chosen):
    w = torch.zeros_like(s)
    w[chosen] = torch.softmax(s[chosen], 0)
    return w


def sparq_row(q, K, module):
    """Ribar et al. 2312.04985, algorithm 1."""
    D, n, args = len(q), len(K), module.args
    parts = q.abs().sort(descending=True).indices[:args["components"]]
    cover = q[parts].abs().sum() / q.abs().sum()
    rough = torch.softmax(K[:, parts] @ q[parts] / torch.sqrt(D * cover), 0)
    local = range(max(0, n - int(args["local"] * TOPK)), n)
    rank = [math.inf if j in local else rough[j].item() for j in range(n)]
    chosen = sorted(range(n), key=lambda j: -rank[j])[:TOPK]
    w = softmax_over(K @ q / math.sqrt(D), chosen)
    mass = rough[chosen].sum()
    return mass * w + (1 - mass) / n if args["realloc"] else w          # the mean value weighs every value alike


def quest_row(q, K, module):
    """Tang et al. 2406.10774, section 3: pages of 4 keys, the row's own page first."""
    n, page = len(K), module.args["page"]
    pages = [list(range(start, min(start + page, n))) for start in range(0, n, page)]
    bounds = [torch.maximum(q * K[p].amin(0), q * K[p].amax(0)).sum().item() for p in pages[:-1]] + [math.inf]
    best = sorted(range(len(pages)), key=lambda p: -bounds[p])[:math.ceil(TOPK / page)]
    return softmax_over(K @ q / math.sqrt(len(q)), [j for p in best for j in pages[p]])


def magicpig_row(q, K, module):
    """Chen et al. 2410.16179, algorithm 1, with the centre of this repository. Every table hashes by K signs."""
    n, first, recent = len(K), module.args["first"], module.args["recent"]
    bits, tables = module.args["bits"], module.args["tables"]
    centre = K[first:first + recent].mean(0) if n > first else 0 * q
    planes = module.planes.view(len(q), tables, bits)
    s = K @ q / math.sqrt(len(q))
    chosen = []
    for j in range(n):
        c = K[j] - centre
        if j < first or n - 1 - j < recent:
            chosen.append(j)
            continue
        equal = sum(all((q @ planes[:, t, b] > 0) == (c @ planes[:, t, b] > 0) for b in range(bits))
                    for t in range(tables))
        if equal >= 2:
            p = (1 - torch.acos(q @ c / (q.norm() * c.norm())) / math.pi) ** bits
            s[j] -= torch.log(1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1))
            chosen.append(j)
    return softmax_over(s, chosen)


ROWS = {"topk": top_row, "sparq": sparq_row, "quest": quest_row, "magicpig": magicpig_row}


@cases
def test_weights_equal_the_formula_of_the_paper(attn, args):
    module, T = selecting(attn, args, n_kv_head=2), 30
    q, k, _, x = inputs(module, T, B=1)
    w = module.weights_of(q, k, x)
    for head in range(4):
        for i in range(T):
            close(w[0, head, i, :i + 1], ROWS[attn](q[0, head, i], k[0, head // 2, :i + 1], module), size=1.0)
            assert not w[0, head, i, i + 1:].any()


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("attn, flags", [
    ("topk", {"topk": 45}), ("topk", {"topk": 0}), ("sparq", {"topk": 45}), ("quest", {"topk": 45}),
    ("sparq", {"topk": 45, "attn_args": "realloc=1,components=2"}), ("magicpig", {"attn_args": "recent=45"}),
    ("magicpig", {"attn_args": "bits=1,tables=4000,first=0,recent=1"})])
def test_all_keys_give_softmax(attn, flags):
    """With so many tables of one bit, every key collides with the query, and log u is 0."""
    module, full = layer(attn, **flags), layer("softmax")
    q, k, v, x = inputs(module, 45)
    below((module.attend(q, k, v, x) - full.attend(q, k, v, x)).abs().max() + 1e-12, 1e-6)
    below((module.weights_of(q, k, x) - full.weights_of(q, k, x)).abs().max() + 1e-12, 1e-6)


def test_sparq_with_all_components_selects_as_topk():
    sparq, best = selecting("sparq", "components=8,local=0"), selecting("topk", "")
    q, k, _, x = inputs(sparq, 60)
    close(sparq.weights_of(q, k, x), best.weights_of(q, k, x), terms=8)


def test_quest_with_pages_of_one_key_selects_as_topk_except_for_its_own_key():
    """A bound of a page with one key is its score."""
    quest, best = selecting("quest", "page=1"), selecting("sparq", "components=8,local=0.17")
    q, k, _, x = inputs(quest, 60)
    close(quest.weights_of(q, k, x), best.weights_of(q, k, x), terms=8)


def test_fewer_components_lose_more_of_the_best_keys():
    best = selecting("topk", "").weights_of
    found = []
    for components in (1, 3, 6):
        module = selecting("sparq", f"components={components},local=0")
        q, k, _, x = inputs(module, 60)
        found.append(((best(q, k, x) > 0) & (module.weights_of(q, k, x) > 0)).sum().item())
    assert found == sorted(found) and len({*found}) == 3


def test_magicpig_is_unbiased_over_2000_seeds():
    """The sum over the found keys of e^s / u, and of e^s v / u, is on average that over all keys. Their quotient, the
    output, is biased like every quotient of two estimates."""
    module, T = selecting("magicpig", "first=2,recent=3,bits=3,tables=8"), 40
    q, k, v, x = inputs(module, T, B=1)
    q = q[:, :1, -1:] / 2                                               # one query of one head
    k, v, i = k[:, :1], v[:, :1], torch.tensor([T - 1])
    module.heads, seen, j = 1, torch.ones(1, T, dtype=torch.bool), torch.arange(T)
    select, s = module.choices["select"], (q @ k.mT / math.sqrt(8))
    target = v[0, 0] @ normal(8, stream=5)                              # one number for each value
    sums, found, generator = [], 0, torch.Generator().manual_seed(SEED)
    for _ in range(2000):
        module.planes = torch.randn(module.planes.shape, generator=generator)
        index = select.index(module, k, v, None)
        kept, _ = select.kept(module, q, k, index, i, seen)
        e = (s - select.log_chance(module, q, k, index, i, j)).exp() * kept
        sums.append(torch.stack([e.sum(), (e[0, 0] @ target).sum()]))
        found += kept.sum().item() / 2000
    sums, exact = torch.stack(sums), torch.stack([s.exp().sum(), (s.exp()[0, 0] @ target).sum()])
    assert 8 < found < 32                       # it samples: 5 of the 40 keys are exact
    below((sums.mean(0) - exact).abs(), 3 * sums.std(0) / math.sqrt(2000))


def test_the_seed_decides_which_keys_magicpig_finds():
    one, again, other = (selecting("magicpig", f"first=1,recent=3,bits=2,tables=6,seed={seed}") for seed in (1, 1, 2))
    q, k, _, x = inputs(one, 45)
    same(again.weights_of(q, k, x), one.weights_of(q, k, x))
    assert not torch.equal(other.weights_of(q, k, x) > 0, one.weights_of(q, k, x) > 0)


# ---------------------------------------------------------------------------------------------------------- decoding


@cases
def test_a_step_reads_the_selected_keys_and_values_only(attn, args):
    """The others may be NaN once the index is made. topk's index is the keys themselves."""
    module, T = selecting(attn, args), 45
    q, k, v, x = inputs(module, T)
    chosen = (module.weights_of(q, k, x)[:, :, -1] > 0)[..., None]
    if module.args.get("realloc"):              # every value has a weight
        module.args["realloc"] = False
        chosen = (module.weights_of(q, k, x)[:, :, -1] > 0)[..., None]
        module.args["realloc"] = True
    index = module.choices["select"].index(module, k, v, None)
    expected = module.attend(q, k, v, x)[:, :, -1:]
    unread = k if attn == "topk" else torch.where(chosen, k, math.nan)
    found = module.attend(q[:, :, -1:], unread, torch.where(chosen, v, math.nan), x[:, -1:], index=index)
    close(found, expected, terms=T)


@cases
def test_the_cache_has_the_index_of_all_tokens(attn, args):
    module, past, x = selecting(attn, args), {}, normal(2, 45, 32)
    for part in x.split([2, 9, 1, 1, 32], 1):
        module(part, past)
    q, k, v = module.heads_of(module.c_attn(x))
    _, k = module.rotated(q, k)
    expected = module.choices["select"].index(module, k, v, None)
    for name, value in expected.items():
        if name == "codes":                     # a product near 0 may have the other sign after rounding
            below((past["index"][name] != value).double().mean() + 1e-9, 0.01)
        else:
            close(past["index"][name], value, terms=45)
    assert past["index"].keys() == expected.keys()


@cases
def test_a_model_generates_the_same_with_and_without_a_cache(attn, args):
    few = {} if attn == "magicpig" else {"topk": TOPK}
    gpt = GPT(tiny_config(attn=attn, attn_args=args.replace("components=3", "components=4"), n_layer=2, **few), SEED)
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(4.0 if p.dim() > 1 else 1.0)
    idx = token_ids(2, 5)
    same(gpt.generate(idx, 40, seed=1), gpt.generate(idx, 40, seed=1, use_cache=False))


# ------------------------------------------------------------------------------------------------- runs and commands


@pytest.mark.parametrize("flags", [
    ["--attn=topk", "--topk=4"], ["--attn=sparq", "--topk=4", "--attn_args=components=4,realloc=1"],
    ["--attn=quest", "--topk=4", "--attn_args=page=2"], ["--attn=magicpig", "--attn_args=recent=2,bits=3,tables=6"]])
def test_every_instrument_takes_a_selection_over_a_softmax_run(flags, toy_run, evaluate):
    run = f"--out_dir={toy_run}"
    full = evaluate("loss", run)["loss"]
    assert math.isfinite(evaluate("loss", run, *flags)["loss"]) and math.isfinite(full)
    assert evaluate("loss", run, "--attn=topk", "--topk=1000")["loss"] == pytest.approx(full, abs=1e-5)
    for command in (["probe"], ["heads"], ["maps"], ["sample", "--tokens=4"]):
        evaluate(*command, run, *flags)


def test_selection_adds_nothing_that_can_be_trained(toy_run):
    for attn in ("topk", "sparq", "quest", "magicpig"):
        model, _ = load_run(toy_run, "cpu", {"attn": attn})
        plain, _ = load_run(toy_run, "cpu")
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert attn not in trained_recipes()
