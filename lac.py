"""LAC: label-aware global consistency (Xie et al. 2022, NeurIPS)

    python lac.py --dataset voc

Every class has an embedding of its own for every image. Confident predictions on a plain view are the targets of a
distorted one, and, in a second stage, embeddings of the same class are drawn together.

NOTES: paper and release balance the three losses differently; `--form` selects one. "paper": the equations as printed,
L_AN and L_PLC summed over classes; Eq. 7 can be negative. "release": L_AN a mean over B*C, L_PLC over the number of
selected labels, the observed ones among them, L_LAC a SupCon loss in which both views of batch and queue are anchors:
the default, since validation prefers it (docs/results.md). The release also has two decoder layers (`--decoder_layers
2`), no input normalisation, ColorJitter and greyscale in the strong view, and a flip of its own for each view. Under
torchrun L_PLC's mean is over each process's selected labels, and the paper's L_LAC compares with each process's own
strong views and the queue of all. docs/lac.md has the rest.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.transforms import functional as pictures

import common

# ---- 1. Settings

FIRST_LAYERS = ("conv1.", "layer1.", "conv_stem.", "blocks.0.", "stem.", "stages.0.", "s1.", "0.")
ANCHORS_AT_ONCE = 1024  # bounds the memory of L_LAC
LOG_OF_NOTHING = -1e30  # instead of -inf, whose gradient is NaN


Confidence = Annotated[float, common.Limit("between 0.5 and 1", lambda value: 0.5 <= value <= 1)]


@dataclass
class Args(common.Args):
    epochs: common.Count = 40  # number of epochs of each stage
    batch_size: common.Count = 32  # images per step, over all processes
    lr: common.Positive = 1e-4  # learning rate, the highest of the one-cycle schedule
    patience: common.NaturalOrMinus1 = 8  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm that gives a map
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    weight_decay: common.NonNegative = 0.01  # weight decay of AdamW
    ema: common.ShareBelow1 = 0.9997  # EMA decay (0: off)
    freeze_backbone: bool = False  # frozen backbone
    frozen: tuple[str, ...] = FIRST_LAYERS  # frozen layers of a pretrained backbone, by name prefix
    dim: common.Count = 2048  # width of the embeddings
    heads: common.Count = 4  # attention heads
    ffn: common.Count = 8192  # width of the feed-forward layers
    dropout: common.ShareBelow1 = 0.1  # dropout rate
    decoder_layers: common.Count = 1  # layers of cross-attention
    project_dim: common.Count = 128  # width of the projections that L_LAC compares
    delta: tuple[Confidence, Confidence] = (0.6, 0.9)  # probability threshold of pseudo-positives, per stage
    tau: common.Positive = 0.5  # temperature of L_LAC
    queue: common.Natural = 512  # past embeddings in the queue
    lambda_plc: common.NonNegative = 1.0  # weight of L_PLC
    lambda_lac: common.NonNegative = 1.0  # weight of L_LAC
    form: Literal["paper", "release"] = "release"  # balance of the losses: as printed, or as in the authors' release
    denominator: Literal["inter", "all"] = "inter"  # form paper: L_LAC's denominator, other classes (Eq. 7) or all
    loss: Literal["an", "wan", "ls", "epr", "em"] = "an"  # loss of the weak view (all but an: stage 1 without L_PLC)
    positives: common.NonNegative = 1.5  # epr: expected positives per image
    alpha: common.NonNegative = 0.2  # em: weight of the entropy
    stage: Literal["both", "1", "2"] = "both"  # training stage (2 alone needs --init_from)
    plc: bool = True  # L_PLC (--no_plc: left out)
    lac: bool = True  # L_LAC (--no_lac: left out, and --stage both is stage 1 alone)
    end_to_end: bool = False  # one stage with all losses


PRESETS = {  # Xie et al., section 4.1, and the release: the same for all; positives: Cole et al.; alpha: Zhou et al.
    "coco": dict(positives=2.9, alpha=0.1),
    "nus": dict(positives=1.9, alpha=0.1),
    "cub": dict(positives=31.4, alpha=0.01),
    # your own images without a GPU: small enough for it
    "--device cpu": dict(freeze_backbone=True, backbone="tf_efficientnet_lite0", image_size=224, dim=256, ffn=512)
    | dict(epochs=4, batch_size=16, lr=3e-4, patience=-1, ema=0.99, project_dim=64),
    # made here; sizes that a laptop trains, lr chosen on its validation set
    "scenes": dict(
        epochs=12, batch_size=8, lr=5e-4, patience=-1, image_size=64, backbone="resnet_small", weights="none"
    )
    | dict(ema=0.99, dim=128, ffn=256, project_dim=64, positives=2.5),
}

# ---- 2. Method


def an_loss_sum(logits, z):
    """Eq. 2: sum over classes, mean over images, of -log p where z = 1, -log(1 - p) elsewhere"""
    logits = common.full_precision(logits)
    return -torch.where(z == 1, F.logsigmoid(logits), F.logsigmoid(-logits)).sum() / len(logits)


def other_loss(logits, z, loss, positives, alpha):
    """Table 2's other losses, mean over (B, C): WAN (negatives / (C - 1)), LS (targets 0.9 and 0.1), EPR (positives
    alone, plus ((mean_n sum_c p - positives) / C)^2), EM (-alpha H(p) for what was not observed)"""
    logits = common.full_precision(logits)
    positive, other, p = -F.logsigmoid(logits), -F.logsigmoid(-logits), logits.sigmoid()
    match loss:
        case "wan":
            other = other / max(logits.shape[1] - 1, 1)
        case "ls":
            positive, other = 0.9 * positive + 0.1 * other, 0.1 * positive + 0.9 * other
        case "epr":
            expected = ((p.sum(1).mean() - positives) / logits.shape[1]) ** 2
            return torch.where(z == 1, positive, 0).mean() + expected
        case "em":
            other = -alpha * (p * positive + (1 - p) * other)
    return torch.where(z == 1, positive, other).mean()


def plc_loss(logits_strong, p_weak, z, delta, form="paper"):
    """Eq. 4: sum over the unobserved classes, mean over images, of -log p_strong where p_weak >= delta and
    -log(1 - p_strong) where p_weak <= 1 - delta. p_weak takes no gradient. "release": the observed positives take part,
    and the sum is divided by the number of labels that do"""
    logits_strong, p_weak, hidden = common.full_precision(logits_strong), p_weak.detach(), z != 1
    above, below = (p_weak >= delta) & hidden, (p_weak <= 1 - delta) & hidden
    above = above | ~hidden if form == "release" else above
    positive = torch.where(above, F.logsigmoid(logits_strong), 0)
    negative = torch.where(below, F.logsigmoid(-logits_strong), 0)
    number = len(logits_strong) if form == "paper" else (above | below).sum().clamp(min=1)
    return -(positive + negative).sum() / number


def sums_over(embed_b, class_b, embed_a, class_a, own, tau, inter):
    """Of anchors a over some b, (3, A): the log of what the denominator sums, the sum of a b / tau over the b of the
    anchor's class, and their number"""
    similar = embed_a / tau @ embed_b.T  # (A, M)
    there = (class_b >= 0) & (torch.arange(len(class_b), device=own.device) != own[:, None])
    same = (class_a[:, None] == class_b) & there
    below = there & ~same if inter else there
    log_total = similar.masked_fill(~below, LOG_OF_NOTHING).logsumexp(1)
    return torch.stack([log_total, torch.where(same, similar, 0).sum(1), same.sum(1)])


