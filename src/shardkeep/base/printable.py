"""Names and values of data in texts for a person. What a terminal or an editor would act on becomes an escape."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with `\n`, `\x1b` or `\u202e` in place of each character that is not printable and not in `keep`.

    Controls, ends of lines, marks of direction and other invisible characters are not. YAML reads the escapes within
    double quotes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
