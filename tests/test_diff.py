"""an.py is the trunk: methods add lines to it, they don't rewrite it, and every function of a script is used by it."""

import ast
import difflib
import re

import pytest
from conftest import ROOT

# script: lines of an.py that it may leave out
METHODS = {
    "baselines.py": 20,
    "role.py": 20,
    "ll.py": 20,
    "em_apl.py": 20,
    "vlpl.py": 20,
    "aevlp.py": 20,
    "pu_mlc.py": 20,
    "lac.py": 30,
}
SCRIPTS = ["an.py", *METHODS]


def changes(name):
    """Non-blank lines that are only in an.py, and only in the script"""
    lines = lambda script: [line for line in (ROOT / script).read_text().splitlines() if line.strip()]
    diff = list(difflib.unified_diff(lines("an.py"), lines(name), lineterm="", n=0))[2:]
    return tuple([line for line in diff if line.startswith(sign)] for sign in "-+")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_adds_lines_to_the_trunk(name):
    removed, added = changes(name)
    print("\n".join(removed + added))
    assert len(removed) <= METHODS[name]


def test_the_trunk_is_small():
    assert len((ROOT / "an.py").read_text().splitlines()) <= 70


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_function_is_reached_from_main(name):
    """Whoever edits an equation and trains must see the change."""
    tree = ast.parse((ROOT / name).read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    named = defined | {target.id: node for node in constants for target in node.targets if isinstance(target, ast.Name)}
    reached, waiting = set(), [node for node in tree.body if isinstance(node, ast.If)]
    while waiting:
        names = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)}
        new = (names & named.keys()) - reached
        reached |= new
        waiting += [named[each] for each in new]
    assert named.keys() == reached


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loop_is_in_every_script(name):
    main = (ROOT / name).read_text().split('if __name__ == "__main__":')[1]
    order = ["run.epochs(", "run.batches(data.train, flip=True", "run.autocast()", "run.backward(loss)"]
    order += ["run.step(optimizer)", "run.log(loss=loss", "run.evaluate("]
    places = [main.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", METHODS)
def test_copied_helpers_are_copies(name):
    function = lambda text, what: re.search(rf"^(def|class) {what}\b.*?(?=\n\n\n|\Z)", text, re.M | re.S)[0]
    text = (ROOT / name).read_text()
    for other, what in re.findall(r"^# same as in (\w+\.py): (\w+)$", text, re.M):
        assert function(text, what) == function((ROOT / other).read_text(), what)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_the_same_headings(name):
    lines = (ROOT / name).read_text().splitlines()
    headings = [line for line in lines if line.startswith("# ---- ")]
    assert headings == ["# ---- 1. Settings", "# ---- 2. Method", "# ---- 3. Train"]
    assert lines[0].startswith('"""')
    assert any(line.startswith("NOTES:") for line in lines)


@pytest.mark.parametrize("name", [*SCRIPTS, "common.py"])
def test_every_setting_has_a_help_text(name):
    text = (ROOT / name).read_text()
    (settings,) = re.findall(r"^class Args.*?(?=\n\n\n)", text, re.M | re.S)
    for line in re.findall(r"^    \w+: .+$", settings, re.M):
        assert re.search(r"  # \S", line), line


def test_nothing_imports_in_a_circle():
    ours = {path.stem: path for path in ROOT.glob("*.py")}
    imports = {}
    for name, path in ours.items():  # anywhere in a file, lazy ones too
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        imports[name] = found & ours.keys()

    def below(name, path=()):
        assert name not in path, " -> ".join([*path, name])
        for other in imports[name]:
            below(other, (*path, name))

    for name in ours:
        below(name)
