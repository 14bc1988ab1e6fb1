"""Methods add lines to the trunk, an.py; they don't rewrite it."""

import difflib
import re

import pytest
from conftest import ROOT

# script: (trunk lines it may leave out, lines it may add) in the training part
METHODS = {"em_apl.py": (8, 45), "vlpl.py": (8, 45), "pu_mlc.py": (11, 48), "aevlp.py": (8, 66), "lac.py": (13, 80)}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_differs_by_its_method(name):
    part = lambda script: (ROOT / script).read_text().split("# ---- 3. Train")[1].splitlines()
    changes = list(difflib.unified_diff(part("an.py"), part(name), lineterm="", n=0))[2:]
    print("\n".join(changes))
    removed, added = (sum(line.startswith(sign) for line in changes) for sign in "-+")
    assert removed <= METHODS[name][0]
    assert added <= METHODS[name][1]


@pytest.mark.parametrize("name", METHODS)
def test_copied_helpers_are_copies(name):
    function = lambda text, what: re.search(rf"^(def|class) {what}\b.*?(?=\n\n\n|\Z)", text, re.M | re.S)[0]
    text = (ROOT / name).read_text()
    for other, what in re.findall(r"^# same as in (\w+\.py): (\w+)$", text, re.M):
        assert function(text, what) == function((ROOT / other).read_text(), what)


@pytest.mark.parametrize("name", ["an.py", *METHODS])
def test_every_script_has_the_same_headings(name):
    lines = (ROOT / name).read_text().splitlines()
    headings = [line for line in lines if line.startswith("# ---- ")]
    assert headings == ["# ---- 1. Settings", "# ---- 2. Method", "# ---- 3. Train"]
    assert lines[0].startswith('"""')
    assert any(line.startswith("NOTES:") for line in lines)
