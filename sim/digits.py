"""A recurrent network that is trained here in seconds: scikit-learn's digits, the 8 rows of an image as 8 steps of an LSTM.

Everything follows from the seed, up to the order in which a machine's matrix products add.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from sharp.model.errors import NetworkError
from sharp.model.layer import Layer
from sharp.model.sequence import Recurrent, Task

_HIDDEN = 32
_CLASSES = 10
_TEST_IMAGES = 360
_EPOCHS, _BATCH = 40, 64
# Adam as its authors set it, but for the rate, which falls to nothing over the epochs.
_RATE, _MOMENTUM, _SCALE_MOMENTUM, _EPSILON = 0.01, 0.9, 0.999, 1e-8
_FORGET_BIAS = 1.0


@dataclass(frozen=True, eq=False)
class Classifier:
    """An LSTM 8 -> 32 over the rows of an image and the host's layer on its last output, with the images it was not shown.

    weight : float32[10, 32], bias : float32[10], images : float32[N, 8, 8] within 0 and 1, labels : int64[N]
    """

    layer: Layer
    weight: np.ndarray
    bias: np.ndarray
    images: np.ndarray
    labels: np.ndarray

    def decide(self, recurrent: Recurrent) -> np.ndarray:
        """Return int64[N], the digit of each image, with the layer run by `recurrent`."""
        results = recurrent([Task.of(self.layer, image) for image in self.images])
        return np.argmax(np.array([result.hidden for result in results]) @ self.weight.T + self.bias, axis=1)


@cache
def trained(seed: int = 1) -> Classifier:
    """Train on all images but 360, drawn by the seed; `NetworkError` where scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise NetworkError("task digits: needs the images of scikit-learn; get them with `pip install scikit-learn`") from None
    data = load_digits()
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(data.target))
    images, labels = (data.images[order] / 16).astype(np.float32), data.target[order]
    test, train = slice(_TEST_IMAGES), slice(_TEST_IMAGES, None)
    parameters = _train(images[train], labels[train], generator)
    kernel, bias, weight, offset = (each.astype(np.float32) for each in parameters)
    columns = images.shape[2]
    layer = Layer(name="digits", cell="lstm", input_kernel=kernel[:, :columns], recurrent_kernel=kernel[:, columns:], bias=bias)
    return Classifier(layer, weight, offset, images[test], labels[test])


def _train(images: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Minimise the cross entropy with Adam; return float64 [W U], b, and the weight and bias behind the last output."""
    bound = _HIDDEN**-0.5
    shapes = ((4 * _HIDDEN, images.shape[2] + _HIDDEN), (4 * _HIDDEN,), (_CLASSES, _HIDDEN), (_CLASSES,))
    parameters = [generator.uniform(-bound, bound, shape) for shape in shapes]
    parameters[1][_HIDDEN : 2 * _HIDDEN] += _FORGET_BIAS
    means, scales = ([np.zeros(shape) for shape in shapes] for _ in range(2))
    step = 0
    for epoch in range(_EPOCHS):
        order = generator.permutation(len(labels))
        for batch in np.split(order, range(_BATCH, len(order), _BATCH)):
            step += 1
            rate = _RATE * (1 - epoch / _EPOCHS) * np.sqrt(1 - _SCALE_MOMENTUM**step) / (1 - _MOMENTUM**step)
            for parameter, gradient, mean, scale in zip(parameters, _gradients(parameters, images[batch], labels[batch]), means, scales):
                mean += (1 - _MOMENTUM) * (gradient - mean)
                scale += (1 - _SCALE_MOMENTUM) * (gradient**2 - scale)
                parameter -= rate * mean / (np.sqrt(scale) + _EPSILON)
    return parameters


def _gradients(parameters: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the mean cross entropy by backpropagation through the steps, one for each parameter."""
    kernel, bias, weight, offset = parameters
    count = len(images)
    h = c = np.zeros((count, _HIDDEN))
    kept = []
    for row in images.swapaxes(0, 1):
        inputs = np.concatenate((row, h), axis=1)
        i, f, g, o = np.split(inputs @ kernel.T + bias, 4, axis=1)
        i, f, o = (0.5 + 0.5 * np.tanh(0.5 * gate) for gate in (i, f, o))
        g, before = np.tanh(g), c
        c = f * c + i * g
        squashed = np.tanh(c)
        h = o * squashed
        kept.append((inputs, i, f, g, o, before, squashed))
    logits = h @ weight.T + offset
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(count), labels] -= 1
    error /= count
    d_kernel, d_bias = np.zeros_like(kernel), np.zeros_like(bias)
    d_h, d_c = error @ weight, 0.0
    for inputs, i, f, g, o, before, squashed in reversed(kept):
        d_c = d_c + d_h * o * (1 - squashed**2)
        d_sums = np.concatenate(
            (d_c * g * i * (1 - i), d_c * before * f * (1 - f), d_c * i * (1 - g**2), d_h * squashed * o * (1 - o)), axis=1
        )
        d_kernel += d_sums.T @ inputs
        d_bias += d_sums.sum(axis=0)
        d_h, d_c = d_sums @ kernel[:, -_HIDDEN:], d_c * f
    return [d_kernel, d_bias, error.T @ h, error.sum(axis=0)]