def lac_loss(embed_a, class_a, embed_b, class_b, tau, denominator="inter", own=None, live=None):
    """Eq. 7, over the number of anchors a instead of B: the sum over the b of an anchor's class of
    -log(exp(a b / tau) / sum over the b of other classes of exp(a b / tau)); 0 for an anchor without such. "all": the
    mean over the b of its class, and the sum over all b. Class -1 is no anchor and nothing to compare with; `own` (A,)
    are rows of b that are the anchors themselves, and left out; from row `live` on a and b are past: constants"""
    precise = torch.promote_types(torch.promote_types(embed_a.dtype, embed_b.dtype), torch.float32)
    embed_a, embed_b, inter = embed_a.to(precise), embed_b.to(precise), denominator == "inter"
    if not len(embed_a) or not len(embed_b):
        return 0 * (embed_a.sum() + embed_b.sum())
    own = torch.full_like(class_a, -1) if own is None else own
    live = max(len(embed_a), len(embed_b)) if live is None else live  # none are past
    now, past = (embed_b[:live], class_b[:live]), (embed_b[live:].detach(), class_b[live:])
    anchors = (embed_a[:live], class_a[:live], own[:live]), (embed_a[live:].detach(), class_a[live:], own[live:])
    over = partial(checkpoint, sums_over, use_reentrant=False, preserve_rng_state=False, tau=tau, inter=inter)
    sums = []
    with torch.autocast(embed_a.device.type, enabled=False):
        for some in anchors:
            for a, classes, rows in zip(*(side.split(ANCHORS_AT_ONCE) for side in some)):
                sums.append(torch.stack([over(*now, a, classes, rows), over(*past, a, classes, rows - live)]))
    log_totals, together, number = torch.cat(sums, 2).unbind(1)  # over now and past: (2, A) each
    log_total, together, number = log_totals.logsumexp(0), together.sum(0), number.sum(0)
    log_p = torch.where(log_total > LOG_OF_NOTHING / 2, together - number * log_total, 0)
    total = (log_p if inter else log_p / number.clamp(min=1)).sum()
    return -total / (class_a >= 0).sum().clamp(min=1)


