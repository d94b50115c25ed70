"""What sites and servers answer is printed, and nothing else happens."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedplat.cli import operator, watch
from fedplat.cli.terminal import plain

HOSTILE = [
    "[/x] refused",
    "[bold]accepts[/]",
    "[link=https://evil.example]accepts[/link]",
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[1;1Haccepts",
    "\x9b31m",
    "refused\raccepts",
    "refused\nsite-2: accepts",
    "\u202estpecca",
    "a\u2066b",
    "\ud800",
    "back\\",
    "\\[/]",
    "\x00\x7f",
]


def shown(text: str) -> str:
    out = io.StringIO()
    Console(file=out, width=10_000, force_terminal=False).print(f"[bold]site-1[/]: {plain(text)}", highlight=False)
    return out.getvalue()


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_hostile_text_is_shown_as_text(text):
    seen = shown(text)
    assert seen.count("\n") == 1 and seen.endswith("\n") and seen.removesuffix("\n").isprintable()
    assert seen.startswith("site-1: ")


def said(text: str) -> str:
    """Without blanks, and backslashes, of which rich may double the last."""
    return "".join(c for c in text if c.isprintable() and not c.isspace() and c != "\\")


@given(st.text().filter(lambda text: ":" not in text))  # rich makes pictures of :names:
def test_whatever_is_printed_is_printable_and_says_what_was_said(text):
    seen = shown(text)
    assert seen.count("\n") == 1
    assert said(seen.removeprefix("site-1: ")) == said(text)


def test_a_dry_run_shows_what_sites_answer_as_text(monkeypatch):
    out = io.StringIO()
    answers = {"site-1": "policy [/x] refused\x1b[2J", "[red]site-2": "accepts"}
    monkeypatch.setattr(watch, "considered", lambda *_: answers)
    console = Console(file=out, width=200, force_terminal=False)
    assert operator._consider(None, 1, console, False) is False  # type: ignore[arg-type]
    assert out.getvalue() == "site-1: policy [/x] refused[2J\n[red]site-2: accepts\n"
