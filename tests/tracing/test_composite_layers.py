"""Layers made of many ops, recurrent ones and transformers, train on the device as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


RNNS = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "LSTM_deep": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM_projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "LSTM_without_bias": lambda: nn.LSTM(3, 4, bias=False),
    "GRU": lambda: nn.GRU(3, 4),
    "GRU_deep": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True),
    "RNN_tanh": lambda: nn.RNN(3, 4),
    "RNN_relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # on the CPU
@pytest.mark.parametrize("name", RNNS)
def test_recurrent_layers(name):
    check(lambda device: train(device, RNNS[name], lambda m: m(given(device, (3, 2, 3)))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "enforce_sorted"), [("LSTM_deep", False), ("GRU", True)])
def test_packed_sequences(name, enforce_sorted):
    def program(device):
        first = "batch_first" in RNNS[name]().__dict__ and RNNS[name]().batch_first
        lengths = torch.tensor([3, 2, 1] if enforce_sorted else [2, 3, 1])
        x = given(device, (3, 3, 3))

        def forward(model):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=enforce_sorted)
            out, state = model(packed)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(out, batch_first=first)
            assert sizes.tolist() == lengths.tolist()
            return padded, state

        losses, outputs, grads = train(device, RNNS[name], forward)
        return losses, outputs, grads, x.grad

    check(program, rtol=1e-4, atol=1e-5)


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


def test_multihead_attention_weights():
    def program(device):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        q, k = given(device, (2, 3, 8), (2, 4, 8))
        out, weights = model(q, k, k, average_attn_weights=False)
        (out.sum() + weights.square().sum()).backward()
        return out, weights, q.grad, [p.grad for p in model.parameters()]

    check(program, rtol=1e-4, atol=1e-5)
