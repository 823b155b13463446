"""Sound for the speech network: vowels, noise and silence made here, and the chunks in which silero-vad takes them.

Two rules. Everything follows from a seed. Samples are float32 within +-1 at 16 kHz; a chunk is a frame of 512 samples
with the 64 samples before it.
"""

import math

import numpy as np

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 512
CONTEXT_SAMPLES = 64

# One vowel: its pitch falls through this range around a centre drawn from the spread.
_PITCH_HZ, _PITCH_SPREAD, _PITCH_FALL = 120.0, 0.25, 0.2
_VOWEL_S, _ATTACK_S, _DECAY_S, _GAP_S = 0.15, 0.02, 0.05, 0.03
# Two poles at 0 Hz give the glottis its falling spectrum.
_GLOTTIS_BANDWIDTH_HZ = 300.0
_FORMANT_BANDWIDTHS_HZ = (60.0, 80.0, 100.0)
# First three formants of a man's vowels (Peterson and Barney, 1952): "father", "beet", "boot", "bet", "bought".
_VOWELS_HZ = ((730.0, 1090.0, 2440.0), (270.0, 2290.0, 3010.0), (300.0, 870.0, 2240.0), (530.0, 1840.0, 2480.0), (570.0, 840.0, 2410.0))

_ROUND_S = (("silence", 0.3), ("speech", 1.62), ("silence", 0.7), ("noise", 1.4))


def speech_and_noise(seconds: float = 17.0, seed: int = 3) -> np.ndarray:
    """Make 0.3 s of silence, 1.62 s of vowels, 0.7 s of silence and 1.4 s of white noise, over and over for `seconds`.

    Returns float32[samples].
    """
    generator = np.random.default_rng(seed)
    makers = {
        "silence": lambda duration_s: np.zeros(round(duration_s * SAMPLE_RATE_HZ)),
        "speech": lambda duration_s: _vowels(duration_s, generator),
        "noise": lambda duration_s: 0.02 * generator.standard_normal(round(duration_s * SAMPLE_RATE_HZ)),
    }
    rounds = math.ceil(seconds / sum(duration_s for _, duration_s in _ROUND_S))
    parts = [makers[kind](duration_s) for _ in range(rounds) for kind, duration_s in _ROUND_S]
    return np.concatenate(parts)[: round(seconds * SAMPLE_RATE_HZ)].astype(np.float32)


def chunk_kinds(chunks: int) -> list[str]:
    """What stands in the middle of each chunk of `speech_and_noise`: silence, speech or noise."""
    ends_s = np.cumsum([duration_s for _, duration_s in _ROUND_S])
    middles_s = (np.arange(chunks) + 0.5) * FRAME_SAMPLES / SAMPLE_RATE_HZ
    return [_ROUND_S[index][0] for index in np.searchsorted(ends_s, middles_s % ends_s[-1], side="right")]


def silero_chunks(samples: np.ndarray) -> np.ndarray:
    """Cut float32[samples] into float32[T, 576]; the last frame that is not full is left out, zeros precede the first."""
    frames = samples[: samples.size // FRAME_SAMPLES * FRAME_SAMPLES].astype(np.float32).reshape(-1, FRAME_SAMPLES)
    before = np.zeros((frames.shape[0], CONTEXT_SAMPLES), np.float32)
    before[1:] = frames[:-1, -CONTEXT_SAMPLES:]
    return np.concatenate((before, frames), axis=1)


def _vowels(seconds: float, generator: np.random.Generator) -> np.ndarray:
    """A row of vowels with short gaps, each a pulse train through four resonators, fading in and out."""
    samples = round(_VOWEL_S * SAMPLE_RATE_HZ)
    position_s = np.arange(samples) / SAMPLE_RATE_HZ
    fade = np.minimum(1.0, np.minimum(position_s / _ATTACK_S, position_s[::-1] / _DECAY_S))
    row = []
    for _ in range(round(seconds / (_VOWEL_S + _GAP_S))):
        centre_hz = _PITCH_HZ * generator.uniform(1 - _PITCH_SPREAD, 1 + _PITCH_SPREAD)
        pitch_hz = centre_hz * np.linspace(1 + _PITCH_FALL, 1 - _PITCH_FALL, samples)
        pulses = np.diff(np.floor(np.cumsum(pitch_hz / SAMPLE_RATE_HZ)), prepend=0.0)
        wave = _resonate(pulses, 0.0, _GLOTTIS_BANDWIDTH_HZ)
        for formant_hz, bandwidth_hz in zip(_VOWELS_HZ[generator.integers(len(_VOWELS_HZ))], _FORMANT_BANDWIDTHS_HZ):
            wave = _resonate(wave, formant_hz, bandwidth_hz)
        row += [0.8 * fade * wave / np.abs(wave).max(), np.zeros(round(_GAP_S * SAMPLE_RATE_HZ))]
    return np.concatenate(row)


def _resonate(wave: np.ndarray, centre_hz: float, bandwidth_hz: float) -> np.ndarray:
    """Filter with two poles: y[n] = x[n] + 2 r cos(w) y[n-1] - r^2 y[n-2]."""
    radius = np.exp(-np.pi * bandwidth_hz / SAMPLE_RATE_HZ)
    first, second = 2 * radius * np.cos(2 * np.pi * centre_hz / SAMPLE_RATE_HZ), -radius * radius
    filtered = np.empty_like(wave)
    before = before_that = 0.0
    for n, sample in enumerate(wave):
        filtered[n] = sample + first * before + second * before_that
        before, before_that = filtered[n], before
    return filtered
