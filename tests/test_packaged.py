"""Networks of installed packages, the tasks they are for, and the float64 layers that both are measured against.

What the tests of a package expect comes from the package's own code, or from torch and Keras (`make test-peers`).
"""

import sys
import types
from importlib import import_module

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.configs import ROOT
from sharp.model.arithmetic import Activation
from sharp.model.errors import NetworkError
from sharp.model.layer import Layer
from sharp.model.network import load_network, packaged_file
from sharp.model.pytorch_reader import read_tensors
from sharp.model.sequence import Task
from sharp.sim import digits, packaged
from sharp.sim.packaged import float_recurrent
from sharp.sim.sound import speech_and_noise

# Cell, inputs and hidden size of each level, in each direction.
NETWORKS = {
    "ao-compensation": [[("gru", 16, 32)]],
    "g2p-en": [[("gru", 256, 256)], [("gru", 256, 256)]],
    "g2pm": [[("lstm", 64, 32)] * 2],
    "resemblyzer": [[("lstm", 40, 256)], [("lstm", 256, 256)], [("lstm", 256, 256)]],
    "shakkala": [[("lstm", 288, 288)] * 2, [("lstm", 576, 144)] * 2, [("lstm", 288, 96)] * 2],
    "shakkala-gru": [[("gru", 256, 256)] * 2],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_packaged_network_has_the_layers_of_its_source(name):
    network = load_network(name)
    assert [[(shape.cell, shape.inputs, shape.hidden) for shape in level] for level in network.levels] == NETWORKS[name]
    assert [layer.shape for layer in network.layers] == list(network.shapes)
    assert network.name == name and network.steps is None
    assert [shape.reverse for shape in network.shapes] == [bool(place) for level in NETWORKS[name] for place in range(len(level))]


def test_conventions_of_packaged_networks_are_told_apart():
    hard = (Activation.HARD_SIGMOID_FIFTH, Activation.TANH)
    for name, activations, resets_after in (("shakkala", (*hard, Activation.TANH), True), ("shakkala-gru", hard, False)):
        for shape in load_network(name).shapes:
            assert shape.activations == activations and shape.reset_after == resets_after
    (layer,) = load_network("ao-compensation").layers
    assert layer.reset_after and np.any(layer.candidate_bias != 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_package_that_is_not_installed_says_how_to_get_it(tmp_path, name):
    description = yaml.safe_load((ROOT / "networks" / f"{name}.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "network.yaml"
    path.write_text(yaml.safe_dump(description | {"package": "no_such_package_here"}), encoding="utf-8")
    with pytest.raises(NetworkError, match=rf"network {name}: needs .* package no_such_package_here; get it with `pip install"):
        load_network(str(path))


def test_loading_imports_none_of_the_packages():
    for name in NETWORKS:
        load_network(name)
    assert not {"g2p_en", "resemblyzer", "ao_compensation_model", "shakkala"} & set(sys.modules)


NAMES = {
    Activation.SIGMOID: ("Sigmoid", 0.0),
    Activation.TANH: ("Tanh", 0.0),
    Activation.RELU: ("Relu", 0.0),
    Activation.HARD_SIGMOID_FIFTH: ("HardSigmoid", 0.2),
    Activation.HARD_SIGMOID_SIXTH: ("HardSigmoid", 1 / 6),
}
GATES = st.sampled_from([Activation.SIGMOID, Activation.HARD_SIGMOID_FIFTH, Activation.HARD_SIGMOID_SIXTH])
OUTPUTS = st.sampled_from([Activation.TANH, Activation.RELU])


@st.composite
def layers(draw):
    """Layers of all that ONNX has: it knows no projections and no identity."""
    cell = draw(st.sampled_from(["lstm", "gru", "rnn"]))
    inputs, hidden = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    rows = {"lstm": 4, "gru": 3, "rnn": 1}[cell] * hidden

    def tensor(*shape):
        return generator.uniform(-1.5, 1.5, shape).astype(np.float32)

    reset_after, lstm = draw(st.booleans()), cell == "lstm"
    counts = {"lstm": (GATES, OUTPUTS, OUTPUTS), "gru": (GATES, OUTPUTS), "rnn": (OUTPUTS,)}
    return Layer(
        name="drawn",
        cell=cell,
        input_kernel=tensor(rows, inputs),
        recurrent_kernel=tensor(rows, hidden),
        bias=tensor(rows) if draw(st.booleans()) else None,
        candidate_bias=tensor(hidden) if cell == "gru" and reset_after and draw(st.booleans()) else None,
        peepholes=tensor(3, hidden) if lstm and draw(st.booleans()) else None,
        coupled=lstm and draw(st.booleans()),
        reverse=draw(st.booleans()),
        reset_after=reset_after or cell != "gru",
        clip=draw(st.sampled_from([None, 0.7])),
        activations=tuple(draw(each) for each in counts[cell]),
    )


def onnx_outputs(layer, x, h, c):
    """The layer as an ONNX node in onnxruntime."""
    kind, gates = {"lstm": ("LSTM", (0, 3, 1, 2)), "gru": ("GRU", (0, 1, 2)), "rnn": ("RNN", (0,))}[layer.cell]

    def ordered(rows):
        blocks = np.split(rows, len(gates))
        return np.concatenate([blocks[gate] for gate in gates])

    rows = len(layer.input_kernel)
    bias = np.zeros(rows, np.float32) if layer.bias is None else ordered(layer.bias)
    recurrent_bias = np.zeros(rows, np.float32)
    if layer.candidate_bias is not None:
        recurrent_bias[2 * layer.hidden :] = layer.candidate_bias
    given = {"X": x[:, None], "W": ordered(layer.input_kernel)[None], "R": ordered(layer.recurrent_kernel)[None]}
    given |= {"B": np.concatenate((bias, recurrent_bias))[None], "initial_h": h[None, None]}
    names = ["X", "W", "R", "B", "", "initial_h"]
    attributes = {"hidden_size": layer.hidden, "direction": "reverse" if layer.reverse else "forward"}
    attributes["activations"] = [NAMES[each][0] for each in layer.activations]
    attributes["activation_alpha"] = [NAMES[each][1] for each in layer.activations]
    attributes["activation_beta"] = [0.5] * len(layer.activations)
    if layer.clip is not None:
        attributes["clip"] = layer.clip
    if layer.cell == "gru":
        attributes["linear_before_reset"] = int(layer.reset_after)
    if layer.cell == "lstm":
        names.append("initial_c")
        given["initial_c"] = c[None, None]
        attributes["input_forget"] = int(layer.coupled)
        if layer.peepholes is not None:
            names.append("P")
            given["P"] = layer.peepholes[[0, 2, 1]].reshape(1, -1)
    outputs = ["Y", "Y_h", *(["Y_c"] if layer.cell == "lstm" else [])]
    node = onnx.helper.make_node(kind, names, outputs, **attributes)
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape) for name, array in given.items()]
    results = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    graph = onnx.helper.make_graph([node], "layer", ports, results)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
    y, *states = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(outputs, given)
    return y[:, 0, 0], *(state[0, 0] for state in states)


@settings(max_examples=80, deadline=None)
@given(layer=layers(), steps=st.integers(1, 6), seed=st.integers(0, 99))
def test_float64_layers_do_what_onnxruntime_does(layer, steps, seed):
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (steps, layer.inputs)).astype(np.float32)
    h, c = (generator.uniform(-1, 1, layer.hidden).astype(np.float32) for _ in range(2))
    walked = x[::-1] if layer.reverse else x
    (result,) = float_recurrent([Task(layer, walked, h, c if layer.cell == "lstm" else None)])
    expected = onnx_outputs(layer, x, h, c)
    states = [result.y[::-1] if layer.reverse else result.y, result.hidden, *([] if result.cell is None else [result.cell])]
    for got, wanted in zip(states, expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def broken(tasks):
    """Layers that forget: the last step alone counts."""
    return float_recurrent([Task(task.layer, task.x * 0, task.hidden * 0, None if task.cell is None else task.cell * 0) for task in tasks])


@pytest.fixture
def g2p_en(monkeypatch):
    """The package's own network in numpy, without the libraries for text that its module imports."""
    nltk = types.SimpleNamespace(pos_tag=None, data=types.SimpleNamespace(find=lambda name: name))
    corpus = types.SimpleNamespace(cmudict=types.SimpleNamespace(dict=dict))
    tokenize = types.SimpleNamespace(TweetTokenizer=lambda: types.SimpleNamespace(tokenize=str.split))
    inflect = types.SimpleNamespace(engine=lambda: None)
    for name, module in {"nltk": nltk, "nltk.corpus": corpus, "nltk.tokenize": tokenize, "inflect": inflect}.items():
        monkeypatch.setitem(sys.modules, name, module)
    g2p = import_module("g2p_en.g2p")
    yield g2p.G2p()
    for name in [name for name in sys.modules if name.partition(".")[0] == "g2p_en"]:
        del sys.modules[name]


def test_words_are_spelt_as_the_package_spells_them(g2p_en):
    words = ["accelerator", "a", "recurrent", "xylophone", "qqqq", "antidisestablishmentarianism", "queue"]
    assert packaged.word_phonemes(float_recurrent, words) == [g2p_en.predict(word) for word in words]


def test_spelling_is_about_as_good_as_the_network_is():
    score = packaged.spelling(float_recurrent, words=60)
    assert 0.03 < score.value == score.reference < 0.2 and score.agreement == 1 and score.cases == 60
    worse = packaged.spelling(broken, words=60)
    assert worse.value > 0.7 and worse.agreement < 0.1 and worse.reference == score.reference


def test_a_distance_is_the_least_number_of_edits():
    def recursive(one, other):
        if not one or not other:
            return len(one) + len(other)
        return min(recursive(one[1:], other) + 1, recursive(one, other[1:]) + 1, recursive(one[1:], other[1:]) + (one[0] != other[0]))

    generator = np.random.default_rng(0)
    for _ in range(60):
        one, other = (list("abc"[letter] for letter in generator.integers(3, size=generator.integers(6))) for _ in range(2))
        assert packaged._edit_distance(one, other) == recursive(one, other)


def test_an_error_rate_counts_edits_to_the_nearest_pronunciation():
    assert packaged._error_rate([["A", "B"], ["C"]], [[["X", "Y", "Z"], ["A", "B", "C"]], [["C"]]]) == 1 / 4


def test_characters_are_read_as_the_package_reads_them():
    reader = import_module("g2pM").G2pM()
    sentences = ["我在银行工作了十年。", "长大后，他觉得音乐很重要", "X都Y"]
    for sentence, read in zip(sentences, packaged.character_readings(float_recurrent, sentences), strict=True):
        assert read and read == {place: reader(sentence, char_split=True)[place] for place in read}
        assert set(read) == {place for place, character in enumerate(sentence) if len(reader.cedict.get(character, [])) > 1}


def test_readings_are_counted_where_they_are_marked():
    assert packaged._marked("都[du1]市里的生活[huo2]") == {0: "du1", 5: "huo2"}
    score = packaged.readings(float_recurrent)
    assert 0.4 < score.value == score.reference < 1 and score.agreement == 1 and score.cases > 90
    assert packaged.readings(broken).agreement < 0.95


def test_every_mark_is_a_reading_that_the_network_may_choose():
    path = packaged_file("g2pm")
    dictionary = packaged._plain(path.parent / "digest_cedict.pkl")
    for line in packaged._SENTENCES.split():
        sentence = "".join(part for part in line.replace("]", "[").split("[")[::2])
        for place, reading in packaged._marked(line).items():
            assert reading in dictionary[sentence[place]] and len(dictionary[sentence[place]]) > 1, line


@pytest.mark.peers
def test_embeddings_are_those_of_the_modules_in_torch():
    path = packaged_file("resemblyzer")
    torch = import_module("torch")
    state = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    lstm, linear = torch.nn.LSTM(40, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
    for prefix, module in (("lstm.", lstm), ("linear.", linear)):
        module.load_state_dict({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})
    sounds = [speech_and_noise(0.9, seed=1), speech_and_noise(0.5, seed=2)]
    for sound, embedded in zip(sounds, packaged.embeddings(float_recurrent, sounds), strict=True):
        mels = torch.from_numpy(packaged.mel_power(sound))
        raw = torch.relu(linear(lstm(mels[None])[1][0][-1])).detach().numpy()[0]
        np.testing.assert_allclose(embedded, raw / np.linalg.norm(raw), atol=1e-4)


def test_voices_are_compared_over_different_lengths():
    lengths = set()

    def recurrent(tasks):
        lengths.update(len(task.x) for task in tasks)
        return float_recurrent(tasks)

    score = packaged.voices(recurrent, utterances=3)
    assert len(lengths) == 3 and score.value > 0.999999 and score.cases == 3
    assert packaged.voices(broken, utterances=3).value < 0.9


@pytest.mark.parametrize("frequency_hz", [300.0, 1000.0, 3000.0, 6000.0])
def test_a_tone_is_loudest_in_the_channel_around_it(frequency_hz):
    sound = np.sin(2 * np.pi * frequency_hz * np.arange(8000) / 16000).astype(np.float32)
    power = packaged.mel_power(sound)
    assert power.shape == (51, 40) and power.dtype == np.float32
    channel = int(np.argmax(power[25]))
    # Slaney: 15 mel up to 1 kHz, then 27 mel to a factor of 6.4.
    mel = frequency_hz * 3 / 200 if frequency_hz < 1000 else 15 + 27 * np.log(frequency_hz / 1000) / np.log(6.4)
    top = 15 + 27 * np.log(8) / np.log(6.4)
    assert abs(mel / top * 41 - (channel + 1)) <= 1


@pytest.mark.peers
def test_the_gru_of_the_keras_package_gives_what_keras_gives(monkeypatch):
    path = packaged_file("ao-compensation")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = import_module("keras")
    gru = keras.models.load_model(path, compile=False).get_layer("gru")
    (layer,) = load_network("ao-compensation").layers
    x = np.random.default_rng(2).uniform(-2, 2, (30, 16)).astype(np.float32)
    (result,) = float_recurrent([Task(layer, x, np.zeros(32, np.float32), None)])
    np.testing.assert_allclose(result.hidden, gru(x[None]).detach().numpy()[0], atol=1e-5)


def test_gradients_of_the_classifier_are_those_of_differences():
    generator = np.random.default_rng(5)
    hidden, classes = digits._HIDDEN, digits._CLASSES
    parameters = [generator.uniform(-0.3, 0.3, shape) for shape in ((4 * hidden, 8 + hidden), (4 * hidden,), (classes, hidden), (classes,))]
    images, labels = generator.random((3, 8, 8)), np.array([1, 7, 0])

    def loss():
        kernel, bias, weight, offset = (each.astype(np.float32) for each in parameters)
        layer = Layer(name="a", cell="lstm", input_kernel=kernel[:, :8], recurrent_kernel=kernel[:, 8:], bias=bias)
        zeros = np.zeros(hidden, np.float32)
        results = float_recurrent([Task(layer, image.astype(np.float32), zeros, zeros) for image in images])
        logits = np.array([result.hidden for result in results], np.float64) @ weight.T + offset
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), labels])

    for parameter, gradient in zip(parameters, digits._gradients(parameters, images, labels), strict=True):
        step = 0.05 * np.sign(gradient) / np.sqrt(gradient.size)
        parameter += step
        above = loss()
        parameter -= 2 * step
        slope = above - loss()
        parameter += step
        assert slope == pytest.approx(2 * np.sum(step * gradient), rel=0.01)


def test_the_classifier_names_most_digits_and_follows_from_its_seed():
    score = packaged.digits(float_recurrent)
    assert 0.94 < score.value == score.reference and score.agreement == 1 and score.cases == 360
    assert packaged.digits(broken).value < 0.3
    first = digits.trained(1)
    digits.trained.cache_clear()
    again = digits.trained(1)
    assert again is not first and again.layer.digest == first.layer.digest and np.array_equal(again.labels, first.labels)


def test_the_hosts_tensors_of_a_state_dict_are_read_by_name():
    path = packaged_file("g2pm")
    (embedding,) = read_tensors(path, ["embedding.weight"])
    assert embedding.shape == (5398, 64) and embedding.dtype == np.float32
