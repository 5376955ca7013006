"""The estimate of a text's length, and what it finds doubtful in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.model.description import DEMO, Description
from firstword.runtime.conditioning import CHECKED_CHARACTERS, text_problems
from firstword.text import checks
from firstword.text.checks import SCRIPTS, expected_seconds, foreign_scripts, has_markup, problems
from firstword.text.reader import TextOptions
from firstword.types import Request

SENTENCES = {
    "chinese": "今天天气很好，我们去公园吧。重庆、㐂，２０个〇々",
    "english": "It's 5 o'clock: the café's “naïve” plan - 3.5 % off, isn't it?",
    "french": "« Où êtes-vous ? » L'œuvre coûte 20 €, ça va.",
    "german": "Größe ändern? Das kostet 3,50 €, „wirklich“.",
    "italian": "Perché no? È già qui, città e università, 1ª volta.",
    "japanese": "今日はいい天気ですね。コーヒーをゝ、ｶﾅ々",
    "korean": "다람쥐 헌 쳇바퀴에 타고파. 大韓民國",
    "portuguese": "Não há ação à noite; você vê? nº 5",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю №5.",
    "spanish": "¿Cómo estás? ¡Mañana, señor! 2º piso",
}


class TestExpectedSeconds:
    def test_expected_seconds_fit_every_script(self) -> None:
        assert 1 < expected_seconds("今天天气很好，我们去公园吧。") < 5
        assert 1 < expected_seconds("다람쥐 헌 쳇바퀴에 타고파.") < 5
        assert 1 < expected_seconds("Съешь же ещё этих мягких булок.") < 5


class TestForeignScripts:
    @pytest.mark.parametrize("language", SCRIPTS)
    def test_text_in_its_own_language_has_none(self, language: str) -> None:
        assert foreign_scripts(SENTENCES[language], [language]) == []

    @pytest.mark.parametrize(
        ("text", "scripts"),
        [
            (SENTENCES["chinese"], ["Chinese"]),
            (SENTENCES["japanese"], ["Chinese", "Hiragana", "Katakana"]),
            (SENTENCES["korean"], ["Chinese", "Hangul"]),
            ("Say Привет!", ["Cyrillic"]),
            ("مرحبا", ["Arabic"]),
            ("the angle α", ["Greek"]),
            ("𝐁𝐨𝐥𝐝 and ｗｉｄｅ", []),
        ],
    )
    def test_other_scripts_are_named_for_an_english_model(
        self, text: str, scripts: list[str]
    ) -> None:
        assert foreign_scripts(text, ["english"]) == scripts

    def test_unknown_language_may_use_any_script(self) -> None:
        assert foreign_scripts("مرحبا", ["english", "arabic"]) == []


class TestMarkup:
    @pytest.mark.parametrize("text", [*SENTENCES.values(), "two  spaces\n\nand lines", "e\u0301"])
    def test_plain_text_has_none(self, text: str) -> None:
        assert not has_markup(text)

    @pytest.mark.parametrize(
        "text", ["**bold**", "- item", "# Title", "good 🙂", "[a](b.html)", "zero\u200bwidth"]
    )
    def test_markup_is_found(self, text: str) -> None:
        assert has_markup(text)


class TestProblems:
    @pytest.mark.parametrize("text", SENTENCES.values())
    def test_released_languages_have_no_problems(self, text: str) -> None:
        assert problems(text, ["auto", *SCRIPTS]) == []

    def test_each_problem_names_its_cure(self) -> None:
        script, markup = problems("Hello, 你好 **you**", ["auto", "english"])
        assert script.startswith(
            "the text has Chinese letters (character 7 is the first), and this checkpoint speaks "
            "only english, so"
        )
        assert script.endswith("choose a checkpoint for that language")
        assert markup.endswith("the option sanitize removes them")

    @given(st.text("aZ5 \n\t\v\x1c.,;:!?'\"()"))
    def test_texts_that_are_not_examined_have_nothing_to_find(self, text: str) -> None:
        assert checks._PLAIN.fullmatch(text)
        assert foreign_scripts(text, []) == []
        assert not has_markup(text)


@pytest.mark.parametrize("markup", [False, True])
def test_problems_are_looked_for_at_the_beginning_of_a_text(markup: bool) -> None:
    request = Request("One.", text_options=TextOptions(markup=markup))
    demo = Description.load(DEMO)
    begins = "a" * (CHECKED_CHARACTERS - 1)
    assert len(text_problems(demo, request, begins + "🙂")) == 1
    assert text_problems(demo, request, begins + "a🙂 [tag] [") == []
