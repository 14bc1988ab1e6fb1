"""PU-MLC: positive-unlabelled multi-label classification (Yuan et al. 2023, arXiv:2306.16016)

    python pu_mlc.py --dataset voc
    python pu_mlc.py --dataset voc2007 --known_ratio 0.1

No label is ever treated as negative: per class, the mean probability of all images is pushed down and that of the known
positives up, and predictions on mixed images must be the mix of the predictions.

NOTES: Eq. 9 writes the factor with the unscaled s; the release has s / tau, and so has this script. The mixup target
takes a gradient (the release's choice); BatchNorm keeps no statistics of mixed images. The release adds an SSGRL head
with word vectors and a label graph, trains only layer4, the global branches and the head, and picks epoch, weights and
threshold on the test set: the paper's numbers can't be expected from the plain backbone. They are for a share of the
positives (`--known_ratio`), for which coco, coco_all and voc2007 have presets without a validation split: the EMA of
the last epoch counts. With one positive per image, of which the paper says nothing, alpha is its VOC's and gamma its
COCO's. Under torchrun tau, u and the pairs are those of each process's share. A last batch of fewer than 4 images per
process is left out. docs/pu_mlc.md has the rest.
"""

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import common

# ---- 1. Settings

BETA = 0.3  # both parameters of mixup's Beta distribution, as in the authors' release


@dataclass
class Args(common.Args):
    epochs: common.Count = 10  # number of epochs
    batch_size: common.Count = 8  # images per step, over all processes
    lr: common.Positive = 1e-5  # learning rate
    patience: common.NaturalOrMinus1 = -1  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    alpha: common.Positive = 2.0  # temperature of a class, as a multiple of the spread of its logits (1 at most)
    gamma: common.NonNegative = 0.55  # exponent of the unlabelled term's weight, its mean probability
    mixup: common.NonNegative = 1.0  # weight of the mixup consistency
    drop_empty: bool = False  # no unlabelled term for classes without a positive in the batch
    lgconv: bool = False  # LgConv: a global branch beside every 3x3 convolution of the backbone
    freeze_bn: bool = False  # BatchNorms in eval mode: frozen statistics
    crops: bool = False  # random crops of the training images, resized to image_size
    weight_decay: common.NonNegative = 0.0  # weight decay of Adam
    one_cycle: common.Natural = 0  # length of the one-cycle schedule in epochs (0: constant learning rate)
    ema: common.ShareBelow1 = 0.0  # EMA decay (0: off)


PARTIAL = dict(backbone="resnet101", weight_decay=1e-4, one_cycle=80, lgconv=True, freeze_bn=True, crops=True)
PARTIAL |= dict(val_fraction=0.0)  # the paper's own setting, with --known_ratio
LINEAR = dict(epochs=20, lgconv=False, crops=False, one_cycle=0, ema=0.0)  # frozen features; chosen here
PRESETS = {  # one positive per image: batch and lr of the other methods; partial: the authors' release, README and code
    "coco": dict(batch_size=16),
    "nus": dict(batch_size=16),
    "cub": dict(lr=1e-4),
    "coco partial": dict(PARTIAL, epochs=40, batch_size=70, lr=1e-4, alpha=1.0, ema=0.9997),
    "voc2007 partial": dict(PARTIAL, epochs=55, batch_size=90, lr=4e-5, gamma=0.85, ema=0.991),
    "--linear": dict(LINEAR, lr=1e-4),
    "--linear partial": dict(LINEAR, batch_size=64, lr=5e-4),
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none"),
}

# ---- 2. Method


