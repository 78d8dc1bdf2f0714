"""Check what README and docs promise: that links and paths lead somewhere, and that each `actmem …` line parses.

Usage: python tools/check_docs.py. Prints one line for each broken promise; exit code 1 if there is any.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import typer.main

from actmem.cli.main import app

ROOT = Path(__file__).parents[1]

_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href|srcset)=\"([^\"]+)\"")
_PATH = re.compile(
    r"(?<![\w./-])(?:actmem|benchmarks|configs|docs|examples|tests|tools)/[\w./-]*\w|(?<![\w./-])[\w-]+\.(?:md|toml)\b"
)
_INLINE_COMMAND = re.compile(r"`(actmem [^`]+)`")
_MAKE = re.compile(r"(?:^\s*\$?\s*|`)make ([a-z]+)", re.MULTILINE)
_END_OF_COMMAND = {"|", "||", "&&", ";", ">", ">>", "2>&1", "&"}


def main() -> int:
    """Check all pages; the number of broken promises, at most 1."""
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [f"{page.relative_to(ROOT)}: {fault}" for page in pages for fault in faults_of(page)]
    print("\n".join(broken) if broken else f"{len(pages)} pages: every link, path and command holds")
    return min(len(broken), 1)


def faults_of(page: Path) -> Iterator[str]:
    """What does not hold on one page, with its line."""
    if not page.is_file():
        yield "is missing"
        return
    text = page.read_text(encoding="utf-8")
    yield from _broken_links(page, text)
    for match in _PATH.finditer(_without_links(text)):
        if not (ROOT / match[0]).exists() and not (page.parent / match[0]).exists():
            yield f"line {_line(text, match.start())}: {match[0]} does not exist"
    for line, command in _commands(text):
        if complaint := complaint_about(command):
            yield f"line {line}: `{command}` does not parse: {complaint}"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for match in _MAKE.finditer(text):
        if match[1] not in targets:
            yield f"line {_line(text, match.start(1))}: make {match[1]} is no target"


def complaint_about(command: str) -> str | None:
    """What `actmem` says against a command line, without running it; `None` if it takes it."""
    words = shlex.split(command, comments=True)
    end = next((index for index, word in enumerate(words) if word in _END_OF_COMMAND), len(words))
    group = typer.main.get_command(app)
    for subcommand in getattr(group, "commands", {}).values():
        subcommand.callback = None  # parse, and do nothing
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            group.main(words[1:end], prog_name="actmem")
        except SystemExit as ended:
            return said.getvalue().strip().rpartition("\n")[2] if ended.code else None
    return None


def _broken_links(page: Path, text: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # another site, which this check does not visit
        file = (page.parent / target) if target else page
        where = f"line {_line(text, match.start())}: {target}"
        if not file.exists():
            yield f"{where} does not exist"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{where}#{anchor} has no such heading"


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a Markdown text get."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_links(text: str) -> str:
    """The text with link targets and web addresses blanked, at the same offsets."""
    return re.sub(r"\]\([^)]*\)|\w+://\S+", lambda match: " " * len(match[0]), text)


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each `actmem …` in a code block or between backticks."""
    inside = False
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside and (command := line.strip().removeprefix("$ ")).startswith("actmem "):
            while command.endswith("\\"):
                command = command[:-1] + next(lines, (0, ""))[1].strip()
            yield number, command
        elif not inside:
            yield from ((number, match[1]) for match in _INLINE_COMMAND.finditer(line))


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


if __name__ == "__main__":
    sys.exit(main())
