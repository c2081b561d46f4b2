"""mixers/selection.py: what properties against the dense reference do not say: estimates, what a step reads, commands."""
import math

import pytest
import torch
from bounds import SEED, below, close, same
from layers import inputs, layer, normal

from evals.instrument import load_run
from mixers import trained_recipes

CASES = [("topk", ""), ("sparq", "components=3"), ("sparq", "components=3,local=0.5,realloc=1"), ("quest", "page=4"),
         ("magicpig", "first=1,recent=3,bits=2,tables=6")]


def selecting(attn, args):
    return layer(attn, attn_args=args, **({} if attn == "magicpig" else {"topk": 6}))


def test_magicpig_is_unbiased_over_1000_seeds():
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
    for _ in range(1000):
        module.planes = torch.randn(module.planes.shape, generator=generator)
        index = select.index(module, k, v, None)
        kept, _ = select.kept(module, q, k, index, i, seen)
        e = (s - select.log_chance(module, q, k, index, i, j)).exp() * kept
        sums.append(torch.stack([e.sum(), (e[0, 0] @ target).sum()]))
        found += kept.sum().item() / 1000
    sums, exact = torch.stack(sums), torch.stack([s.exp().sum(), (s.exp()[0, 0] @ target).sum()])
    assert 8 < found < 32                       # it samples: 5 of the 40 keys are exact
    below((sums.mean(0) - exact).abs(), 3 * sums.std(0) / math.sqrt(1000))


def test_the_seed_decides_which_keys_magicpig_finds():
    one, again, other = (selecting("magicpig", f"first=1,recent=3,bits=2,tables=6,seed={seed}") for seed in (1, 1, 2))
    q, k, _, x = inputs(one, 45)
    same(again.weights_of(q, k, x), one.weights_of(q, k, x))
    assert not torch.equal(other.weights_of(q, k, x) > 0, one.weights_of(q, k, x) > 0)


@pytest.mark.parametrize("attn, args", CASES, ids=[f"{attn} {args}" for attn, args in CASES])
def test_a_step_reads_the_selected_keys_and_values_only(attn, args):
    """The others may be NaN once the index is made. topk's index is the keys themselves."""
    module, T = selecting(attn, args), 45
    q, k, v, x = inputs(module, T)
    plain = selecting(attn, args.replace("realloc=1", "realloc=0"))     # with realloc every value has a weight
    chosen = (plain.weights_of(q, k, x)[:, :, -1] > 0)[..., None]
    index = module.choices["select"].index(module, k, v, None)
    expected = module.attend(q, k, v, x)[:, :, -1:]
    unread = k if attn == "topk" else torch.where(chosen, k, math.nan)
    found = module.attend(q[:, :, -1:], unread, torch.where(chosen, v, math.nan), x[:, -1:], index=index)
    close(found, expected, terms=T)


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