def pu_loss(logits, z, alpha, gamma, drop_empty=False, min_tau=1e-3):
    """Eq. 11, summed over the classes: u^gamma log u - the positives' mean of log sigmoid(s / tau), where u is the mean
    of sigmoid(s / tau) over all images and tau = min(alpha std(s), 1), Eq. 10; neither tau nor u^gamma takes a
    gradient. -> loss, its parts"""
    logits = common.full_precision(logits)
    tau = (alpha * logits.detach().std(0, correction=0)).clamp(min_tau, 1)  # (C,); a batch of one has no spread
    log_p, empty = F.logsigmoid(logits / tau), (z == 1).sum(0) == 0
    log_u = log_p.logsumexp(0) - math.log(len(logits))
    unlabelled = (gamma * log_u.detach()).exp() * log_u
    unlabelled = unlabelled.masked_fill(empty, 0) if drop_empty else unlabelled
    positive = -torch.where(z == 1, log_p, 0).sum(0) / (z == 1).sum(0).clamp(min=1)
    parts = dict(loss_unlabelled=unlabelled.sum(), loss_positive=positive.sum(), classes_without_positive=empty.sum())
    parts |= dict(tau_min=tau.min(), tau_mean=tau.mean(), tau_max=tau.max(), u_mean=log_u.detach().exp().mean())
    return (unlabelled + positive).sum(), parts


def halves(batch):
    """The first and the second half of a batch; the middle one of an odd number is in neither"""
    size = len(batch) // 2
    return batch[:size], batch[len(batch) - size :]


def mix(x, lam, perm):
    """The batch's first half, permuted, and its second, mixed"""
    first, second = halves(x)
    return lam * first[perm] + (1 - lam) * second


def mixup_consistency(logits, z, logits_mix, lam, perm):
    """Eq. 8: sum over classes, mean over pairs, of (log(lam t1 + (1 - lam) t2) - log sigmoid(logits_mix))^2, with t = 1
    for observed positives, else sigmoid(logits), of the batch's first half, permuted, and of its second"""
    logits, logits_mix = common.full_precision(logits), common.full_precision(logits_mix)
    if len(logits) < 2:
        return 0 * logits.sum()
    log_t1, log_t2 = halves(torch.where(z == 1, 0, F.logsigmoid(logits)))
    log_lam, log_rest = ((share * logits.new_ones(())).log() for share in (lam, 1 - lam))
    log_target = torch.logaddexp(log_lam + log_t1[perm], log_rest + log_t2)
    return (log_target - F.logsigmoid(logits_mix)).square().mean(0).sum()


