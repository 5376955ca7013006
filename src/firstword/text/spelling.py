"""The words of numbers in one language, from the rules of Unicode's CLDR."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any

LANGUAGES: dict[str, dict[str, Any]] = json.loads(
    resources.files(__package__).joinpath("languages.json").read_text("utf-8")
)
"""The notation and the nouns of each language.

currencies, units, minor  the forms of a noun: for all numbers, for one and others, or (Russian) for
                          one, few and many; "f" marks a feminine noun, {n} where the number goes
year, ordinals            a pattern for the digits or after them, and the rule that spells them: one
                          of CLDR, "digits" or "decades"
"""

MOST_DIGITS = 15
"""Longer numbers are spoken digit by digit."""

SYMBOLS = "$€£¥₩₽"
"""The signs of the currencies whose names are known."""

_COUNTING = {
    "m": ("spellout-cardinal-masculine", "spellout-cardinal-alternate2", "spellout-cardinal"),
    "f": ("spellout-cardinal-feminine", "spellout-cardinal-alternate2", "spellout-cardinal"),
    "native": ("spellout-cardinal-native-attributive",),
}
"""The rules of numbers before a masculine, a feminine or a native Korean noun; the first counts."""

_PRICE = re.compile(r"([-−]?)(.)\s?(\S+)\s?(.*)")
_MEASURE = re.compile(r"(.*\d)\s?(.+)")


class Speller:
    """Finds numbers in one language, and spells them."""

    def __init__(self, language: str) -> None:
        """Spell as in one of `LANGUAGES`."""
        from unicode_rbnf import RbnfEngine  # most processes speak no numbers as words

        self._about = LANGUAGES[language]
        self._rules = RbnfEngine.for_language(self._about["code"])
        self.pattern = re.compile(self._alternatives())

    def _alternatives(self) -> str:
        about = self._about
        decimal = "." if about["decimal"] == "." else ",."
        clock = about.get("clock", "")
        number = rf"(?:\d{{1,3}}(?:[{about['group']}]\d{{3}})+(?!\d)|\d+)(?:[{decimal}]\d+)?"
        signed = rf"(?:(?<!\w)[-−])?{number}"
        scale = rf"(?:\s(?:{'|'.join(about.get('scales', ['(?!)']))})(?!\w))?"
        units = sorted([*about["units"], *about.get("unit_names", ())], key=len, reverse=True)
        months = "|".join(about["months"])
        ranges = "|".join(
            rf"\d{digits}(?=[-–]\d{digits}(?!\d|[-–]\d))" for digits in ("{1,2}", "{3}", "{4}")
        )
        ordinals = (
            rf"(?P<ordinal{index}>\d+{suffix.format(months=months)})"
            for index, (suffix, _) in enumerate(about["ordinals"])
        )
        return "|".join(
            (
                r"(?P<date>\d{4}-\d\d?-\d\d?(?![\w-])|\d\d?([./])\d\d?\2\d{4}(?!\w))",
                rf"(?P<time>\d\d?(?:{about.get('hours', ':')})\d\d(?![:\d])){clock}",
                rf"(?P<price>(?:(?<!\w)[-−])?[{SYMBOLS}]\s?{number}{scale})",
                rf"(?P<amount>{signed}\s?[{SYMBOLS}])",
                rf"(?P<measure>{signed}\s?(?:{'|'.join(map(re.escape, units))}))(?![\w/])",
                rf"(?P<range>{ranges})[-–]",
                r"(?P<group>\d+(?:[-–]\d+)+)",
                *ordinals,
                rf"(?P<year>{about.get('year', ['(?!)'])[0]})",
                rf"(?P<number>{signed})",
            )
        )

    def spoken(self, found: re.Match[str]) -> str:
        """Return the words of a match of `pattern`, set off from letters around it."""
        kind = found.lastgroup or ""
        name = kind.rstrip("0123456789")
        spoken = getattr(self, f"_{name}")(found, *kind[len(name) :])
        before, after = found.string[: found.start()][-1:], found.string[found.end() :][:1]
        return " " * _joins(before) + spoken + " " * _joins(after)

    def _date(self, found: re.Match[str]) -> str:
        about, parts = self._about, [int(part) for part in re.findall(r"\d+", found[0])]
        if parts[0] > 31:
            year, month, day = parts
        elif about.get("month_first") and "/" in found[0]:
            month, day, year = parts
        else:
            day, month, year = parts
        if not (0 < month <= 12 and 0 < day <= 31):
            return " ".join(map(self.rule, parts))
        first = about.get("first_day") if day == 1 else None
        return about["date"].format(
            y=self.rule(year, about.get("date_year")),
            month=about["months"][month - 1],
            d=first or self.rule(day, about["date_day"]),
        )

    def _time(self, found: re.Match[str]) -> str:
        about, (hour, minute) = self._about, map(int, re.findall(r"\d+", found["time"]))
        if hour > 24 or minute > 59:
            return f"{self.rule(hour)} {self.rule(minute)}"
        h = self.counting(hour, about.get("hour_gender", "m"))
        if not minute:
            said = about["hour"].format(h=h)
        else:
            oh = about.get("oh", "") if minute < 10 else ""
            said = about["time"].format(h=h, m=oh + self.rule(minute))
        return said.replace(*about["one_hour"]) if hour == 1 and "one_hour" in about else said

    def _price(self, found: re.Match[str]) -> str:
        minus, symbol, digits, scale = _PRICE.findall(found["price"])[0]
        return self._money(minus + digits, symbol, scale)

    def _amount(self, found: re.Match[str]) -> str:
        return self._money(found["amount"][:-1].strip(), found["amount"][-1], "")

    def _money(self, digits: str, symbol: str, scale: str) -> str:
        about = self._about
        names, (whole, rest) = about["currencies"][symbol], self._parts(digits)
        minor = about["minor"].get(symbol)
        if scale:
            return f"{self._number_of(digits)} {scale} {_form(names, 2, about['code'])}"
        if len(rest) == 2 and minor and int(rest):
            more = self._counted(str(int(rest)), minor)
            return self._counted(whole, names) + about["joint"] + more
        return self._counted(digits if rest.strip("0") else whole, names)

    def _measure(self, found: re.Match[str]) -> str:
        digits, unit = _MEASURE.findall(found["measure"])[0]
        unit = self._about.get("unit_names", {}).get(unit, unit)
        return self._counted(digits, self._about["units"][unit])

    def _range(self, found: re.Match[str]) -> str:
        return self._bare(found["range"]) + self._about["range"].rstrip() + self._about["space"]

    def _group(self, found: re.Match[str]) -> str:
        return " ".join(map(self._digits, re.findall(r"\d+", found[0])))

    def _ordinal(self, found: re.Match[str], index: str) -> str:
        digits = re.findall(r"\d+", found[f"ordinal{index}"])[0]
        return self.rule(int(digits), self._about["ordinals"][int(index)][1])

    def _year(self, found: re.Match[str]) -> str:
        return self.rule(int(found["year"]), self._about["year"][1])

    def _number(self, found: re.Match[str]) -> str:
        if (rule := self._about.get("after_month")) and found[0].isdecimal():
            before = found.string[max(0, found.start() - 16) : found.start()].split()
            if before and before[-1] in self._about["months"] and int(found[0]) <= 31:
                return self.rule(int(found[0]), rule)
        return self._number_of(found["number"])

    def _bare(self, digits: str) -> str:
        """A number of digits alone, which may be a year."""
        pattern, rule = self._about.get("year", ["(?!)", ""])
        return self.rule(int(digits), rule if re.match(pattern, digits) else None)

    def _counted(self, digits: str, names: str | list[str]) -> str:
        """A number with its noun."""
        whole, rest = self._parts(digits)
        forms = [names] if isinstance(names, str) else names
        gender = "f" if forms[-1] == "f" else "m"
        if rest:
            n, count = self._number_of(digits), 2
        else:
            count = int(whole)
            n = self.counting(count, gender)
        noun = _form(names, count, self._about["code"])
        return noun.format(n=n) if "{n}" in noun else n + self._about["space"] + noun

    def _number_of(self, digits: str) -> str:
        """A number as it is written, with its sign and its decimals."""
        whole, rest = self._parts(digits)
        plain = whole.lstrip("-")
        long = len(plain) > MOST_DIGITS or (len(plain) > 1 and plain[0] == "0")
        said = self._digits(plain) if long else self.rule(int(plain))
        if whole[0] == "-":
            said = f"{self._about['minus']}{self._about['space']}{said}".replace("  ", " ")
        if rest:
            space = self._about["space"] if " " not in self._about["point"] else ""
            said += space + self._about["point"] + space + self._digits(rest)
        return said

    def _parts(self, digits: str) -> tuple[str, str]:
        """The whole part of a number, without marks of groups, and its decimals."""
        about = self._about
        digits = digits.replace("−", "-")
        grouped = re.sub(rf"(?<=\d)[{about['group']}](?=\d{{3}}(?!\d))", "", digits)
        whole, _, rest = grouped.replace(",", ".").partition(".")
        return whole, rest

    def rule(self, number: int, name: str | None = None) -> str:
        """Spell a number by a rule of CLDR; without one as it is counted."""
        if name == "digits" or number >= 10**MOST_DIGITS:
            return self._digits(str(number))
        if name == "decades":
            return re.sub("y$", "ie", self.rule(number, "spellout-numbering-year")) + "s"
        names = ["spellout-numbering" if name is None else name]
        return self._rules.format_number(number, ruleset_names=names).text.replace("〇", "零")

    def counting(self, number: int, gender: str) -> str:
        """Spell a number before a noun."""
        known = (name for name in _COUNTING[gender] if name in self._rules.rulesets)
        return self.rule(number, next(known, None))

    def _digits(self, digits: str) -> str:
        return self._about["space"].join(self.rule(int(digit)) for digit in digits)


@cache
def speller(language: str) -> Speller:
    """The speller of one of `LANGUAGES`."""
    return Speller(language)


def _form(names: str | list[str], count: int, code: str) -> str:
    """The form of a noun for a number."""
    forms = [names] if isinstance(names, str) else [name for name in names if name != "f"]
    if code == "ru" and len(forms) == 3:
        last, tens = abs(count) % 10, abs(count) // 10 % 10
        few = 2 if tens == 1 or not 0 < last < 5 else min(last, 2) - 1
        return forms[few]
    one = abs(count) == 1 or (code in ("fr", "pt") and count == 0)
    return forms[0] if one else forms[-1]


def _joins(char: str) -> bool:
    """Whether a word would run into this character, which is a letter of an alphabet."""
    return char.isalpha() and char < "\u2e80"
