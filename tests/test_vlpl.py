import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    LEARNT,
    ROOT,
    SMALL,
    TORCHRUN,
    assert_same_run,
    finish,
    metrics,
    only_run,
    start,
    write_dataset,
)
from PIL import Image

import common
import data_prep
import em_apl
import scenes
import vlpl

# ---- pseudo-labels


def cosines(q, tau):
    """Cosines whose softmax(cosine / tau) is q"""
    return tau * torch.tensor(q, dtype=torch.float64).log()


def test_pseudo_labels_by_hand():
    q = [[0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]
    z = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])  # the last row observes nothing
    pseudo = vlpl.vlpl_pseudo_labels(cosines(q, 0.03), z, 0.03, 0.2)
    assert pseudo.dtype == torch.int8
    assert pseudo.tolist()[0] == [0, 1, 0, 0]  # the observed one is no pseudo-label, however sure CLIP is
    assert pseudo[1, 0] == 1
    assert pseudo.tolist()[2] == [1, 1, 1, 1]


def test_theta_is_strict():
    cosine, z = torch.zeros(1, 4), torch.zeros(1, 4)  # q = 1/4 exactly
    assert vlpl.vlpl_pseudo_labels(cosine, z, 0.5, 0.25).tolist() == [[0, 0, 0, 0]]
    assert vlpl.vlpl_pseudo_labels(cosine, z, 0.5, 0.2499).tolist() == [[1, 1, 1, 1]]


def test_tau_is_the_temperature():
    cosine, z = torch.tensor([[0.30, 0.27]]), torch.zeros(1, 2)
    sharp = 1 / (1 + math.exp(-0.03 / 0.01))  # 0.953
    assert vlpl.vlpl_pseudo_labels(cosine, z, 0.01, sharp - 1e-3).tolist() == [[1, 0]]
    assert vlpl.vlpl_pseudo_labels(cosine, z, 0.01, sharp + 1e-3).tolist() == [[0, 0]]
    assert vlpl.vlpl_pseudo_labels(cosine, z, 1.0, 0.49).tolist() == [[1, 1]]


def test_delta_takes_the_lowest_and_replaces_none_it_skips():
    q = [[0.4, 0.3, 0.15, 0.1, 0.05]]
    label = lambda z, theta, delta: vlpl.vlpl_pseudo_labels(cosines(q, 0.1), torch.tensor([z]), 0.1, theta, delta)
    assert label([0, 0, 0, 0, 0], 0.35, 0.4).tolist() == [[1, 0, 0, -1, -1]]
    assert label([0, 0, 0, 0, 1], 0.35, 0.4).tolist() == [[1, 0, 0, -1, 0]]  # the observed one is skipped
    assert label([0, 0, 0, 0, 0], 0.01, 1.0).tolist() == [[1, 1, 1, 1, 1]]  # pseudo-positives are
    assert label([0, 0, 0, 0, 0], 0.35, 0.39).tolist() == [[1, 0, 0, 0, -1]]  # int(1.95)
    assert label([0, 0, 0, 0, 0], 0.35, 0.0).tolist() == [[1, 0, 0, 0, 0]]


def test_delta_ranks_where_the_softmax_underflows():
    cosine = torch.tensor([[1.0, -0.9, -0.8, -1.0]])  # all but the first are 0 in float32 at tau 0.01
    assert vlpl.vlpl_pseudo_labels(cosine, torch.zeros(1, 4), 0.01, 0.5, 0.5).tolist() == [[1, -1, 0, -1]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32])
def test_pseudo_labels_against_a_loop(dtype):
    torch.manual_seed(1)
    cosine, z = torch.randn(30, 11) / 5, (torch.rand(30, 11) < 0.1).to(dtype)
    before = cosine.clone(), z.clone()
    pseudo = vlpl.vlpl_pseudo_labels(cosine, z, 0.1, 0.15, 0.35)
    for n in range(30):
        exponentials = [math.exp(c / 0.1) for c in cosine[n].tolist()]
        q = [e / sum(exponentials) for e in exponentials]
        lowest = sorted(range(11), key=lambda c: q[c])[:3]
        for c in range(11):
            expected = 0 if z[n, c] == 1 else 1 if q[c] > 0.15 else -1 if c in lowest else 0
            assert pseudo[n, c] == expected
    assert torch.equal(cosine, before[0])
    assert torch.equal(z, before[1])


# ---- loss

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def loss_of(*arguments):
    """The loss that the script's loop takes, without its parts"""
    return vlpl.vlpl_loss(*arguments)[0]


