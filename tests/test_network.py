"""Shapes, weights and descriptions of networks."""

import time
import tracemalloc

import numpy as np
import pytest
import yaml

from sharp.configs import ROOT
from sharp.model.errors import ConfigError, NetworkError
from sharp.model.layer import CELLS
from sharp.model.network import load_network, network_names

SHAPE_NAMES = [name for name in network_names() if "package:" not in (ROOT / "networks" / f"{name}.yaml").read_text("utf-8")]
GOOD = {
    "name": "small",
    "source": "made for the test",
    "confidence": "verbatim",
    "cell": "lstm",
    "layers": 2,
    "inputs": 3,
    "hidden": 5,
    "bidirectional": True,
    "steps": 7,
    "weights": {"seed": 4},
}


def write(tmp_path, **changes) -> str:
    path = tmp_path / "network.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_every_ready_made_shape_loads_under_its_own_name(name):
    network = load_network(name)
    assert network.name == name
    assert network.steps >= 1
    assert network.macs == network.steps * network.macs_per_step


def test_published_points_have_the_operations_that_their_source_counts():
    assert load_network("deepbench-lstm-1024-t25").macs == 8 * 1024**2 * 25
    assert load_network("deepbench-gru-2816-t750").macs == 6 * 2816**2 * 750
    eesen = load_network("eesen")
    assert [len(level) for level in eesen.levels] == [2] * 5
    assert [level[1].inputs for level in eesen.levels] == [340, 680, 680, 680, 680]


def test_shapes_of_a_large_network_cost_no_weights():
    tracemalloc.start()
    start_s = time.perf_counter()
    network = load_network("gmat")
    assert network.weights_bytes > 280e6
    assert len(network.shapes) == 17
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2e6
    assert time.perf_counter() - start_s < 2


def test_weights_follow_from_the_seed_and_stay_within_their_bound(tmp_path):
    first, again = load_network(write(tmp_path)), load_network(write(tmp_path))
    other = load_network(write(tmp_path, weights={"seed": 5}))
    assert first.digest == again.digest != other.digest
    assert first.digest != first.replace(steps=8).digest
    digests = {made.digest for made in first.layers}
    assert len(digests) == 4, "layers of one network share their weights"
    for made in first.layers:
        assert made.shape in first.shapes
        assert np.abs(made.recurrent_kernel).max() <= 5**-0.5
        assert np.abs(made.input_kernel).max() > 0.5 * 5**-0.5
        assert made.recurrent_kernel.min() < 0 < made.recurrent_kernel.max()


def test_levels_of_two_directions_pass_on_the_outputs_of_both(tmp_path):
    network = load_network(write(tmp_path))
    assert [(s.inputs, s.hidden, s.reverse) for s in network.shapes] == [(3, 5, False), (3, 5, True), (10, 5, False), (10, 5, True)]
    assert network.macs_per_step == 2 * 4 * 5 * (3 + 5) + 2 * 4 * 5 * (10 + 5)


@pytest.mark.parametrize("cell", CELLS)
def test_layers_of_every_cell_are_made(tmp_path, cell):
    network = load_network(write(tmp_path, cell=cell))
    assert network.macs > 0 and [layer.shape for layer in network.layers] == list(network.shapes)
    assert all((layer.candidate_bias is not None) == (cell == "gru") for layer in network.layers)


@pytest.mark.parametrize("field", ["layers", "inputs", "hidden", "steps"])
@pytest.mark.parametrize("value", [0, -1, 65537, "12", 1.5, True])
def test_a_size_that_is_not_a_sensible_number_is_refused(tmp_path, field, value):
    with pytest.raises(ConfigError, match=rf"network\.yaml: {field}: .*, not {value!r}") as caught:
        load_network(write(tmp_path, **{field: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "lstmm"}, r"cell: .*'lstm', 'gru' or 'rnn', not 'lstmm'"),
        ({"confidence": "sure"}, r"confidence: .*'verbatim' or 'recalled'"),
        ({"bidirectional": "yes"}, r"bidirectional: .*, not 'yes'"),
        ({"weights": {"seed": -1}}, r"weights\.seed: .*, not -1"),
        ({"weights": {"sead": 1}}, r"weights\.sead: unknown key; known keys are seed|weights\.seed: missing"),
        ({"units": 5}, r"units: unknown key; known keys are name, source"),
        ({"name": "../up"}, r"name: "),
    ],
)
def test_a_wrong_description_is_refused_with_its_field(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_network(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_description_with_a_key_given_twice_or_left_out_is_refused(tmp_path):
    path = tmp_path / "network.yaml"
    path.write_text(yaml.safe_dump(GOOD) + "hidden: 6\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="key 'hidden' is given twice"):
        load_network(str(path))
    path.write_text(yaml.safe_dump({key: value for key, value in GOOD.items() if key != "steps"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="steps: missing"):
        load_network(str(path))
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load_network(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize("name", ["silero", "", ".", "model.tflite", "configs/networks"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(NetworkError, match=r"one of ao-compensation, .*, silero-vad, not '") as caught:
        load_network(name)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_not_installed_says_how_to_get_it(tmp_path):
    text = (ROOT / "networks" / "silero-vad.yaml").read_text(encoding="utf-8")
    path = tmp_path / "network.yaml"
    path.write_text(text.replace("package: silero_vad", "package: no_such_package_here"), encoding="utf-8")
    with pytest.raises(NetworkError, match="get it with `pip install --no-deps silero-vad"):
        load_network(str(path))
    path.write_text(text.replace("16k_sequence.onnx", "gone.onnx"), encoding="utf-8")
    with pytest.raises(NetworkError, match="needs data/silero_vad_gone.onnx of the Python package silero_vad"):
        load_network(str(path))
