"""LAC: label-aware global consistency (Xie et al. 2022, NeurIPS)

    python lac.py --dataset voc

Every class has an embedding of its own for every image. What the network is sure of on a plain view it must also say of
a distorted one, and, in a second stage, embeddings of the same class are drawn together.

NOTES: the release takes L_AN as a mean over B*C, divides L_PLC by the number of selected labels and includes observed
positives in it, uses no input normalisation, adds ColorJitter and greyscale to the strong view, has two decoder layers
(`--decoder_layers 2`), a SupCon loss (`--denominator all`) and stage-1 delta 0.5 for CUB. Anchors come from the weak
view, what they are compared with from the strong view and the queue, which keeps weak ones (Eq. 7 takes the other view
only of the anchor itself). Eq. 7 as printed can be negative. Both views of an image are flipped alike. A run's best
epoch is that of its last stage, stage 1's is kept as stage1.pt; what L_LAC adds to as many more epochs without it shows
`--stage 2 --no_lac --init_from RUN`, RUN being one of `--stage 1`. `--end_to_end` has stage 2's delta. Under torchrun
L_LAC compares with each process's own strong views and the queue of all, and "all" is a mean over each process's
anchors. Choosing anchors makes stage 2 wait for the device in every step. Backbones whose first layers have none of the
names in FROZEN train them. `--linear` is not for this method, which needs maps, not pooled features:
`--freeze_backbone`.
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import transforms

import common

# ---- 1. Settings

FROZEN = ("conv1.", "layer1.", "conv_stem.", "blocks.0.", "stem.", "stages.0.", "s1.", "0.")  # first layers, by name
ANCHORS_AT_ONCE = 1024  # bounds the memory of L_LAC


@dataclass
class Args(common.Args):
    epochs: int = 40  # of each stage
    batch_size: int = 32  # over all processes
    lr: float = 1e-4  # the highest of the one-cycle schedule
    patience: int = 7  # end a stage after more than so many epochs without a better validation mAP (-1: never)
    image_size: int = 448  # images are squashed to a square of this side
    backbone: str = "resnet50"  # a ResNet of torchvision, resnet_small, or any name of timm that gives a map
    weights: str = "imagenet"  # imagenet, none, or a .pth or .safetensors file
    weight_decay: float = 0.01  # of AdamW
    ema: float = 0.9997  # decay of the average of the weights, which is measured beside them
    freeze_backbone: bool = False  # train what comes after it alone
    dim: int = 2048  # width of the embeddings
    heads: int = 4  # of the attention
    ffn: int = 8192  # width of the feed-forward layers
    dropout: float = 0.1
    decoder_layers: int = 1  # of cross-attention
    project_dim: int = 128  # width of what L_LAC compares
    delta: tuple[float, float] = (0.6, 0.9)  # from this probability on a label is a pseudo-positive, per stage
    tau: float = 0.5  # temperature of L_LAC
    queue: int = 512  # past embeddings to compare with
    lambda_plc: float = 1.0  # weight of L_PLC
    lambda_lac: float = 1.0  # weight of L_LAC
    denominator: Literal["inter", "all"] = "inter"  # of L_LAC: over the other classes (Eq. 7), or over all (SupCon)
    stage: Literal["both", "1", "2"] = "both"  # 2 alone goes on from --init_from
    plc: bool = True  # --no_plc leaves out L_PLC
    lac: bool = True  # --no_lac leaves out L_LAC; --stage both is then stage 1 alone
    end_to_end: bool = False  # all losses from the start, in one stage
    show_attention: int = -1  # write attention.png: where the classes look in this training image (-1: don't)


PRESETS = {  # Xie et al., section 4.1, and the authors' release: the same for VOC, COCO, NUS and CUB
    # made here; sizes that a laptop trains, lr chosen on its validation set
    "scenes": dict(epochs=8, batch_size=8, lr=5e-4, patience=-1, image_size=64, backbone="resnet_small", weights="none")
    | dict(ema=0.99, dim=128, ffn=256, project_dim=64),
}

# ---- 2. Method


def an_loss(logits, z):
    """Eq. 2: sum over classes, mean over images, of -log p where z = 1, -log(1 - p) elsewhere"""
    return -torch.where(z == 1, F.logsigmoid(logits), F.logsigmoid(-logits)).sum() / len(logits)


def plc_loss(logits_strong, p_weak, z, delta):
    """Eq. 4: sum over the unobserved classes, mean over images, of -log p_strong where p_weak >= delta and
    -log(1 - p_strong) where p_weak <= 1 - delta. p_weak takes no gradient"""
    p_weak, hidden = p_weak.detach(), z != 1
    positive = torch.where((p_weak >= delta) & hidden, F.logsigmoid(logits_strong), 0)
    negative = torch.where((p_weak <= 1 - delta) & hidden, F.logsigmoid(-logits_strong), 0)
    return -(positive + negative).sum() / len(logits_strong)


def anchor_losses(embed_a, class_a, embed_b, class_b, tau, denominator):
    """The sum over some anchors of lac_loss"""
    similar = embed_a @ embed_b.T / tau  # (A, M)
    same = class_a[:, None] == class_b
    if denominator == "inter":
        alone = same.all(1)  # nothing of another class
        log_total = similar.masked_fill(same & ~alone[:, None], -torch.inf).logsumexp(1)
        per_anchor = torch.where(same, similar, 0).sum(1) - same.sum(1) * log_total
        return -per_anchor.masked_fill(alone, 0).sum()
    log_p = similar.log_softmax(1)
    return -(torch.where(same, log_p, 0).sum(1) / same.sum(1).clamp(min=1)).sum()


def lac_loss(embed_a, class_a, embed_b, class_b, tau, denominator="inter"):
    """Eq. 7, over the number of anchors a instead of B: the sum over the b of an anchor's class of
    -log(exp(a b / tau) / sum over the b of other classes of exp(a b / tau)); 0 for an anchor without such. "all": the
    mean over the b of its class, and the sum over all b"""
    if not len(embed_a) or not len(embed_b):
        return 0 * (embed_a.sum() + embed_b.sum())
    precise = torch.promote_types(torch.promote_types(embed_a.dtype, embed_b.dtype), torch.float32)
    embed_a, embed_b = embed_a.to(precise), embed_b.to(precise)
    portions = zip(embed_a.split(ANCHORS_AT_ONCE), class_a.split(ANCHORS_AT_ONCE))
    rest, plain = (embed_b, class_b, tau, denominator), {"use_reentrant": False, "preserve_rng_state": False}
    with torch.autocast(embed_a.device.type, enabled=False):
        return sum(checkpoint(anchor_losses, *some, *rest, **plain) for some in portions) / len(embed_a)


class Queue(nn.Module):
    """The last embeddings and their classes"""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("embed", torch.zeros(size, dim))
        self.register_buffer("classes", torch.full((size,), -1))  # -1: still empty
        self.register_buffer("end", torch.zeros((), dtype=torch.int64))

    def push(self, embed, classes):
        """Over the oldest ones; of more than the queue holds only the last are kept"""
        size = len(self.embed)
        embed, classes = embed[max(0, len(embed) - size) :], classes[max(0, len(embed) - size) :]
        if len(embed):
            places = (self.end + torch.arange(len(embed), device=self.end.device)) % size
            self.embed[places], self.classes[places] = embed, classes
            self.end.copy_((self.end + len(embed)) % size)

    def content(self):
        full = (self.classes >= 0).nonzero()[:, 0]
        return self.embed[full], self.classes[full]


def from_all(embed, classes):
    """Every process's embeddings and their classes, in the order of the ranks"""
    if common.world() == 1:
        return embed, classes
    counts = torch.zeros(common.world(), dtype=torch.int64, device=embed.device)
    counts[common.rank()] = len(embed)
    dist.all_reduce(counts)
    counts = counts.tolist()

    def gather(mine):
        everyone = [mine.new_empty(max(counts), *mine.shape[1:]) for _ in counts]
        dist.all_gather(everyone, torch.cat([mine, everyone[0][len(mine) :]]))  # padded to one length
        return torch.cat([part[:n] for part, n in zip(everyone, counts)])

    return gather(embed), gather(classes)


