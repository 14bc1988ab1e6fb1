"""EM + APL: entropy maximisation and asymmetric pseudo-labelling (Zhou et al. 2022, arXiv:2203.16219)

    python em_apl.py --dataset voc

Labels that were not observed are pushed towards uncertainty instead of 0; after a warm-up, the lowest predictions of
each class become soft negatives, a few more every epoch.

NOTES: `--patience 0` is the paper's early stopping ("when mAP on the validation set descends"). It may end a run before
pseudo-labels are ever used: look at the curve, try `--patience -1`. The release selects pseudo-labels on flipped
images, here they are plain, and adds 1e-5 inside every logarithm. docs/em_apl.md has the rest.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import common

# ---- 1. Settings


@dataclass
class Args(common.Args):
    epochs: common.Count = 10  # number of epochs, T
    batch_size: common.Count = 8  # images per step, over all processes
    lr: common.Positive = 1e-5  # learning rate
    patience: common.NaturalOrMinus1 = 0  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    alpha: common.NonNegative = 0.2  # weight of the entropy
    beta: common.NonNegative = 0.02  # weight of the pseudo-labels
    apl: bool = True  # asymmetric pseudo-labelling (--no_apl: EM loss alone)
    warmup: common.Count = 5  # warm-up: epoch after which pseudo-negatives are first selected, T_w
    theta: common.Share = 0.9  # share of a class's unobserved labels that are pseudo-negatives at the end
    hard: bool = False  # ablation: pseudo-negatives with target 0 instead of p
    pos_theta: common.Share = 0.0  # ablation: share of pseudo-positives, the highest p of a class (paper: 0.1)


PRESETS = {  # Zhou et al., Table 6; the defaults are VOC's
    "coco": dict(batch_size=16, alpha=0.1, beta=0.9),
    "nus": dict(batch_size=16, alpha=0.1, warmup=4, beta=0.2),
    "cub": dict(lr=1e-4, alpha=0.01, beta=0.4, warmup=3),
    # frozen features; chosen on validation
    "--linear": dict(epochs=20, lr=1e-4, patience=-1),
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none")
    | dict(patience=-1, beta=0.1, warmup=12),
}

# ---- 2. Method


def entropy(logits):
    """H(p) = -p log p - (1 - p) log(1 - p)"""
    p = logits.sigmoid()
    return -p * F.logsigmoid(logits) - (1 - p) * F.logsigmoid(-logits)


def em_apl_loss(logits, z, s, alpha, beta):
    """Eq. 8: mean over (B, C) of -log p where z = 1, -alpha H(p) where z = 0 and, where z = -1 (pseudo-negative),
    beta * [-s log p - (1 - s) log(1 - p)]. Without z = -1 it is the EM loss, Eq. 3. -> loss, its parts"""
    logits = common.full_precision(logits)
    log_p, log_not_p, s = F.logsigmoid(logits), F.logsigmoid(-logits), torch.where(z == -1, s, 0)
    positive = torch.where(z == 1, -log_p, 0).mean()
    unknown = torch.where(z == 0, -alpha * entropy(logits), 0).mean()
    pseudo = torch.where(z == -1, -beta * (s * log_p + (1 - s) * log_not_p), 0).mean()
    parts = dict(loss_positive=positive, loss_unknown=unknown, loss_pseudo_negative=pseudo)
    return positive + unknown + pseudo, parts


def select_pseudo_negatives(p, z, quota):
    """Eq. 6: (N, C) bool, per class c the quota[c] lowest p among z == 0 (all that remain if fewer), the first of
    equals. Class by class: the order of all (N, C) would take four times the memory of p"""
    chosen = torch.zeros_like(p, dtype=torch.bool)
    for c, n in enumerate(torch.as_tensor(quota).tolist()):
        (rows,) = (z[:, c] == 0).nonzero(as_tuple=True)
        if n := min(n, len(rows)):
            own = p[rows, c]
            highest = own.kthvalue(n).values
            chosen[torch.cat([rows[own < highest], rows[own == highest]])[:n], c] = True
    return chosen


def logit_magnitudes(logits, z, y):
    """The paper's Fig. 7: mean |logit| of the true positives and negatives that were not observed"""
    size, hidden = logits.detach().abs(), z == 0
    mean = lambda where: (size * where).sum() / where.sum()
    return dict(logit_positives=mean(hidden & (y == 1)), logit_negatives=mean(hidden & (y == 0)))


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr, fused=True)

    # new vs an.py: pseudo-labels (-1 negative, 1 the positives of --pos_theta, 0 none) and their soft labels s
    z_all, rounds = data.train.z.char(), args.epochs - args.warmup
    labels = SimpleNamespace(pseudo=torch.zeros_like(z_all), s=torch.zeros(z_all.shape, device=run.device))
    if args.apl and rounds <= 0 and common.rank() == 0:
        print(f"warning: no pseudo-labels, because the warm-up ({args.warmup} epochs) covers all {args.epochs} epochs")
    unobserved = [(column == 0).sum().item() for column in z_all.T]
    quota, pos_quota = ([int(share * n / max(rounds, 1)) for n in unobserved] for share in (args.theta, args.pos_theta))

    for epoch in run.epochs(model=model, optimizer=optimizer, labels=labels):  # all of these are in last.pt
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            z_apl = z.char().masked_fill(labels.pseudo[idx] != 0, -1)  # new vs an.py
            loss, parts = em_apl_loss(logits, z_apl, labels.s[idx], args.alpha, args.beta)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
            if data.train.y is not None:
                run.log(**logit_magnitudes(logits, z, data.train.y[idx]))
        if args.apl and args.warmup <= epoch < args.epochs:  # new vs an.py: Algorithm 1, line 4
            p = run.predict(model, data.train).sigmoid_()
            lowest = select_pseudo_negatives(p, z_all.masked_fill(labels.pseudo != 0, -1), quota)
            labels.pseudo = labels.pseudo.masked_fill(lowest, -1)
            highest = select_pseudo_negatives(-p, z_all.masked_fill(labels.pseudo != 0, -1), pos_quota)
            labels.pseudo = labels.pseudo.masked_fill(highest, 1)
            soft = highest if args.hard else highest | lowest
            labels.s = torch.where(soft, p, labels.s)
        run.log_pseudo_labels(labels.pseudo, data.train.z, data.train.y)
        run.evaluate(model, data)