def test_loss_by_hand():
    logits = torch.full((1, 4), math.log(3))  # p = 3/4
    z, pseudo = torch.tensor([[1, 0, 0, 0]]), torch.tensor([[0, 1, -1, 0]])
    log_p, log_not_p = math.log(0.75), math.log(0.25)
    positive, negative = -0.9 * log_p - 0.1 * log_not_p, -0.9 * log_not_p - 0.1 * log_p
    entropy = -(0.75 * log_p + 0.25 * log_not_p)
    loss, parts = vlpl.vlpl_loss(logits, z, pseudo, 0.2, 0.7, 0.6)
    assert loss.item() == pytest.approx((-log_p + 0.7 * positive + 0.6 * negative - 0.2 * entropy) / 4)
    expected = {"loss_positive": -log_p / 4, "loss_unknown": -0.2 * entropy / 4}
    expected |= {"loss_pseudo_positive": 0.7 * positive / 4, "loss_pseudo_negative": 0.6 * negative / 4}
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(expected)


def test_an_observed_label_is_no_pseudo_label():
    logits, z = torch.tensor([[0.3, -1.0]]), torch.tensor([[1.0, 0.0]])
    loss = lambda pseudo: loss_of(logits, z, torch.tensor([pseudo]), 0.2, 0.7, 0.7)
    assert loss([1, 0]) == loss([-1, 0]) == loss([0, 0])


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    z = (torch.rand(6, 5) < 0.2).double()
    z[3] = 0  # no positive
    return logits, z, torch.randint(-1, 2, (6, 5)).to(torch.int8)


def test_without_pseudo_labels_it_is_em(batch):
    logits, z, pseudo = batch
    em, _ = em_apl.em_apl_loss(logits, z, torch.zeros_like(z), 0.2, 0.0)
    torch.testing.assert_close(loss_of(logits, z, torch.zeros_like(pseudo), 0.2, 0.7, 0.7), em)


def test_beta_and_gamma_0_leave_pseudo_labels_out(batch):
    logits, z, pseudo = batch
    silent = loss_of(logits, z, pseudo, 0.2, 0.0, 0.0)
    as_pseudo_negative = torch.where((z == 0) & (pseudo != 0), -1, z)  # what em_apl's beta = 0 leaves out
    em, _ = em_apl.em_apl_loss(logits, as_pseudo_negative, torch.zeros_like(z), 0.2, 0.0)
    torch.testing.assert_close(silent, em)


def test_gradients(batch):
    logits, z, pseudo = batch
    logits.requires_grad_()
    loss = lambda x: loss_of(x, z, pseudo, 0.3, 0.7, 0.6, 0.9)
    torch.autograd.gradcheck(loss, logits)
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    x, p = logits.detach(), logits.detach().sigmoid()
    closed = 0.3 * x * p * (1 - p)
    closed = torch.where(pseudo == 1, 0.7 * (p - 0.9), torch.where(pseudo == -1, 0.6 * (p - 0.1), closed))
    closed = torch.where(z == 1, p - 1, closed)
    torch.testing.assert_close(gradient, closed / 30)


def test_parts_sum_up_to_the_loss(batch):
    loss, parts = vlpl.vlpl_loss(*batch, 0.3, 0.7, 0.6)
    assert set(parts) == {"loss_positive", "loss_unknown", "loss_pseudo_positive", "loss_pseudo_negative"}
    assert sum(parts.values()).item() == pytest.approx(loss.item(), rel=1e-12)
    assert all(part != 0 for part in parts.values())


def test_the_loss_changes_nothing_and_takes_labels_of_any_dtype(batch):
    logits, z, pseudo = batch
    before, loss = [t.clone() for t in batch], loss_of(*batch, 0.3, 0.7, 0.6)
    for dtype in (torch.uint8, torch.int64, torch.bool):
        assert loss_of(logits, z.to(dtype), pseudo.long(), 0.3, 0.7, 0.6) == loss
    assert all(torch.equal(new, old) for new, old in zip(batch, before))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_computed_in_full_precision(dtype, autocast, batch):
    logits, z, pseudo = batch[0].to(dtype).requires_grad_(), *batch[1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, parts = vlpl.vlpl_loss(logits, z, pseudo, 0.3, 0.7, 0.6)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in (loss, *parts.values())} == {precise}
    assert loss.item() == pytest.approx(loss_of(logits.double(), z, pseudo, 0.3, 0.7, 0.6).item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[100.0, -100.0] * 4], dtype=dtype, requires_grad=True)
    z, pseudo = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]]), torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1]])
    loss = loss_of(logits, z, pseudo, 0.2, 0.7, 0.7)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_columns_of_pseudo_labels_by_hand():
    pseudo = torch.tensor([[1, 1, 0, -1], [0, 1, 0, -1]])
    y = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0]])
    z = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]])  # one of the true ones was observed
    run = common.Run(vlpl.Args(device="cpu", workers=0), "vlpl.py")
    run.log_pseudo_labels(pseudo, z, y)
    assert run.row_of_logs() == pytest.approx(
        {
            "pseudo_positives_per_image": 3 / 2,
            "pseudo_positives_precision": 100 * 2 / 3,
            "pseudo_positives_precision_at_random": 100 * (1 * 1 / 2 + 2 * 1 / 2) / 3,
            "pseudo_positives_recall": 100 * 2 / 3,
            "pseudo_negatives_per_image": 2 / 2,
            "pseudo_negatives_precision": 100 * 1 / 2,
            "pseudo_negatives_precision_at_random": 100 * (2 * 1 / 2) / 2,
            "pseudo_negatives_recall": 100 * 1 / 4,
        }
    )