def compare(embed_weak, embed_strong, chosen, queue, tau, denominator):
    """L_LAC of a batch: the chosen labels (B, C), as seen in the weak view, against the strong view and the queue.
    Afterwards the queue has them too"""
    where = chosen.nonzero(as_tuple=True)
    anchors, partners, classes = embed_weak[where], embed_strong[where], where[1]
    past, past_classes = queue.content()
    loss = lac_loss(anchors, classes, torch.cat([partners, past]), torch.cat([classes, past_classes]), tau, denominator)
    queue.push(*from_all(anchors.detach(), classes))
    return loss * len(anchors) / chosen.numel() if denominator == "inter" else loss  # Eq. 7 divides by B = b * q


def strong_view(pixels):
    """RandAugment and Cutout, half a side, of one image: uint8 (H, H, 3) -> the same"""
    distorted = transforms.RandAugment()(Image.fromarray(pixels.numpy()))
    cutout = transforms.RandomErasing(p=1, scale=(0.25, 0.25), ratio=(1, 1), value=(124, 116, 104))  # ImageNet's mean
    return cutout(torch.from_numpy(np.array(distorted)).permute(2, 0, 1)).permute(1, 2, 0)


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

    still = ()  # BatchNorms that keep their statistics

    def __init__(self, args, num_classes):
        super().__init__()
        self.body, _, mean, std = common.make_body(args)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        with torch.no_grad():
            shape = self.eval().feature_map(torch.zeros(1, 3, args.image_size, args.image_size)).shape
        if len(shape) != 4 or shape[1] < shape[3]:  # tokens, or channels last
            common.die(f"--backbone {args.backbone} gives no map of channels x height x width, but {tuple(shape[1:])}")
        self.shrink = nn.Identity() if shape[1] == args.dim else nn.Conv2d(shape[1], args.dim, 1)
        self.encoder, self.decoder = Block(args), nn.ModuleList(Block(args) for _ in range(args.decoder_layers))
        self.queries = nn.Parameter(torch.randn(num_classes, args.dim))
        bound = 1 / math.sqrt(args.dim)
        self.weight = nn.Parameter(torch.empty(num_classes, args.dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_classes).uniform_(-bound, bound))
        self.project = nn.Sequential(nn.Linear(args.dim, args.dim), nn.ReLU(), nn.Linear(args.dim, args.project_dim))
        if args.weights != "none" or args.freeze_backbone:  # random first layers must learn
            self.still = [module for module in self.body.modules() if isinstance(module, nn.BatchNorm2d)]
            for name, weight in self.body.named_parameters():
                weight.requires_grad_(not (args.freeze_backbone or name.startswith(FROZEN)))
            for norm in self.still:
                norm.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for norm in self.still:
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
        f = self.queries.expand(x.shape[0], -1, -1)  # len() would be a constant in an exported model
        for layer in self.decoder:
            f, attention = layer(f, f, memory + where, memory, weights)
        return f, attention.unflatten(2, fmap.shape[2:]) if weights else None

    def forward(self, x, project=False):
        """-> logits (B, C), and with `project` the unit vectors that L_LAC compares (B, C, project_dim)"""
        f, _ = self.embeddings(x)
        with torch.autocast(x.device.type, enabled=False):  # bf16 logits would tie, and mAP ranks them
            logits = (f.float() * self.weight).sum(2) + self.bias
            return (logits, F.normalize(self.project(f.float()), dim=2)) if project else logits


