"""PyTorch state dicts, in each of their file formats, against PyTorch's documented formulas and PyTorch itself where it is installed."""

import io
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.model.arithmetic import Activation
from sharp.model.errors import NetworkError
from sharp.model.network import load_network
from sharp.model.pytorch_reader import read_levels, read_tensors
from sharp.model.sequence import Task
from sharp.sim.packaged import float_recurrent

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
STORAGES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "bool": "Bool"}
FORMATS = ("zip", "legacy", "safetensors", "npz", "pkl")


def state_dict(cell, inputs, hidden, *, layers=1, bidirectional=False, bias=True, projected=None, prefix="", seed=0):
    """Random tensors under the names and of the shapes that PyTorch documents."""
    generator = np.random.default_rng(seed)
    outputs, rows = projected or hidden, GATES[cell] * hidden
    directions = ("", "_reverse") if bidirectional else ("",)
    state = OrderedDict()
    for level in range(layers):
        for direction in directions:
            shapes = {"weight_ih": (rows, len(directions) * outputs if level else inputs), "weight_hh": (rows, outputs)}
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
            shapes |= {"weight_hr": (projected, hidden)} if projected else {}
            for kind, shape in shapes.items():
                state[f"{prefix}{kind}_l{level}{direction}"] = generator.uniform(-1, 1, shape).astype(np.float32)
    return state


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(values) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(key: str, array: np.ndarray, view: bytes = b"") -> bytes:
    """What torch.save writes for a tensor that fills its storage."""
    storage = f"ctorch\n{STORAGES[array.dtype.name]}Storage\n".encode()
    persistent = b"(" + text("storage") + storage + text(key) + text("cpu") + number(array.size) + view + b"tQ"
    strides = [stride // array.itemsize for stride in array.strides]
    hooks = b"ccollections\nOrderedDict\n)R"
    rebuilt = b"(" + persistent + number(0) + numbers(array.shape) + numbers(strides) + b"\x89" + hooks + b"tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + rebuilt


def pickled_state(state, view: bytes = b"", around=()) -> bytes:
    """A state dict as torch.save pickles it, inside dictionaries with the keys `around`."""
    items = b"".join(text(name) + tensor(str(key), array, view) for key, (name, array) in enumerate(state.items()))
    opened = b"".join(b"}" + text(key) for key in around)
    return b"\x80\x02" + opened + b"ccollections\nOrderedDict\n)R(" + items + b"u" + b"s" * len(around) + b"."


def content(array: np.ndarray) -> bytes:
    """A storage's bytes: the memory of the array, which a transposed one shares with the array that it is of."""
    return (array.T if array.T.flags.c_contiguous else np.ascontiguousarray(array)).tobytes()


def zip_file(state, around=(), main: bytes | None = None, records=None, compression=zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("model/data.pkl", pickled_state(state, around=around) if main is None else main)
        for name, value in {"byteorder": b"little", "version": b"3\n", **(records or {})}.items():
            archive.writestr(f"model/{name}", value)
        for key, array in enumerate(state.values()):
            archive.writestr(f"model/data/{key}", content(array))
    return buffer.getvalue()


def legacy_file(state, around=()) -> bytes:
    pickles = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}})
    keys = [str(key) for key in range(len(state))]
    head = b"".join(pickle.dumps(each, 2) for each in pickles) + pickled_state(state, view=b"N", around=around) + pickle.dumps(keys, 2)
    return head + b"".join(struct.pack("<q", array.size) + content(array) for array in state.values())


def numpy_file(state) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **state)
    return buffer.getvalue()


WRITERS = {
    "zip": (".pt", zip_file),
    "legacy": (".pth", legacy_file),
    "safetensors": (".safetensors", lambda state: safetensors.numpy.save(dict(state))),
    "npz": (".npz", numpy_file),
    "pkl": (".pkl", lambda state: pickle.dumps(dict(state), 3)),
}


