"""The pages of docs/ against the scripts: quoted lines, flags, values, columns, links and math."""

import ast
import importlib
import re
from dataclasses import fields
from textwrap import dedent

import pytest
import torch
from conftest import ROOT

import common

NAMED = re.findall(r"^\| \[`(\w+)\.py`\]", (ROOT / "README.md").read_text(), re.M)  # a copy needs no page
METHODS = [path.stem for path in ROOT.glob("*.py") if "# ---- 2. Method" in path.read_text() and path.stem in NAMED]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADINGS = ["Equations", "Settings", "Differences", "Results", "Looking inside"]
REFUSED = {"operatorname", "mbox", "phantom", "newcommand", "def", "require", "label", "ref"}  # by GitHub's math


def read(method):
    return (ROOT / "docs" / f"{method}.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def prose(text):
    """Without the blocks of code and math"""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(path):
    """Those that GitHub gives the headings of a page"""
    headings = re.findall(r"^#+ (.+)$", prose(path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def flags_of(script):
    names = {field.name for field in fields(importlib.import_module(script).Args)}
    return names | {f"no_{name}" for name in names}


def columns_of(method):
    """Names that the script gives to what it logs, and the columns of common.py"""
    text = (ROOT / f"{method}.py").read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    logged = [
        call for call in calls if getattr(call.func, "id", "") == "dict" or getattr(call.func, "attr", "") == "log"
    ]
    names = {keyword.arg for call in logged for keyword in call.keywords} | set(re.findall(r'parts\["(\w+)"\]', text))
    names |= {"val_mAP", "test_mAP", *common.pseudo_label_columns(torch.ones(8, 1))}
    ema = [f"{split}_mAP_{name}" for split in ("val", "test") for name in ("raw", "ema")]
    return names.union(ema if "ema" in flags_of(method) else [])


def plain(cell):
    """A value as the settings show it -> its words, numbers as numbers"""
    number = lambda word: float(word) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", word) else word
    return [number({"on": "True", "off": "False"}.get(word, word)) for word in cell.split()]


def test_every_method_has_a_page():
    assert len(METHODS) == 9
    for method in METHODS:
        assert re.findall(r"^## (.+)$", prose(read(method)), re.M) == HEADINGS
        assert f"docs/{method}.md has the rest." in " ".join(importlib.import_module(method).__doc__.split())


@pytest.mark.parametrize("method", METHODS)
def test_quoted_lines_are_those_of_the_script(method):
    quoted, lines = blocks(read(method), "python"), (ROOT / f"{method}.py").read_text().splitlines()
    assert quoted
    for block in quoted:
        size, text = len(block.splitlines()), dedent(block).strip()
        windows = (dedent("\n".join(lines[at : at + size])).strip() for at in range(len(lines)))
        assert text in windows, block


@pytest.mark.parametrize("method", METHODS)
def test_flags_exist(method):
    """In the script that is named in the same piece of code, else in the page's"""
    text = read(method)
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    found = 0
    for code in [*commands, *re.findall(r"`([^`\n]+)`", prose(text))]:
        script = (re.findall(r"(\w+)\.py\b", code) or [method])[-1]
        for flag in re.findall(r"(?<!\S)--(\w+)", code):
            assert flag in flags_of(script), f"{code}: {script}.py has no --{flag}"
            found += 1
    assert found


@pytest.mark.parametrize("method", METHODS)
def test_columns_are_logged(method):
    lists = re.findall(r"^Columns: (.+)$", re.sub(r"\$`[^`]+`\$", "", read(method)), re.M)
    assert lists
    for name in re.findall(r"`(\w+)`", " ".join(lists)):
        assert name in columns_of(method)


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_those_of_the_presets(method):
    """Rows of Settings: flag, symbol, meaning, value on voc, coco, nus and cub, source"""
    rows = re.findall(r"^\| `--(\w+)` \|(.+)\|$", read(method), re.M)
    script = importlib.import_module(method)
    named = {name for name, _ in rows}
    own = {field.name for field in fields(script.Args)} - {field.name for field in fields(common.Args)}
    assert own - {"image_size", "backbone", "weights", "frozen"} <= named  # the same in all scripts, or a long list
    for name, rest in rows:
        for dataset, shown in zip(("voc", "coco", "nus", "cub"), rest.split("|")[2:6], strict=True):
            value = getattr(common.preset_settings(script.Args, script.PRESETS, script.Args(dataset=dataset)), name)
            value = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert plain(shown) == plain(value), f"--{name} is {value} on {dataset}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if not link.startswith(("http://", "https://")):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_and_math_are_closed(path):
    text = path.read_text()
    fences = re.findall(r"^```(\w*)$", text, re.M)
    assert text.count("```") == len(fences)
    assert not any(fences[1::2]), "a block is not closed"
    spans = re.sub(r"\$`[^`\n]+`\$", "", prose(text))
    assert "$" not in re.sub(r"`[^`\n]+`", "", spans), "inline math is written $`x`$"
    for math in [*blocks(text, "math"), *re.findall(r"\$`([^`\n]+)`\$", prose(text))]:
        assert not REFUSED & set(re.findall(r"\\([a-zA-Z]+)", math)), math
        assert math.count("{") == math.count("}")
        assert math.count(r"\left") - math.count(r"\leftarrow") == math.count(r"\right") - math.count(r"\rightarrow")
        assert math.count(r"\begin") == math.count(r"\end")


def test_the_readme_is_short_and_counts_lines():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1200
    for name, lines in re.findall(r"^\| \[`(\w+\.py)`\].* \| (\d+) \|$", text, re.M):
        assert abs(len((ROOT / name).read_text().splitlines()) - int(lines)) <= 0.1 * int(lines), name


def measured():
    """The first table of results.md's three sections of all methods -> [{command: test mAP}], one a section"""
    text, found = (ROOT / "docs/results.md").read_text(), []
    for heading in ("scenes", "VOC 2012, frozen features", "VOC 2012, end to end"):
        table = re.search(r"(^\|.+\n)+", text.split(f"\n## {heading}\n")[1], re.M)[0]
        found.append(dict(re.findall(r"^\| `([^`]+)`[^|]*\| ([\d.]+ ± [\d.]+) \|", table, re.M)))
    return found


def test_measured_numbers_are_those_of_the_results():
    """On the methods' pages and in the README"""
    everywhere = measured()
    commands = {command for table in everywhere for command in table}
    for method in METHODS:
        table = re.search(r"^\| test mAP, three seeds .+\n.+\n((?:\|.+\n)+)", read(method), re.M)[1]
        table = table.replace("[its own table](results.md#lac)", "not run")  # with a recipe of its own
        rows = [line.strip("|\n ").split(" | ") for line in table.splitlines()]
        wanted = {f"`{c}`": [t.get(c, "not run") for t in everywhere] for c in commands if c.startswith(f"{method}.py")}
        assert {command: values for command, *values in rows} == wanted
    readme = re.findall(r"^\| `([^`]+)`[^|]*\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(readme) == 11
    for command, scenes, frozen in readme:
        assert scenes == everywhere[0][command]
        assert frozen == everywhere[1].get(command, frozen)
