"""Libraries of one field each: language, vision, speech, medicine, Bayesian models, reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def decoding(device: torch.device) -> Numbers:
    """Generate with each cache and strategy whose tokens do not depend on random numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(layers: int) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        config = LlamaConfig(vocab_size=64, num_hidden_layers=layers, max_position_embeddings=64, **sizes)
        return LlamaForCausalLM(config).eval().to(device)

    prompt, padded = torch.tensor([[1, 5, 9, 2], [1, 7, 7, 3]]), torch.tensor([[0, 0, 5, 9], [1, 7, 7, 3]])
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "beams": {"num_beams": 3},
        "padded": {"padding": True},
        "assisted": {"assistant_model": model(1)},
        "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    }
    found, main = {}, model(2)
    for cache in (None, "static"):
        for name, given in ways.items():
            options = dict(given)
            ids = padded if options.pop("padding", False) else prompt[:1] if "assistant_model" in options else prompt
            tokens = main.generate(
                ids.to(device), attention_mask=(ids != 0).long().to(device), max_new_tokens=12, do_sample=False,
                pad_token_id=0, eos_token_id=None, cache_implementation=cache, **options,
            ).cpu()  # fmt: skip
            found[f"{name}, {cache or 'growing'}"] = float((tokens * torch.arange(1.0, tokens.shape[1] + 1)).sum())
    return found


def lightning(device: torch.device) -> Numbers:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    data = torch.utils.data.TensorDataset(drawn(0, 64, 8), torch.arange(64) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=16)

    def trainer(epochs: int, precision: Any, folder: str) -> Any:
        return L.Trainer(
            max_epochs=epochs, accelerator="cpu" if device.type == "cpu" else "auto", devices=1, precision=precision,
            gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip

    found = {}
    for precision in ("32", "bf16-mixed"):
        torch.manual_seed(0)
        module = Module()
        with TemporaryDirectory() as folder:
            first = trainer(2, precision, folder)
            first.fit(module, loader, loader)
            path = str(Path(folder) / "saved.ckpt")
            first.save_checkpoint(path)
            resumed = trainer(3, precision, folder)
            resumed.fit(module, loader, loader, ckpt_path=path)
            found[precision] = resumed.callback_metrics["test"].item()
    return found


def x_transformers(device: torch.device) -> Numbers:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True, ff_glu=True, use_rmsnorm=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)).to(device)
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    loss = fit(model, lambda: model(ids))
    tokens = model.eval().generate(ids[:, :4], 10, temperature=0.0).cpu()
    return {"loss": loss, "tokens": float((tokens * torch.arange(1.0, 11.0)).sum())}


def vit(device: torch.device) -> Numbers:
    from vit_pytorch import SimpleViT, ViT

    x, y, found = drawn(0, 2, 3, 32, 32).to(device), torch.tensor([0, 1], device=device), {}
    for kind in (ViT, SimpleViT):
        torch.manual_seed(0)
        model = kind(image_size=32, patch_size=8, num_classes=4, dim=32, depth=2, heads=2, mlp_dim=64).to(device)
        found[kind.__name__] = fit(model, lambda model=model: F.cross_entropy(model(x), y))
    return found


def diffusion(device: torch.device) -> Numbers:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    torch.manual_seed(0)
    net = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    model = GaussianDiffusion(net, image_size=16, timesteps=20, sampling_timesteps=3).to(device)
    x, noise, t = drawn(0, 2, 3, 16, 16).to(device), drawn(1, 2, 3, 16, 16).to(device), torch.tensor([3, 7])
    loss = fit(model, lambda: model.p_losses(x, t.to(device), noise=noise), steps=2)
    return {"loss": loss, "samples": float(torch.isfinite(model.sample(batch_size=1)).all())}


