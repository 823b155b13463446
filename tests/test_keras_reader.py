"""Keras models in each of their file formats, against Keras's documented formulas and Keras itself where it is installed."""

import io
import json
import os
import zipfile
from importlib import import_module

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.model.arithmetic import Activation
from sharp.model.errors import NetworkError
from sharp.model.keras_reader import read_levels
from sharp.model.network import load_network
from sharp.model.sequence import Task
from sharp.sim.packaged import float_recurrent

GATES = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}
FORMATS = ("keras 3", "keras 2.13", "h5 of keras 2", "h5 of keras 3")


def recurrent(kind, units, name=None, **changes):
    """The configuration of a recurrent layer, with what Keras writes into each that changes its result."""
    config = {"name": name or kind.lower(), "units": units, "activation": "tanh", "use_bias": True, "go_backwards": False}
    config |= {"return_sequences": True, "stateful": False, "dropout": 0.2, "recurrent_dropout": 0.1, "recurrent_initializer": {}}
    config |= {} if kind == "SimpleRNN" else {"recurrent_activation": "sigmoid"}
    config |= {"reset_after": True} if kind == "GRU" else {}
    return {"class_name": kind, "config": config | changes, "registered_name": None}


def bidirectional(layer, name="bidirectional", **changes):
    return {"class_name": "Bidirectional", "config": {"name": name, "layer": layer, "merge_mode": "concat", **changes}}


def other(kind, name, **config):
    return {"class_name": kind, "config": {"name": name, **config}}


def weights(layer, inputs, generator):
    """Random kernel, recurrent kernel and bias of the shapes that Keras documents."""
    config = layer["config"]
    rows = GATES[layer["class_name"]] * config["units"]
    shapes = [(inputs, rows), (config["units"], rows)]
    if config["use_bias"]:
        shapes.append((2, rows) if config.get("reset_after") else (rows,))
    return [generator.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


def sides(layer):
    """The recurrent layers in a layer's configuration."""
    return [layer["config"]["layer"]] * 2 if layer["class_name"] == "Bidirectional" else [layer]


def snake(kind):
    return {"SimpleRNN": "simple_rnn", "TimeDistributed": "time_distributed"}.get(kind, kind.lower())


def keras_file(layers, arrays, version="3.13.2", container="layers", names=True):
    """A `.keras` archive of a Functional model; arrays : by the name of a layer, of each of its sides."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:

        def write(layers, at):
            counts = {}
            for layer in layers:
                kind, name = snake(layer["class_name"]), layer["config"]["name"]
                number = counts[kind] = counts.get(kind, -1) + 1
                group = file.create_group(f"{at}{container}/{kind}{f'_{number}' if number else ''}")
                own = group.create_group("vars")
                if names:
                    own.attrs["name"] = name
                if "layers" in layer["config"]:
                    write(layer["config"]["layers"], f"{group.name}/")
                places = ("forward_layer/", "backward_layer/") if layer["class_name"] == "Bidirectional" else ("",)
                for place, side in zip(places, arrays.get(name, ())):
                    for index, array in enumerate(side):
                        group[f"{place}cell/vars/{index}"] = array

        write(layers, "")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": version}))
        archive.writestr("config.json", json.dumps({"class_name": "Functional", "config": {"name": "model", "layers": layers}}))
        archive.writestr("model.weights.h5", content.getvalue())
    return buffer.getvalue()


def h5_file(layers, arrays, version="2.1.6", as_list=True):
    """An `.h5` file of a Sequential model."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        config = layers if as_list else {"name": "sequential", "layers": layers}
        text = json.dumps({"class_name": "Sequential", "config": config})
        file.attrs["model_config"] = text.encode() if version.startswith("2") else text
        file.attrs["keras_version"] = version.encode() if version.startswith("2") else version
        for layer in layers:
            name = layer["config"]["name"]
            group = file.create_group(f"model_weights/{name}")
            stored = []
            for place, side in zip(("forward_", "backward_"), arrays.get(name, ())):
                inside = f"{name}_1/{place if layer['class_name'] == 'Bidirectional' else ''}{name}"
                for kind, array in zip(("kernel", "recurrent_kernel", "bias"), side):
                    stored.append(f"{inside}/{kind}{':0' if version.startswith('2') else ''}")
                    group[stored[-1]] = array
            group.attrs["weight_names"] = [each.encode() for each in stored] if version.startswith("2") else stored
    return content.getvalue()


def save(folder, layers, arrays, form="keras 3", **options):
    path = folder / ("model.h5" if "h5" in form else "model.keras")
    match form:
        case "keras 3":
            path.write_bytes(keras_file(layers, arrays, **options))
        case "keras 2.13":
            path.write_bytes(keras_file(layers, arrays, "2.13.1", "_layer_checkpoint_dependencies", names=False))
        case "h5 of keras 2":
            path.write_bytes(h5_file(layers, arrays, **options))
        case "h5 of keras 3":
            path.write_bytes(h5_file(layers, arrays, "3.15.1", as_list=False))
    return path


def model(folder, *layers, inputs=3, form="keras 3", seed=0, **options):
    """Save a chain of layers with random weights; return the path and the weights."""
    generator, arrays = np.random.default_rng(seed), {}
    for layer in layers:
        if layer["class_name"] in (*GATES, "Bidirectional"):
            arrays[layer["config"]["name"]] = [weights(side, inputs, generator) for side in sides(layer)]
            inputs = sum(side["config"]["units"] for side in sides(layer))
    return save(folder, list(layers), arrays, form, **options), arrays


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(0, x),
    "linear": lambda x: x,
    "hard_sigmoid of 2": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "hard_sigmoid of 3": lambda x: np.clip(x + 3, 0, 6) / 6,
}


