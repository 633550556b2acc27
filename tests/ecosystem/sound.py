"""Libraries of sound and speech."""

from __future__ import annotations

import torch
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def speakers(device: torch.device) -> Numbers:
    """Train a small network that tells speakers apart on filter banks."""
    from speechbrain.lobes.features import MFCC, Fbank
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    torch.manual_seed(0)
    sound = drawn(0, 2, 8000).to(device)
    bank = Fbank(n_mels=24).to(device)(sound).detach()
    model = ECAPA_TDNN(
        24, channels=[16] * 4 + [48], kernel_sizes=[5, 3, 3, 3, 1], dilations=[1, 2, 3, 4, 1], attention_channels=16,
        lin_neurons=8,
    ).to(device)  # fmt: skip
    found = {"bank": bank.mean().item(), "cepstrum": MFCC().to(device)(sound).abs().mean().item()}
    return found | {"loss": fit(model, lambda: model(bank).square().mean())}


def transcripts(device: torch.device) -> Numbers:
    """Decode with a small Whisper of random weights, greedily and with beams."""
    import whisper
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(80, 100, 32, 2, 1, 51865, 32, 32, 2, 1)).eval()
    for seed, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
    model = model.to(device)
    bands = whisper.pad_or_trim(whisper.log_mel_spectrogram(drawn(0, 32000).to(device)), 200)
    common = {"language": "en", "fp16": False, "sample_len": 5}
    greedy = whisper.decode(model, bands, whisper.DecodingOptions(without_timestamps=True, **common))
    beams = whisper.decode(model, bands, whisper.DecodingOptions(beam_size=3, **common))
    ends = {"greedy": greedy.tokens, "beams": beams.tokens}
    found = {name: float(sum(i * token for i, token in enumerate(tokens, 1))) for name, tokens in ends.items()}
    return found | {"bands": bands.mean().item(), "log-probability": greedy.avg_logprob}


def filters(device: torch.device) -> Numbers:
    """Filter and resample, and compute losses between sounds."""
    import auraloss
    import julius
    from asteroid_filterbanks import make_enc_dec

    x, y = drawn(0, 2, 1, 4000).to(device).requires_grad_(), drawn(1, 2, 1, 4000).to(device)
    sizes = {"fft_sizes": [128, 64], "hop_sizes": [32, 16], "win_lengths": [128, 64]}
    losses = {
        "spectra": auraloss.freq.MultiResolutionSTFTLoss(**sizes),
        "distortion": auraloss.time.SISDRLoss(),
        "cosh": auraloss.time.LogCoshLoss(),
    }
    found = {
        "low": julius.lowpass_filter(x, 0.1).abs().mean().item(),
        "resampled": julius.resample_frac(x, 4, 3).abs().mean().item(),
        "bands": julius.split_bands(x, 8000, 4).abs().mean().item(),
    }
    for name, loss in losses.items():
        value = loss.to(device)(x, y)
        (gradient,) = torch.autograd.grad(value, x)
        found |= {name: value.item(), f"gradient of {name}": gradient.abs().sum().item()}
    encode, decode = (part.to(device) for part in make_enc_dec("stft", 64, 64))
    return found | {"decoded": decode(encode(x)).abs().mean().item()}


def spectra(device: torch.device) -> Numbers:
    from nnAudio import features

    sound = drawn(0, 2, 4000).to(device)
    layers = {
        "STFT": features.STFT(n_fft=128, hop_length=64, verbose=False),
        "mel": features.MelSpectrogram(sr=8000, n_fft=256, n_mels=20, hop_length=128, verbose=False),
        "CQT": features.CQT1992v2(sr=8000, hop_length=128, fmin=200, n_bins=24, verbose=False),
    }
    return {name: layer.to(device)(sound).abs().mean().item() for name, layer in layers.items()}


LIBRARIES = [
    Library("speechbrain", "filter banks, ECAPA-TDNN trained", speakers, rtol=1e-3),
    Library("openai-whisper", "decoded greedily and with beams", transcripts, rtol=1e-3),
    Library("julius", "with auraloss and asteroid-filterbanks: filters, resampling, losses", filters, rtol=1e-3,
            needs=("auraloss", "asteroid-filterbanks")),
    Library("nnAudio", "STFT, mel and constant-Q spectra", spectra, rtol=1e-3),
]  # fmt: skip
