"""Our recipes under any model of transformers, converted or not: with its own projections, positions and cache.

    import pretrained.interface                                 # registers nano_softmax, nano_elastic, nano_tra, ...

    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="nano_elastic")
    pretrained.interface.measures(model, ids)                   # the sink of each head and more: evals/measures.py

It needs transformers 4.53 or later. What a recipe learns starts at its initial values, in a module `nano` that each
attention layer gets at the first call. So call the model once before you make an optimizer.
"""
from functools import partial

import torch

import attention
from attention import Attention
from axes.sight import visible
from common import files
from evals.instrument import instead, seeing
from evals.measures import Probe
from model import GPTConfig


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, recipe="softmax", **more):
    """An attention function of transformers: query (B, H, R, D), rotated, key and value (B, Hk, T, D) to (B, R, H, D).

    module: the model's layer. Raises ValueError if the model asks for what a recipe cannot do: a mask other than the
    causal one, as with padding, or a change of the scores."""
    wrong = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if wrong or not getattr(module, "is_causal", True):
        raise ValueError(f"nano_{recipe} computes causal attention without {wrong[0] if wrong else 'later tokens'}: "
                         "choose another attn_implementation for this model")
    (batch, heads, R, width), T = query.shape, key.shape[2]
    layer, window = getattr(module, "nano", None), more.get("sliding_window") or 0
    if layer is None or layer.config.attn != recipe:
        layer = module.nano = layer_of(recipe, heads, key.shape[1], width, scaling, window).to(query)
    if attention_mask is not None:
        i, j = torch.arange(T - R, T, device=query.device)[:, None], torch.arange(T, device=query.device)
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        if not torch.equal(seen, visible(i, j, layer.sight).expand_as(seen)):
            raise ValueError(f"nano_{recipe} reads whole sequences: without padding, and with a cache that grows")
    layer.config.dropout = dropout              # 0 in eval mode
    x = query.new_empty(batch, R, 0)            # the layer's input, which none of these recipes reads
    return layer.attend(query, key, value, x, layer.distance()).transpose(1, 2), None


def layer_of(recipe, heads, kv_heads, width, scaling, window):
    """The attention layer of a recipe for queries that the model has projected and rotated. Its factor on scores is
    multiplied by the model's, relative to 1 / sqrt(width)."""
    pos = "bias" if attention.recipe(recipe).get("pos") == "rope+bias" else "none"
    layer = Attention(GPTConfig(attn=recipe, n_embd=2, n_head=heads, n_kv_head=kv_heads, head_dim=width, n_layer=1,
                                pos=pos, window=window), 0)
    del layer.c_attn, layer.c_proj              # the model has its own
    layer.sight = layer.sight._replace(scale=layer.sight.scale * (scaling or width ** -0.5) * width ** 0.5)
    return layer


@torch.no_grad()
def measures(model, idx):
    """{layer: {measure: (heads,)}} of a model of transformers that reads tokens idx (B, T). The names of the layers are
    the model's, the measures those of evals/measures.py."""
    model(idx)                                  # every layer has its `nano` now
    names = [name.removesuffix(".nano") for name, module in model.named_modules() if isinstance(module, Attention)]
    probes = [Probe() for _ in names]
    with instead(model, seeing(lambda layer, module, *inputs: probes[layer].see(module, *inputs))):
        model(idx)
    return dict(zip(names, (probe.result() for probe in probes), strict=True))


def recipes():
    """The recipes that need only queries, keys and values of the usual shapes."""
    usual = {"mixer": "attention", "diff": "none", "gate": "none", "window": 0, "forget": "none"}
    return [name for name, axes in attention.ATTENTIONS.items()
            if usual.items() <= (usual | axes).items() and axes.get("sink") != "token"]


transformers, masks = files.optional("transformers"), files.optional("transformers.masking_utils")
for _recipe in recipes():
    transformers.AttentionInterface.register(f"nano_{_recipe}", partial(attend, recipe=_recipe))
    masks.AttentionMaskInterface.register(f"nano_{_recipe}", masks.sdpa_mask)
