"""What mkdocs needs beside docs/: README.md as the first page, and a page of each file that a page
links to, so that the links of the repository lead somewhere on the site too; and the top level's
files as they are, in files/. Commands are marked, and
lines that are too long for any page: site.css wraps these. Other lines are columns, and scroll."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
CODE = re.compile(r"(?<=<pre><span></span><code>)[^<]*(?=</code></pre>)")  # of no language
PROGRAMS = r"python3?|torchrun|pip|git|cp|cd|source|unshare|\.venv/bin/\w+|\.ci/run"
COMMAND = re.compile(rf"^(?:\w+=\S+ )*(?:{PROGRAMS})(?: .*)?$", re.MULTILINE)
HYPHENS = re.compile(r"[^\s<>&]*-[^\s<>&]*")  # where a browser would break a word
COLUMNS = re.compile(r" {3,}")  # between two commands of a line, or a command and what it does
LONG = re.compile(r"^(?!<).{111,}$", re.MULTILINE)


def on_files(files, config):
    if not files.get_file_from_path("index.md"):
        # As if it were in docs/, from where the other links start
        text = LINK.sub(lambda link: posixpath.relpath(link[0], "docs"), read("README.md"))
        files.append(File.generated(config, "index.md", content=text))
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = in_repository(page.src_uri, link)
            # Links to what does not exist are left alone: the build fails on them
            if path and (ROOT / path).is_file() and not files.get_file_from_path(source(path)):
                options = dict(content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(File.generated(config, source(path), **options))
    for lesson in sorted(ROOT.glob("*.py")):  # to be fetched, as docs/learn/two-files.ipynb does
        content = lesson.read_text()
        files.append(File.generated(config, f"files/{lesson.name}", content=content))


def on_page_markdown(markdown, page, config, files):
    def mapped(link):
        path = in_repository(page.file.src_uri, link[0])
        target = source(path) if path else None
        if not files.get_file_from_path(target or ""):
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri))

    return LINK.sub(mapped, markdown)


def on_page_content(html, page, config, files):
    def command(line):
        words = HYPHENS.sub(r"<span>\g<0></span>", line[0])
        words = COLUMNS.sub(r'<span class="columns">\g<0></span>', words)
        return f'<span class="command-line">{words}</span>'

    def marked(code):
        return LONG.sub(r'<span class="long-line">\g<0></span>', COMMAND.sub(command, code[0]))

    return CODE.sub(marked, html)


def in_repository(page, link):
    """The path of a link's file from the repository's root. None if it is a page of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def source(path):
    """The page that shows a file."""
    return f"source/{path}.md"


def read(path):
    return (ROOT / path).read_text()


def shown(path):
    if path.endswith(".md"):
        return read(path)
    front = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
    return f"{front}\n# {path}\n\n```python\n{read(path)}\n```\n"
