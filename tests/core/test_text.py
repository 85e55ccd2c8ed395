"""What came from outside is shown without steering a screen, and names have a public pattern."""

import sys
import unicodedata

import pytest

from silodp.core.errors import BadInput
from silodp.core.text import check_name, is_line, is_name, visible, visible_lines

C0 = [chr(code) for code in range(0x20)]
C1 = [chr(code) for code in range(0x7F, 0xA0)]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HIDDEN = list("\u00ad\u034f\u115f\u180e\u200b\u200c\u200d\u2060\ufeff\u3164\uffa0\u2800\ufe0f")
OTHERS = ["\u2028", "\u2029", "\ud800", "\udfff", "\U000e0001", "\U000e0101", "\uffff"]
HOSTILE = [*C0, *C1, *BIDI, *HIDDEN, *OTHERS]


@pytest.mark.parametrize("character", HOSTILE, ids=ascii)
def test_a_character_that_a_screen_obeys_or_hides_is_written_as_an_escape(character):
    shown = visible(f"a{character}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert not is_name(f"a{character}b")
    assert not is_line(f"a{character}b")
    if character not in "\n\t":
        assert visible_lines(f"a{character}b") == shown


def test_every_other_character_is_shown_as_it_is():
    for code in (*range(0x3000), *range(0x3000, sys.maxunicode + 1, 97)):
        character = chr(code)
        shown = visible(character)
        category = unicodedata.category(character)
        if category[0] == "C" or category in ("Zl", "Zp"):
            assert shown != character
        else:
            assert shown == character or shown.startswith("\\")
    for text in ("Zürich (Onkologie)", "東京 2", "מרכז", "é", "C:\\data", "[bold]x[/bold]"):
        assert visible(text) == text


def test_marks_that_are_piled_up_on_a_letter_do_not_cover_other_lines():
    pile = "a" + 50 * "\u0301"
    assert visible(pile) == "a" + 4 * "\u0301" + 46 * "\\u0301"
    assert visible_lines(f"{pile}\n") == f"{visible(pile)}\n"
    assert not is_name(pile)
    for word in ("Tiếng Việt", "क्षि", "กี่", "e\u0323\u0302"):
        assert visible(word) == word
        assert is_name(word)


def test_lines_and_tabs_of_a_whole_text_stay():
    assert visible_lines("a\tb\nc\x1b\r\n") == "a\tb\nc\\x1b\\x0d\n"


def test_a_long_text_is_cut_and_the_rest_counted():
    assert visible("x" * 30, 10) == "xxxxxxxxxx ... and 20 more characters"
    assert len(visible("\x1b" * 10**6)) < 20_000


@pytest.mark.parametrize("name", ["age", "Bare Nuclei", "BMI (kg/m²)", "größe", "年齢", "x" * 200])
def test_names_of_every_script_are_taken(name):
    assert is_name(name)
    check_name("it", name)


@pytest.mark.parametrize(
    "name", ["", " a", "a ", "a  b", "a\u00a0b", "a\nb", "x" * 201, 3, None], ids=ascii
)
def test_what_is_no_name_is_refused_in_a_visible_sentence(name):
    assert not is_name(name)
    with pytest.raises(BadInput, match="it must be 1 to 200 visible characters") as refused:
        check_name("the name", name)
    assert visible(refused.value) == str(refused.value)