def schedulers(device: torch.device) -> Numbers:
    from diffusers import DDIMScheduler, DDPMPipeline, DPMSolverMultistepScheduler, EulerDiscreteScheduler, UNet2DModel

    torch.manual_seed(0)
    net = UNet2DModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    found = {}
    for kind in (DDIMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler):
        scheduler = kind(num_train_timesteps=50)
        scheduler.set_timesteps(4, device=device)
        x = drawn(0, 1, 3, 16, 16).to(device) * scheduler.init_noise_sigma
        with torch.no_grad():
            for t in scheduler.timesteps:
                x = scheduler.step(net(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
        found[kind.__name__] = x.abs().mean().item()
    pipeline = DDPMPipeline(net, DDIMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    draw = torch.Generator(device=device).manual_seed(0)
    pictures = pipeline(batch_size=1, num_inference_steps=2, generator=draw, output_type="np").images
    return {**found, "pipeline": float(pictures.shape[1])}


def embeddings(device: torch.device) -> Numbers:
    from pytorch_metric_learning import losses, miners

    x, y, found = drawn(0, 24, 8).to(device), (torch.arange(24) % 4).to(device), {}
    for loss in (losses.TripletMarginLoss(), losses.NTXentLoss(), losses.MultiSimilarityLoss(), losses.SupConLoss()):
        torch.manual_seed(0)
        model, miner = nn.Linear(8, 8).to(device), miners.MultiSimilarityMiner()
        found[type(loss).__name__] = fit(model, lambda: loss(model(x), y, miner(model(x), y)))  # noqa: B023
    return found


def attributions(device: torch.device) -> Numbers:
    from captum.attr import DeepLift, IntegratedGradients, LayerGradCam, Occlusion

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).to(device)
    x = drawn(0, 2, 1, 8, 8).to(device).requires_grad_()
    return {
        "gradients": IntegratedGradients(model).attribute(x, target=1, n_steps=8).abs().sum().item(),
        "DeepLift": DeepLift(model).attribute(x, torch.zeros_like(x), target=1).abs().sum().item(),
        "occlusion": Occlusion(model).attribute(x, (1, 4, 4), target=1, strides=4).abs().sum().item(),
        "GradCAM": LayerGradCam(model, model[0]).attribute(x, target=1).sum().item(),
    }


def segmentation(device: torch.device) -> Numbers:
    import segmentation_models_pytorch as smp

    x, y, found = drawn(0, 2, 3, 64, 64).to(device), (drawn(1, 2, 1, 64, 64) > 0).float().to(device), {}
    dice = smp.losses.DiceLoss("binary")
    for kind in (smp.Unet, smp.FPN):
        torch.manual_seed(0)
        model = kind("resnet18", encoder_weights=None, classes=1).to(device).eval()
        found[kind.__name__] = fit(model, lambda model=model: dice(model(x), y), steps=2)
    return found


def medicine(device: torch.device) -> Numbers:
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from monai.transforms import GaussianSmooth, Resize, Rotate

    torch.manual_seed(0)
    model = UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1).to(device)
    x, y = drawn(0, 2, 1, 16, 16, 16).to(device), (drawn(1, 2, 1, 16, 16, 16) > 0).float().to(device)
    dice = DiceCELoss(to_onehot_y=True, softmax=True)
    loss = fit(model, lambda: dice(model(x), y), steps=2)
    with torch.no_grad():
        windows = sliding_window_inference(x, (8, 8, 8), 2, model.eval()).abs().sum().item()
    turned = Rotate(0.3)(GaussianSmooth(1.0)(Resize((8, 8))(x[0, :, 0])))
    return {"loss": loss, "windows": windows, "transforms": float(torch.as_tensor(turned).sum())}


def speech(device: torch.device) -> Numbers:
    import torchaudio

    x = drawn(0, 1, 4000).to(device)
    torch.manual_seed(0)
    conformer = torchaudio.models.Conformer(16, 2, 32, 2, 3).to(device).eval()
    out, _ = conformer(drawn(1, 2, 10, 16).to(device), torch.tensor([10, 7]).to(device))
    return {
        "mel": torchaudio.transforms.MelSpectrogram(n_mels=20).to(device)(x).sum().item(),
        "MFCC": torchaudio.transforms.MFCC(n_mfcc=10).to(device)(x).abs().sum().item(),
        "resample": torchaudio.functional.resample(x, 16000, 8000).abs().sum().item(),
        "Conformer": out.abs().sum().item(),
    }


def bayesian(device: torch.device) -> Numbers:
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None].to(device)
    model = SingleTaskGP(x, torch.sin(6 * x))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    at = torch.tensor([[0.33]], dtype=torch.float64, device=device)
    return {"mean": model.posterior(at).mean.item()}


