"""The token map's definition in plain Python, without a tokenizer's normalizers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

WHITE_SPACE = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def plain_key(text: str, raw: str) -> str:
    """Say what a token's key is: `text` is what it decodes to, `raw` the token as the vocabulary has it."""
    if "\ufffd" in text:
        return raw
    letters = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    letters = "".join(c.lower() for c in letters if not unicodedata.category(c).startswith("M"))
    letters = re.sub("[ \t\r\n]+", " ", letters)
    if letters == " ":
        return letters
    while letters and ord(letters[0]) in WHITE_SPACE:
        letters = letters[1:]
    while letters and ord(letters[-1]) in WHITE_SPACE:
        letters = letters[:-1]
    return letters.replace("\ue000", " ") or text


def plain_map(texts: Sequence[str], raws: Sequence[str]) -> list[int]:
    """Number the keys by first appearance, by looking each up in the list of those before."""
    keys: list[str] = []
    numbers = []
    for text, raw in zip(texts, raws, strict=True):
        key = plain_key(text, raw)
        if key not in keys:
            keys.append(key)
        numbers.append(keys.index(key))
    return numbers


def bytes_of_letters() -> dict[str, int]:
    """Give the byte behind each letter of a byte-level vocabulary: visible Latin-1 is itself, the rest past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
