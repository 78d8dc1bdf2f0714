"""Bytes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1048576, 2**20),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("60GiB", 60 * 2**30),
        (" 1.5 MB ", 1_500_000),
        ("1.5KiB", 1536),
        ("2 tib", 2 * 2**40),
        ("1GB", 10**9),
    ],
)
def test_sizes_are_read(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiB left", "1.2.3 MB", "1e9", "6O GiB", "nan", "1 G", "1_000"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is not a number of bytes$"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (15 * 2**20, "15.0 MiB"),
        (150 * 2**30, "150 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_sizes_are_written_in_three_figures(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 2**50))
def test_what_is_written_reads_back_within_its_figures(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)