class Queue(nn.Module):
    """The last embeddings, of one view or two, and their classes"""

    def __init__(self, size, views, dim):
        super().__init__()
        self.register_buffer("embed", torch.zeros(size, views, dim))
        self.register_buffer("classes", torch.full((size,), -1))  # -1: still empty
        self.register_buffer("end", torch.zeros((), dtype=torch.int64))

    def push(self, embed, classes):
        """Those with a class, over the oldest ones; how many there are, and which, stays on the device"""
        size, count = len(self.embed), (classes >= 0).sum()
        if size:
            order = (classes < 0).argsort(stable=True)  # those with a class first
            age = (self.end + count - 1 - torch.arange(size, device=count.device)) % size  # 0: the newest
            new, source = age < count, order[(count - 1 - age).clamp(min=0)]
            self.embed.copy_(torch.where(new[:, None, None], embed[source], self.embed))
            self.classes.copy_(torch.where(new, classes[source], self.classes))
            self.end.copy_((self.end + count) % size)


def from_all(values, rows):
    """Every process's values, each process's padded to so many rows with -1"""
    padding = [0, 0] * (values.ndim - 1) + [0, rows - len(values)]
    return common.gather(F.pad(values, padding, value=-1), rows * common.world())


def compare(embed_weak, embed_strong, chosen, queue, rows, args):
    """L_LAC of a batch: the chosen labels (B, C) of the weak view against those of the strong view and the queue or, in
    the release's form, all against all. Then the queue gets them, `rows` at most from each process"""
    classes = torch.where(chosen, torch.arange(chosen.shape[1], device=chosen.device), -1).flatten()
    views = [embed_weak.flatten(0, 1), embed_strong.flatten(0, 1)]  # (B * C, project_dim) each
    past, past_classes = queue.embed.transpose(0, 1).flatten(0, 1), queue.classes.repeat(queue.embed.shape[1])
    new = from_all(torch.stack(views[: queue.embed.shape[1]], 1).detach(), rows)
    new_classes = from_all(classes, rows)
    if args.form == "release":
        if common.world() > 1:  # the other processes' embeddings are constants here, as past ones are
            others = new_classes.clone()
            others[common.rank() :: common.world()] = -1
            past, past_classes = torch.cat([*new.unbind(1), past]), torch.cat([others, others, past_classes])
        embed, both = torch.cat([*views, past]), torch.cat([classes, classes, past_classes])
        own = torch.arange(len(both), device=both.device)
        loss = lac_loss(embed, both, embed, both, args.tau, "all", own, live=2 * len(classes))
        loss = loss + (common.world() - 1) * (loss - loss.detach())  # gradients add up, of which DDP takes the mean
    else:
        others, kinds = torch.cat([views[1], past]), torch.cat([classes, past_classes])
        loss = lac_loss(views[0], classes, others, kinds, args.tau, args.denominator, live=len(classes))
        if args.denominator == "inter":
            loss = loss * chosen.sum() / chosen.numel()  # Eq. 7 divides by B = b * q
    queue.push(new, new_classes)
    return loss