def test_presets_are_the_papers():
    parse = lambda name: common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", name])
    settings = {name: parse(name) for name in ("voc", "coco", "nus", "cub")}
    got = {name: (a.tau, a.theta, a.alpha, a.lr) for name, a in settings.items()}
    assert got == {
        "voc": (0.03, 0.3, 0.2, 1e-5),
        "coco": (0.01, 0.3, 0.1, 1e-5),
        "nus": (0.03, 0.1, 0.1, 1e-5),
        "cub": (0.03, 0.01, 0.01, 1e-4),
    }
    for a in settings.values():
        assert (a.beta, a.rho, a.delta, a.gamma) == (0.7, 0.9, 0, 0.7)
        assert (a.batch_size, a.epochs, a.patience, a.image_size) == (8, 10, -1, 448)
        assert (a.clip_model, a.clip_pretrained, a.prompt) == ("ViT-L-14-336", "openai", "A photo of {}")


# ---- CLIP


def test_prompts_read_as_a_person_writes():
    names = ["pottedplant", "tvmonitor", "diningtable", "hair drier", "traffic_light", "cat"]
    names += ["has_bill_shape::curved_(up_or_down)", "has_size::small_(5_-_9_in)", "has_under_tail_color::blue"]
    assert common.prompts("A photo of {}", names) == [
        "A photo of potted plant",
        "A photo of tv monitor",
        "A photo of dining table",
        "A photo of hair drier",
        "A photo of traffic light",
        "A photo of cat",
        "A photo of bird whose bill shape is curved (up or down)",
        "A photo of bird whose size is small (5 - 9 in)",
        "A photo of bird whose under tail color is blue",
    ]
    for wrong in ("A photo", "{} and {}"):
        with pytest.raises(SystemExit, match=r"must have one \{\}"):
            common.prompts(wrong, names)


def clip_of(model, pretrained=""):
    return common.Clip(vlpl.Args(clip_model=model, clip_pretrained=pretrained), torch.device("cpu"))


def test_clip_sees_what_open_clip_sees(tiny_clip):
    """The same embedding as open_clip's own preprocessing and tokenizer give, for an image that needs no resizing"""
    import open_clip

    name = f"local-dir:{tiny_clip}"
    state = torch.random.get_rng_state()
    clip = clip_of(name)
    assert torch.equal(state, torch.random.get_rng_state())  # a CLIP doesn't change what comes after it
    net, preprocess = open_clip.create_model_from_pretrained(name)
    net.eval()
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (32, 32, 3)).astype(np.uint8))
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        expected = net.encode_image(preprocess(image)[None], normalize=True)
        words = net.encode_text(open_clip.get_tokenizer(name)(["A photo of red"]))
    torch.testing.assert_close(clip.encode_image(x), expected, atol=1e-5, rtol=1e-4)
    own = clip.encode_text(clip.tokenizer(["A photo of red"]))
    torch.testing.assert_close(own, words, atol=1e-5, rtol=1e-4)
    assert clip.encode_image(x).norm() == pytest.approx(1, abs=1e-5)
    assert own.norm() != pytest.approx(1, abs=1e-2)  # as CLIP gives it


def test_images_are_squashed_to_clips_input_border_included(tiny_clip):
    clip = clip_of(f"local-dir:{tiny_clip}")
    x = torch.rand(1, 3, 96, 96)
    changed = x.clone()
    changed[..., -6:] = 1 - changed[..., -6:]  # what a centre crop would cut off
    assert not torch.allclose(clip.encode_image(x), clip.encode_image(changed), atol=1e-4)
    assert clip.encode_image(torch.rand(2, 3, 20, 20)).shape == (2, 16)


