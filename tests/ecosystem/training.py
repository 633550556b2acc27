"""Libraries that train, fine-tune, generate and measure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from tests.ecosystem.case import Library, Numbers

STEPS = 12


def _classes(count: int = 96, width: int = 16, kinds: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around a center for each kind, f32[count,width], and their kinds, i64[count]."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(count) % kinds
    centers = torch.randn(kinds, width, generator=draw)
    return centers[y] + 0.5 * torch.randn(count, width, generator=draw), y


def _fit(model: nn.Module, loss_of: Callable[[], torch.Tensor], lr: float = 1e-2) -> float:
    """Return the loss after some steps of Adam."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
    return loss_of().item()


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _bert(**changes: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0, num_labels=3,
                        attention_probs_dropout_prob=0.0, **sizes, **changes)  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def _sentences(count: int = 64, length: int = 12) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 64, (count, length), generator=draw)
    return [{"input_ids": row, "labels": int(row[0]) % 3} for row in ids]


def trainer(device: torch.device) -> Numbers:
    from transformers import Trainer, TrainingArguments

    def arguments(folder: str, steps: int) -> TrainingArguments:
        return TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-3,
            save_steps=6, logging_steps=3, report_to=[], use_cpu=device.type == "cpu", seed=3, disable_tqdm=True,
            logging_nan_inf_filter=False,
        )  # fmt: skip

    with TemporaryDirectory() as folder:
        Trainer(_bert(), arguments(folder, 6), train_dataset=_sentences()).train()
        resumed = Trainer(_bert(), arguments(folder, 12), train_dataset=_sentences(), eval_dataset=_sentences(16))
        result = resumed.train(resume_from_checkpoint=True)
        logged = [row["loss"] for row in resumed.state.log_history if "loss" in row]
        assert all(p.device.type == device.type for p in resumed.model.parameters())
        return {"loss": result.training_loss, "last logged": logged[-1], "test loss": resumed.evaluate()["eval_loss"]}


def generate(device: torch.device) -> Numbers:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    prompt = torch.tensor([[1, 5, 9, 2], [1, 7, 7, 3]], device=device)
    options = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(prompt, do_sample=False, **options)
    beams = model.generate(prompt, do_sample=False, num_beams=3, **options)
    weights = torch.arange(1.0, 17.0)
    return {"greedy": float((greedy.cpu() * weights).sum()), "beams": float((beams.cpu() * weights).sum())}


def accelerator(device: torch.device) -> Numbers:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerate = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=2)
    assert accelerate.device.type == device.type
    x, y = _classes()
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, optimizer, loader = accelerate.prepare(model, optimizer, loader)
    for _ in range(2):
        for a, b in loader:
            with accelerate.accumulate(model):
                loss = F.cross_entropy(model(a), b)
                accelerate.backward(loss)
                accelerate.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    gathered = accelerate.gather_for_metrics(model(x.to(accelerate.device)).argmax(1))
    return {"loss": loss.item(), "right": float((gathered.cpu() == y).sum())}


def metrics(device: torch.device) -> Numbers:
    import torchmetrics

    x, y = _classes()
    scores = (x @ torch.randn(16, 3, generator=torch.Generator().manual_seed(4))).softmax(1)
    found = {}
    collection = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
            "F1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
            "AUROC": torchmetrics.AUROC(task="multiclass", num_classes=3),
        }
    ).to(device)
    mean = torchmetrics.MeanMetric().to(device)
    for part in range(4):
        rows = slice(24 * part, 24 * part + 24)
        collection.update(scores[rows].to(device), y[rows].to(device))
        mean.update(scores[rows].max(1).values.to(device))
        lazytpu.mark_step()
    for name, value in collection.compute().items():
        found[name] = value.item()
    return {**found, "mean": mean.compute().item()}


def files(device: torch.device) -> Numbers:
    from safetensors.torch import load_file, load_model, save_file, save_model

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    with TemporaryDirectory() as name:
        path = str(Path(name) / "model.safetensors")
        save_model(model, path)
        other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        load_model(other, path, device=str(device))
        save_file({"weight": other[0].weight * 2}, path)
        loaded = load_file(path, device=str(device))["weight"]
        assert loaded.device.type == device.type
        return {"sum": loaded.sum().item(), "of": 2 * model[0].weight.sum().item()}


def lora(device: torch.device) -> Numbers:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_bert(), LoraConfig(r=4, lora_dropout=0.0, target_modules=["query", "value"])).to(device)
    rows = _sentences(16)
    batch = torch.stack([row["input_ids"] for row in rows]).to(device)
    labels = torch.tensor([row["labels"] for row in rows], device=device)
    loss = _fit(model, lambda: model(input_ids=batch, labels=labels).loss)
    merged = model.merge_and_unload()
    return {"loss": loss, "merged": merged(input_ids=batch, labels=labels).loss.item()}


def classifier(device: torch.device) -> Numbers:
    from skorch import NeuralNetClassifier

    x, y = _classes()
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)), criterion=nn.CrossEntropyLoss, max_epochs=4,
        lr=0.1, batch_size=32, train_split=None, verbose=0, device=str(device), iterator_train__shuffle=False,
    )  # fmt: skip
    net.fit(x.numpy(), y.numpy())
    return {"loss": net.history[-1]["train_loss"], "score": float(net.score(x.numpy(), y.numpy()))}