def shear(image, x, y):
    degrees = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    return pictures.affine(image, 0.0, [0, 0], 1.0, degrees, center=[0, 0])


def translate(image, x, y):
    return pictures.affine(image, 0.0, [int(x * image.width), int(y * image.height)], 1.0, [0.0, 0.0])


STRENGTH = 9 / 30  # RandAugment's magnitude
OPERATIONS = (  # RandAugment's operations of an image and a magnitude, their magnitude, whether its sign is random
    (lambda image, _: image, 0, False),
    (lambda image, by: shear(image, by, 0), 0.3 * STRENGTH, True),
    (lambda image, by: shear(image, 0, by), 0.3 * STRENGTH, True),
    (lambda image, by: translate(image, by, 0), 150 / 331 * STRENGTH, True),
    (lambda image, by: translate(image, 0, by), 150 / 331 * STRENGTH, True),
    (lambda image, by: pictures.rotate(image, by), 30 * STRENGTH, True),
    (lambda image, by: pictures.adjust_brightness(image, 1 + by), 0.9 * STRENGTH, True),
    (lambda image, by: pictures.adjust_saturation(image, 1 + by), 0.9 * STRENGTH, True),
    (lambda image, by: pictures.adjust_contrast(image, 1 + by), 0.9 * STRENGTH, True),
    (lambda image, by: pictures.adjust_sharpness(image, 1 + by), 0.9 * STRENGTH, True),
    (lambda image, by: pictures.posterize(image, 8 - round(by)), 4 * STRENGTH, False),
    (lambda image, by: pictures.solarize(image, 255 - by), 255 * STRENGTH, False),
    (lambda image, _: pictures.autocontrast(image), 0, False),
    (lambda image, _: pictures.equalize(image), 0, False),
)


def strong_view(pixels, generator):
    """Cutout, half a side, and RandAugment (two operations) of one image: uint8 (H, H, 3) -> the same"""
    draw = lambda n: torch.randint(n, (1,), generator=generator).item()
    cut, half, (y, x) = pixels.copy(), len(pixels) // 4, (draw(len(pixels)), draw(len(pixels)))
    cut[max(0, y - half) : y + half, max(0, x - half) : x + half] = [draw(256) for _ in range(3)]
    image = Image.fromarray(cut)
    for _ in range(2):
        operation, magnitude, signed = OPERATIONS[draw(len(OPERATIONS))]
        image = operation(image, -magnitude if signed and draw(2) else magnitude)
    return np.asarray(image)


def two_views(pixels, row, seed, epoch):
    """An image and its strong view, which is drawn from (seed, epoch, row): uint8 (H, H, 3) -> (2, H, H, 3)"""
    state = np.random.SeedSequence([seed, epoch, int(row)]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) >> 1)
    return np.stack([pixels, strong_view(pixels, generator)])


def sine_positions(height, width, dim, device):
    """(H * W, dim): sines and cosines of the row, then of the column, both scaled to 2 pi"""
    steps = 10000 ** (2 * torch.arange(dim // 4, device=device) / (dim // 2))

    def waves(n):
        angle = 2 * math.pi * torch.arange(1, n + 1, device=device)[:, None] / n / steps  # (n, dim / 4)
        return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)  # (n, dim / 2)

    rows = waves(height)[:, None].expand(-1, width, -1)
    columns = waves(width)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)


class Block(nn.Module):
    """Attention from a query to a memory, and a feed-forward layer, each added and normalised"""

    def __init__(self, args):
        super().__init__()
        self.attend = nn.MultiheadAttention(args.dim, args.heads, args.dropout, batch_first=True)
        self.ffn = nn.Sequential(
            nn.Linear(args.dim, args.ffn), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(args.ffn, args.dim)
        )
        self.drop, self.norm1, self.norm2 = nn.Dropout(args.dropout), nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)

    def forward(self, x, query, key, value, weights=False):
        """x is what is added to; -> (B, N, dim), and with `weights` the attention (B, N, M), the heads' mean"""
        new, attention = self.attend(query, key, value, need_weights=weights)  # without weights: fused
        x = self.norm1(x + self.drop(new))
        return self.norm2(x + self.drop(self.ffn(x))), attention