def test_clip_gets_the_files_pixels_whatever_the_models_size_is(workplace):
    folder = write_dataset(workplace / "own", n_train=5, n_test=4)
    images = common.load(vlpl.Args(dataset=str(folder), image_size=16)).train.images
    names = [folder / "images" / name for name in images.names]
    np.save(folder / "cache_train_16.npy", np.stack([data_prep.decode(path, 16) for path in names]))
    (folder / "cache_train_16.json").write_text(json.dumps({"images": data_prep.hash_names(images.names)}))
    images = common.load(vlpl.Args(dataset=str(folder), image_size=16)).train.images
    assert images.cached
    seen = images.from_files(32, Image.Resampling.BICUBIC)[np.arange(5)]
    for pixels, path in zip(seen, names):
        with Image.open(path) as image:
            assert np.array_equal(pixels, image.resize((32, 32), Image.Resampling.BICUBIC))
    assert images[np.arange(5)].shape == (5, 16, 16, 3)
    names[0].unlink()  # only the cache is left
    left = images.from_files(32, Image.Resampling.BICUBIC)
    assert (left.cached, left.size, left.resample) == (True, images.size, images.resample)
    assert np.array_equal(left[np.arange(5)], images[np.arange(5)])


def test_half_precision_is_half(tiny_clip):
    net, _, _ = common.load_open_clip(f"local-dir:{tiny_clip}", "", torch.float16)
    assert net.visual.trunk.conv_stem.weight.dtype == torch.float16
    with torch.no_grad():
        assert net.eval().encode_image(torch.rand(1, 3, 32, 32).half()).dtype == torch.float16


def test_the_activation_follows_the_weights(monkeypatch):
    """OpenAI's weights were trained with QuickGELU, which open_clip's plain names don't have."""
    asked = {}
    monkeypatch.setattr("open_clip.create_model", lambda name, pretrained, **more: asked.update(more))
    _, _, openai = common.load_open_clip("ViT-L-14-336", "openai", torch.float32)
    assert asked["force_quick_gelu"]
    _, _, laion = common.load_open_clip("ViT-B-16", "laion2b_s34b_b88k", torch.float32)
    assert not asked["force_quick_gelu"]
    assert openai["quick"] != laion["quick"]  # part of the key


def test_a_clip_that_cant_be_had_gives_one_sentence(monkeypatch, tmp_path, tiny_clip):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        SystemExit, match=r"ViT-B-32 openai is not in .+ and can't be downloaded.*--clip_pretrained FILE"
    ):
        clip_of("ViT-B-32", "openai")
    with pytest.raises(SystemExit, match=r"near it: .*ViT-L-14-336"):
        clip_of("ViT-L-14-33", "openai")
    for wrong in ("opnai", ""):
        with pytest.raises(SystemExit, match=r"neither a file nor a tag of ViT-B-16, which are: openai"):
            clip_of("ViT-B-16", wrong)
    with pytest.raises(SystemExit, match=r"no open_clip_config\.json"):
        clip_of(f"local-dir:{tmp_path}")
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        (tmp_path / name).write_bytes((tiny_clip / name).read_bytes()[: 10**9 if "json" in name else 5000])
    with pytest.raises(SystemExit, match="missing, cut off or of another model"):
        clip_of(f"local-dir:{tmp_path}")


# ---- the CLIP of scenes


def test_the_clip_of_scenes_is_small_and_one_of_open_clips(tmp_path):
    made = common.Clip(vlpl.Args(clip_model="scenes", data_root=str(tmp_path)), torch.device("cpu"))
    clip = clip_of(f"local-dir:{tmp_path / 'scenes_clip'}")
    assert sum(w.numel() for w in clip.net.parameters()) < 3e6
    assert clip.key == made.key
    assert clip.size == scenes.SIDE


@pytest.mark.slow
def test_the_clip_of_scenes_is_good_but_not_perfect(workplace, script):
    script("vlpl.py", "--max_steps", 1)
    (row,) = metrics(only_run(workplace))
    assert 40 <= float(row["pseudo_positives_precision"]) <= 90


# ---- the run


def flags(squares, tiny_clip):
    return "--dataset", squares, *SMALL, "--workers", 0, "--clip_model", f"local-dir:{tiny_clip}", "--theta", 0.25


def last_labels(run):
    return torch.load(run / "last.pt", weights_only=True)["labels"]["pseudo"]


