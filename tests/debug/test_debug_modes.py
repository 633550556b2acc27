"""Running each op at once, comparing with the CPU, finding NaN, stopping where an op is recorded."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator

import pytest
import torch

import lazytpu
from lazytpu.errors import LoweringError
from lazytpu.ir.tree import trace
from lazytpu.lowering import registry

aten = torch.ops.aten


def line_of(text: str) -> str:
    """``test_debug_modes.py:12``: the only line of this file that ends in a comment."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"test_debug_modes.py:{number}"


@pytest.fixture(autouse=True)
def modes_off() -> Iterator[None]:
    yield
    lazytpu.config.eager = False
    assert not trace.forgetful


@pytest.fixture
def net(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)


def train(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    return loss.detach()


def broken(monkeypatch, op, rule):
    monkeypatch.setitem(registry._RULES, op, rule)
    lazytpu.tracing.step.forget()


class TestEager:
    def test_each_op_runs_at_once(self, device):
        x = torch.ones(3, device=device)
        with lazytpu.debug.eager():
            before = lazytpu.metrics.counter("execute")
            y = x * 2
            y.add_(1)
            assert lazytpu.metrics.counter("execute") == before + 2
            assert lazytpu.ir_text().count(" = ") == 0
        y = x * 2
        assert lazytpu.ir_text(y).count(" = ") == 1
        assert not lazytpu.config.eager

    def test_gives_what_lazy_gives(self, net, device):
        x = torch.randn(5, 4).to(device)
        twin = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
        twin.load_state_dict(net.state_dict())
        lazytpu.config.eager = True
        for _ in range(3):
            eager_loss = train(twin, x)
        lazytpu.config.eager = False
        for _ in range(3):
            loss = train(net, x)
        torch.testing.assert_close(eager_loss.cpu(), loss.cpu())

    def test_an_error_is_raised_at_its_line_and_nothing_has_happened(self, device, monkeypatch):
        def rule(out, x, y):
            raise ValueError("no")

        x = torch.ones(3, device=device)
        broken(monkeypatch, aten.mul.Tensor, rule)
        lazytpu.config.eager = True
        with pytest.raises(LoweringError, match=r"no\n  at    " + line_of("fails")):
            x.mul_(3)  # fails
        assert x.tolist() == [1, 1, 1]
        assert (x + 1).tolist() == [2, 2, 2]

    def test_a_pending_graph_that_fails_leaves_it_off(self, device, monkeypatch):
        def rule(out, x, y):
            raise ValueError("no")

        x = torch.ones(3, device=device)
        broken(monkeypatch, aten.mul.Tensor, rule)
        y = x * 3
        with pytest.raises(LoweringError):
            lazytpu.config.eager = True
        assert not lazytpu.config.eager
        del y

    def test_a_compiled_step_is_not_replayed(self, net, device):
        step = lazytpu.compile(lambda x: train(net, x))
        x = torch.ones(5, 4, device=device)
        for _ in range(6):
            step(x)
        replayed = lazytpu.metrics.counter("replay")
        assert replayed
        with lazytpu.debug.eager():
            loss = step(x)
        assert lazytpu.metrics.counter("replay") == replayed
        assert step(x).item() < loss.item()

    def test_when_it_is_off_nothing_is_compiled_again(self, net, device):
        x = torch.ones(5, 4, device=device)
        for _ in range(2):
            train(net, x)
            lazytpu.mark_step()
        with lazytpu.debug.eager():
            train(net, x)
        train(net, x)
        lazytpu.mark_step()
        before, nodes = lazytpu.metrics.counter("compile"), trace.nodes
        train(net, x)
        lazytpu.mark_step()
        assert (lazytpu.metrics.counter("compile"), trace.nodes) == (before, nodes)


class TestCheck:
    def test_a_training_step_is_right(self, net, device):
        found = lazytpu.debug.check(train, net, torch.ones(5, 4, device=device))
        assert found.ok, found
        assert found.compared > 15
        assert not found.skipped

    def test_names_the_first_wrong_op(self, device, monkeypatch):
        broken(monkeypatch, aten.tanh.default, lambda out, x: x * 0 + 0.5)
        x = torch.tensor([[0.0, 1.0]]).to(device)

        def function():
            return (x + 0.0).tanh().exp()  # wrong

        found = lazytpu.debug.check(function)
        assert not found.ok
        assert str(found) == (
            "2 ops compared with the CPU\n"
            "aten.tanh differs from the CPU by 0.5 (relative 0.66): 0.5 instead of 0.0 at [0, 0]; 2 of 2 elements\n"
            f"  at    {line_of('wrong')}\n"
            "  with  f32[1,2] from 0 to 1\n"
            "  got   f32[1,2] from 0.5 to 0.5"
        )

    def test_integers_have_to_be_equal(self, device, monkeypatch):
        broken(monkeypatch, aten.cumsum.default, lambda out, x, dim, dtype=None: x)
        found = lazytpu.debug.check(lambda: torch.arange(3, device=device).cumsum(0))
        assert found.difference is not None
        assert (found.difference.op, found.difference.ours, found.difference.theirs) == ("aten.cumsum", 2, 3)

    def test_small_tolerances_notice_rounding_that_the_cpu_does_not_have(self, device, monkeypatch):
        broken(monkeypatch, aten.exp.default, lambda out, x: x * 0 + 2.719)
        x = torch.ones(2, device=device)
        assert lazytpu.debug.check(lambda: x.exp(), rtol=1e-3).ok
        assert not lazytpu.debug.check(lambda: x.exp()).ok

    def test_cancellation_is_no_error(self, device):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(device)
        assert lazytpu.debug.check(lambda: (x - x.mean()).sum()).ok

    def test_says_what_is_not_compared(self, device):
        found = lazytpu.debug.check(lambda: torch.randn(3, device=device) + 1)
        assert found.ok
        assert dict(found.skipped) == {("aten.randn", "uses random numbers"): 1}

    def test_views_and_strides(self, device):
        x = torch.arange(12.0).reshape(3, 4).to(device)
        found = lazytpu.debug.check(lambda: x.t().expand(2, 4, 3).contiguous()[:, 1:].sum(0).view(-1))
        assert found.ok, found
        assert not found.skipped

    def test_attention_is_compared_where_it_drops_nothing(self, device, monkeypatch):
        q, k, v = (torch.randn(1, 2, 3, 4).to(device).requires_grad_() for _ in range(3))
        bias = torch.tensor([[0.0, 1.0, -torch.inf]] * 3).to(device)
        attend = torch.nn.functional.scaled_dot_product_attention

        def function(**given):
            attend(q, k, v, **given).sum().backward()

        for given in ({"attn_mask": bias}, {"is_causal": True, "scale": 0.3}):
            found = lazytpu.debug.check(function, **given)
            assert found.ok, found
            assert not found.skipped
        ((op, why),) = lazytpu.debug.check(lambda: attend(q.detach(), k, v, dropout_p=0.5)).skipped
        assert "attention" in op and why == "uses random numbers"
        op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
        rule = registry.rule_of(op)
        broken(monkeypatch, op, lambda *args, **given: [None if x is None else x * 1.1 for x in rule(*args, **given)])
        assert "attention" in lazytpu.debug.check(function, attn_mask=bias).difference.op

    def test_values_in_several_chunks(self, net, device, monkeypatch):
        monkeypatch.setattr(sys.modules["lazytpu.debug.against_cpu"], "CHUNK_BYTES", 100)
        assert lazytpu.debug.check(train, net, torch.ones(5, 4, device=device)).ok


class TestFindNan:
    def test_the_op_that_makes_it(self, device):
        x = torch.tensor([1.0, 0.0, 4.0]).to(device)

        def function():
            y = x.sqrt()
            z = y.log()  # makes inf
            return (z - z).sum()

        found = lazytpu.debug.find_nan(function)
        assert str(found) == (
            "aten.log returned f32[3] with 1 inf, the rest from 0 to 0.6931\n"
            f"  at    {line_of('makes inf')}\n"
            "  with  f32[3] from 0 to 2"
        )
        only_nan = lazytpu.debug.find_nan(function, inf=False)
        assert only_nan is not None
        assert only_nan.op == "aten.sub.Tensor"

    def test_nothing_to_find(self, net, device):
        assert lazytpu.debug.find_nan(train, net, torch.ones(5, 4, device=device)) is None

    def test_the_function_does_what_it_does_otherwise(self, net, device):
        x = torch.ones(5, 4, device=device)
        before = net[0].weight.detach().cpu()
        lazytpu.debug.find_nan(train, net, x)
        assert not torch.equal(net[0].weight.detach().cpu(), before)

    def test_an_input_that_has_it(self, net, device):
        with torch.no_grad():
            net[2].weight[0, 0] = float("nan")
        lazytpu.mark_step()
        found = lazytpu.debug.find_nan(train, net, torch.ones(5, 4, device=device))
        assert found is not None
        assert (found.op, found.tensor) == ("", "parameter `net.2.weight`")
        assert found.result.startswith("f32[2,8] with 1 NaN")

    def test_a_later_step_of_several(self, device):
        x = torch.full((2,), 3.0, device=device)

        def loop():
            for _ in range(5):
                x.sub_(1)
                x.rsqrt()  # nobody holds it
                held = x.rsqrt()  # the third
                lazytpu.mark_step()
                del held

        found = lazytpu.debug.find_nan(loop)
        assert found is not None
        assert (found.op, str(found.site), found.graph) == ("aten.rsqrt", line_of("the third"), 3)

    def test_a_number_that_makes_it(self, device):
        found = lazytpu.debug.find_nan(lambda: torch.ones(2, device=device) / 0.0)
        assert found is not None
        assert found.operands == ("f32[2] from 1 to 1", "the scalar 0.0")

    def test_the_backward_pass(self, device):
        x = torch.zeros(2, device=device, requires_grad=True)

        def function():
            x.sqrt().sum().backward()  # has an infinite gradient
            return x.grad

        found = lazytpu.debug.find_nan(function)
        assert found is not None
        assert (str(found.site), found.site.backward) == (line_of("has an infinite gradient"), True)

    def test_what_is_pending(self, device):
        y = torch.zeros(2, device=device).log()
        found = lazytpu.debug.find_nan()
        assert found is not None
        assert found.op == "aten.log"
        assert y.isinf().all()

    def test_an_error_after_it_does_not_hide_it(self, device):
        def function():
            loss = torch.zeros(2, device=device).log().sum()
            assert loss.item() > -1e9, "the loss is not finite"

        found = lazytpu.debug.find_nan(function)
        assert found is not None
        assert found.op == "aten.log"

    def test_an_error_before_it_is_raised(self):
        with pytest.raises(ZeroDivisionError):
            lazytpu.debug.find_nan(lambda: 1 / 0)


class TestBreakAt:
    def test_calls_at_each_place_each_time(self, device):
        seen = []

        def function():
            a = torch.ones(2, 2, device=device)
            b = a @ a  # first product
            return b @ a  # second product

        with lazytpu.debug.break_at("aten.mm", lambda node: seen.append((str(node.site), repr(node.layout)))):
            for _ in range(2):
                function()
                lazytpu.mark_step()
        function()
        assert seen == [(line_of("first product"), "f32[2,2]"), (line_of("second product"), "f32[2,2]")] * 2

    def test_a_tensor_may_be_read_there(self, device):
        x = torch.ones(2, device=device)
        y = x + 1
        seen = []
        with lazytpu.debug.break_at("aten.mul", lambda node: seen.append(y.tolist())):
            z = y * 3
            z.mul_(2)
        assert seen == [[2, 2], [2, 2]]
        assert z.tolist() == [12, 12]

    def test_overloads(self, device):
        seen = []
        x = torch.ones(2, device=device)
        with lazytpu.debug.break_at("aten.add.Tensor", lambda node: seen.append(node.op.name)):
            x + 1
            x.add_(x)
            x * 2
        assert seen == ["aten.add.Tensor"] * 2

    def test_an_error_there_is_raised_at_the_op(self, device):
        def stop(node):
            raise KeyError("stop")

        x = torch.ones(2, device=device)
        with lazytpu.debug.break_at("aten.mul", stop), pytest.raises(KeyError):
            x.mul_(3)
        assert x.tolist() == [1, 1]

    def test_remove(self, device):
        seen = []
        stop = lazytpu.debug.break_at("aten.mul", lambda node: seen.append(1))
        stop.remove()
        stop.remove()
        torch.ones(2, device=device) * 2
        assert not seen

    def test_no_such_op(self):
        with pytest.raises(ValueError, match=r"there is no op 'aten\.no_such'"):
            lazytpu.debug.break_at("aten.no_such")

    @pytest.mark.parametrize("name", ["mm", "", "aten::mm", "torch.mm", "aten.mm.no_such", "mine.no_such"])
    def test_a_name_that_no_op_has(self, name):
        with pytest.raises(ValueError, match=r"(there is no op|is not the name of an op).*such as 'aten\.mm'"):
            lazytpu.debug.break_at(name)

    def test_writing_in_place_is_recorded_under_another_name(self):
        with pytest.raises(ValueError, match=r"'aten\.add_' is recorded as 'aten\.add\.Tensor'"):
            lazytpu.debug.break_at("aten.add_")

    @pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default", "aten.add", "aten.add.Tensor", "cond"])
    def test_names_of_ops(self, name):
        lazytpu.debug.break_at(name, lambda node: None).remove()

    def test_the_debugger_opens_in_the_users_frame(self, device, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.StringIO("p local\np x.tolist()\nc\n"))
        local = "seen"
        x = torch.ones(2, device=device)
        with lazytpu.debug.break_at("aten.mul"):
            y = x * 2  # stops
        out = capsys.readouterr()
        assert f"'{local}'" in out.out
        assert "[1.0, 1.0]" in out.out
        assert f"aten.mul.Tensor -> f32[2] is about to be recorded at {line_of('stops')}" in out.err
        assert y.tolist() == [2, 2]

    def test_quitting_the_debugger_raises(self, device, monkeypatch):
        import bdb

        monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
        x = torch.ones(2, device=device)
        with lazytpu.debug.break_at("aten.mul"), pytest.raises(bdb.BdbQuit):
            x * 2


def test_functions_of_torch_compile_are_looked_into(device):
    compiled = torch.compile(lambda x: (x - x).sqrt() / (x - x), backend="lazytpu")
    x = torch.ones(3).to(device)
    compiled(x)
    found = lazytpu.debug.find_nan(compiled, x)
    assert found is not None and found.op == "aten.div.Tensor"
    assert found.site.file == __file__
    assert lazytpu.debug.check(compiled, x + 1).compared > 2
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(x).isnan().all(), "what was compiled is used again"