def equations(device: torch.device) -> Numbers:
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            nn.init.constant_(self.layer.weight, -0.3)
            nn.init.zeros_(self.layer.bias)

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(y)
            return out

    field, start, t = Field().to(device), torch.ones(3, 2, device=device), torch.linspace(0, 1, 4, device=device)
    end = odeint_adjoint(field, start, t, method="rk4").sum()
    end.backward()
    grad = field.layer.weight.grad
    assert grad is not None
    return {"end": end.item(), "gradient": grad.sum().item(), "steps": odeint(field, start, t).sum().item()}


def optimizers(device: torch.device) -> Numbers:
    import schedulefree

    x, y, found = drawn(0, 16, 8).to(device), (torch.arange(16) % 3).to(device), {}
    for kind in (schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree):
        torch.manual_seed(0)
        model = nn.Linear(8, 3).to(device)
        optimizer = kind(model.parameters(), lr=0.05)
        optimizer.train()
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.eval()
        found[kind.__name__] = F.cross_entropy(model(x), y).item()
    return found


def detector(device: torch.device) -> Numbers:
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG

    torch.manual_seed(0)
    model = DetectionModel("yolov8n.yaml", nc=3, verbose=False).to(device)
    model.args = DEFAULT_CFG
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.5, 0.5]])
    batch = {"img": drawn(0, 2, 3, 64, 64), "cls": torch.arange(3.0)[:, None], "bboxes": boxes}
    batch["batch_idx"] = torch.tensor([0.0, 0.0, 1.0])
    loss, _ = model.train()({name: part.to(device) for name, part in batch.items()})
    loss.sum().backward()
    return {"loss": loss.sum().item()}


def agents(device: torch.device) -> Numbers:
    import gymnasium
    from stable_baselines3 import A2C, PPO

    for kind, sizes in ((PPO, {"n_steps": 32, "batch_size": 16, "n_epochs": 2}), (A2C, {"n_steps": 8})):
        policy = {"net_arch": [16]}
        agent = kind("MlpPolicy", gymnasium.make("CartPole-v1"), seed=0, device=device, policy_kwargs=policy, **sizes)
        agent.learn(64)
        with TemporaryDirectory() as folder:
            agent.save(Path(folder) / "agent.zip")
            loaded = kind.load(Path(folder) / "agent.zip", device=device)
        assert next(loaded.policy.parameters()).device.type == device.type
    return {"saved and loaded": 2.0}


LIBRARIES = [
    Library("transformers", "generate: greedy, beams, padding, assisted; growing and static cache", decoding),
    Library("lightning", "Trainer: fit, clip, checkpoint, resume, bf16-mixed", lightning, rtol=2e-2),
    Library("x-transformers", "a decoder trained, greedy decoding", x_transformers),
    Library("vit-pytorch", "ViT and SimpleViT trained", vit),
    Library("denoising-diffusion-pytorch", "trained, sampled", diffusion, rtol=1e-3),
    Library("diffusers", "U-Net with three schedulers, a pipeline with a generator", schedulers, rtol=1e-3),
    Library("pytorch-metric-learning", "four losses with a miner", embeddings, rtol=1e-3),
    Library("captum", "attributions of a small CNN", attributions, rtol=1e-3),
    Library("segmentation-models-pytorch", "Unet and FPN trained", segmentation, rtol=1e-3),
    Library("monai", "3D UNet trained, sliding windows, transforms", medicine, rtol=1e-3),
    Library("torchaudio", "spectra, resampling, a Conformer", speech, rtol=1e-3),
    Library("botorch", "a Gaussian process fitted", bayesian, rtol=1e-3),
    Library("torchdiffeq", "odeint, and with the adjoint", equations, rtol=1e-3),
    Library("schedulefree", "AdamW and SGD", optimizers),
    Library("ultralytics", "loss and gradients of YOLOv8n", detector, rtol=1e-3),
    Library("stable-baselines3", "PPO and A2C on CartPole, saved and loaded", agents, needs=("gymnasium",)),
]  # fmt: skip