def test_a_run_from_clip_to_result(script, squares, tiny_clip, workplace):
    out = script("vlpl.py", *flags(squares, tiny_clip), "--epochs", 2, "--delta", 0.3)
    run = only_run(workplace)
    zero_shot = json.loads((run / "result.json").read_text())["clip_zero_shot_mAP"]
    assert set(zero_shot) == {"train", "val", "test"}
    assert f"clip_zero_shot_mAP: train {zero_shot['train']:.2f}" in out

    data = common.load(vlpl.Args(dataset=squares, image_size=32))
    clip = clip_of(f"local-dir:{tiny_clip}")
    images = data.train.images.from_files(32, Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(images[data.train.rows]).permute(0, 3, 1, 2).float() / 255
    text = clip.encode_text(clip.tokenizer([f"A photo of {name}" for name in data.classes]))
    q = torch.softmax(clip.encode_image(pixels) @ (text / text.norm(dim=1, keepdim=True)).T / 0.03, 1)
    hidden, y = data.train.z == 0, data.train.y
    chosen = (q > 0.25) & hidden
    refused = (q == q.amin(1, keepdim=True)) & ~(q > 0.25) & hidden  # int(0.3 * 4) of an image
    assert torch.equal(last_labels(run), chosen.char() - refused.char())
    rows = metrics(run)
    assert len(rows) == 2
    percent = lambda part: 100 * part.float().mean().item()
    expected = {"pseudo_positives_per_image": chosen.sum().item() / 80}
    expected |= {"pseudo_positives_precision": percent(y[chosen] == 1)}
    expected |= {"pseudo_positives_recall": percent(chosen[hidden & (y == 1)])}
    expected |= {"pseudo_negatives_per_image": refused.sum().item() / 80}
    expected |= {"pseudo_negatives_precision": percent(y[refused] == 0)}
    expected |= {"pseudo_negatives_recall": percent(refused[hidden & (y == 0)])}
    for row in rows:
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-5)
        assert 0 < float(row["pseudo_positives_precision_at_random"]) < 100
        parts = ("loss_positive", "loss_unknown", "loss_pseudo_positive", "loss_pseudo_negative")
        assert float(row["loss"]) == pytest.approx(sum(float(row[name]) for name in parts), abs=1e-5)
        assert float(row["loss_pseudo_negative"]) > 0
    assert common.mean_average_precision(q, data.train.y) == pytest.approx(zero_shot["train"], abs=0.01)


def test_vlpl_learns(script, squares, tiny_clip, workplace):
    out = script("vlpl.py", *flags(squares, tiny_clip), "--theta", 0.99, "--epochs", 12)
    assert float(re.search(r"test mAP ([\d.]+)", out)[1]) > LEARNT


def test_images_are_embedded_once_for_all_tau_and_theta(script, squares, tiny_clip, workplace):
    stored = lambda: {path: path.stat().st_mtime_ns for path in (workplace / "data").rglob("all.npy")}
    script("vlpl.py", *flags(squares, tiny_clip), "--max_steps", 1)
    first = stored()
    assert len(first) == 4  # three parts and the texts
    script("vlpl.py", *flags(squares, tiny_clip), "--max_steps", 1, "--tau", 0.1, "--theta", 0.5)
    assert stored() == first
    script("vlpl.py", *flags(squares, tiny_clip), "--max_steps", 1, "--prompt", "{}!")
    assert len(stored()) == 5  # new texts, old images
    script("vlpl.py", *flags(squares, tiny_clip), "--max_steps", 1, "--image_size", 16)
    assert len(stored()) == 5  # CLIP sees the same


def test_another_clip_is_another_embedding(squares, tiny_clip, tmp_path):
    """The key is made of what the folder holds, not of what it is called."""
    from safetensors.torch import load_file, save_file

    config, weights = tiny_clip / "open_clip_config.json", tiny_clip / "open_clip_model.safetensors"
    copies = {name: tmp_path / name for name in ("same", "weights", "looks", "shape")}
    for name, folder in copies.items():
        folder.mkdir()
        content, state = json.loads(config.read_text()), load_file(weights)
        if name == "weights":
            state["logit_scale"] += 1
        if name == "looks":
            content["preprocess_cfg"]["mean"] = [0.1, 0.2, 0.3]
        if name == "shape":
            content["model_cfg"]["quick_gelu"] = True
        (folder / config.name).write_text(json.dumps(content))
        save_file(state, folder / weights.name)
    key = lambda folder: json.dumps(clip_of(f"local-dir:{folder}").key, sort_keys=True)
    assert key(copies["same"]) == key(tiny_clip)
    assert len({key(tiny_clip), *(key(copies[name]) for name in ("weights", "looks", "shape"))}) == 4


def test_two_runs_may_start_at_once(squares, tiny_clip, workplace):
    command = (ROOT / "vlpl.py", *flags(squares, tiny_clip), "--epochs", 1)
    both = [start(*command, "--out", out, cwd=workplace) for out in ("a", "b")]
    for process in both:
        finish(process)
    (a,), (b,) = ((workplace / out).iterdir() for out in "ab")
    assert_same_run(a, b)
    assert not list((workplace / "data").rglob(".*"))


