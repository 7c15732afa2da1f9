from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from sab.errors import printable
from sab.lab.report.page import elements
from sab.lab.report.page.elements import Drawn

HOSTILE = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>\u2028\u2029&amp;\"`${x}"


class Tags(HTMLParser):
    """The tags and the texts of a piece of HTML."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_text_is_text_between_tags_and_in_attributes() -> None:
    found = Tags(f'<p title="{elements.text(HOSTILE)}">{elements.text(HOSTILE)}</p>')
    assert found.tags == ["p"]
    assert found.attributes["title"] == printable(HOSTILE)
    assert "".join(found.texts) == printable(HOSTILE)


@pytest.mark.parametrize("shown", [elements.text, elements.label])
def test_what_is_no_letter_is_escaped(shown: Callable[[str], str]) -> None:
    assert shown("a\x1b[31m\n\u202e\udcff é 漢") == r"a\x1b[31m\n\u202e\udcff é 漢"


def test_a_table_and_a_figure_have_no_tags_of_their_contents() -> None:
    table = elements.table([HOSTILE, "b"], [[HOSTILE, "2"]], HOSTILE)
    assert Tags(table).tags == "div table thead tr th th tbody tr td td".split()
    drawn = Drawn({}, HOSTILE, HOSTILE, [HOSTILE], [[HOSTILE]])
    assert not {"img", "script"} & set(Tags(elements.figure(HOSTILE, drawn)).tags)
    assert Tags(
        elements.section("a", HOSTILE, [elements.heading(HOSTILE, HOSTILE), elements.paragraph(HOSTILE)])
    ).tags == ("section h2 h3 p".split())


def test_embedded_json_ends_no_script_and_is_the_same_value() -> None:
    value = {"name": HOSTILE, "<b>": [1.5, None, "<!--"]}
    made = elements.embedded(value)
    assert json.loads(made) == value
    assert not re.search("[<>&\u2028\u2029]", made)
    with pytest.raises(ValueError, match="not JSON compliant"):
        elements.embedded(float("nan"))


def test_labels_of_figures_have_no_tags() -> None:
    assert elements.label("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"


def test_a_script_is_known_by_its_digest() -> None:
    digest = hashlib.sha256("é".encode()).digest()
    assert elements.digest("é") == f"'sha256-{base64.b64encode(digest).decode()}'"
