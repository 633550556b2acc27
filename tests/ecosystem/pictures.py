"""Libraries of pictures: how alike they are, attacks, networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def likeness(device: torch.device) -> Numbers:
    """Compute ten measures of how alike two pictures are."""
    import lpips
    import piq
    import pytorch_msssim

    a = drawn(0, 2, 3, 64, 64).sigmoid().to(device)
    b = (a + 0.1 * drawn(1, 2, 3, 64, 64).to(device)).clamp(0, 1)
    names = ("ssim", "psnr", "fsim", "gmsd", "vsi", "haarpsi", "mdsi", "vif_p", "dss")
    found = {name: getattr(piq, name)(a, b, data_range=1.0).item() for name in names}
    torch.manual_seed(0)
    net = lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False).to(device).eval()
    both = {
        "another ssim": pytorch_msssim.ssim(a, b, data_range=1).item(),
        "LPIPS": net(2 * a - 1, 2 * b - 1).sum().item(),
    }
    return found | both


def attacks(device: torch.device) -> Numbers:
    """Attack a small network with two libraries."""
    import foolbox
    import torchattacks

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).to(device).eval()
    x, y = drawn(0, 4, 3, 8, 8).sigmoid().to(device), torch.tensor([0, 1, 2, 0]).to(device)
    model = foolbox.PyTorchModel(net, bounds=(0, 1), device=device)
    theirs = {
        "sign": foolbox.attacks.LinfFastGradientAttack(),
        "projected": foolbox.attacks.LinfPGD(steps=3, random_start=False),
        "DeepFool": foolbox.attacks.L2DeepFoolAttack(steps=3),
        "norms": foolbox.attacks.DDNAttack(steps=4),
    }
    found = {name: attack(model, x, y, epsilons=[0.03])[1][0].abs().sum().item() for name, attack in theirs.items()}
    others = {
        "FGSM": torchattacks.FGSM(net),
        "PGD": torchattacks.PGD(net, steps=3, random_start=False),
        "MIFGSM": torchattacks.MIFGSM(net, steps=3),
        "CW": torchattacks.CW(net, steps=5),
    }
    return found | {name: attack(x, y).abs().sum().item() for name, attack in others.items()}


def efficient(device: torch.device) -> Numbers:
    from efficientnet_pytorch import EfficientNet

    torch.manual_seed(0)
    net = EfficientNet.from_name("efficientnet-b0", num_classes=4, dropout_rate=0.0, drop_connect_rate=0.0).to(device)
    x, y = drawn(0, 2, 3, 32, 32).to(device), torch.tensor([0, 1], device=device)
    return {"loss": fit(net, lambda: F.cross_entropy(net(x), y), 2)}


def pruned(device: torch.device) -> Numbers:
    """Prune half of the channels of a ResNet."""
    import torch_pruning
    import torchvision

    torch.manual_seed(0)
    net, x = torchvision.models.resnet18(num_classes=4).to(device), drawn(0, 1, 3, 32, 32).to(device)
    importance = torch_pruning.importance.MagnitudeImportance(p=2)
    torch_pruning.pruner.MagnitudePruner(
        net, x, importance=importance, pruning_ratio=0.5, ignored_layers=[net.fc]
    ).step()
    products, parameters = torch_pruning.utils.count_ops_and_params(net, x)
    return {"products": products, "parameters": parameters, "out": net.eval()(x).abs().sum().item()}


def counted_by_ops(device: torch.device) -> Numbers:
    """Count a network's operations, and compute losses of detection."""
    from fvcore.nn import FlopCountAnalysis, giou_loss, parameter_count, sigmoid_focal_loss

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    counts = FlopCountAnalysis(net, drawn(0, 4, 8).to(device))
    counts.unsupported_ops_warnings(False)
    x = drawn(1, 8, 3).to(device)
    boxes = torch.tensor([[0.0, 0, 2, 2]], device=device), torch.tensor([[1.0, 1, 3, 3]], device=device)
    return {
        "FLOPs": float(counts.total()),
        "parameters": float(parameter_count(net)[""]),
        "focal": sigmoid_focal_loss(x, (x > 0).float(), reduction="sum").item(),
        "boxes": giou_loss(*boxes).item(),
    }


LIBRARIES = [
    Library("piq", "with lpips and pytorch-msssim: eleven measures of likeness", likeness, rtol=1e-3,
            needs=("lpips", "pytorch-msssim")),
    Library("foolbox", "with torchattacks: eight attacks", attacks, rtol=1e-3, needs=("torchattacks",)),
    Library("efficientnet_pytorch", "trained", efficient, rtol=1e-2),
    Library("torch-pruning", "half of the channels of a ResNet pruned", pruned, rtol=1e-3, needs=("torchvision",)),
    Library("fvcore", "operations counted, losses of detection", counted_by_ops),
]  # fmt: skip
