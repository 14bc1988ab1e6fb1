"""AEVLP: GPR loss and DAMP pseudo-labels (Tran et al. 2025, arXiv:2508.20381)

    python aevlp.py --dataset voc

CLIP looks at every image and at overlapping tiles of it and names positives and negatives; a robust loss weighs them,
and the labels that CLIP leaves open, by how sure the network is itself.

NOTES: the authors' release never writes a negative pseudo-label (`--delta_neg 0`), cuts tiles without overlap (`--grow
0`), fixes m at 1.5, 2.9, 1.9 and 31.4 (`--positives`), and has nu 0 for VOC, b from -2 for CUB and q_neg 1.5; it also
skips the softmax of the label graph, has no activation after the last GCN layer, compares with the local threshold
strictly and lets w and b lag an epoch. `--no_damp` is the GR loss (Chen et al. 2024): no pseudo-labels and no R; R
alone is `--zeta_global 2 --delta_neg 0 --refresh_every 99`. A tile that grows over the image's border is cut off there.
Tiles are cut from the images at `--image_size` with bilinear sampling, the whole image is squashed as everywhere. Where
several positives are known, the local threshold takes the one that CLIP scores highest. Where a class's cosines to its
neighbours sum to less than 0, section 4's formula turns their order round; so do we. Precision is that of the labels
that were not observed. Class names are read as words, as in vlpl.py. Under torchrun R takes its mean over each
process's share of a batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.ops import roi_align

import common

# ---- 1. Settings

VIEWED_AT_ONCE = 4  # images of a CLIP call, each with all its tiles; 16 take twice as long per image on a CPU


@dataclass
class Args(common.Args):
    epochs: int = 8
    batch_size: int = 8  # over all processes
    lr: float = 1e-5
    patience: int = -1  # stop after more than so many epochs without a better validation mAP (-1: never)
    image_size: int = 448  # images are squashed to a square of this side
    backbone: str = "resnet50"  # a ResNet of torchvision, resnet_small, or any name of timm
    weights: str = "imagenet"  # imagenet, none, or a .pth or .safetensors file
    head_lr: float = 10.0  # the head learns so many times as fast as lr says
    clip_model: str = "ViT-B-16"  # a name of open_clip, local-dir:FOLDER, hf-hub:NAME, or scenes
    clip_pretrained: str = "openai"  # with a name of open_clip: a tag, or a file (OpenAI's: NAME-quickgelu)
    prompt: str = "a photo of a {}."  # what CLIP reads; {} is the class
    tau: float = 0.01  # temperature of CLIP's softmax
    grid: int = 4  # tiles per side of an image
    grow: float = 0.2  # tiles grow by up to this share of their size
    nu: float = 0.1  # local threshold, unless CLIP gives the observed class less
    zeta_global: float = 0.5  # from this score on a class becomes a pseudo-positive ...
    k: int = 3  # ... if it is among the k highest of the image
    delta_neg: float = 0.2  # share of the classes, lowest first, that become pseudo-negatives
    graph_u: int = 20  # neighbours of a class in the label graph, itself included
    graph_e: float = 0.2  # weight of the others together, before the graph's softmax
    graph_tau: float = 0.3  # smoothness of the label graph
    refresh_every: int = 1  # epochs between two rounds of pseudo-labels
    damp: bool = True  # --no_damp is the GR loss alone: no pseudo-labels, eta 0
    w: tuple[float, float] = (0.0, 2.0)  # slope of k(p) before the first epoch and in the last
    b: tuple[float, float] = (-2.0, -2.0)  # its offset
    mu: tuple[float, float] = (0.5, 0.8)  # centre of v(p)
    sigma: tuple[float, float] = (2.0, 0.5)  # its width
    q_pos: float = 0.01  # robustness of an open label's positive part (near 0: -log p, 1: 1 - p)
    q_neg: float = 1.0  # and of its negative part
    lambda1: float = 0.4  # least weight of a pseudo-positive
    lambda2: float = 0.7  # its greatest
    rho: float = 0.9  # how sure pseudo-positives count as (1: no label smoothing)
    eta: float = 0.05  # weight of R, which holds the number of positives per image
    positives: float = 0.0  # that number (0: from the validation labels)
    show_views: int = -1  # write views.png: this training image, its tiles, scores and labels (-1: don't)


PRESETS = {  # Tran et al., supplement, Table 3; the defaults are VOC's
    "coco": dict(batch_size=16, w=(0.0, 10.0), b=(-2.0, -8.0), nu=0.3, lambda1=0.5, eta=0.001)
    | dict(delta_neg=0.3, graph_u=62, graph_tau=0.2),
    "nus": dict(batch_size=16, epochs=10, w=(0.0, 10.0), b=(-2.0, -8.0), nu=0.3, zeta_global=0.6, lambda1=0.5)
    | dict(eta=0.001, graph_u=50, graph_tau=0.2),
    "cub": dict(epochs=10, w=(0.0, 10.0), b=(-4.0, -8.0), nu=0.005, zeta_global=0.005, tau=0.1, k=32, lambda1=0.2)
    | dict(lambda2=0.8, eta=0.01, grid=5, graph_u=312),
    # made here; chosen on its validation set
    "scenes": dict(epochs=15, lr=1e-3, image_size=64, backbone="resnet_small", weights="none", clip_model="scenes")
    | dict(head_lr=1.0, grid=2, tau=0.07, zeta_global=0.4, refresh_every=5),
}

# ---- 2. Method


def schedule(ends, t, T):
    """A setting in epoch t = 1 .. T, on the line from its value (0) to its value (T)"""
    return ends[0] + (ends[1] - ends[0]) * t / T


def gpr_terms(logits, z, pseudo, w, b, mu, sigma, q_pos, q_neg, lambda1, lambda2, rho, m):
    """The four parts of the GPR loss, each a mean over (B, C), and R"""
    log_p, log_not_p, p = F.logsigmoid(logits), F.logsigmoid(-logits), logits.sigmoid()
    k = (w * p.detach() + b).sigmoid()  # how likely an open label is a positive
    v = (-((p.detach() - mu) ** 2) / (2 * sigma**2)).exp()
    robust = lambda log_q, q: -torch.expm1(q * log_q) / q  # (1 - p^q) / q, with a finite gradient at p = 0
    kind = torch.where(z == 1, 2, pseudo)
    positive = torch.where(kind == 2, -log_p, 0)
    unknown = torch.where(kind == 0, v * (k * robust(log_p, q_pos) + (1 - k) * robust(log_not_p, q_neg)), 0)
    pseudo_negative = torch.where(kind == -1, -v * log_not_p, 0)
    soft = -rho * log_p - (1 - rho) * log_not_p
    pseudo_positive = torch.where(kind == 1, (1 - v).clamp(lambda1, lambda2) * soft, 0)
    R = ((p.sum(1).mean() - m) / logits.shape[1]) ** 2
    return positive.mean(), unknown.mean(), pseudo_negative.mean(), pseudo_positive.mean(), R


def gpr_loss(logits, z, pseudo, w, b, mu, sigma, q_pos, q_neg, lambda1, lambda2, rho, eta, m):
    """Eq. 4: mean over (B, C) of -log p where z = 1, v [k (1 - p^q_pos) / q_pos + (1 - k)(1 - (1 - p)^q_neg) / q_neg]
    where pseudo = 0, -v log(1 - p) where it is -1, clip(1 - v, lambda1, lambda2) [-rho log p - (1 - rho) log(1 - p)]
    where it is 1; plus eta ((mean_n sum_c p - m) / C)^2. k = sigmoid(w p + b) and v = exp(-(p - mu)^2 / (2 sigma^2))
    take no gradient"""
    *terms, R = gpr_terms(logits, z, pseudo, w, b, mu, sigma, q_pos, q_neg, lambda1, lambda2, rho, m)
    return sum(terms) + eta * R


def label_graph(text, u, e, tau):
    """Section 4: cosines of the classes' texts; per row the u highest, the neighbours' scaled to a sum of e, the own
    one 1 - e; then a softmax over what is not 0. -> A* (C, C)"""
    unit = F.normalize(text, dim=1)
    own = torch.eye(len(text), dtype=torch.bool, device=text.device)
    similar = (unit @ unit.T).masked_fill(own, torch.inf)  # rounding must not put a twin before a class itself
    place = similar.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    neighbours = torch.where((place < u) & ~own, similar, 0)
    total = neighbours.sum(1, keepdim=True)
    weights = e * neighbours / torch.where(total == 0, 1, total) + (1 - e) * own
    return (weights / tau).masked_fill(weights == 0, -torch.inf).softmax(1)


def add_label_noise(text, graph, seed):
    """Section 6.2: unit(GCN(E) + E), the GCN frozen as drawn: three layers d - 2d - 2d - d. -> (C, d)"""
    chance, d, hidden = torch.Generator().manual_seed(seed), text.shape[1], text
    for d_in, d_out in ((d, 2 * d), (2 * d, 2 * d), (2 * d, d)):
        weights = (2 * torch.rand(d_in, d_out, generator=chance) - 1).to(text) / math.sqrt(d_out)
        hidden = F.leaky_relu(graph @ hidden @ weights, 0.2)
    return F.normalize(hidden + text, dim=1)


def draw_views(n, grid, grow, seed, epoch):
    """What is random in an epoch's views of n images: how far each tile grows, and what is flipped, the whole first"""
    chance = torch.Generator().manual_seed(seed * 10007 + epoch)
    return grow * torch.rand(n, grid**2, generator=chance), torch.rand(n, 1 + grid**2, generator=chance) < 0.5