class LabelWise(nn.Module):
    """Pixels in 0..1 -> logits (B, C) from an embedding per class"""

    frozen_norms = ()  # BatchNorms that keep their statistics

    def __init__(self, args, num_classes):
        super().__init__()
        if args.dim % 4 or args.dim % args.heads:
            common.die(f"--dim {args.dim} must be divisible by 4 and by --heads {args.heads}")
        self.body, _, mean, std = common.make_body(args)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        with torch.no_grad():
            shape = self.eval().feature_map(torch.zeros(1, 3, args.image_size, args.image_size)).shape
        if len(shape) != 4 or shape[1] < shape[3]:  # tokens, or channels last
            common.die(f"--backbone {args.backbone} gives no map of channels x height x width, but {tuple(shape[1:])}")
        self.shrink = nn.Identity() if shape[1] == args.dim else nn.Conv2d(shape[1], args.dim, 1)
        self.encoder, self.decoder = Block(args), nn.ModuleList(Block(args) for _ in range(args.decoder_layers))
        self.norm = nn.Identity()
        if args.decoder_layers > 1:  # as in the release
            self.norm = nn.LayerNorm(args.dim)
            for weight in (w for w in (*self.encoder.parameters(), *self.decoder.parameters()) if w.ndim > 1):
                nn.init.xavier_uniform_(weight)
        self.queries = nn.Parameter(torch.randn(num_classes, args.dim))
        bound = 1 / math.sqrt(args.dim)
        self.weight = nn.Parameter(torch.empty(num_classes, args.dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_classes).uniform_(-bound, bound))
        self.project = nn.Sequential(nn.Linear(args.dim, args.dim), nn.ReLU(), nn.Linear(args.dim, args.project_dim))
        if args.weights != "none" or args.freeze_backbone:  # random first layers must learn
            self.frozen_norms = [module for module in self.body.modules() if isinstance(module, nn.BatchNorm2d)]
            for name, weight in self.body.named_parameters():
                weight.requires_grad_(not (args.freeze_backbone or name.startswith(args.frozen)))
            for norm in self.frozen_norms:
                norm.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for norm in self.frozen_norms:
            norm.eval()
        return self

    def feature_map(self, x):
        """What the backbone has before it pools: (B, D, H, W)"""
        x = (x - self.mean) / self.std
        if hasattr(self.body, "forward_features"):  # timm
            return self.body.forward_features(x)
        for layer in self.body.children():
            if isinstance(layer, nn.AdaptiveAvgPool2d):
                return x
            x = layer(x)

    def embeddings(self, x, weights=False):
        """f_j(x) for every class j (B, C, dim), and with `weights` where it looks (B, C, H, W)"""
        fmap = self.shrink(self.feature_map(x))
        where = sine_positions(*fmap.shape[2:], fmap.shape[1], x.device)
        memory = fmap.flatten(2).transpose(1, 2)  # (B, H * W, dim)
        memory, _ = self.encoder(memory, memory + where, memory + where, memory)
        queries = self.queries.expand(x.shape[0], -1, -1)  # len() would be a constant in an exported model
        f = torch.zeros_like(queries)  # all that is added to it comes from the image
        for layer in self.decoder:
            f, attention = layer(f, f + queries, memory + where, memory, weights)
        return self.norm(f), attention.unflatten(2, fmap.shape[2:]) if weights else None

    def forward(self, x, project=False):
        """-> logits (B, C), and with `project` the unit vectors that L_LAC compares (B, C, project_dim)"""
        f, _ = self.embeddings(x)
        with torch.autocast(x.device.type, enabled=False):  # bf16 logits would tie, and mAP ranks them
            logits = (f.float() * self.weight).sum(2) + self.bias
            return (logits, F.normalize(self.project(f.float()), dim=2)) if project else logits