def save(tmp_path, state, kind="zip", **options):
    suffix, writer = WRITERS[kind]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(writer(state, **options))
    return path


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def documented(state, prefix, cell, x, nonlinearity=np.tanh):
    """The outputs float64[T, ...] that torch.nn documents for LSTM, GRU and RNN, from states of zeros."""
    state = {name: array.astype(np.float64) for name, array in state.items()}
    level = 0
    while f"{prefix}weight_ih_l{level}" in state:
        sides = []
        for direction in ("", "_reverse"):
            ending = f"_l{level}{direction}"
            if f"{prefix}weight_ih{ending}" not in state:
                continue
            w_i, w_h = (state[f"{prefix}{kind}{ending}"] for kind in ("weight_ih", "weight_hh"))
            b_i, b_h = (state.get(f"{prefix}{kind}{ending}", np.zeros(len(w_i))) for kind in ("bias_ih", "bias_hh"))
            projection = state.get(f"{prefix}weight_hr{ending}")
            h, c = np.zeros(w_h.shape[1]), np.zeros(len(w_h) // GATES[cell])
            y = np.empty((len(x), len(h)))
            for t in range(len(x)) if not direction else reversed(range(len(x))):
                from_x, from_h = w_i @ x[t] + b_i, w_h @ h + b_h
                if cell == "lstm":
                    i, f, g, o = np.split(from_x + from_h, 4)
                    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                    h = sigmoid(o) * np.tanh(c)
                    h = h if projection is None else projection @ h
                elif cell == "gru":
                    (r_x, z_x, n_x), (r_h, z_h, n_h) = np.split(from_x, 3), np.split(from_h, 3)
                    n = np.tanh(n_x + sigmoid(r_x + r_h) * n_h)
                    z = sigmoid(z_x + z_h)
                    h = (1 - z) * n + z * h
                else:
                    h = nonlinearity(from_x + from_h)
                y[t] = h
            sides.append(y)
        x = np.concatenate(sides, axis=1)
        level += 1
    return x


def turned(layer, x):
    """Return x in the order in which the layer walks it, or from that order back."""
    return x[::-1] if layer.reverse else x


def run(levels, x):
    """The outputs of levels in float64, of all layers from states of zeros."""
    for level in levels:
        zeros = [(np.zeros(layer.outputs, np.float32), np.zeros(layer.hidden, np.float32)) for layer in level]
        tasks = [Task(layer, turned(layer, x), h, c if layer.cell == "lstm" else None) for layer, (h, c) in zip(level, zeros)]
        results = float_recurrent(tasks)
        x = np.concatenate([turned(layer, result.y) for layer, result in zip(level, results, strict=True)], axis=1)
    return x


MODULES = st.fixed_dictionaries(
    {
        "cell": st.sampled_from(list(GATES)),
        "inputs": st.integers(1, 6),
        "hidden": st.integers(2, 5),
        "layers": st.integers(1, 3),
        "bidirectional": st.booleans(),
        "bias": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=60, deadline=None)
@given(module=MODULES, kind=st.sampled_from(FORMATS), prefix=st.sampled_from(["", "encoder.rnn."]), project=st.booleans())
def test_layers_of_every_format_do_what_pytorch_documents(tmp_path_factory, module, kind, prefix, project):
    projected = module["hidden"] - 1 if project and module["cell"] == "lstm" else None
    state = state_dict(**module, projected=projected, prefix=prefix)
    levels = read_levels(save(tmp_path_factory.mktemp("model"), state, kind))
    assert [len(level) for level in levels] == [1 + module["bidirectional"]] * module["layers"]
    assert levels[0][0].name == f"{prefix}l0" and levels[-1][-1].reverse == module["bidirectional"]
    x = np.random.default_rng(7).uniform(-1, 1, (5, module["inputs"])).astype(np.float32)
    np.testing.assert_allclose(run(levels, x), documented(state, prefix, module["cell"], x), atol=1e-5)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.peers
def test_files_of_torch_give_its_own_outputs(tmp_path, cell, legacy):
    torch = import_module("torch")
    torch.manual_seed(1)
    options = {"proj_size": 3} if cell == "LSTM" else {"nonlinearity": "relu"} if cell == "RNN" else {}
    module = getattr(torch.nn, cell)(4, 6, 2, bidirectional=True, **options)
    path = tmp_path / "model.pt"
    saved = {"epoch": 3, "model": {"core": module.state_dict()}, "optimizer": {"state": {}, "lr": 0.1}}
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    levels = read_levels(path, nonlinearity="relu" if cell == "RNN" else None)
    assert levels[1][1].name == "model.core.l1.reverse"
    x = torch.rand(7, 4)
    np.testing.assert_allclose(run(levels, x.numpy()), module(x)[0].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.peers
def test_a_single_cell_is_a_level_of_its_own(tmp_path, cell):
    torch = import_module("torch")
    module = torch.nn.ModuleDict({"cell": getattr(torch.nn, cell)(3, 5)})
    torch.save(module.state_dict(), tmp_path / "model.pt")
    ((layer,),) = read_levels(tmp_path / "model.pt")
    x = torch.rand(1, 3)
    out = module["cell"](x)
    assert layer.name == "cell" and layer.cell == cell.removesuffix("Cell").lower()
    np.testing.assert_allclose(run(((layer,),), x.numpy()), (out[0] if cell == "LSTMCell" else out).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.peers
def test_parameters_of_other_widths_and_strides_from_torch(tmp_path, kind, suffix):
    torch = import_module("torch")
    state = {name: torch.from_numpy(array) for name, array in state_dict("gru", 3, 4).items()}
    narrow = {name: getattr(tensor, kind)() for name, tensor in state.items()}
    if suffix == ".pt":
        # A view with strides and an offset, and a parameter.
        held = torch.zeros(4, 13, dtype=narrow["weight_hh_l0"].dtype)
        held[:, 1:] = narrow["weight_hh_l0"].T
        narrow |= {"weight_hh_l0": held[:, 1:].T, "bias_ih_l0": torch.nn.Parameter(narrow["bias_ih_l0"])}
        torch.save(narrow, tmp_path / "model.pt")
    else:
        import_module("safetensors.torch").save_file(narrow, tmp_path / "model.safetensors")
    ((layer,),) = read_levels(tmp_path / f"model{suffix}")
    r, z, n = np.split(narrow["weight_hh_l0"].float().numpy(), 3)
    assert np.array_equal(layer.recurrent_kernel, np.concatenate((z, r, n)))
    assert np.array_equal(layer.candidate_bias, narrow["bias_hh_l0"][8:].float().numpy())


def test_a_safetensors_type_that_is_no_float_is_refused_by_name(tmp_path):
    path = save(tmp_path, {name: array.astype(np.uint8) for name, array in state_dict("rnn", 2, 3).items()}, "safetensors")
    with pytest.raises(NetworkError, match=r"model\.safetensors: cannot be read: \w+ must be of F16, BF16, F32, F64, not U8"):
        read_levels(path)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_weights_of_other_widths_are_rounded_to_float32(tmp_path, kind):
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    state = {name: array.astype(dtype) for name, array in state_dict("lstm", 3, 4).items()}
    for form in ("zip", "legacy", "safetensors"):
        ((layer,),) = read_levels(save(tmp_path, state, form))
        assert np.array_equal(layer.input_kernel, state["weight_ih_l0"].astype(np.float32))


def test_the_biases_of_a_gru_stay_apart_where_the_reset_gate_is_between_them(tmp_path):
    state = state_dict("gru", 2, 3)
    ((layer,),) = read_levels(save(tmp_path, state))
    b_i, b_h = state["bias_ih_l0"], state["bias_hh_l0"]
    assert np.array_equal(layer.candidate_bias, b_h[6:]) and layer.reset_after
    assert np.array_equal(layer.bias, np.concatenate((b_i[3:6] + b_h[3:6], b_i[:3] + b_h[:3], b_i[6:])))


def test_an_rnn_is_tanh_unless_the_caller_says_relu(tmp_path):
    path = save(tmp_path, state_dict("rnn", 2, 3))
    assert read_levels(path)[0][0].activations == (Activation.TANH,)
    assert read_levels(path, nonlinearity="relu")[0][0].activations == (Activation.RELU,)
    with pytest.raises(NetworkError, match="nonlinearity must be absent but for an RNN, not 'relu' for a cell of kind gru"):
        read_levels(save(tmp_path, state_dict("gru", 2, 3)), nonlinearity="relu")


def test_a_tensor_may_be_a_part_of_its_storage_in_any_order(tmp_path):
    memory = np.arange(40, dtype=np.float32)
    view = tensor("0", memory).replace(number(0) + numbers((40,)) + numbers((1,)), number(3) + numbers((8, 2)) + numbers((1, 9)))
    main = b"\x80\x02}(" + text("weight_ih_l0") + view + text("weight_hh_l0") + view + b"u."
    ((layer,),) = read_levels(save(tmp_path, {"w": memory}, main=main))
    assert np.array_equal(layer.input_kernel, np.stack((memory[3:11], memory[12:20]), axis=1))


def test_a_legacy_file_whose_storages_differ_from_its_tensors_is_refused(tmp_path):
    state = state_dict("rnn", 2, 3)
    path = save(tmp_path, state, "legacy")
    size = struct.pack("<q", 6)
    assert path.read_bytes().count(size) == 1
    path.write_bytes(path.read_bytes().replace(size, struct.pack("<q", 5)))
    with pytest.raises(NetworkError, match="cannot be read: storage 0 has 5 elements"):
        read_levels(path)


def test_one_of_several_modules_is_chosen_by_its_prefix(tmp_path):
    state = state_dict("gru", 2, 3, prefix="encoder.") | state_dict("lstm", 4, 5, prefix="decoder.")
    path = save(tmp_path, state)
    choice = r"holds several recurrent modules; choose with model\.pt:PREFIX out of encoder, decoder"
    with pytest.raises(NetworkError, match=choice):
        load_network(str(path))
    network = load_network(f"{path}:decoder")
    assert [shape.cell for shape in network.shapes] == ["lstm"] and network.steps is None and network.model_file is None
    assert [level[0].name for level in read_levels(path, ["decoder", "encoder"])] == ["decoder.l0", "encoder.l0"]
    with pytest.raises(NetworkError, match=r"model\.pt: module must be one of encoder, decoder, not 'dec'"):
        load_network(f"{path}:dec")


def test_keys_of_nested_dictionaries_belong_to_the_prefix(tmp_path):
    for kind in ("zip", "legacy"):
        path = save(tmp_path, state_dict("lstm", 2, 3, prefix="lstm."), kind, around=("checkpoint", "model_state"))
        assert read_levels(path)[0][0].name == "checkpoint.model_state.lstm.l0"
        assert load_network(f"{path}:checkpoint.model_state.lstm").layers[0].hidden == 3


def test_other_names_are_brought_to_those_of_pytorch(tmp_path):
    state = {"enc_w_x": np.ones((6, 2), np.float32), "enc_w_h": np.ones((6, 2), np.float32), "other": np.ones(3, np.float32)}
    path = save(tmp_path, state, "npz")
    ((layer,),) = read_levels(path, tensors={"enc.weight_ih": "enc_w_x", "enc.weight_hh": "enc_w_h"})
    assert (layer.name, layer.cell, layer.bias) == ("enc", "gru", None)
    with pytest.raises(NetworkError, match=r"model\.npz: must hold the tensor 'enc_w', not only enc_w_x, enc_w_h, other"):
        read_levels(path, tensors={"enc.weight_ih": "enc_w"})
    assert read_tensors(path, ["other"])[0].tolist() == [1, 1, 1]
    with pytest.raises(NetworkError, match="must hold the tensor 'others'"):
        read_tensors(path, ["others"])


def changed(**changes):
    """A state dict of a bidirectional two-level LSTM in which tensors are replaced, or left out where the change is None."""
    state = state_dict("lstm", 3, 4, layers=2, bidirectional=True) | changes
    return {name: array for name, array in state.items() if array is not None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (changed(weight_hh_l0=None), r"layer l0: weight_hh_l0 must be there beside weight_ih_l0, bias_ih"),
        (changed(bias_hh_l1_reverse=None), r"layer l1\.reverse: bias_hh_l1_reverse must be there beside weight_ih_l1_reverse"),
        (changed(weight_hh_l0=np.ones((16, 5), np.float32)), r"weight_hh_l0 must have 20 \(LSTM\), 15 \(GRU\) or 5 \(RNN\) rows"),
        (changed(weight_hh_l0=np.ones((8, 4), np.float32)), r"must have 16 \(LSTM\), 12 \(GRU\) or 4 \(RNN\) rows for 4 elements, not 8"),
        (changed(weight_ih_l0=np.ones(16, np.float32)), r"weight_ih_l0 must be a matrix with rows and columns, not of shape"),
        (changed(weight_ih_l0=np.ones((12, 3), np.float32)), r"layer l0: input_kernel must have the shape \(16, 3\), not \(12, 3\)"),
        (changed(bias_ih_l0=np.ones(15, np.float32)), r"layer l0: bias_ih_l0 must have the shape \(16,\), not \(15,\)"),
        (changed(weight_ih_l1=np.ones((16, 7), np.float32)), r"l1: weight_ih_l1 must have 8 columns, the outputs below, not 7"),
        (changed(weight_ih_l0=np.ones((16, 3), np.int64)), r"weight_ih_l0 must be of float16, bfloat16, float32, float64, not int64"),
        (changed(weight_ih_l0=np.full((16, 3), np.nan, np.float32)), r"model\.\w+: layer l0: input_kernel\[0, 0\] .* finite, not nan"),
        (changed(weight_ih_l0=np.full((16, 3), 1e300)), r"input_kernel\[0, 0\] must be finite, not inf"),
        (changed(weight_ih_l0=np.full((16, 3), 7e4, np.float32)), r"must be within float16's range"),
        (changed(bias_ih_l0=np.full(16, 3e38, np.float32), bias_hh_l0=np.full(16, 3e38, np.float32)), r"bias\[0\] must be finite"),
        (changed(weight_hr_l0=np.ones((4, 9), np.float32)), r"weight_hh_l0 must have 36 rows \(LSTM with a projection\) for 9"),
        ({n: a for n, a in changed().items() if "l0" not in n}, r"the module: levels must be numbered from 0 without a gap, not 1"),
        ({n: a for n, a in changed().items() if "l1_reverse" not in n}, r"and a reverse one if l0 has it; l1 differs"),
        ({n: a for n, a in changed().items() if "_reverse" in n}, r"must have a forward direction"),
        ({"linear.weight": np.ones((2, 3), np.float32)}, r"holds no recurrent module .*; its tensors are linear\.weight"),
        ({f"w{n}": np.ones(1, np.float32) for n in range(20)}, r"its tensors are w0, .*, w11 and 8 more"),
    ],
)
@pytest.mark.parametrize("kind", ["zip", "npz"])
def test_a_module_that_does_not_fit_together_is_refused_with_its_tensor(tmp_path, state, message, kind):
    with pytest.raises(NetworkError, match=message) as caught:
        read_levels(save(tmp_path, state, kind))
    assert "\n" not in str(caught.value)


def test_levels_of_different_kinds_are_refused(tmp_path):
    mixed = state_dict("gru", 4, 4) | {name.replace("l0", "l1"): array for name, array in state_dict("lstm", 4, 4).items()}
    with pytest.raises(NetworkError, match="l1: must be a cell of kind gru as below, not lstm"):
        read_levels(save(tmp_path, mixed))


def test_a_whole_module_and_torchscript_are_refused_by_name(tmp_path):
    state = state_dict("lstm", 2, 3)
    main = b"\x80\x02ctorch.nn.modules.rnn\nLSTM\n)\x81."
    with pytest.raises(NetworkError, match=r"model\.pt: holds torch\.nn\.modules\.rnn\.LSTM, and making it would run code"):
        read_levels(save(tmp_path, state, main=main))
    with pytest.raises(NetworkError, match=r"model\.pt: is a TorchScript archive"):
        read_levels(save(tmp_path, state, records={"constants.pkl": b""}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": {"byteorder": b"big"}}, "byteorder must be little, not big"),
        ({"compression": zipfile.ZIP_DEFLATED}, r"model\.pt: cannot be read: record model/data\.pkl must be stored, not compressed"),
        ({"main": b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R."}, r"holds builtins\.eval, and making it would run code"),
        ({"main": b"\x80\x02K\x01."}, "holds no recurrent module"),
        ({"main": b"\x80\x02"}, "cannot be read: pickle exhausted"),
    ],
)
def test_an_archive_of_another_form_is_refused(tmp_path, options, message):
    with pytest.raises(NetworkError, match=message):
        read_levels(save(tmp_path, state_dict("lstm", 2, 3), **options))


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (12, 3), (3, 1)),
        (1, (8, 2), (2, 1)),
        (0, (8, 2), (3, 1)),
        (0, (8, 2), (-2, 1)),
        (-1, (8, 2), (2, 1)),
        (0, (8, 1000), (1, 0)),
        (0, (8,), (2, 1)),
    ],
)
def test_a_tensor_that_does_not_lie_in_its_storage_is_refused(tmp_path, offset, shape, strides):
    array = np.ones((8, 2), np.float32)
    honest = tensor("0", array)
    lying = honest.replace(number(0) + numbers((8, 2)) + numbers((2, 1)), number(offset) + numbers(shape) + numbers(strides))
    assert lying != honest
    main = b"\x80\x02}(" + text("weight_ih_l0") + lying + text("weight_hh_l0") + lying + b"u."
    with pytest.raises(NetworkError, match="cannot be read: tensor of shape"):
        read_levels(save(tmp_path, {"w": array}, main=main))


@pytest.mark.parametrize("name", ["gone.pt", "gone.safetensors", "gone.npz"])
def test_a_file_that_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(NetworkError, match=re.escape(f"{tmp_path / name}: cannot be read: No such file or directory")):
        load_network(str(tmp_path / name))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, kind):
    path = save(tmp_path, state_dict("lstm", 2, 3), kind)
    for content in (b"", b"hello\n", b"PK\x03\x04", b"\x80\x02K\x01.", pickle.dumps([1, 2]), b"\x89HDF\r\n\x1a\n" + bytes(600)):
        path.write_bytes(content)
        with pytest.raises(NetworkError) as caught:
            read_levels(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@settings(max_examples=250, deadline=None)
@given(kind=st.sampled_from(FORMATS), seed=st.integers(0, 2**32 - 1), cut=st.booleans())
def test_a_damaged_file_gives_layers_or_one_line(tmp_path_factory, kind, seed, cut):
    generator = np.random.default_rng(seed)
    path = save(tmp_path_factory.mktemp("model"), state_dict("gru", 2, 3), kind)
    damaged = bytearray(path.read_bytes())
    if cut:
        del damaged[generator.integers(len(damaged)) :]
    for _ in range(0 if cut else generator.integers(1, 6)):
        damaged[generator.integers(len(damaged))] = generator.integers(256)
    path.write_bytes(damaged)
    try:
        read_levels(path)
    except NetworkError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
