"""Writes text.txt beside this file: a harbour chronicle, from a small grammar and a fixed seed."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

CHAPTERS, PARAGRAPHS, SEED = 32, 6, 7
WORDS: Mapping[str, Sequence[str]] = {
    "who": (
        "the pilot",
        "the baker",
        "the old sailor",
        "the harbour master",
        "the lamp keeper",
        "the weaver",
        "a young clerk",
        "the bell ringer",
        "the net maker",
        "a quiet stranger",
    ),
    "place": (
        "the north quay",
        "the chandler's shop",
        "the lighthouse",
        "the salt market",
        "the narrow bridge",
        "the customs house",
        "the upper town",
        "the rope walk",
    ),
    "thing": (
        "a brass lamp",
        "a letter with a green seal",
        "a coil of rope",
        "a basket of bread",
        "an old chart",
        "a silver whistle",
        "a sack of grain",
        "a book of tides",
    ),
    "when": (
        "in the morning",
        "before the tide turned",
        "at the third bell",
        "after the rain",
        "towards evening",
        "when the fog came in",
        "on the first day of the week",
    ),
    "weather": ("cold", "clear", "grey and still", "windy", "warm for the season", "heavy with rain"),
    "moved": ("walked to", "came back from", "waited at", "hurried past", "looked out over"),
    "did": ("carried", "sold", "found", "mended", "lost", "asked for", "hid"),
    "said": (
        "the water is higher than last year",
        "no ship leaves before the wind turns",
        "there is always work for honest hands",
        "somebody has moved the boats again",
        "the light must not go out tonight",
        "we have seen worse and we are still here",
    ),
    "feeling": ("glad", "worried", "tired", "curious", "patient", "sure of it"),
}
SENTENCES = (
    "{When}, {who} {moved} {place}.",
    "{Who} {did} {thing} and {moved} {place}.",
    "The air was {weather}, and {who} was {feeling}.",
    '"{Said}," said {who}.',
    "{Who} gave {thing} to {who}, who was {feeling}.",
    "Nobody at {place} knew why {who} {did} {thing}.",
    "{When} {who} {did} {thing}, and {when} it was at {place}.",
    "It was {weather} at {place}, so {who} {moved} {place} {when}.",
)


def fill(pattern: str, rng: random.Random) -> str:
    """Put a word of its kind in each place of a pattern; a capital asks for one."""
    for kind, words in WORDS.items():
        for name, change in ((kind, str), (kind.capitalize(), capital)):
            while "{" + name + "}" in pattern:
                pattern = pattern.replace("{" + name + "}", change(rng.choice(words)), 1)
    return pattern


def capital(words: str) -> str:
    """The same words at the start of a sentence."""
    return words[0].upper() + words[1:]


def chronicle(rng: random.Random) -> str:
    """The whole text."""
    parts = []
    for chapter in range(1, CHAPTERS + 1):
        parts.append(f"Chapter {chapter}. Of {rng.choice(WORDS['who'])} and {rng.choice(WORDS['thing'])}")
        for _ in range(PARAGRAPHS):
            sentences = [fill(rng.choice(SENTENCES), rng) for _ in range(rng.randint(4, 7))]
            parts.append(" ".join(sentences))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("text.txt").write_text(chronicle(random.Random(SEED)), encoding="utf-8")
