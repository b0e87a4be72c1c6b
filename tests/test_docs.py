"""The documentation: links lead somewhere, named files exist, the README stays short, made pages are up to date."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import errors_page
import pytest

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
PAGES = LISTED.stdout.splitlines()
LONGEST_README = 900


def prose(path: Path) -> str:
    """Return a page without its code blocks, fenced or indented."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def test_the_pages_are_found() -> None:
    assert {"README.md", "hscache/store/FORMAT.md", "hscache/ERRORS.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    named = re.findall(
        r"(?<![\w./-])(?:hscache|hstrain|manifests|tests|tools|trainer)/[\w./-]*\w", (ROOT / page).read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(prose(ROOT / "README.md").split()) <= LONGEST_README


def test_the_page_of_errors_is_what_its_tool_prints() -> None:
    assert (ROOT / "hscache/ERRORS.md").read_text() == errors_page.page()