def documented(layer, arrays, x, version):
    """The outputs float64[T, H] that Keras documents for a layer, x in the order in which the layer goes."""
    config = layer["config"]
    functions = FUNCTIONS | {"hard_sigmoid": FUNCTIONS[f"hard_sigmoid of {version}"]}
    gate, output = functions[config.get("recurrent_activation", "tanh")], functions[config["activation"]]
    kernel, recurrent_kernel, *bias = (array.astype(np.float64) for array in arrays)
    bias = bias[0] if bias else np.zeros((2, kernel.shape[1]) if config.get("reset_after") else kernel.shape[1])
    h = c = np.zeros(config["units"])
    y = []
    for vector in x:
        if layer["class_name"] == "LSTM":
            i, f, g, o = np.split(vector @ kernel + h @ recurrent_kernel + bias, 4)
            c = gate(f) * c + gate(i) * output(g)
            h = gate(o) * output(c)
        elif layer["class_name"] == "SimpleRNN":
            h = output(vector @ kernel + h @ recurrent_kernel + bias)
        elif config["reset_after"]:
            (x_z, x_r, x_h), (h_z, h_r, h_h) = np.split(vector @ kernel + bias[0], 3), np.split(h @ recurrent_kernel + bias[1], 3)
            z = gate(x_z + h_z)
            h = z * h + (1 - z) * output(x_h + gate(x_r + h_r) * h_h)
        else:
            x_z, x_r, x_h = np.split(vector @ kernel + bias, 3)
            u_z, u_r, u_h = np.split(recurrent_kernel, 3, axis=1)
            z, r = gate(x_z + h @ u_z), gate(x_r + h @ u_r)
            h = z * h + (1 - z) * output(x_h + (r * h) @ u_h)
        y.append(h)
    return np.array(y)


def documented_chain(layers, arrays, x, version):
    for layer in layers:
        sides_arrays = arrays[layer["config"]["name"]]
        if layer["class_name"] == "Bidirectional":
            inner = layer["config"]["layer"]
            forward, backward = documented(inner, sides_arrays[0], x, version), documented(inner, sides_arrays[1], x[::-1], version)
            x = np.concatenate((forward, backward[::-1]), axis=1)
        else:
            x = documented(layer, sides_arrays[0], x, version)
    return x


def turned(layer, x):
    """Return x in the order in which the layer walks it, or from that order back."""
    return x[::-1] if layer.reverse else x


def run(levels, x):
    """The outputs of levels in float64, of all layers from states of zeros, and the states after the last one."""
    for level in levels:
        tasks = []
        for layer in level:
            cell = np.zeros(layer.hidden, np.float32) if layer.cell == "lstm" else None
            tasks.append(Task(layer, turned(layer, np.asarray(x, np.float32)), np.zeros(layer.hidden, np.float32), cell))
        results = float_recurrent(tasks)
        x = np.concatenate([turned(layer, result.y) for layer, result in zip(level, results, strict=True)], axis=1)
    return x, np.concatenate([result.hidden for result in results])


