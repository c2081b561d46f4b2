"""Our recipes under models of transformers, which keep their projections, positions and cache.

    import pretrained.interface                          # registers nano_softmax, nano_elastic, ...

    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="nano_elastic")
    pretrained.interface.measures(model, ids)                   # the sink of each head and more

It needs transformers 5. What a recipe learns is a module `nano` of each attention layer, which
save_pretrained saves, and from_pretrained, with the same attn_implementation, loads. After
model.set_attn_implementation("nano_elastic"), the next call adds these modules with their initial
values: make an optimizer after that call.

Import this file before you make a model: its hook sees every torch module that is made later.
"""

import warnings
from functools import partial

import torch
from torch.nn.modules.module import register_module_module_registration_hook

import attention
from attention import Attention
from common import files
from evals.instrument import instead, seeing
from evals.measures import Probe
from kernels import visible
from model import GPTConfig

transformers, masks = files.optional("transformers"), files.optional("transformers.masking_utils")


def attend(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    recipe="softmax",
    s_aux=None,
    **more,
):
    """An attention function of transformers, for rotated queries and keys and one layer of a model.

    query (B, H, R, D), key and value (B, Hk, T, D) to (B, R, H, D). s_aux (H,): scores of sinks
    outside the sequence, as in GPT-OSS. Raises ValueError on what a recipe cannot compute, such as
    padding."""
    wrong = [name for name in ("softcap", "position_bias") if more.get(name) is not None]
    if s_aux is not None and recipe not in ("softmax", "sink"):
        wrong.append("s_aux")
    if not getattr(module, "is_causal", True):
        wrong.append("later tokens")
    if wrong:
        raise ValueError(
            f"{type(module).__name__} needs {' and '.join(wrong)}, which nano_{recipe} "
            "cannot compute: choose another attn_implementation"
        )
    R, T = query.shape[2], key.shape[2]
    nano = nano_of(module, recipe, query, key, s_aux)
    layer = nano.layer
    layer.scale = nano.scale * (scaling or layer.width**-0.5) * layer.width**0.5
    layer.dropout = dropout  # 0 in eval mode
    layer.mask = layer.mask._replace(window=more.get("sliding_window") or 0)

    # keys after the last row are empty places of a static cache
    if attention_mask is None:
        T = T if R == 1 else R  # transformers leaves out the mask of the first R rows
    else:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        j = torch.arange(T, device=query.device)
        T = int((seen[..., -1, :] * (j + 1)).max())
        i = torch.arange(T - R, T, device=query.device)[:, None]
        if T < R or not torch.equal(seen, visible(i, j, layer.mask).expand_as(seen)):
            raise ValueError(
                f"nano_{recipe} reads whole sequences: without padding, and with a causal mask"
            )
    x = query.new_empty(len(query), R, 0)  # the layer's input, which none of these recipes reads
    attend_or_hook = partial(layer.hook, layer.attend) if layer.hook else layer.attend
    o = attend_or_hook(query, key[:, :, :T], value[:, :, :T], x, layer.distance())
    return o.transpose(1, 2), None


# ------------------------------------------------------------------ what a recipe learns in a layer


class Nano(transformers.PreTrainedModel):
    """A recipe's attention, as a part of one layer of a model that projects and rotates by itself.

    sinks: does the model have its own scores of sinks? transformers asks a PreTrainedModel to
    initialise what a checkpoint does not have."""

    def __init__(self, config, recipe, heads, kv_heads, width, sinks):
        torch.nn.Module.__init__(self)  # without transformers' checks of whole models
        self.config, self.used = config, False
        self.sizes = recipe, heads, kv_heads, width, sinks
        pos = "bias" if attention.recipe(recipe).get("pos") == "rope+bias" else "none"
        self.layer = Attention(
            GPTConfig(
                attn="sink" if sinks else recipe,
                pos=pos,
                n_layer=1,
                n_embd=2,
                n_head=heads,
                n_kv_head=kv_heads,
                head_dim=width,
            ),
            0,
        ).float()
        del self.layer.c_attn, self.layer.c_proj  # the model has its own
        if sinks:
            del self.layer.sink_logit
        self.scale = self.layer.scale  # for scores that the model does not scale by itself

    def _init_weights(self, module):
        if module is self.layer:
            start = Nano(self.config, *self.sizes).layer.state_dict()
            for name, tensor in module.state_dict(keep_vars=True).items():
                # transformers marks what it has loaded
                if not getattr(tensor, "_is_hf_initialized", False):
                    tensor.copy_(start[name])