def tile_boxes(grown, grid, side):
    """(B, R) growths -> (B, R, 4): left, top, right, bottom of the g x g tiles, row by row"""
    middle = (torch.arange(grid, device=grown.device) + 0.5) / grid
    y, x = (axis.flatten() for axis in torch.meshgrid(middle, middle, indexing="ij"))
    half = (1 + grown) / (2 * grid)
    return side * torch.stack([x - half, y - half, x + half, y + half], 2).clamp(0, 1)


def augment(x, grown, flip, grid, size):
    """Pixels (B, 3, H, H) -> views (B, 1 + R, 3, size, size): the whole image, then its tiles"""
    boxes = tile_boxes(grown, grid, x.shape[2])
    tiles = roi_align(x, list(boxes), size, aligned=True).unflatten(0, grown.shape)  # bilinear, all in one call
    views = torch.cat([common.squash(x, size)[:, None], tiles], 1)
    return torch.where(flip[:, :, None, None, None], views.flip(4), views)


def aggregate(s_global, s_local, z, nu):
    """Section 6.3: per class the highest tile where that reaches the image's local threshold, else the lowest"""
    zeta_local = (s_global * (z == 1)).amax(1, keepdim=True).clamp(max=nu)  # 0 without a positive
    highest, lowest = s_local.amax(1), s_local.amin(1)
    return torch.where(highest >= zeta_local, highest, lowest)