LAYERS = st.tuples(
    st.sampled_from(list(GATES)),
    st.integers(1, 4),
    st.sampled_from(["sigmoid", "hard_sigmoid", "tanh"]),
    st.sampled_from(["tanh", "relu", "sigmoid", "linear"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(LAYERS, min_size=1, max_size=3), form=st.sampled_from(FORMATS), seed=st.integers(0, 99))
def test_layers_of_every_format_do_what_keras_documents(tmp_path_factory, drawn, form, seed):
    layers = []
    for number, (kind, units, gate, output, use_bias, reset_after, both) in enumerate(drawn):
        changes = {} if kind == "SimpleRNN" else {"recurrent_activation": gate}
        changes |= {"reset_after": reset_after} if kind == "GRU" else {}
        layer = recurrent(kind, units, f"layer_{number}", activation=output, use_bias=use_bias, **changes)
        layers.append(bidirectional(layer, f"both_{number}") if both else layer)
    path, arrays = model(tmp_path_factory.mktemp("model"), *layers, form=form, seed=seed)
    levels = read_levels(path)
    assert [level[0].name for level in levels] == [layer["config"]["name"] for layer in layers]
    x = np.random.default_rng(7).uniform(-1, 1, (4, 3)).astype(np.float32)
    expected = documented_chain(layers, arrays, x, 3 if "keras 3" in form else 2)
    np.testing.assert_allclose(run(levels, x)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return import_module("keras")


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.peers
def test_files_of_keras_give_its_own_outputs(tmp_path, keras, suffix):
    layers = keras.layers
    both = layers.Bidirectional(layers.LSTM(4, return_sequences=True, recurrent_activation="hard_sigmoid", bias_initializer="normal"))
    chain = [
        keras.Input((6, 3)),
        both,
        layers.GRU(5, return_sequences=True, bias_initializer="normal"),
        layers.GRU(4, return_sequences=True, reset_after=False, activation="relu", bias_initializer="normal"),
        layers.Dropout(0.5),
        layers.SimpleRNN(3, go_backwards=True, bias_initializer="normal"),
    ]
    if suffix == ".keras":
        chain[2:4] = [keras.Sequential([keras.Input((6, 8)), *chain[2:4]])]
    made = keras.Sequential(chain)
    made.save(tmp_path / f"model{suffix}")
    network = load_network(str(tmp_path / f"model{suffix}"))
    assert [shape.hidden for shape in network.shapes] == [4, 4, 5, 4, 3] and network.steps is None and network.model_file is None
    x = np.random.default_rng(1).uniform(-1, 1, (6, 3)).astype(np.float32)
    given = run(read_levels(tmp_path / f"model{suffix}"), x)[1]
    np.testing.assert_allclose(given, np.asarray(made.predict(x[None], verbose=0))[0], atol=1e-5)


def test_a_layer_that_goes_backwards_ends_at_the_first_step(tmp_path):
    layer = recurrent("GRU", 2, go_backwards=True, return_sequences=False)
    path, arrays = model(tmp_path, layer)
    x = np.random.default_rng(3).uniform(-1, 1, (5, 3)).astype(np.float32)
    np.testing.assert_allclose(run(read_levels(path), x)[1], documented(layer, arrays["gru"][0], x[::-1], 3)[-1], atol=1e-6)


def test_other_layers_are_left_out_and_nested_models_unfolded(tmp_path):
    inner = [other("Dense", "dense", units=3), recurrent("GRU", 4, "deep")]
    layers = [
        other("InputLayer", "input"),
        other("Embedding", "embedding", mask_zero=False),
        recurrent("GRU", 2, "first"),
        {"class_name": "Sequential", "config": {"name": "inner", "layers": inner}},
        {"class_name": "TimeDistributed", "config": {"name": "each", "layer": other("Dense", "dense_1", units=3)}},
        recurrent("GRU", 3, "last"),
    ]
    generator = np.random.default_rng(0)
    arrays = {each["config"]["name"]: [weights(each, 5, generator)] for each in (layers[2], inner[1], layers[5])}
    levels = read_levels(save(tmp_path, layers, arrays))
    assert [level[0].name for level in levels] == ["first", "inner.deep", "last"]
    assert all(np.array_equal(level[0].input_kernel, arrays[name][0][0].T) for level, name in zip(levels, ("first", "deep", "last")))


def test_hard_sigmoid_is_that_of_the_version_that_wrote_the_file(tmp_path):
    layer = recurrent("LSTM", 2, recurrent_activation="hard_sigmoid")
    expected = {"2.4.0": Activation.HARD_SIGMOID_FIFTH, "2.2.4-tf": Activation.HARD_SIGMOID_FIFTH, "3.0.0": Activation.HARD_SIGMOID_SIXTH}
    for version, function in expected.items():
        path, _ = model(tmp_path, layer, version=version)
        assert read_levels(path)[0][0].activations == (function, Activation.TANH, Activation.TANH)


def test_an_activation_may_be_named_as_a_function(tmp_path):
    path, _ = model(tmp_path, recurrent("SimpleRNN", 2, activation={"class_name": "function", "config": "relu"}))
    assert read_levels(path)[0][0].activations == (Activation.RELU,)


def test_a_gru_of_keras_before_2_2_resets_before_the_product(tmp_path):
    layer = recurrent("GRU", 2)
    del layer["config"]["reset_after"]
    path, _ = model(tmp_path, layer, form="h5 of keras 2", version="2.0.8")
    ((read,),) = read_levels(path)
    assert not read.reset_after and read.candidate_bias is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([recurrent("GRU", 2, go_backwards=True)], "layer gru: go_backwards must be false where return_sequences is true"),
        ([bidirectional(recurrent("GRU", 2), merge_mode="sum")], "layer bidirectional: merge_mode must be concat, not sum"),
        ([bidirectional(recurrent("GRU", 2, go_backwards=True))], "go_backwards must be False in the forward layer"),
        (
            [bidirectional(recurrent("GRU", 2), backward_layer=recurrent("GRU", 2))],
            "go_backwards must be True in the backward layer",
        ),
        ([bidirectional(other("RNN", "rnn"))], "class inside Bidirectional must be LSTM, GRU, SimpleRNN, not RNN"),
        ([recurrent("GRU", 2, activation="elu")], r"activation must be sigmoid, tanh, relu, linear or hard_sigmoid, not elu"),
        ([recurrent("GRU", 2, recurrent_activation={"config": {"alpha": 1}})], r"recurrent_activation must be .*, not {'alpha': 1}"),
        ([other("Masking", "masking"), recurrent("GRU", 2)], "layer masking: class must not be Masking: sequences are given in"),
        ([other("Embedding", "words", mask_zero=True), recurrent("GRU", 2)], "layer words: mask_zero must be false"),
        ([other("ConvLSTM2D", "conv", recurrent_initializer={})], "layer conv: class must be LSTM, GRU, SimpleRNN, Bidirectional, not Co"),
        ([other("CuDNNLSTM", "fast", recurrent_initializer={})], "layer fast: class must be .*, not CuDNNLSTM"),
        ([other("RNN", "rnn", cell={"class_name": "LSTMCell"})], "layer rnn: class must be .*, not RNN"),
        ([other("TimeDistributed", "each", layer=recurrent("LSTM", 2))], "layer each: class must be .*, not TimeDistributed"),
        ([recurrent("LSTM", 2) | {"registered_name": "Mine>LSTM"}], "layer lstm: class must be .*, not LSTM of another package"),
        ([other("Dense", "dense"), other("InputLayer", "input")], r"holds no recurrent layer \(LSTM, .*\); its layers are Dense, Inp"),
    ],
)
def test_what_changes_the_result_and_is_not_supported_is_refused_by_name(tmp_path, layers, message):
    arrays = {"gru": [[np.zeros((3, 6), np.float32), np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)]]}
    arrays["bidirectional"] = arrays["gru"] * 2
    with pytest.raises(NetworkError, match=message) as caught:
        read_levels(save(tmp_path, layers, arrays))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (0, np.zeros((3, 7), np.float32), r"layer lstm: kernel must have the shape \(3, 8\), not \(3, 7\)"),
        (0, np.zeros(8, np.float32), r"kernel must have the shape \(1, 8\), not \(8,\)"),
        (1, np.zeros((3, 8), np.float32), r"recurrent_kernel must have the shape \(2, 8\), not \(3, 8\)"),
        (2, np.zeros((2, 8), np.float32), r"bias must have the shape \(8,\), not \(2, 8\)"),
        (2, None, r"weights must be 3 arrays with use_bias True, not 2"),
        (0, np.zeros((3, 8), np.int32), r"kernel must be of float16, float32, float64, not int32"),
        (0, np.full((3, 8), np.nan, np.float32), r"layer lstm: input_kernel\[0, 0\] must be finite, not nan"),
        (0, np.full((3, 8), 1e300), r"input_kernel\[0, 0\] must be finite, not inf"),
        (1, np.full((2, 8), 7e4, np.float32), r"recurrent_kernel\[0, 0\] must be within float16's range"),
    ],
)
@pytest.mark.parametrize("form", ["keras 3", "h5 of keras 2"])
def test_weights_that_do_not_fit_are_refused_with_their_layer(tmp_path, form, place, array, message):
    layer = recurrent("LSTM", 2)
    made = weights(layer, 3, np.random.default_rng(0))
    made[place : place + 1] = [] if array is None else [array]
    with pytest.raises(NetworkError, match=message):
        read_levels(save(tmp_path, [layer], {"lstm": [made]}, form))