def regression(device: torch.device) -> Numbers:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 40)
    y = torch.sin(6 * x) + 0.1 * torch.cos(40 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x.to(device), y.to(device), likelihood).to(device)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()
    loss = _fit(model, lambda: -marginal(model(model.train_inputs[0]), model.train_targets), lr=0.1)
    model.eval()
    with torch.no_grad():
        return {"loss": loss, "mean": model(torch.tensor([0.25], device=device)).mean.item()}


def vision(device: torch.device) -> Numbers:
    import timm
    from timm.data import Mixup
    from timm.utils import ModelEmaV3

    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(4, 3, 32, 32, generator=draw), torch.tensor([0, 1, 2, 3])
    found = {}
    for name in ("resnet10t", "vit_tiny_patch16_224"):
        torch.manual_seed(0)
        sized = {"img_size": 32} if name.startswith("vit") else {}
        model = timm.create_model(name, num_classes=4, **sized).to(device)
        average = ModelEmaV3(model)
        images, labels = x.to(device), F.one_hot(y, 4).float().to(device)
        found[name] = _fit(model, partial(_loss, model, images, labels), lr=1e-4)
        average.update(model)
    mixed, _ = Mixup(mixup_alpha=1.0, num_classes=4, label_smoothing=0.1)(x.to(device), y.to(device))
    assert mixed.device.type == device.type
    return found


def augment(device: torch.device) -> Numbers:
    import kornia

    x = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(6)).to(device)
    blurred = kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5))
    turned = kornia.geometry.transform.rotate(x, torch.tensor([30.0, -45.0], device=device))
    edges = kornia.filters.sobel(x)
    return {
        "blur": blurred.std().item(),
        "rotate": turned.sum().item(),
        "sobel": edges.mean().item(),
        "lab": kornia.color.rgb_to_lab(x).std().item(),
    }


def shapes(device: torch.device) -> Numbers:
    from einops import einsum, rearrange, reduce
    from einops.layers.torch import Rearrange

    x = torch.arange(48.0, device=device).reshape(2, 4, 6)
    layer = nn.Sequential(Rearrange("b h w -> b (h w)"), nn.Linear(24, 2, bias=False)).to(device)
    nn.init.constant_(layer[1].weight, 0.5)
    return {
        "rearrange": rearrange(x, "b (h p) w -> b h (p w)", p=2)[1, 1, 3].item(),
        "reduce": reduce(x, "b h w -> h", "mean")[1].item(),
        "einsum": einsum(x, x, "b h w, b v w -> b h v").sum().item(),
        "layer": layer(x).sum().item(),
    }


def graph(device: torch.device) -> Numbers:
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([GCNConv(8, 16), GATConv(16, 8, heads=2), SAGEConv(16, 3)])

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, edges).relu()
            return x

    draw = torch.Generator().manual_seed(7)
    x = torch.randn(30, 8, generator=draw).to(device)
    edges = torch.randint(0, 30, (2, 90), generator=draw).to(device)
    labels = (torch.arange(30) % 3).to(device)
    torch.manual_seed(0)
    net = Net().to(device)
    loss = _fit(net, lambda: F.cross_entropy(net(x, edges), labels))
    return {"loss": loss, "pooled": global_mean_pool(net(x, edges), labels).sum().item()}


def shapes_of_torch(device: torch.device) -> Numbers:
    x = torch.arange(6.0, device=device).view(2, 3)
    return {"sum": (x.T @ x).sum().item(), "rows": float(x.unfold(1, 2, 1).shape[1])}


def average(device: torch.device) -> Numbers:
    """Copies, averages and functional calls that libraries are built from."""
    x, y = _classes()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
    averaged = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    a, b = x.to(device), y.to(device)
    loss = _fit(model, lambda: F.cross_entropy(model(a), b))
    averaged.update_parameters(model)
    return {"loss": loss, "averaged": F.cross_entropy(averaged(a), b).item()}


LIBRARIES = [
    Library("transformers", "Trainer: accumulation, logging, checkpoint, resume, evaluation", trainer,
            needs=("accelerate",)),
    Library("transformers", "generate: greedy and with beams", generate),
    Library("accelerate", "Accelerator: prepare, accumulate, clip, gather", accelerator),
    Library("torchmetrics", "Accuracy, F1Score, AUROC and MeanMetric over 4 batches", metrics),
    Library("safetensors", "save_model, load_model, save_file, load_file to the device", files),
    Library("peft", "LoRA on a small BERT, merged", lora, needs=("transformers",), rtol=1e-3),
    Library("skorch", "NeuralNetClassifier: fit and score", classifier),
    Library("gpytorch", "exact Gaussian process: training and posterior", regression, rtol=2e-3),
    Library("timm", "ResNet and ViT trained, ModelEmaV3, Mixup", vision, rtol=2e-2),
    Library("kornia", "blur, rotate, Sobel, color spaces", augment),
    Library("einops", "rearrange, reduce, einsum and a layer", shapes),
    Library("torch_geometric", "GCN, GAT and SAGE trained, pooling", graph, rtol=1e-3),
    Library("torch", "a product, a view", shapes_of_torch),
    Library("torch", "swa_utils.AveragedModel, copies", average, rtol=1e-3),
]  # fmt: skip
