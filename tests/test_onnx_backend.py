"""The onnx package's own node tests of recurrent operators, through the reader, the host and an executor in the machine's place."""

import warnings
from collections.abc import Callable

import numpy as np
import onnx.backend.test.case.node
import pytest
from float_layer import run_all
from onnx import ModelProto, numpy_helper
from onnx_models import GATES, save

from sharp.model.machine import load_machine
from sharp.sim.execution import machine_recurrent
from sharp.sim.host import HostGraph

# What computes the tasks of a node, with the error that its arithmetic may make. Weights, x and h are float16 on a machine.
EXECUTORS: dict[str, tuple[Callable, float]] = {
    "float64": (run_all, 1e-5),
    "machine": (machine_recurrent(load_machine("sharp-64")), 4e-3),
}
NAMES = [
    *(f"test_gru_{name}" for name in ("defaults", "with_initial_bias", "seq_length", "batchwise", "reverse", "bidirectional")),
    *(f"test_lstm_{name}" for name in ("defaults", "with_initial_bias", "with_peepholes", "batchwise", "reverse", "bidirectional")),
    *(f"test_simple_rnn_{name}" for name in ("defaults", "with_initial_bias", "batchwise", "reverse", "bidirectional")),
    "test_rnn_seq_length",
]


@pytest.fixture(scope="module")
def cases() -> dict:
    with warnings.catch_warnings():
        # Tests of other nodes divide by zero and overflow on purpose.
        warnings.simplefilter("ignore")
        everything = onnx.backend.test.case.node.collect_testcases(None)
    return {case.name: case for case in everything if any(node.op_type in GATES for node in case.model.graph.node)}


def test_no_recurrent_node_test_is_left_out(cases):
    assert sorted(cases) == sorted(NAMES)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_the_onnx_packages_test_passes(tmp_path, cases, name, executor):
    execute, bound = EXECUTORS[executor]
    ((inputs, expected),) = cases[name].data_sets
    made = ModelProto.FromString(cases[name].model.SerializeToString())
    given = dict(zip([port.name for port in made.graph.input], inputs, strict=True))
    # The tests hand weights over as inputs; the accelerator needs them beforehand.
    for port in [port for port in made.graph.input if port.name in ("W", "R", "B", "P")]:
        made.graph.initializer.append(numpy_helper.from_array(given.pop(port.name), port.name))
        made.graph.input.remove(port)
    results = HostGraph.load(save(made, tmp_path)).run(given, execute)
    for result, wanted in zip(results.values(), expected, strict=True):
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(result, wanted, rtol=0, atol=bound)
