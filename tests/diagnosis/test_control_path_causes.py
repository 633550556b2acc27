"""Another control path is explained by the statement, mode or gradient that decided it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import lazytpu
from lazytpu.diagnosis.cause import KINDS
from tests.support.explanations import Explanations, kinds

explained = Explanations(__file__)
KEPT = KINDS["branch"].fix


def both_paths(f: Callable[[torch.Tensor, int], torch.Tensor], device: torch.device) -> str:
    x = torch.ones(3).to(device)
    for flag in (0, 1):
        result = f(x, flag)
        lazytpu.mark_step()  # [cut]
        del result
    return explained.last()


# --- statements of the user's -------------------------------------------------------------------------------


def test_branch(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        if flag:  # [if]
            x = x.cosh()  # [inside]
        return x.exp()  # [after]

    assert (
        both_paths(f, device)
        == f"""\
2  3 ops, # s: diverges from graph 1 at op 2 (aten.cosh instead of aten.exp): `if flag:` at [if] took another control path
   at   [inside]
   was  [after]
   fix  {KEPT}"""
    )


def test_branch_on_one_line(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        return x.cosh() if flag else x.exp()  # [conditional]

    assert (
        "op 2 (aten.cosh instead of aten.exp): `return x.cosh() if flag else x.exp()` at [conditional] took another "
        "control path\n   at   [conditional]\n   fix" in both_paths(f, device)
    )


def first(x: torch.Tensor) -> torch.Tensor:
    return x.cosh()  # [first]


def second(x: torch.Tensor) -> torch.Tensor:
    return x.exp()  # [second]


def test_branch_that_calls_functions(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        if flag:  # [if_calls]
            return first(x)
        return second(x)

    text = both_paths(f, device)
    assert "`if flag:` at [if_calls] took another control path\n   at   [first]\n   was  [second]\n" in text


def test_branch_of_the_first_op(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        if flag:  # [if_first]
            return x.cosh()
        return x.exp()

    assert "op 1 (aten.cosh instead of aten.exp): `if flag:` at [if_first] took another" in both_paths(f, device)


def test_loop(device: torch.device) -> None:
    def longer(x: torch.Tensor, flag: int) -> torch.Tensor:
        for _ in range(2 + flag):  # [for_more]
            x = x.cosh()  # [iteration]
        return x.exp()  # [out]

    assert (
        both_paths(longer, device)
        == """\