def make_model(args, num_classes):
    if args.dim % 4 or args.dim % args.heads:
        common.die(f"--dim {args.dim} must be divisible by 4 and by --heads {args.heads}")
    return LabelWise(args, num_classes)


@torch.no_grad()
def follow(average, model, decay):
    """average <- decay * average + (1 - decay) * model: weights and statistics. torch's own waits for the device"""
    ours, new = ([t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()] for net in (average, model))
    torch._foreach_lerp_(ours, new, 1 - decay)


def count(p, z, y, delta):
    """Of the unobserved labels: how many there are, are above delta, rightly so, are below 1 - delta, rightly so"""
    above, below = (p >= delta) & (z != 1), (p <= 1 - delta) & (z != 1)
    right = (y == 1, y == 0) if y is not None else (torch.zeros_like(above),) * 2
    return torch.stack([t.sum() for t in (z != 1, above, above & right[0], below, below & right[1])])


def draw_attention(path, model, data, row, device):
    """The paper's Fig. 6: an image, and where its observed class and the five most probable others look"""
    plt = common.pyplot()
    split, model = data.train, model.eval()
    pixels = split.images[split.rows[[row]]]
    if isinstance(pixels, str):
        common.die(pixels)
    x = pixels.to(device).movedim(-1, -3).float() / 255
    with torch.no_grad():
        p, (_, maps) = model(x)[0].sigmoid(), model.embeddings(x, weights=True)
    maps = F.interpolate(maps.float(), x.shape[2:], mode="bilinear")[0].cpu()
    observed = split.z[row].nonzero().flatten().tolist()
    others = [c for c in p.argsort(descending=True).tolist() if c not in observed][:5]
    panels = [(c, "observed") for c in observed] + [(c, "") for c in others]
    figure, axes = plt.subplots(1, 1 + len(panels), figsize=(2.2 * (1 + len(panels)), 2.9), layout="constrained")
    for axis in axes:
        axis.imshow(pixels[0].numpy())
        axis.axis("off")
    axes[0].set_title(f"training image {row}", fontsize=9)
    for axis, (c, known) in zip(axes[1:], panels):
        there = known or ("" if split.y is None else "there" if split.y[row, c] else "not there")
        axis.imshow((maps[c] / maps[c].max()).numpy(), cmap="inferno", alpha=0.65, vmin=0, vmax=1)
        axis.set_title(f"{data.classes[c]} {p[c]:.2f}\n{there}", fontsize=9)
    with common.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if args.linear:
        common.die("--linear keeps pooled features, but lac.py needs maps: use --freeze_backbone")
    if not (0.5 <= min(args.delta) <= max(args.delta) <= 1 and 0 <= args.ema < 1 and 0 <= args.dropout < 1):
        common.die("--delta is between 0.5 and 1; --ema and --dropout are at least 0 and below 1")
    if not (args.tau > 0 and args.queue >= 0 and min(args.lambda_plc, args.lambda_lac, args.weight_decay) >= 0):
        common.die("--tau must be above 0; --queue, --lambda_plc, --lambda_lac and --weight_decay at least 0")
    if min(args.heads, args.ffn, args.decoder_layers, args.project_dim, args.dim) < 1:
        common.die("--dim, --heads, --ffn, --decoder_layers and --project_dim must be at least 1")
    if args.freeze_backbone and args.weights == "none" and not common.start_from(args):
        common.die("--freeze_backbone: random weights must learn, --weights says where better ones are")
    if args.stage == "2" and not (args.init_from or args.resume or args.eval_only):
        common.die("--stage 2 goes on from a run of stage 1: say --init_from RUN (from nothing: --end_to_end)")
    if args.end_to_end and (not args.lac or args.stage != "both"):
        common.die("--end_to_end is all losses in one stage: leave out --no_lac and --stage")
    two = args.stage == "both" and args.lac and not args.end_to_end
    run = common.Run(args, __file__, stages=2 if two else 1)
    data = common.load(args, run.device)
    if not -1 <= args.show_attention < len(data.train):
        common.die(f"--show_attention {args.show_attention}: there are training images 0 to {len(data.train) - 1}")
    model = run.prepare(make_model(args, len(data.classes)), data, unused=True)  # new vs an.py
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=args.weight_decay)
    # new vs an.py: schedule, average of the weights, queue
    steps = -(-len(data.train) // args.batch_size) * args.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, max(6, steps), pct_start=0.2)  # 5 divide by 0
    fresh = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    average = copy.deepcopy(common.unwrap(model)).requires_grad_(False)
    queue = Queue(args.queue, args.project_dim).to(run.device)
    state, main_process = dict(schedule=schedule, average=average, queue=queue), common.rank() == 0

    for epoch in run.epochs(model=model, optimizer=optimizer, **state):
        second = run.stage == 2 or args.stage == "2" or args.end_to_end
        delta, with_lac = args.delta[int(second)], second and args.lac
        if run.stage == 2 and epoch == run.stage_began:  # new vs an.py: from stage 1's best, all else as at the start
            common.load_weights(common.unwrap(model), run.directory / "stage1.pt")
            optimizer.load_state_dict(fresh[0])
            schedule.load_state_dict(fresh[1])
            average.load_state_dict(common.unwrap(model).state_dict())
        counts = torch.zeros(5, device=run.device)
        for x, z, idx in run.batches(data.train, view=strong_view):
            x = torch.cat([x[:, 0], x[:, 1]]).contiguous(memory_format=torch.channels_last)  # (2B, 3, H, W)
            with run.autocast():
                output = model(x, with_lac)
            logits, embed = output if with_lac else (output, None)
            weak, strong = logits.chunk(2)  # new vs an.py
            p_weak = weak.detach().sigmoid()
            an, plc, lac = an_loss(weak, z), torch.zeros_like(weak.sum()), torch.zeros_like(weak.sum())
            if args.plc:
                plc = plc_loss(strong, p_weak, z, delta)
            if with_lac:
                chosen = (p_weak >= delta) | (z == 1)
                lac = compare(*embed.chunk(2), chosen, queue, args.tau, args.denominator)
            loss = an + args.lambda_plc * plc + args.lambda_lac * lac
            run.step(loss, optimizer)
            schedule.step()
            follow(average, common.unwrap(model), args.ema)
            counts += count(p_weak, z, data.train.true(idx), delta)
            run.log(loss=loss, loss_an=an, loss_plc=plc, loss_lac=lac)
        labels, above, above_right, below, below_right = counts
        run.log(stage=float(second) + 1, share_above=100 * above / labels, share_below=100 * below / labels)
        if data.train.y is not None:
            run.log(precision_above=100 * above_right / above, precision_below=100 * below_right / below)
        if with_lac:
            run.log(queue_fill=(queue.classes >= 0).sum())
        run.evaluate(model, data, ema=average)

    if args.show_attention >= 0 and main_process:
        common.load_weights(common.unwrap(model), run.directory / "best.pt")
        draw_attention(run.directory / "attention.png", common.unwrap(model), data, args.show_attention, run.device)
