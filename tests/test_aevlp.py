import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    LEARNT,
    ROOT,
    SMALL,
    TORCHRUN,
    finish,
    metrics,
    only_run,
    start,
    write_dataset,
)

import aevlp
import common

# ---- loss

RATES = dict(w=2.0, b=-2.0, mu=0.6, sigma=0.8, q_pos=0.01, q_neg=1.0, lambda1=0.4, lambda2=0.7, rho=0.9)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def loss_of(*arguments, **more):
    """The loss that the script's loop takes, without its parts"""
    return aevlp.gpr_loss(*arguments, **more)[0]


def slow_gpr(logits, z, pseudo, w, b, mu, sigma, q_pos, q_neg, lambda1, lambda2, rho, eta, m):
    """The equations, one label at a time"""
    total, expected = 0.0, 0.0
    for row in range(len(logits)):
        for c in range(len(logits[0])):
            p = 1 / (1 + math.exp(-logits[row][c]))
            expected += p / len(logits)
            k = 1 / (1 + math.exp(-(w * p + b)))
            v = math.exp(-((p - mu) ** 2) / (2 * sigma**2))
            if z[row][c] == 1:
                total += -math.log(p)
            elif pseudo[row][c] == 0:
                total += v * (k * (1 - p**q_pos) / q_pos + (1 - k) * (1 - (1 - p) ** q_neg) / q_neg)
            elif pseudo[row][c] == -1:
                total += v * -math.log(1 - p)
            else:
                total += min(max(1 - v, lambda1), lambda2) * (-rho * math.log(p) - (1 - rho) * math.log(1 - p))
    return total / (len(logits) * len(logits[0])) + eta * ((expected - m) / len(logits[0])) ** 2


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    z = F.one_hot(torch.tensor([0, 4, 2, 2, 1, 0]), 5)
    z[5] = 0  # a row that observes nothing
    pseudo = torch.randint(-1, 2, (6, 5), generator=generator, dtype=torch.int8)
    return logits, z, pseudo


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_loss_against_the_equations(batch, dtype):
    logits, z, pseudo = batch
    expected = slow_gpr(logits.tolist(), z.tolist(), pseudo.tolist(), **RATES, eta=0.3, m=1.7)
    got = loss_of(logits, z.to(dtype), pseudo, **RATES, eta=0.3, m=1.7)
    assert got.item() == pytest.approx(expected, abs=1e-12)


def test_loss_by_hand():
    """p = 1/2 everywhere, w = 0, b = 0, mu = 1/2: k = 1/2 and v = 1, so 1 - v is cut off at lambda1"""
    logits, z = torch.zeros(1, 4), torch.tensor([[1, 0, 0, 0]])
    pseudo = torch.tensor([[0, 0, -1, 1]])
    loss, parts = aevlp.gpr_loss(logits, z, pseudo, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.4, 0.7, 0.9, 0.5, 1.0)
    log2 = math.log(2)
    assert loss.item() == pytest.approx((log2 + 0.5 + log2 + 0.4 * log2) / 4 + 0.5 * (1 / 4) ** 2, abs=1e-6)
    expected = {"loss_positive": log2 / 4, "loss_unknown": 0.5 / 4, "loss_R": 0.5 / 16}
    expected |= {"loss_pseudo_negative": log2 / 4, "loss_pseudo_positive": 0.4 * log2 / 4}
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("eta", [0.0, 0.3])
def test_parts_sum_up_to_the_loss(batch, eta):
    loss, parts = aevlp.gpr_loss(*batch, **RATES, eta=eta, m=1.7)
    names = {"loss_positive", "loss_unknown", "loss_pseudo_positive", "loss_pseudo_negative"}
    assert set(parts) == names | {"loss_R"}
    assert sum(parts.values()).item() == pytest.approx(loss.item(), rel=1e-12)
    assert all(parts[name] > 0 for name in names)
    assert (parts["loss_R"] > 0) == (eta > 0)


def test_the_loss_changes_nothing(batch):
    before = [t.clone() for t in batch]
    loss_of(*batch, **RATES, eta=0.3, m=1.7)
    assert all(torch.equal(new, old) for new, old in zip(batch, before))


