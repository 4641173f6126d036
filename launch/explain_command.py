"""``trine explain WORDS``: the error that a message comes from, its cause and its remedy, read from the source."""

import re
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from engine.launch.raised_errors import RaisedError, raised_errors

SHOWN = 3
"""Maximum number of errors that ``trine explain`` prints."""
ENOUGH = 0.5
"""Minimum share of the words that a matching error contains."""
PASTED = 6
"""Minimum number of words of a text that is matched as a whole message."""
WIDTH = 100


def add_explain_options(parser: ArgumentParser) -> None:
    """Adds the arguments of ``trine explain`` to the parser ``parser``."""
    parser.add_argument("words", nargs="*", metavar="WORDS", help="words of the error, or all of its text")
    parser.add_argument("--all", action="store_true", help="list every error, or every one that fits the words")


def explain(options: Namespace) -> int:
    """Prints the engine's error messages that best match the user's words; with ``--all``, every matching message.

    Returns exit status 0, 1 if no message matches, or 2 if neither words nor ``--all`` are given.
    """
    given = " ".join(options.words)
    errors = list({(error.kind, error.text): error for error in raised_errors()}.values())
    if options.all:
        found = [error for error in errors if share_of_words(error, given) >= ENOUGH] if given else errors
        print(
            "\n".join(
                f"{error.kind}: {readable(error.text)}" for error in sorted(found, key=lambda one: (one.kind, one.text))
            )
        )
        return 0 if found else 1
    if not given:
        print("trine explain takes words of an error; --all lists every error.", file=sys.stderr)
        return 2
    best = closest(errors, given)
    if not best:
        print(f"no error has the words {given!r}; leave out values such as numbers and paths.", file=sys.stderr)
        return 1
    print("\n\n".join(map(described, best)))
    return 0


def closest(errors: Sequence[RaisedError], given: str) -> list[RaisedError]:
    """Returns the error messages that are most similar to the text ``given``, best first.

    If ``given`` contains a full message, only this message is returned.
    """
    asked = spelled(given, errors)
    known = [(share_of_words(error, given, asked), constant(error), error) for error in errors]
    fits = sorted(known, key=lambda one: one[:2], reverse=True)
    whole = [error for share, _, error in fits if share > 1]
    if whole:
        return whole[:1]
    return [error for share, _, error in fits if share >= ENOUGH and share >= 0.8 * fits[0][0]][:SHOWN]


def spelled(given: str, errors: Sequence[RaisedError]) -> list[str]:
    """Splits the user's text ``given`` into words, without numbers and paths.

    A word that is not in ``errors`` is replaced by the most similar word of ``errors``, if any.
    """
    vocabulary = {word for error in errors for word in words_of(error.text)}
    words = [word for word in words_of(given) if not re.search(r"[\d/]", word)]
    near = {word: get_close_matches(word, vocabulary, 1, 0.85) for word in {*words} - vocabulary}
    return [(near.get(word) or [word])[0] for word in words]


def share_of_words(error: RaisedError, given: str, asked: Sequence[str] | None = None) -> float:
    """Returns the similarity of an error message and the text ``given``, from 0 to 1; 2 if ``given`` contains the
    message.

    The similarity is the fraction of the words of ``given`` that are in the message. If both texts have at least
    ``PASTED`` words and this fraction is at least 1/4, the fraction of the message's words that are in ``given``
    replaces it if larger.

    ``asked``: words of ``given`` to compare; None: all.
    """
    said = " ".join(given.split())
    if constant(error) >= 12 and re.search(".*?".join(map(re.escape, pieces(error.text))), said, flags=re.DOTALL):
        return 2.0
    words = words_of(said) if asked is None else asked
    have = set(words_of(error.text))
    share = sum(word in have for word in words) / len(words) if words else 0.0
    fixed = words_of(" ".join(pieces(error.text)))
    if len(words) < PASTED or len(fixed) < PASTED or share < ENOUGH / 2:
        return share
    blocks = SequenceMatcher(None, fixed, words, autojunk=False).get_matching_blocks()
    return max(share, sum(block.size for block in blocks) / len(fixed))


def words_of(text: str) -> list[str]:
    """Returns the words of ``text`` in lower case, in order."""
    return re.findall(r"[\w.\-]*\w", text.lower())


def pieces(text: str) -> list[str]:
    """Returns the constant texts between the placeholders (in braces) of the error message ``text``."""
    return [piece.strip() for piece in re.split(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", text) if piece.strip()]


def constant(error: RaisedError) -> int:
    """Returns the number of characters of an error message without its placeholders."""
    return sum(map(len, pieces(error.text)))


def readable(text: str) -> str:
    """Formats the error message ``text`` for display: <value> for each placeholder, and [text] for optional text."""
    text = re.sub(r"\{\?([^{}]*)\}", r"[\1]", text)
    return re.sub(r"\{([^{}\"']*)\}", r"<\1>", text)


def described(error: RaisedError) -> str:
    """Formats an error message for the terminal: text, remedy, raising function, and the function's docstring."""
    text = readable(error.text)
    clauses = re.split(r"; (?=[^;]*$)", text, maxsplit=1)
    rule, remedy = clauses if len(clauses) == 2 else (text, "the sentence has no separate remedy.")
    where = f"engine/{error.file}:{error.line}" + (f", {error.function}()" if error.function else "")
    about = " ".join(error.about.split("\n\n")[0].split())
    rows = (("error", f"{error.kind}: {rule}"), ("remedy", remedy), ("raised", where), ("context", about))
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"{name:8}", subsequent_indent=" " * 8, break_long_words=False)
        for name, text in rows
    )
