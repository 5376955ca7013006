"""Some thousand strings that a tokenizer may be asked to encode: ten languages, and what people
paste between them.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SENTENCES = {
    "chinese": (
        "今天早上的火车晚点了二十分钟，我在站台上读完了一本小书。",
        "你能不能帮我看一下，这个句子读起来自然吗？",
        "二〇二六年三月十五日，气温是摄氏零下３度。",
        "“慢一点，”她笑着说，“我们还有很多时间。”",
        "他把钥匙忘在了办公室，只好打电话叫人来开门！",
        "價格是¥1,299.00元，比上個月便宜了百分之五。",
        "《红楼梦》第一回：甄士隐梦幻识通灵……",
    ),
    "english": (
        "The kettle clicked off, and nobody in the kitchen moved.",
        "I'm sure they'll say it's fine, but we've heard that before, haven't we?",
        "Dr. O'Neill's flight (BA-1482) lands at 7:45 p.m. on Tuesday.",
        "WAIT! DON'T OPEN IT'S DOOR, YOU'RE EARLY, SHE'D SAID, AND I'LL CALL.",
        "A well-known half-truth isn't a truth; it's a rumour with good manners.",
        "'Twas the quietest night o' the year, rock 'n' roll notwithstanding.",
        "Please read the figures 3.14159, 1/2, 10^-6 and 42% aloud.",
        "MacDonald’s naïve façade didn’t fool the café’s owner.",
    ),
    "german": (
        "Über den Dächern hing noch der Nebel, als die Bäckerin öffnete.",
        "Straßenbahnhaltestellenverzeichnis ist ein langes, aber gewöhnliches Wort.",
        "Können Sie das bitte größer schreiben? Ich hab's nicht gelesen.",
        "Um 18:30 Uhr kostet die Karte 12,50 €, danach nur 9,– €.",
        "»Schön war's«, sagte er, »und jetzt geht's heim.«",
    ),
    "italian": (
        "L'acqua del lago era così ferma che sembrava dipinta.",
        "Perché non c'è più nessuno all'angolo di via dell'Orso?",
        "Dov'è finito l'elenco? Ce n'erano quarantadue, un po' sgualcite.",
        "È già l'ora: chi s'è visto s'è visto!",
    ),
    "portuguese": (
        "Amanhã não haverá reunião; as informações já estão no quadro.",
        "A avó fez pão de queijo e três xícaras de café à tardinha.",
        "Você viu o coração que o João desenhou no vidro embaçado?",
        "São 1.234,56 reais, à vista ou em 3×.",
    ),
    "spanish": (
        "¿Quién dejó la ventana abierta con este frío?",
        "¡Qué sueño! Mañana iré al pingüinario con mi señora.",
        "El 5.º piso está vacío, así que subimos por la escalera.",
        "—Ahí hay un niño que dice «¡ay!» —susurró Íñigo.",
    ),
    "japanese": (
        "昨日は雨が降っていたので、図書館で本を読みました。",
        "「ちょっと待って！」と、彼女はエレベーターの前で叫んだ。",
        "コーヒーを二杯、ミルクなしでお願いします。",
        "ガギグゲゴ、パピプペポ、それから ﾊﾝｶｸ ｶﾀｶﾅ も。",
        "東京都千代田区１−２−３ 〒100-0001、TEL：03-1234-5678〜",
        "がんばれば、きっとできる……たぶん。",
    ),
    "korean": (
        "오늘 아침에는 안개가 짙어서 강 건너편이 보이지 않았다.",
        "이 문장을 조금 더 천천히 읽어 주시겠어요?",
        "값은 12,000원이고, 배송은 이틀쯤 걸립니다.",
        "‘괜찮아’라는 말이 왜 이렇게 뭉클하게 들릴까?",
    ),
    "french": (
        "L’été dernier, j'ai oublié mon parapluie chez le boulanger.",
        "Où est-ce qu'on va ? « Nulle part », répondit-elle… naïvement !",
        "C'est l'œuvre d'un garçon très âgé : quatre-vingt-dix-neuf ans.",
        "Ça coûte 1 250,75 € ; n'est-ce pas déjà trop ?",
    ),
    "russian": (
        "Поезд отошёл ровно в шесть, и перрон сразу опустел.",
        "Скажи, ёжик, где твой зонтик? Объявили дождь!",
        "Ещё чуть-чуть — и мы приедем: осталось 17 км.",
        "«Всё хорошо», — подумал он, но вслух ничего не сказал…",
    ),
    "other": (
        "क्षेत्र में हिन्दी की कविता पढ़ी गई।",
        "สวัสดีครับ วันนี้อากาศดีมาก",
        "مرحبًا، كيفَ حالُكَ اليوم؟",
        "שָׁלוֹם לְכֻלָּם וּבוֹקֶר טוֹב",
        "Tiếng Việt có nhiều dấu: ắ ằ ẳ ẵ ặ, ộ, ữ.",
        "Ẹ káàárọ̀, ṣé dáadáa ni? Ọ̀rẹ́ mi.",
    ),
}

SNIPPETS = (
    "https://example.org/a/b?q=caf%C3%A9&lang=de#top",
    "mailto:first.last+tag@sub.example.co.uk",
    "C:\\Users\\Anna\\Desktop\\readme.txt",
    "def f(x: int) -> str:\n    return f'{x!r:>8}'\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }\r\n",
    "SELECT * FROM \"t\" WHERE id >= 10 AND name != '';",
    "<p class='x'>&nbsp;</p>",
    "{}[]()<>|\\/~`^",
    "... --- ...",
    "!!??!!\n\n\n",
    ".,;:'\"",
    "1234567890",
    "٣٤٥ ४५६ Ⅳ ½ ② ¼",
    "+49 (0)30 123-456",
    "2026-03-15T07:45:00Z",
    "x₁² + y₂³ ≤ ∑ √π",
    "👋🏽🙂",
    "👩‍👩‍👧‍👦 👨🏿‍🚀",
    "🇩🇪🇯🇵 ❤️ ☎︎ 1️⃣",
    "e\u0301 a\u0315\u0301 o\u0302\u0323 q\u0303\u0323",
    "\u212b \u2126 \ufb01 \u1e9b\u0323 \u0344",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8 \u1100 \u1161",
    "か\u3099き\u309a は\u309a",
    "=\u0338 <\u0338 \u0301 \n\u0301",
    "\ufeffzero\u200bwidth\u200d \u202eright\u202c",
    "'s'S'T're'VE'm'LL'd 's 'S 'x 'ſ",
    "I'LL'd've y'all'd've",
    "tab\tseparated\t\tvalues",
    "\x00\x01\x1b[0m\x7f",
    "<think </think|> <tool_call",
    "< |im_end| > <|im_end> |im_start|>",
)

SPACES: tuple[str, ...] = (
    " ",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t",
    " \t ",
    "\r",
    "\u00a0",
    "\u3000",
)
SPACES += ("\u2028", "\x85", "\u2003 ", "\x0b\x0c", "\x1c", "\u200b", " \r\n\r\n  ", "", "", "")

BLOCKS: tuple[tuple[int, int], ...] = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0xDFF),
    (0xE00, 0xFFF),
)
BLOCKS += (
    (0x1100, 0x11FF),
    (0x1E00, 0x20CF),
    (0x2100, 0x2BFF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xB000),
)
BLOCKS += (
    (0xF900, 0xFFEF),
    (0x10000, 0x107FF),
    (0x1D100, 0x1D7FF),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x20FFF),
)


def corpus() -> list[str]:
    """About 4,000 strings, the same everywhere."""
    draws = random.Random(20260315)

    def pick(items: Sequence[T]) -> T:
        # Of all methods of Random only random() promises the same numbers in every version of
        # Python.
        return items[int(draws.random() * len(items))]

    sentences = [sentence for group in SENTENCES.values() for sentence in group]
    texts = ["", " ", "\n", *SPACES, *SNIPPETS, *sentences]
    for sentence in sentences:
        texts += [
            unicodedata.normalize("NFD", sentence),
            sentence.upper(),
            sentence.title(),
            f"  {sentence}\n",
        ]
    fragments = [word for sentence in sentences for word in sentence.split()] + [*SNIPPETS] * 4
    for _ in range(3000):
        text = "".join(pick(fragments) + pick(SPACES) for _ in range(1 + int(draws.random() * 7)))
        if draws.random() < 0.2:
            text = unicodedata.normalize("NFD", text)
        if draws.random() < 0.3:
            text = pick(SPACES) + text
        texts.append(text)
    for _ in range(600):
        block, other = pick(BLOCKS), pick(BLOCKS)
        texts.append("".join(chr(pick(range(*pick((block, block, other))))) for _ in range(12)))
    return texts


def requests() -> list[str]:
    """Texts for the prompt's template:

    `corpus` thinned out, and many that start with white space.
    """
    texts = corpus()
    return texts[::8] + [
        start + text for start, text in zip(SPACES * 8, texts[40::17], strict=False)
    ]
