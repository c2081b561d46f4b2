"""Presets, batches over ranks and nodes, parity with nanoGPT, and what is known of GPUs."""
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, losses, meta, tiny_config, train, write_data
from torch import nn

import eval as eval_script
import train as train_script
from data import tokens
from model import GPT, GPTConfig

# -------------------------------------------------------------------------------------------------------------------- presets

@pytest.mark.parametrize("name, millions, counted, step_tokens", [
    ("gpt2", 124.48, "all", 524_288), ("paper1", 359.84, "all", 524_288), ("paper2", 162.32, "all", 524_288), ("paper5", 59.00, "blocks", 262_144)])
def test_presets_have_the_size_they_say(name, millions, counted, step_tokens, monkeypatch):
    monkeypatch.setattr(GPT, "init_weights", lambda self, seed: None)
    preset = train_script.PRESETS[name]
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**eval_script.fields_of(GPTConfig, preset)))
    C, V = gpt.config.n_embd, gpt.config.vocab_size
    count = gpt.num_params() - (2 * V * C if counted == "blocks" else 0)
    assert count / 1e6 == pytest.approx(millions, abs=0.01)
    assert preset["batch_size"] * preset["gradient_accumulation_steps"] * preset["block_size"] == step_tokens
    train_script.Train(**eval_script.fields_of(train_script.Train, preset))
    assert set(preset) - {"about"} <= {f for group in (train_script.Train, GPTConfig) for f in group.__dataclass_fields__}


# -------------------------------------------------------------------------------------------------------------------- batches

def batches(data, world, rank, **knobs):
    machine = SimpleNamespace(world=world, rank=rank, device=torch.device("cpu"))
    knobs = train_script.Train(**{"batch_size": 4, "gradient_accumulation_steps": 4} | knobs)
    return train_script.Batches(tokens.Tokens(data, "train"), tiny_config(vocab_size=257), knobs, machine, 1)


@pytest.mark.parametrize("world, batch_size", [(1, 2), (2, 4), (4, 4), (2, 8), (4, 1), (1, 16), (8, 16)])
def test_every_split_of_a_step_reads_the_same_tokens(world, batch_size, data):
    whole = batches(data, 1, 0)
    split = {"batch_size": batch_size, "gradient_accumulation_steps": 16 // batch_size}
    for step in (1, 7):
        parts = [x for rank in range(world) for x, _ in batches(data, world, rank, **split).read(step)]
        assert all(len(x) <= batch_size for x in parts)
        assert torch.equal(torch.cat(parts), torch.cat([x for x, _ in whole.read(step)]))


def test_batches_depend_on_seed_and_step_and_come_ahead_of_time(data):
    ahead = batches(data, 1, 0)
    for step in (1, 2, 3, 9):                   # in order, and after a jump
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(ahead(step), ahead.read(step), strict=True))
    first = batches(data, 1, 0).read(1)[0][0]
    assert not torch.equal(first, ahead.read(2)[0][0]) and not torch.equal(first, batches(data, 1, 0, seed=5).read(1)[0][0])
    x, y = ahead.read(1)[0]
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_shards_are_mapped_not_read(tmp_path):
    folder = write_data(tmp_path, np.zeros(1000), np.zeros(100))
    assert all(isinstance(shard, np.memmap) for shard in tokens.Tokens(folder, "train").shards)


def test_two_agents_on_this_machine_train_like_one_process(data, tmp_path):
    """Several nodes by torchrun's own flags."""
    flags = (*TINY, f"--dataset={data}", f"--out_dir={tmp_path / 'nodes'}", "--attn=elastic")
    agents = [subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1",
                                "--master_addr=127.0.0.1", f"--master_port={29511}", str(ROOT / "train.py"), *flags],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in (0, 1)]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert meta(tmp_path / "nodes")["world_size"] == 2
    train(tmp_path / "one", data, "--attn=elastic")
    np.testing.assert_allclose(losses(tmp_path / "nodes"), losses(tmp_path / "one"), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ nanoGPT's parity

class Reference(nn.Module):
    """nanoGPT's architecture from torch's own modules, filled with a GPT's weights."""

    def __init__(self, gpt):
        super().__init__()
        c = gpt.config
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(
            c.n_embd, c.n_head, 4 * c.n_embd, 0.0, nn.functional.gelu, batch_first=True, norm_first=True) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        own, state = gpt.state_dict(), {}
        names = {"attn.c_attn.weight": "self_attn.in_proj_weight", "attn.c_attn.bias": "self_attn.in_proj_bias", "attn.c_proj": "self_attn.out_proj",
                 "mlp.c_fc": "linear1", "mlp.c_proj": "linear2", "ln_1": "norm1", "ln_2": "norm2"}
        for name, value in own.items():
            name = name.removeprefix("transformer.")
            for old, new in names.items():
                name = name.replace(old, new)
            if name != "lm_head.weight":
                state[name] = value.clone()
        self.load_state_dict(state)

    def forward(self, idx, targets):
        T = idx.shape[1]
        x = self.wte(idx) + self.wpe.weight[:T]
        mask = torch.ones(T, T).triu(1).bool()
        for layer in self.h:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy((self.ln_f(x) @ self.wte.weight.T).flatten(0, 1), targets.flatten())


def test_fifty_steps_have_the_losses_of_nanogpts_architecture(data):
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257, pos="learned", norm="layernorm", mlp="gelu", bias=True))
    reference = Reference(gpt)
    groups = [{"params": [p for p in reference.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix} for matrix in (True, False)]
    other = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    own, found, expected = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), [], []
    split = tokens.Tokens(data, "train")
    for step in range(50):
        rows = torch.from_numpy(split.windows(np.random.default_rng(step).integers(0, 19_000, 4), 33, 257))
        for model, optimizer, into in ((lambda x, y: gpt(x, y)[1], own, found), (reference, other, expected)):
            loss = model(rows[:, :-1], rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            into.append(loss.item())
    assert expected[-1] < expected[0] - 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------- peaks

def test_peaks_are_known_by_name_and_only_for_16_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    machine = eval_script.Machine("cpu", "float32")
    assert machine.peak_flops() is None
    machine.device, machine.dtype = torch.device("cuda"), "bfloat16"
    assert machine.peak_flops() == 756e12