class LgConv(nn.Module):
    """Section III-D: a convolution plus a global branch, whose last BatchNorm makes it start at almost nothing"""

    def __init__(self, conv, heads=8):
        super().__init__()
        channels = conv.in_channels
        self.conv = conv
        self.squeeze = nn.Conv2d(channels, channels // 4, 1)
        self.attend = nn.Conv2d(channels // 4 * 2, heads, 1)
        self.broadcast = nn.Conv2d(channels // 4 * 2, heads, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.project = nn.Conv2d(channels, conv.out_channels, 1, conv.stride, bias=False)
        self.norm = nn.BatchNorm2d(conv.out_channels)
        nn.init.constant_(self.norm.weight, 1e-4)

    def forward(self, x):
        local = self.squeeze(x).relu()
        h = torch.cat([local, local.mean((2, 3), keepdim=True).expand_as(local)], 1)
        a = self.attend(h).flatten(2).softmax(2)  # (B, heads, H * W)
        b = self.broadcast(h).sigmoid()  # (B, heads, H, W)
        v = self.value(x).flatten(2).unflatten(1, (a.shape[1], -1))  # (B, heads, C / heads, H * W)
        g = torch.einsum("bhn,bhcn->bhc", a, v)
        g = (g[..., None, None] * b[:, :, None]).flatten(1, 2)  # (B, C, H, W)
        return self.conv(x) + self.norm(self.project(x + g))


def add_lgconv(module, heads=8):
    """Wraps every 3x3 convolution whose input channels the heads divide, in place. -> how many"""
    count = 0
    for name, child in module.named_children():
        same_size = isinstance(child, nn.Conv2d) and child.kernel_size == (3, 3) and child.padding == child.dilation
        if same_size and child.in_channels % heads == 0:
            setattr(module, name, LgConv(child, heads))
            count += 1
        else:
            count += add_lgconv(child, heads)
    return count


@contextmanager
def without_statistics(model):
    """Mixed images are normalised by their own statistics, of which BatchNorm keeps none for evaluation"""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    yield
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum


def crop(pixels, row, size, seed, epoch):
    """A square of 8, 7, 6, 5 or 4 eighths of the side, at a random place, resized. Drawn from (seed, epoch, row):
    uint8 (H, H, 3) -> (size, size, 3)"""
    generator = np.random.default_rng([seed, epoch, int(row)])
    side = len(pixels) * generator.integers(4, 9) // 8
    left, top = generator.integers(len(pixels) - side + 1, size=2)
    box = (left, top, left + side, top + side)
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box))


# same as in lac.py: update_ema
@torch.no_grad()
def update_ema(ema, model, decay):
    """ema <- decay * ema + (1 - decay) * model: weights and statistics. torch's own waits for the device"""
    ours, new = ([t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()] for net in (ema, model))
    torch._foreach_lerp_(ours, new, 1 - decay)


class Classifier(common.Classifier):
    """With --lgconv in the backbone, and --freeze_bn"""

    def __init__(self, args, num_classes):
        super().__init__(args, num_classes)
        if args.lgconv and not add_lgconv(self.body):
            common.die(f"--lgconv: {args.backbone} has no 3x3 convolution that it could wrap")
        self.frozen_norms = [m for m in self.modules() if isinstance(m, _BatchNorm)] if args.freeze_bn else []

    def train(self, mode=True):
        super().train(mode)
        for norm in self.frozen_norms:
            norm.eval()
        return self


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if args.one_cycle and args.one_cycle < args.epochs:
        common.die(f"--one_cycle {args.one_cycle} is shorter than the {args.epochs} epochs to train: raise it, or 0")
    if args.linear and (args.lgconv or args.crops):
        common.die(
            "--lgconv and --crops are of no use with --linear, whose backbone sees every image once: leave out one"
        )
    if args.freeze_bn and args.weights == "none" and not common.start_from(args):
        common.die("--freeze_bn needs trained weights: add --no_freeze_bn")
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(Classifier(args, len(data.classes)), data)
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # new vs an.py: schedule, EMA and crops, where they are on
    batches, state = -(-len(data.train) // args.batch_size), {}
    if args.one_cycle:
        steps = max(6, batches * args.one_cycle)  # 5 divide by 0
        state["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps, pct_start=0.2)
    ema = dict(ema=copy.deepcopy(common.unwrap(model)).requires_grad_(False)) if args.ema else {}
    old = 100 * args.ema ** (batches * args.epochs)
    if old > 5 and not data.val and common.rank() == 0:
        print(f"warning: the EMA, which is kept, will still be {old:.0f} % initial weights: lower --ema", flush=True)
    views, images = None, data.train.images
    if args.crops and not args.eval_only:  # of images of 512 pixels, for 448
        larger = images.from_files(round(args.image_size * 8 / 7), images.resample)
        if larger.cached:
            common.die("--crops needs the image files, of which only the cache is there: add --no_crops")
        data.train = replace(data.train, images=larger, pixels=None)
    beta, share = torch.distributions.Beta(BETA, BETA), args.batch_size // common.world()
    min_images = min(4, share)  # a last image alone would have no spread, and an enormous gradient
    mixing = args.mixup and share > 1

    for epoch in run.epochs(model=model, optimizer=optimizer, **state, **ema):  # all of these are in last.pt
        if args.crops:
            views = partial(crop, size=args.image_size, seed=args.seed, epoch=epoch)
        for x, z, idx in run.batches(data.train, flip=True, augment=views, min_images=min_images):  # x (B, 3, H, W)
            with run.autocast():
                logits = model(x)  # (B, C)
                if mixing:  # new vs an.py
                    perm, lam = torch.randperm(len(x) // 2, device=run.device), beta.sample().item()
                    with without_statistics(model):
                        logits_mix = model(mix(x, lam, perm))
            loss, parts = pu_loss(logits, z, args.alpha, args.gamma, args.drop_empty)
            if mixing:
                consistency = args.mixup * mixup_consistency(logits, z, logits_mix, lam, perm)
                loss, parts["loss_mixup"] = loss + consistency, consistency
            run.backward(loss)
            run.step(optimizer)
            if args.one_cycle:
                state["scheduler"].step()
            if args.ema:
                update_ema(ema["ema"], common.unwrap(model), args.ema)
            run.log(loss=loss, **parts)
        run.evaluate(model, data, **ema)