def test_without_pseudo_labels_and_eta_it_is_gr(batch):
    """GR (Chen et al. 2024): -log p for the observed, v [k l_pos + (1 - k) l_neg] for all others"""
    logits, z, _ = batch
    p = logits.sigmoid()
    k, v = 1 / (1 + torch.exp(-(2 * p - 2))), torch.exp(-((p - 0.6) ** 2) / (2 * 0.8**2))
    gr = torch.where(z == 1, -p.log(), v * (k * (1 - p**0.01) / 0.01 + (1 - k) * p)).mean()
    for m in (0.0, 5.0):
        got = loss_of(logits, z, torch.zeros_like(z), **RATES, eta=0.0, m=m)
        assert got.item() == pytest.approx(gr.item(), abs=1e-12)


def test_limits_of_the_robust_parts(batch):
    """q near 0 is the logarithm, q = 1 the mean absolute error"""
    logits, z, _ = batch
    sharp = {**RATES, "w": 0.0, "b": 100.0, "sigma": 1e6}  # k = 1, v = 1
    open_labels = torch.zeros_like(z)
    got = loss_of(logits, open_labels, open_labels, **{**sharp, "q_pos": 1e-6}, eta=0.0, m=0.0)
    assert got.item() == pytest.approx(-F.logsigmoid(logits).mean().item(), rel=1e-4)
    got = loss_of(logits, open_labels, open_labels, **{**sharp, "q_pos": 1.0}, eta=0.0, m=0.0)
    assert got.item() == pytest.approx((1 - logits.sigmoid()).mean().item(), abs=1e-9)


def test_an_observed_label_is_no_pseudo_label(batch):
    logits, z, pseudo = batch
    cleared = torch.where(z == 1, 0, pseudo)
    one, other = (loss_of(logits, z, labels, **RATES, eta=0.1, m=1.0) for labels in (pseudo, cleared))
    assert one.item() == other.item()


def test_gradient_by_finite_differences(batch):
    """k and v are constants to the gradient: the differences hold them at the point itself"""
    logits, z, pseudo = batch
    logits = logits.clone().requires_grad_()
    loss_of(logits, z, pseudo, **RATES, eta=0.3, m=1.7).backward()
    p = logits.detach().sigmoid()
    k, v = (2 * p - 2).sigmoid(), (-((p - 0.6) ** 2) / (2 * 0.8**2)).exp()

    def frozen(x):
        q = x.sigmoid()
        open_label = v * (k * (1 - q**0.01) / 0.01 + (1 - k) * q)
        soft = (1 - v).clamp(0.4, 0.7) * (-0.9 * q.log() - 0.1 * (1 - q).log())
        others = torch.where(pseudo == 0, open_label, torch.where(pseudo == 1, soft, -v * (1 - q).log()))
        return torch.where(z == 1, -q.log(), others).mean() + 0.3 * ((q.sum(1).mean() - 1.7) / 5) ** 2

    step = 1e-6
    for row in range(6):
        for c in range(5):
            nudge = torch.zeros_like(p)
            nudge[row, c] = step
            slope = (frozen(logits.detach() + nudge) - frozen(logits.detach() - nudge)) / (2 * step)
            assert logits.grad[row, c].item() == pytest.approx(slope.item(), abs=1e-8)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_computed_in_full_precision(dtype, autocast, batch):
    logits, z, pseudo = batch[0].to(dtype).requires_grad_(), *batch[1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, parts = aevlp.gpr_loss(logits, z, pseudo, **RATES, eta=0.3, m=1.7)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in (loss, *parts.values())} == {precise}
    expected = loss_of(logits.double(), z, pseudo, **RATES, eta=0.3, m=1.7)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observed", [0, 1])
