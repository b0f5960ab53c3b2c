"""Values as text, and their comparison."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_rewards.code.compare import output_matches, shown_value, value_matches
from agentrl_rewards.code.values import decode_value, encode_value

hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashable | st.sets(hashable, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hashable, inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_a_value_survives_its_text(value: object) -> None:
    text = encode_value(value)
    assert text.isascii()
    assert "\n" not in text
    assert decode_value(text) == value
    assert encode_value(decode_value(text)) == text


@given(values, values)
def test_only_equal_values_have_the_same_text(one: object, other: object) -> None:
    if encode_value(one) == encode_value(other):
        assert one == other
        assert type(one) is type(other)


LOOKALIKES = [0, 0.0, False, None, "", "0", b"", b"0", (), [], {}, set(), frozenset(), 0j, [0], (0,), {0}, [[]], ["list"]]


def test_values_of_other_types_are_never_equal() -> None:
    texts = [encode_value(each) for each in LOOKALIKES]
    assert len(set(texts)) == len(LOOKALIKES)
    alike = [(a, b) for a in texts for b in texts if a != b and value_matches(a, b, None)]
    assert alike == []


def test_not_a_number_equals_itself_and_signs_of_zero_are_one() -> None:
    assert value_matches(encode_value([math.nan, -0.0]), encode_value([math.nan, 0.0]), None)


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, (each for each in ""), range(3), type, [iter(())], {"a": NotImplemented}]
)
def test_what_is_no_plain_data_has_no_text(value: object) -> None:
    with pytest.raises(TypeError, match="expected plain data"):
        encode_value(value)


@pytest.mark.parametrize(
    ("expected", "found", "matches"),
    [
        (0.3, 0.1 + 0.2, True),
        ([1.0, {"a": 2.0}], [1, {"a": 2.0000001}], True),
        (1.0, True, False),
        (1.0, "1.0", False),
        (1.0, 1.1, False),
        (1, 1.0, False),
        (1.0, 10**400, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (1.0, math.nan, False),
        ((1.0,), [1.0], False),
        ([1.0], [1.0, 1.0], False),
        (10**30, 10**30 + 1, False),
        (10.0**30, 10**30 + 1, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        ({"float": 3, "int": 1.0}, {"float": 3, "int": 1.0000001}, True),
        ({"float": 3}, {"float": 4}, False),
    ],
)
def test_a_tolerance_is_for_floats_alone(expected: object, found: object, *, matches: bool) -> None:
    assert value_matches(encode_value(expected), encode_value(found), 1e-6) is matches


@pytest.mark.parametrize(
    ("expected", "found", "matches"),
    [
        (3, 3.0, True),
        ([1.0, 2.0], [1, 2], True),
        (True, 1, True),
        (0, False, True),
        (1, 1 + 0j, True),
        (3, 3.0000001, False),
        (2**60, float(2**60), True),
        (2**60 + 1, float(2**60), False),
        ((1, (2, "a")), [1, [2, "a"]], True),
        ([1, 2], [2, 1], False),
        ([1], {1}, False),
        ("1", 1, False),
        (None, False, False),
        (b"a", bytearray(b"a"), True),
        (b"a", "a", False),
        ({1, 2}, frozenset({2.0, 1}), True),
        ({(1, 2)}, {(1.0, 2)}, True),
        ({"a": 1, "b": (2,)}, {"b": [2.0], "a": True}, True),
        ({1: "a"}, {1.0: "a"}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (math.nan, math.nan, True),
        ([10**400], [1e300], False),
        ("a", "a", True),
    ],
)
def test_the_comparison_python_is_that_of_python_where_tuples_are_lists(
    expected: object, found: object, *, matches: bool
) -> None:
    assert value_matches(encode_value(expected), encode_value(found), None, "python") is matches


@given(values, values)
def test_the_comparison_python_agrees_with_python(one: object, other: object) -> None:
    for found in (one, other):
        same = value_matches(encode_value(one), encode_value(found), None, "python")
        assert same == (as_lists(one) == as_lists(found))


def test_deep_items_of_sets_are_compared_at_once_and_too_deep_ones_are_unequal() -> None:
    for depth, matches in ((60, True), (400, False)):
        nested = '["tuple",' * depth
        one, other = (f'["set",{nested}{leaf}{"]" * depth}]' for leaf in ("1", "true"))
        assert value_matches(one, other, None, "python") is matches


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(10**30), 0.1, 2.5j, "it's \ud800\n", b"\xff'", bytearray(b"a"), [], (), {}, set(), frozenset()),
        *((1,), (1, 2), [1, [2.0]], {3}, {(3,)}, frozenset({"a"}), {"a": {1: None}, (1, 2): []}, math.inf),
    ],
)
def test_a_value_is_shown_as_python_shows_it(value: object) -> None:
    assert shown_value(encode_value(value), 400) == repr(value)


def test_of_a_large_value_the_beginning_is_shown() -> None:
    assert shown_value(encode_value([*range(10**5)]), 10) == "[0, 1, 2,  ..."
    assert shown_value(encode_value(16**10_000), 10) == "0x10000000 ..."


def as_lists(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [as_lists(each) for each in value]
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return value


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "NaN", "[[]]", '["float"]', '["float","x"]', '["int",1]', "{}", "\0"]
)
def test_forged_texts_match_nothing(text: str) -> None:
    for expected in (1.0, 2, [3.0], {"a": 1.0}, None, True, "x"):
        assert not value_matches(encode_value(expected), text, 0.5)
        assert not value_matches(encode_value(expected), text, None)
        assert not value_matches(encode_value(expected), text, 0.5, "python")


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "matches"),
    [
        ("a\n", b"a", None, True),
        ("a", b"a\r\n\n  \n", None, True),
        ("a\n\nb", b"a\nb", None, False),
        (" a", b"a", None, False),
        ("", b"\n", None, True),
        ("a", b"\xff", None, False),
        ("0.1", b"0.10", None, False),
        ("0.1 x", b"1e-1  x", 1e-6, True),
        ("0.1", b"0.2", 1e-6, False),
        ("0.1", b"nan", 1e-6, False),
        ("0.1", b"0_1", 1e-6, False),
        ("1 2", b"1 2 3", 1e-6, False),
        ("1\n2", b"1 2", 1e-6, False),
        ("9", b"9" * 100_000, 1e-6, False),
    ],
)
def test_outputs_are_compared_line_by_line(expected: str, found: bytes, tolerance: float | None, *, matches: bool) -> None:
    assert output_matches(expected, found, tolerance) is matches


@pytest.mark.parametrize(
    ("expected", "found", "matches"),
    [
        ("12666", b"12666.0", True),
        ("yes\n", b"\n\n  yes \n", True),
        ("1 2\n3", b"1.0  2e0\n 3", True),
        ("0.5", b".5", True),
        ("0.5", b"0.50000001", False),
        ("1\n2", b"1 2", False),
        ("a 1", b"a 1.0", False),
        ("1", b"1_0", False),
        ("10", b"1_0", False),
        ("1", "\u0661".encode(), False),
        ("nan", b"NaN", False),
        ("", b" \n", True),
        ("1", b"1" * 100_000, False),
    ],
)
def test_the_comparison_python_strips_lines_and_reads_decimals(expected: str, found: bytes, *, matches: bool) -> None:
    assert output_matches(expected, found, None, "python") is matches