@pytest.mark.parametrize("units", [0, -1, True, "2", 1.5])
def test_units_that_are_no_size_are_refused(tmp_path, units):
    layer = recurrent("SimpleRNN", 2)
    path, arrays = model(tmp_path, layer)
    layer["config"]["units"] = units
    with pytest.raises(NetworkError, match="units must be a number from 1, not"):
        read_levels(save(tmp_path, [layer], arrays))


def test_weights_of_another_layer_are_refused(tmp_path):
    path, _ = model(tmp_path, recurrent("GRU", 2, "one"), recurrent("GRU", 2, "two"))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(members["config.json"])
    config["config"]["layers"].reverse()
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in (members | {"config.json": json.dumps(config)}).items():
            archive.writestr(name, value)
    with pytest.raises(NetworkError, match="layer two: group layers/gru must hold its weights, not those of one"):
        read_levels(path)


def test_an_array_that_the_file_leaves_out_is_refused(tmp_path):
    layer = recurrent("GRU", 2)
    path, _ = model(tmp_path, layer, form="h5 of keras 2")
    with h5py.File(path, "a") as file:
        group = file["model_weights/gru"]
        name = group.attrs["weight_names"][0]
        del group[name]
        group.create_dataset(name, (2**40, 6), np.float32, chunks=(1024, 6))
    with pytest.raises(NetworkError, match="kernel must be stored in full, not as 0 bytes of"):
        read_levels(path)