def damp_pseudo_labels(s_global, s_local, z, nu, zeta_global, k, delta_neg):
    """Section 6.3: 1 for the k highest of (s_global + aggregate) / 2 that are >= zeta_global; -1, which wins, for the
    int(delta_neg * C) lowest of (s_global + mean over tiles) / 2; 0 = open, and where z = 1. -> (B, C) int8"""
    final = (s_global + aggregate(s_global, s_local, z, nu)) / 2
    average = (s_global + s_local.mean(1)) / 2
    from_top = final.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    from_bottom = average.argsort(dim=1, stable=True).argsort(dim=1)
    pseudo = torch.where((from_top < k) & (final >= zeta_global), 1, 0)
    pseudo = torch.where(from_bottom < int(delta_neg * z.shape[1]), -1, pseudo)
    return torch.where(z == 1, 0, pseudo).to(torch.int8)


def score_views(run, clip, text, split, rows, epoch, args):
    """CLIP's softmax scores of this epoch's views of these rows, in batches: (idx, views, s_global, s_local)"""
    grown, flip = (draw.to(run.device) for draw in draw_views(len(split), args.grid, args.grow, args.seed, epoch))
    batches = torch.from_numpy(rows).to(run.device).split(VIEWED_AT_ONCE)
    for idx, x in zip(batches, run.pixels(split, common.in_batches(rows, VIEWED_AT_ONCE))):
        views = augment(x, grown[idx], flip[idx], args.grid, clip.size)
        cosine = clip.encode_image(views.flatten(0, 1)).to(text) @ text.T
        scores = (cosine / args.tau).softmax(1).unflatten(0, views.shape[:2])  # (B, 1 + R, C)
        yield idx, views, scores[:, 0], scores[:, 1:]


