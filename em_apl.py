"""EM + APL: entropy maximisation and asymmetric pseudo-labelling (Zhou et al. 2022, arXiv:2203.16219)

    python em_apl.py --dataset voc

Labels that were not observed are pushed towards uncertainty instead of 0; after a warm-up, the lowest predictions of
each class become soft negatives, a few more every epoch.

NOTES: `--patience 0` is the paper's early stopping ("when mAP on the validation set descends"). It may end a run before
pseudo-labels are ever used: look at the curve, try `--patience -1`. In the log, `pseudo_by_chance` is what a random
choice gives; `pseudo_at_best` falls below 100 where theta asks for more negatives than a class has.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import common

# ---- 1. Settings


@dataclass
class Args(common.Args):
    epochs: int = 10  # T
    batch_size: int = 8  # over all processes
    lr: float = 1e-5
    patience: int = 0  # stop after more than so many epochs without a better validation mAP (-1: never)
    image_size: int = 448  # images are squashed to a square of this side
    backbone: str = "resnet50"  # a ResNet of torchvision, resnet_small, or any name of timm
    weights: str = "imagenet"  # imagenet, none, or a .pth or .safetensors file
    alpha: float = 0.2  # weight of the entropy
    beta: float = 0.02  # weight of the pseudo-labels
    apl: bool = True  # --no_apl: the EM loss alone
    warmup: int = 5  # T_w: the first pseudo-negatives are selected at the end of this epoch
    theta: float = 0.9  # share of a class's unobserved labels to be pseudo-negatives by the end
    hard: bool = False  # ablation: pseudo-negatives with target 0 instead of p
    pos_theta: float = 0.0  # ablation: this share of the highest p too, as soft labels (paper: 0.1)


PRESETS = {  # Zhou et al., Table 6; the defaults are VOC's
    "coco": dict(batch_size=16, alpha=0.1, beta=0.9),
    "nus": dict(batch_size=16, alpha=0.1, warmup=4, beta=0.2),
    "cub": dict(lr=1e-4, alpha=0.01, beta=0.4, warmup=3),
    # made here; chosen on its validation set
    "scenes": dict(
        epochs=15, lr=1e-3, patience=-1, image_size=64, backbone="resnet_small", weights="none", beta=0.1, warmup=8
    ),
}

# ---- 2. Method


def entropy(logits):
    """H(p) = -p log p - (1 - p) log(1 - p)"""
    p = logits.sigmoid()
    return -p * F.logsigmoid(logits) - (1 - p) * F.logsigmoid(-logits)


def em_apl_terms(logits, z, s, alpha, beta):
    """The three parts of Eq. 8, each a mean over (B, C)"""
    log_p, log_not_p, s = F.logsigmoid(logits), F.logsigmoid(-logits), torch.where(z == -1, s, 0)
    positive = torch.where(z == 1, -log_p, 0)
    unknown = torch.where(z == 0, -alpha * entropy(logits), 0)
    pseudo = torch.where(z == -1, -beta * (s * log_p + (1 - s) * log_not_p), 0)
    return positive.mean(), unknown.mean(), pseudo.mean()


def em_apl_loss(logits, z, s, alpha, beta):
    """Eq. 8: mean over (B, C) of -log p where z = 1, -alpha H(p) where z = 0 and, where z = -1 (pseudo-negative),
    beta * [-s log p - (1 - s) log(1 - p)]. Without z = -1 it is the EM loss, Eq. 3."""
    return sum(em_apl_terms(logits, z, s, alpha, beta))


def select_pseudo_negatives(p, z, quota):
    """Eq. 6: (N, C) bool, per class c the quota[c] lowest p among z == 0 (all that remain if fewer)"""
    quota = torch.as_tensor(quota, device=p.device)
    order = torch.where(z == 0, p, torch.inf).argsort(dim=0, stable=True)
    place = torch.arange(len(p), device=p.device)[:, None].expand_as(order)
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(0, order, place < quota)
    return chosen & (z == 0)


def quality(chosen, right, free):
    """Pseudo-labels against the truth, in percent: right; right if drawn at random from the free labels of the same
    classes; and right at best, since a class may have fewer than were chosen"""
    count, available, total = chosen.sum(0), (right & free).sum(0), chosen.sum().clamp(min=1) / 100
    by_chance = (count * available / free.sum(0).clamp(min=1)).sum()
    return (chosen & right).sum() / total, by_chance / total, torch.minimum(count, available).sum() / total


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if not (0 <= args.theta <= 1 and 0 <= args.pos_theta <= 1 and args.warmup >= 1):
        common.die("--theta and --pos_theta are shares between 0 and 1, and --warmup is at least 1")
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr)

    # new vs an.py: z with -1 for pseudo-negatives (-2 for the pseudo-positives of --pos_theta), and soft labels s
    z_all = data.train.z.to(torch.int8)
    s_all = torch.zeros(z_all.shape, device=run.device)
    steps = args.epochs - args.warmup
    if args.apl and steps <= 0 and common.rank() == 0:
        print(f"warning: no pseudo-labels, for {args.epochs} epochs end within the warm-up of {args.warmup}")
    unobserved = (data.train.z == 0).sum(0).tolist()
    quota, pos_quota = ([int(share * n / max(steps, 1)) for n in unobserved] for share in (args.theta, args.pos_theta))

    for epoch in run.epochs(model=model, optimizer=optimizer, z=z_all, s=s_all):
        for x, z, idx in run.batches(data.train):
            z, s = z_all[idx].clamp(min=-1), s_all[idx]  # new vs an.py
            with run.autocast():
                logits = model(x)
            positive, unknown, pseudo = em_apl_terms(logits.float(), z, s, args.alpha, args.beta)
            loss = positive + unknown + pseudo
            run.step(loss, optimizer)
            run.log(loss=loss, loss_positive=positive, loss_unknown=unknown, loss_pseudo=pseudo)
            if data.train.y is not None:  # the paper's Fig. 7
                y, hidden, size = data.train.y[idx], data.train.z[idx] == 0, logits.detach().abs()
                mean = lambda where: (size * where).sum() / where.sum()  # noqa: B023
                run.log(logit_positives=mean(hidden & (y == 1)), logit_negatives=mean(hidden & (y == 0)))
        if args.apl and args.warmup <= epoch < args.epochs:  # new vs an.py: Algorithm 1, line 4
            p = run.predict(model, data.train).sigmoid()
            chosen = select_pseudo_negatives(p, z_all, quota)
            highest = select_pseudo_negatives(-p, z_all.masked_fill(chosen, -1), pos_quota)
            s_all[chosen] = 0 if args.hard else p[chosen]
            s_all[highest] = p[highest]
            z_all[chosen], z_all[highest] = -1, -2
        run.log(negatives_per_image=(z_all == -1).sum() / len(z_all))
        if data.train.y is not None and (z_all == -1).any():
            correct, by_chance, at_best = quality(z_all == -1, data.train.y == 0, data.train.z == 0)
            run.log(pseudo_correct=correct, pseudo_by_chance=by_chance, pseudo_at_best=at_best)
            if args.pos_theta:  # the paper's Table 7
                run.log(pseudo_positives_correct=quality(z_all == -2, data.train.y == 1, data.train.z == 0)[0])
        run.evaluate(model, data)