@pytest.mark.parametrize("kind", [-1, 0, 1])
def test_extreme_logits_stay_finite(dtype, autocast, observed, kind):
    logits = torch.tensor([[-100.0, 100.0, 0.0]], dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        z, pseudo = torch.full((1, 3), observed), torch.full((1, 3), kind)
        loss = loss_of(logits, z, pseudo, **RATES, eta=1.0, m=1.5)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_ramps_reach_their_ends():
    assert aevlp.ramp((0.0, 10.0), 1, 8) == pytest.approx(1.25)  # not 0: the first epoch is t = 1
    assert aevlp.ramp((0.0, 10.0), 8, 8) == 10.0
    assert aevlp.ramp((2.0, 0.5), 4, 8) == pytest.approx(1.25)
    assert aevlp.ramp((-2.0, -8.0), 1, 1) == -8.0


# ---- label graph


def slow_graph(text, u, e, tau):
    """Section 4, entry by entry"""
    n = len(text)
    cosine = lambda a, b: sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    a = [[cosine(text[i], text[j]) for j in range(n)] for i in range(n)]
    graph = []
    for i in range(n):
        kept = sorted(range(n), key=lambda j: -a[i][j])[:u]
        sparse = [a[i][j] if j in kept else 0.0 for j in range(n)]
        total = sum(sparse[j] for j in range(n) if j != i)
        bar = [1 - e if j == i else (e / total * sparse[j] if total else 0.0) for j in range(n)]
        exps = [math.exp(value / tau) if value else 0.0 for value in bar]
        graph.append([value / sum(exps) for value in exps])
    return graph


@pytest.mark.parametrize("least", [0.5, -0.5])  # with -0.5 there are negative cosines
@pytest.mark.parametrize("u", [1, 2, 4, 7])
def test_graph_against_a_loop(u, least):
    text = least + torch.rand(7, 5, generator=torch.Generator().manual_seed(u), dtype=torch.float64)
    got = aevlp.label_graph(text, u, 0.2, 0.3)
    assert torch.allclose(got, torch.tensor(slow_graph(text.tolist(), u, 0.2, 0.3), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(got.sum(1), torch.ones(7, dtype=torch.float64))
    assert ((got > 0).sum(1) == u).all()


def test_graph_by_hand():
    """Two classes at right angles to a third, alike among themselves"""
    text = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    near = math.exp(0.8 / 0.3), math.exp(0.2 / 0.3)
    total = sum(near)
    expected = [[near[0] / total, near[1] / total, 0], [near[1] / total, near[0] / total, 0], [0, 0, 1]]
    assert torch.allclose(aevlp.label_graph(text, 2, 0.2, 0.3), torch.tensor(expected), atol=1e-6)


def test_graph_takes_one_class_and_texts_alike():
    assert aevlp.label_graph(torch.tensor([[3.0, 4.0]]), 1, 0.2, 0.3).tolist() == [[1.0]]
    twins = aevlp.label_graph(torch.ones(3, 4), 1, 0.2, 0.3)
    assert torch.equal(twins, torch.eye(3))  # the one kept is the class itself


def test_label_noise_is_the_frozen_gcn():
    text = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    graph = aevlp.label_graph(text, 3, 0.2, 0.3)
    chance, hidden = torch.Generator().manual_seed(5), text.tolist()
    for d_in, d_out in ((6, 12), (12, 12), (12, 6)):
        weights = ((2 * torch.rand(d_in, d_out, generator=chance) - 1) / d_out**0.5).tolist()
        assert max(abs(v) for row in weights for v in row) <= 1 / math.sqrt(d_out)
        mixed = [[sum(graph[i, j].item() * hidden[j][a] for j in range(4)) for a in range(d_in)] for i in range(4)]
        out = [[sum(row[a] * weights[a][c] for a in range(d_in)) for c in range(d_out)] for row in mixed]
        hidden = [[v if v > 0 else 0.2 * v for v in row] for row in out]
    expected = F.normalize(torch.tensor(hidden) + text, dim=1)
    assert torch.allclose(aevlp.add_label_noise(text, graph, 5), expected, atol=1e-5)
    assert not torch.allclose(aevlp.add_label_noise(text, graph, 6), expected, atol=1e-3)


# ---- pseudo-labels


def slow_damp(s_global, s_local, z, nu, zeta_global, k, delta_neg):
    labels = []
    for glob, tiles, seen in zip(s_global, s_local, z):
        n = len(glob)
        observed = [c for c in range(n) if seen[c] == 1]
        zeta_local = min(nu, max([glob[c] for c in observed], default=0))
        final, average = [], []
        for c in range(n):
            scores = [tile[c] for tile in tiles]
            final.append((glob[c] + (max(scores) if max(scores) >= zeta_local else min(scores))) / 2)
            average.append((glob[c] + sum(scores) / len(scores)) / 2)
        row = [0] * n
        for c in sorted(range(n), key=lambda c: -final[c])[:k]:
            row[c] = 1 if final[c] >= zeta_global else 0
        for c in sorted(range(n), key=lambda c: average[c])[: int(delta_neg * n)]:
            row[c] = -1
        labels.append([0 if seen[c] == 1 else row[c] for c in range(n)])
    return labels


@pytest.mark.parametrize("seed", range(20))
def test_damp_against_a_loop(seed):
    chance = torch.Generator().manual_seed(seed)
    scores = (torch.randn(12, 5, 9, generator=chance, dtype=torch.float64) * 2).softmax(2)
    z = F.one_hot(torch.randint(0, 9, (12,), generator=chance), 9)
    z[:3] = 0
    nu, zeta, k, delta = (0.3, 0.2, 3, 0.34) if seed % 2 else (0.05, 0.1, 20, 0.0)
    got = aevlp.damp_pseudo_labels(scores[:, 0], scores[:, 1:], z, nu, zeta, k, delta)
    expected = slow_damp(scores[:, 0].tolist(), scores[:, 1:].tolist(), z.tolist(), nu, zeta, k, delta)
    assert got.dtype == torch.int8
    assert got.tolist() == expected


def damp(s_global, s_local, z, nu=0.5, zeta_global=0.25, k=3, delta_neg=0.0):
    tensors = torch.tensor([s_global]), torch.tensor([s_local]), torch.tensor([z])
    return aevlp.damp_pseudo_labels(*tensors, nu, zeta_global, k, delta_neg).tolist()[0]


def test_the_global_threshold_is_reached_by_equality():
    tiles = [[0.25, 0.125, 0.5, 0.125]]
    assert damp([0.25, 0.125, 0.5, 0.125], tiles, [0, 0, 0, 1]) == [1, 0, 1, 0]
    assert damp([0.25, 0.125, 0.5, 0.125], tiles, [0, 0, 0, 1], zeta_global=0.2500001) == [0, 0, 1, 0]


def test_the_local_threshold_is_reached_by_equality_and_is_the_lower_of_two():
    """Class 0: highest tile 0.5, lowest 0; its final score is 0.25 with the highest, 0 with the lowest"""
    tiles = [[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]
    sees = lambda observed_score, nu: damp([0.0, observed_score, 0.0], tiles, [0, 1, 0], nu)[0]
    assert sees(0.5, nu=0.9) == 1  # threshold 0.5, reached
    assert sees(0.6, nu=0.9) == 0
    assert sees(0.6, nu=0.5) == 1  # nu is the lower
    assert sees(0.6, nu=0.51) == 0


def test_a_row_without_a_positive_has_no_local_threshold():
    tiles = [[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]
    assert damp([0.0, 0.6, 0.0], tiles, [0, 0, 0], nu=0.9) == [1, 1, 1]


def test_the_observed_class_takes_one_of_the_k_places():
    scores = [0.4, 0.3, 0.2, 0.1]
    assert damp(scores, [scores], [1, 0, 0, 0], zeta_global=0.05, k=2) == [0, 1, 0, 0]
    assert damp(scores, [scores], [0, 0, 0, 1], zeta_global=0.05, k=2) == [1, 1, 0, 0]
    assert damp(scores, [scores], [1, 0, 0, 0], zeta_global=0.05, k=99) == [0, 1, 1, 1]
    assert damp(scores, [scores], [1, 0, 0, 0], zeta_global=0.05, k=0) == [0, 0, 0, 0]


def test_ties_go_to_the_first_class():
    scores = [0.25, 0.25, 0.25, 0.25]
    assert damp(scores, [scores], [0, 0, 0, 0], k=2, delta_neg=0.0) == [1, 1, 0, 0]
    assert damp(scores, [scores], [0, 0, 0, 0], k=0, delta_neg=0.5) == [-1, -1, 0, 0]


def test_negatives_win_and_an_observed_one_among_them_is_not_replaced():
    scores = [0.1, 0.2, 0.3, 0.4]
    assert damp(scores, [scores], [0, 0, 0, 1], zeta_global=0.0, k=4, delta_neg=0.5) == [-1, -1, 1, 0]
    assert damp(scores, [scores], [1, 0, 0, 0], zeta_global=0.0, k=4, delta_neg=0.5) == [0, -1, 1, 1]
    assert damp(scores, [scores], [0, 0, 0, 1], zeta_global=9.0, k=4, delta_neg=0.74) == [-1, -1, 0, 0]  # int(2.96)


# ---- views


def test_tiles_cover_the_image_and_overlap_as_they_grow():
    plain = aevlp.tile_boxes(torch.zeros(1, 4), 2, 100)[0].tolist()
    assert plain == [[0, 0, 50, 50], [50, 0, 100, 50], [0, 50, 50, 100], [50, 50, 100, 100]]
    grown = aevlp.tile_boxes(torch.tensor([[0.2, 0.0, 0.0, 0.1]]), 2, 100)[0]
    assert torch.allclose(grown[0], torch.tensor([0.0, 0, 55, 55]))  # cut off at the border
    assert torch.allclose(grown[3], torch.tensor([47.5, 47.5, 100, 100]))
    inner = aevlp.tile_boxes(torch.full((1, 16), 0.2), 4, 100)[0, 5]
    assert torch.allclose(inner, torch.tensor([22.5, 22.5, 52.5, 52.5]))


def test_views_show_the_image_and_its_tiles():
    """Four squares of one colour each: tile and colour belong together, in order, whatever is flipped"""
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
    x = colours.view(2, 2, 3).permute(2, 0, 1).repeat_interleave(20, 1).repeat_interleave(20, 2)[None]
    flip = torch.tensor([[False, True, False, True, False]])
    views = aevlp.augment(x, torch.zeros(1, 4), flip, 2, 40)
    assert views.shape == (1, 5, 3, 40, 40)
    assert torch.equal(views[0, 0], x[0])
    for tile, colour in zip(views[0, 1:], colours):
        assert torch.allclose(tile[:, 4:-4, 4:-4], colour.view(3, 1, 1).expand(3, 32, 32), atol=1e-6)
    whole = aevlp.augment(x, torch.zeros(1, 4), ~flip, 2, 40)[0, 0]
    assert torch.equal(whole, x[0].flip(2))


def test_a_tile_is_the_squashed_crop():
    x = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    x = F.interpolate(x, (48, 48), mode="bilinear")  # smooth
    tile = aevlp.augment(x, torch.zeros(1, 4), torch.zeros(1, 5, dtype=torch.bool), 2, 48)[0, 2]
    crop = F.interpolate(x[:, :, :24, 24:], (48, 48), mode="bilinear")[0]
    assert (tile - crop)[:, 2:-2, 2:-2].abs().max() < 1e-4


def test_views_follow_seed_and_epoch():
    draw = lambda seed, epoch: aevlp.draw_views(50, 2, 0.2, seed, epoch)
    (grown, flip), (again, _), (later, _), (other, _) = draw(0, 1), draw(0, 1), draw(0, 2), draw(1, 1)
    assert torch.equal(grown, again)
    assert not torch.equal(grown, later)
    assert not torch.equal(grown, other)
    assert 0 <= grown.min() < 0.02
    assert 0.18 < grown.max() < 0.2
    assert 0.4 < flip.float().mean() < 0.6
    assert len({tuple(row.tolist()) for row in flip}) > 1


# ---- settings


def test_presets_are_the_papers():
    tables = {
        "voc": (8, 8, (0, 2), (-2, -2), 0.1, 0.5, 0.01, 3, 0.4, 0.7, 0.05, 4, 0.2, 20, 0.3),
        "coco": (16, 8, (0, 10), (-2, -8), 0.3, 0.5, 0.01, 3, 0.5, 0.7, 0.001, 4, 0.3, 62, 0.2),
        "nus": (16, 10, (0, 10), (-2, -8), 0.3, 0.6, 0.01, 3, 0.5, 0.7, 0.001, 4, 0.2, 50, 0.2),
        "cub": (8, 10, (0, 10), (-4, -8), 0.005, 0.005, 0.1, 32, 0.2, 0.8, 0.01, 5, 0.2, 312, 0.3),
    }
    for dataset, row in tables.items():
        a = common.parse(aevlp.Args, aevlp.PRESETS, ["--dataset", dataset])
        rates = a.lambda1, a.lambda2, a.eta, a.grid, a.delta, a.graph_u, a.graph_tau
        assert (a.batch_size, a.epochs, a.w, a.b, a.nu, a.zeta_global, a.tau, a.k, *rates) == row
        assert (a.lr, a.head_lr, a.mu, a.sigma) == (1e-5, 10, (0.5, 0.8), (2, 0.5))
        assert (a.q_neg, a.q_pos, a.rho, a.graph_e, a.refresh_every) == (1, 0.01, 0.9, 0.2, 1)
        assert (a.clip_model, a.clip_pretrained, a.prompt) == ("ViT-B-16", "openai", "a photo of a {}.")


# ---- runs


@pytest.fixture
def flags(squares, tiny_clip):
    small = ("--grid", "2", "--tau", "0.05", "--zeta_global", "0.2", "--head_lr", "1")
    return ("--dataset", squares, *SMALL, "--clip_model", f"local-dir:{tiny_clip}", *small, "--delta", "0.25")


def rows(run):
    return [{name: float(value or "nan") for name, value in row.items()} for row in metrics(run)]


def last_labels(run):
    return torch.load(run / "last.pt", weights_only=True)["labels"]["pseudo"]


def test_a_run_logs_what_it_does(script, flags, workplace):
    script("aevlp.py", *flags, "--epochs", 3)
    run = only_run(workplace)
    first, _, last = rows(run)
    assert [last[f"schedule_{name}"] for name in ("w", "b", "mu", "sigma")] == pytest.approx([2, -2, 0.8, 0.5])
    assert first["schedule_w"] == pytest.approx(2 / 3)
    parts = ("positive", "unknown", "pseudo_negative", "pseudo_positive")
    total = sum(last[f"loss_{part}"] for part in (*parts, "R"))
    assert last["loss"] == pytest.approx(total, rel=1e-5)
    assert last["pseudo_negatives_per_image"] <= 1  # int(0.25 * 4), observed ones left out
    assert 0 <= last["pseudo_positives_precision"] <= 100
    assert len({row["pseudo_positives_precision"] for row in rows(run)}) > 1  # new views in every epoch


def test_the_logged_labels_are_those_of_the_method(script, flags, workplace):
    """The checkpoint's pseudo-labels, made again one image at a time from files, views and CLIP"""
    script("aevlp.py", *flags, "--epochs", 1)
    run_directory = only_run(workplace)
    pseudo = last_labels(run_directory)
    args = common.parse(aevlp.Args, aevlp.PRESETS, list(flags))
    data, clip = common.load(args), common.Clip(args, torch.device("cpu"))
    text = clip.encode_text(clip.tokenizer(common.prompts(args.prompt, data.classes)))
    text = aevlp.add_label_noise(text, aevlp.label_graph(text, 4, 0.2, 0.3), 0)
    grown, flip = aevlp.draw_views(len(data.train), 2, 0.2, 0, 1)
    for row in range(0, len(data.train), 7):
        x = torch.from_numpy(data.train.images[data.train.rows[[row]]]).permute(0, 3, 1, 2).float() / 255
        views = aevlp.augment(x, grown[[row]], flip[[row]], 2, 32)[0]
        scores = (clip.encode_image(views) @ text.T / args.tau).softmax(1)[None]
        one = aevlp.damp_pseudo_labels(scores[:, 0], scores[:, 1:], data.train.z[[row]], 0.1, 0.2, 3, 0.25)
        assert torch.equal(pseudo[[row]], one)
    positive, negative, y, hidden = pseudo == 1, pseudo == -1, data.train.y, data.train.z == 0
    percent = lambda part: 100 * part.float().mean().item()
    at_random = lambda chosen, right: (
        100
        * sum(
            chosen[:, c].sum().item() / chosen.sum().item() * right[hidden[:, c], c].float().mean().item()
            for c in range(4)
        )
    )
    expected = {
        "pseudo_positives_per_image": positive.sum().item() / len(y),
        "pseudo_positives_precision": percent(y[positive] == 1),
        "pseudo_positives_precision_at_random": at_random(positive, y == 1),
        "pseudo_positives_recall": percent(positive[(y == 1) & hidden]),
        "pseudo_negatives_per_image": negative.sum().item() / len(y),
        "pseudo_negatives_precision": percent(y[negative] == 0),
        "pseudo_negatives_precision_at_random": at_random(negative, y == 0),
        "pseudo_negatives_recall": percent(negative[(y == 0) & hidden]),
    }
    (logged,) = rows(run_directory)
    assert {name: logged[name] for name in logged if name.startswith("pseudo_")} == pytest.approx(expected, rel=1e-5)
    assert 0 < logged["pseudo_positives_precision"] < 100
    assert 0 < logged["pseudo_negatives_precision"] < 100


def test_the_classes_embeddings_are_the_texts_with_noise(squares, tiny_clip, workplace):
    """Made once: a second call reads them. Another seed is another noise"""
    args = aevlp.Args(dataset=squares, clip_model=f"local-dir:{tiny_clip}", graph_u=3, device="cpu", workers=0)
    clip, texts = common.Clip(args, torch.device("cpu")), ["a red one", "a green one", "a blue one", "a white one"]
    loader = common.Loader(args, torch.device("cpu"))
    cache = common.EmbeddingCache("data", loader)
    text = clip.encode_text(clip.tokenizer(texts)).double()
    graph = aevlp.label_graph(text, 3, args.graph_e, args.graph_tau)
    for seed in (0, 1):
        args.seed = seed
        got = aevlp.class_embeddings(clip, texts, cache, args, torch.device("cpu"))
        torch.testing.assert_close(got, aevlp.add_label_noise(text, graph, seed), atol=1e-6, rtol=1e-5)
        assert got.dtype == torch.float64
    assert len(list((workplace / "data").rglob("all.npy"))) == 1
    args.graph_u = 99  # no more than there are
    everyone = aevlp.label_graph(text, 4, args.graph_e, args.graph_tau)
    got = aevlp.class_embeddings(clip, texts, cache, args, torch.device("cpu"))
    torch.testing.assert_close(got, aevlp.add_label_noise(text, everyone, 1), atol=1e-6, rtol=1e-5)


def test_refresh_every_keeps_the_labels_in_between(script, flags, workplace):
    script("aevlp.py", *flags, "--epochs", 4, "--refresh_every", 2, "--linear")
    precision = [row["pseudo_positives_precision"] for row in rows(only_run(workplace))]
    assert precision[0] == precision[1] != precision[2] == precision[3]


@pytest.mark.parametrize("zeta", [0.2, 0.3, 2])
def test_few_pseudo_positives_of_the_training_images_are_warned_of(zeta, script, flags, workplace):
    """Those that the first epoch trains with, made from tiles too; told once"""
    out = script("aevlp.py", *flags, "--zeta_global", zeta, "--epochs", 1, "--linear")
    few = 100 * (last_labels(only_run(workplace)) == 1).any(1).float().mean().item()
    assert (few < 1) == (zeta == 2)
    assert out.count("% of the training images have a pseudo-positive: lower --zeta_global") == (few < 1)


def test_no_damp_is_the_gr_loss_and_needs_no_clip(script, squares, workplace):
    script("aevlp.py", "--dataset", squares, *SMALL, "--epochs", 2, "--no_damp", "--clip_model", "local-dir:nowhere")
    last = rows(only_run(workplace))[-1]
    assert last["loss_pseudo_negative"] == last["loss_pseudo_positive"] == 0
    assert last["loss"] == pytest.approx(last["loss_positive"] + last["loss_unknown"], rel=1e-5)
    assert last["pseudo_positives_per_image"] == last["pseudo_negatives_per_image"] == 0
    assert not [name for name in last if "precision" in name or "recall" in name]
    assert not (workplace / "data").exists()


def test_the_loss_of_a_step_is_that_of_its_pseudo_labels(script, flags, workplace):
    """One step on all images at a learning rate of nothing, made again from the checkpoint's labels and weights"""
    script("aevlp.py", *flags, "--epochs", 1, "--batch_size", 80, "--lr", 1e-30)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    args = common.parse(aevlp.Args, aevlp.PRESETS, [*flags, "--epochs", "1", "--batch_size", "80"])
    run, data = common.Run(args, str(ROOT / "aevlp.py")), common.load(args)
    model = common.Classifier(args, 4).train()
    model.load_state_dict(last["model"])
    run.epoch = 1
    ((x, z, idx),) = run.batches(data.train, flip=True)
    rates = {**RATES, "w": 2.0, "mu": 0.8, "sigma": 0.5}
    m = data.val.y.sum(1).float().mean().item()
    loss, parts = aevlp.gpr_loss(model(x), z, last["labels"]["pseudo"][idx], **rates, eta=0.05, m=m)
    (row,) = rows(only_run(workplace))
    expected = {name: value.item() for name, value in {"loss": loss, **parts}.items()}
    assert {name: row[name] for name in row if name.startswith("loss")} == pytest.approx(expected, rel=1e-4)
    assert min(expected.values()) > 0


def test_the_gr_loss_learns(script, squares, workplace):
    script("aevlp.py", "--dataset", squares, *SMALL, "--head_lr", 1, "--no_damp", "--epochs", 30)
    assert max(row["test_mAP"] for row in rows(only_run(workplace)) if row["test_mAP"] > 0) > LEARNT


def test_means_are_over_the_steps_of_all_processes(squares, monkeypatch):
    """By hand: one process logged 0.5 and 0.25, another 1 and nothing, and a value that only it has"""
    args = common.parse(aevlp.Args, aevlp.PRESETS, ["--dataset", squares])
    run = common.Run(args, str(ROOT / "aevlp.py"))
    run.log(schedule_w=0.5)
    run.log(schedule_w=torch.tensor(0.25))
    run.log(schedule_w=math.nan)
    assert run.row_of_logs() == {"schedule_w": 0.375}
    other = {"schedule_w": (1.0, 1), "only_there": (3.0, 2)}, None
    monkeypatch.setattr(common, "world", lambda: 2)
    monkeypatch.setattr(
        common.dist, "all_gather_object", lambda everyone, mine: everyone.__setitem__(slice(2), [mine, other])
    )
    assert run.row_of_logs() == pytest.approx({"schedule_w": 1.75 / 3, "only_there": 1.5})


def test_the_head_learns_faster(script, flags, workplace):
    script("aevlp.py", *flags, "--epochs", 1, "--head_lr", 7, "--max_steps", 2)
    groups = torch.load(only_run(workplace) / "last.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([3e-3, 2.1e-2])
    assert len(groups[1]["params"]) == 2


def test_a_kill_changes_nothing(a_kill_changes_nothing, flags):
    killed, whole = a_kill_changes_nothing("aevlp.py", *flags, "--epochs", 5, "--refresh_every", 3)
    assert torch.equal(last_labels(killed), last_labels(whole))


def test_two_processes_share_the_views(flags, workplace):
    odd = write_dataset(workplace / "odd", n_train=101)  # 81 to train: one process has one less
    flags = (*flags, "--dataset", odd)
    finish(start(ROOT / "aevlp.py", *flags, "--epochs", 1, "--out", "one", cwd=workplace))
    finish(start(*TORCHRUN, ROOT / "aevlp.py", *flags, "--epochs", 1, "--out", "two", cwd=workplace))
    (one,), (two,) = (list((workplace / out).iterdir()) for out in ("one", "two"))
    assert torch.equal(last_labels(one), last_labels(two))
    assert len(last_labels(one)) == 81
    quality = [{name: row[name] for name in row if name.startswith("pseudo_")} for (row,) in map(rows, (one, two))]
    assert quality[0] == quality[1]  # images of both are counted once


def test_a_run_is_measured_later(script, flags, workplace):
    script("aevlp.py", *flags, "--epochs", 1)
    run = only_run(workplace)
    best = rows(run)[0]["val_mAP"]
    out = script("aevlp.py", "--eval_only", run)
    assert f"val mAP {best:.2f}" in out


def test_own_images_without_true_labels(script, flags, workplace):
    folder = write_dataset(workplace / "own")
    for name in ("train_labels", "val_labels", "val_images"):
        if name == "train_labels":
            observed = common.draw_single_positives(np.load(folder / f"formatted_{name}.npy"))
            np.save(folder / "formatted_train_labels_obs.npy", observed)
        (folder / f"formatted_{name}.npy").unlink()
    own = (*flags, "--dataset", folder, "--epochs", 1)
    with pytest.raises(SystemExit, match="--positives"):
        script("aevlp.py", *own)
    script("aevlp.py", *own, "--positives", 2)
    (row,) = rows(only_run(workplace))
    assert row["pseudo_positives_per_image"] >= 0
    assert not [name for name in row if "precision" in name or "recall" in name]


REFUSED = {
    "--tau 0": "--tau must be above 0, not 0.0",
    "--graph_tau 0": "--graph_tau must be above 0, not 0.0",
    "--sigma 1 0": "--sigma must be above 0, not 0.0",
    "--sigma -1 1": "--sigma must be above 0, not -1.0",
    "--q_pos 0": "--q_pos must be above 0, not 0.0",
    "--q_neg -1": "--q_neg must be above 0, not -1.0",
    "--head_lr 0": "--head_lr must be above 0, not 0.0",
    "--delta 1.5": "--delta must be between 0 and 1, not 1.5",
    "--rho -0.1": "--rho must be between 0 and 1, not -0.1",
    "--graph_e 1": "--graph_e must be at least 0 and below 1, not 1.0",
    "--k -1": "--k must be at least 0 and below 2^31, not -1",
    "--grid 0": "--grid must be at least 1 and below 2^31, not 0",
    "--graph_u 0": "--graph_u must be at least 1 and below 2^31, not 0",
    "--refresh_every 0": "--refresh_every must be at least 1 and below 2^31, not 0",
    "--grow -0.2": "--grow must be at least 0, not -0.2",
    "--nu -1": "--nu must be at least 0, not -1.0",
    "--zeta_global -1": "--zeta_global must be at least 0, not -1.0",
    "--lambda1 -0.1": "--lambda1 must be at least 0, not -0.1",
    "--lambda1 0.8": "--lambda1 0.8 must be at most --lambda2 0.7",
    "--lambda2 0.1": "--lambda1 0.4 must be at most --lambda2 0.1",
    "--eta -1": "--eta must be at least 0, not -1.0",
    "--eta nan": "--eta must be a finite number, not nan",
    "--positives -1": "--positives must be at least 0, not -1.0",
    "--w 0 inf": "--w must be a finite number, not inf",
    "--b nan 0": "--b must be a finite number, not nan",
    "--prompt photo": "--prompt 'photo' must have one {} where the class goes",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_setting_is_one_sentence(words, script, flags, workplace):
    with pytest.raises(SystemExit) as refusal:
        script("aevlp.py", *flags, *words.split())
    assert refusal.value.code == f"error: {REFUSED[words]}"
    assert not (workplace / "runs").exists()
