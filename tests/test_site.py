"""The site builds without a warning, from its folder alone: links, anchors, search, a page for every public name."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from sphinx.util.inventory import InventoryFile

import keras_paragrad

# Building all of it takes as long as a hundred other tests; `tests/test_docs.py` builds a page.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [each.relative_to(DOCS).with_suffix("").as_posix() for each in DOCS.rglob("*.md")]
COMPONENTS = ("accumulation", "distribution", "inputs", "memory", "per_example", "privacy", "profiling")


class Page(HTMLParser):
    """A page's anchors, its links, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[each] for each in ("id", "name") if given.get(each)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        source = given.get("href") if tag == "link" else given.get("src")
        if source and source != "#":
            self.loads.append(source)


def build(built, tutorials="off"):
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, "TUTORIALS": tutorials}
    options = ["-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, "-P", "-m", "sphinx", *options, str(DOCS), str(built)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_there(site):
    assert [name for name in PAGES if not (site / f"{name}.html").exists()] == []


def test_links_lead_to_a_file_and_an_anchor(site, pages):
    missing = []
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            if not target.exists() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                missing.append((path.name, link))
    assert missing == []


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        for source in page.loads:
            assert not re.match(r"([a-z]+:)?//", source), (path.name, source)
            assert (path.parent / unquote(source.partition("?")[0])).exists(), (path.name, source)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", styles)


def test_the_search_finds_names_and_words(site):
    index = (site / "searchindex.js").read_text()
    assert "DistributedFit" in index
    assert "microbatch" in index


def test_the_search_finds_the_page_about_a_word_first(site):
    """A page's index entries, each of which is of one page; the search puts main ones before all that it finds else."""
    script = (site / "searchindex.js").read_text()
    found = json.loads(script[script.index("(") + 1 : script.rindex(")")])
    entries = {
        word: {found["docnames"][page] for page, _, main in places if main}
        for word, places in found["indexentries"].items()
    }
    stated = {name: re.findall(r"^<!-- index: (.+) -->$", (DOCS / f"{name}.md").read_text(), re.M) for name in PAGES}
    words = {name: lines[0].lower().split(", ") for name, lines in stated.items() if lines}
    assert len(words) > 20
    assert [(word, name) for name, each in words.items() for word in each if entries.get(word) != {name}] == []
    assert entries["batchnorm"] == {"guides/fine_tune_cnn"}
    assert 'kind === "index"' in (site / "_static" / "language_data.js").read_text()


def test_types_in_signatures_are_short(site):
    """What they stand for would take lines, five of them for `weighting`."""
    shown = [
        re.sub(r"<[^>]+>", "", described)
        for path in (site / "reference").glob("*.html")
        for described in re.findall(r"<strong>\w+</strong> \((.*?)\) [–-]", path.read_text(), re.DOTALL)
    ]
    assert len(shown) > 100
    assert [each for each in shown if len(each) > 100] == []


def test_methods_that_only_the_package_calls_are_not_listed(site):
    page = (site / "reference" / "accumulation.html").read_text()
    assert "AccumulatingOptimizer.flush" in page
    assert not re.search("gathering|end_micro_batch|host_schedule", page)


def test_every_public_name_has_a_page(site):
    """Under the name by which it is imported: from the package, or else from its component."""
    described = {
        item
        for kind, items in InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data.items()
        if kind.startswith("py:")
        for item in items
    }
    top = keras_paragrad.__all__
    public = [f"keras_paragrad.{name}" for name in top]
    for component in COMPONENTS:
        names = getattr(keras_paragrad, component).__all__
        public += [f"keras_paragrad.{component}.{name}" for name in names if name not in top]
    public += [f"keras_paragrad.distribution.servers.{name}" for name in keras_paragrad.distribution.servers.__all__]
    assert [name for name in public if name not in described] == []
    # And nothing else of the package's top.
    assert {name.split(".")[1] for name in described if name.startswith("keras_paragrad.")} <= {*top, *COMPONENTS}


def test_the_pages_are_of_this_version(site):
    assert f"keras_paragrad {keras_paragrad.__version__}" in (site / "index.html").read_text()


def test_tutorials_run(tmp_path):
    """As `make docs` runs them, with what they print on the page."""
    built = build(tmp_path, tutorials="force")
    pages = [*(built / "tutorials").glob("*.html")]
    assert len(pages) >= 5
    for path in pages:
        assert 'class="output' in path.read_text(), path.name