def nano_of(module, recipe, query, key, s_aux):
    """The Nano of a layer of transformers. It is made here if `prepare` has not made it."""
    sizes = recipe, query.shape[1], key.shape[1], query.shape[3], s_aux is not None
    if getattr(module, "nano", None) is None or module.nano.sizes[0] != recipe:
        module.nano = Nano(module.config, *sizes).to(query.device)
        if next(module.nano.parameters(), None) is not None:
            warnings.warn(
                f"nano_{recipe} begins with its initial values: to load what a saved model "
                f'has learned, give from_pretrained attn_implementation="nano_{recipe}"',
                stacklevel=2,
            )
    nano, layer = module.nano, module.nano.layer
    if nano.sizes != sizes:
        raise ValueError(
            f"{type(module).__name__} has other heads than its config says: load the model without "
            f'attn_implementation, then call model.set_attn_implementation("nano_{recipe}"). '
            "from_pretrained cannot load what this model has learned in the recipe"
        )
    # in 16 bits, a step of training would be lost to rounding
    dtype = torch.promote_types(query.dtype, torch.float32)
    if any(tensor.dtype != dtype for tensor in (*layer.parameters(), *layer.buffers())):
        layer.to(dtype)
    if s_aux is not None:
        layer.__dict__["sink_logit"] = s_aux  # unregistered: it stays a parameter of the model
    nano.used = True
    return nano


def recipe_of(module):
    """The recipe that the config of a module of transformers names, or ""."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    return name.removeprefix("nano_") if name.startswith("nano_") else ""


def prepare(parent, name, child):
    """torch calls this for every module that becomes a part of another one: before a checkpoint is
    read.

    Attention layers of transformers get their Nano. A model that ignores its recipe is refused: at
    once if transformers sees that in its source, else after its first forward pass."""
    models = transformers.PreTrainedModel
    is_attention = getattr(child, "is_causal", False) and not isinstance(child, models)
    if is_attention and recipe_of(child):
        heads = getattr(child, "num_heads", None) or child.config.num_attention_heads
        kv_heads = heads // getattr(child, "num_key_value_groups", 1)
        widths = [getattr(child, width, None) for width in ("qk_head_dim", "head_dim", "head_size")]
        width = next(filter(None, widths), child.config.hidden_size // heads)
        sinks = getattr(child, "sinks", None) is not None
        child.nano = Nano(child.config, recipe_of(child), heads, kv_heads, width, sinks)
    is_model = isinstance(parent, models) and not isinstance(parent, Nano)
    if is_model and next(parent.children(), None) is None:  # its first part
        refuse_unless(not recipe_of(parent) or parent._can_set_attn_implementation(), parent)
        parent.register_forward_hook(check_use)  # always: its recipe can be set later


def check_use(model, inputs, output):
    if recipe_of(model):
        used = any(isinstance(module, Nano) and module.used for module in model.modules())
        refuse_unless(used, model)


def refuse_unless(condition, model):
    if not condition:
        raise ValueError(
            f"{type(model).__name__} ignores nano_{recipe_of(model)}, because it does not call the "
            "attention functions of transformers: choose another model, such as llama or gpt2"
        )


# ------------------------------------------------------------------ measures, and names


@torch.no_grad()
def measures(model, idx):
    """{layer: {measure: (heads,)}} of a model of transformers that reads tokens idx (B, T).

    The names of the layers are the model's, the measures those of evals/measures.py. `extra` is the
    weight on a sink outside the sequence."""
    model(idx)  # every layer has its `nano` now
    names = [
        name.removesuffix(".nano.layer")
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    probes = [Probe() for _ in names]
    with instead(model, seeing(lambda layer, module, *inputs: probes[layer].see(module, *inputs))):
        model(idx)
    return dict(zip(names, (probe.result() for probe in probes), strict=True))


def recipes():
    """The recipes that need only queries, keys and values of the usual shapes."""
    usual = {"mixer": "attention", "diff": "none", "gate": "none", "window": 0}
    return [
        name
        for name, axes in attention.ATTENTIONS.items()
        if usual.items() <= (usual | axes).items() and axes.get("sink") != "token"
    ]


register_module_module_registration_hook(prepare)
for _recipe in recipes():
    transformers.AttentionInterface.register(f"nano_{_recipe}", partial(attend, recipe=_recipe))
    masks.AttentionMaskInterface.register(f"nano_{_recipe}", masks.sdpa_mask)