@torch.no_grad()
def update_ema(ema, model, decay):
    """ema <- decay * ema + (1 - decay) * model: weights and statistics. torch's own waits for the device"""
    ours, new = ([t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()] for net in (ema, model))
    torch._foreach_lerp_(ours, new, 1 - decay)


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if args.loss != "an":
        args.plc = args.lac = False
    if args.linear:
        common.die("--linear keeps pooled features, but lac.py needs maps: use --freeze_backbone")
    if args.freeze_backbone and args.weights == "none" and not common.start_from(args):
        common.die("--freeze_backbone needs trained weights: a file or a run's best.pt as --weights")
    if args.end_to_end and (not args.lac or args.stage != "both"):
        common.die("--end_to_end is all losses in one stage: leave out --no_lac, --loss and --stage")
    if not (args.resume or args.eval_only):  # where a run begins: there are runs that had these settings
        if args.loss != "an" and (args.stage == "2" or args.form == "paper"):
            common.die(f"--loss {args.loss} is stage 1, a mean over all labels: leave out --stage 2 and --form paper")
        if args.stage == "2" and not args.init_from:
            common.die("--stage 2 continues a run of stage 1: --init_from RUN (without one: --end_to_end)")
        if args.stage == "2" and Path(args.init_from, "stage1.pt").exists():
            common.die(f"--stage 2: {args.init_from} has been through both stages, give a run of --stage 1")
        if args.denominator == "all" and args.form == "release":
            common.die("--denominator is for --form paper: the release's L_LAC always has all in its denominator")
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(LabelWise(args, len(data.classes)), data, find_unused_parameters=True)
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # new vs an.py: schedule, EMA, queue, stage
    steps = -(-len(data.train) // args.batch_size) * args.epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, max(6, steps), pct_start=0.2)  # 5 divide by 0
    fresh = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    ema = copy.deepcopy(common.unwrap(model)).requires_grad_(False)
    queue = Queue(args.queue, 2 if args.form == "release" else 1, args.project_dim).to(run.device)
    rows = -(-args.batch_size // common.world()) * len(data.classes)  # labels of a process in a batch
    stage = SimpleNamespace(number=2 if args.stage == "2" or args.end_to_end else 1)
    state = dict(scheduler=scheduler, ema=ema, queue=queue, stage=stage)

    for epoch in run.epochs(model=model, optimizer=optimizer, **state):  # all of these are in last.pt
        delta, with_lac = args.delta[stage.number - 1], stage.number == 2 and args.lac
        views = partial(two_views, seed=args.seed, epoch=epoch) if args.plc or with_lac else None
        for x, z, idx in run.batches(data.train, flip=True, augment=views):  # x (B, 2, 3, H, W) in 0..1, z (B, C)
            if views:
                x = x.transpose(0, 1).flatten(0, 1).contiguous(memory_format=torch.channels_last)  # (2B, 3, H, W)
            with run.autocast():
                output = model(x, project=with_lac)
            logits, embed = output if with_lac else (output, None)  # (2B, C), (2B, C, project_dim)
            weak, strong = logits.chunk(2) if views else (logits, None)
            p_weak = weak.detach().sigmoid()
            plc, lac = torch.zeros_like(weak.sum()), torch.zeros_like(weak.sum())
            if args.loss == "an":
                an = an_loss_sum(weak, z) / (len(data.classes) if args.form == "release" else 1)
            else:
                an = other_loss(weak, z, args.loss, args.positives, args.alpha)
            if args.plc:
                plc = args.lambda_plc * plc_loss(strong, p_weak, z, delta, args.form)
            if with_lac:
                chosen = (p_weak >= delta) | (z == 1)
                lac = args.lambda_lac * compare(*embed.chunk(2), chosen, queue, rows, args)
            loss = an + plc + lac
            run.backward(loss)
            run.step(optimizer)
            scheduler.step()
            update_ema(ema, common.unwrap(model), args.ema)
            run.log(loss=loss, loss_an=an, loss_plc=plc, loss_lac=lac)
            run.log_pseudo_labels((p_weak >= delta).char() - (p_weak <= 1 - delta).char(), z, data.train.true(idx))
        run.log(stage=float(stage.number), queue_fill=(queue.classes >= 0).sum())
        averaged = args.ema > 0 and data.val  # without validation nobody knows whether the EMA has caught up
        run.evaluate(model, data, **(dict(ema=ema) if averaged else {}))
        two_stages = args.stage == "both" and args.lac and not args.end_to_end
        if two_stages and stage.number == 1 and run.finished and run.extend(args.epochs, keep="stage1.pt"):
            stage.number = 2  # from stage 1's best, all else as at the start
            common.load_weights(common.unwrap(model), run.directory / "stage1.pt")
            optimizer.load_state_dict(fresh[0])
            scheduler.load_state_dict(fresh[1])
            ema.load_state_dict(common.unwrap(model).state_dict())
