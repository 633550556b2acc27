"""What scripts do with torch and torchvision alone."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def adversaries(device: torch.device) -> Numbers:
    """Train a WGAN with a penalty on gradients, which are differentiated again."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 8)).to(device)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.LeakyReLU(), nn.Linear(16, 1)).to(device)
    made, judged = (torch.optim.Adam(net.parameters(), 1e-3, betas=(0.0, 0.9)) for net in (maker, critic))
    for step in range(4):
        real, noise = drawn(step, 8, 8).to(device), drawn(step + 50, 8, 4).to(device)
        fake, share = maker(noise).detach(), drawn(step + 90, 8, 1).sigmoid().to(device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        judged.zero_grad()
        loss.backward()
        judged.step()
        made.zero_grad()
        cheated = -critic(maker(noise)).mean()
        cheated.backward()
        made.step()
    return {"critic": loss.item(), "maker": cheated.item()}


def search(device: torch.device) -> Numbers:
    """Minimize Rosenbrock's function with L-BFGS, with and without a line search."""
    found = {}
    for name in (None, "strong_wolfe"):
        x = torch.tensor([-1.2, 1.0], device=device, requires_grad=True)
        optimizer = torch.optim.LBFGS([x], lr=1.0 if name else 0.1, max_iter=20, line_search_fn=name)

        def closure(x: torch.Tensor = x, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (1 - x[0]).square() + 100 * (x[1] - x[0].square()).square()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        found[name or "steps"] = optimizer.step(closure).item()
    return found


def functions(device: torch.device) -> Numbers:
    """Compute with an ensemble, gradients of each sample, Hessians and Jacobians; learn to learn."""
    from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    frame, model = copy.deepcopy(models[0]).to("meta"), models[0]
    x, y = drawn(0, 5, 6).to(device), torch.tensor([0, 1, 2, 0, 1], device=device)

    def out(p: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional_call(frame, (p, b), (x,))
        return result

    def one(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    own = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(one), in_dims=(None, 0, 0))(own, x, y)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        named = dict(model.named_parameters())
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(named.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), slopes, strict=True)}
        learned = F.cross_entropy(functional_call(model, moved, (x + 0.1,)), y)
        optimizer.zero_grad()
        learned.backward()
        optimizer.step()
    return {
        "ensemble": vmap(out, in_dims=(0, 0, None))(parameters, buffers, x).sum().item(),
        "samples": sum(g.abs().sum() for g in each.values()).item(), "MAML": learned.item(),
        "Hessian": hessian(lambda z: model(z).sum())(x[0]).abs().sum().item(),
        "Jacobian": jacrev(model)(x[0]).sum().item(), "jvp": jvp(model, (x,), (torch.ones_like(x),))[1].sum().item(),
    }  # fmt: skip


def saved(device: torch.device) -> Numbers:
    """Save on one device and load to each, by every way that torch has."""
    torch.manual_seed(0)
    net = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # noqa: E731
    model, x = net().to(device), drawn(0, 8, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fit(model, lambda: model(x).square().mean(), make=lambda _: optimizer)
    kept, found = io.BytesIO(), {}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    places = {"as saved": None, "cpu": "cpu", "function": lambda s, place: s, "device": device}
    for name, place in places.items():
        kept.seek(0)
        state = torch.load(kept, map_location=place)
        again = net().to(device)
        again.load_state_dict(state["model"])
        resumed = torch.optim.AdamW(again.parameters(), 1e-2)
        resumed.load_state_dict(state["optimizer"])
        found[name] = fit(again, lambda again=again: again(x).square().mean(), make=lambda _, o=resumed: o)
    with torch.device("meta"):
        empty = net()
    empty.load_state_dict(state["model"], assign=True)
    return {**found, "assigned": empty(x).square().mean().item()}


def scaled(device: torch.device) -> Numbers:
    """Train under autocast with a GradScaler, which skips a step of infinite gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=2)
    x, y = drawn(0, 8, 8).to(device), (torch.arange(8) % 3).to(device)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (torch.inf if step == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {"loss": loss.item(), "scale": scaler.get_scale()}


def wrapped(device: torch.device) -> Numbers:
    """Use norms of weights, pruning, packed sequences, checkpoints, saved-tensor hooks and hooks of modules."""
    from torch.nn.utils import parametrizations, prune, rnn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = [wrap(nn.Linear(6, 6)) for wrap in (parametrizations.spectral_norm, parametrizations.weight_norm,
                                                parametrizations.orthogonal)]  # fmt: skip
    model, x = nn.Sequential(*layers).to(device), drawn(0, 4, 6).to(device).requires_grad_()
    cut, recurrent = nn.Linear(6, 6).to(device), nn.GRU(6, 4, bidirectional=True, batch_first=True).to(device)
    prune.l1_unstructured(cut, "weight", amount=0.4)
    rows = rnn.pad_sequence([drawn(n, n, 6).to(device) for n in (3, 5, 2)], batch_first=True)
    packed = rnn.pack_padded_sequence(rows, torch.tensor([3, 5, 2]), batch_first=True, enforce_sorted=False)
    seen = []
    cut.register_full_backward_hook(lambda module, into, out: seen.append(out[0].sum().item()))
    with torch.autograd.graph.save_on_cpu():
        kept = checkpoint(lambda x: F.gelu(cut(x)), x, use_reentrant=False).square().sum()
    kept.backward()
    assert x.grad is not None
    return {
        "norms": fit(model, lambda: model(x).square().mean()), "hooks": seen[0], "kept": x.grad.abs().sum().item(),
        "packed": rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True)[0].sum().item(),
    }  # fmt: skip


def measured(device: torch.device) -> Numbers:
    """Profile, time, and count the operations of a step."""
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils.benchmark import Timer
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).to(device), drawn(0, 2, 3, 8, 8)
    x = x.to(device)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled, record_function("step"):
        model(x).sum().backward()
    timed = Timer("model(x)", globals={"model": model, "x": x}).timeit(3)
    with FlopCounterMode(display=False) as flops:
        model(x).sum().backward()
    names = {event.key for event in profiled.key_averages()}
    return {"step": float("step" in names), "timed": float(timed.mean > 0), "FLOPs": flops.get_total_flops()}


def boxes(device: torch.device) -> Numbers:
    """Train detection with masks, and segmentation as torchvision's references measure it."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    torch.manual_seed(0)
    sizes = {"min_size": 64, "max_size": 64, "rpn_batch_size_per_image": 8, "box_batch_size_per_image": 8}
    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, **sizes).to(device)
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 4:40, 4:40] = masks[1, 10:50, 20:60] = 1
    corners = torch.tensor([[4.0, 4.0, 40.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
    target = {"boxes": corners.to(device), "labels": torch.tensor([1, 2], device=device), "masks": masks.to(device)}
    losses = model([drawn(0, 3, 64, 64).to(device)], [target])
    sum(losses.values()).backward()
    torch.manual_seed(0)
    parts = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).to(device).eval()
    x = drawn(1, 2, 3, 32, 32).to(device)
    y = torch.randint(0, 3, (2, 32, 32), generator=torch.Generator().manual_seed(0)).to(device)
    loss = fit(parts, lambda: F.cross_entropy(parts(x)["out"], y, ignore_index=255), steps=2)
    confusion = torch.bincount(3 * y.flatten() + parts(x)["out"].argmax(1).flatten(), minlength=9).reshape(3, 3)
    return {"detection": float(len(losses)), "loss": loss, "right": confusion.diag().sum().item()}


def pictures(device: torch.device) -> Numbers:
    """Transform pictures and boxes with torchvision's v2, which keeps their classes."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    picture = tv_tensors.Image(drawn(0, 3, 24, 24).sigmoid().to(device))
    box = tv_tensors.BoundingBoxes(torch.tensor([[2, 3, 10, 12]], device=device), format="XYXY", canvas_size=(24, 24))
    steps = v2.Compose(
        [v2.Resize((16, 16)), v2.CenterCrop(12), v2.RandomHorizontalFlip(1.0), v2.Normalize([0.5], [2.0])]
    )
    out, moved = steps(picture, box)
    assert type(moved) is tv_tensors.BoundingBoxes
    return {
        "picture": out.sum().item(), "box": float(moved.sum()),
        "turned": v2.functional.rotate(picture, 30.0).sum().item(),
        "blurred": v2.functional.gaussian_blur(picture, [3, 3]).sum().item(),
        "hue": v2.functional.adjust_hue(picture, 0.1).sum().item(), "augmented": float(v2.AugMix()(picture).shape[-1]),
    }  # fmt: skip


class _Writer(nn.Module):
    """A small decoder as tutorials write it: heads in a loop, dropout, no cache."""

    def __init__(self, words: int = 32, width: int = 32, length: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last, self.length = nn.Linear(width, words), length

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        out: torch.Tensor = self.last(self.layers(hidden, mask=mask, is_causal=True))
        return out


def texts(device: torch.device) -> Numbers:
    """Write texts word by word without a cache and without a read: greedily twice, and drawn while dropout is on."""
    torch.manual_seed(0)
    model = _Writer().to(device).eval()
    found: dict[str, float] = {}
    with torch.no_grad():
        for name in ("greedy", "greedy again", "drawn"):
            model.train(name == "drawn")
            ids = torch.ones(1, 1, dtype=torch.long, device=device)
            for _ in range(40):
                scores = model(ids[:, -model.length :])[:, -1]
                drawn_word = torch.multinomial(scores.softmax(-1), 1)
                word = drawn_word if name == "drawn" else scores.argmax(-1, keepdim=True)
                ids = torch.cat([ids, word], 1)
            found[name] = float(ids.shape[1] if name == "drawn" else (ids[0] * torch.arange(41, device=device)).sum())
    return found


LIBRARIES = [
    Library("torch", "texts written word by word, without a cache", texts),
    Library("torch", "a WGAN with a penalty on gradients", adversaries, rtol=1e-3),
    Library("torch", "L-BFGS, with and without a line search", search, rtol=2e-2),
    Library("torch", "torch.func: ensembles, gradients of samples, Hessians, MAML", functions, rtol=1e-3),
    Library("torch", "torch.save and torch.load between devices, models and optimizers", saved, rtol=1e-3),
    Library("torch", "autocast with a GradScaler", scaled, rtol=2e-2),
    Library("torch", "parametrizations, pruning, packed sequences, checkpoints, hooks", wrapped, rtol=1e-3),
    Library("torch", "torch.profiler, torch.utils.benchmark, FlopCounterMode", measured),
    Library("torchvision", "Mask R-CNN and LR-ASPP trained", boxes, rtol=1e-3),
    Library("torchvision", "transforms v2 of pictures and boxes", pictures, rtol=1e-3),
]  # fmt: skip
