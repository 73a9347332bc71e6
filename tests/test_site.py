"""The site: it builds without a warning, and a reader's browser loads nothing from elsewhere."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r"(src|href)=\"?(https?:)?//", tag), f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style.name
