from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.dit import Attention, DenoisingTransformer, DiT


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(ours.inward.weight)
    theirs.in_proj_bias.copy_(ours.inward.bias)
    theirs.out_proj.load_state_dict(ours.outward.state_dict())


@torch.no_grad()
def test_the_transformer_of_diffusion_policy_is_that_of_torch() -> None:
    """Its published form is torch's decoder (norm first, GELU, causal), over a time token and observation tokens."""
    torch.manual_seed(0)
    width, horizon, observations = 16, 6, 2
    ours = DenoisingTransformer(3, 5, horizon, observations, n_layers=2, n_heads=2, hidden_dim=width, dropout=0.0)
    for parameter in ours.parameters():
        parameter.normal_(std=0.2)
    layer = nn.TransformerDecoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    decoder = nn.TransformerDecoder(layer, 2).eval()
    for block, theirs in zip(ours.blocks, decoder.layers, strict=True):
        copy_attention(block.attention, theirs.self_attn)
        copy_attention(block.cross_attention, theirs.multihead_attn)
        theirs.linear1.load_state_dict(block.perceptron[0].state_dict())
        theirs.linear2.load_state_dict(block.perceptron[3].state_dict())
        for norm, other in zip(block.norms, (theirs.norm1, theirs.norm2, theirs.norm3), strict=True):
            other.load_state_dict(norm.state_dict())
    noisy, time_B, condition = torch.randn(4, horizon, 3), torch.arange(4), torch.randn(4, observations, 5)
    tokens = torch.cat([ours.embed(time_B).unsqueeze(1), ours.condition(condition)], 1) + ours.condition_positions
    hidden = torch.full((horizon, horizon), -torch.inf).triu(1)
    unseen = torch.tensor([[0, 0, -torch.inf], *[[0, 0, 0]] * (horizon - 1)])  # step 0 does not see observation 1
    out = decoder(ours.inward(noisy) + ours.positions, ours.encoder(tokens), tgt_mask=hidden, memory_mask=unseen)
    torch.testing.assert_close(
        ours.eval()(noisy, time_B, condition), ours.outward(ours.norm(out)), atol=1e-5, rtol=1e-4
    )


def test_the_transformer_has_as_many_parameters_as_published() -> None:
    """Diffusion Policy's PushT from keypoints: 8 layers of width d = 256, horizon 16, 2 observations of 20 numbers."""
    d = 256
    layer = 2 * (4 * d * d + 4 * d) + (8 * d * d + 5 * d) + 3 * 2 * d
    ends = (2 * d + d) + 16 * d + (20 * d + d) + 3 * d + (2 * d) + (2 * d + 2)
    encoder = (4 * d * d + 4 * d) + (4 * d * d + d)
    with torch.device("meta"):
        assert count(DenoisingTransformer(2, 20, 16, 2)) == 8 * layer + ends + encoder == 8_965_122


def test_a_causal_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    noisy, condition, time_B = torch.randn(2, 6, 3), torch.randn(2, 2, 5), torch.zeros(2)
    changed = noisy.clone()
    changed[:, 4:] += 1
    for causal in (True, False):
        net = DenoisingTransformer(3, 5, 6, 2, n_layers=2, hidden_dim=16, causal=causal).eval()
        before, after = net(noisy, time_B, condition), net(changed, time_B, condition)
        assert torch.equal(before[:, :4], after[:, :4]) == causal
        assert not torch.equal(before[:, 4:], after[:, 4:])


def test_dit_starts_at_zero_and_every_parameter_learns_in_the_end() -> None:
    torch.manual_seed(0)
    net = DiT(3, 5, 8, n_layers=2, hidden_dim=16)
    noisy, time_B, condition = torch.randn(4, 8, 3), torch.rand(4) * 100, torch.randn(4, 5)
    assert not net(noisy, time_B, condition).any()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (net(noisy, time_B, condition) - 1).square().mean().backward()
        optimizer.step()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@torch.no_grad()
def test_a_dit_block_is_the_published_one() -> None:
    """adaLN-Zero: x + gate * f(norm(x) * (1 + scale) + shift), for attention and then for the perceptron."""
    torch.manual_seed(0)
    net = DiT(3, 5, 8, n_layers=1, n_heads=2, hidden_dim=16).eval()
    block, x, film = net.blocks[0], torch.randn(2, 8, 16), torch.randn(2, 1, 96)
    shift, scale, gate, shift_2, scale_2, gate_2 = film.chunk(6, dim=2)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    copy_attention(block.attention, theirs)

    def norm(value: Tensor) -> Tensor:
        return functional.layer_norm(value, (16,))

    inner = norm(x) * (1 + scale) + shift
    expected = x + gate * theirs(inner, inner, inner)[0]
    expected = expected + gate_2 * block.perceptron(norm(expected) * (1 + scale_2) + shift_2)
    torch.testing.assert_close(block(x, film), expected, atol=1e-5, rtol=1e-4)


def test_dit_has_as_many_parameters_as_its_blocks_say() -> None:
    d, layers = 256, 6
    block = (4 * d * d + 4 * d) + (8 * d * d + 5 * d) + (6 * d * d + 6 * d)
    ends = (4 * d + d) + 16 * d + 2 * (d * d + d) + (78 * d + d) + (2 * d * d + 2 * d) + (4 * d + 4)
    with torch.device("meta"):
        assert count(DiT(4, 78, 16)) == layers * block + ends


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="hidden_dim 30 must be a multiple of the number of heads, 4"):
        DiT(2, 3, 8, hidden_dim=30)