def test_a_nested_model_in_an_h5_file_is_refused(tmp_path):
    inner = {"class_name": "Sequential", "config": {"name": "inner", "layers": [recurrent("GRU", 2)]}}
    with pytest.raises(NetworkError, match=r"layer inner\.gru: .* not a nested one; save it as \.keras"):
        read_levels(save(tmp_path, [inner], {}, "h5 of keras 3"))


def test_files_without_a_model_are_refused(tmp_path):
    path, _ = model(tmp_path, recurrent("GRU", 2), form="h5 of keras 2", version="1.2.2")
    with pytest.raises(NetworkError, match="keras_version must be 2 or 3, not 1.2.2"):
        read_levels(path)
    with h5py.File(path, "w") as file:
        file["gru/kernel"] = np.zeros((2, 6))
    with pytest.raises(NetworkError, match="must be a whole model with model_config and model_weights, not weights alone"):
        read_levels(path)
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(NetworkError, match="must be a Keras archive with config.json, metadata.json, model.weights.h5, not a zip"):
        read_levels(tmp_path / "model.keras")
    for name in ("gone.keras", "gone.h5"):
        with pytest.raises(NetworkError, match=f"{name}: cannot be read: No such file"):
            load_network(str(tmp_path / name))


@settings(max_examples=120, deadline=None)
@given(form=st.sampled_from(FORMATS), seed=st.integers(0, 2**32 - 1))
def test_a_truncated_file_gives_one_line(tmp_path_factory, form, seed):
    path, _ = model(tmp_path_factory.mktemp("model"), bidirectional(recurrent("GRU", 2)), form=form)
    whole = path.read_bytes()
    path.write_bytes(whole[: np.random.default_rng(seed).integers(len(whole))])
    with pytest.raises(NetworkError) as caught:
        read_levels(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), junk=st.sampled_from([None, [], {}, "x", -1, 2.5, True, [None], {"config": 1}]))
def test_a_configuration_with_anything_in_it_gives_levels_or_one_line(tmp_path_factory, seed, junk):
    """One value of the configuration, at any depth, is replaced."""
    generator = np.random.default_rng(seed)
    layers = [recurrent("LSTM", 2), bidirectional(recurrent("GRU", 2)), other("Dense", "dense")]
    path, _ = model(tmp_path_factory.mktemp("model"), *layers)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(members["config.json"])
    at = config
    while True:
        key = generator.choice(list(at)) if isinstance(at, dict) else int(generator.integers(len(at)))
        if not (isinstance(at[key], dict | list) and at[key]) or generator.random() < 0.15:
            at[key] = junk
            break
        at = at[key]
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in (members | {"config.json": json.dumps(config)}).items():
            archive.writestr(name, value)
    try:
        read_levels(path)
    except NetworkError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