def test_two_processes_share_the_images(squares, tiny_clip, workplace):
    command = (ROOT / "vlpl.py", *flags(squares, tiny_clip), "--max_steps", 1, "--delta", 0.3)
    one = finish(start(*command, "--data_root", "a", "--out", "one", cwd=workplace))
    two = finish(start(*TORCHRUN, *command, "--data_root", "b", "--out", "two", cwd=workplace))
    zero_shot = r"clip_zero_shot_mAP: (.+)"
    assert re.search(zero_shot, one)[1] == re.search(zero_shot, two)[1]
    (a,), (b,) = ((workplace / out).iterdir() for out in ("one", "two"))
    assert torch.equal(last_labels(a), last_labels(b))
    rows = [metrics(run)[0] for run in (a, b)]
    quality = [{name: row[name] for name in row if name.startswith("pseudo_")} for row in rows]
    assert quality[0] == quality[1]  # images of both are counted once
    assert len(quality[0]) == 8


def test_a_kill_changes_nothing(a_kill_changes_nothing, squares, tiny_clip):
    runs = a_kill_changes_nothing("vlpl.py", *flags(squares, tiny_clip), "--epochs", 3)
    assert torch.equal(*map(last_labels, runs))


def test_a_run_is_measured_without_its_clip(script, squares, tiny_clip, workplace):
    shutil.copytree(tiny_clip, workplace / "clip")
    out = script("vlpl.py", *flags(squares, workplace / "clip"), "--epochs", 1)
    shutil.rmtree(workplace / "clip")
    again = script("vlpl.py", "--eval_only", only_run(workplace))
    assert re.search(r"val mAP [\d.]+, test mAP [\d.]+", out)[0] in again


def test_classes_that_clip_cant_tell_apart_are_named(script, squares, tiny_clip, workplace):
    long = "a very long prompt " * 8 + "{}"
    with pytest.raises(SystemExit, match=r"can't tell .+red' from .+green'.* no more than 24 tokens"):
        script("vlpl.py", *flags(squares, tiny_clip), "--prompt", long)


def test_nameless_classes_are_no_prompts(script, tiny_clip, workplace):
    folder = write_dataset(workplace / "own", n_train=20, n_test=4)
    (folder / "dataset.json").unlink()
    with pytest.raises(SystemExit, match=r"needs the classes' names.*dataset\.json"):
        script("vlpl.py", *flags(str(folder), tiny_clip))


def test_own_images_without_true_labels(script, tiny_clip, workplace):
    folder = write_dataset(workplace / "own", n_train=20, n_test=4)
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
    for name in ("train_labels", "val_labels", "val_images"):
        (folder / f"formatted_{name}.npy").unlink()
    script("vlpl.py", *flags(str(folder), tiny_clip), "--epochs", 1)
    (row,) = metrics(only_run(workplace))
    assert not [name for name in row if "precision" in name or "recall" in name]
    assert float(row["pseudo_positives_per_image"]) >= 0


