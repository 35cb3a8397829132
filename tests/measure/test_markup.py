from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from clearway.measure.markup import Markup, escape, join, shown, tag


class _Read(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_text_becomes_markup(child: str, attribute: str) -> None:
    read = _Read()
    read.feed(tag("td", child, data_label=attribute))
    read.close()
    assert read.tags == [("td", {"data-label": shown(attribute)})]
    assert read.words == shown(child)


def test_markup_stays_and_none_is_left_out() -> None:
    inner = tag("b", "1 < 2")
    assert tag("p", inner, None, " & ", class_="x", id=None) == '<p class="x"><b>1 &lt; 2</b> &amp; </p>'
    assert tag("img", src=Markup("data:,")) == '<img src="data:,">'
    assert join(["<", Markup("<br>")]) == "&lt;<br>"
    assert tag("line", x1=0.123456789) == '<line x1="0.12346"></line>'


def test_signs_that_deceive_are_replaced() -> None:
    assert shown("a\u202eb\x00c\ud800\x1b[0m") == "a\ufffdb\ufffdc\ufffd\ufffd[0m"
    assert shown(12) == "12" and isinstance(escape("<"), Markup)
    assert len(shown("x" * 10_000)) == 600


def test_what_is_too_long_ends_with_a_whole_word() -> None:
    cut = shown("transformers, " * 60)
    assert cut.removesuffix(" …").replace("transformers, ", "") == "transformers,"
    assert 580 < len(cut) <= 600
    assert shown("word " * 119 + "last") == "word " * 119 + "last"
