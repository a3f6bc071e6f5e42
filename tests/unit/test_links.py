"""Links in the pages lead somewhere, and every page can be reached from the README."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/*/README.md"),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, and the heading in each."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [
        ((page.parent / path).resolve() if path else page, anchor)
        for path, anchor in LINK.findall(text)
    ]


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of the headings of a page."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_each_link_leads_to_a_file_and_to_a_heading_in_it() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target.name}#{anchor}"
        for page in PAGES
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_each_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        # A folder shows its README.
        page = page / "README.md" if page.is_dir() else page
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            waiting += [target for target, _ in links(page)]
    assert [page.name for page in PAGES if page not in reached] == []