2  4 ops, # s: diverges from graph 1 at op 3 (aten.cosh instead of aten.exp): the loop `for _ in range(2 + flag):` \
at [for_more] ran more iterations
   at   [iteration]
   was  [out]
   fix  run the same number of iterations in every step, or pad"""
    )

    def shorter(x: torch.Tensor, flag: int) -> torch.Tensor:
        n = 3 - flag
        while n:  # [while]
            x, n = x.sin(), n - 1
        return x.exp()

    assert "op 3 (aten.exp instead of aten.sin): the loop `while n:` at [while] ran fewer" in both_paths(
        shorter, device
    )


def test_loop_that_ends_at_the_cut(device: torch.device) -> None:
    def total(n: int) -> None:
        xs = [torch.ones(2).to(device) for _ in range(n)]
        y = sum(x.sinh() for x in xs)  # [comprehended]
        lazytpu.mark_step()
        del y

    total(2)
    total(3)
    assert (
        "op 5 (aten.sinh instead of a cut): the loop `y = sum(x.sinh() for x in xs)` at [comprehended] ran more iterations"
        in explained.last()
    )


def test_other_lines_without_a_branch_between_them(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh().exp()  # [line_a]
    lazytpu.mark_step()
    y = x.sinh().cosh()  # [line_b]
    lazytpu.mark_step()
    assert "Python took another control path, to [line_b] instead of [line_a]\n" in explained.last()
    del y


# --- modes and settings of torch ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x)).sinh()  # [forward]


def test_train_and_eval(device: torch.device) -> None:
    net, x = Net().to(device), torch.ones(4, 4).to(device)
    for train in (True, False, True):
        net.train(train)
        y = net(x)
        lazytpu.mark_step()
        del y
    assert kinds() == ["first", "mode"]
    text = explained.last()
    assert (
        "(aten._native_batch_norm_legit_functional instead of aten.add.Tensor): Net was in train mode and is in eval"
        in (text)
    )
    assert text.endswith("   at   [forward]  Net.norm\n   fix  none needed, train() and eval() have one graph each")


def test_mode_given_to_a_function(device: torch.device) -> None:
    x, mean, var = [torch.ones(4, 4).to(device)] + [torch.ones(4).to(device) for _ in range(2)]
    for train in (True, False):
        y = torch.native_batch_norm(x, None, None, mean, var, train, 0.1, 1e-5)[0]
        lazytpu.mark_step()
        del y
    assert kinds() == ["first", "mode"]


def test_autocast_and_no_grad(device: torch.device) -> None:
    w = torch.ones(3, 3).to(device).requires_grad_()

    def product() -> None:
        y = nn.functional.linear(w, w)
        lazytpu.mark_step()
        del y

    product()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        product()
    assert kinds() == ["first", "flag"]
    assert "torch.autocast was off and is on (bf16)" in explained.last()
    with torch.no_grad():
        product()
    assert kinds()[2:] in ([], ["flag"]), "the ops may be the same"
    if kinds()[2:]:
        assert "gradient recording (torch.no_grad) was on and is off" in explained.last()


def test_flag_of_torch(device: torch.device) -> None:
    def ones() -> None:
        y = torch.ones(3, device=device) + 1  # [ones]
        lazytpu.mark_step()
        del y

    ones()
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            ones()
    finally:
        torch.set_default_dtype(torch.float32)
    assert kinds() == ["first", "flag"]
    assert "the first graph; torch.get_default_dtype() was torch.float32 and is torch.float64\n" in explained.last()


# --- optimizers and gradients -------------------------------------------------------------------------------


def test_state_of_an_optimizer(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4).to(device)).sum().backward()
        optimizer.step()  # [optimizer]
        lazytpu.mark_step()
    assert kinds() == ["first", "branch"]
    assert (
        explained.last().partition(": ")[2]
        == """\
diverges from graph 1 at op 9 (aten._foreach_mul.Scalar instead of aten.clone): [optimizer] took another control path \
inside torch: the first optimizer step allocates its state
   at   [optimizer]
   fix  none needed, later steps reuse this graph"""
    )


def test_settings_of_an_optimizer(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for decay in (0.0, 0.1):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.zero_grad()
        net(torch.ones(2, 4).to(device)).sum().backward()
        optimizer.step()  # [decayed]
        lazytpu.mark_step()
    text = explained.last()
    assert (
        "[decayed] took another control path inside torch: other parameters have gradients, or the optimizer's" in text
    )


def test_gradients_that_are_accumulated(device: torch.device) -> None:
    net, x = nn.Sequential(nn.Tanh(), nn.Linear(4, 3)).to(device), torch.ones(2, 4).to(device).requires_grad_()

    def backward() -> str:
        net(x).sum().backward()  # [adding]
        lazytpu.mark_step()
        return explained.last()

    backward()
    assert (
        backward()
        == f"""\
2  10 ops, # s: diverges from graph 1 at op 7 (aten.add.Tensor instead of aten.tanh_backward): a gradient is accumulated \
where there was none before
   at   [adding]  Sequential.1 (backward)
   was  [adding]  Sequential.0 (backward)
   fix  {KINDS["gradient"].fix}"""
    )
    assert kinds() == ["first", "gradient"]


def test_frozen_parameters(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)

    def backward() -> str:
        net.zero_grad()
        y = net(torch.ones(2, 4).to(device)).square().sum()  # [frozen]
        y.backward()
        lazytpu.mark_step()
        return explained.last()

    backward()
    net[0].requires_grad_(False)
    assert "other parameters of Sequential.0 require gradients\n   at   [frozen]  Sequential.0\n" in backward()
    net[2].requires_grad_(False)
    net[0].requires_grad_(True)
    assert "other parameters of Sequential.2 require gradients\n   at   [frozen]  Sequential.2\n" in backward()
    assert kinds() == ["first", "gradient", "gradient"]
