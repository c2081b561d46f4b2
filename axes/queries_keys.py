"""What happens to queries and keys before the score: norms, feature maps, and the factor on their
product.

Shapes: B batch, H score heads, Hk key heads, R query rows, T keys, D width of q and k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from axes.base import Choice, Constant, Normal, split_heads
from kernels import wide

# ------------------------------------------------------------------------ norms of queries and keys


def unit_length(layer, x):
    """x / |x|. The norm has no weights, so it may come after RoPE. As in TRA and LSSAR."""
    y = wide(x)  # F.normalize takes twice the time on a CPU
    return (y * y.square().sum(-1, keepdim=True).clamp(min=1e-12).rsqrt()).to(x.dtype)


def unit_square(layer, x):
    """x / sqrt(mean x^2), without weights."""
    return F.rms_norm(wide(x), (layer.width,), eps=1e-6).to(x.dtype)


def norm_of_heads(layer, norm, x):
    """RMSNorm of each head, with learned weights (D,) for queries and (D,) for keys. As in
    Qwen3."""
    return norm(wide(x)).to(x.dtype)


def norm_of_layer(layer, norm, x):
    """RMSNorm of all heads together, with learned weights (H D,) for queries and (Hk D,) for keys.
    As in OLMo 2."""
    return split_heads(norm(wide(x).transpose(1, 2).flatten(2)), *x.shape[1::2]).to(x.dtype)


def norms_of_qk(layer, q_heads, k_heads):
    return {
        name: nn.RMSNorm(heads * layer.width, eps=layer.config.norm_eps)
        for name, heads in (("q_norm", q_heads), ("k_norm", k_heads))
    }


@dataclass(frozen=True, kw_only=True)
class QKNorm(Choice):
    """A value of the axis qk_norm."""

    learned_norm: Callable | None = None  # layer, a norm, x -> x: before rotation
    fixed_norm: Callable | None = None  # layer, x -> x: after rotation


QK_NORMS = {
    "none": QKNorm(),
    "l2": QKNorm(fixed_norm=unit_length),
    "rms": QKNorm(fixed_norm=unit_square),
    "head": QKNorm(learns=lambda layer: norms_of_qk(layer, 1, 1), learned_norm=norm_of_heads),
    "all": QKNorm(
        learns=lambda layer: norms_of_qk(layer, layer.shapes["q"][0], layer.shapes["k"][0]),
        learned_norm=norm_of_layer,
    ),
}

# ----------------------------------------------------------------------------------------- features


def elu_features(layer, x):
    """elu(x) + 1, the positive features of linear attention. Source: Katharopoulos et al. 2020, eq.
    7."""
    # adding 1 to F.elu(x) would round e^x away
    return torch.where(x < 0, x.clamp(max=0).exp(), 1 + x)


def mlp_features(layer, x):
    """W2 relu(W1 x), one map for the queries and keys of all heads. Source: When Attention Sink
    Emerges, table 6. Differs from the paper: it prints mlp(q, mlp(k)). Its code computes mlp(q)
    mlp(k), as here."""
    return layer.feature(x.to(layer.feature[0].weight.dtype)).to(x.dtype)


def mlp_feature_map(layer):
    first, second = (nn.Linear(layer.width, layer.width, bias=False) for _ in range(2))
    drawn = Normal(math.sqrt(2 / (5 * layer.width)))
    return {
        "feature": nn.Sequential(first, nn.ReLU(), second),
        "feature.0.weight": drawn,
        "feature.2.weight": drawn,
    }


@dataclass(frozen=True, kw_only=True)
class Feature(Choice):
    """A value of the axis feature."""

    feature_map: Callable | None = None  # layer, x -> x: queries or keys, after their norm


FEATURES = {
    "none": Feature(),
    "elu": Feature(feature_map=elu_features),
    "mlp": Feature(learns=mlp_feature_map, feature_map=mlp_features),
}

# -------------------------------------------------------------------------- the factor on the score


def ssmax_scale(layer, n):
    """SSMax: the score is multiplied by sigma_h log n_i, so that long rows are as sharp as short
    ones.

    Learned: sigma (H,), at first 1 / mean(log n) over a training context (0.168 for 1024), or at
    sigma_init. For unit q and k (LSSAR, which does not learn it) sigma is sqrt(d) log(d). Source:
    Nakanishi 2501.19399.
    Differs from the asentmax repository, which has log(n + 1) and draws sigma from N(1, 0.01)."""
    return layer.sigma[:, None, None] * n.log()[..., None]


def ssmax_scalars(layer):
    config, width, sigma = layer.config, layer.width, layer.args["sigma_init"]
    # mean of log 1, .., log T: log T! / T
    mean_log = math.lgamma(config.block_size + 1) / config.block_size
    if sigma == "auto":
        sigma = (
            math.sqrt(width) * math.log(width) if config.qk_norm == "l2" else 1 / max(mean_log, 0.1)
        )
    return {"sigma": torch.full((layer.score_heads,), sigma)}


def asentmax_scale(layer, n):
    """ASEntmax: the score is multiplied by 1 + beta_h log(n_i + 1)^gamma_h. A head can learn
    whether this factor grows.

    Learned: scale_beta (H,), at first evenly spread over the heads from 0.1 to 1; scale_gamma (H,),
    at first 0.
    Source: the asentmax repository, sparse_gemma.py.
    Differs from that code: it draws beta from that range and gamma from N(0, 0.1). Its recommended
    form has beta = softplus(x W), gamma = 2 tanh(x W') for each token. It scales heads without
    positions; the others carry ALiBi."""
    return (
        1
        + layer.scale_beta[:, None, None]
        * (n + 1).log()[..., None] ** layer.scale_gamma[:, None, None]
    )


def asentmax_scalars(layer):
    heads = layer.score_heads
    beta = torch.linspace(0.1, 1.0, heads) if heads > 1 else torch.full((1,), 0.55)
    return {"scale_beta": beta, "scale_gamma": torch.zeros(heads)}


@dataclass(frozen=True, kw_only=True)
class Scale(Choice):
    """A value of the axis scale."""

    # layer, n (.., R) -> a factor on the score, (.., H, R, 1); None: 1
    score_factor: Callable | None = None
    unscaled: bool = False  # the score is not divided by sqrt(d)


SCALES = {
    "sqrt_d": Scale(),
    "one": Scale(unscaled=True),
    "log_n": Scale(
        learns=ssmax_scalars,
        args={"sigma_init": Constant("auto", word="auto"), "learn_sigma": Constant(True)},
        score_factor=ssmax_scale,
    ),
    "asentmax": Scale(learns=asentmax_scalars, score_factor=asentmax_scale),
}
