"""What the times of `benchmarks.compare` should be: ratios of two columns, measured in turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """``field`` of a backend is at most ``limit`` times that of a peer, for one model.

    ``second_s`` is compared with the backend's own ``first_s``.
    """

    model: str
    backend: str
    field: str
    peer: str
    limit: float


# model: ((peer, limit) traced every step, (peer, limit) the whole step compiled)
_STEP: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "mlp": ({"torch_xla": 0.45}, {"jax": 1.1}),
    "deepmlp": ({"torch_xla": 0.2}, {"jax": 1.5, "eager": 1 / 6}),
    "cnn": ({"eager": 1.35, "jax": 0.5},) * 2,
    "resnet18": ({"eager": 1.5, "jax": 0.17},) * 2,
    "gpt": ({"eager": 0.95, "jax": 0.95},) * 2,
}
_BACKENDS = ("lazytpu", "lazytpu-compile")
_FIRST = 1.1
_SECOND = 0.2
_HOST = 1.0

GOALS = (
    *(
        Goal(model, backend, "step_ms", peer, limit)
        for model, both in _STEP.items()
        for backend, limits in zip(_BACKENDS, both, strict=True)
        for peer, limit in limits.items()
    ),
    *(Goal(model, backend, "first_s", "jax", _FIRST) for model in _STEP for backend in _BACKENDS),
    *(Goal(model, backend, "second_s", backend, _SECOND) for model in _STEP for backend in _BACKENDS),
    *(Goal(model, b, "host_ms", "eager", _HOST) for model in _STEP if model != "deepmlp" for b in _BACKENDS),
)
