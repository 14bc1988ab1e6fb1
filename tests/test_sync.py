"""No step waits for the device: in no script, in bf16, with the scaler of fp16, on pixels and on features."""

import pytest
import torch
from conftest import ROOT, SMALL, write_cache, write_dataset
from syncs import counted

CLIP = "CLIP"  # stands for the flags of a small one
LAC = ("--dim", 16, "--ffn", 16, "--project_dim", 8, "--queue", 20, "--delta", 0.5, 0.5)
STEPS = {
    "an": ("an.py",),
    "an, linear": ("an.py", "--linear"),
    "wan, penalties": ("baselines.py", "--loss", "wan", "--l1", 1e-6, "--l2", 1e-6),
    "epr": ("baselines.py", "--loss", "epr", "--epr_positives", 2),
    "asl": ("baselines.py", "--loss", "asl"),
    "full labels": ("baselines.py", "--loss", "bce_full"),
    "role": ("role.py",),
    "role, linear": ("role.py", "--linear"),
    "ll-r": ("ll.py", "--delta_rel", 5, 5, 5),
    "ll-ct, sgd": ("ll.py", "--form", "ct", "--delta_rel", 5, 5, 5, "--sgd"),
    "ll-cp": ("ll.py", "--form", "cp", "--delta_rel", 5, 5, 5),
    "em_apl": ("em_apl.py", "--warmup", 1, "--patience", -1),
    "vlpl": ("vlpl.py", CLIP, "--theta", 0.25),
    "vlpl, linear": ("vlpl.py", CLIP, "--theta", 0.25, "--linear"),
    "aevlp": ("aevlp.py", CLIP, "--graph_u", 3),
    "aevlp, linear": ("aevlp.py", CLIP, "--graph_u", 3, "--linear"),
    "lac, stage 1": ("lac.py", "--stage", 1, *LAC),
    "lac, stage 2": ("lac.py", "--end_to_end", *LAC),
    "lac, stage 2, paper": ("lac.py", "--end_to_end", "--form", "paper", *LAC),
    "lac, em": ("lac.py", "--loss", "em", *LAC),
    "pu_mlc": ("pu_mlc.py",),
    "pu_mlc, linear": ("pu_mlc.py", "--linear"),
    "pu_mlc, partial": ("pu_mlc.py", "--known_ratio", 0.5, "--crops", "--freeze_bn", "--lgconv", "--ema", 0.9),
}


@pytest.fixture
def scaled(monkeypatch):
    """fp16's scaler, which a CPU has too, though not its autocast"""
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: real(device))


@pytest.mark.parametrize("case", STEPS)
def test_no_step_waits(case, script, squares, tiny_clip, small_weights, scaled):
    clip = ("--clip_model", f"local-dir:{tiny_clip}")
    name, *flags = [word for flag in STEPS[case] for word in (clip if flag is CLIP else (flag,))]
    flags += ("--weights", small_weights) if "--freeze_bn" in flags else ()
    with counted() as found:
        script(name, "--dataset", squares, *SMALL, "--amp", "bf16", "--epochs", 2, "--smoke", "--workers", 1, *flags)
    assert found.pop("steps") == (4 if name == "pu_mlc.py" else 6)  # which leaves out a last batch of 3
    assert not found


def test_no_step_waits_for_pixels_on_the_device(script, workplace, scaled):
    own = write_cache(write_dataset(workplace / "own", n_train=30, n_test=10))
    with counted() as found:
        script("an.py", "--dataset", own, *SMALL, "--amp", "bf16", "--epochs", 2, "--smoke", "--pixels", "device")
    assert dict(found) == {"steps": 6}


WAITS = {
    "total = loss.item()": "_local_scalar_dense",
    "total = float(loss.detach())": "_local_scalar_dense",
    "print(f'{loss.detach():.2f}')": "_local_scalar_dense",
    "assert loss > 0": "_local_scalar_dense",
    "total = loss.detach().tolist()": "tolist",
    "total = loss.detach().cpu()": "cpu",
    "total = loss.detach().to('cpu')": "to a device",
    "total = logits.detach().numpy()": "numpy",
    "rows = (z == 1).nonzero()": "nonzero",
    "chosen = logits[z == 1]": "index by a mask",
    "z.clone()[z == 1] = chosen.detach().byte()": "index_put_ by a mask",
    "chosen = torch.masked_select(logits, z == 1)": "masked_select",
    "same = torch.equal(z, z)": "equal",
    "classes = z.unique()": "_unique2",
    "weight = torch.tensor(0.5, device=run.device)": "tensor on the device",
}
FREE = (
    "z.clone()[z == 1] = 0",
    "hidden = z.masked_fill(z == 1, 0).to(torch.float32)",
    "order = torch.randperm(len(x), device=run.device)",
    "rows = labels[idx][order] if (labels := data.train.z) is not None else None",
    "run.log(share=(z == 1).float().mean(), half=0.5)",
)


def test_what_waits_is_found_and_what_does_not_is_not(script, squares, workplace):
    """Whatever somebody writes into the loop, by its line"""
    text = (ROOT / "an.py").read_text().splitlines()
    at = next(n for n, old in enumerate(text) if "run.backward(loss)" in old)
    text[at:at] = [12 * " " + line for line in (*WAITS, *FREE)]
    (workplace / "waits.py").write_text("\n".join(text))
    with counted() as found:
        script(workplace / "waits.py", "--dataset", squares, *SMALL, "--epochs", 1, "--smoke", "--workers", 0)
    assert found.pop("steps") == 3
    expected = {(what, f"waits.py:{number}"): 3 for number, what in enumerate(WAITS.values(), at + 1)}
    assert expected.items() <= found.items()
    assert {line for _, line in found} == {line for _, line in expected}
