"""Libraries of flows, probabilities, physics, time series, reinforcement learning and small networks."""

from __future__ import annotations

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def flows(device: torch.device) -> Numbers:
    from nflows import transforms
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow

    torch.manual_seed(0)
    spline = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
        3, 8, num_bins=4, tails="linear", tail_bound=2.0
    )
    steps = [transforms.ReversePermutation(3), transforms.MaskedAffineAutoregressiveTransform(3, 8), spline]
    flow = Flow(transforms.CompositeTransform(steps), StandardNormal([3])).to(device)
    x = drawn(0, 16, 3).to(device)
    loss = fit(flow, lambda: -flow.log_prob(x).mean())
    return {"loss": loss, "sampled": float(flow.sample(5).shape[0])}


def couplings(device: torch.device) -> Numbers:
    import normflows

    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers += [
            normflows.flows.AffineCouplingBlock(normflows.nets.MLP([1, 8, 2], init_zeros=True)),
            normflows.flows.Permute(2, mode="swap"),
        ]
    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(2), layers).to(device)
    x = drawn(0, 16, 2).to(device)
    return {"loss": fit(model, lambda: model.forward_kld(x)), "sampled": float(model.sample(4)[0].shape[0])}


def inference(device: torch.device) -> Numbers:
    """Fit a Bayesian regression with a guide, and predict."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Predictive, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = drawn(0, 20, 2).to(device)
    zero, one = torch.zeros(2, device=device), torch.ones(2, device=device)

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        slope = pyro.sample("slope", dist.Normal(zero, one).to_event(1))
        width = pyro.sample("width", dist.Gamma(one[0] * 2, one[0] * 2))
        with pyro.plate("rows", len(x)):
            seen: torch.Tensor = pyro.sample("seen", dist.Normal(x @ slope, width), obs=y)
        return seen

    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(x, x.sum(1)) for _ in range(40)]
    predicted = Predictive(model, guide=guide, num_samples=4)(x)["seen"]
    return {"falls": float(sum(losses[-10:]) < sum(losses[:10])), "predicted": float(predicted.shape[0])}


def rotations(device: torch.device) -> Numbers:
    """Train a tensor product that respects rotations."""
    from e3nn import o3

    torch.manual_seed(0)
    kinds = o3.Irreps("2x0e+1x1o")
    product = o3.FullyConnectedTensorProduct(kinds, o3.Irreps.spherical_harmonics(2), kinds).to(device)
    x, places = drawn(1, 6, 5).to(device), drawn(0, 6, 3).to(device).requires_grad_()
    harmonics = o3.spherical_harmonics([0, 1, 2], places, True, "component")
    (force,) = torch.autograd.grad(product(x, harmonics).square().sum(), places)
    loss = fit(product, lambda: product(x, harmonics.detach()).square().mean())
    return {"harmonics": harmonics.sum().item(), "force": force.abs().sum().item(), "loss": loss}


def stochastic(device: torch.device) -> Numbers:
    import torchsde

    class Decay(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(0.5))

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return -self.rate * y

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 0 * y

    found = {}
    for solve in (torchsde.sdeint, torchsde.sdeint_adjoint):
        field = Decay().to(device)
        y = solve(field, torch.ones(2, 1, device=device), torch.linspace(0, 1, 3, device=device), dt=0.25)
        y.sum().backward()
        assert field.rate.grad is not None
        found |= {solve.__name__: y.sum().item(), f"gradient of {solve.__name__}": field.rate.grad.item()}
    return found


def dictionaries(device: torch.device) -> Numbers:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    data = TensorDict({"a": drawn(0, 4, 3), "more": {"b": drawn(1, 4, 2)}}, [4]).to(device)
    torch.manual_seed(0)
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    net = TensorDictSequential(
        TensorDictModule(first, ["a"], ["hidden"]), TensorDictModule(second, ["hidden"], ["out"])
    ).to(device)
    with TemporaryDirectory() as folder:
        data.cpu().memmap(folder)
        loaded = TensorDict.load_memmap(folder).to(device)["more", "b"].sum().item()
    both = torch.stack([data, data]).apply(lambda x: x * 2)
    return {"out": net(data)["out"].sum().item(), "stacked": both["a"].sum().item(), "loaded": loaded}


def policies(device: torch.device) -> Numbers:
    """Compute advantages and the loss of PPO, keep them in a replay buffer, and act in an environment."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.envs import GymEnv
    from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[8]), NormalParamExtractor()).to(device)
    module = TensorDictModule(net, ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)
    critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[8]).to(device), in_keys=["observation"])
    ended = torch.zeros(2, 5, 1, dtype=torch.bool)
    after = {"observation": drawn(1, 2, 5, 3), "reward": drawn(2, 2, 5, 1), "done": ended, "terminated": ended.clone()}
    seen = {"observation": drawn(0, 2, 5, 3), "action": drawn(3, 2, 5, 1).tanh() * 0.9}
    data = TensorDict({**seen, "action_log_prob": drawn(4, 2, 5) * 0.1, "next": after}, [2, 5]).to(device)
    data = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)
    loss = ClipPPOLoss(actor, critic)(data.reshape(-1))
    (loss["loss_objective"] + loss["loss_critic"]).backward()
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, device=device), batch_size=4)
    buffer.extend(data.reshape(-1).detach())
    assert buffer.sample()["observation"].device.type == device.type
    acted = GymEnv("Pendulum-v1", device=device).rollout(4, actor)
    return {
        "objective": loss["loss_objective"].item(), "critic": loss["loss_critic"].item(),
        "advantage": data["advantage"].sum().item(), "acted": float(acted.shape[0]),
    }  # fmt: skip