def damp(run, clip, text, split, epoch, args):
    """Pseudo-labels of all training images from new views -> (N, C) int8; the processes share the work"""
    mine = np.arange(len(split))[common.rank() :: common.world()]
    pseudo = torch.zeros(-(-len(split) // common.world()), split.z.shape[1], dtype=torch.int8, device=run.device)
    limits = args.nu, args.zeta_global, args.k, args.delta_neg
    done, scored = 0, score_views(run, clip, text, split, mine, epoch, args)
    for idx, _, s_global, s_local in run.progress(scored, "pseudo-labels", total=-(-len(mine) // VIEWED_AT_ONCE)):
        pseudo[done : done + len(idx)] = damp_pseudo_labels(s_global, s_local, split.z[idx], *limits)
        done += len(idx)
    return common.gather(pseudo, len(split))


# same as in vlpl.py: quality
def quality(chosen, right, hidden):
    """Pseudo-labels against the truth, in percent: precision, and recall among the labels that were not observed"""
    hits = (chosen & right).sum()
    return 100 * hits / chosen.sum(), 100 * hits / (right & hidden).sum()


def to_be_shown(final, pseudo, z, k):
    """The classes that views.png shows: the observed ones, the highest scores, the lowest of the pseudo-negatives"""
    order = final.argsort(descending=True, stable=True)
    top, negatives = order[: max(8, k)].tolist(), order[pseudo[order] == -1][-10:].tolist()
    return [c for c in order.tolist() if c in top or c in negatives or z[c] == 1]


def show_views(run, clip, text, data, row, args):
    """The supplement's Fig. 1 as views.png: an image with its tiles, the tiles, and the scores that decide"""
    plt = common.pyplot()
    split, g = data.train, args.grid
    ((idx, views, s_global, s_local),) = score_views(run, clip, text, split, np.array([row]), 1, args)
    z = split.z[idx]
    pseudo = damp_pseudo_labels(s_global, s_local, z, args.nu, args.zeta_global, args.k, args.delta_neg)[0]
    together = aggregate(s_global, s_local, z, args.nu)[0]
    final, average = (s_global[0] + together) / 2, (s_global[0] + s_local[0].mean(0)) / 2
    pixels = split.images[split.rows[[row]]][0].numpy()
    grown = draw_views(len(split), g, args.grow, args.seed, 1)[0][[row]]

    figure = plt.figure(figsize=(15, 5.2), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1, 1.1))
    whole = left.subplots()
    whole.imshow(pixels)
    for x0, y0, x1, y1 in tile_boxes(grown, g, len(pixels))[0].tolist():
        whole.add_patch(plt.Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, color="gold", linewidth=1))
    observed = ", ".join(data.classes[c] for c in z[0].nonzero().flatten())
    whole.set_title(f"training image {row}, observed: {observed or 'nothing'}", fontsize=9)
    whole.axis("off")
    for axis, view, scores in zip(middle.subplots(g, g, squeeze=False).flat, views[0, 1:], s_local[0]):
        axis.imshow(view.permute(1, 2, 0).cpu().numpy())
        axis.set_title(f"{data.classes[scores.argmax()]} {scores.max():.2f}", fontsize=7)
        axis.axis("off")
    middle.suptitle("what CLIP sees of its tiles, and says first", fontsize=9)
    bars = right.subplots()
    shown = to_be_shown(final, pseudo, z[0], args.k)
    series = {"whole image": s_global[0], "tiles together": together, "decides +": final, "decides −": average}
    for shift, (name, scores) in zip((-0.3, -0.1, 0.1, 0.3), series.items()):
        bars.barh([place + shift for place in range(len(shown))], scores[shown].tolist(), height=0.18, label=name)
    names = {1: "+", -1: "−", 0: ""}
    true = lambda c: "" if split.y is None else " (there)" if split.y[row, c] else ""
    mark = lambda c: "observed" if z[0, c] == 1 else names[pseudo[c].item()]
    bars.set_yticks(range(len(shown)), [f"{mark(c)} {data.classes[c]}{true(c)}" for c in shown], fontsize=8)
    bars.axvline(args.zeta_global, color="grey", linestyle=":", linewidth=1, label="zeta_global")
    bars.set(xlim=(0, None), title="scores; + and − became pseudo-labels")
    bars.invert_yaxis()
    bars.legend(frameon=False, fontsize=8)
    with common.replacing(run.directory / "views.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if not (args.tau > 0 and args.graph_tau > 0 and min(args.sigma) > 0 and min(args.q_pos, args.q_neg) > 0):
        common.die("--tau, --graph_tau, --sigma, --q_pos and --q_neg must be above 0")
    if not (0 <= args.delta_neg <= 1 and 0 <= args.rho <= 1 and 0 <= args.graph_e < 1):
        common.die("--delta_neg and --rho are between 0 and 1, --graph_e is at least 0 and below 1")
    if not (0 <= args.lambda1 <= args.lambda2 and min(args.nu, args.eta, args.positives, args.grow) >= 0):
        common.die("--nu, --eta, --positives, --grow and --lambda1 must be at least 0, --lambda1 at most --lambda2")
    if not (args.grid >= 1 and args.refresh_every >= 1 and args.graph_u >= 1 and args.k >= 0 and args.head_lr > 0):
        common.die("--grid, --refresh_every and --graph_u must be at least 1, --k at least 0, --head_lr above 0")
    if not args.damp and args.show_views >= 0:
        common.die("--show_views shows what --no_damp leaves out: drop one of them")
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    if not -1 <= args.show_views < len(data.train):
        common.die(f"--show_views {args.show_views}: there are training images 0 to {len(data.train) - 1}")
    texts = common.prompts(args.prompt, data.classes) if args.damp else []  # new vs an.py
    idle = not args.damp or (args.eval_only and args.show_views < 0)
    clip = None if idle else common.Clip(args, run.device)  # new vs an.py
    eta = args.eta if args.damp else 0.0
    if eta and not args.positives and data.val is None:
        common.die("without validation labels say how many --positives an image has, or --eta 0")
    m = args.positives or (data.val.y.sum(1).float().mean().item() if data.val else 0.0)  # new vs an.py
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    # new vs an.py: the head has a learning rate of its own
    head = list(common.unwrap(model).head.parameters())
    body = [w for w in common.unwrap(model).body.parameters() if w.requires_grad]
    groups = [dict(params=body), dict(params=head, lr=args.lr * args.head_lr)]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]], lr=args.lr)

    pseudo_all = torch.zeros(data.train.z.shape, dtype=torch.int8, device=run.device)  # new vs an.py
    if clip:  # new vs an.py: text and graph are computed once
        text = torch.from_numpy(run.embed_texts(clip, texts).astype(np.float64)).to(run.device)  # (C, D), not unit
        graph = label_graph(text, min(args.graph_u, len(text)), args.graph_e, args.graph_tau)
        text = add_label_noise(text, graph, args.seed)
        if args.show_views >= 0 and common.rank() == 0:
            show_views(run, clip, text, data, args.show_views, args)

    for epoch in run.epochs(model=model, optimizer=optimizer, pseudo=pseudo_all):
        w, b, mu, sigma = (schedule(ends, epoch, args.epochs) for ends in (args.w, args.b, args.mu, args.sigma))
        if clip and (epoch - 1) % args.refresh_every == 0:  # new vs an.py
            pseudo_all.copy_(damp(run, clip, text, data.train, epoch, args))
        for x, z, idx in run.batches(data.train):
            with run.autocast():
                logits = model(x)
            rest = w, b, mu, sigma, args.q_pos, args.q_neg, args.lambda1, args.lambda2, args.rho, m
            *terms, R = gpr_terms(logits.float(), z, pseudo_all[idx], *rest)
            loss = sum(terms) + eta * R
            run.step(loss, optimizer)
            positive, unknown, pseudo_negative, pseudo_positive = terms
            run.log(loss=loss, loss_positive=positive, loss_unknown=unknown)
            run.log(loss_pseudo_negative=pseudo_negative, loss_pseudo_positive=pseudo_positive)
            if eta:
                run.log(loss_R=R)
        run.log(schedule_w=w, schedule_b=b, schedule_mu=mu, schedule_sigma=sigma)
        if clip:
            chosen, refused, hidden = pseudo_all == 1, pseudo_all == -1, data.train.z == 0
            run.log(positives_per_image=chosen.sum() / len(chosen), negatives_per_image=refused.sum() / len(chosen))
            if data.train.y is not None:
                precision, recall = quality(chosen, data.train.y == 1, hidden)
                run.log(pseudo_precision=precision, pseudo_recall=recall)
                run.log(pseudo_negatives_correct=quality(refused, data.train.y == 0, hidden)[0])
        run.evaluate(model, data)
