"""A recurrent layer in float64, one step at a time, straight from the formulas of `sharp.model.layer`: what machines are held against.

It shares no code with the model or the RTL, and rounds to float32 where it hands results out and nowhere else.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sharp.model.arithmetic import Activation
from sharp.model.layer import Layer
from sharp.model.sequence import Result, Task

PHI = {
    Activation.IDENTITY: lambda s: s,
    Activation.SIGMOID: lambda s: 0.5 * (1 + np.tanh(0.5 * s)),
    Activation.TANH: np.tanh,
    Activation.RELU: lambda s: np.maximum(s, 0),
    Activation.HARD_SIGMOID_FIFTH: lambda s: np.clip(s / 5 + 0.5, 0, 1),
    Activation.HARD_SIGMOID_SIXTH: lambda s: np.clip(s / 6 + 0.5, 0, 1),
}
Step = Callable[[np.ndarray, np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray | None]]


def run(task: Task) -> Result:
    step = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}[task.layer.cell](task.layer)
    h, c = task.hidden.astype(np.float64), None if task.cell is None else task.cell.astype(np.float64)
    y = np.empty((len(task.x), len(h)))
    for t, x in enumerate(task.x.astype(np.float64)):
        h, c = step(x, h, c)
        y[t] = h
    return Result(y.astype(np.float32), h.astype(np.float32), None if c is None else c.astype(np.float32))


def run_all(tasks: Sequence[Task]) -> list[Result]:
    """The tasks one after another: stands where a machine will."""
    return [run(task) for task in tasks]


def task_of(layer: Layer, x: np.ndarray) -> Task:
    """The layer over x : float32[T, D], which is in the order of the walk, from the layer's own initial states."""
    hidden = np.zeros(layer.outputs, np.float32) if layer.initial_hidden is None else layer.initial_hidden
    if layer.cell != "lstm":
        return Task(layer, x, hidden)
    return Task(layer, x, hidden, np.zeros(layer.hidden, np.float32) if layer.initial_cell is None else layer.initial_cell)


def _lstm(layer: Layer) -> Step:
    w, u, b, phi, limited = _parts(layer)
    p_i, p_f, p_o = np.zeros((3, layer.hidden)) if layer.peepholes is None else layer.peepholes.astype(np.float64)

    def step(x, h, c):
        s_i, s_f, s_g, s_o = np.split(w @ x + u @ h + b, 4)
        i = phi[0](limited(s_i + p_i * c))
        f = 1 - i if layer.coupled else phi[0](limited(s_f + p_f * c))
        c = f * c + i * phi[1](limited(s_g))
        h = phi[0](limited(s_o + p_o * c)) * phi[2](c)
        return h if layer.projection is None else layer.projection.astype(np.float64) @ h, c

    return step


def _gru(layer: Layer) -> Step:
    w, u, b, phi, limited = _parts(layer)
    u_z, u_r, u_n = np.split(u, 3)
    d_n = np.zeros(layer.hidden) if layer.candidate_bias is None else layer.candidate_bias.astype(np.float64)

    def step(x, h, _):
        s_z, s_r, s_n = np.split(w @ x + b, 3)
        z, r = phi[0](limited(s_z + u_z @ h)), phi[0](limited(s_r + u_r @ h))
        n = phi[1](limited(s_n + (r * (u_n @ h + d_n) if layer.reset_after else u_n @ (r * h))))
        return (1 - z) * n + z * h, None

    return step


def _rnn(layer: Layer) -> Step:
    w, u, b, phi, limited = _parts(layer)
    return lambda x, h, _: (phi[0](limited(w @ x + u @ h + b)), None)


def _parts(layer: Layer) -> tuple:
    """W, U and b in float64, the layer's functions, and the limit on their arguments."""
    w, u = layer.input_kernel.astype(np.float64), layer.recurrent_kernel.astype(np.float64)
    b = np.zeros(len(w)) if layer.bias is None else layer.bias.astype(np.float64)
    phi = [PHI[each] for each in layer.shape.activations]
    limit = np.inf if layer.clip is None else layer.clip
    return w, u, b, phi, lambda s: np.clip(s, -limit, limit)