REFUSED = {
    "--tau 0": "--tau must be above 0, not 0.0",
    "--tau nan": "--tau must be a finite number, not nan",
    "--theta 1.5": "--theta must be between 0 and 1, not 1.5",
    "--delta -0.1": "--delta must be between 0 and 1, not -0.1",
    "--alpha -9": "--alpha must be at least 0, not -9.0",
    "--beta -1": "--beta must be at least 0, not -1.0",
    "--gamma -1": "--gamma must be at least 0, not -1.0",
    "--rho 1.1": "--rho must be between 0 and 1, not 1.1",
    "--prompt photo": "--prompt 'photo' must have one {} where the class goes",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_setting_is_one_sentence(words, script, squares, tiny_clip, workplace):
    with pytest.raises(SystemExit) as refusal:
        script("vlpl.py", *flags(squares, tiny_clip), *words.split())
    assert refusal.value.code == f"error: {REFUSED[words]}"
    assert not (workplace / "runs").exists()


TABLE_2 = {  # the commands of the docstring: width of the features
    "--backbone convnext_xlarge.fb_in22k_ft_in1k": 2048,
    "--backbone convnext_xlarge.fb_in22k": 2048,
    "--backbone vit_large_patch14_clip_quickgelu_336.openai --image_size 336 --batch_size 6": 768,
}


@pytest.mark.parametrize("words", TABLE_2)
def test_the_backbones_of_table_2(words):
    """Each is built once, on the meta device, as its command says"""
    assert f"`{words}`" in " ".join(vlpl.__doc__.split())
    args = common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", "voc", *words.split(), "--weights", "none"])
    with torch.device("meta"):
        model = common.Classifier(args, 20)
        features = model.features(torch.zeros(2, 3, args.image_size, args.image_size))
    assert features.shape == (2, TABLE_2[words])
    assert model.head.in_features == TABLE_2[words]
    if "clip" in words:  # with CLIP's projection, at the size it was trained at: nothing is stretched
        assert model.body.head.weight.shape == (768, 1024)
        assert model.body.pos_embed.shape == (1, 1 + 24**2, 1024)
        assert (args.image_size, args.batch_size) == (336, 6)
        assert "QuickGELU" in str(model.body.blocks[0].mlp.act)  # what OpenAI's weights were trained with


def test_weights_of_another_activation_are_told(capsys):
    import timm

    for name in ("_224.openai", "_quickgelu_224.openai", "_224.laion2b_ft_in1k"):
        name = f"vit_base_patch32_clip{name}"
        with torch.device("meta"):
            common.check_activation(name, timm.create_model(name))
    assert capsys.readouterr().out == (
        "note: these weights were trained with QuickGELU: --backbone vit_base_patch32_clip_quickgelu_224.openai\n"
    )


def test_a_clip_backbone_loads_its_projection_from_a_file(tmp_path):
    import timm

    torch.manual_seed(1)
    small = dict(embed_dim=32, depth=1, num_heads=2)
    net = timm.create_model("vit_base_patch32_clip_224.openai", **small)
    torch.save(net.state_dict(), tmp_path / "clip.pth")
    create = timm.create_model
    with pytest.MonkeyPatch.context() as patch:  # a narrow one, for speed
        patch.setattr(timm, "create_model", lambda name, **more: create(name, **more, **small))
        flags = ["--backbone", "vit_base_patch32_clip_224.openai", "--image_size", "224"]
        args = common.parse(
            vlpl.Args, vlpl.PRESETS, ["--dataset", "voc", *flags, "--weights", str(tmp_path / "clip.pth")]
        )
        model = common.Classifier(args, 20).eval()
    x = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        expected = net.eval()((x - model.mean) / model.std)
        assert torch.allclose(model.features(x), expected, atol=1e-5)
    assert expected.shape == (1, 512)


# ---- what CLIP is worth


def test_agreement_by_hand():
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.2, 0.2, 0.4, 0.2], [0.5, 0.3, 0.1, 0.4], [0.1, 0.2, 0.3, 0.4]])
    z = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    # above two of three; above none of three and level with two; above both others, and above one of them
    assert common.agreement(scores, z) == pytest.approx(100 * (2 / 3 + 1 / 3 + 1 + 1 / 2) / 4)
    z[2] = 1  # all are known: no other class
    assert common.agreement(scores, z) == pytest.approx(100 * (2 / 3 + 1 / 3) / 2)
    assert common.agreement(torch.zeros(4, 4), z) == 50
    many = 2 * common.ROWS + 1  # in pieces
    assert common.agreement(scores[:1].expand(many, 4), z[:1].expand(many, 4)) == pytest.approx(200 / 3)


def judged(capsys, scores, val=None, **train):
    """judge_clip of a CLIP with these scores of validation or training images, where 0.5 makes a pseudo-positive"""
    split = lambda **labels: common.Split(None, np.arange(len(scores)), labels.get("y"), labels.get("z"))
    data = common.Data([], split(**train), None if val is None else split(**val), None)
    choose = lambda score, z: ((score > 0.5) & (z == 0)).char()
    summaries = {}
    run = SimpleNamespace(summarise=summaries.__setitem__)
    common.judge_clip(run, data, {"val": scores, "train": scores}.__getitem__, choose)
    ((name, numbers),) = summaries.items()
    return name, numbers, capsys.readouterr().out


def test_clip_is_judged_by_full_labels_where_there_are(capsys):
    y = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    scores = torch.tensor([[0.9, 0.0, 0.1], [0.8, 0.7, 0.2], [0.3, 0.6, 0.1], [0.4, 0.3, 0.1]])
    name, numbers, out = judged(capsys, scores, val=dict(y=y), z=y)
    expected = {"pseudo_positives_per_image": 1.0, "pseudo_positives_precision": 75.0}
    expected |= {"pseudo_positives_precision_at_random": 37.5}  # two of a class in half of the images, two of a rarer
    expected |= {"agreement": 75.0, "agreement_at_random": 50.0}  # three labels are above both others, one above none
    assert (name, out) == ("clip_on_val", "")
    assert numbers == pytest.approx(expected)
    _, numbers, out = judged(capsys, scores.roll(1, dims=1), val=dict(y=y), z=y)
    assert numbers["pseudo_positives_precision"] == 0
    assert out.startswith("warning: CLIP hardly knows these classes: try class names as CLIP would")
    _, numbers, out = judged(capsys, scores / 2, val=dict(y=y), z=y)  # no pseudo-positive: agreement decides
    assert "pseudo_positives_precision" not in numbers
    assert not out
    _, _, out = judged(capsys, scores.roll(1, dims=1) / 2, val=dict(y=y), z=y)
    assert "hardly knows" in out