def agents_of_tianshou(device: torch.device) -> Numbers:
    import gymnasium
    from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.torch_utils import policy_within_training_step

    environment = gymnasium.make("CartPole-v1")
    net = Net(state_shape=(4,), action_shape=2, hidden_sizes=[16]).to(device)
    policy = DiscreteQLearningPolicy(
        model=net, action_space=environment.action_space, observation_space=environment.observation_space
    )
    optimizer = AdamOptimizerFactory(lr=1e-3)
    agent: Any = DQN(policy=policy, optim=optimizer, gamma=0.9, target_update_freq=10).to(device)
    several = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    buffer = VectorReplayBuffer(200, 2)
    collector = Collector(agent, several, buffer)
    collector.reset()
    collector.collect(n_step=40)
    with policy_within_training_step(agent.policy):
        return {"learned": float(agent.update(buffer, 16).loss >= 0)}


def series(device: torch.device) -> Numbers:
    """Train a Temporal Fusion Transformer, and predict with it."""
    import lightning
    import numpy as np
    import pandas
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    values = np.sin(np.arange(60) / 3).astype("float32") + 2
    rows = pandas.DataFrame({"t": [*range(30)] * 2, "g": ["a"] * 30 + ["b"] * 30, "v": values})
    data = TimeSeriesDataSet(
        rows, "t", "v", ["g"], max_encoder_length=8, max_prediction_length=3, time_varying_unknown_reals=["v"],
        time_varying_known_reals=["t"], static_categoricals=["g"],
    )  # fmt: skip
    loader = data.to_dataloader(batch_size=8, shuffle=False, num_workers=0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "attention_head_size": 1, "hidden_continuous_size": 4, "dropout": 0.0}
    model = TemporalFusionTransformer.from_dataset(
        data, loss=QuantileLoss(), learning_rate=1e-2, log_interval=0, **sizes
    )
    where = {"accelerator": "cpu" if device.type == "cpu" else "auto", "devices": 1, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(max_epochs=1, limit_train_batches=3, **where, **quiet).fit(model, loader)
    return {"predicted": float(model.predict(loader, trainer_kwargs=where).sum())}


def integers(device: torch.device) -> Numbers:
    """Quantize a small network in two ways, on the device and before it is moved there; train with 8-bit states."""
    from torchao.optim import AdamW8bit
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()

    x, found = drawn(0, 4, 64).to(device), {}
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        for when in ("before", "after"):
            model = net().to(device) if when == "after" else net()
            quantize_(model, config)
            with torch.no_grad():
                found[f"{type(config).__name__.removesuffix('Config')}, {when}"] = model.to(device)(x).sum().item()
    torch.manual_seed(0)
    layer = nn.Linear(64, 128, bias=False).to(device)
    return {**found, "AdamW8bit": fit(layer, lambda: layer(x).square().mean(), make=lambda p: AdamW8bit(p, lr=1e-2))}


def small_parts(device: torch.device) -> Numbers:
    """Average a model with EMA, rotate queries, quantize vectors, step with Lion."""
    from ema_pytorch import EMA
    from lion_pytorch import Lion
    from rotary_embedding_torch import RotaryEmbedding
    from vector_quantize_pytorch import FSQ, VectorQuantize

    torch.manual_seed(0)
    layer, vectors = nn.Linear(8, 8).to(device), VectorQuantize(dim=8, codebook_size=16, kmeans_init=False).to(device)
    levels, turn = FSQ([5, 5, 5], dim=8).to(device), RotaryEmbedding(dim=8).to(device)
    average, x = EMA(layer, beta=0.9, update_every=1, update_after_step=0), drawn(0, 2, 16, 8).to(device)
    loss = fit(layer, lambda: layer(x).square().mean(), make=lambda p: Lion(p, lr=1e-2))
    average.update()
    average.update()
    quantized, _, committed = vectors(x)
    return {
        "Lion": loss, "EMA": average(x).sum().item(), "turned": turn.rotate_queries_or_keys(x[:, None]).sum().item(),
        "vectors": quantized.sum().item() + committed.sum().item(), "levels": levels(x)[0].sum().item(),
    }  # fmt: skip


def recipes(device: torch.device) -> Numbers:
    """Train by timm's own optimizers, with decay by layer, schedules, clipping and an average."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV2, dispatch_clip_grad

    small = {"img_size": 32, "depth": 2}
    tried: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("vit_tiny_patch16_224", "adamw", small, {"layer_decay": 0.75}), ("convnext_atto", "lamb", {}, {}),
        ("vit_tiny_patch16_224", "lion", small, {}), ("vit_tiny_patch16_224", "adan", small, {}),
    ]  # fmt: skip
    x, y, found = drawn(0, 2, 3, 32, 32).to(device), torch.tensor([0, 1], device=device), {}
    for name, kind, sizes, options in tried:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=4, **sizes).to(device)
        optimizer = create_optimizer_v2(model, opt=kind, lr=1e-3, weight_decay=0.05, **options)
        schedule, _ = create_scheduler_v2(optimizer, num_epochs=3, warmup_epochs=1)
        average, criterion = ModelEmaV2(model, 0.9), LabelSmoothingCrossEntropy()
        for epoch in range(2):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            dispatch_clip_grad(model.parameters(), 1.0, mode="agc" if kind == "lamb" else "norm")
            optimizer.step()
            average.update(model)
            schedule.step(epoch + 1)
        found[kind] = F.cross_entropy(average.module(x), y).item()
    return found


def counted(device: torch.device) -> Numbers:
    """Count parameters and products."""
    import thop
    from torchinfo import summary

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).to(device)
    table = summary(model, (2, 3, 8, 8), verbose=0, device=device)
    products, parameters = thop.profile(copy.deepcopy(model), (drawn(0, 1, 3, 8, 8).to(device),), verbose=False)
    return {"torchinfo": table.total_mult_adds, "thop": products, "parameters": parameters}


LIBRARIES = [
    Library("nflows", "autoregressive flows and splines trained, sampled", flows, rtol=1e-3),
    Library("normflows", "coupling layers trained, sampled", couplings, rtol=1e-3),
    Library("pyro-ppl", "SVI of a regression with an automatic guide, predictions", inference),
    Library("e3nn", "spherical harmonics, a tensor product trained, forces", rotations, rtol=1e-3),
    Library("torchsde", "sdeint, and with the adjoint", stochastic, rtol=1e-3),
    Library("tensordict", "modules, stacks, memory-mapped files", dictionaries),
    Library("torchrl", "PPO's loss, GAE, a replay buffer, a rollout", policies, rtol=1e-3, needs=("gymnasium",)),
    Library("tianshou", "DQN on two environments", agents_of_tianshou, needs=("gymnasium",)),
    Library("pytorch-forecasting", "a Temporal Fusion Transformer trained, predictions", series, rtol=1e-2),
    Library("torchao", "int8 weights and products, AdamW8bit", integers, rtol=1e-3),
    Library("vector-quantize-pytorch", "with EMA, rotary embeddings and Lion of lucidrains", small_parts, rtol=1e-3,
            needs=("ema-pytorch", "lion-pytorch", "rotary-embedding-torch")),
    Library("timm", "AdamW with decay by layer, LAMB, Lion and Adan; schedules, clipping, EMA", recipes, rtol=1e-3),
    Library("torchinfo", "with thop: parameters and products counted", counted, needs=("thop",)),
]  # fmt: skip
