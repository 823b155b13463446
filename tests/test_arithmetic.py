"""The arithmetic: the model against exact fractions and real functions, and the RTL against the model, bit for bit."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from arithmetic_bench import run_unit

from sharp.model import arithmetic
from sharp.model.arithmetic import CELL_LIMIT, Activation
from sharp.model.program import NO_LIMIT
from sharp.rtl.activation import ActivationUnit
from sharp.rtl.floating import Fp16Multiplier, Fp32Adder, Fp32Multiplier

SEED = 20240
RANDOM_PAIRS = 1_000_000
NAN = 0x7FC00000


def words(values) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def floats(bits) -> np.ndarray:
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def halves(bits) -> np.ndarray:
    return np.asarray(bits).astype(np.uint16).view(np.float16)


def crossed(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every pattern with every pattern."""
    a, b = np.meshgrid(patterns, patterns)
    return a.ravel(), b.ravel()


def with_both_signs(magnitudes: list[int], sign: int) -> np.ndarray:
    return np.array([*magnitudes, *(magnitude | sign for magnitude in magnitudes)], dtype=np.uint32)


def fp16_specials() -> np.ndarray:
    fractions = (0, 1, 2, 3, 0x1FF, 0x200, 0x201, 0x3FE, 0x3FF)
    return with_both_signs([exponent << 10 | fraction for exponent in (0, 1, 2, 14, 15, 16, 29, 30, 31) for fraction in fractions], 0x8000)


def fp32_specials() -> np.ndarray:
    fractions = (0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF)
    exponents = (0, 1, 2, 3, 24, 25, 26, 102, 103, 104, 112, 113, 125, 126, 127, 128, 129, 130, 142, 143, 150, 151, 152, 252, 253, 254, 255)
    return with_both_signs([exponent << 23 | fraction for exponent in exponents for fraction in fractions], 1 << 31)


def near_exponents(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose exponents differ by at most 30, half of them with sparse fractions, whose sums cancel and tie often."""
    exponent = random.integers(0, 255, count)
    other = np.clip(exponent + random.integers(-30, 31, count), 0, 254)
    pair = []
    for exponents in (exponent, other):
        fraction = random.integers(0, 1 << 23, count)
        sparse = (random.integers(-2, 3, count) + (random.integers(0, 8, count) << random.integers(0, 24, count))) & 0x7FFFFF
        fraction = np.where(random.integers(0, 2, count), fraction, sparse)
        pair.append((random.integers(0, 2, count) << 31 | exponents << 23 | fraction).astype(np.uint32))
    return pair[0], pair[1]


def fp32_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Specials with specials, every pair of exponents and signs with telling fractions, and random pairs of both kinds."""
    random = np.random.default_rng(SEED)
    exponents = np.arange(256, dtype=np.uint32) << 23
    lattice = np.concatenate([exponents, exponents | 0x7FFFFF, exponents | 1 << 31, exponents | 1 << 31 | 1])
    parts = [crossed(fp32_specials()), crossed(lattice), near_exponents(random, RANDOM_PAIRS)]
    parts.append(tuple(random.integers(0, 1 << 32, (2, RANDOM_PAIRS), dtype=np.uint32)))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def assert_unit(name: str, operands: list[np.ndarray], expected: np.ndarray, folder) -> None:
    print(f"seed {SEED}, {len(expected)} cycles")
    for latency, got in run_unit(name, operands, folder).items():
        wrong = np.flatnonzero(got != expected)
        assert not wrong.size, (
            f"{name}, latency {latency}: {wrong.size} wrong; first: {', '.join(f'{operand[wrong[0]]:08x}' for operand in operands)} "
            f"must give {expected[wrong[0]]:08x}, not {got[wrong[0]]:08x}"
        )


def expected_words(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.uint32(NAN), words(values))


def exact(value) -> Fraction:
    return Fraction(float(value))


def rounded(value: Fraction, *, fraction_bits: int, lowest_exponent: int) -> Fraction:
    """Round to nearest even with `fraction_bits` after the first; below 2^`lowest_exponent` the unit stays that of its binade."""
    if not value:
        return value
    exponent = lowest_exponent
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction_bits)
    return round(value / unit) * unit


@pytest.mark.parametrize("lowest", [-40, -149])
def test_model_sum_is_the_exact_sum_rounded_to_nearest_even(lowest):
    random = np.random.default_rng(SEED)
    a, b = (np.ldexp(random.integers(-(1 << 24), 1 << 24, 500), lowest + random.integers(0, 30, 500)).astype(np.float32) for _ in range(2))
    for x, y, total in zip(a, b, arithmetic.add_fp32(a, b), strict=True):
        assert exact(total) == rounded(exact(x) + exact(y), fraction_bits=23, lowest_exponent=-126)


