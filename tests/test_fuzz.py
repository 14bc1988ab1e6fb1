"""Bad flags and damaged files, some 240 with a fixed seed: one sentence each, no traceback, no hang."""

import dataclasses
import io
import json
import random
import runpy
import shutil
import signal
import sys
import typing

import pytest
import torch
from conftest import ROOT, SMALL, finish, only_run, start, write_dataset

import data_prep

SCRIPTS = ("an", "baselines", "role", "ll", "em_apl", "vlpl", "aevlp", "lac", "pu_mlc")
VALUES = ["", "-1", "0", "-0.5", "1.5", "nan", "inf", "-inf", "1e400", "99999999999999999999", "2147483648", "x"]
VALUES += ["--", "../..", "\x1b[2J", "é" * 300]
TEXTS = ["", "nowhere", "/dev/null", "/", ".", "x" * 300, "a\nb", "\x1b[31m", "local-dir:", "hf-hub:", "scenes", "é"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A data set, a finished run and an unfinished one, to be copied and damaged"""
    folder = tmp_path_factory.mktemp("fuzz")
    write_dataset(folder / "own", n_train=20, n_test=8)
    flags = ("--dataset", folder / "own", *SMALL, "--workers", 0, "--epochs", 2)
    finish(start(ROOT / "em_apl.py", *flags, "--warmup", 1, cwd=folder))
    run = only_run(folder)
    run.rename(folder / "finished")
    shutil.copytree(folder / "finished", folder / "unfinished")
    (folder / "unfinished/result.json").unlink()
    last = torch.load(folder / "unfinished/last.pt", weights_only=True)
    last["run"] |= {"epoch": 1, "rows": last["run"]["rows"][:1]}
    torch.save(last, folder / "unfinished/last.pt")
    return folder


def attempt(name, *arguments):
    """Runs a script in this process; -> its exit code. Ends the test with a traceback if it is neither a sentence nor
    the work, or takes more than two minutes"""

    def too_long(*_):
        raise TimeoutError(f"{name} {arguments} takes more than two minutes")

    sys.argv, said = [name, *map(str, arguments)], io.StringIO()
    before, sys.stderr, hook = sys.stderr, said, sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException as problem:
        sys.stderr = io.StringIO()
        data_prep.explain(type(problem), problem, problem.__traceback__)
        assert "Traceback" not in sys.stderr.getvalue(), (name, arguments, sys.stderr.getvalue()[-3000:])
        code = 1
    finally:
        signal.alarm(0)
        sys.stderr, sys.excepthook = before, hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "\x1b" not in str(code)
    return code


def bad_flags(n):
    chance, found = random.Random(0), []
    for _ in range(n):
        name = chance.choice(SCRIPTS)
        script = runpy.run_path(str(ROOT / f"{name}.py"))
        hints = typing.get_type_hints(script["Args"])
        field = chance.choice([f for f in dataclasses.fields(script["Args"]) if f.name not in ("data_root", "out")])
        values = [] if hints[field.name] is bool else [chance.choice(TEXTS if hints[field.name] is str else VALUES)]
        found.append((f"{name}.py", [f"--{field.name}", *values]))
    return found


@pytest.mark.slow
def test_bad_flags(place, workplace, capsys):
    small = ("--dataset", place / "own", *SMALL, "--workers", 0, "--epochs", 1, "--max_steps", 1, "--name", "run")
    sentences = 0
    for name, flags in bad_flags(110):
        shutil.rmtree(workplace / "runs", ignore_errors=True)
        clip = ("--clip_model", "local-dir:nowhere") if name in ("vlpl.py", "aevlp.py") else ()
        sentences += attempt(name, *small, *clip, *flags) != 0
    assert sentences > 60


def damage(content, chance):
    kind = chance.randrange(6)
    at = chance.randrange(max(1, len(content)))
    if kind == 0:
        return content[:at]
    if kind == 1:
        return b""
    if kind == 2:
        return bytes(chance.randrange(256) for _ in range(min(len(content), 500)))
    if kind == 3:
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :] if content else b"x"
    if kind == 4:
        return content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    return content + b"\x00\xff{[" * 10


def wrong_types(content, chance):
    """A value of a JSON object replaced by one of another type"""
    values = [None, 3, -1.5, "x", [], {}, [1], {"a": 1}, True]
    content = json.loads(content)
    key = chance.choice(list(content))
    content[key] = chance.choice(values)
    return json.dumps(content).encode()


@pytest.mark.slow
def test_damaged_files(place, workplace, capsys):
    chance, sentences = random.Random(1), 0
    commands = {
        "own": lambda: (
            "an.py",
            "--dataset",
            workplace / "own",
            *SMALL,
            "--workers",
            0,
            "--epochs",
            1,
            "--max_steps",
            1,
        ),
        "finished": lambda: chance.choice(
            [
                ("em_apl.py", "--eval_only", workplace / "finished"),
                ("predict.py", workplace / "finished", place / "own/images/val_0.png", "--threshold", "auto"),
                ("report.py", workplace / "finished"),
                ("show.py", workplace / "finished", "--out", workplace / "shown"),
                ("em_apl.py", "--resume", workplace / "finished"),
            ]
        ),
        "unfinished": lambda: ("em_apl.py", "--resume", workplace / "unfinished"),
    }
    for _ in range(120):
        which = chance.choice(list(commands))
        shutil.rmtree(workplace / which, ignore_errors=True)
        shutil.copytree(place / which, workplace / which)
        files = [path for path in sorted((workplace / which).rglob("*")) if path.is_file() and path.name != ".lock"]
        path = chance.choice([path for path in files if path.suffix != ".png" or chance.random() < 0.1])
        change = wrong_types if path.suffix == ".json" and chance.random() < 0.7 else damage
        path.write_bytes(change(path.read_bytes(), chance))
        sentences += attempt(*commands[which]()) != 0
    assert sentences > 50
