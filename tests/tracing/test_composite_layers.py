"""Layers made of many ops, recurrent cells and transformers, train on the device as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazytpu
from tests.support.both_devices import check, given


def train(device, make, forward, steps=2, lr=0.05):
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, outputs = [], None
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = forward(model)
        loss = sum(o.square().mean() for o in torch.utils._pytree.tree_leaves(outputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, outputs, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cells(name):
    def forward(model, device):
        state = None
        for x in given(device, (4, 2, 3)):
            state = model(x, state)
        return state

    check(lambda d: train(d, lambda: getattr(nn, name)(3, 4), lambda m: forward(m, d)), rtol=1e-4, atol=1e-5)


def test_recurrent_state_and_dropout():
    def program(device):
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, num_layers=2, dropout=0.5).to(device)
        model.flatten_parameters()
        h, c = given(device, (2, 2, 4), (2, 2, 4))
        model.eval()
        out, (h, c) = model(given(device, (5, 2, 3)), (h, c))
        return out, h, c

    check(program)
    model = nn.LSTM(3, 400, num_layers=2, dropout=0.5).to("tpu")
    x = given("tpu", (5, 2, 3))
    torch.manual_seed(1)
    first = model(x)[0]
    assert not torch.equal(model(x)[0], first)
    torch.manual_seed(1)
    assert torch.equal(model(x)[0], first)


def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)


def test_transformer():
    def forward(model, device):
        source, target = given(device, (2, 5, 8), (2, 4, 8))
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
        return model(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    check(lambda d: train(d, transformer, lambda m: forward(m, d)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first, training):
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)

    def program(device):
        torch.manual_seed(0)
        model, x = make().to(device), given(device, (2, 5, 8), requires_grad=False)
        if training:
            return train(device, make, lambda m: m(x))
        with torch.inference_mode():  # where torch takes its fast path
            return model(
                x, is_causal=True, mask=nn.Transformer.generate_square_subsequent_mask(5, device=device)
            ).clone()

    check(program, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("with_norm", [True, False])
def test_transformer_encoder_fills_padding_in_inference(with_norm):
    at_the_end = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()

    def program(device):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if with_norm else None).eval().to(device)
        x = given(device, (3, 5, 8), requires_grad=False)
        cuts = lazytpu.metrics.counter("cut")
        with torch.no_grad():
            masks = [mask.to(device) for mask in (at_the_end, at_the_end.flip(1))]  # zeros are for the first only
            found = [model(x, src_key_padding_mask=mask) for mask in masks]
        assert lazytpu.metrics.counter("cut") == cuts
        return found

    check(program, rtol=1e-4, atol=1e-4)
    assert bool((program("cpu")[0][0, 3:] == program("cpu")[0][0, 3]).all())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_transformer_encoder_whose_layers_leave_the_inference_path_names_the_switch(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval().to(device)
    model.layers[0].register_forward_hook(lambda *_: None)
    padding = torch.tensor([[False, True]], device=device)
    with torch.no_grad(), pytest.raises(lazytpu.errors.UnsupportedOpError, match="enable_nested_tensor=False"):
        model(torch.ones(1, 2, 8, device=device), src_key_padding_mask=padding)


def test_multihead_attention_weights():
    def program(device):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        q, k = given(device, (2, 3, 8), (2, 4, 8))
        out, weights = model(q, k, k, average_attn_weights=False)
        (out.sum() + weights.square().sum()).backward()
        return out, weights, q.grad, [p.grad for p in model.parameters()]

    check(program, rtol=1e-4, atol=1e-5)