def test_model_product_of_halves_is_exact():
    bits = fp16_specials()
    finite = halves(bits[(bits & 0x7C00) != 0x7C00])
    a, b = crossed(finite)
    for x, y, product in zip(a, b, arithmetic.multiply_fp16(a, b), strict=True):
        assert exact(product) == exact(x) * exact(y)


def test_model_product_is_the_same_for_halves_and_their_singles():
    a, b = crossed(halves(fp16_specials()))
    with np.errstate(invalid="ignore"):
        of_halves = arithmetic.multiply_fp16(a, b)
        of_singles = arithmetic.multiply_fp16(a.astype(np.float32), b.astype(np.float32))
    np.testing.assert_array_equal(expected_words(of_halves), expected_words(of_singles))


def test_model_rounding_to_half_is_to_nearest_even_with_subnormals():
    random = np.random.default_rng(SEED)
    x = np.ldexp(random.integers(-(1 << 24), 1 << 24, 1000), random.integers(-52, -9, 1000)).astype(np.float32)
    x = np.concatenate([x, np.float32([2**-25, 2**-25 * (1 + 2**-20), 3 * 2**-25, 65519.0, -65519.0])])
    for value, result in zip(x, arithmetic.round_fp16(x), strict=True):
        assert exact(result) == rounded(exact(value), fraction_bits=10, lowest_exponent=-14)
    assert arithmetic.round_fp16(np.float32([65520, -65520, np.inf])).tolist() == [65504, -65504, 65504]


def test_model_lane_product_is_rounded_once_and_flushed():
    random = np.random.default_rng(SEED)
    a, b = (np.ldexp(random.integers(-(1 << 24), 1 << 24, 1000), random.integers(-90, -80, 1000)).astype(np.float32) for _ in range(2))
    flushed = 0
    for x, y, product in zip(a, b, arithmetic.lane_multiply(a, b), strict=True):
        true = rounded(exact(x) * exact(y), fraction_bits=23, lowest_exponent=-400)
        if abs(true) < Fraction(2) ** -126:
            true, flushed = Fraction(0), flushed + 1
        assert exact(product) == true
        assert np.signbit(product) == (np.signbit(x) ^ np.signbit(y)) or not x * y
    assert 100 < flushed < 900


