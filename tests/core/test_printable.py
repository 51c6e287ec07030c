"""What others wrote, in a line."""

import json
import sys
import unicodedata

import pytest

from app.core.errors import printable

MISLEADING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, with ünïcödé, 漢字 and 🙂", "plain, with ünïcödé, 漢字 and 🙂"),
        ("a\nb\r\tc", "a\\u000ab\\u000d\\u0009c"),
        ("\x1b[31mred", "\\u001b[31mred"),
        ("\x9b31mred", "\\u009b31mred"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066\u2069\u200f\u061c", "\\u2066\\u2069\\u200f\\u061c"),
        ("\u2028\u2029\x85", "\\u2028\\u2029\\u0085"),
        ("\U000e0041", "\\udb40\\udc41"),
        ("\udc80", "\\udc80"),
        ("\x7f\ufeff\u00ad\u00a0", "\\u007f\\ufeff\\u00ad\\u00a0"),
    ],
)
def test_what_is_not_printed_as_itself_is_escaped(text, expected):
    assert printable(text) == expected
    assert printable(expected) == expected


def test_no_control_format_or_separator_of_unicode_is_left():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {unicodedata.category(one) for one in printable(every)}
    assert left.isdisjoint(MISLEADING)


def test_json_stays_json_with_the_same_meaning():
    value = {"user": "\x9b\u202e\U000e0041\n", "漢": "\u00a0"}
    text = printable(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
