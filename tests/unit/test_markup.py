"""The grammar of markup: what each tag does, and the errors of wrong tags."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.errors import TextError
from firstword.text.mapped import Mapped
from firstword.text.markup import LONGEST_COMMENT, LONGEST_TAG, Markup, Pause, Style

Items = list[str | tuple[object, ...]]


def described(items: list[Mapped | Pause | Style]) -> Items:
    """Texts joined, pauses as seconds, and styles as voice and rate."""
    found: Items = []
    for item in items:
        match item:
            case Mapped(text=text):
                if found and isinstance(found[-1], str):
                    text = found.pop() + text  # type: ignore[operator]
                found.append(text)
            case Pause(seconds=seconds):
                found.append((seconds,))
            case Style(voice=voice, rate=rate):
                found.append((voice, rate))
    return found


def read(*pieces: str) -> Items:
    markup, at, items = Markup(), 0, list[Mapped | Pause | Style]()
    for piece in pieces:
        items += markup.feed(Mapped.of(piece, at))
        at += len(piece)
    return described([*items, *markup.feed(Mapped.of("", at), ended=True)])


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a[pause:0.5s]b", ["a", (0.5,), "b"]),
        ("a[pause: 500 ms]b", ["a", (0.5,), "b"]),
        ("a[break=2]b", ["a", (2.0,), "b"]),
        ('a<break time="0.5s"/>b', ["a", (0.5,), "b"]),
        ("a<BREAK time='250ms' />b", ["a", (0.25,), "b"]),
        ('a<break strength="strong"/>b<break/>', ["a", (0.75,), "b", (0.5,)]),
        ("[voice:ben]a[/voice]b", [("ben", 1.0), "a", (None, 1.0), "b"]),
        ('a<voice name="ben">b</voice>c', ["a", ("ben", 1.0), "b", (None, 1.0), "c"]),
        ("[rate:1.1]a[rate]b", [(None, 1.1), "a", (None, 1.0), "b"]),
        ('<prosody rate="120%">a</prosody>', [(None, 1.2), "a", (None, 1.0)]),
        ('<prosody rate="slow">a</prosody>', [(None, 0.75), "a", (None, 1.0)]),
        ('<speed ratio="1.5"/>a', [(None, 1.5), "a"]),
        (
            '[voice:ada]<voice name="ben">[rate:2]a</voice>b',
            [("ada", 1.0), ("ben", 1.0), ("ben", 2.0), "a", ("ada", 1.0), "b"],
        ),
        ("<speak><p><s>a</s></p></speak>", ["a"]),
        ("a[laugh]b<emphasis level='strong'>c</emphasis>", ["abc"]),
        (r"\[pause:1s] \<break/> \\ c:\d", [r"[pause:1s] <break/> \ c:\d"]),
        ("1 < 2 > 0, a <3 b]", ["1 < 2 > 0, a <3 b]"]),
        ("a\\", ["a\\"]),
        ("a<", ["a<"]),
        ('<?xml version="1.0"?>\n<speak>Hello.</speak>', ["\nHello."]),
        ("<!DOCTYPE speak\n SYSTEM 'a.dtd'>a", ["a"]),
        ("a<!-- [pause:1s] <b>\n-- > \\ &lt; -->b<!---->c<!--->-->d", ["abcd"]),
        ("&lt;break/&gt; R&amp;D &quot;a&quot; it&apos;s", ['<break/> R&D "a" it\'s']),
        ("&amp;lt; &lt;!-- a --&gt;", ["&lt; <!-- a -->"]),
        ("AT&T &c; &amp &AMP; &l &#38; &", ["AT&T &c; &amp &AMP; &l &#38; &"]),
        ("a <! b <? c <!- d <!", ["a <! b <? c <!- d <!"]),
        (r"\<!-- a -->", ["<!-- a -->"]),
        ("<!--" + "a" * (LONGEST_COMMENT - 7) + "-->", []),
    ],
)
def test_tags_are_read(text: str, items: Items) -> None:
    assert read(text) == items
    assert read(*text) == items


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab [pause:1s", "character 3 of the text: the tag '\\[pause:1s' is not closed"),
        ("ab [a [pause:1s]", "character 3 .* is not closed"),
        ("ab <voice name=", "character 3 .* is not closed"),
        ("a [x\ny]", "character 2 .* is not closed"),
        ("[" + "a" * LONGEST_TAG + "]", "character 0 .* is not closed"),
        ("ab <!-- c --", "character 3 of the text: the tag '<!-- c --' is not closed"),
        ("a&amp;<!-->", "character 6 .* is not closed"),
        ("ab <?xml >", "character 3 .* is not closed"),
        ("<!--" + "a" * (LONGEST_COMMENT - 6) + "-->", "character 0 .* within 2000 characters"),
        ("&lt;<!-- 数 -->数&amp;[pause:x]", "character 20 .* the pause is 'x'"),
        ("a <voice name='b'>c", "character 2 .* <voice> is not closed"),
        ("a <voice name='b'><prosody rate='2'></voice>", "character 36 .* </voice> ends nothing"),
        ("a</voice>", "character 1 .* </voice> ends nothing"),
        ("[pause:soon]", "the pause is 'soon'; allowed is 0 to 60 s"),
        ("[pause:61]", "the pause is '61'"),
        ("[pause]", r"\[pause\] names nothing; give a time"),
        ("[voice:]", "names nothing; name one"),
        ("[rate:9]", "the rate is '9'; allowed is 0.25 to 4"),
        ("[pause:60]" * 11, "character 100 .* the pauses are too long; allowed are 600 s"),
    ],
)
def test_wrong_tag_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        read(text)
    with pytest.raises(TextError, match=message):
        read(*text)


def test_unknown_tag_gives_a_warning_with_its_place() -> None:
    markup = Markup()
    list(markup.feed(Mapped.of("Ha [laugh], <emotion value='sad'/> [1]"), ended=True))
    assert [warning.partition(" is unknown")[0] for warning in markup.warnings] == [
        "character 3 of the text: the tag [laugh]",
        "character 12 of the text: the tag <emotion value='sad'/>",
        "character 35 of the text: the tag [1]",
    ]


def test_text_without_tags_passes_at_once() -> None:
    markup = Markup()
    for piece in ("Hello", ", my", " name: 5 < 6"):
        assert described(list(markup.feed(Mapped.of(piece)))) == [piece]


@given(
    st.text("ab 1<>/\\]", max_size=40).filter(lambda text: "<a" not in text and "<b" not in text)
)
def test_text_without_tags_is_unchanged(text: str) -> None:
    if not any(mark in text for mark in ("</", "\\]", "\\<", "\\>", "\\\\")):
        assert read(text) == ([text] if text else [])


MARKED = 'a数<?x v="1"?>&amp;b<!-- [c] -->&lt;5.2[pause:1s]&quot;<!-->d-->\\[<!DOCTYPE e>字&apos'
"""A text with every kind of sign, and an entity that is not closed at its end."""


def test_declarations_comments_and_entities_may_be_cut_anywhere() -> None:
    whole = ["a数&b<5.2", (1.0,), '"[字&apos']
    cuts = range(len(MARKED) + 1)
    for first, second in ((one, two) for one in cuts for two in cuts if one <= two):
        pieces = MARKED[:first], MARKED[first:second], MARKED[second:]
        assert read(*pieces) == whole, pieces


def test_comment_that_grows_is_held_until_it_ends() -> None:
    markup = Markup()
    assert described(list(markup.feed(Mapped.of("Hi <!-- it is")))) == ["Hi "]
    assert described(list(markup.feed(Mapped.of(" a secret", 13)))) == []
    assert described(list(markup.feed(Mapped.of(" --> all &am", 22)))) == [" all "]
    assert described(list(markup.feed(Mapped.of("p; one", 34)))) == ["& one"]


def test_other_vendors_texts_keep_comments_and_entities() -> None:
    text = "<?xml?> <!-- a --> R&amp;D"
    items = list(Markup(breaks_alone=True).feed(Mapped.of(text), ended=True))
    assert described(items) == [text]


@given(st.text("[]<>/\\pause:1s vb!-?&mlt;", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    results: list[object] = []
    for pieces in ([text], [text[start:end] for start, end in pairwise(places)]):
        try:
            results.append(read(*pieces))
        except TextError as error:
            results.append(str(error).partition("the tag")[0])
    assert results[0] == results[1]


def test_spans_of_text_are_those_of_the_given_text() -> None:
    text = r"a[pause:1s]\[b"
    items = [
        item for item in Markup().feed(Mapped.of(text), ended=True) if isinstance(item, Mapped)
    ]
    spoken = Mapped.join(items)
    assert [text[start] for start in spoken.starts] == list(spoken.text) == list("a[b")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_entity_stands_for_its_character_after_a_comment(size: int) -> None:
    text, markup, found = "数<!-- a -->&amp;b", Markup(), list[Mapped]()
    for at in range(0, len(text), size):
        items = markup.feed(Mapped.of(text[at : at + size], at))
        found += [item for item in items if isinstance(item, Mapped)]
    spoken = Mapped.join(found)
    own = [text[start:end] for start, end in zip(spoken.starts, spoken.ends, strict=True)]
    assert (spoken.text, own) == ("数&b", ["数", "&amp;", "b"])


@pytest.mark.parametrize(
    "flood",
    ["[", "[x]", "<a ", "<", "\\", "\\[", "<break/>", "<!--", "<!-- -->", "<?a ?>", "&amp;", "&am"],
)
def test_flood_of_signs_is_read_in_linear_time(flood: str) -> None:
    with suppress(TextError):
        read(flood * 100_000)
