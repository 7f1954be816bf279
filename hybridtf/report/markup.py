"""A table as text for documents: Markdown, and LaTeX with the rules of ``booktabs``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Words(NamedTuple):
    """A table as text: each head with whether its column holds numbers, and the cells row by row."""

    heads: list[tuple[str, bool]]
    rows: list[list[str]]


_MARKDOWN = "\\`*_[]<>|#"

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\symbol{34}", "`": r"\textasciigrave{}", "[": "{[}", "]": "{]}",
    "\u2013": "--", "\u202f": r"\,", "\u00a0": "~", "\u00d7": r"\(\times\)", "\u2212": r"\(-\)",
    "\ufffd": "?",
}  # fmt: skip


def markdown(words: Words, notes: Sequence[str]) -> str:
    """A table of GitHub's Markdown, with its notes as paragraphs below."""
    lines = [[markdown_text(head) for head, _ in words.heads], ["---:" if number else "---" for _, number in words.heads]]
    lines += [[markdown_text(cell) for cell in row] for row in words.rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n\n".join([table, *(markdown_text(note) for note in notes)]) + "\n"


def markdown_text(text: str) -> str:
    """Inert in Markdown: no new cell, line, tag, heading or link begins in it."""
    for sign in _MARKDOWN:
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split("\n"))


def latex(words: Words, title: str, label: str, notes: Sequence[str]) -> str:
    """A ``table`` float. It needs ``booktabs`` and ``graphicx``: a table wider than the text is scaled down to it."""
    columns = "".join("r" if number else "l" for _, number in words.heads)
    rows = [" & ".join(latex_text(cell) for cell in row) + r" \\" for row in words.rows]
    note = [r"\par\smallskip\footnotesize " + " ".join(latex_text(note) for note in notes)] if notes else []
    return "\n".join([
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(title)}}}",
        rf"\label{{{re.sub(r'[^A-Za-z0-9:-]+', '-', label)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
        r"\toprule",
        " & ".join(_latex_head(head, number) for head, number in words.heads) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}}",
        *note,
        r"\end{table}",
    ]) + "\n"  # fmt: skip


def latex_text(text: str) -> str:
    """Inert in LaTeX: nothing in it is a command, a group, a comment or a cell."""
    line = " ".join(text.split("\n"))
    return "".join(_LATEX.get(sign, sign if sign.isprintable() else "?") for sign in line)


def _latex_head(head: str, number: bool) -> str:
    """A head in two lines: its words, and its unit below."""
    found = re.fullmatch(r"(.+) (\([^()]+\))", head, re.DOTALL)
    lines = [head] if found is None else [found[1], found[2]]
    side = "r" if number else "l"
    return rf"\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}" + r"\\".join(latex_text(line) for line in lines) + r"\end{tabular}"