@pytest.mark.parametrize("right", [9, 13, 14, 20])
def test_twice_the_odds_of_a_random_choice_can_be_reached_by_frequent_classes(right, capsys):
    """Of 40 images half are positive and 20 are chosen: 65 % is below odds of 2 to 1, 70 % is above"""
    y = torch.cat([torch.ones(20, 1), torch.zeros(20, 1)]).long()
    scores = torch.zeros(40, 1)
    scores[20 - right : 40 - right] = 1
    _, numbers, out = judged(capsys, scores, val=dict(y=y), z=y)
    assert numbers["pseudo_positives_precision"] == 5 * right
    assert ("hardly knows" in out) == (right < 14)


@pytest.mark.parametrize("val", [None, {"z": torch.eye(4)}], ids=["no validation", "without full labels"])
def test_clip_is_judged_by_known_labels_where_full_ones_are_missing(val, capsys):
    z = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    scores = torch.tensor([[0.9, 0.0, 0.1], [0.8, 0.7, 0.2], [0.3, 0.6, 0.1], [0.4, 0.3, 0.1]])
    name, numbers, out = judged(capsys, scores, val=val, z=z)
    expected = {"pseudo_positives_per_image": 0.25, "agreement": 75.0, "agreement_at_random": 50.0}
    assert (name, numbers, out) == ("clip_on_train", expected, "")
    _, numbers, out = judged(capsys, 1 - scores, val=val, z=z)
    assert numbers["agreement"] == 25
    assert "warning: CLIP hardly knows these classes" in out


@pytest.mark.parametrize(("rows", "warned"), [(0, True), (2, True), (5, False)])
def test_few_pseudo_positives_are_warned_of(rows, warned, capsys):
    """Of 400 images: none and 0.5 % are few, 1.25 % is not"""
    pseudo = torch.zeros(400, 5, dtype=torch.int8)
    pseudo[:, 1] = -1
    pseudo[:rows, 2:4] = 1
    common.warn_of_few(pseudo, "lower --theta")
    few = f"warning: {rows / 4:.2g} % of the training images have a pseudo-positive: lower --theta\n"
    assert capsys.readouterr().out == (few if warned else "")


@pytest.fixture(scope="module")
def few_scenes(tmp_path_factory):
    """A folder with 250 images of scenes as one's own data set; a test copies it"""
    folder = tmp_path_factory.mktemp("few") / "own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "SIZES", {"train": 250, "val": 1})
        scenes.make(folder)
    return folder


NAMES = {
    "right": scenes.CLASSES,
    "meaningless": [f"qzx{i}" for i in range(20)],
    "permuted": scenes.CLASSES[7:] + scenes.CLASSES[:7],
}


@pytest.mark.parametrize("full", [True, False], ids=["val", "train"])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", ["vlpl.py", "aevlp.py"])
def test_a_run_says_what_clip_is_worth(name, names, full, script, few_scenes, workplace):
    folder = shutil.copytree(few_scenes, workplace / "own")
    (folder / "dataset.json").write_text(json.dumps({"classes": NAMES[names], "image_folder": "images"}))
    if not full:
        y = np.load(folder / "formatted_train_labels.npy")
        np.save(folder / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
        (folder / "formatted_train_labels.npy").unlink()
    clip = ("--clip_model", "scenes", "--max_steps", 1, "--workers", 0)
    clip += ("--grid", 2, "--tau", 0.07, "--zeta_global", 0.4, "--positives", 2) if name == "aevlp.py" else ()
    out = script(name, "--dataset", folder, *SMALL, *clip)
    where = "val" if full else "train"
    line = re.search(rf"^clip_on_{where}: (.+)$", out, re.M)
    assert out.index("clip_on_") < out.index("epoch  1/")
    numbers = {word: float(value) for word, value in (pair.split() for pair in line[1].split(", "))}
    kept = json.loads((only_run(workplace) / "result.json").read_text())[f"clip_on_{where}"]
    assert line[1] == ", ".join(f"{name} {value:.2f}" for name, value in kept.items())
    assert ("hardly knows these classes" in out) == (names != "right")
    assert 70 < numbers["agreement"] < 90 if names == "right" else 40 < numbers["agreement"] < 60
    if names == "meaningless":  # classes of as many tokens have the same score
        assert numbers["pseudo_positives_per_image"] == 0
    elif full:
        ratio = numbers["pseudo_positives_precision"] / numbers["pseudo_positives_precision_at_random"]
        assert ratio > 3 if names == "right" else ratio < 2