def flush_edge() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors whose products lie just below 2^-126, and the results: 2^-126 from the tie, 2^-126 - 2^-151, on."""
    a = np.float32([(1 - 2**-24) * 2**-63, (1 - 2**-24) * 2**-63, 18631 * 2.0**-80, (1 - 2**-23) * 2**-63])
    b = np.float32([2.0**-63, (1 - 2**-23) * 2**-63, 1801 * 2.0**-71, (1 + 2**-23) * 2**-63])
    return a, b, np.float32([0, 0, 2.0**-126, 2.0**-126])


def test_model_lane_product_just_below_the_smallest_normal_rounds_up_to_it():
    a, b, expected = flush_edge()
    assert exact(a[2]) * exact(b[2]) == Fraction(2) ** -126 - Fraction(2) ** -151
    assert exact(a[3]) * exact(b[3]) < Fraction(2) ** -126
    np.testing.assert_array_equal(words(arithmetic.lane_multiply(a, b)), words(expected))
    np.testing.assert_array_equal(words(arithmetic.lane_multiply(-a, b)), words(-expected))


def test_model_lane_product_takes_subnormals_as_zero_and_keeps_their_sign():
    with np.errstate(invalid="ignore"):
        product = arithmetic.lane_multiply(floats([0x007FFFFF, 0x807FFFFF, 0x00000001]), np.float32([2.0, 2.0**100, np.inf]))
    assert words(product[:2]).tolist() == [0, 0x80000000]
    assert np.isnan(product[2])


def test_cell_saturates_instead_of_wrapping():
    c, beyond = arithmetic.saturate_cell(np.float32([[65504, 65504.004], [-1e30, -np.inf]]))
    assert c.tolist() == [[65504, 65504], [-65504, -65504]]
    assert beyond.tolist() == [[False, True], [True, True]]
    assert np.isfinite(arithmetic.round_fp16(CELL_LIMIT))


def finite_halves() -> np.ndarray:
    values = halves(np.arange(1 << 16))
    return values[np.isfinite(values)].astype(np.float32)


def dense_singles() -> np.ndarray:
    """A grid of steps of 2^-18 over [-20, 20] and random values of every binade from 2^-30 to 2^6."""
    random = np.random.default_rng(SEED)
    scattered = np.ldexp(1 + random.random(500_000), random.integers(-30, 7, 500_000)).astype(np.float32)
    return np.concatenate([np.arange(-20 << 18, 20 << 18, dtype=np.int64).astype(np.float32) / (1 << 18), scattered, -scattered])


def limited(x: np.ndarray, limit: float | None) -> np.ndarray:
    """float64 of `x`, whose NaN is infinite here, limited."""
    with np.errstate(invalid="ignore"):
        magnitude = np.where(np.isnan(x), np.inf, np.abs(x.astype(np.float64)))
        return np.copysign(magnitude if limit is None else np.minimum(magnitude, limit), x)


FORMULAS = {
    Activation.TANH: (np.tanh, arithmetic.TANH_ERROR_BOUND),
    Activation.SIGMOID: (lambda x: 0.5 + 0.5 * np.tanh(0.5 * x), arithmetic.SIGMOID_ERROR_BOUND),
    Activation.HARD_SIGMOID_FIFTH: (lambda x: np.clip(x / 5 + 0.5, 0, 1), arithmetic.HARD_SIGMOID_ERROR_BOUND),
    Activation.HARD_SIGMOID_SIXTH: (lambda x: np.clip(x / 6 + 0.5, 0, 1), arithmetic.HARD_SIGMOID_ERROR_BOUND),
}
SIGMOIDS = [function for function in FORMULAS if function is not Activation.TANH]


@pytest.mark.parametrize("function", FORMULAS)
@pytest.mark.parametrize("arguments", [finite_halves, dense_singles])
def test_activations_keep_their_error_bounds(arguments, function):
    x = arguments()
    formula, bound = FORMULAS[function]
    error = np.abs(arithmetic.activate(function, x) - formula(x.astype(np.float64))).max()
    assert bound / 4 < error <= bound


@pytest.mark.parametrize("function", FORMULAS)
@pytest.mark.parametrize("limit", [0.0, 2.0**-140, 2.0**-20, 0.7, 2.4999, 3.0, 7.5, 15.9, 1e9])
def test_limit_is_on_the_magnitude_of_the_argument(function, limit):
    random = np.random.default_rng(SEED)
    x = np.concatenate([finite_halves(), floats(fp32_specials()), random.uniform(-2 * limit, 2 * limit, 1000).astype(np.float32)])
    formula, bound = FORMULAS[function]
    result = arithmetic.activate(function, x, np.float32(limit))
    assert np.abs(result - formula(limited(x, np.float32(limit)))).max() <= bound
    beyond = limited(x, None) >= np.float32(limit)
    assert beyond.any()
    assert (result[beyond] == arithmetic.activate(function, np.float32(limit))).all()
    below = limited(x, None) <= -np.float32(limit)
    assert (result[below] == arithmetic.activate(function, np.float32(-limit))).all()


def test_limit_leaves_the_identity_alone():
    x = fp32_specials()
    assert words(arithmetic.activate(Activation.IDENTITY, floats(x), np.float32(0.5))).tolist() == x.tolist()


def test_relu_is_the_argument_or_plus_zero_and_limited():
    x = fp32_specials()
    magnitude = x & 0x7FFFFFFF
    negative = x >> 31 == 1
    assert words(arithmetic.activate(Activation.RELU, floats(x))).tolist() == np.where(negative, 0, x).tolist()
    six = int(words(np.float32(6)))
    of_limit = words(arithmetic.activate(Activation.RELU, floats(x), np.float32(6)))
    assert of_limit.tolist() == np.where(negative, 0, np.minimum(magnitude, six)).tolist()


def test_activations_are_symmetric_and_saturate():
    x = finite_halves()
    infinite = np.float32([np.inf, -np.inf, 8, -16, 0.0, -0.0])
    np.testing.assert_array_equal(arithmetic.activate(Activation.TANH, -x), -arithmetic.activate(Activation.TANH, x))
    assert words(arithmetic.activate(Activation.TANH, infinite)).tolist() == words([1, -1, 1, -1, 0.0, -0.0]).tolist()
    for function in SIGMOIDS:
        np.testing.assert_array_equal(arithmetic.activate(function, -x), 1 - arithmetic.activate(function, x))
        of_8 = arithmetic.activate(function, np.float32(8))
        assert words(arithmetic.activate(function, infinite)).tolist() == words([1, 0, of_8, 0, 0.5, 0.5]).tolist()


def test_hard_sigmoids_reach_their_ends_where_the_formula_does():
    for function, end in ((Activation.HARD_SIGMOID_FIFTH, 2.5), (Activation.HARD_SIGMOID_SIXTH, 3.0)):
        x = np.float32([end, -end, np.nextafter(np.float32(end), np.float32(0)), -np.nextafter(np.float32(end), np.float32(0))])
        at, at_negative, before, before_negative = arithmetic.activate(function, x)
        assert (at, at_negative) == (1, 0)
        assert before < 1
        assert before_negative > 0


@pytest.mark.parametrize("limit", [None, np.float32(1e30)])
def test_activations_of_nan_are_saturated(limit):
    x = floats([0x7FC00000, 0xFFC00000])
    assert arithmetic.activate(Activation.TANH, x, limit).tolist() == [1, -1]
    for function in SIGMOIDS:
        assert arithmetic.activate(function, x, limit).tolist() == [1, 0]


def test_relu_of_nan_is_nan_or_the_limit():
    x = floats([0x7FC12345, 0xFFC12345])
    assert words(arithmetic.activate(Activation.RELU, x)).tolist() == [0x7FC12345, 0]
    assert arithmetic.activate(Activation.RELU, x, np.float32(2)).tolist() == [2, 0]


def test_tanh_table_is_the_same_on_every_machine():
    digest = hashlib.sha256(arithmetic.TANH_COEFFICIENTS.astype("<i8").tobytes()).hexdigest()
    assert digest == "14837546d8e5a23d96cffe6ff045a7a8d70b5fdf93fe27798cda333e89517127"


def test_tanh_polynomial_needs_neither_sign_nor_clamp():
    """Over every argument, as the RTL relies on: coefficients fit their bits, slopes stay above 0 and results below 1."""
    table = arithmetic.TANH_COEFFICIENTS[:256]
    assert (table >= 0).all()
    assert (table < 1 << np.array(arithmetic.COEFFICIENT_BITS)).all()
    offset = np.arange(1 << arithmetic.OFFSET_BITS)
    square = offset >> (arithmetic.OFFSET_BITS - arithmetic.SQUARE_OFFSET_BITS)
    for c0, c1, c2 in table:
        slope = c1 - (c2 * square >> arithmetic.SQUARE_SHIFT)
        result = c0 + (slope * offset >> arithmetic.SLOPE_SHIFT)
        assert slope.min() >= 0
        assert result.min() >= 0
        assert result.max() < 1 << arithmetic.RESULT_FRACTION_BITS


def test_ramps_of_hard_sigmoids_fit_the_path_of_tanh():
    """Over every argument before the end: results stay below 1, and within five units of 2^-23 of the line.

    Start and slope are rounded, by up to 3 and 1 units at the end, and each shift drops less than one.
    """
    for function, divisor in ((Activation.HARD_SIGMOID_FIFTH, 5), (Activation.HARD_SIGMOID_SIXTH, 6)):
        ramp = arithmetic.RAMPS[function]
        assert ramp.end / 32 == divisor / 2
        assert ramp.slope < 1 << arithmetic.COEFFICIENT_BITS[1]
        argument = np.arange(ramp.end << arithmetic.OFFSET_BITS)
        odd = arithmetic.odd_part(function, argument)
        assert (odd >= 0).all()
        assert (odd < 1 << arithmetic.RESULT_FRACTION_BITS).all()
        assert np.abs(odd - argument * (4 / divisor)).max() < 5


@pytest.mark.parametrize("component", [Fp16Multiplier, Fp32Adder, Fp32Multiplier, ActivationUnit])
@pytest.mark.parametrize("latency", [0, 9, None])
def test_latency_out_of_range_is_refused(component, latency):
    with pytest.raises(ValueError, match=rf"^latency must be 1 to 8 cycles, not {latency}$"):
        component(latency=latency)


def test_fp16_multiplier_is_exact_over_all_classes(tmp_path):
    random = np.random.default_rng(SEED)
    pairs = random.integers(0, 1 << 16, (2, RANDOM_PAIRS), dtype=np.uint32)
    every = np.arange(1 << 16, dtype=np.uint32)
    one = np.full_like(every, 0x3C00)
    special_a, special_b = crossed(fp16_specials())
    a, b = np.concatenate([special_a, every, one, pairs[0]]), np.concatenate([special_b, one, every, pairs[1]])
    with np.errstate(invalid="ignore"):
        expected = arithmetic.multiply_fp16(halves(a), halves(b))
    assert_unit("fp16_multiply", [a, b], expected_words(expected), tmp_path)


def test_fp32_adder_is_ieee_over_all_classes(tmp_path):
    a, b = fp32_pairs()
    with np.errstate(all="ignore"):
        expected = arithmetic.add_fp32(floats(a), floats(b))
    assert_unit("fp32_add", [a, b], expected_words(expected), tmp_path)


def test_fp32_multiplier_is_the_lane_product_over_all_classes(tmp_path):
    a, b = fp32_pairs()
    random = np.random.default_rng(SEED)
    # Products near the smallest normal, where results are flushed or rounded up to it.
    edge_a = random.integers(0x1F000000, 0x20800000, 200_000, dtype=np.uint32)
    edge_b = words(np.float32(2.0**-63) / (floats(edge_a) / np.float32(2.0**-63))) + random.integers(-2, 3, 200_000)
    tie_a, tie_b, _ = flush_edge()
    a = np.concatenate([a, edge_a, words(tie_a), words(-tie_a)])
    b = np.concatenate([b, edge_b.astype(np.uint32), words(tie_b), words(tie_b)])
    with np.errstate(all="ignore"):
        expected = arithmetic.lane_multiply(floats(a), floats(b))
    assert_unit("fp32_multiply", [a, b], expected_words(expected), tmp_path)


def test_activation_unit_is_the_model(tmp_path):
    random = np.random.default_rng(SEED)
    with np.errstate(invalid="ignore"):
        every_half = words(halves(np.arange(1 << 16)).astype(np.float32))
    segment_starts = np.arange(0, 16, 1 / 32, dtype=np.float32)
    edges = np.concatenate([words(segment_starts), words(segment_starts) - (segment_starts > 0), words(segment_starts) + 1])
    edges = np.concatenate([edges, edges | 1 << 31]).astype(np.uint32)
    inside = words(random.uniform(-18, 18, 200_000))
    x = np.concatenate([every_half, fp32_specials(), edges, inside, random.integers(0, 1 << 32, 200_000, dtype=np.uint32)])
    # Function and limit change in every cycle; a limit is often the magnitude itself or one beside it.
    a = np.repeat(x, len(Activation))
    function = np.tile(np.array(Activation, dtype=np.uint32), len(x))
    limit = ((a & NO_LIMIT) + random.integers(-1, 2, len(a))).clip(0, NO_LIMIT)
    kind = random.integers(0, 4, len(a))
    limit = np.select([kind == 0, kind == 1, kind == 2], [NO_LIMIT, words(random.uniform(0, 20, len(a))), limit], random.permutation(limit))
    limit = limit.astype(np.uint32)
    expected = np.zeros_like(a)
    for each in Activation:
        mine = function == each
        expected[mine] = words(arithmetic.activate(each, floats(a[mine]), floats(limit[mine])))
    assert_unit("activate", [a, function, limit], expected, tmp_path)


def test_function_codes_of_no_activation_pass_the_argument(tmp_path):
    function = np.arange(len(Activation), 16, dtype=np.uint32)
    x = np.full_like(function, 0xBF812345)
    for limit in (NO_LIMIT, 0x3F000000):
        assert_unit("activate", [x, function, np.full_like(function, limit)], x, tmp_path)


def test_conversion_to_half_is_the_model(tmp_path):
    random = np.random.default_rng(SEED)
    with np.errstate(invalid="ignore"):
        every_half = words(halves(np.arange(1 << 16)).astype(np.float32))
    around = np.concatenate([every_half + np.uint32(offset) for offset in (0x0FFF, 0x1000, 0x1001)])  # the ties and beside them
    exponents = random.integers(100, 145, 500_000)
    near = (random.integers(0, 2, 500_000) << 31 | exponents << 23 | random.integers(0, 1 << 23, 500_000)).astype(np.uint32)
    x = np.concatenate([every_half, around, fp32_specials(), near, random.integers(0, 1 << 32, 500_000, dtype=np.uint32)])
    expected = arithmetic.round_fp16(floats(x)).view(np.uint16).astype(np.uint32)
    assert_unit("to_fp16", [x], expected, tmp_path)


def test_cell_saturation_is_the_model(tmp_path):
    limit = int(words(CELL_LIMIT))
    x = np.concatenate([fp32_specials(), with_both_signs([limit - 1, limit, limit + 1], 1 << 31)])
    state, beyond = arithmetic.saturate_cell(floats(x))
    assert_unit("cell_state", [x], words(state), tmp_path)
    assert_unit("cell_beyond", [x], beyond.astype(np.uint32), tmp_path)
